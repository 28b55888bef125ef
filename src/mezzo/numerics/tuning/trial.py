"""One trial: the gradients and steps of a policy, beside those of FP32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch

from mezzo.errors import MezzoError, printable
from mezzo.numerics.tuning.measures import cosine, sqnr, together
from mezzo.numerics.tuning.shadow import Pass, Shadow
from mezzo.overflow.diagnose import highest_scale
from mezzo.policy import Policy
from mezzo.scale import LossScale

__all__ = ["DEFAULT_SCALE", "FAULT_DB", "LARGEST_SEED", "Outcome", "Trials", "ratio_text"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`

#: Where dynamic loss scales start; half of it is the largest power of two that a float16 loss itself can be given.
DEFAULT_SCALE: Final = LossScale.dynamic().init
LARGEST_SEED: Final = 2.0**15
#: How far :func:`highest_scale` looks.
_RANGE: Final = 2.0**41
#: A gradient with less than this is a fault.
FAULT_DB: Final = 20.0
#: All steps together may be further off: an optimizer that divides by a gradient's size turns the noise of its smallest
#: elements into whole updates.
_UPDATES_DB: Final = 10.0
#: A share of a gradient that a higher scale could save from zero.
_MUCH_FLUSHED: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial came to.

    Attributes:
        sqnr_db: Signal to noise of the worst gradient against FP32's, in dB; −inf where one is not finite.
        cosine: Of that gradient and FP32's; ``None`` where it is not finite, or zero.
        tensor: Path of its parameter; ``loss`` where the forward pass is not finite or fails.
        step: In which step, from 1.
        loss_scale: What the loss was multiplied by.
        low_loss: Whether the loss itself is a float16 number, which a scale above 32768 takes to infinity.
        updates_db: The same of all updates together, after all steps in a row; ``None`` where none were taken,
            or FP32's are zero.
        steady: Whether the updates are judged: not where one rounding more leads FP32 itself to other weights.
        note: Why the forward pass failed, where it did.
    """

    sqnr_db: float
    cosine: float | None = None
    tensor: str
    step: int
    loss_scale: float
    low_loss: bool = False
    updates_db: float | None = None
    steady: bool = True
    note: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether it is too far from FP32 to train so."""
        if self.sqnr_db < FAULT_DB or self.updates_db is None:
            return self.sqnr_db < FAULT_DB
        return self.updates_db < _UPDATES_DB if self.steady else self.updates_db == -math.inf

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are."""
        return self.sqnr_db > -math.inf

    def __str__(self) -> str:
        if self.note:
            return f"the forward pass of step {self.step} fails with {self.note}"
        if not self.is_finite:
            what = "the loss" if self.tensor == "loss" else f"the gradient of {self.tensor}"
            return f"{what} is not finite in step {self.step}"
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.6f}"
        return f"the worst gradient, {self.tensor}'s, has {ratio_text(self.sqnr_db)}{cosine}"


