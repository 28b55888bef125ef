"""What skipped steps of a recorded run say: whether the loss scale was too high, and which one fits instead."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from mezzo.formats import FP16
from mezzo.numerics.evidence import Evidence, RecordedStep
from mezzo.numerics.faults import (
    GRADIENTS,
    INIT,
    Alert,
    Level,
    first_in_backward,
    gradient_text,
    is_finite,
    masks_of,
    name_of,
)
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.scale import LossScale

__all__ = ["MANY", "fitting_policy", "in_bfloat16", "skips"]

#: A dynamic scale skips a step now and then; more than this share is time lost.
MANY: Final = 0.05


def skips(evidence: Evidence) -> Iterator[Alert]:
    """Find steps that were skipped for the sake of gradients, and say which loss scale would have kept them.

    The first skipped steps of a dynamic scale are its search, and no fault where a step comes that was not skipped.
    """
    skipped = _skipped(evidence)
    if not skipped:
        return
    num_steps, hopeless = len(evidence.steps), _hopeless(evidence, skipped)
    level: Level = "bad" if 2 * len(skipped) > num_steps and (hopeless or not _is_dynamic(evidence)) else "warn"
    what = f"{len(skipped)} of {num_steps} recorded steps were skipped."
    if len(skipped) == num_steps:
        what = f"All {num_steps} recorded steps were skipped." if num_steps > 1 else "The recorded step was skipped."
    if hopeless:
        step, scale = hopeless[0], _scale_of(hopeless[0])
        seen = f"Weights and activations are finite, but not the loss, or its gradient, at loss scale {scale:,.10g}"
        if scale <= 1:
            seen = f"Gradients are not finite although the loss scale is {scale:g}"
        is_low = evidence.header.compute_dtype == FP16.name
        bfloat16 = "; BF16 does where only FP16's range is too small" if is_low else ""
        yield Alert(
            level=level,
            what=what,
            where=_where(step),
            why=f"{seen}: no lower scale cures that{bfloat16}.",
            write=_locate(evidence, scale),
        )
        return
    highest, lowest = (each(map(_scale_of, skipped)) for each in (max, min))
    scales = f"{lowest:,.10g}" if lowest == highest else f"{lowest:,.10g} to {highest:,.10g}"
    policy = fitting_policy(evidence)
    assert policy is not None, "steps were skipped at a scale above 1"
    yield Alert(
        level=level,
        what=what,
        where=_where(skipped[0]),
        why=f"Their gradients leave FP16's range at loss scale {scales}. {_known(evidence, lowest)}",
        write=f'MixedPrecision(model, optimizer, "{policy}")',
    )


def fitting_policy(evidence: Evidence) -> Policy | None:
    """Return the policy of the run with what its gradients fit into: another loss scale, or BF16 where none helps.

    ``None`` where nothing was skipped, or a policy is no cure.
    """
    current = None if evidence.header.policy is None else Policy.parse(evidence.header.policy)
    skipped = _skipped(evidence)
    if not skipped:
        return None
    if hopeless := _hopeless(evidence, skipped):
        is_range = evidence.header.compute_dtype == FP16.name and not any(map(_starts_nan, hopeless))
        return in_bfloat16(current) if current is not None and is_range else None
    if current is not None and evidence.header.compute_dtype != FP16.name:
        return current.evolve(loss_scale=LossScale.none())
    # What fits the steps that were taken is known; of a skipped one, only that its own scale did not fit.
    highest = min(INIT, _best(evidence), *(_below(_scale_of(step)) for step in skipped))
    before = LossScale.dynamic() if current is None else current.loss_scale
    after = LossScale.dynamic(init=highest, floor=min(1.0, highest))
    if before.mode == "dynamic" and before.floor <= highest <= (before.ceiling or math.inf):
        after = dataclasses.replace(before, init=highest)
    return (current or Policy.O1(FP16.name)).evolve(loss_scale=after)


def _skipped(evidence: Evidence) -> Sequence[RecordedStep]:
    """Return the steps that were skipped for the sake of gradients alone; none if that is how a scale works."""
    masks = masks_of(evidence)
    found = [step for step in evidence.steps if step.skipped and _is_by_gradients(step, masks, evidence)]
    if not _is_dynamic(evidence):
        return found
    taken = [place for place, step in enumerate(evidence.steps) if not step.skipped]
    if not taken:
        return found
    later = [step for step in evidence.steps[taken[0] :] if step in found]
    return later if len(later) > max(1, MANY * (len(evidence.steps) - taken[0])) else []


def _hopeless(evidence: Evidence, skipped: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the skipped steps that no lower loss scale would have kept."""
    found = [step for step in skipped if _scale_of(step) <= 1 or _starts_nan(step)]
    text = evidence.header.policy
    rule = LossScale.none() if text is None else Policy.parse(text).loss_scale
    if rule.mode == "dynamic" and rule.hysteresis == 1:  # each overflow lowers the scale, but that of the loss itself
        for step, after in itertools.pairwise(skipped):
            is_next = after.step == step.step + 1 and after not in found
            if is_next and after.loss_scales == step.loss_scales and _scale_of(step) > rule.floor:
                found.append(after)
    return found if skipped[-1] in found else []  # else it came down, and steps are skipped for its sake


