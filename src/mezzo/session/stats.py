"""The statistics of a session's steps, known to the host without waiting for the device."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.errors import MezzoError, NumericsError, ScaleCollapsed, some_of
from mezzo.scale import LossScale
from mezzo.scale.config import as_float32
from mezzo.session.scale import StepOutcome, account
from mezzo.step.executors.choose import shared
from mezzo.step.whole import Call, at_once

__all__ = ["Noted", "Stats", "StepStats"]

logger = logging.getLogger(__name__)

#: How many steps on an accelerator travel to the host together, where nothing has to be known at once.
_TOGETHER: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A session's account of its steps so far, those before a checkpoint included.

    Attributes:
        steps: Calls of ``step()``, skipped ones included.
        skipped: How many of them updated nothing.
        skip_rate: Share of skipped steps among the last ``interval`` of the loss scale.
        growths: How often the loss scale rose.
        backoffs: How often it fell.
        scale: The loss scale now.
        lowest_scale: Its lowest value so far.
        highest_scale: Its highest value so far.
        ranks: How many ranks step together.
    """

    steps: int
    skipped: int
    skip_rate: float
    growths: int
    backoffs: int
    scale: float
    lowest_scale: float
    highest_scale: float
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class _Scale:
    """One loss scale's history on the host: what :class:`Stats` says of it."""

    scale: float
    lowest_scale: float
    highest_scale: float
    growths: int = 0
    backoffs: int = 0

    def moved(self, scale: float) -> _Scale:
        grew = scale > self.scale
        lowest, highest = min(self.lowest_scale, scale), max(self.highest_scale, scale)
        return _Scale(scale, lowest, highest, self.growths + grew, self.backoffs + (not grew))


class Noted(NamedTuple):
    """What an outcome changes in the statistics, in one go, and what is to be said of it then."""

    calls: list[Call]
    then: Callable[[], None]


class _Flight(NamedTuple):
    """An outcome whose numbers are on their way to the host: in pinned memory, there once the event has passed."""

    outcome: StepOutcome
    numbers: Tensor
    event: torch.Event


