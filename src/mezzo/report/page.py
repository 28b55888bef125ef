"""A comparison as pictures, and as one HTML file that opens without a network."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from mezzo.errors import require_extra
from mezzo.explanation.rows import format_text
from mezzo.files import atomic_file
from mezzo.formats import BF16, E4M3, E5M2, FP16, Format
from mezzo.numerics import KINDS, Evidence, ExponentHistogram
from mezzo.report.verdict import cells, operand_cells, short, verdict
from mezzo.script.comparison import Comparison, Run
from mezzo.trace.function_calls import MODEL
from mezzo.trace.observe import BINS, FIRST

# Where the values of a run lie: one picture of evidence, the share of values in each power of two.

_FORMATS: Final = ((FP16, "tab:red"), (BF16, "tab:blue"), (E4M3, "tab:olive"), (E5M2, "tab:purple"))
#: The exponents that a picture shows at least.
_USUAL: Final = (-40, 18)


def require_matplotlib() -> None:
    """Refuse to draw where that is not installed, before minutes of work.

    Raises:
        UnsupportedError: It is not.
    """
    require_extra("report", "pictures need matplotlib", "matplotlib.figure")


def shares(histogram: ExponentHistogram) -> dict[int, float]:
    """Return the share of all values that lies in each power of two, zeros and what is not finite among the whole."""
    counts = {exponent: histogram.count(exponent) for exponent in range(FIRST, FIRST + BINS)}
    return {exponent: count / histogram.total for exponent, count in counts.items() if count}


def draw(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Draw the share of values in each power of two, a row for each kind, with the limits of the formats.

    Args:
        evidence: What was recorded; its steps are summed.
        path: The picture, ``.png`` or another ending that matplotlib knows.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: It cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tensors = [tensor for step in evidence.steps for tensor in step.tensors]
    histograms = {
        tensor_kind: [tensor.histogram for tensor in tensors if tensor.kind == tensor_kind] for tensor_kind in KINDS
    }
    kinds = [tensor_kind for tensor_kind in KINDS if histograms[tensor_kind]]
    figure = Figure(figsize=(10, 1.0 + 1.5 * max(1, len(kinds))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(kinds)), 1, sharex=True, squeeze=False)[:, 0]
    low, high = _USUAL
    for axis, tensor_kind in zip(axes, kinds, strict=False):
        histogram = ExponentHistogram.total_of(histograms[tensor_kind])
        exponents = shares(histogram)
        axis.bar(list(exponents), list(exponents.values()), width=0.9, color="tab:gray")
        zeros = histogram.zeros / histogram.total if histogram.total else 0.0
        title = f"{tensor_kind.replace('_', ' ')} (zero: {zeros:.1%})".replace("%", " %")
        axis.set_title(title, loc="left", fontsize=9)
        low, high = min([low, *exponents]), max([high, *exponents])
        _limits(axis)
    axes[0].legend(loc="upper right", fontsize=7, ncols=len(_FORMATS))
    axes[-1].set_xlim(low - 1, high + 1)
    axes[-1].set_xlabel("power of two of |x|; solid: a format's normal range, dotted: its smallest number")
    figure.savefig(Path(path), dpi=110)


def draw_statistics(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Draw the largest magnitude of each module in each step, a picture for each kind.

    Args:
        path: The picture, ``.png`` or another ending that matplotlib knows.
        rows: What :meth:`mezzo.numerics.Evidence.statistics` yields, or the lines of its file.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: It cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_kind: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        exponent = math.log2(row["largest"]) if row["largest"] else math.nan
        by_kind.setdefault(row["kind"], {}).setdefault(row["module"] or MODEL, {})[row["step"]] = exponent
    kinds = [tensor_kind for tensor_kind in KINDS if tensor_kind in by_kind]
    heights = [max(1.0, 0.15 * len(by_kind[tensor_kind])) for tensor_kind in kinds] or [1.0]
    figure = Figure(figsize=(10, 1.0 + sum(heights) + 0.5 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, tensor_kind in zip(axes, kinds, strict=False):
        levels = by_kind[tensor_kind]
        steps = sorted({step for by_step in levels.values() for step in by_step})
        numbers = [[by_step.get(step, math.nan) for step in steps] for by_step in levels.values()]
        image = axis.imshow(numbers, aspect="auto", interpolation="nearest", cmap="viridis")
        figure.colorbar(image, ax=axis)
        axis.set_title(f"{tensor_kind.replace('_', ' ')}: log₂ of the largest |x|", loc="left", fontsize=9)
        axis.set_yticks(range(len(levels)), list(levels), fontsize=6)
        shown = range(0, len(steps), 1 + len(steps) // 12)
        axis.set_xticks(shown, [steps[index] for index in shown], fontsize=7)
    axes[-1].set_xlabel("step")
    figure.savefig(Path(path), dpi=110)


def _limits(axis: Any) -> None:
    for target, colour in _FORMATS:
        for number, (exponent, style) in enumerate(_range_limits(target)):
            label = format_text([target.name]) if number == 0 else None
            axis.axvline(exponent - 0.5, color=colour, linestyle=style, linewidth=1, label=label)


def _range_limits(target: Format) -> tuple[tuple[int, str], ...]:
    """Return the powers of two at which a format begins to lose: its largest number's end, normal numbers, all."""
    normal = math.frexp(target.smallest_normal)[1] - 1
    return (math.frexp(target.max)[1], "-"), (normal, "-"), (normal - target.mantissa_bits, ":")


