"""The two passes of a step: pass 1 reads the gradients and decides, pass 2 updates the weights.

Four numbers on the device carry the decision from pass 1 to pass 2, so that no pass waits for the host. Executors
(:mod:`mezzo.step.executors`) decide how memory is read and cut; this file defines, once, what happens to an element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor

from mezzo.formats.noise import noise
from mezzo.scale.state import inverse
from mezzo.step import moments
from mezzo.step.matrix import NATIVE, Products
from mezzo.step.storage import Storage
from mezzo.step.update import States, UpdateRule
from mezzo.tensors import moved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """The decision of pass 1 on a step, as device tensors.

    The session computes it once. Optimizers, closures and captured graphs read it.

    Attributes:
        norms: (gradients,) float32: the 2-norm of each gradient as it is, still scaled; empty where another library
            has judged.
        grad_norm: 0-d float32: the 2-norm of all of them together, unscaled, before clipping; NaN where another
            library has judged.
        found_inf: 0-d bool: whether that norm is not finite, so that nothing may be written.
        multiplier: 0-d float32: clip coefficient / scale.
        is_one: Whether the multiplier is 1 by construction, which the host knows: no scale, and nothing is clipped.
        as_fused: The result of :func:`as_fused`, where it was computed together with the verdict.
    """

    norms: Tensor
    grad_norm: Tensor
    found_inf: Tensor
    multiplier: Tensor
    is_one: bool = False
    as_fused: tuple[Tensor, ...] = ()

    @classmethod
    def of_flags(cls, found_inf: Tensor | None, grad_scale: Tensor | None, device: torch.device) -> Verdict:
        """Return the verdict of another library, in the words of torch's fused optimizers.

        Args:
            found_inf: Not zero to skip the step; ``None`` to take it.
            grad_scale: The number to divide the gradients by; ``None`` not to divide.
            device: The device of the verdict.
        """
        one = torch.ones((), dtype=torch.float32, device=device)
        return cls(
            norms=one.new_empty(0),
            grad_norm=one * torch.nan,
            found_inf=one.eq(0) if found_inf is None else moved(found_inf, device, torch.bool).reshape(()),
            multiplier=one if grad_scale is None else moved(grad_scale, device, torch.float32).reciprocal(),
            is_one=grad_scale is None,
        )

    def on(self, device: torch.device) -> Verdict:
        """Return the verdict with what an update reads of it on another device. A host sync if that is the CPU."""
        if self.found_inf.device == device:
            return self
        found_inf, multiplier = moved(self.found_inf, device), moved(self.multiplier, device)
        return replace(self, found_inf=found_inf, multiplier=multiplier, as_fused=())

    def applied(self) -> Verdict:
        """Return the verdict on the same gradients after they were multiplied in place."""
        return (
            self
            if self.is_one
            else replace(self, multiplier=torch.ones_like(self.multiplier), is_one=True, as_fused=())
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedGradients:
    """The gradients of one step with the verdict on them, before anything is written.

    Attributes:
        params: The models' parameters that have gradients.
        gradients: Their gradients, dense, of the same order.
        scale: 0-d float32: the loss scale that the gradients carry; ``None`` for plain ones.
        verdict: Whether to update, and the number to multiply the gradients by.
        is_clipped: Whether the verdict's multiplier clips.
        is_alike: Whether all gradients are of one dtype on one device.
        losses: The losses that the backward passes have differentiated, in their order; 0-d.
        failed: 0-d bool: whether a loss itself was not finite.
    """

    params: list[Tensor]
    gradients: list[Tensor]
    scale: Tensor | None
    verdict: Verdict
    is_clipped: bool
    is_alike: bool
    losses: list[Tensor]
    failed: Tensor


def judge(norms: Tensor, inverse_scale: Tensor | None, *, max_norm: float | Tensor | None = None) -> Verdict:
    r"""Return the verdict of pass 1: whether to update, and the number to multiply gradients by.

    .. math:: n = \frac{1}{S} \sqrt{\sum_i n_i^2}, \qquad
              multiplier = \frac{1}{S} \min\left(1, \frac{max\_norm}{n + 10^{-6}}\right)

    A step is skipped too where unscaling itself makes an infinity, and where the sum of squares is beyond 3.4e38 (a
    finite gradient above 1.8e19).

    Args:
        norms: (gradients,) float32: 2-norms of the scaled gradients, as ``Executor.norms`` gives them; of sharded
            gradients the norms over all ranks.
        inverse_scale: 0-d float32, 1/S; ``None`` for gradients that carry no scale.
        max_norm: Clip to this; a 0-d device tensor follows a schedule through a captured graph. None does not clip.

    Returns:
        The verdict. Nothing is written.

    **Cost**: no host sync; it can be captured in a CUDA graph. 8 one-element kernels; one by :func:`judge_numbers`.

    Example:
        >>> import torch
        >>> verdict = judge(torch.tensor([3.0, 4.0]) * 1024, torch.tensor(1 / 1024), max_norm=1.0)
        >>> verdict.grad_norm, verdict.found_inf, verdict.multiplier * 1024
        (tensor(5.), tensor(False), tensor(0.2000))
    """
    grad_norm = torch.linalg.vector_norm(norms)
    multiplier = inverse_scale
    if inverse_scale is not None:
        # The norm of the scaled gradients times 1/S also finds an infinity that unscaling would make.
        grad_norm = grad_norm * inverse_scale
    if max_norm is not None:
        clip = clip_coefficient(grad_norm, max_norm)
        multiplier = clip if inverse_scale is None else inverse_scale * clip
    return Verdict(
        norms=norms,
        grad_norm=grad_norm,
        found_inf=not_finite(grad_norm),
        multiplier=torch.ones_like(grad_norm) if multiplier is None else multiplier.to(torch.float32),
        is_one=multiplier is None,
    )


def clip_coefficient(grad_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return the factor by which ``torch.nn.utils.clip_grad_norm_`` clips gradients of this norm, with its epsilon."""
    # Spelled out as torch divides a number by a tensor, so that a kernel that reads the number as a tensor agrees.
    return ((grad_norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0)


def not_finite(number: Tensor) -> Tensor:
    """Return whether a 0-d tensor is infinite or NaN, as a 0-d bool; in two kernels."""
    return (number * 0).ne(0)


def judge_numbers(is_scaled: bool, is_clipped: bool, norms: Tensor, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of :func:`judge`, as a function of tensors and numbers alone.

    Args:
        is_scaled: Whether the gradients carry a scale.
        is_clipped: Whether their norm is clipped.
        norms: 2-norms of the gradients.
        *numbers: The scale if the gradients carry one, and then the norm to clip to if they are clipped.

    Returns:
        ``grad_norm``, ``found_inf`` and ``multiplier`` of a :class:`Verdict`.
    """
    verdict = judge(norms, inverse(numbers[0]) if is_scaled else None, max_norm=numbers[-1] if is_clipped else None)
    return verdict.grad_norm, verdict.found_inf, verdict.multiplier


def judge_step_numbers(
    is_scaled: bool, is_clipped: bool, with_fused: bool, num_inner: int, num_losses: int, total: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the verdict on a step, as one pure function of tensors and numbers.

    Args:
        is_scaled: Whether the gradients carry a scale.
        is_clipped: Whether their norm is clipped.
        with_fused: Whether to return :func:`as_fused` too, for torch's fused optimizers.
        num_inner: The number of flags for gradients that a loss was computed from: 0 or 1.
        num_losses: How many losses were differentiated.
        total: Norms whose 2-norm is that of all gradients.
        *rest: The scale if the gradients carry one; the norm to clip to if they are clipped; then these flags, these
            losses, and flags of gradients that were not finite when they were unscaled.

    Returns:
        ``grad_norm``, ``found_inf`` and ``multiplier`` of a verdict; whether a loss, or a gradient that it was computed
        from, was not finite itself, so that the loss scale stays; and with ``with_fused`` the verdict's ``as_fused``.
    """
    start = is_scaled + is_clipped
    ends = start + num_inner, start + num_inner + num_losses
    scale_and_clip, inner, losses, flags = rest[:start], rest[start : ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :]
    grad_norm, found_inf, multiplier = judge_numbers(is_scaled, is_clipped, total, *scale_and_clip)
    wrong = [*map(not_finite, losses), *inner]  # an inner backward pass has adapted a loss scale of its own
    # Where no loss is known, this is False, by an operation that kernels can be written from.
    failed = reduce(or_, wrong) if wrong else found_inf.ne(found_inf)
    for flag in (*wrong, *flags):
        found_inf = found_inf | flag
    verdict = grad_norm, found_inf, multiplier, failed
    return (*verdict, *as_fused(found_inf, *([multiplier] if is_clipped else []))) if with_fused else verdict


def as_fused(found_inf: Tensor, *multiplier: Tensor) -> tuple[Tensor, ...]:
    """Return ``found_inf`` for torch's fused optimizers, and the scale that they divide gradients by, if any."""
    return found_inf.to(torch.float32), *[factor.reciprocal() for factor in multiplier]


def counted(found_inf: Tensor, *steps: Tensor) -> tuple[Tensor, ...]:
    """Return the counts of updates after this step, from those before it. No host sync."""
    return tuple([step + ~found_inf for step in steps])


def numbers_of_step(rules: tuple[UpdateRule, ...], found_inf: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Return the counts of updates, and the numbers that elements share: executors write one kernel of this function.

    Args:
        rules: A rule for each of several counts.
        found_inf: 0-d bool: whether the step is skipped.
        *numbers: The count of updates before this step, one for each rule; then the hyper-parameters of each rule.

    Returns:
        The count of updates after this step, for each rule; then :meth:`UpdateRule.scalars` of each. No host sync.
    """
    start = len(rules)
    counts = counted(found_inf, *numbers[:start])
    scalars = []
    for rule, count in zip(rules, counts, strict=True):
        end = start + len(rule.hypers)
        scalars.append(rule.scalars(dict(zip(rule.hypers, numbers[start:end], strict=True)), count))
        start = end
    return (*counts, *scalars)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Weights that are always updated together: one device, one rule, one storage, one history.

    A parameter that has no gradient in a step of the other parameters belongs in a bucket of its own from then on,
    since bias corrections depend on the count.

    Args:
        rule: The update rule.
        storage: How the weights lie in memory.
        hypers: The rule's hyper-parameters: 0-d float64 tensors on the device.
        step: 0-d int64 on the device: the count of updates; while an update runs, with that update.
        weights: The model's tensors.
        extras: The tensor that lies beside each weight, or None where the storage has none.
        states: The rule's states of each weight, float32 or bfloat16, laid out as the weight is; or the codes of each
            state, laid out so, and then its scales (:mod:`mezzo.step.moments`). What is not float32 is rounded at
            random: to nearest, a second moment could never shrink (0.999 of it rounds to itself).
        seed: For random rounding; ranks that hold different weights give different ones.
        only_move: Whether these tensors and the gradients never change in anything but their addresses.
        params: Of a rule of whole matrices: the parameters, DTensors where the weights are this rank's parts of them.
        settings: Of such a rule: what it reads on the host, by name.
        rate_dtype: Of such a rule: the dtype in which the program has its learning rate.
        products: Of such a rule: how it multiplies.
    """

    rule: UpdateRule
    storage: Storage
    hypers: Mapping[str, Tensor]
    step: Tensor
    weights: Sequence[Tensor]
    extras: Sequence[Tensor | None]
    states: Sequence[States]
    seed: int = 0
    only_move: bool = False
    params: Sequence[Tensor] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    rate_dtype: torch.dtype = torch.float64
    products: Products = NATIVE

    def targets(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors that an update of a weight writes: the weight's parts, then its states."""
        return *self.storage.parts(self.weights[index], self.extras[index]), *self.states[index]

    @property
    def random(self) -> bool:
        """Whether anything is rounded at random."""
        return any(s.dtype != torch.float32 for states in self.states for s in states)


def scales_among(storage: Storage, targets: Sequence[Tensor]) -> range:
    """Return the indices of scales among the tensors that an update writes: the other tensors have a value an element.

    Args:
        storage: How the weight is stored.
        targets: Parts and states of a weight.
    """
    first = storage.num_parts
    in_codes = len(targets) > first and moments.is_coded(targets[first].dtype)
    return range(first + 1, len(targets), 2) if in_codes else range(0)


class BucketUpdate(ABC):
    """Pass 2 for one bucket."""

    bucket: Bucket

    @abstractmethod
    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Prepare an update: compile kernels and write tables, or refuse the gradients. No weight is written.

        Args:
            gradients: float32, or a low precision; in the order of the weights; any layout.

        Returns:
            The gradients as :meth:`write` reads them, which is to be the next call.
        """

    @abstractmethod
    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """Update every weight, extra and state in place.

        Gradients are multiplied by ``verdict.multiplier`` on the way, and never written. With ``verdict.found_inf``
        nothing at all is written.

        Args:
            gradients: What :meth:`ready` returned.
            verdict: The verdict on the step.
            step: 0-d int64 on the device: the count of updates, with this one.
            scalars: The numbers of the bucket's rule in this step.
        """

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor], verdict: Verdict) -> None:
        """Call :meth:`ready` and :meth:`write`, where ``bucket.step`` counts this step."""
        bucket = self.bucket
        self.write(self.ready(gradients), verdict, bucket.step, bucket.rule.scalars(bucket.hypers, bucket.step))


class Executor(Protocol):
    """An implementation of both passes; all agree with :func:`updated` up to the last roundings of the arithmetic."""

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Read gradients once: (gradients,) float32, the 2-norm of each, not finite if a value is not."""

    def update_of(self, bucket: Bucket) -> BucketUpdate:
        """Return pass 2 for a bucket. Each call reads the addresses of tensors anew, so that they may move."""


def updated(
    rule: UpdateRule,
    storage: Storage,
    gradient: Tensor,
    targets: Sequence[Tensor],
    scalars: Tensor,
    multiplier: Tensor,
    key: Tensor,
    order: Tensor,
) -> tuple[Tensor, ...]:
    """Return the values to copy into each part and each state: pass 2 as a pure function of tensors.

    The function is element-wise, but for states in codes: elements are (groups, 32) then, and scales (groups, 1).

    Args:
        rule: The update rule.
        storage: How the weight is stored.
        gradient: Scaled, of any floating dtype.
        targets: The stored tensors of the weight, then the rule's states.
        scalars: Of ``rule.scalars``.
        multiplier: Of :func:`judge`.
        key: 0-d int32, of :func:`mezzo.step.storage.keys`, for what is rounded at random.
        order: int32 element numbers, for the same.

    Returns:
        Values as FP32 or int32, which a copy into the targets rounds no further; of a target that stays as it is the
        target itself.
    """
    parts, states = tuple(targets[: storage.num_parts]), targets[storage.num_parts :]
    stored = moments.apart(states)
    decoded = tuple(map(moments.read, stored))
    weight, new_moments = rule.update(gradient.to(torch.float32) * multiplier, storage.read(parts), decoded, scalars)
    values = parts if storage.write is None else storage.write(weight, parts[0].dtype)
    is_random = any(state.dtype != torch.float32 for state in states)
    bits = [noise(order, key, number) for number in range(1, 1 + (len(stored) + 1) // 2)] if is_random else []
    for index, (tensors, moment) in enumerate(zip(stored, new_moments, strict=True)):
        # Two moments share 32 random bits: one is rounded with low bits, the other with high ones.
        values = *values, *moments.write(tensors, moment, bits[index // 2] if bits else None, take_high=index % 2 > 0)
    return values