def _starts_nan(step: RecordedStep) -> bool:
    """Whether the loss's own gradient is NaN, where it arrives at the model's output."""
    return any(not each.module and each.kind == GRADIENTS[0] and each.histogram.nans for each in step.tensors)


def in_bfloat16(policy: Policy) -> Policy:
    """Return the policy with BF16 in place of FP16, its rules kept, and with FP32 masters if it has none."""
    level = Policy.O1 if policy.autocast else Policy.O2
    return level("bfloat16", rules=policy.rules, emulate=policy.emulate)


def _is_by_gradients(step: RecordedStep, masks: Mapping[str, RecordedStep], evidence: Evidence) -> bool:
    """Whether gradients were not finite after a pass forward that was; without a session that has to be seen."""
    gradients = [each for each in step.tensors if each.kind in GRADIENTS]
    is_seen = any(not is_finite(each) for each in gradients)
    before = (each for each in step.tensors if each.kind in ("weights", "activations"))
    return (is_seen or (evidence.header.policy is not None)) and all(
        is_finite(each) or (each.kind == "activations" and name_of(each) in masks) for each in before
    )


def _is_dynamic(evidence: Evidence) -> bool:
    mode = evidence.header.loss_scale
    return mode == "dynamic" or (mode == "given" and len({_scale_of(step) for step in evidence.steps}) > 1)


def _scale_of(step: RecordedStep) -> float:
    return max(step.loss_scales, default=1.0)


def _below(scale: float) -> float:
    """Return the largest power of two that is at most half a scale."""
    return math.ldexp(1.0, math.frexp(scale)[1] - 2)


def _gradients(evidence: Evidence) -> ExponentHistogram:
    """Sum up the gradients of the steps that were taken."""
    taken = (each for step in evidence.steps if not step.skipped for each in step.tensors)
    return ExponentHistogram.total_of(each.histogram for each in taken if each.kind in GRADIENTS)


def _best(evidence: Evidence) -> float:
    """Return the highest constant scale that fits the steps that were taken; infinity where nothing is known."""
    whole = _gradients(evidence)
    return whole.best_scale(FP16) if whole.max_abs and not (whole.infs or whole.nans) else math.inf


def _known(evidence: Evidence, lowest: float) -> str:
    """Say what is known of a constant scale that would fit."""
    if evidence.header.compute_dtype not in (None, FP16.name):
        return f"{evidence.header.compute_dtype} needs none."
    best = _best(evidence)
    if best == math.inf:
        return "No recorded step was taken: a dynamic scale finds the one that fits."
    reached = f"In the steps that were taken gradients reach {_gradients(evidence).max_abs:.4g}"
    if best < lowest:
        return f"{reached}: the highest constant scale that fits them is loss_scale={best:.10g}."
    return f"{reached}, in the skipped ones more than {FP16.max / lowest:.4g}: a dynamic scale follows them."


def _where(step: RecordedStep) -> str:
    first = first_in_backward(step)
    return f"step {step.step}" if first is None else f"{gradient_text(first)}, the first at step {step.step}"


def _locate(evidence: Evidence, scale: float) -> str:
    policy = "" if evidence.header.policy is None else f', policy="{evidence.header.policy}"'
    return f"mezzo.overflow.locate(lambda: loss_fn(model, batch), model, loss_scale={scale:.10g}{policy})"
