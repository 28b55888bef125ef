"""What a comparison came to: a row a policy, its difference to FP32, what follows from that, and the table."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.rows import byte_text, counted, scale_text, share_text
from mezzo.script.comparison import Comparison, Run

#: The share of intervals that hold the true mean difference.
CONFIDENCE: Final = 0.95
#: The share of FP32's metric that counts as equal where nothing is said.
_MARGIN: Final = 0.01
_DIGITS: Final = 4

Verdict = Literal["reference", "equal", "undecided", "worse", "better", "diverged", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy over all of its runs; ``None`` for what is not known.

    Attributes:
        policy: Its text.
        runs: How many there are.
        verdict: What it comes to beside FP32.
        metric: The mean of the metric over seeds.
        difference: The mean of the differences to FP32 with the same seed.
        interval: Where that mean lies with 95 % confidence, by Student's t; ``None`` for less than two seeds.
        loss: The mean loss of the last tenth of the steps.
        step_ms: The median of the medians of step times, of a run each.
        held_bytes: Weights, gradients, low halves and optimizer state.
        saved_bytes: What was saved for one backward pass.
        peak_bytes: The most that was allocated at a time, on a GPU.
        skipped: Skipped steps of all runs.
        steps: Steps of all runs.
        nonfinite: Losses that were infinite or NaN.
        scale: The last run's loss scale at its end.
        low_share: The least share of products that ran low.
        emulated: Whether products were emulated.
        left_alone: What the policy did not reach, and why, in any run; without what FP32 left alone, too.
    """

    policy: str
    runs: int
    verdict: Verdict
    metric: float | None
    difference: float | None
    interval: tuple[float, float] | None
    loss: float | None
    step_ms: float | None
    held_bytes: int | None
    saved_bytes: int | None
    peak_bytes: int | None
    skipped: int
    steps: int
    nonfinite: int
    scale: float | None
    low_share: float | None
    emulated: bool
    left_alone: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def margin_of(comparison: Comparison) -> float:
    """Return how far from FP32 a policy may be to be called equal."""
    if comparison.margin is not None:
        return comparison.margin
    metrics = [run.metric for run in comparison.of("O0") if run.metric is not None and math.isfinite(run.metric)]
    return _MARGIN * abs(statistics.fmean(metrics)) if metrics else 0.0


def rows(comparison: Comparison) -> list[PolicyRow]:
    """Return a row for each policy that has run, FP32 first."""
    margin = margin_of(comparison)
    return [_row(comparison, policy, margin) for policy in comparison.policies if comparison.of(policy)]


def _row(comparison: Comparison, policy: str, margin: float) -> PolicyRow:
    runs = comparison.of(policy)
    base = {run.seed: run.metric for run in comparison.of("O0")}
    is_judged = not any(map(_diverged, comparison.of("O0")))
    pairs = [(run.metric, base.get(run.seed)) for run in runs]
    differences = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    interval = _interval(differences)

    def least(values: Iterator[Any]) -> Any:
        present = [value for value in values if value is not None]
        return statistics.median_low(present) if present else None

    times = [run.step_ms[1] for run in runs if run.step_ms is not None]
    shares = [run.low_share for run in runs if run.low_share is not None]
    return PolicyRow(
        policy=policy,
        runs=len(runs),
        verdict="reference"
        if policy == "O0"
        else _judged(runs, interval if is_judged else None, margin, comparison.metric.better),
        metric=_mean([run.metric for run in runs]),
        difference=None if policy == "O0" or not differences else statistics.fmean(differences),
        interval=None if policy == "O0" else interval,
        loss=_mean([run.loss for run in runs]),
        step_ms=statistics.median(times) if times else None,
        held_bytes=least(run.held_bytes for run in runs),
        saved_bytes=least(run.saved_bytes for run in runs),
        peak_bytes=least(run.peak_bytes for run in runs),
        skipped=sum(run.skipped for run in runs),
        steps=sum(run.steps for run in runs),
        nonfinite=sum(run.nonfinite for run in runs),
        scale=runs[-1].scale,
        low_share=min(shares) if shares else None,
        emulated=any(run.emulated for run in runs),
        left_alone={
            what: why
            for run in runs
            for what, why in run.left_alone.items()
            if not any(what in reference.left_alone for reference in comparison.of("O0"))
        },
    )


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the t-interval of a mean of paired differences."""
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    from scipy.stats import t

    mean = statistics.fmean(differences)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * statistics.stdev(differences)
    half /= math.sqrt(len(differences))
    return mean - half, mean + half


def _judged(runs: Sequence[Run], interval: tuple[float, float] | None, margin: float, better: str) -> Verdict:
    if any(_diverged(run) for run in runs):
        return "diverged"
    if any(map(_failed, runs)):
        return "failed"
    if interval is None:
        return "undecided"
    low, high = interval if better == "higher" else (-interval[1], -interval[0])
    if -margin <= low and high <= margin:
        return "equal"
    return "worse" if high < 0 else "better" if low > 0 else "undecided"


def _failed(run: Run) -> bool:
    return not run.went_well or run.metric is None


def _diverged(run: Run) -> bool:
    """Whether a run's losses end in what is no number, or its metric is none, or most of its steps were skipped."""
    ends_badly = run.loss is not None and not math.isfinite(run.loss)
    return ends_badly or (run.metric is not None and not math.isfinite(run.metric)) or 2 * run.skipped > run.steps > 0


