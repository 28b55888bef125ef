"""The picture of a comparison: drawn from the files, labelled, and honest about what is not finite."""

import json
import math
import shutil
import sys

import pytest

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.report import curves, require_matplotlib
from mezzo.report.picture import smooth

from ..distributed.ranks import on_ranks


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "copy")


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved while the test runs."""
    saved = []

    def savefig(self, *args, **kwargs):
        saved.append(self)
        self.draw_without_rendering()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    return saved


def edit(run, change):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps(change(record)) for record in records)
    (run / "metrics.jsonl").write_text(text + "\n")


def test_the_picture_is_a_png_of_a_legible_size_and_nothing_else_is_left(run):
    path = curves(run)
    assert path == run / "curves.png"
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width >= 1000
    assert height >= 900
    assert sorted(child.name for child in run.iterdir()) == ["curves.png", "metrics.jsonl", "summary.json"]


def test_axes_are_labelled_with_units_and_the_title_says_what_it_is(run, figures):
    curves(run)
    loss, metric, scale = figures[0].axes
    assert loss.get_ylabel().startswith("training loss (nats)")
    assert metric.get_ylabel() == "test accuracy (%)"
    assert scale.get_ylabel().startswith("log₂ of loss scale")
    assert scale.get_xlabel() == "step"
    title = loss.get_title(loc="left")
    assert "digits-cnn" in title
    assert "12 steps" in title
    summary = json.loads((run / "summary.json").read_text())
    below = " ".join(text.get_text() for text in loss.texts)
    assert summary["date"][:10] in below
    assert summary["machine"]["torch"] in below
    assert summary["machine"]["cpu"] in below


def test_every_policy_has_its_own_look_and_the_reference_is_black(run, figures):
    curves(run)
    loss = figures[0].axes[0]
    lines = [line for line in loss.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"]
    assert lines[0].get_color() == "black"
    assert len({line.get_color() for line in lines}) == 3
    assert lines[1].get_linestyle() != lines[2].get_linestyle()


def test_the_legend_covers_no_data(run, figures):
    curves(run)
    (legend,) = figures[0].legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figures[0].axes)
    assert [text.get_text() for text in legend.get_texts()] == ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"]


def test_the_curves_are_the_numbers_of_the_files(run, figures):
    curves(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mine = [record for record in records if record["policy"] == "O0"]
    loss, metric, _ = figures[0].axes
    # 12 steps are too few to smooth
    assert list(loss.get_lines()[0].get_ydata()) == [record["loss"] for record in mine]
    shown = metric.get_lines()[0]
    assert list(shown.get_xdata()) == [r["step"] for r in mine if r["metric"] is not None]
    assert list(shown.get_ydata()) == [r["metric"] for r in mine if r["metric"] is not None]


def test_only_scaled_policies_are_drawn_in_the_scale_panel_with_their_skipped_steps(run, figures):
    def change(record):
        if record["policy"] != "O1,dtype=float16":
            return record
        return record | {"scale": 2.0 ** (16 - min(record["step"], 3)), "skipped": record["step"] <= 2}

    edit(run, change)
    curves(run)
    scale = figures[0].axes[2]
    line, skipped = scale.get_lines()
    assert list(line.get_ydata()) == [15, 14] + [13] * 10
    assert list(skipped.get_xdata()) == [1, 2]
    assert list(skipped.get_ydata()) == [15, 14]
    assert scale.get_title(loc="left") == "loss not scaled: O0;  O2,dtype=bfloat16"


def test_where_a_loss_stops_being_finite_is_marked(run, figures):
    edit(run, lambda r: r | {"loss": "nan"} if r["policy"] == "O2,dtype=bfloat16" and r["step"] >= 5 else r)
    curves(run)
    loss = figures[0].axes[0]
    assert "not finite from step 5" in [text.get_text() for text in loss.texts]
    line = next(line for line in loss.get_lines() if line.get_label() == "O2,dtype=bfloat16")
    assert [math.isnan(value) for value in line.get_ydata()] == [False] * 4 + [True] * 8


@pytest.mark.parametrize("value", ["nan", "inf", 0.0, -1.0])
def test_losses_that_no_logarithm_can_show_are_drawn_all_the_same(run, value):
    edit(run, lambda record: record | {"loss": value, "scale": 0.0})
    assert curves(run).exists()


@pytest.mark.parametrize("last, scale", [(0.05, "log"), (0.6, "linear"), (0.0, "linear"), (-1.0, "linear")])
def test_the_loss_is_logarithmic_where_it_falls_by_a_decade(run, figures, last, scale):
    edit(run, lambda record: record | {"loss": 2.0 if record["step"] == 1 else last})
    curves(run)
    assert figures[0].axes[0].get_yscale() == scale


def test_an_interrupted_run_without_steps_is_drawn(run):
    (run / "metrics.jsonl").write_text("")
    assert curves(run).exists()


def test_a_failed_drawing_leaves_the_old_picture(run, monkeypatch):
    curves(run)
    before = (run / "curves.png").read_bytes()

    def fail(self, file, **kwargs):
        file.write(b"half a pic")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        curves(run)
    assert (run / "curves.png").read_bytes() == before


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="there is no finished run here"):
        curves(tmp_path)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError) as error:
        require_matplotlib()
    assert str(error.value).startswith("drawing curves needs matplotlib\n  why    ")
    assert str(error.value).endswith('\n  write  pip install "jinja2>=3.1" "matplotlib>=3.9" "plotly>=6.0"')


def test_drawing_uses_no_global_state_of_matplotlib(run):
    """pyplot would keep figures alive and open a window where there is a screen."""
    assert on_ranks(1, drawn_alone, run, backend=None) == [(set(), set())]


def drawn_alone(run):
    """In a process of its own: what is imported before a picture is drawn, and of what must never be."""
    before = {"matplotlib"} & sys.modules.keys()
    curves(run)
    return before, {"matplotlib.pyplot"} & sys.modules.keys()


def test_smooth_is_the_exact_weighted_mean():
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    for at, value in enumerate(smooth(values, span=2)):
        weights = [math.exp(-(at - i) / 2) for i in range(at + 1)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert value == pytest.approx(mean)


def test_smooth_without_a_span_changes_nothing_but_infinities():
    smoothed = smooth([1.0, math.inf, 2.0, math.nan, 3.0], span=0)
    assert smoothed[::2] == [1.0, 2.0, 3.0]
    assert all(math.isnan(value) for value in smoothed[1::2])
