"""What a run came to: collected while the script runs, and printed at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.backward import innermost_saving_hooks
from mezzo.compiling import forget_compiled
from mezzo.dispatch import dispatch_modes
from mezzo.explanation.low_numbers import has_too_many_positions, num_integers
from mezzo.explanation.rows import counted, format_text, scale_text, share_text
from mezzo.numerics.footprint import SavedBytes, StateBytes, state_bytes
from mezzo.policy import Policy, Schedule
from mezzo.script.program import Enough, StepRecord
from mezzo.session import Stats, Step
from mezzo.session.observers import Watched
from mezzo.step.verdict import JudgedGradients
from mezzo.tensors import LOW, dtype_name, moved
from mezzo.trace.function_calls import user_line
from mezzo.trace.recording import KernelTeller
from mezzo.trace.table import KernelRecord, flops_by_format, low_share

#: Why nothing ran low, each with what to do about it.
NO_OPTIMIZER: Final = (
    "the script made no optimizer, so there was no step, and nothing was to train in low precision",
    "torch.optim.…(model.parameters()) and optimizer.step(); or, without training, with mezzo.autocast(policy): …",
)
NOT_STEPPED: Final = (
    "no optimizer of the script took a step",
    "a run that goes on until loss.backward() and optimizer.step()",
)
NOT_HELD: Final = (
    "no module holds what the script's optimizers update",
    "an nn.Module that has these tensors as its parameters",
)
REFUSED: Final = ("what the script trains was left alone", "what is said about it under left alone")
_ALL_FP32: Final = ("its matrix products, if there are any, stayed in FP32", "mezzo explain, which says why of each")

#: The share of skipped steps from which on it is said how to find out why.
_MANY: Final = 0.02
#: In how many steps products are counted, at some microseconds of Python for each kernel; the first of them only where
#: there is no other: a session may begin in its middle.
_COUNTED_STEPS: Final = 4


@dataclass(kw_only=True)
class ScriptReport:
    """What a script's run under a policy came to; it is written while the script runs.

    Attributes:
        program: The script's path, or the module's name.
        policy: The policy, or the schedule.
        changes: Where it is a schedule: after how many steps each of its parts was begun, and the part.
        models: The models whose forward passes ran under it.
        optimizers: The optimizers whose steps were checked.
        steps: How many steps there were, skipped ones included.
        skipped: How many of them updated nothing.
        scale: The loss scale at the end; ``None`` where there was no session.
        lowest_scale: Its lowest value.
        highest_scale: Its highest value.
        flops: The operations of matrix products in the first steps, by the format that their kernels read;
            ``emulated`` for those that were computed in FP32 from rounded operands.
        low_share: The share of these that ran low, emulated ones included.
        measured_steps: How many steps that was measured in.
        positions: Where more positions were made in a low format than it has integers, in these steps, and how many.
        intercepted: What of the script's was carried out otherwise, and how often.
        left_alone: What was not, and why.
        refusals: How many parts of the schedule were not begun.
        why_not: Why nothing was to train under the policy, and what to do; empty where something was.
        state_bytes: Weights, gradients, low halves and optimizer state in the second step or the first later one that
            updated something, where ``on_step`` reads them.
        saved_bytes: What autograd saved for the backward pass of the step after it, where ``on_step`` reads them.
        peak_bytes: The most that was allocated at a time, on a GPU.
    """

    program: str
    policy: str
    changes: list[tuple[int, str]] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0
    scale: float | None = None
    lowest_scale: float | None = None
    highest_scale: float | None = None
    flops: dict[str, int] = field(default_factory=dict)
    low_share: float = 0.0
    measured_steps: int = 0
    positions: dict[str, str] = field(default_factory=dict)
    intercepted: Counter[str] = field(default_factory=Counter)
    left_alone: dict[str, str] = field(default_factory=dict)
    refusals: int = 0
    why_not: tuple[str, ...] = NO_OPTIMIZER
    state_bytes: StateBytes | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    def changed(self, steps: int, policy: Policy) -> None:
        """Record that a part of the schedule was begun, after so many steps."""
        self.changes.append((steps, str(policy)))

    def refused(self, steps: int, policy: Policy, why: str) -> None:
        """Record that a part of the schedule was not begun, after so many steps, and why."""
        self.left_alone[f"{policy} from step {steps + 1} on"] = why
        self.refusals += 1

    def ended(self, stats: Stats) -> None:
        """Record the loss scales of a session that ends."""
        lowest, highest = self.lowest_scale, self.highest_scale
        self.scale = stats.scale
        self.lowest_scale = stats.lowest_scale if lowest is None else min(lowest, stats.lowest_scale)
        self.highest_scale = stats.highest_scale if highest is None else max(highest, stats.highest_scale)

    @property
    def alarm(self) -> str:
        """Why the run was no run in mixed precision; empty where it was one."""
        if self._reason:
            return f"nothing ran in low precision: {self._reason[0]}"
        if not (self.steps or self.why_not):
            return NOT_STEPPED[0]
        if 2 * self.skipped > self.steps:
            return f"{self.skipped} of {self.steps} steps were skipped"
        if self.refusals:
            return f"{counted(self.refusals, 'part')} of the schedule was refused"
        return ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The report, the answer first."""
        return tuple(self._lines())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with the alarm."""
        size = None if self.state_bytes is None else asdict(self.state_bytes)
        document = {**vars(self), "state_bytes": size, "alarm": self.alarm}
        del document["why_not"]
        return document

    @property
    def _reason(self) -> tuple[str, ...]:
        """Why nothing ran low, and what to do; nothing where something did, or nothing was to."""
        if self.low_share or not self._asks_for_low:
            return ()
        return self.why_not or (_ALL_FP32 if self.steps else NOT_STEPPED)

    @property
    def _asks_for_low(self) -> bool:
        policy = self._first
        return policy.casts or policy.param_dtype in LOW

    @property
    def _first(self) -> Policy:
        """The policy that the run began with, in whose steps products were counted."""
        return Schedule.of(self.policy).at(0)

    def _lines(self) -> Iterator[str]:
        yield f"mezzo run {self.program} under {self.policy}: {self._answer()}"
        if self._reason:
            yield f"  write        {self._reason[1]}"
        for number, (steps, policy) in enumerate(self.changes):
            yield f"  {'' if number else 'changed':<11}  to {policy} after {counted(steps, 'step')}"
        if self.steps:
            hint = "; docs/nan.md says how to find out why" if self.skipped > _MANY * self.steps else ""
            yield f"  steps        {self.steps}, {self.skipped or 'none'} skipped{hint}"
            yield f"  loss scale   {self._scales()}"
        for label, names in (("models", self.models), ("optimizers", self.optimizers)):
            if names:
                yield f"  {label:<11}  {', '.join(_folded(names))}"
        if self.flops:
            parts = (f"{share_text(n, self._flops)} {_format(name)}" for name, n in Counter(self.flops).most_common())
            yield f"  products     {', '.join(parts)}"
        for number, (where, what) in enumerate(self.positions.items()):
            yield f"  {'' if number else 'positions':<11}  {what} ({where})"
        for number, (name, times) in enumerate(self.intercepted.items()):
            yield f"  {'' if number else 'intercepted':<11}  {name}{f' ×{times}' if times > 1 else ''}"
        for number, (part, why) in enumerate(self.left_alone.items()):
            first, *rest = why.split("\n")
            yield f"  {'' if number else 'left alone':<11}  {part}: {first}"
            yield from (f"  {'':<11}  {line}" for line in rest)

    def _answer(self) -> str:
        alarm = f"; {self.alarm}" if self.alarm else ""
        until = f" until step {self.changes[0][0]}" if self.changes else ""
        if not self._asks_for_low:
            return f"all of it is FP32, as {self._first} says{until}{alarm}"
        if self._reason or not self.flops:
            return self.alarm
        share = share_text(round(self.low_share * self._flops), self._flops)
        steps = counted(self.measured_steps, "step")
        return f"{share} of the work of its matrix products ran low, measured in {steps}{alarm}"

    def _scales(self) -> str:
        if self.lowest_scale == self.highest_scale:
            return scale_text(self.scale)
        return f"{scale_text(self.scale)}, between {scale_text(self.lowest_scale)} and {scale_text(self.highest_scale)}"

    @property
    def _flops(self) -> int:
        return sum(self.flops.values())


class StepLog:
    """An observer of sessions: it counts steps and the products of the first ones, reports each, and ends the script.

    A step's loss is that of the first backward pass to its gradients.

    Args:
        report: Gets what was counted.
        on_step: Called with each step's record; ``None`` where nothing is to be read from the device.
        most: After how many steps the script ends, in its next backward pass; ``None`` where it ends by itself.
        is_apart: Whether an optimizer steps now: its own products are not the policy's.

    **Cost**: with ``on_step``, one transfer from the device for each, and in one of the first a Python call for
    each tensor that is saved for the backward pass.
    """

    def __init__(
        self,
        report: ScriptReport,
        on_step: Callable[[StepRecord], None] | None,
        most: int | None,
        is_apart: Callable[[], bool],
    ) -> None:
        self._report, self._on_step, self._most = report, on_step, most
        self._kernels, self._is_apart = KernelTeller(self._ran), is_apart
        self._is_counting, self._is_over = False, False
        self._flops, self._first, self._counted = Counter[str](), Counter[str](), 0
        self._skipped = torch.zeros((), dtype=torch.int64)
        self._loss: Tensor | None = None
        self._saved: SavedBytes | None = None
        self._began = time.perf_counter()

    def _ran(self, record: KernelRecord) -> None:
        if has_too_many_positions(record):
            dtype, where = record.gives[0].dtype, user_line()
            self._report.positions[where or record.name] = (
                f"{math.prod(record.gives[0].shape):,} in {format_text([dtype_name(dtype)])}, which has "
                f"{num_integers(dtype):,} integers: make them in FP32"
            )
        if record.flops is not None and not self._is_apart():
            self._flops += flops_by_format([record])

    def count(self) -> None:
        """Count products from now on; inside a dispatch mode of the script's, from the first step after it."""
        if not (self._is_over or self._is_counting or dispatch_modes()):
            self._kernels.__enter__()
            self._is_counting = True

    def ended(self, stats: Stats) -> None:
        """Record a session that ends; products are counted again when another starts."""
        self._report.ended(stats)
        self._stop_counting()

    def close(self) -> None:
        """Stop counting, and write the counts into the report."""
        self._stop()
        self._stop_saving()
        self._report.skipped = int(self._skipped)
        self._report.peak_bytes = torch.cuda.max_memory_allocated() or None

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """End the script in the backward pass after its last step."""
        self._stop_saving()
        if self._report.steps == self._most:
            raise Enough

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """Record a step's loss: that of the first evaluation where there are several."""
        if self._loss is None:
            self._loss = next(iter(judged.losses), None)

    def stepped(self, engine: Watched, step: Step) -> None:
        """Record a step, skipped or not."""
        report = self._report
        report.steps += 1
        self._skipped = moved(self._skipped, step.skipped.device) + step.skipped
        if not self._is_over:
            counted = self._flops.total()
            if self._is_counting and (counted > self._counted or not counted):
                report.measured_steps += 1  # the step of another optimizer after the same pass is not counted
            self._counted = counted
            if report.measured_steps == 1:
                self._first = self._flops.copy()
            self.count()
            if report.measured_steps == _COUNTED_STEPS:
                self._stop()
        if self._on_step is None:
            return
        loss = step.grad_norm.new_full((), float("nan")) if self._loss is None else self._loss
        numbers = (loss, step.scale, step.skipped, step.grad_norm)
        read = torch.stack([value.detach().to(loss.device, torch.float32) for value in numbers]).tolist()
        now = time.perf_counter()
        record = StepRecord(
            step=report.steps, loss=read[0], scale=read[1], skipped=bool(read[2]), grad_norm=read[3],
            ms=(now - self._began) * 1e3,
        )  # fmt: skip
        self._loss, self._began = None, now
        self._on_step(record)
        if report.state_bytes is None and report.steps > 1 and not record.skipped:  # there is an optimizer's state
            weights = engine.weights
            models = nn.ModuleList(weights.models)
            report.state_bytes = state_bytes(models, *weights.optimizers)
            self._saved = SavedBytes(models)
            self._saved.__enter__()  # until the next backward pass begins

    def _stop_saving(self) -> None:
        saved, self._saved = self._saved, None
        top = None if saved is None else innermost_saving_hooks()
        if saved is not None and top is not None and top[0] == saved.pack_hook:  # and not below some of the script's
            saved.__exit__(None, None, None)
            self._report.saved_bytes = saved.total or None

    def _stop(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._report.measured_steps > 1:
                self._report.measured_steps -= 1
                self._flops -= self._first
            self._report.flops, self._report.low_share = dict(self._flops), low_share(self._flops, LOW)
        self._stop_counting()

    def _stop_counting(self) -> None:
        stack = dispatch_modes()
        if self._is_counting and stack and stack[-1] is self._kernels:  # the script has entered no mode on top of it
            self._kernels.__exit__(None, None, None)
            self._is_counting = False
            forget_compiled()  # torch compiles nothing under a dispatch mode, and would not try again


def _folded(names: list[str]) -> Iterator[str]:
    return (f"{name} ×{times}" if times > 1 else name for name, times in Counter(names).items())


def _format(name: str) -> str:
    return "emulated: in FP32 from rounded operands" if name == "emulated" else format_text([name])