# Loss and loss scale of a comparison as a picture.

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
    base = next((reference for reference in comparison.of("O0") if reference.seed == run.seed), None)
    return (
        [] if base is None else [mine - theirs for mine, theirs in zip(losses_of(run), losses_of(base), strict=False)]
    )


def look(index: int) -> tuple[str, bool]:
    """Return the colour of a policy's lines, and whether they are dashed: beyond the palette they are."""
    return ("black", False) if index == 0 else (COLOURS[(index - 1) % len(COLOURS)], index > len(COLOURS))


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
    for index, policy in enumerate(comparison.policies):
        colour, is_dashed = look(index)
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if is_dashed else "-", "linewidth": 1.3}
        for number, run in enumerate(comparison.of(policy)):
            line = losses_of(run)
            finite = [value for value in line if math.isfinite(value)]
            smallest, largest = min([smallest, *finite]), max([largest, *finite])
            losses.plot(range(1, len(line) + 1), line, label=short(policy) if number == 0 else None, **style)
            difference_line = differences_of(comparison, run)
            differences.plot(range(1, len(difference_line) + 1), difference_line, **style)
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
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def write_page(comparison: Comparison, path: Path) -> None:
    """Write verdict, table and curves; five megabytes, of which all but a few are plotly's own.

    **Cost**: about a second.
    """
    import jinja2
    import plotly.io

    heads, rows = cells(comparison, full=True)
    drawn = [
        _figure(comparison, "training loss, smoothed", losses_of),
        _figure(
            comparison, "training loss, smoothed, less FP32's with the same seed", partial(differences_of, comparison)
        ),
        _figure(comparison, "loss scale", lambda run: list(run.scales)),
    ]
    figures = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(drawn)
    ]
    text = files("mezzo.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True).from_string(text)
    tables = [(heads, rows), operand_cells(comparison)]
    page = template.render(comparison=comparison, verdict=verdict(comparison), tables=tables, figures=figures)
    with atomic_file(path) as file:
        file.write(page.encode())


def _figure(comparison: Comparison, title: str, values: Callable[[Run], Sequence[float]]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    shown = [value for run in comparison.runs for value in values(run) if math.isfinite(value)]
    for index, policy in enumerate(comparison.policies):
        colour, is_dashed = look(index)
        for number, run in enumerate(comparison.of(policy)):
            line = [value if math.isfinite(value) else None for value in values(run)]
            figure.add_scatter(
                x=list(range(1, len(line) + 1)),
                y=line,
                mode="lines",
                name=short(policy),
                legendgroup=policy,
                showlegend=number == 0,
                line={"color": colour, "dash": "dash" if is_dashed else "solid", "width": 1.5},
                hovertemplate=f"%{{y:.5g}}, step %{{x}}, seed {run.seed}" if run.seed is not None else None,
            )
    wide = bool(shown) and 0 < 10 * min(shown) <= max(shown)
    figure.update_layout(
        template="plotly_white", title=title, height=420, xaxis_title="step", legend={"orientation": "h", "y": -0.2}
    )
    figure.update_yaxes(type="log" if wide else "linear")
    return figure
