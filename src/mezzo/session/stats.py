"""The account of a session's steps, known to the host without waiting for the device; and what one step did."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.distributed.exchange import Ranks
from mezzo.errors import MezzoError, NumericsError, ScaleCollapsed, message, some_of
from mezzo.scale import LossScale
from mezzo.step.executors.choose import shared

logger = logging.getLogger(__name__)

#: How many steps that are skipped in a row are warned of.
_MANY: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A session's account of its steps so far, those before a checkpoint included.

    Attributes:
        steps: Steps, skipped ones included.
        skipped: How many of them updated nothing.
        growths: How often the loss scale rose.
        backoffs: How often it fell.
        scale: The loss scale now.
        lowest_scale: Its lowest value so far.
        highest_scale: Its highest value so far.
        ranks: How many ranks step together.
    """

    steps: int = 0
    skipped: int = 0
    growths: int = 0
    backoffs: int = 0
    scale: float = 1.0
    lowest_scale: float = 1.0
    highest_scale: float = 1.0
    ranks: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What one optimizer step did, as device tensors: reading one as a Python value waits for the device.

    Those of a step that :func:`mezzo.capture` captured are the same tensors each time: its next call overwrites them.

    Attributes:
        skipped: 0-d bool: whether a gradient, or a loss, was not finite, so that nothing was updated.
        scale: 0-d float32: the loss scale that the gradients carried.
        next_scale: 0-d float32: the loss scale from now on.
        grad_norm: 0-d float32: 2-norm of all unscaled gradients, before clipping.
        overflow: Where the overflow began, with ``on_overflow="locate"``; ``None`` for a step that was taken.
    """

    skipped: Tensor
    scale: Tensor
    next_scale: Tensor
    grad_norm: Tensor
    overflow: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """What the host wants to know of a step, as 0-d tensors of its device.

    Attributes:
        skipped: Whether it updated nothing.
        failed: Whether a loss itself was not finite.
        scale: The loss scale from now on.
        floor_overflows: How many overflows in a row there were at its floor.
        absent: Of several ranks: whether one did not take the step, as :meth:`Ranks.agree` says it.
        norms: (gradients,) the 2-norm of each gradient.
        params: Whose gradients these are.
    """

    skipped: Tensor
    failed: Tensor
    scale: Tensor
    floor_overflows: Tensor
    absent: Tensor | None
    norms: Tensor
    params: list[Tensor]

    def numbers(self) -> list[Tensor]:
        """Return the numbers in the order in which they travel."""
        absent = [] if self.absent is None else [self.absent]
        return [self.skipped, self.failed, self.scale, self.floor_overflows, *absent]


class _Flight(NamedTuple):
    """Numbers on their way to the host: in pinned memory, there once the event has passed."""

    outcome: StepOutcome
    numbers: Tensor
    event: torch.Event


class StepAccount:
    """Count steps and scales, log each change of a scale, and tell when nothing is learnt or a rank has failed.

    On an accelerator the numbers of a step travel into pinned memory, and are read when they have arrived; with
    ``patience`` two steps late at most.

    Args:
        config: The loss scale's rules.
        scale: The scale now.
        name_of: Gives the name of a parameter.
        ranks: The ranks that step together.

    Attributes:
        warning: What there is to warn of.
        kept: Where steps are kept instead, with what :meth:`packed` makes of them, while one is captured.
    """

    def __init__(self, config: LossScale, scale: Tensor, name_of: Callable[[Tensor], str], ranks: Ranks) -> None:
        self._config, self._name_of, self._ranks = config, name_of, ranks
        self.kept: list[tuple[StepOutcome, Tensor]] | None = None
        self.warning, self._has_warned = "", False
        first = float(scale.cpu().numpy())
        self._follow(Stats(scale=first, lowest_scale=first, highest_scale=first, ranks=ranks.size))

    def _follow(self, stats: Stats) -> None:
        self._stats, self._failures, self._skipped_in_a_row = stats, 0, 0
        self._error: MezzoError | None = None
        self._flying: deque[_Flight] = deque()

    @property
    def begun(self) -> int:
        """How many steps there were, those whose numbers are still on their way included."""
        return self._stats.steps + len(self._flying)

    def note(self, outcome: StepOutcome, packed: Tensor | None = None) -> None:
        """Count a step, and copy its numbers to the host without waiting for them.

        Args:
            outcome: The step.
            packed: What :meth:`packed` returned of it, in a graph whose next replay writes there again.
        """
        if self.kept is not None:
            self.kept.append((outcome, self.packed(outcome)))
            return
        device = outcome.skipped.device
        if device.type == "cpu":
            # Through numpy: on the host already, so that nothing is asked of a device.
            self._count(outcome, list(map(float, map(Tensor.numpy, outcome.numbers()))), outcome.norms)
            return
        numbers = self.packed(outcome) if packed is None else packed
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        self._flying.append(_Flight(outcome, host, event))

    def packed(self, outcome: StepOutcome) -> Tensor:
        """Return the numbers of a step for the host, as one vector on the step's device."""
        (numbers,) = shared(_vector, (), outcome.numbers())
        return numbers if self._config.patience is None else torch.cat((numbers, outcome.norms))

    def check(self) -> None:
        """Raise what the host knows by now.

        Raises:
            ScaleCollapsed: The scale stood at its floor for ``patience`` overflows in a row.
            NumericsError: The loss itself was not finite for as many steps in a row.
            DistributedError: Another rank has ended a step with an error.
        """
        must_know = self._config.patience is not None
        while self._flying and (self._flying[0].event.query() or (must_know and len(self._flying) > 1)):
            self._land()
        if self.warning:
            self.warn()
        if self._error is not None:
            raise self._error

    def warn(self) -> None:
        """Warn of steps skipped in a row, once the host knows of them: outside of a step's writes."""
        text, self.warning = self.warning, ""
        warnings.warn(text, stacklevel=5)

    def stats(self) -> Stats:
        """Return the account, waiting for what is still on its way."""
        while self._flying:
            self._land()
        return self._stats

    def _land(self) -> None:
        """Count the first step that is on its way, waiting until it has arrived."""
        outcome, numbers, event = self._flying.popleft()
        event.synchronize()
        count = len(outcome.numbers())
        self._count(outcome, numbers.numpy()[:count].tolist(), numbers[count:])

    def _count(self, outcome: StepOutcome, numbers: list[float], norms: Tensor) -> None:
        skipped, failed, scale, floor_overflows, *absent = numbers
        old, step = self._stats, self._stats.steps + 1
        self._failures = self._failures + 1 if failed and not any(absent) else 0
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped and not any(absent) else 0
        self._stats = Stats(
            steps=step,
            skipped=old.skipped + bool(skipped),
            growths=old.growths + (scale > old.scale),
            backoffs=old.backoffs + (scale < old.scale),
            scale=scale,
            lowest_scale=min(scale, old.lowest_scale),
            highest_scale=max(scale, old.highest_scale),
            ranks=self._ranks.size,
        )
        if scale != old.scale:
            logger.info("loss scale %.6g → %.6g after step %d", old.scale, scale, step)
        if self._failures == 1:
            logger.warning("the loss of step %d is not finite: skipped", step)
        if self._skipped_in_a_row >= _MANY and not self._has_warned:
            self._has_warned, self.warning = True, self._stall_text(step, scale)
        patience = self._config.patience or math.inf
        error = self._ranks.ended_by(absent[0], step) if absent else None
        if error is not None:
            self._error = error
        elif self._failures >= patience:
            # Such steps leave the scale alone, and no scale can cure them.
            self._error = NumericsError(
                f"the loss was not finite for {self._failures} steps in a row",
                where=f"step {step}",
                why="the forward pass or the data overflowed, which no loss scale can cure",
                write='MixedPrecision(…, on_overflow="locate"), which says where it began; docs/nan.md has the rest',
            )
        elif floor_overflows >= patience:
            self._error = self._collapse(step, scale, int(floor_overflows), outcome.params, norms)

    def _stall_text(self, step: int, scale: float) -> str:
        config = self._config
        write = ['MixedPrecision(…, on_overflow="locate"), which says where it began; docs/nan.md has the rest']
        if config.mode == "none":
            where, why = "no loss scale", "the loss or its gradients are not finite"
        elif self._failures >= _MANY:
            where, why = f"loss scale {scale:.6g}", "the loss itself is not finite, which no loss scale cures"
        else:
            where, why = f"loss scale {scale:.6g}, floor {config.floor:.6g}", "the gradients are not finite"
            if config.mode == "constant":
                where, write = f"constant loss scale {scale:.6g}", [*write, "LossScale.dynamic(), the text dynamic"]
            elif scale <= config.floor:
                write += ["LossScale.dynamic(floor=2**-126), the text dynamic(floor=2**-126), where a loss is a sum"]
            write += ['a policy in bfloat16: Policy.O1("bfloat16"), the text O1,dtype=bfloat16']
        return message(
            f"{self._skipped_in_a_row} steps in a row were skipped: nothing is learnt",
            where=f"step {step}, {where}",
            why=why,
            write=";\nor ".join(write),
        )

    def _collapse(self, step: int, scale: float, overflows: int, params: list[Tensor], norms: Tensor) -> MezzoError:
        sizes = zip(params, norms.numpy(), strict=True)
        bad = [self._name_of(param) for param, norm in sizes if not math.isfinite(norm)]
        guilty = f"{len(bad)} of {len(params)} gradients not finite: {some_of(bad)}"
        return ScaleCollapsed(
            f"the loss scale collapsed: {overflows} overflows in a row at its floor, {scale:.6g}",
            where=f"step {step}, {guilty if bad else 'finite as they stand, infinite once unscaled'}",
            why="no scale makes these gradients finite: the overflow comes from the model, the loss or the data",
            write='MixedPrecision(…, on_overflow="locate"), which says where (docs/nan.md); or a policy in bfloat16: '
            'Policy.O1("bfloat16"), the text O1,dtype=bfloat16',
        )

    # State ---------------------------------------------------------------------------------------------

    def reconfigure(self, config: LossScale, scale: float) -> None:
        """Count on under other rules; overflows in a row begin anew, and where the scale moved its extremes too.

        Args:
            config: The rules.
            scale: The scale now.
        """
        state, self._config = self.state_dict(), config
        self.load_state_dict(state, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values, waiting for what is on its way."""
        return asdict(self.stats())

    def load_state_dict(self, state: Mapping[str, Any], scale: float) -> None:
        """Load what :meth:`state_dict` returned.

        Args:
            state: The counts.
            scale: The scale now, which need not be the saved one.
        """
        counts = {field.name: state[field.name] for field in fields(Stats)}
        now: dict[str, Any] = {"scale": scale, "ranks": self._ranks.size}
        if state["scale"] != scale:
            now |= {"lowest_scale": scale, "highest_scale": scale}
        self._follow(Stats(**counts | now))


def _vector(*numbers: Tensor) -> tuple[Tensor]:
    """Return numbers as one FP32 vector."""
    return (torch.stack([number.to(torch.float32) for number in numbers]),)
