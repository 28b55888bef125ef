"""What is wrong with a recorded run itself: values not finite, gradients flushed, steps skipped, weights at rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from mezzo.errors import some_of
from mezzo.explanation.words import format_text, share_text
from mezzo.formats import BF16, FP16
from mezzo.numerics.evidence import Evidence, RecordedTensor, SwallowedUpdates
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.scale import LossScale

__all__ = [
    "CEILING", "GRADIENTS", "SUBNORMAL", "SWALLOWED", "Alert", "Level", "all_skipped", "better_scale",
    "first_not_finite", "flushed", "is_idle", "lost_updates", "name_of", "near", "not_finite", "rescaled", "stopped",
    "stored_low",
]  # fmt: skip

Level = Literal["ok", "warn", "bad"]

#: Shares of updates that vanish: what is said, and what stops a weight.
SWALLOWED: Final = 0.1
_STOPPED: Final = 0.5
#: The share of gradients that may lose digits, being subnormal; and that at which many more are flushed to zero.
SUBNORMAL: Final = 0.1
_ALL_BUT: Final = 0.9
#: No loss scale is higher: the ceiling of dynamic scales.
CEILING: Final = 2.0**24
#: Kinds that a loss scale multiplies.
GRADIENTS: Final = ("activation_gradients", "weight_gradients")


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


def first_not_finite(evidence: Evidence) -> tuple[int, list[RecordedTensor]]:
    """Return the first recorded step with weights, or else activations, that are not finite, and those; or 0, none."""
    for step in evidence.steps:
        for kind in ("weights", "activations"):
            if found := [each for each in step.tensors if each.kind == kind and _num_not_finite(each)]:
                return step.step, found
    return 0, []


def not_finite(evidence: Evidence) -> Iterator[Alert]:
    """Say which weights or activations are not finite, in the first recorded step that has any."""
    step, found = first_not_finite(evidence)
    if found:
        first, total = found[0], sum(map(_num_not_finite, found))
        others = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        was_skipped = any(each.skipped for each in evidence.steps if each.step == step)
        spoilt = first.kind == "weights" or was_skipped or any(each.histogram.nans for each in found)
        why, write = _cause(first)
        yield Alert(
            level="bad" if spoilt else "warn",  # a mask's infinities are meant
            what=f"{total:,} {first.kind} are infinite or NaN at step {step}.",
            where=f"{name_of(first)} ({first.dtype}){others}",
            why=why,
            write=write,
        )


def _cause(first: RecordedTensor) -> tuple[str, str]:
    """Return why a tensor is not finite, and what to write."""
    named = format_text([first.dtype])
    explained = 'on_overflow="explain", which names the op that made the first of them'
    if first.dtype != FP16.name:
        why = f"{named} reaches 3.4e38: the training diverged or divided by zero, whatever the format."
        return why, f"MixedPrecision(…, {explained}"
    if first.kind == "weights":
        why = (
            f"An update left FP16's range. Without FP32 masters optimizers compute in {named}, where AdamW's eps of "
            "1e-8 is zero, and what is divided by it infinite."
        )
        return why, f'policy="O2,dtype={first.dtype}", which keeps FP32 masters'
    why = "FP16 ends at 65504, and what is beyond becomes infinite, whatever the loss scale."
    return why, f"dtype=bfloat16, which has the range of FP32; or {explained}, to keep that one in FP32"


def flushed(evidence: Evidence) -> Iterator[Alert]:
    """Say how many gradients FP16 loses at the loss scale that they have in the run."""
    gradients = gradients_in_fp16(evidence)
    scales = {scale for scale, _ in gradients}
    covered = [each.coverage(FP16, scale) for scale, each in gradients]
    total, zeros = sum(each.total for each in covered), sum(each.zero for each in covered)
    lost = sum(each.subnormal for each in covered)
    if not total or (lost <= SUBNORMAL * (total - zeros) and zeros < total):
        return
    carried = "without a loss scale" if scales == {1.0} else f"at loss scale {min(scales):,.10g}"
    tiny = FP16.smallest_subnormal / 2 / min(scales)
    scale = better_scale(evidence)
    yield Alert(
        level="bad" if lost > _ALL_BUT * (total - zeros) or zeros == total else "warn",
        what=f"All gradients are zero {carried}."
        if zeros == total
        else f"{share_text(lost, total - zeros)} of the gradients that are not zero lose digits {carried}.",
        where=f"{len(gradients)} tensors in float16, {share_text(zeros, total)} of their values zero",
        why=f"They are smaller than FP16's normal numbers, and what is below {tiny:.2g} is flushed to zero.",
        write="dtype=bfloat16, which needs no loss scale" if scale is None else _written(evidence, scale),
    )


def all_skipped(evidence: Evidence) -> Iterator[Alert]:
    """Say why no recorded step has moved the weights, where activations and weights are finite."""
    if not is_idle(evidence) or first_not_finite(evidence)[1]:
        return
    places = some_of([name_of(each) for each in _spoilt_gradients(evidence)], 3)
    scale, count = _too_high(evidence), len(evidence.steps)
    why = "Weights and activations are finite, but not the loss, or its gradient."
    write = "a loss function that neither divides by zero nor takes its logarithm"
    if scale:
        why = f"Weights and activations are finite; their gradients leave FP16's range at loss scale {scale:,.10g}."
        write = f"{_written(evidence, LossScale.dynamic())}, whose scale comes down until they fit"
    yield Alert(
        level="warn" if scale and evidence.header.loss_scale == "dynamic" else "bad",
        what=f"All {count} recorded steps were skipped." if count > 1 else "The recorded step was skipped.",
        where=f"gradients of {places}" if places else "",
        why=why,
        write=write,
    )


def _spoilt_gradients(evidence: Evidence) -> list[RecordedTensor]:
    return [each for each in evidence.steps[-1].tensors if each.kind in GRADIENTS and _num_not_finite(each)]


def _too_high(evidence: Evidence) -> float:
    """Return the loss scale at which gradients overflow that are finite where they start; 0 if it is not the scale."""
    found = _spoilt_gradients(evidence)
    scale = max(evidence.steps[-1].loss_scales, default=1.0)
    starts = any(not each.module and each.kind == GRADIENTS[0] and each.histogram.nans for each in found)
    return scale if found and scale > 1.0 and not starts else 0.0


def better_scale(evidence: Evidence) -> LossScale | None:
    """Return a loss scale that keeps more of the gradients that FP16 loses in a run; ``None`` where none does."""
    if is_idle(evidence):
        return LossScale.dynamic() if _too_high(evidence) and evidence.header.loss_scale != "dynamic" else None
    gradients = gradients_in_fp16(evidence)
    whole = ExponentHistogram.total_of(each for _, each in gradients)
    if not gradients or whole.infs or whole.nans:
        return None
    # Of zeros nothing is known but that they are small: from above the scale comes down by itself.
    highest = min(whole.best_scale(FP16), CEILING) if whole.max_abs else CEILING
    return LossScale.dynamic(init=highest) if highest >= 2.0 * max(scale for scale, _ in gradients) else None


def _written(evidence: Evidence, scale: LossScale) -> str:
    """Write the run's policy with another loss scale; without a session it is torch's scaler that has one."""
    if evidence.header.policy is None:
        return f"torch.amp.GradScaler(init_scale={scale.init:g})"
    return f'policy="{rescaled(Policy.parse(evidence.header.policy), scale)}"'


def rescaled(policy: Policy, scale: LossScale) -> Policy:
    """Return a policy with another loss scale, and with FP32 masters if it has none: FP16 cannot unscale gradients."""
    if policy.master_weights or policy.param_dtype == torch.float32:
        return dataclasses.replace(policy, loss_scale=scale)
    return Policy.O2(policy.dtype, emulate=policy.emulate, loss_scale=scale)


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
    if found and not first_not_finite(evidence)[1]:
        worst = max(found, key=lambda name: (found[name], len(name)))  # of those that hand it on the innermost
        yield Alert(
            level="warn",
            what=f"Activations reach {found[worst] / FP16.max:.0%} of FP16's range.".replace("%", " %"),
            where=some_of(sorted(found), 3),
            why=f"{worst} reaches {found[worst]:.4g} of 65504; a loss scale does not help activations.",
            write="dtype=bfloat16, which has the range of FP32",
        )


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


def is_idle(evidence: Evidence) -> bool:
    """Whether every recorded step was skipped."""
    return bool(evidence.steps) and all(step.skipped for step in evidence.steps)


def gradients_in_fp16(evidence: Evidence) -> list[tuple[float, ExponentHistogram]]:
    """Return the gradients that FP16 held in steps that were not skipped, each with the loss scale that it had."""
    return [
        (min(step.loss_scales, default=1.0), each.histogram)
        for step in evidence.steps
        for each in step.tensors
        if each.kind in GRADIENTS and each.dtype == FP16.name and not step.skipped
    ]


def name_of(tensor: RecordedTensor) -> str:
    """Return what a tensor is called in words: an output after its module."""
    return tensor.path.removesuffix(".output")
