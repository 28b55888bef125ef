"""What is wrong with a recorded run itself: values not finite, gradients flushed, steps skipped, weights at rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from mezzo.errors import some_of
from mezzo.explanation.words import format_text, share_text
from mezzo.formats import BF16, FP16
from mezzo.numerics.evidence import Evidence, RecordedStep, RecordedTensor, SwallowedUpdates
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.policy.spelling import both
from mezzo.scale import LossScale

Level = Literal["ok", "warn", "bad"]

#: Shares of updates that vanish: what is said, and what stops a weight.
SWALLOWED: Final = 0.1
_STOPPED: Final = 0.5
#: The share of gradients that may lose digits, being subnormal; and that at which many more are flushed to zero.
SUBNORMAL: Final = 0.1
_ALL_BUT: Final = 0.9
#: Where dynamic scales begin if nothing is known, and where they end: no loss scale is higher.
INIT: Final = LossScale.dynamic().init
CEILING: Final = LossScale.dynamic().ceiling or math.inf
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


def first_not_finite(evidence: Evidence) -> tuple[RecordedStep | None, list[RecordedTensor]]:
    """Return the first recorded step with tensors that are not finite and spoil it, and those tensors; or none.

    They are weights, or else activations, or else gradients in a step that was taken all the same.
    """
    masks = masks_of(evidence)
    for step in evidence.steps:
        for kinds in (("weights",), ("activations",), GRADIENTS):
            found = [each for each in step.tensors if each.kind in kinds and not is_finite(each)]
            if found and _is_spoilt(step, found, masks):
                return step, found
    return None, []


def _is_spoilt(step: RecordedStep, found: list[RecordedTensor], masks: Mapping[str, RecordedStep]) -> bool:
    if found[0].kind == "activations":
        return any(each.histogram.nans or name_of(each) not in masks for each in found)
    return found[0].kind == "weights" or _spoils_weights(step)


def _spoils_weights(step: RecordedStep) -> bool:
    """Whether a step was taken with gradients that are not finite; one of an activation may end before any weight."""
    found = [each.kind for each in step.tensors if each.kind in GRADIENTS and not is_finite(each)]
    has_weights = any(each.kind == GRADIENTS[1] for each in step.tensors)
    return not step.skipped and (GRADIENTS[1] in found if has_weights else bool(found))


def not_finite(evidence: Evidence) -> Iterator[Alert]:
    """Say which tensors are not finite, in the first recorded step that they spoil; or else which may be masks."""
    step, found = first_not_finite(evidence)
    level: Level = "bad"
    if step is None and (masks := masks_of(evidence)):
        level, step = "warn", min(masks.values(), key=lambda each: each.step)
        found = [each for each in step.tensors if each.kind == "activations" and each.histogram.infs]
    if step is None:
        return
    first, kind = found[0], found[0].kind
    (why, write), where = _cause(first), f"{name_of(first)} ({first.dtype})"
    if level == "warn":
        why, write = "What follows is finite all the same: they may be those of a mask, which are meant.", ""
    if kind in GRADIENTS:
        kind, first = "gradients", first_in_backward(step) or first
        (why, write), where = _cause_in_backward(evidence, first), gradient_text(first)
    others = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
    yield Alert(
        level=level,
        what=f"{sum(map(_num_not_finite, found)):,} {kind} are infinite or NaN at step {step.step}.",
        where=f"{where}{others}",
        why=why,
        write=write,
    )


def _cause(first: RecordedTensor) -> tuple[str, str]:
    """Return why a tensor is not finite, and what to write."""
    named = format_text([first.dtype])
    explained = 'MixedPrecision(…, on_overflow="explain"), which names the op or the batch that they come from'
    if first.dtype != FP16.name:
        why = f"{named} reaches 3.4e38: training diverged, divided by zero or read such a batch, whatever the format."
        return why, explained
    if first.kind == "weights":
        why = (
            f"An update left FP16's range. Without FP32 masters optimizers compute in {named}, where AdamW's eps of "
            "1e-8 is zero, and what is divided by it infinite."
        )
        return why, f'policy="O2,dtype={first.dtype}", which keeps FP32 masters'
    why = "FP16 ends at 65504, whatever the loss scale, and what is beyond is infinite; or a batch had such numbers."
    return why, f"{explained}; where it is FP16's range, {both('dtype=bfloat16')}"


def _cause_in_backward(evidence: Evidence, first: RecordedTensor) -> tuple[str, str]:
    """Return why gradients of a step that was taken are not finite, and what to write."""
    taken = "the step was taken all the same, and its update spoils the weights."
    if evidence.header.compute_dtype != FP16.name and first.dtype != FP16.name:
        write = 'MixedPrecision(…, on_overflow="explain"), which names the op that made the first of them'
        return f"The backward pass made them, whatever the format: {taken}", write
    text = evidence.header.policy
    policy = Policy.O1(FP16.name) if text is None else rescaled(Policy.parse(text), LossScale.dynamic())
    write = f'MixedPrecision(model, optimizer, "{policy}"), whose loss scale skips such steps and comes down'
    return f"The backward pass left the range of FP16: {taken}", write


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
        write=f"{both('dtype=bfloat16')}, which needs no loss scale" if scale is None else _written(evidence, scale),
    )


def better_scale(evidence: Evidence) -> LossScale | None:
    """Return a loss scale that keeps more of the gradients that FP16 loses in a run; ``None`` where none does."""
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
        return f"torch.amp.GradScaler(init_scale=2.0**{round(math.log2(scale.init))})"
    return f'policy="{rescaled(Policy.parse(evidence.header.policy), scale)}"'


def rescaled(policy: Policy, scale: LossScale) -> Policy:
    """Return a policy with another loss scale, and with FP32 masters if it has none: FP16 cannot unscale gradients."""
    if policy.master_weights or policy.param_dtype == torch.float32:
        return dataclasses.replace(policy, loss_scale=scale)
    return Policy.O2(policy.dtype, emulate=policy.emulate, loss_scale=scale)


def _num_not_finite(tensor: RecordedTensor) -> int:
    return tensor.histogram.infs + tensor.histogram.nans


def is_finite(tensor: RecordedTensor) -> bool:
    """Whether there is neither infinity nor NaN in a tensor."""
    return not _num_not_finite(tensor)


def masks_of(evidence: Evidence) -> dict[str, RecordedStep]:
    """Return the activations that are infinite as those of a mask, each with the first step that has it so.

    They are in steps whose gradients are finite, or at least what the model returns: a softmax has made zeros of them.
    """
    found: dict[str, RecordedStep] = {}
    for step in evidence.steps:
        outputs = [each for each in step.tensors if each.kind == "activations" and not each.module]
        if (outputs and all(map(is_finite, outputs))) or not (step.skipped or _spoils_weights(step)):
            for each in step.tensors:
                if each.kind == "activations" and each.histogram.infs and not each.histogram.nans:
                    found.setdefault(name_of(each), step)
    return found


def gradient_text(tensor: RecordedTensor) -> str:
    """Return what a gradient is called in words."""
    of = "the output of " if tensor.kind == GRADIENTS[0] else ""
    return f"gradient of {of}{name_of(tensor)} ({tensor.dtype})"


def first_in_backward(step: RecordedStep) -> RecordedTensor | None:
    """Return the first gradient in the order of the backward pass that is not finite, of the innermost module."""
    # The order of the pass forward is that in which calls ended; a module that is not called goes with what is around.
    called = [each.module for each in step.tensors if each.kind in ("activations", GRADIENTS[0])]
    order = {path: n for n, path in enumerate(dict.fromkeys(called or [each.module for each in step.tensors]))}

    def place(tensor: RecordedTensor) -> int:
        path = tensor.module
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order.get(path, -1)

    found = [each for each in step.tensors if each.kind in GRADIENTS and not is_finite(each)]
    # The gradient of what a module returns comes before those of its own weights.
    found.sort(key=lambda each: (-place(each), GRADIENTS.index(each.kind)))
    if not found:
        return None
    first, *others = found
    for each in others:
        # A container hands on what its last module returns: the very tensor.
        if first.kind == each.kind == GRADIENTS[0]:
            is_inside = each.module.startswith(f"{first.module}." if first.module else "")
            if not is_inside or each.histogram.numbers != first.histogram.numbers:
                break
            first = each
    return first


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
            write=f'policy="O2,dtype={low[worst]}", which keeps FP32 masters',
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
            write=f"{both('dtype=bfloat16')}, which has the range of FP32",
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


def idle(evidence: Evidence) -> Iterator[Alert]:
    """Say that every recorded step was skipped, so that nothing was trained."""
    if not all(step.skipped for step in evidence.steps):
        return
    first, scale = first_in_backward(evidence.steps[0]), min(evidence.steps[-1].loss_scales, default=1.0)
    yield Alert(
        level="bad",
        what="All recorded steps were skipped.",
        where="" if first is None else gradient_text(first),
        why=f"Their gradients are not finite, the last ones at loss scale {scale:,.10g}: what formats would lose of "
        "others is not known.",
        write='MixedPrecision(…, on_overflow="explain"), which names the op that made the first of them, and a cure',
    )


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
