"""The picture of a comparison: a line a run, a colour a policy, and honest about what is not finite."""

import math

import pytest
import torch

from mezzo.numerics import Recorder, exponent_histogram
from mezzo.report import draw_curves
from mezzo.report.page import draw, draw_statistics, shares, smooth


@pytest.fixture
def axes(monkeypatch, tmp_path):
    """Draw, and return what is on the figure instead of a file."""
    kept = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *args, **kwargs: kept.append(self))

    def drawn(comparison):
        draw_curves(comparison, tmp_path / "curves.png")
        return kept[-1].axes

    return drawn


def test_the_picture_is_a_legible_png(compared, tmp_path):
    draw_curves(compared(O0=[1.0, 1.0], O1=[1.0, 1.0]), tmp_path / "curves.png")
    data = (tmp_path / "curves.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width >= 1000
    assert height >= 700


def test_each_policy_has_a_colour_and_each_run_a_line(compared, axes):
    losses = axes(compared(O0=[1.0, 1.0], O1=[1.0, 1.0], O2=[1.0, 1.0]))[0]
    lines = losses.get_lines()
    assert [line.get_label() for line in lines[::2]] == ["O0", "O1", "O2"]
    assert [line.get_color() for line in lines] == [colour for line in lines[::2] for colour in [line.get_color()] * 2]
    assert len({line.get_color() for line in lines}) == 3
    assert list(lines[0].get_ydata()) == [1 / step for step in range(1, 11)]  # too few to smooth
    assert losses.get_title(loc="left").startswith("train.py --epochs 3")


def test_only_scales_that_move_are_drawn(compared, run_of, axes):
    moving = run_of(1.0, scales=(65536.0,) * 5 + (32768.0,) * 5)
    assert len(axes(compared(O0=1.0, O1=1.0))) == 2
    (line,) = axes(compared(O0=1.0, O1=moving))[2].get_lines()
    assert list(line.get_ydata()) == [16.0] * 5 + [15.0] * 5


def test_each_run_stands_beside_fp32_with_its_seed_as_far_as_both_go(compared, run_of, axes):
    low = [run_of(1.0, losses=(1.5, 0.75)), run_of(1.0, losses=(1.0, 0.5))]
    other = run_of(1.0, losses=(2.0, 1.0))
    differences = axes(compared(O0=[1.0, other], O1=low))[1]
    curves = [list(line.get_ydata()) for line in differences.get_lines()]
    assert curves == [[0.0] * 10, [0.0, 0.0], [0.5, 0.25], [-1.0, -0.5]]


def test_a_line_breaks_where_its_loss_is_not_finite(compared, run_of, axes):
    losses = (1.0, math.inf, math.nan, 2.0)
    line = axes(compared(O0=1.0, O1=run_of(1.0, losses=losses)))[0].get_lines()[1]
    assert [math.isnan(value) for value in line.get_ydata()] == [False, True, True, False]


def test_losses_without_a_logarithm_are_drawn_all_the_same(compared, run_of, axes):
    for losses in ((), (math.nan,) * 3, (0.0, 0.0), (-1.0, 5.0)):
        axis = axes(compared(O0=run_of(1.0, losses=losses, scales=(0.0,) * len(losses))))[0]
        assert axis.get_yscale() == "linear", losses


def test_smooth_is_the_exact_weighted_mean():
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    for at, value in enumerate(smooth(values, span=2)):
        weights = [math.exp(-(at - i) / 2) for i in range(at + 1)]
        assert value == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))


def test_shares_are_of_all_values(tmp_path):
    values = torch.tensor([0.0] * 6 + [math.nan, 1.0, 1.5, 2.0])
    assert shares(exponent_histogram(values)) == {0: 0.2, 1: 0.1}
    model = torch.nn.Linear(2, 2)
    with Recorder(model) as recorder:
        model(torch.ones(1, 2)).sum().backward()
        recorder.step()
    draw(recorder.evidence, tmp_path / "histograms.png")
    assert (tmp_path / "histograms.png").read_bytes()[:4] == b"\x89PNG"
    draw_statistics(tmp_path / "statistics.png", recorder.evidence.statistics())
    assert (tmp_path / "statistics.png").read_bytes()[:4] == b"\x89PNG"