def verdict(comparison: Comparison) -> list[str]:
    """Return what the comparison came to, in words, the answer first."""
    compared, margin, metric = rows(comparison), margin_of(comparison), comparison.metric
    base = next((row for row in compared if row.policy == "O0"), None)
    if base is None:
        return ["No run has finished."]
    runs = "one run of each" if comparison.seeds is None else f"{counted(comparison.seeds, 'seed')} of each"
    unit, away = f" {metric.unit}".rstrip(), f" {_away(metric.unit)}".rstrip()
    share = f", {_MARGIN:.0%} of it".replace("%", " %") if comparison.margin is None else ""
    equal = f"equal means within ±{number(margin)}{away}{share}"
    lines = [f"FP32 reaches {metric.name} {number(base.metric)}{unit} ({runs}; {equal})."]
    diverged = any(map(_diverged, comparison.of("O0")))
    if diverged:
        lines.append(f"FP32 itself diverged: {_lost(base)}; nothing can be said of policies beside it.")
    for row in compared:
        if row is not base:
            left = "".join(f"; left alone: {what}: {why.partition(chr(10))[0]}" for what, why in row.left_alone.items())
            lines.append(f"{short(row.policy)}: {_words(row, comparison)}{left}.")
    missing = [policy for policy in comparison.policies if not comparison.of(policy)]
    if missing:
        lines.append(f"Not run: {'; '.join(map(short, missing))}.")
    fewer = [short(row.policy) for row in compared if row.runs < (comparison.seeds or 1)]
    if fewer:
        lines.append(f"Not all seeds have run of {'; '.join(fewer)}; the same command goes on.")
    if not diverged and not fewer and any(row.verdict == "undecided" for row in compared):
        more = 3 if (comparison.seeds or 0) < 3 else 2 * (comparison.seeds or 0)
        lines.append(f"Undecided needs more seeds: --seeds {more}, for a script that takes --seed.")
    sized = [(row.held_bytes + row.saved_bytes, row.policy) for row in compared if row.held_bytes and row.saved_bytes]
    fp32_size = next((size for size, policy in sized if policy == "O0"), None)
    if fp32_size is not None and len(sized) > 1:
        least, policy = min(sized)
        lines.append(
            f"Least memory: {short(policy)}, {byte_text(least)} held and saved, {least / fp32_size:.2f}× that of FP32."
        )
    if any(row.emulated for row in compared):
        lines.append("Products were emulated: time, and what recurrent layers save, say nothing about the format.")
    return lines


