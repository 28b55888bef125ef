"""One trial: the gradients of a policy's steps, beside those of FP32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from mezzo.errors import MezzoError, printable
from mezzo.numerics.tuning.shadow import Gradients, Pass, Shadow, sqnr
from mezzo.overflow.diagnose import highest_scale
from mezzo.policy import Policy
from mezzo.scale import LossScale

#: Where dynamic loss scales start; half of it is the largest power of two that a float16 loss itself can be given.
DEFAULT_SCALE: Final = LossScale.dynamic().init
_LARGEST_SEED: Final = 2.0**15
#: How far a higher scale is looked for.
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
        tensor: Path of its parameter; ``loss`` where the forward pass is not finite or fails.
        step: In which step, from 1.
        loss_scale: What the loss was multiplied by.
        low_loss: Whether the loss itself is a float16 number, which a scale above 32768 takes to infinity.
        updates_db: The same of what an optimizer makes of all gradients; ``None`` without one, or where it adds zero.
        note: Why the forward pass failed, where it did.
    """

    sqnr_db: float
    tensor: str
    step: int
    loss_scale: float
    low_loss: bool = False
    updates_db: float | None = None
    note: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether it is too far from FP32 to train so."""
        return self.sqnr_db < FAULT_DB or (self.updates_db is not None and self.updates_db < _UPDATES_DB)

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
        updates = f"; what the optimizer makes of all: {ratio_text(self.updates_db)}" if self.updates_db else ""
        return f"the worst gradient, {self.tensor}'s, has {ratio_text(self.sqnr_db)}{updates}"


def ratio_text(ratio: float) -> str:
    """Write a signal-to-noise ratio.

    Example:
        >>> ratio_text(41.23), ratio_text(float("-inf")), ratio_text(float("inf"))
        ('41 dB', 'not finite', 'exact')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "not finite"
    return f"{ratio:.0f} dB"


def failure_text(error: Exception) -> str:
    """Write an error in one line."""
    return printable(f"{type(error).__name__}: {error}".splitlines()[0])


def fails_again(run: Callable[[], object], error: Exception) -> bool:
    """Whether what has failed fails in the same way a second time, as it does where precision is why.

    Raises:
        Exception: It fails in another way.
    """
    try:
        run()
    except Exception as again:
        if failure_text(again) != failure_text(error):
            raise again from error
        return True
    return False


class Trials:
    """Policies tried one after the other from the same states, batches and random numbers.

    Args:
        shadow: The FP32 steps.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self._known: dict[str, Outcome] = {}
        self._order = list(range(len(shadow.batches)))

    @property
    def count(self) -> int:
        """How many policies were tried."""
        return len(self._known)

    def outcome(self, policy: Policy) -> Outcome:
        """Run every step under a policy; each policy once.

        The loss scale is the one that sessions start with where that does, else one that keeps every gradient finite.
        All steps share it, and begin where FP32's did.

        Raises:
            MezzoError: The device cannot do what the policy asks for.
        """
        key = str(policy)
        if key not in self._known:
            self._known[key] = self._run(policy)
        return self._known[key]

    def _run(self, policy: Policy) -> Outcome:
        scale = DEFAULT_SCALE if policy.dtype == torch.float16 else 1.0
        found: list[Outcome] = []
        kept: dict[int, Gradients] = {}
        led, may_rise = set[int](), True
        while len(found) < len(self._order):
            step = self._order[len(found)]
            outcome = self._tried(policy, step, scale, may_rise and not found, kept)
            if outcome.is_fault:  # where it went wrong it is tried first from now on, and says which scale is needed
                self._order.remove(step)
                self._order.insert(0, step)
                if not found or step in led:
                    return outcome
                led.add(step)
                found.clear()
            elif outcome.loss_scale < scale and found:
                may_rise, scale = False, outcome.loss_scale
                found.clear()
            else:
                scale = outcome.loss_scale
                found.append(outcome)
        worst = min(found, key=lambda each: (each.sqnr_db, each.step))
        return dataclasses.replace(worst, updates_db=self._updates(kept))

    def _updates(self, kept: dict[int, Gradients]) -> float | None:
        """Compare what an optimizer makes of the gradients of all steps."""
        if self.shadow.updates is None:
            return None
        names = sorted({name for names in self.shadow.judged for name in names})
        made = self.shadow.taken([kept[step] for step in range(len(kept))])
        wide, low = (torch.cat([all_[name].flatten() for name in names]) for all_ in (self.shadow.updates, made))
        ratio = sqnr(wide, low)
        return None if math.isnan(ratio) else ratio

    def _tried(self, policy: Policy, step: int, scale: float, may_rise: bool, kept: dict[int, Gradients]) -> Outcome:
        """Run a step under a policy; where low precision makes it fail, say so.

        Raises:
            Exception: It fails in FP32 too, or only once: low precision is not why.
        """
        try:
            return self._step(policy, step, scale, may_rise, kept)
        except (MezzoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.shadow.forward(Policy.O0(), step).gradients(1.0)
            if not fails_again(lambda: self._step(policy, step, scale, may_rise, kept), error):
                raise
            note = failure_text(error)
            return Outcome(sqnr_db=-math.inf, tensor="loss", step=step + 1, loss_scale=scale, note=note)

    def _step(self, policy: Policy, step: int, scale: float, may_rise: bool, kept: dict[int, Gradients]) -> Outcome:
        run = self.shadow.forward(policy, step)
        if not math.isfinite(run.loss.item()):
            return Outcome(sqnr_db=-math.inf, tensor="loss", step=step + 1, loss_scale=scale)
        low_loss = run.loss.dtype == torch.float16
        reference, judged = self.shadow.gradients[step], self.shadow.judged[step]

        def at(scale: float) -> Outcome:
            gradients = kept[step] = run.gradients(scale)
            lost = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
            ratios = {name: sqnr(reference[name], gradients[name]) for name in judged} | dict.fromkeys(lost, -math.inf)
            worst = min(ratios, key=lambda name: ratios[name], default="")
            ratio = ratios.get(worst, math.inf)
            return Outcome(sqnr_db=ratio, tensor=worst, step=step + 1, loss_scale=scale, low_loss=low_loss)

        if policy.dtype != torch.float16:
            return at(1.0)
        outcome = at(min(scale, _LARGEST_SEED) if low_loss else scale)
        if not outcome.is_finite:
            return _finite(run, outcome, outcome.loss_scale, at)
        if may_rise and outcome.is_fault:
            name = outcome.tensor
            zeros = (kept[step][name] == 0) & (reference[name] != 0)
            if float(zeros.float().mean()) > _MUCH_FLUSHED:
                return _finite(run, outcome, _RANGE * outcome.loss_scale, at)
        return outcome


def _finite(run: Pass, before: Outcome, above: float, at: Callable[[float], Outcome]) -> Outcome:
    """Return the outcome at a scale that keeps all gradients finite, with some room left; or that before."""

    def is_finite_at(scale: float) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in run.gradients(scale).values())

    highest = highest_scale(above, None, torch.finfo(torch.float16).max, is_finite_at)
    if highest is None:
        return before
    roomy = at(highest / 2)
    found = roomy if not roomy.is_fault else max(roomy, at(highest), before, key=lambda each: each.sqnr_db)
    return at(found.loss_scale)  # whose gradients are kept
