"""The fourth station, the scale: loss scales that took part move, on the device, and the step says what it found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import or_
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from mezzo.scale import ScaleState
from mezzo.scale.scaler import Scaler, moved_on
from mezzo.session.verdict import Judged
from mezzo.session.window.window import LossShare
from mezzo.step.consensus import Heard
from mezzo.step.executors.choose import shared
from mezzo.step.passes import Verdict, not_finite
from mezzo.tensors import LOW, moved

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow

__all__ = ["Part", "Step", "StepOutcome", "account", "adapt", "adapt_at_once", "one_or_all", "parts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step as the device knows it, once its loss scales have adapted.

    Attributes:
        verdict: On its gradients.
        params: The tensors whose gradients these are.
        scale: Float32: the scale that gradients carried; 0-d, or one for each loss if several took part.
        next_scale: Float32: the scale from now on, in the shape of ``scale``.
        after: The state of each of these losses' scales now.
        loss_failed: 0-d bool: whether a loss was not finite by itself, so that its scale stayed.
        heard: What all ranks have told; ``None`` where there is one.
        account: What :func:`account` makes of :meth:`numbers`, where it was computed with the next scales.
    """

    verdict: Verdict
    params: list[Tensor]
    scale: Tensor
    next_scale: Tensor
    after: Mapping[int, ScaleState]
    loss_failed: Tensor
    heard: Heard | None = None
    account: Tensor | None = None

    @classmethod
    def of_nothing(cls, verdict: Verdict, scale: Tensor, heard: Heard | None = None) -> Self:
        """Return the outcome of a step that took no gradients, and moved no scale; arguments as the attributes."""
        failed = torch.zeros_like(verdict.found_inf)
        return cls(verdict=verdict, params=[], scale=scale, next_scale=scale, after={}, loss_failed=failed, heard=heard)

    def numbers(self) -> list[Tensor]:
        """Return what the host wants to know: whether it was skipped, and of each scale its value and its wait.

        Where there are several ranks, what they have told comes last.
        """
        scales = (t for state in self.after.values() for t in (state.scale, state.floor_overflows))
        heard = [] if self.heard is None else [self.heard.blame, self.heard.problem]
        return [self.verdict.found_inf, self.loss_failed, *scales, *heard]


class Step:
    """What one optimizer step did, as device tensors: reading one as a Python value waits for the device.

    Those of a step that :func:`mezzo.capture` captured are the same tensors each time: its next call overwrites them.

    Reading an attribute raises :class:`ScaleCollapsed` once the host knows that the loss scale has collapsed.
    """

    __slots__ = ("_check", "_outcome", "_overflow")

    def __init__(
        self, outcome: StepOutcome, check: Callable[[], None], overflow: Overflow | Changed | None = None
    ) -> None:
        self._outcome, self._check, self._overflow = outcome, check, overflow

    @property
    def skipped(self) -> Tensor:
        """0-d bool: whether a gradient was not finite, so that nothing was updated."""
        self._check()
        return self._outcome.verdict.found_inf

    @property
    def scale(self) -> Tensor:
        """Float32: the loss scale that the gradients carried; 0-d, or one for each loss if several took part."""
        self._check()
        return self._outcome.scale

    @property
    def next_scale(self) -> Tensor:
        """Float32: the loss scale from now on, in the shape of ``scale``."""
        self._check()
        return self._outcome.next_scale

    @property
    def grad_norm(self) -> Tensor:
        """0-d float32: 2-norm of all unscaled gradients, before clipping."""
        self._check()
        return self._outcome.verdict.grad_norm

    @property
    def rank_found(self) -> Tensor | None:
        """0-d int64: the rank that found something not finite, -1 for none; ``None`` where there is one rank.

        The first whose own loss was not finite; else the first with such gradients, which after a reduction all have.
        Ranks are numbered as in the session's process group, which ``torch.distributed.get_global_rank`` translates.
        """
        self._check()
        return None if self._outcome.heard is None else self._outcome.heard.rank_found

    @property
    def overflow(self) -> Overflow | Changed | None:
        """Where the overflow began, with ``on_overflow="explain"``; ``None`` for a step that was taken.

        :class:`mezzo.overflow.Changed` names inputs that were changed in place since, so that nothing could be rerun.
        """
        return self._overflow

    @classmethod
    def plain(cls) -> Self:
        """Return the step of an optimizer by itself, which nothing has scaled or checked."""
        verdict = Verdict.of_flags(None, None, torch.device("cpu"))
        return cls(StepOutcome.of_nothing(verdict, torch.ones(())), lambda: None)

    def __repr__(self) -> str:
        made, verdict = self._outcome, self._outcome.verdict
        scales = f"scale={made.scale}, next_scale={made.next_scale}"
        return f"Step(skipped={verdict.found_inf}, {scales}, grad_norm={verdict.grad_norm})"


