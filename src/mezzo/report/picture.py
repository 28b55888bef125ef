"""Loss, metric and loss scale of a comparison as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo import files
from mezzo.errors import require_extra
from mezzo.recipes.run_directory import CURVES
from mezzo.report.run import Run, read
from mezzo.report.table import seed_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curves", "require_matplotlib", "smooth"]

#: Okabe and Ito's palette, distinguishable with every common colour blindness, less black (the reference)
#: and yellow (too faint for a line on white). Source: https://jfly.uni-koeln.de/color/
_COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
_GREY = "#555555"
#: A second code beside colour, for print and for lines that lie on one another: one style per level.
_STYLES = {"O0": "-", "O1": "-", "O2": (0, (5, 2)), "O3": (0, (1, 1.5))}


def require_matplotlib() -> None:
    """Fail now rather than after a training if pictures cannot be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require_extra("report", "drawing curves needs matplotlib", "matplotlib.figure")


def curves(run_directory: Path | str) -> Path:
    """Draw loss, metric and loss scale of every policy of a run into its ``curves.png``.

    Args:
        run_directory: What ``mezzo compare --out`` wrote.

    Returns:
        The path of the picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
        PolicyError: There is no run in the directory.
        StateError: It is not whole, cannot be read, or another version wrote it.

    **Cost**: about a second; nothing of matplotlib's global state is touched.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = read(run_directory)
    figure = Figure(figsize=(9.0, 8.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    loss, metric, scale = figure.subplots(3, 1, sharex=True, height_ratios=(3.0, 2.2, 1.5))
    _draw_loss(loss, run)
    _draw_metric(metric, run)
    _draw_scale(scale, run)
    scale.set_xlabel("step")
    for axes in (loss, metric, scale):
        axes.grid(True, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    summary = run.summary
    machine = summary["machine"]
    title = f"{summary['recipe']}: {summary['steps']} steps under each policy, same weights, same batches"
    loss.set_title(title, fontsize=12, loc="left", pad=20)
    device = machine.get("gpu", machine["cpu"])
    subtitle = f"{device}{seed_text(summary)} · torch {machine['torch']} · {summary['date'][:10]}"
    loss.text(0.0, 1.02, subtitle, transform=loss.transAxes, fontsize=8, color=_GREY)
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path = run.path / CURVES
    with files.whole(path) as file:
        figure.savefig(file, format="png")
    return path


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Average each value with those before it, weights falling by a factor of e every ``span`` values.

    The average is exact from the first value on (no pull towards zero). A value that is not finite is NaN in
    the result, so that a line breaks there, and does not spoil what follows.

    Args:
        values: A series.
        span: In values; 0 or less returns the values as they are, non-finite ones as NaN.

    Example:
        >>> smooth([4.0, 4.0, float("inf"), 4.0], span=2)
        [4.0, 4.0, nan, 4.0]
    """
    keep = math.exp(-1.0 / span) if span > 0 else 0.0
    total = weight = 0.0
    smoothed = []
    for value in values:
        if not math.isfinite(value):
            smoothed.append(math.nan)
            continue
        total, weight = keep * total + value, keep * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def _draw_loss(axes: Axes, run: Run) -> None:
    longest = max((len(series.step) for series in run.series.values()), default=0)
    span = longest // 60
    smallest, largest = math.inf, 0.0
    for (policy, series), style in zip(run.series.items(), _looks(run), strict=True):
        line = smooth(series.loss, span)
        finite = [value for value in line if math.isfinite(value)]
        smallest, largest = min([smallest, *finite]), max([largest, *finite])
        axes.plot(series.step, line, label=policy, **style)
        bad = [i for i, value in enumerate(series.loss) if not math.isfinite(value)]
        if bad and bad[0] > 0:
            at = bad[0] - 1
            mark = style | {"linestyle": "none", "marker": "X", "markersize": 9}
            axes.plot(series.step[at], line[at], **mark)
            axes.annotate(
                f"not finite from step {series.step[bad[0]]}",
                (series.step[at], line[at]),
                textcoords="offset points",
                xytext=(8, 4),
                fontsize=8,
                color=style["color"],
            )
    if 0.0 < 10.0 * smallest <= largest:  # within a decade a logarithm only makes the numbers odd
        axes.set_yscale("log")
    axes.set_ylabel("training loss (nats)" + (f"\n(mean over ≈{span} steps)" if span > 1 else ""))


def _draw_metric(axes: Axes, run: Run) -> None:
    metric = run.summary["metric"]
    for series, style in zip(run.series.values(), _looks(run), strict=True):
        axes.plot(series.evaluated, series.metric, marker="o", markersize=3.5, **style)
    for name, value in run.summary["references"].items():
        shown = [number for series in run.series.values() for number in series.metric if math.isfinite(number)]
        # A reference far outside of what was reached would squeeze the curves into a line.
        if shown and min(shown) <= float(value) <= max(shown):
            axes.axhline(float(value), color="#777777", linewidth=1.0, linestyle=(0, (2, 3)))
            axes.annotate(
                name,
                (1.0, float(value)),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color=_GREY,
            )
    axes.set_ylabel(f"{metric['name']} ({metric['unit']})")


def _draw_scale(axes: Axes, run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    unscaled = []
    for (policy, series), style in zip(run.series.items(), _looks(run), strict=True):
        if all(value == 1.0 for value in series.scale):
            unscaled.append(policy)
            continue
        exponents = [math.log2(value) if value > 0 else math.nan for value in series.scale]
        axes.step(series.step, exponents, where="mid", **style)
        at = [i for i, skipped in enumerate(series.skipped) if skipped]
        mark = style | {"linestyle": "none", "marker": "x", "markersize": 5}
        axes.plot([series.step[i] for i in at], [exponents[i] for i in at], **mark)
    axes.set_ylabel("log₂ of loss scale\n(× skipped step)")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.margins(y=0.15)
    if unscaled:
        axes.set_title(f"loss not scaled: {';  '.join(unscaled)}", fontsize=8, color=_GREY, loc="left")


def _looks(run: Run) -> list[dict[str, Any]]:
    """Return one line style per policy: black for the reference, else a colour and the level's dashes."""
    colours = itertools.cycle(_COLOURS)
    return [
        {"color": "black", "linestyle": "-", "linewidth": 2.2}
        if policy == run.summary["reference"]
        else {"color": next(colours), "linestyle": _STYLES.get(policy[:2], "-"), "linewidth": 1.6}
        for policy in run.series
    ]
