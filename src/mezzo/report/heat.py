"""Evidence as the page's switches want it: histograms by kind, tensor and step, no more than a page can hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy

from mezzo.errors import printable
from mezzo.explanation.fold import folded
from mezzo.formats import Format, by_name
from mezzo.numerics import KINDS, Evidence, ExponentHistogram, RecordedStep
from mezzo.numerics.counting import BINS, FIRST
from mezzo.numerics.faults import GRADIENTS, name_of

__all__ = ["heat", "thinned"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`

#: Histograms that one page holds, which bounds it to a few megabytes beside plotly's own five.
_MOST_HISTOGRAMS: Final = 12_000
_MOST_STEPS: Final = 40
_LEAST_STEPS: Final = 3


def heat(evidence: Evidence, formats: Sequence[str | Format]) -> tuple[dict[str, Any], list[str]]:
    """Return what the heat map and the worst tensors are drawn from.

    Args:
        evidence: What was recorded.
        formats: Those to choose from.

    Returns:
        The steps with their loss scales, the formats' limits, and the kinds with rows and histograms; then a line for
        each thing that had to be left out: steps between others first, then alike tensors, which are summed up.
    """
    notes: list[str] = []
    count = sum(len(_rows(evidence.steps, kind)) for kind in evidence.header.kinds)
    most = max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_HISTOGRAMS // max(1, count)))
    steps = thinned(evidence.steps, most)
    if len(steps) < len(evidence.steps):
        notes.append(f"{len(steps)} of {len(evidence.steps)} recorded steps are shown, first and last among them.")
    rows = {kind: _rows(steps, kind) for kind in KINDS if kind in evidence.header.kinds}
    if len(steps) * sum(map(len, rows.values())) > _MOST_HISTOGRAMS:
        folded = {kind: _folded(each) for kind, each in rows.items()}
        num_before, num_after = (sum(map(len, each.values())) for each in (rows, folded))
        notes.append(f"{num_before} tensors are shown as {num_after}: those of alike layers are summed up.")
        rows = folded
    most_rows = _MOST_HISTOGRAMS // max(1, len(steps) * len(rows))
    kinds = []
    for kind, found in rows.items():
        if len(found) > most_rows:
            notes.append(f"{kind.replace('_', ' ')}: the first {most_rows} of {len(found)} tensors are shown.")
        shown = {printable(name): row for name, row in itertools.islice(found.items(), most_rows)}
        if shown:
            histograms = [[each and _packed(each) for each in row] for row in shown.values()]
            label, scaled = kind.replace("_", " "), kind in GRADIENTS
            kinds.append({"name": kind, "label": label, "scaled": scaled, "rows": [*shown], "histograms": histograms})
    return {
        "steps": [each.step for each in steps],
        "scales": [each.loss_scales[0] if each.loss_scales else 1.0 for each in steps],
        "formats": [_limits(by_name(each)) for each in formats],
        "kinds": kinds,
    }, notes


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Keep first and last, and of the others every so many-th."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _rows(steps: Sequence[RecordedStep], kind: str) -> dict[str, list[ExponentHistogram | None]]:
    """Return the histograms of a kind by tensor and step, in the order of the forward pass."""
    rows: dict[str, list[ExponentHistogram | None]] = {}
    for place, step in enumerate(steps):
        for each in step.tensors:
            if each.kind == kind:
                rows.setdefault(name_of(each), [None] * len(steps))[place] = each.histogram
    return rows


def _folded(rows: Mapping[str, Sequence[ExponentHistogram | None]]) -> dict[str, list[ExponentHistogram | None]]:
    """Sum up the tensors of alike layers."""
    return {
        fold.text: [
            _sum(each for each in step if each is not None)
            for step in zip(*(rows[name] for name in fold.rows), strict=True)
        ]
        for fold in folded(rows, str, lambda name: None)
    }


def _sum(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram | None:
    found = list(histograms)
    return ExponentHistogram.total_of(found) if found else None


def _packed(histogram: ExponentHistogram) -> list[Any]:
    """Return first exponent, counts, exact powers of two, zeros, infinities, NaNs and the largest, for ``page.js``."""
    numbers = numpy.array(histogram.numbers[: 2 * BINS])
    counts, powers = numbers[:BINS] + numbers[BINS:], numbers[BINS:]
    held = counts.nonzero()[0]
    first, end = (int(held[0]), int(held[-1]) + 1) if held.size else (0, 0)
    exact = [[FIRST + place, int(powers[place])] for place in powers.nonzero()[0].tolist()]
    special = (histogram.zeros, histogram.infs, histogram.nans, histogram.max_abs)
    return [FIRST + first, counts[first:end].tolist(), exact, *special]


def _limits(target: Format) -> dict[str, Any]:
    """Return where a format begins to lose: what ``coverage`` in ``page.js`` compares with."""
    return {
        "label": target.name,
        "under": target.smallest_subnormal / 2,
        "normal": target.smallest_normal,
        "over": target.max + target.spacing(target.max) / 2,
        "hit": not target.has_inf,
    }
