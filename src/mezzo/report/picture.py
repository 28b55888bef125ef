"""Loss and loss scale of a comparison as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.errors import require_extra
from mezzo.files import whole
from mezzo.script.comparison import Comparison

__all__ = ["COLOURS", "draw_curves", "require_report", "smooth"]

#: Okabe and Ito's palette, distinguishable with every common colour blindness, less black (FP32) and yellow (too faint
#: for a line on white). Source: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
_GREY = "#555555"


def require_report() -> None:
    """Fail now rather than after a training if a comparison cannot be shown.

    Raises:
        UnsupportedError: A package of the extra ``report`` is missing.
    """
    require_extra(
        "report",
        "comparing needs matplotlib, plotly, jinja2 and scipy",
        "matplotlib.figure",
        "plotly",
        "jinja2",
        "scipy",
    )


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


def draw_curves(comparison: Comparison, path: Path) -> None:
    """Draw the loss of each run, and its loss scale where that moves, a colour a policy, a line a seed.

    **Cost**: about a second; nothing of matplotlib's global state is touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3.0, 1.3))
    smallest, largest = math.inf, 0.0
    for place, policy in enumerate(comparison.policies):
        look: dict[str, Any] = {
            "color": "black" if place == 0 else COLOURS[(place - 1) % len(COLOURS)],
            "linewidth": 1.3,
        }
        for number, run in enumerate(comparison.of(policy)):
            line = smooth(run.losses, len(run.losses) // 60)
            finite = [value for value in line if math.isfinite(value)]
            smallest, largest = min([smallest, *finite]), max([largest, *finite])
            losses.plot(range(1, len(line) + 1), line, label=policy if number == 0 else None, **look)
            if any(scale != run.scales[0] for scale in run.scales):
                exponents = [math.log2(scale) if scale > 0 else math.nan for scale in run.scales]
                scales.step(range(1, len(exponents) + 1), exponents, where="mid", **look)
    if 0.0 < 10.0 * smallest <= largest:  # within a decade a logarithm only makes the numbers odd
        losses.set_yscale("log")
    losses.set_ylabel("training loss, smoothed")
    losses.set_title(f"{comparison.script}: a line is one run", fontsize=11, loc="left")
    scales.set_ylabel("log₂ of loss scale")
    scales.set_xlabel("step")
    for axes in (losses, scales):
        axes.grid(True, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    device = comparison.machine.get("gpu", comparison.machine["cpu"])
    figure.supxlabel(
        f"{device} · torch {comparison.machine['torch']} · {comparison.date[:10]}", fontsize=8, color=_GREY
    )
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    with whole(path) as file:
        figure.savefig(file, format="png")