def _words(row: PolicyRow, comparison: Comparison) -> str:
    unit = f" {_away(comparison.metric.unit)}".rstrip()
    away = "" if row.difference is None else f"{number(abs(row.difference))}{unit}"
    ran = "; nothing ran in low precision" if row.low_share == 0 else ""
    if row.verdict in ("worse", "better"):
        return f"{row.verdict} by {away}{_between(row, unit)}{ran}"
    if row.verdict == "diverged":
        return f"diverged: {_lost(row)}"
    if row.verdict == "failed":
        run = next(run for run in comparison.of(row.policy) if _failed(run))
        seed = "" if run.seed is None else f"seed {run.seed} "
        if run.went_well:
            return (
                f"failed: {seed}printed no {comparison.metric.name}; what it printed is in {run.folder / 'output.txt'}"
            )
        return f"failed: {seed}ended with exit code {run.code}; what it said is in {run.folder / 'errors.txt'}"
    signed = "" if row.difference is None else f", {number(row.difference, sign=True)}{unit}"
    return f"{row.verdict}{signed}{_between(row, unit)}{ran}"


def _lost(row: PolicyRow) -> str:
    metric = "" if row.metric is None or math.isfinite(row.metric) else f", its metric is {number(row.metric)}"
    return f"{row.nonfinite} of {row.steps} losses were not finite, {counted(row.skipped, 'step')} skipped{metric}"


def _between(row: PolicyRow, unit: str) -> str:
    if row.interval is None:
        return ""
    low, high = (number(end, sign=True) for end in row.interval)
    return f" (95 %: {low} to {high}{unit})"


def _away(unit: str) -> str:
    """Return the unit of a difference: between two percentages it is no percentage."""
    return "points" if unit == "%" else "" if unit.startswith("/") else unit


def short(policy: str) -> str:
    """Spell a policy as one would type it; both spellings are read.

    Example:
        >>> short("O2,dtype=float16,loss_scale=8")
        'O2,fp16,loss_scale=8'
    """
    return policy.replace("dtype=bfloat16", "bf16").replace("dtype=float16", "fp16")


def number(value: float | None, *, sign: bool = False, digits: int = _DIGITS) -> str:
    """Write a number with the digits that count; ``–`` for what is not known."""
    if value is None:
        return "–"
    return format(value + 0.0, f"{'+' if sign else ''}.{digits}g")


# What products below sixteen bits lost, by layer.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandRow:
    """What products below sixteen bits lost of one operand under one policy: means over its runs.

    Attributes:
        policy: The policy's text.
        layer: The path of the weight.
        role: ``activation``, ``weight`` or ``gradient``.
        format: The block format.
        saturated: The share of elements beyond the largest that their scale reaches.
        flushed: The share of elements that are not zero, and became zero.
        below_noise: Of gradients: the share of recorded steps in which the norm of the weight's gradient was less than
            √3 times that of the quantisation noise; ``None`` where that is not known.
        noise: Of gradients: the mean of the noise's norm, in terms of the gradient's.
    """

    policy: str
    layer: str
    role: str
    format: str
    saturated: float
    flushed: float
    below_noise: float | None
    noise: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def operand_rows(comparison: Comparison) -> list[OperandRow]:
    """Return a row for each policy, layer and operand; none where no product was below sixteen bits."""
    operands = []
    for policy in comparison.policies:
        by_operand: dict[tuple[str, str, str], list[Any]] = {}
        for losses in [losses for run in comparison.of(policy) for losses in run.operands]:
            layer = ".".join(filter(None, (losses["module"], losses["name"]))).removesuffix(".weight")
            by_operand.setdefault((layer, losses["role"], losses["format"]), []).append(losses)
        operands += [
            OperandRow(
                policy=policy, layer=layer, role=role, format=form,
                saturated=statistics.fmean(losses["saturated"] for losses in runs),
                flushed=statistics.fmean(losses["flushed"] for losses in runs),
                below_noise=_mean([losses["below_noise"] for losses in runs]),
                noise=_mean([losses.get("noise") for losses in runs]),
            )
            for (layer, role, form), runs in by_operand.items()
        ]  # fmt: skip
    return operands