def adapt(scalers: list[Scaler], judged: Judged, inner_overflows: Mapping[int, Tensor]) -> StepOutcome:
    """Move the scale of each loss that took part, once for each scale that its gradients carried.

    A loss that is not finite itself leaves its scale alone, unless gradients inside it overflowed on their way there.

    Args:
        scalers: The scale of each loss.
        judged: The gradients.
        inner_overflows: Whether gradients that a loss was computed from had overflowed, by loss.
    """
    parts = parts_of(scalers, judged.shares, judged.losses, inner_overflows, judged.verdict.found_inf.device)
    is_simple = judged.verdict.found_inf.device.type != "cpu" and all(part.is_simple for part in parts)
    failed, before, after, told = _together(parts, judged.verdict.found_inf) if is_simple else _in_turn(parts)
    return StepOutcome(
        verdict=judged.verdict,
        params=judged.params,
        scale=before,
        next_scale=after,
        after={part.loss_id: part.scaler.state for part in parts},
        loss_failed=failed,
        heard=judged.heard,
        account=told if judged.heard is None else None,
    )


def adapt_at_once(scalers: list[Scaler], shares: list[LossShare], losses: list[tuple[int, Tensor]]) -> None:
    """Move loss scales before the step that takes their gradients; that step leaves them alone then.

    Args:
        scalers: The scale of each loss.
        shares: What these gradients carried, and what was found of them.
        losses: The losses that made them.
    """
    _in_turn(parts_of(scalers, shares, losses, {}, shares[0].found_inf.device))


def parts_of(
    scalers: list[Scaler],
    shares: list[LossShare],
    losses: list[tuple[int, Tensor]],
    inner_overflows: Mapping[int, Tensor],
    device: torch.device,
) -> list[Part]:
    """Return what gradients tell the scale of each loss that took part.

    Args:
        scalers: The scale of each loss.
        shares: What each loss contributed.
        losses: The losses themselves, with their ids.
        inner_overflows: Whether gradients that a loss was computed from had overflowed, by loss.
        device: Where these are.
    """
    # By loss, lowest id first: each scale that its gradients carried, and whether some of these overflowed.
    told: defaultdict[int, dict[int, tuple[Tensor, list[Tensor]]]] = defaultdict(dict)
    for share in sorted(shares, key=lambda share: share.loss_id):
        told[share.loss_id].setdefault(id(share.scale), (share.scale, []))[1].append(share.found_inf)
    parts = []
    for loss_id, verdicts in told.items():
        scaler = scalers[loss_id]
        own = [loss for number, loss in losses if number == loss_id or not scaler.keeps_apart]
        parts.append(Part(loss_id, scaler, _one_of(own, device), inner_overflows.get(loss_id), list(verdicts.values())))
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a step tells one loss scale.

    Attributes:
        loss_id: The loss.
        scaler: The scale.
        loss: 0-d, finite where its losses are.
        inner: 0-d bool: whether gradients that the loss was computed from had overflowed; ``None`` without such.
        verdicts: The scales that its gradients carried, each with what was found of them. One scale is updated once,
            however many optimizers stepped with its gradients; several if the loss was backpropagated with the scale
            of an earlier step as well.
    """

    loss_id: int
    scaler: Scaler
    loss: Tensor
    inner: Tensor | None
    verdicts: list[tuple[Tensor, list[Tensor]]]

    @property
    def is_simple(self) -> bool:
        """Whether one function of a few numbers says all; a window of skipped steps is told of this one before."""
        (scale, flags), *others = self.verdicts
        is_known = len(flags) == 1 and self.inner is None
        moves_at_once = self.scaler.moves_at_once(scale) and (is_known or not self.scaler.counts_skips)
        return not others and (moves_at_once or self.scaler.config.mode == "none")


_Found: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _in_turn(parts: list[Part]) -> _Found:
    """Move scales one after the other: whether a loss failed, their values before and after, and no account."""
    failures, before, after = [], [], []
    for part in parts:
        for scale, flags in part.verdicts:
            found = reduce(or_, flags)
            told = [found] if part.inner is None else [found, part.inner]
            failed, found, hold = shared(_told, (), [part.loss, *told])
            part.scaler.update(found, made_with=scale, hold=hold)
        failures.append(failed)
        # A graph writes the next scale into the memory of this one.
        before.append(scale.clone() if part.scaler.in_graph else scale)
        after.append(part.scaler.state.scale)
    return reduce(or_, failures), one_or_all(before), one_or_all(after), None


def _together(parts: list[Part], found_inf: Tensor) -> _Found:
    """Move all scales at once, on a device that is not the host, and return what the host wants to know of the step.

    In one launch where kernels can be written.
    """
    kinds, tensors, windows = [], [found_inf], []
    for part in parts:
        ((_, flags),) = part.verdicts
        inner = [] if part.inner is None else [part.inner]
        numbers, window = part.scaler.numbers(flags[0])
        kinds.append((part.scaler.config, len(flags), len(inner), len(numbers)))
        windows.append(window)
        tensors += [part.loss, *flags, *inner, *numbers]
    scaler, scale = parts[0].scaler, parts[0].verdicts[0][0]
    before = scale.clone() if scaler.in_graph and len(parts) == 1 else scale
    found = iter(shared(_adapted, tuple(kinds), tensors))
    failed, told = next(found), next(found)
    for part, kind, window in zip(parts, kinds, windows, strict=True):
        hold, *moved = islice(found, kind[-1] + 2)
        part.scaler.move(moved, hold, window)
    before, after = [*found] or (before, scaler.state.scale)
    return failed, before, after, told


def account(*numbers: Tensor) -> tuple[Tensor]:
    """Return what the host wants to know of a step as one FP32 vector of its device.

    Args:
        *numbers: 0-d: of :meth:`StepOutcome.numbers`.
    """
    return (torch.stack([number.to(torch.float32) for number in numbers]),)


def one_or_all(scales: list[Tensor]) -> Tensor:
    """Return the one of some scales, or the vector of several."""
    return scales[0] if len(scales) == 1 else torch.stack(scales)


def _one_of(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d tensor of a device that is finite where all losses are, without a sync."""
    if not losses:  # those of gradients that were found are not known
        return torch.zeros((), device=device)
    if len(losses) == 1:
        loss = losses[0].reshape(())
        return moved(loss, device, torch.float32 if loss.dtype in LOW else loss.dtype)
    # In float64 only where a loss is: on float32 it would be infinite above 3.4e38.
    dtype = torch.float64 if any(loss.dtype == torch.float64 for loss in losses) else torch.float32
    there = [moved(loss.reshape(()), device, dtype) for loss in losses]
    return (torch.stack(there) * 0).sum()


