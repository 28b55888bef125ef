"""digits_ssd: canvases of disjoint images, the loss by hand, suppression, and the mAP."""

import types

import pytest
import torch
from torch import nn


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("digits_ssd")


def overlap_of(a, b):
    """Intersection over union by counting pixels of whole numbers."""
    inside = [
        {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))} for box in (a, b)
    ]
    return len(inside[0] & inside[1]) / max(1, len(inside[0] | inside[1]))


def draw_boxes(number, generator):
    corner, size = (torch.randint(1, 12, (number, 2), generator=generator) for _ in range(2))
    return torch.cat([corner, corner + size], 1).float()


def test_a_canvas_shows_each_digit_in_its_box_and_no_held_out_image_is_trained_on(script, monkeypatch):
    pixels = torch.arange(1797.0).add(1000).view(-1, 1, 1).expand(-1, 8, 8)  # an image is known by its level
    known = types.SimpleNamespace(images=16 * pixels.double().numpy(), target=(torch.arange(1797) % 10).numpy())
    monkeypatch.setattr(script, "load_digits", lambda: known)
    seen = {}
    for held_out in (False, True):
        canvases, boxes, classes = script.draw(200, held_out)
        assert set((classes > 0).sum(1).tolist()) == {1, 2, 3, 4}
        levels = seen[held_out] = set()
        for canvas, box, cls in zip(canvases, boxes.int().tolist(), classes.tolist(), strict=True):
            for (x, y, right, bottom), name in zip(box, cls, strict=True):
                level = canvas[0, y:bottom, x:right].median().round() if name else 0
                canvas[0, y:bottom, x:right] -= level
                assert not name or (
                    name == (int(level) - 1000) % 10 + 1 and {right - x, bottom - y} <= {*range(12, 25)}
                )
                levels.add(int(level))
            assert canvas.abs().max() < 1.0  # nothing but noise is left
    assert seen[False] & seen[True] == {0}


def test_the_loss_by_hand_counts_three_hard_negatives_for_a_positive(script):
    anchors = torch.tensor([[10.0 * i, 0, 10 * i + 8, 8] for i in range(7)])
    boxes, classes = torch.tensor([[[2.0, 0, 10, 8]], [[0.0, 0, 8, 8]]]), torch.tensor([[4], [1]])
    surprise = torch.tensor([[9.0, 0.5, 3.0, 2.0, 0.1, 2.5, 0.2], [0.0, 1.0, 4.0, 3.0, 2.0, 0.3, 0.4]])  # in scores
    scores = torch.zeros(2, 7, 11)
    scores[:, :, 5] = surprise  # which is nowhere right
    naming = -scores.log_softmax(2)
    wanted = naming[0, 0, 4] + naming[0, [2, 5, 3], 0].sum() + naming[1, 0, 1] + naming[1, [2, 3, 4], 0].sum()
    misplaced = 2 * 0.5 * (2 / script.UNIT) ** 2  # two corners lie two pixels off, below the kink of the loss
    loss = script.detection_loss(scores, torch.zeros(2, 7, 4), boxes, classes, anchors)
    assert loss.item() == pytest.approx((wanted.item() + misplaced) / 2, rel=1e-6)


def test_detection_gives_back_what_matching_asks_for_and_suppresses_what_overlaps_a_surer_one(script):
    anchors = script.make_anchors()
    boxes, classes = torch.tensor([[[3.0, 4, 18, 16], [25, 25, 47, 48]]]), torch.tensor([[7, 2]])
    cls, box = script.match(boxes, classes, anchors)
    of_seven = (cls[0] == 7).nonzero()[:, 0]
    assert len(of_seven) > 1
    scores = 9.0 * nn.functional.one_hot(cls, 11).float()
    scores[0, of_seven[1]] = 10.0 * nn.functional.one_hot(torch.tensor(3), 11)  # surer, of another class
    kept, score, corners = script.detect(scores, (box - anchors) / script.UNIT, anchors)
    named = (score > 0.5) & (kept > 0)
    assert kept[named].tolist() == [3, 2]
    assert torch.allclose(corners[named], boxes[0], atol=1e-4)
    assert score[0].tolist() == sorted(score[0].tolist(), reverse=True)


def plain_mean_average_precision(detections, digits):
    """VOC 2010 in plain loops; detections: canvas, class, score, box; digits: canvas, class, box."""
    results = []
    for name in {digit[1] for digit in digits}:
        taken, right, curve = set(), 0, []
        ranked = sorted((d for d in detections if d[1] == name), key=lambda d: -d[2])
        wanted = [i for i, digit in enumerate(digits) if digit[1] == name]
        for rank, (canvas, _, _, box) in enumerate(ranked, 1):
            there = [(overlap_of(box, digits[i][2]), i) for i in wanted if digits[i][0] == canvas]
            overlap, best = max(there, default=(0.0, None), key=lambda pair: pair[0])
            if overlap >= 0.5 and best not in taken:
                taken.add(best)
                right += 1
            curve.append((right / len(wanted), right / rank))
        area, before = 0.0, 0.0
        for i, (recall, _) in enumerate(curve):
            area += (recall - before) * max(precision for _, precision in curve[i:])
            before = recall
        results.append(area)
    return sum(results) / len(results)


def test_map_agrees_with_plain_loops(script):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        boxes = draw_boxes(4 * 6, generator).view(6, 4, 4)
        classes = torch.randint(4, (6, 4), generator=generator)
        bases = boxes[:, torch.randint(4, (9,), generator=generator)]
        found_boxes = bases + torch.randint(-1, 2, bases.shape, generator=generator)
        kept = torch.randint(4, (6, 9), generator=generator)
        score = torch.rand(6, 9, generator=generator).sort(1, descending=True).values
        detections = [
            (i, int(kept[i, k]), float(score[i, k]), found_boxes[i, k].tolist()) for i in range(6) for k in range(9)
        ]
        digits = [(i, int(classes[i, k]), boxes[i, k].tolist()) for i in range(6) for k in range(4) if classes[i, k]]
        wanted = plain_mean_average_precision(detections, digits)
        assert script.mean_average_precision(kept, score, found_boxes, classes, boxes) == pytest.approx(wanted)