class StepStats:
    """Keep count of steps and scales, log each change of a scale, and tell when a scale collapsed.

    On an accelerator the numbers of several steps travel together, into pinned memory, and are read when they have
    arrived; with ``patience`` each step's do, at most two steps late.

    Args:
        config: The loss scale's rules.
        scales: The scale of each loss now.
        name_of: Gives the name of a tensor that the optimizers update.
        ranks: How many ranks step together. Where there are several, each step's numbers travel at once: another rank's
            error may be among them.
        moves_later: Whether the scale that a step leaves moves only before the next.
    """

    def __init__(
        self,
        config: LossScale,
        scales: list[Tensor],
        name_of: Callable[[Tensor], str],
        *,
        ranks: int = 1,
        moves_later: bool = False,
    ) -> None:
        self._moves_later = moves_later or config.mode == "none"  # where none but a scaler's can move
        self._config, self._name_of, self._ranks = config, name_of, ranks
        self._steps = self._skipped = 0
        self._recent: deque[bool] = deque(maxlen=config.interval)
        self._stream: torch.Stream | None = None  # of the last step
        self._follow(scales)

    def _follow(self, scales: list[Tensor]) -> None:
        """Follow these scales from here on; the count of steps goes on."""
        self._waiting: list[tuple[StepOutcome, Tensor]] = []
        self._flying: deque[_Flight] = deque()
        self._failure: MezzoError | None = None
        self._forward_failures = 0
        first = [float(scale.cpu().numpy()) for scale in scales]
        self._scales = [_Scale(scale, scale, scale) for scale in first]

    def note(self, outcome: StepOutcome, packed: Tensor) -> None:
        """Take an outcome, and send it on its way.

        Args:
            outcome: The outcome.
            packed: What :meth:`packed` returned of it, in a graph whose next replay writes there again.
        """
        calls, then = self.noted(outcome, packed)
        at_once(*calls)
        then()

    def noted(self, outcome: StepOutcome, packed: Tensor | None = None) -> Noted:
        """Return what takes an outcome, in one go, and what is to be called then; arguments as of :meth:`note`."""
        if outcome.verdict.found_inf.device.type == "cpu":
            # Through numpy: on the host already, so that nothing is asked of a device.
            numbers = [float(number.numpy()) for number in outcome.numbers()]
            return self._counted(outcome, numbers, outcome.verdict.norms)
        waiting = outcome, self.packed(outcome) if packed is None else packed.clone()
        stream = torch.accelerator.current_stream(outcome.verdict.found_inf.device)
        calls: list[Call] = [partial(self._waiting.append, waiting), partial(setattr, self, "_stream", stream)]
        return Noted(calls, self._send_if_due)

    def _send_if_due(self) -> None:
        if self._config.patience is not None or self._ranks > 1 or len(self._waiting) >= _TOGETHER:
            self._send()

    def check(self) -> None:
        """Raise if the loss scale has collapsed, as far as the host knows.

        Raises:
            ScaleCollapsed: It stood at its floor for ``patience`` overflows in a row.
            NumericsError: The loss itself was not finite for as many steps in a row.
            DistributedError: Another rank has ended a step with an error.
        """
        must_know = self._config.patience is not None
        while self._flying and (self._flying[0].event.query() or (must_know and len(self._flying) > 1)):
            self._land()
        if self._failure is not None:
            raise self._failure

    @property
    def begun(self) -> int:
        """How many steps there were, those whose numbers are still on their way included."""
        return self._steps + len(self._waiting) + len(self._flying)

    def stats(self, loss_id: int) -> Stats:
        """Return the account of one loss's scale, waiting for what is still on its way."""
        self.settle()
        rate = sum(self._recent) / len(self._recent) if self._recent else 0.0
        of_scale = asdict(self._scales[loss_id])
        return Stats(steps=self._steps, skipped=self._skipped, skip_rate=rate, ranks=self._ranks, **of_scale)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        self._send()
        while self._flying:
            self._land()

    # The way to the host -------------------------------------------------------------------------------

    def packed(self, outcome: StepOutcome) -> Tensor:
        """Return what the host wants to know of an outcome as one vector of its device."""
        numbers = outcome.account
        if numbers is None:
            (numbers,) = shared(account, (), outcome.numbers())
        return numbers if self._config.patience is None else torch.cat((numbers, outcome.verdict.norms))

    def _send(self) -> None:
        if not self._waiting:
            return
        waiting = list(self._waiting)
        # Steps may run on another stream than the caller that asks, and on another device than the current one.
        stream = torch.accelerator.current_stream(waiting[0][1].device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        event, flights = torch.Event(waiting[0][1].device), []
        for outcome, packed in waiting:
            packed.record_stream(stream)
            host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            flights.append(_Flight(outcome, host.copy_(packed, non_blocking=True), event))
        event.record(stream)
        # In one go, so that an interrupt neither loses an outcome nor counts it twice.
        at_once(partial(self._flying.extend, flights), partial(self._waiting.__delitem__, slice(len(waiting))))

    def _land(self) -> None:
        """Count the first outcome that is on its way, waiting until it has arrived."""
        outcome, numbers, event = self._flying[0]
        event.synchronize()
        count = len(outcome.numbers())
        calls, then = self._counted(outcome, numbers.numpy()[:count].tolist(), numbers[count:])
        at_once(*calls, self._flying.popleft)
        then()

    def _counted(self, outcome: StepOutcome, numbers: list[float], norms: Tensor) -> Noted:
        skipped, loss_failed, *rest = numbers
        step, patience = self._steps + 1, self._config.patience or math.inf
        scales, says = list(self._scales), list[Callable[[], None]]()
        failure: MezzoError | None = None
        problem = first = ""
        if outcome.heard is not None:
            *rest, blame, problem_number = rest
            failure, problem, first = outcome.heard.told(blame, problem_number, step)
        failures = self._forward_failures + 1 if skipped and loss_failed and not problem else 0
        if problem:
            says.append(partial(logger.info, "%s in step %d: skipped on all ranks", problem, step))
        if failures == 1:
            stays = ", and the loss scale stays" if self._config.mode == "dynamic" else ""
            says.append(partial(logger.warning, "the loss of step %d%s is not finite: skipped%s", step, first, stays))
        if failures >= patience:
            # Such steps leave the scale alone, and no scale can cure them.
            failure = NumericsError(
                f"the loss was not finite for {failures} steps in a row",
                where=f"step {step}{first}",
                why="the forward pass or the data overflowed, which no loss scale can cure",
                write='MixedPrecision(…, on_overflow="explain"), which says where it began; docs/nan.md has the rest',
            )
        for loss_id, scale, floor_overflows in zip(outcome.after, rest[::2], rest[1::2], strict=True):
            if self._config.mode == "none" and not self._steps:  # of a scaler that came after the session had begun
                scales[loss_id] = _Scale(scale, scale, scale)
            if scale != (before := scales[loss_id].scale):
                what = f"loss scale of loss {loss_id}" if len(scales) > 1 else "loss scale"
                at_floor = "; this is its floor" if scale == as_float32(self._config.floor) else ""
                why = "" if scale > before else f", which overflowed{at_floor}"
                log = "%s %.6g → %.6g after step %d%s"
                says.append(partial(logger.info, log, what, before, scale, step - self._moves_later, why))
                scales[loss_id] = scales[loss_id].moved(scale)
            if floor_overflows >= patience:
                loss = f"loss {loss_id}, " if len(scales) > 1 else ""
                failure = self._collapse(
                    f"{loss}step {step}{first}", scale, int(floor_overflows), outcome.params, norms
                )
        new = {
            "_steps": step,
            "_skipped": self._skipped + bool(skipped),
            "_forward_failures": failures,
            "_scales": scales,
            "_failure": failure,
        }

        def then() -> None:
            for say in says:
                say()

        return Noted([partial(self._recent.append, bool(skipped)), partial(vars(self).update, new)], then)

    def _collapse(
        self, where: str, scale: float, overflows: int, params: list[Tensor], norms: Tensor
    ) -> ScaleCollapsed:
        bad = [self._name_of(p) for p, norm in zip(params, norms.numpy(), strict=True) if not math.isfinite(norm)]
        guilty = f"{len(bad)} of {len(params)} gradients not finite: {some_of(bad)}"
        return ScaleCollapsed(
            f"the loss scale collapsed: {overflows} overflows in a row at its floor, {scale:.6g}",
            where=f"{where}, {guilty if bad else 'finite as they stand, infinite once unscaled'}",
            why="no scale makes these gradients finite: the overflow comes from the model, the loss or the data",
            write='MixedPrecision(…, on_overflow="explain"), which says where (docs/nan.md); or dtype=bfloat16',
        )

    # State ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values, waiting for what is on its way."""
        self.settle()
        return {
            "steps": self._steps,
            "skipped": self._skipped,
            "recent": "".join("X" if skipped else "." for skipped in self._recent),
            "forward_failures": self._forward_failures,
            "scales": [
                {"lowest": s.lowest_scale, "highest": s.highest_scale, "growths": s.growths, "backoffs": s.backoffs}
                for s in self._scales
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], scales: list[Tensor], *, continued: bool = True) -> None:
        """Load what :meth:`state_dict` returned.

        Args:
            state: The counts.
            scales: The scale of each loss after loading.
            continued: Whether these are the saved scales, whose history goes on; if not, one begins here.
        """
        self._follow(scales)
        self._steps, self._skipped = state["steps"], state["skipped"]
        self._forward_failures = state["forward_failures"]
        self._recent.clear()
        self._recent.extend(mark == "X" for mark in state["recent"])
        if continued:
            pairs = zip((known.scale for known in self._scales), state["scales"], strict=True)
            self._scales = [
                _Scale(now, min(saved["lowest"], now), max(saved["highest"], now), saved["growths"], saved["backoffs"])
                for now, saved in pairs
            ]