def _adapted(*given: Any) -> tuple[Tensor, ...]:
    """Move all scales on, in one launch where kernels can be written.

    Args:
        *given: Of each scale: the rules, and how many flags, inner flags and numbers there are of it. Then whether the
            step is skipped and, scale by scale, its loss, these flags and these numbers.

    Returns:
        Whether a loss failed; the step's :func:`account`; of each scale whether it is to stay, and what
        :func:`moved_on` returns; where there are several, the vectors of all scales before and after.
    """
    kinds = [each for each in given if not isinstance(each, Tensor)]
    skipped, *tensors = given[len(kinds) :]
    rest = iter(tensors)
    failures, results, before, after, floors = [], list[Tensor](), [], [], []
    for config, num_flags, num_inner, num_numbers in kinds:
        loss, *flags = islice(rest, 1 + num_flags)
        failed, found, hold = _told(loss, reduce(or_, flags), *islice(rest, num_inner))
        numbers = list(islice(rest, num_numbers))
        moved = moved_on(config, found, hold, *numbers)
        failures.append(failed)
        results += [hold, *moved]
        before.append(numbers[0])
        after.append(moved[1])
        floors.append(moved[4])
    several = [torch.stack(before), torch.stack(after)] if len(kinds) > 1 else []
    failed = reduce(or_, failures)
    told = account(skipped, failed, *chain.from_iterable(zip(after, floors, strict=True)))
    return failed, *told, *results, *several


def _told(loss: Tensor, found_inf: Tensor, inner: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether a loss itself failed, whether its gradients overflowed, and whether its scale is to stay.

    Args:
        loss: 0-d.
        found_inf: 0-d bool: whether its gradients are not finite.
        inner: 0-d bool: whether gradients that it was computed from had overflowed.
    """
    failed = not_finite(loss)
    if inner is not None:
        failed, found_inf = failed & ~inner, found_inf | inner
    return failed, found_inf, found_inf & failed
