"""What is wrong with a recorded run itself: values that are not finite, weights that do not move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from mezzo.errors import some_of
from mezzo.explanation.words import format_text, share_text
from mezzo.formats import BF16, FP16
from mezzo.numerics.evidence import Evidence, RecordedTensor, SwallowedUpdates

__all__ = ["SWALLOWED", "Alert", "Level", "lost_updates", "name_of", "near", "not_finite", "stopped", "stored_low"]

Level = Literal["ok", "warn", "bad"]

#: Shares of updates that vanish: what is said, and what stops a weight.
SWALLOWED: Final = 0.1
_STOPPED: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that is wrong with a run.

    Attributes:
        level: ``bad`` spoils the result, ``warn`` may.
        what: One line.
        where: Policy, module or tensor.
        why: The evidence.
        write: What cures it, as text to paste.
    """

    level: Level
    what: str
    where: str = ""
    why: str = ""
    write: str = ""


def not_finite(evidence: Evidence) -> Iterator[Alert]:
    """Find the first recorded step whose weights, or else activations, are not finite."""
    for step in evidence.steps:
        for kind in ("weights", "activations"):
            found = [each for each in step.tensors if each.kind == kind and _num_not_finite(each)]
            if not found:
                continue
            first, total = found[0], sum(map(_num_not_finite, found))
            others = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
            spoilt = kind == "weights" or step.skipped or any(each.histogram.nans for each in found)
            why, write = _cause(kind, first.dtype)
            yield Alert(
                level="bad" if spoilt else "warn",  # a mask's infinities are meant
                what=f"{total:,} {kind} are infinite or NaN at step {step.step}.",
                where=f"{name_of(first)} ({first.dtype}){others}",
                why=why,
                write=write,
            )
            return


def _cause(kind: str, dtype: str) -> tuple[str, str]:
    """Return why such tensors are not finite, and what to write."""
    named = format_text([dtype])
    locate = 'MixedPrecision(…, on_overflow="explain"), which names the op that made the first of them'
    if kind == "weights" and dtype == FP16.name:
        why = (
            f"An update left FP16's range. Without FP32 masters optimizers compute in {named}, where AdamW's eps of "
            "1e-8 is zero, and what is divided by it infinite."
        )
        return why, f'policy="O2,dtype={dtype}", which keeps FP32 masters'
    if dtype in ("float32", BF16.name):
        return f"{named} reaches 3.4e38: the training diverged or divided by zero, whatever the format.", locate
    return f"Something left the range of {named}.", locate


def _num_not_finite(tensor: RecordedTensor) -> int:
    return tensor.histogram.infs + tensor.histogram.nans


def stopped(evidence: Evidence, lost: Mapping[str, SwallowedUpdates]) -> Iterator[Alert]:
    """Find weights that are stored low, without masters, and do not move although they have gradients."""
    low = {path: dtype for path, dtype in stored_low(evidence).items() if path in lost}
    still = {path: lost[path].share_unmoved for path in low if lost[path].share_unmoved > SWALLOWED}
    if still:
        worst = max(still, key=lambda path: still[path])
        unmoved, whole = sum(lost[path].unmoved for path in low), sum(lost[path].with_gradient for path in low)
        dtype = format_text([low[worst]])
        yield Alert(
            level="bad" if unmoved > _STOPPED * whole else "warn",
            what=f"{share_text(unmoved, whole)} of the weights with a gradient did not move.",
            where=f"{worst}: {share_text(still[worst], 1)}; of {len(low)} weights {len(still)} lose over a tenth",
            why=f"They are stored in {dtype}: an update of less than half the gap to the next number rounds away.",
            write=f'policy="O2,dtype={low[worst]}", which keeps FP32 masters; or rounding="stochastic" of mezzo.optim',
        )


def near(evidence: Evidence) -> Iterator[Alert]:
    """Find activations of an FP16 run that come near its end."""
    found = {
        name_of(each): each.histogram.max_abs
        for step in evidence.steps
        for each in step.tensors
        if each.kind == "activations" and each.dtype == FP16.name and each.histogram.max_abs > FP16.max / 4
    }
    if found and not any(_num_not_finite(each) for step in evidence.steps for each in step.tensors):
        worst = max(found, key=lambda name: found[name])
        yield Alert(
            level="warn",
            what=f"Activations reach {found[worst] / FP16.max:.0%} of FP16's range.".replace("%", " %"),
            where=some_of(sorted(found), 3),
            why=f"{worst} reaches {found[worst]:.4g} of 65504; a loss scale does not help activations.",
            write=f"policy.keep_fp32(modules={_modules(found)})",
        )


def _modules(names: Iterable[str]) -> list[str]:
    return sorted(names)[:8]


# Evidence, summed up ----------------------------------------------------------------------------------------


def lost_updates(evidence: Evidence) -> dict[str, SwallowedUpdates]:
    """Sum up the updates of each weight that vanish."""
    found: dict[str, SwallowedUpdates] = {}
    for each in (tensor for step in evidence.steps for tensor in step.tensors):
        if each.swallowed is not None:
            found[each.path] = found[each.path] + each.swallowed if each.path in found else each.swallowed
    return found


def stored_low(evidence: Evidence) -> dict[str, str]:
    """Return the dtypes of the weights that have 16 bits and no FP32 value besides."""
    tensors = (each for step in evidence.steps for each in step.tensors)
    return {
        each.path: each.dtype for each in tensors if each.kind == "weights" and each.dtype in (FP16.name, BF16.name)
    }


def name_of(tensor: RecordedTensor) -> str:
    """Return what a tensor is called in words: an output after its module."""
    return tensor.path.removesuffix(".output")