def ratio_text(ratio: float) -> str:
    """Write a signal-to-noise ratio.

    Example:
        >>> ratio_text(41.23), ratio_text(float("-inf")), ratio_text(float("inf"))
        ('41 dB', 'not finite', 'exact')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "not finite"
    return f"{ratio:.0f} dB"


class Trials:
    """Policies tried one after the other from the same states, batches and random numbers.

    Args:
        shadow: The FP32 steps.

    Attributes:
        count: How many were tried.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.shadow, self.count = shadow, 0
        self._known: dict[str, Outcome] = {}
        self._order = list(range(len(shadow.batches)))

    def outcome(self, policy: Policy) -> Outcome:
        """Run every step under a policy; each policy once.

        The loss scale is the one that sessions start with where that does, else one that keeps every gradient finite.
        Steps begin where FP32's did; what is finite and near then takes them in a row.

        Raises:
            MezzoError: The device cannot do what the policy asks for.
        """
        key = str(policy)
        if key not in self._known:
            self.count += 1
            self._known[key] = self._run(policy)
        return self._known[key]

    def _run(self, policy: Policy) -> Outcome:
        scale = DEFAULT_SCALE if policy.dtype == torch.float16 else 1.0
        worst = self._worst(policy, scale)
        return worst if worst.is_fault else self._with_updates(policy, worst)

    def _tried(self, run: Callable[[Policy], T], policy: Policy, step: int, scale: float) -> T | Outcome:
        """Run something under a policy; where low precision makes it fail, say so.

        Raises:
            Exception: It fails in FP32 too, or only once: low precision is not why.
        """
        try:
            return run(policy)
        except (MezzoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            run(Policy.O0())
            try:
                run(policy)
            except Exception as again:
                note = printable(f"{type(again).__name__}: {again}".splitlines()[0])
                return Outcome(sqnr_db=-math.inf, tensor="loss", step=step + 1, loss_scale=scale, note=note)
            raise error from None

    def _worst(self, policy: Policy, scale: float) -> Outcome:
        """Find the worst gradient of all steps, under one scale that suits all of them."""
        found: list[Outcome] = []
        while len(found) < len(self._order):
            step = self._order[len(found)]
            run = partial(self._step, step=step, scale=scale, may_rise=not found)
            outcome = self._tried(run, policy, step, scale)
            if outcome.is_fault:
                self._order.remove(step)  # where it went wrong it is tried first from now on
                self._order.insert(0, step)
                return outcome
            if outcome.loss_scale < scale and found:
                found.clear()
            else:
                found.append(outcome)
            scale = outcome.loss_scale
        return min(found, key=lambda each: (each.sqnr_db, each.step))

    def _step(self, policy: Policy, step: int, scale: float, *, may_rise: bool) -> Outcome:
        with self.shadow.forward(policy, step) as run:
            if not math.isfinite(run.loss.item()):
                return Outcome(sqnr_db=-math.inf, tensor="loss", step=step + 1, loss_scale=scale)

            def judged(at: float) -> Outcome:
                return self._judged(run, step, at)

            if policy.dtype != torch.float16:
                return judged(1.0)
            seeded = min(scale, LARGEST_SEED) if run.loss.dtype == torch.float16 else scale
            outcome = judged(seeded)
            if not outcome.is_finite:
                return self._finite(run, outcome, judged)
            if may_rise and outcome.is_fault and self._flushes(run, outcome):
                risen = self._finite(run, outcome, judged, above=_RANGE * outcome.loss_scale)
                return risen if risen.sqnr_db > outcome.sqnr_db else outcome
            return outcome

    def _judged(self, run: Pass, step: int, scale: float) -> Outcome:
        reference, gradients = self.shadow.gradients[step], run.gradients(scale)
        names = self.shadow.judged[step]
        lost = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
        ratios = {name: sqnr(reference[name], gradients[name]) for name in names} | dict.fromkeys(lost, -math.inf)
        worst = min(ratios, key=lambda name: ratios[name], default="")
        return Outcome(
            sqnr_db=ratios.get(worst, math.inf),
            cosine=None if lost or not worst else cosine(reference[worst], gradients[worst]),
            tensor=worst,
            step=step + 1,
            loss_scale=scale,
            low_loss=run.loss.dtype == torch.float16,
        )

    def _finite(
        self, run: Pass, before: Outcome, judged: Callable[[float], Outcome], above: float | None = None
    ) -> Outcome:
        """Find the scale below one that is too high with which all gradients are finite, and have some room left."""

        def is_finite_at(scale: float) -> bool:
            return all(bool(gradient.isfinite().all()) for gradient in run.gradients(scale).values())

        limit = torch.finfo(torch.float16).max
        highest = highest_scale(above or before.loss_scale, None, limit, is_finite_at)
        if highest is None:
            return before
        roomy = judged(highest / 2)
        return roomy if not roomy.is_fault else max(roomy, judged(highest), key=lambda each: each.sqnr_db)

    def _flushes(self, run: Pass, outcome: Outcome) -> bool:
        """Whether zeros in the worst gradient are none in FP32's."""
        reference = self.shadow.gradients[outcome.step - 1][outcome.tensor]
        zeros = (run.gradients(outcome.loss_scale)[outcome.tensor] == 0) & (reference != 0)
        return float(zeros.float().mean()) > _MUCH_FLUSHED

    def _with_updates(self, policy: Policy, outcome: Outcome) -> Outcome:
        """Take all steps in a row, and compare what they add to the weights."""
        scale, last = outcome.loss_scale, len(self._order) - 1
        updates = self._tried(partial(self.shadow.taken, scale=scale), policy, last, scale)
        if isinstance(updates, Outcome):
            return updates
        ratio = together(self.shadow.updates, updates)
        return dataclasses.replace(outcome, updates_db=None if math.isnan(ratio) else ratio, steady=self.shadow.steady)
