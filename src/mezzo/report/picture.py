"""Loss and loss scale of a comparison as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.errors import require_extra
from mezzo.files import whole
from mezzo.report.verdict import short
from mezzo.script.comparison import Comparison, Run

__all__ = ["differences_of", "draw_curves", "look", "losses_of", "require_report", "smooth"]

#: Okabe and Ito's palette, distinguishable with every common colour blindness, less black (FP32) and yellow (too faint
#: for a line on white). Source: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")


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


def losses_of(run: Run) -> list[float]:
    """Return a run's losses, smoothed."""
    return smooth(run.losses, len(run.losses) // 60)


def differences_of(comparison: Comparison, run: Run) -> list[float]:
    """Return its smoothed losses less FP32's with the same seed, as far as both go."""
    base = next((each for each in comparison.of("O0") if each.seed == run.seed), None)
    return (
        [] if base is None else [mine - theirs for mine, theirs in zip(losses_of(run), losses_of(base), strict=False)]
    )


def look(place: int) -> tuple[str, bool]:
    """Return the colour of a policy's lines, and whether they are dashed: beyond the palette they are."""
    return ("black", False) if place == 0 else (COLOURS[(place - 1) % len(COLOURS)], place > len(COLOURS))


def draw_curves(comparison: Comparison, path: Path) -> None:
    """Draw the loss of each run, what it is beside FP32's, and the loss scale where it moves; a colour a policy.

    **Cost**: about a second; nothing of matplotlib's global state is touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    does_move = any(len(set(run.scales)) > 1 for run in comparison.runs)
    figure = Figure(figsize=(9.0, 7.6 if does_move else 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 + does_move, 1, sharex=True, height_ratios=(2.4, 1.3, 1.1)[: 2 + does_move])
    losses, differences = axes[:2]
    smallest, largest = math.inf, 0.0
    for place, policy in enumerate(comparison.policies):
        colour, is_dashed = look(place)
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if is_dashed else "-", "linewidth": 1.3}
        for number, run in enumerate(comparison.of(policy)):
            line = losses_of(run)
            finite = [value for value in line if math.isfinite(value)]
            smallest, largest = min([smallest, *finite]), max([largest, *finite])
            losses.plot(range(1, len(line) + 1), line, label=short(policy) if number == 0 else None, **style)
            beside = differences_of(comparison, run)
            differences.plot(range(1, len(beside) + 1), beside, **style)
            if len(set(run.scales)) > 1:
                exponents = [math.log2(scale) if scale > 0 else math.nan for scale in run.scales]
                axes[2].step(range(1, len(exponents) + 1), exponents, where="mid", **style)
    if 0.0 < 10.0 * smallest <= largest:  # within a decade a logarithm only makes the numbers odd
        losses.set_yscale("log")
    device = comparison.machine.get("gpu", comparison.machine["cpu"])
    where = f"{device} · torch {comparison.machine['torch']} · {comparison.date[:10]}"
    losses.set_title(f"{comparison.script}: a line is one run", fontsize=11, loc="left")
    for panel, label in zip(axes, ("training loss, smoothed", "loss − FP32's", "log₂ of loss scale"), strict=False):
        panel.set_ylabel(label)
        panel.grid(True, color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"step          {where}")
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    with whole(path) as file:
        figure.savefig(file, format="png")
