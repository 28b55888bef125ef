"""Where the values of a run lie: one picture of evidence, the share of values in each power of two."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final

from mezzo.errors import require_extra
from mezzo.explanation.words import format_text
from mezzo.formats import BF16, E4M3, E5M2, FP16, Format
from mezzo.numerics import KINDS, Evidence, ExponentHistogram
from mezzo.numerics.counting import BINS, FIRST

__all__ = ["draw", "require_matplotlib", "shares"]

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

    held = {kind: [t.histogram for s in evidence.steps for t in s.tensors if t.kind == kind] for kind in KINDS}
    kinds = [kind for kind in KINDS if held[kind]]
    figure = Figure(figsize=(10, 1.0 + 1.5 * max(1, len(kinds))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(kinds)), 1, sharex=True, squeeze=False)[:, 0]
    low, high = _USUAL
    for axis, kind in zip(axes, kinds, strict=False):
        histogram = ExponentHistogram.total_of(held[kind])
        found = shares(histogram)
        axis.bar(list(found), list(found.values()), width=0.9, color="tab:gray")
        zeros = histogram.zeros / histogram.total if histogram.total else 0.0
        axis.set_title(f"{kind.replace('_', ' ')} (zero: {zeros:.1%})".replace("%", " %"), loc="left", fontsize=9)
        low, high = min([low, *found]), max([high, *found])
        _limits(axis)
    axes[0].legend(loc="upper right", fontsize=7, ncols=len(_FORMATS))
    axes[-1].set_xlim(low - 1, high + 1)
    axes[-1].set_xlabel("power of two of |x|; solid: a format's normal range, dotted: its smallest number")
    figure.savefig(Path(path), dpi=110)


def _limits(axis: Any) -> None:
    for target, colour in _FORMATS:
        for place, (exponent, style) in enumerate(_ends(target)):
            label = format_text([target.name]) if place == 0 else None
            axis.axvline(exponent - 0.5, color=colour, linestyle=style, linewidth=1, label=label)


def _ends(target: Format) -> tuple[tuple[int, str], ...]:
    """Return the powers of two at which a format begins to lose: its largest number's end, normal numbers, all."""
    normal = math.frexp(target.smallest_normal)[1] - 1
    return (math.frexp(target.max)[1], "-"), (normal, "-"), (normal - target.mantissa_bits, ":")
