"""The detector behind the classic histogram trains, and the committed figures follow from the counts beside them."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import figures

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULT = json.loads(sorted((FOLDER / "results").glob("figures-cpu-*.json"))[-1].read_text())


def brute_overlap(one, other):
    """Intersection over union of two boxes, in a fine grid of points."""
    grid = (np.arange(400) + 0.5) / 400 * 2 - 0.5
    x, y = np.meshgrid(grid, grid)
    inside = [(x > a) & (x < c) & (y > b) & (y < d) for a, b, c, d in (one, other)]
    return (inside[0] & inside[1]).sum() / (inside[0] | inside[1]).sum()


def test_overlap_is_the_share_of_a_grid():
    one = figures.corners(torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.2, 0.3, 0.3, 0.5]]))
    other = figures.corners(torch.tensor([[0.6, 0.5, 0.4, 0.4], [0.9, 0.9, 0.1, 0.1]]))
    found = figures.overlap(one, other)
    for i, j in np.ndindex(2, 2):
        assert found[i, j].item() == pytest.approx(brute_overlap(one[i].tolist(), other[j].tolist()), abs=0.02)


def test_every_digit_has_a_box_and_offsets_lead_back_to_it():
    images, labels = torch.ones(3, 8, 8), torch.tensor([4, 7, 9])
    pixels, classes, offsets = figures.canvases(images, labels, 4, torch.Generator().manual_seed(0))
    boxes = figures.default_boxes()
    assert classes.shape == (4, len(boxes)) == (4, 2 * 16 * 16 + 2 * 8 * 8)
    assert set(classes.unique().tolist()) <= {0, 5, 8, 10}
    for row in range(4):
        taken = classes[row] > 0
        assert taken.any()
        centre = boxes[taken, :2] + offsets[row, taken, :2] * boxes[taken, 2:]
        size = boxes[taken, 2:] * offsets[row, taken, 2:].exp()
        truth = (figures.corners(torch.cat([centre, size], -1)) * figures.SIZE).round().long()
        for left, top, right, bottom in truth.tolist():  # all of a digit is light here
            assert pixels[row, 0, top:bottom, left:right].min() > 0.99


def test_the_loss_counts_three_hard_negatives_for_each_digit():
    classes = torch.tensor([[3, 0, 0, 0, 0, 0]])
    scores = torch.zeros(1, 6, figures.CLASSES)
    scores[0, 1:, 0] = torch.tensor([0.0, 5.0, 1.0, 6.0, 2.0])  # the hardest are those that doubt most: 0, 1 and 2
    offsets = torch.zeros(1, 6, 4)
    negatives = -torch.log_softmax(scores[0, [1, 3, 5]], -1)[:, 0].sum()
    expected = negatives - torch.log_softmax(scores[0, 0], -1)[3] + 4 * 0.5 * 0.5**2
    assert figures.multibox_loss(scores, offsets + 0.5, classes, offsets).item() == pytest.approx(expected.item())


def test_it_trains_and_records_every_layer():
    recorder, losses = figures.trained(steps=1, recorded=1, batch=1)
    assert len(losses) == 2
    assert RESULT["losses"][1] < RESULT["losses"][0] / 4
    found = {each.module for each in recorder.evidence.steps[0].tensors}
    assert found == set(figures._layers(figures.Detector()))
    histogram = recorder.histogram("activation_gradients", step="all")
    assert histogram.zeros > histogram.total / 4


def test_the_committed_shares_follow_from_the_committed_counts():
    """Limits of FP16 at these scales are edges of binades, up to the rounding of half a subnormal."""
    bins = {int(exponent): count for exponent, count in RESULT["bins"].items()}
    assert RESULT["total"] == RESULT["zeros"] + sum(bins.values())
    for row, shift in zip(RESULT["float16"], (0, 3, 15), strict=True):
        assert row["scale"] == 2.0**shift
        below = [sum(count for exponent, count in bins.items() if exponent + shift < limit) for limit in (-25, -14)]
        # 2^-25 itself goes to zero, and from half a subnormal below 2^-14 on numbers are normal: both are rare.
        assert row["underflow"] == pytest.approx(below[0], rel=1e-3, abs=10)
        assert row["underflow"] + row["subnormal"] == pytest.approx(below[1], rel=1e-3, abs=10)
        assert row["overflow"] == sum(count for exponent, count in bins.items() if exponent + shift >= 16)
    assert RESULT["best_scale"] * RESULT["max_abs"] < 65504 <= 2 * RESULT["best_scale"] * RESULT["max_abs"]


def test_the_picture_is_drawn_from_the_result(tmp_path, monkeypatch, capsys):
    path = figures.draw(RESULT, tmp_path / "new" / "picture.png")
    size = struct.unpack(">II", path.read_bytes()[16:24])
    assert size == (1350, 720)
    monkeypatch.setattr(figures, "PICTURE", path)
    monkeypatch.setattr(figures, "draw", lambda result: result["date"])
    monkeypatch.setattr(sys, "argv", ["figures.py", "--draw"])
    figures.main()
    assert capsys.readouterr().out == f"{RESULT['date']}\n"