def operand_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of :func:`operand_rows` as text."""
    heads = ["policy", "layer", "operand", "format", "saturated", "flushed", "noise / ‖g‖", "‖g‖ < √3 × noise"]
    return heads, [
        [
            short(row.policy), row.layer, row.role, row.format,
            share_text(row.saturated, 1), share_text(row.flushed, 1),
            number(row.noise, digits=2), "–" if row.below_noise is None else share_text(row.below_noise, 1),
        ]
        for row in operand_rows(comparison)
    ]  # fmt: skip


# The table of a comparison, for a terminal and a page: the same cells in both.

#: Columns by what they are worth, the least first: final scale, saved, held, time, skipped steps, loss.
_LEAST: Final = (9, 7, 6, 5, 8, 4)
#: Characters of a policy on one line.
_POLICY: Final = 26


def cells(comparison: Comparison, *, full: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows as text.

    Args:
        comparison: The comparison.
        full: With bytes beside their ratio to FP32's, losses that were not finite, products that ran low, and the peak
            of memory.
    """
    compared = rows(comparison)
    base = compared[0] if compared else None
    unit = f", {comparison.metric.unit}".rstrip(", ")
    heads = [
        "policy",
        "verdict",
        f"{comparison.metric.name}{unit}",
        "− FP32 (95 %)",
        "loss",
        "ms/step",
        "held",
        "saved",
    ]
    heads += ["skipped", "scale"]
    heads += ["not finite", "ran low", "peak"] if full else []
    return heads, [_cells(row, base, full) for row in compared]


def _cells(row: PolicyRow, base: PolicyRow | None, full: bool) -> list[str]:
    difference = "" if row.difference is None else number(row.difference, sign=True, digits=3)
    if row.interval is not None:
        low, high = (number(end, sign=True, digits=3) for end in row.interval)
        difference += f" ({low} … {high})"
    reference = row if base is None else base
    shown = [
        short(row.policy),
        "FP32" if row.verdict == "reference" else row.verdict,
        number(row.metric),
        difference,
        number(row.loss),
        "–" if row.step_ms is None else f"{row.step_ms:.3g}",
        _size(row.held_bytes, None if reference is row else reference.held_bytes, full),
        _size(row.saved_bytes, None if reference is row else reference.saved_bytes, full),
        str(row.skipped),
        scale_text(row.scale),
    ]
    if full:
        low = "–" if row.low_share is None else share_text(row.low_share, 1)
        shown += [str(row.nonfinite), low, _size(row.peak_bytes, None, full)]
    return shown


def _size(num_bytes: int | None, base: int | None, full: bool) -> str:
    if num_bytes is None:
        return "–"
    ratio = f"{num_bytes / base:.2f}×" if base else ""
    return f"{byte_text(num_bytes)} ({ratio})" if full and ratio else ratio or byte_text(num_bytes)


def table(comparison: Comparison, *, full: bool = False, width: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        comparison: The comparison.
        full: See :func:`cells`.
        width: In characters. Columns that do not fit are left out, those least asked for first, and a caption says so.
    """
    heads, lines = cells(comparison, full=full)
    lines = [[_folded(row[0]), *row[1:]] for row in lines]
    widths = [
        max(len(part) for cell in column for part in cell.split("\n")) for column in zip(heads, *lines, strict=True)
    ]
    left_out = list[int]()
    for index in () if full else _LEAST:
        widths_left = [size + 2 for index, size in enumerate(widths) if index not in left_out]
        if width is not None and sum(widths_left) - 1 > width:
            left_out.append(index)
    caption = (
        f"left out: {', '.join(heads[index] for index in sorted(left_out))}; --full shows them" if left_out else None
    )
    shown = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
        caption=caption, caption_justify="left",
    )  # fmt: skip
    for index, head in enumerate(heads):
        if index not in left_out:
            shown.add_column(Text(head), justify="left" if index < 2 else "right", overflow="fold")
    for row in lines:
        shown.add_row(*(Text(printable(cell, keep="\n")) for at, cell in enumerate(row) if at not in left_out))
    return shown


def _folded(policy: str) -> str:
    """Break a long policy behind commas."""
    lines = [""]
    for part in re.findall(r"[^,]*,?", policy):
        if lines[-1] and len(lines[-1] + part) > _POLICY:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
