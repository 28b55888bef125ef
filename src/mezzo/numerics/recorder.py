"""``Recorder``: what a training run does to numbers, recorded every so many steps."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import mezzo
from mezzo.errors import PolicyError, StateError
from mezzo.files import regular_or_new
from mezzo.formats import Format
from mezzo.numerics.evidence import (
    FILE,
    KINDS,
    Evidence,
    EvidenceHeader,
    RecordedStep,
    RecordedTensor,
    Steps,
    SwallowedUpdates,
    write,
    write_step,
)
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.numerics.outputs import NAMES, OutputWatch
from mezzo.numerics.quantised import OperandWatch
from mezzo.numerics.ranks import Attendance, Counted
from mezzo.numerics.subject import WHY_UNSEEN, Choices, LossScaleNow, unseen, updated_by
from mezzo.numerics.watches import (
    FIELDS,
    Tally,
    TensorKey,
    TensorRows,
    WeightWatch,
    is_countable,
    swallowed_of,
)
from mezzo.policy import Policy
from mezzo.scale.state import inverse
from mezzo.session.observers import Watched, watching
from mezzo.session.stats import Step
from mezzo.sharded import is_distributed
from mezzo.step.verdict import JudgedGradients
from mezzo.tensors import dtype_name
from mezzo.trace.observe import COUNTABLE, DTYPE, NAME, ROW, WHEN, WIDTH, move_row

logger = logging.getLogger(__name__)

#: The kinds that are seen where modules are called.
OF_PASSES: Final = frozenset(("activations", "activation_gradients"))

# One step that is being recorded, and its two sources: the hooks of a loop without a session, or a session.


class Recording:
    """The counts of one step.

    Args:
        choices: What the recorder was asked for.
        scale: What gradients are multiplied by as they arrive.
        outputs: What counts where modules end; ``None`` where that is not asked for, or cannot be.
        ranks: The ranks that train the model.

    Attributes:
        ranks: As given.
        weights: The counts of parameters, their gradients and updates.
        called: The paths of the modules, in the order in which their calls ended, once it is finished.
    """

    def __init__(self, choices: Choices, scale: LossScaleNow, outputs: OutputWatch, ranks: Attendance) -> None:
        self.ranks, self.called = ranks, list[str]()
        self._subject, self._formats, self._outputs = choices.subject, choices.formats, outputs
        self._tally = Tally(FIELDS + len(choices.formats))
        self._tensor_rows: TensorRows = {}
        self.weights = WeightWatch(
            choices.subject, choices.kinds, choices.formats, self._tally, self._tensor_rows, ranks.group
        )
        outputs.start()
        self._operands = OperandWatch(choices.subject, choices.kinds, self._tally, scale.factor)

    def remove(self) -> None:
        """Stop counting what modules return, and stop listening to products."""
        self._operands.remove()
        self._outputs.stop()
        self.ranks.withdraw()

    def finish(self, step: int, loss_scales: Sequence[Tensor], skipped: bool | Sequence[Tensor]) -> RecordedStep:
        """Bring all counts to the host, and return the recorded step.

        Args:
            step: The step's number.
            loss_scales: 0-d: the scale of each loss.
            skipped: Whether the weights were left alone, or 0-d tensors of which one says so.

        **Cost**: one transfer from each device; with several ranks one reduction, and before it the names of tensors.
        """
        self.weights.rest()
        flags = [] if isinstance(skipped, bool) else skipped
        returned = self._outputs.add_rows(self._tally)
        rows, numbers = self._tally.fetch([*loss_scales, *flags, *self._operands.norms])
        self._add_returned(returned, rows)
        end = len(loss_scales) + len(flags)
        is_skipped = skipped is True or any(numbers[len(loss_scales) : end])
        order = {module.path: index for index, module in enumerate(self._subject.ordered(self.called))}
        local_counts = {key: self._counted(key, rows) for key in self._tensor_rows} | self._operands.counted(rows)
        counted = self.ranks.summed(local_counts)
        tensors = [key for key in counted if key[0] in KINDS]
        params = {key: number for number, key in enumerate(self._subject.params.values())}
        keys = sorted(tensors, key=lambda key: (KINDS.index(key[0]), order[key[1]], params.get(key[1:], 0)))
        return RecordedStep(
            step=step,
            loss_scales=tuple(numbers[: len(loss_scales)]),
            skipped=is_skipped,
            tensors=tuple(self._tensor(key, *counted[key]) for key in keys if not (is_skipped and key[0] == "updates")),
            operands=self._operands.recorded(counted, numbers[end:]),
        )

    def _add_returned(self, returned: Sequence[tuple[str, str, int]], rows: Sequence[Tensor]) -> None:
        """Add the rows of what modules returned, and order the calls; of gradients the last to arrive is first."""
        ended: dict[str, int] = {}
        for tensor_kind, path, number in returned:
            if when := int(rows[number][WHEN]):
                key = tensor_kind, path, NAMES[int(rows[number][NAME])]
                self._tensor_rows.setdefault(key, (None, []))[1].append(number)
                when = when if tensor_kind == "activations" else -when
                ended[path] = max(when, ended.get(path, when))
        self.called = sorted(ended, key=ended.__getitem__)
        self._outputs.keep_hooks_of_graphs(self.called)

    def _counted(self, key: TensorKey, rows: Sequence[Tensor]) -> Counted:
        """Return the dtype of a tensor, and the sum of its rows."""
        dtype, (first, *rest) = self._tensor_rows[key]
        for number in rest:
            move_row(rows[number], rows[first])
        return dtype or dtype_name(COUNTABLE[int(rows[first][DTYPE]) - 1]), rows[first]

    def _tensor(self, key: TensorKey, dtype: str, row: Tensor) -> RecordedTensor:
        tensor_kind, module, name = key
        return RecordedTensor(
            kind=tensor_kind,
            module=module,
            name=name,
            dtype=dtype,
            histogram=ExponentHistogram(row[:ROW]),
            swallowed=swallowed_of(row[WIDTH:].tolist(), self._formats) if tensor_kind == "updates" else None,
        )


class PlainLoop:
    """One step of a loop without a session: gradients as they are accumulated, steps of the optimizers.

    Args:
        recording: Gets the gradients and steps.
        choices: What the recorder was asked for.
        scale: What gradients are multiplied by as they arrive.

    Attributes:
        guards: Whether its hooks of optimizers make these a session's: they look.
    """

    guards: ClassVar[bool] = False

    def __init__(self, recording: Recording, choices: Choices, scale: LossScaleNow) -> None:
        self._recording, self._scale = recording, scale
        self._optimizers = choices.optimizers
        self._flags: list[Tensor] = []
        self._has_stepped = False
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for param in choices.subject.params
            if param.requires_grad
        ]
        for optimizer in choices.optimizers:
            self._handles += (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        if any(map(is_distributed, choices.subject.params)):  # no hook runs for their gradients
            recording.ranks.announce()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def skipped(self) -> bool | Sequence[Tensor]:
        """``True`` if no optimizer has stepped; else the flags by which fused optimizers skip."""
        return self._flags if self._has_stepped or not self._optimizers else True

    @torch.no_grad()
    def _accumulated(self, param: Tensor) -> None:
        self._recording.ranks.announce()
        if param.grad is not None:
            self._recording.weights.gradient(param, param.grad, self._scale.factor())

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._has_stepped = True
        if isinstance(getattr(optimizer, "grad_scale", None), Tensor) and self._scale.factor() is None:
            raise PolicyError(
                "gradients carry a loss scale that the recorder does not know",
                where=type(optimizer).__name__,
                why="a torch.amp.GradScaler leaves it to the fused optimizer, and it would be recorded as theirs",
                write="Recorder(model, optimizer, loss_scale=scaler)",
            )
        found_inf = getattr(optimizer, "found_inf", None)  # where torch's scaler puts the flag for fused optimizers
        if isinstance(found_inf, Tensor):
            self._flags.append(found_inf.detach().reshape(()).clone())
        updated = updated_by(optimizer)
        for param in filter(is_distributed, updated):  # fully_shard sets their gradients without a hook
            if param.grad is not None:
                self._recording.weights.gradient(param, param.grad, self._scale.factor())
        self._recording.weights.before(updated)

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self._recording.weights.after()


class RecordedRun:
    """A run: its number of steps, the step that is recorded now, and the recorded ones.

    Args:
        choices: What the recorder was asked for.
        loss_scale: The loss scale of a loop without a session, as the user gave it.
        keep: How many recorded steps are kept in memory; ``None`` keeps all.
        stream: The file that each recorded step is written to at once.

    Attributes:
        choices: As given.
        scale: The loss scale.
        ranks: The ranks that train the model.
        outputs: The hooks that count what modules return.
        policy: The policy of the first session that updates the model; ``None`` before there is one.
        recording: The counts of the current step; ``None`` where it is not recorded.
        taken: How many steps there were.
        steps: What was recorded of them.
    """

    def __init__(self, choices: Choices, loss_scale: Any, keep: int | None, stream: Path | None) -> None:
        self.choices, self._stream = choices, stream
        self.scale = LossScaleNow(loss_scale, next(choices.subject.model.parameters()).device)
        self.ranks = Attendance(choices)
        kinds = OF_PASSES.intersection(choices.kinds)
        if kinds and (scripted := choices.subject.scripted()) is not None:
            _warn_of_scripted(scripted, choices.kinds)
            kinds = frozenset()
        self.outputs = OutputWatch(choices.subject, kinds, WIDTH + FIELDS + len(choices.formats), self.scale.factor)
        self.policy: Policy | None = None
        self.recording: Recording | None = None
        self.taken, self.steps = 0, deque[RecordedStep](maxlen=keep)
        self._called: list[str] = []
        self._loop: PlainLoop | None = None
        self._lines: IO[str] | None = None

    def __repr__(self) -> str:
        model = type(self.choices.subject.model).__name__
        return f"Recorder({model}, every={self.choices.every}: {self.taken} steps, {len(self.steps)} recorded)"

    def open(self) -> None:
        """Open the stream, and start recording the first step."""
        try:
            self._start_recording()
            if self._stream is not None:
                self._lines = self._stream.open("w", encoding="utf-8")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop recording, and remove every hook from the model."""
        self._stop_recording()
        self.outputs.remove()
        self.ranks.end()
        if self._lines is not None:
            self._lines.close()

    def join_session(self, policy: Policy, group: Any) -> None:
        """Count the steps of a session from now on, and no longer those of a loop.

        Args:
            policy: The session's policy.
            group: The ranks that it steps with; ``None`` for one.
        """
        self.policy, self.ranks.of_session = self.policy or policy, group
        self._remove_loop()

    def count_loop_step(self) -> None:
        """Count a step of a loop; in a session, which counts its own steps, do nothing."""
        if self.policy is None:
            scale = self.scale.scale() if self._loop is not None else None
            self.advance([] if scale is None else [scale], True if self._loop is None else self._loop.skipped)

    @torch.no_grad()
    def advance(self, scales: Sequence[Tensor], skipped: bool | Sequence[Tensor]) -> None:
        """Count a step, store what was recorded of it, and prepare for the next.

        Args:
            scales: 0-d: the scale of each loss.
            skipped: Whether the weights were left alone, or 0-d tensors of which one says so.
        """
        self.taken += 1
        try:
            if self.recording is not None:
                step = self.recording.finish(self.taken, scales, skipped)
                self._called += self.recording.called
                self.steps.append(step)
                if self._lines is not None:
                    write_step(self._lines, self.header, step)
        finally:
            self._stop_recording()
        if self.taken % self.choices.every == 0:
            self._start_recording()

    def _start_recording(self) -> None:
        self.scale.reset(None)  # graphs read it when they begin to count
        self.recording = Recording(self.choices, self.scale, self.outputs, self.ranks)
        self.scale.reset(None)  # a scaler may change it until gradients come
        if self.policy is None:
            self._loop = PlainLoop(self.recording, self.choices, self.scale)

    def _stop_recording(self) -> None:
        if self.recording is not None:
            self.recording.remove()
        self.recording = None
        self._remove_loop()

    def _remove_loop(self) -> None:
        if self._loop is not None:
            self._loop.remove()
        self._loop = None

    @property
    def header(self) -> EvidenceHeader:
        """The first line of the evidence: what was recorded of which model, under which policy."""
        mode = "given" if self.scale.is_given else "none"
        return EvidenceHeader(
            mezzo=mezzo.__version__,
            model=type(self.choices.subject.model).__name__,
            policy=None if self.policy is None else str(self.policy),
            compute_dtype=None if self.policy is None else dtype_name(self.policy.dtype),
            loss_scale=mode if self.policy is None else self.policy.loss_scale.mode,
            every=self.choices.every,
            kinds=tuple(self.choices.kinds),
            formats=tuple(target.name for target in self.choices.formats),
            modules=self.choices.subject.ordered(self._called),
        )


def _warn_of_scripted(where: str, kinds: Sequence[str]) -> None:
    """Warn that activations are inside scripted code; refuse where nothing else was asked for."""
    if OF_PASSES.issuperset(kinds):
        raise unseen(where)
    logger.warning(
        "activations inside torch.jit are not recorded (%s): %s; run the model uncompiled, in eager mode, for them",
        where, WHY_UNSEEN,
    )  # fmt: skip


class SessionSource:
    """The steps of sessions, as an observer of theirs: a :class:`mezzo.session.observers.GraphObserver`.

    Args:
        run: Gets the steps.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._sessions: list[Watched] = []
        self._stepping: Watched | None = None
        self._moved: set[Tensor] = set()
        self._captured: Step | None = None  # the step of the last call that ran Python, whose tensors a replay writes

    def __repr__(self) -> str:
        return repr(self._run)

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """Join a session that updates the model, and read the scale of the gradients that are about to come."""
        self._join(engine)
        self._run.scale.reset(scale)
        self._run.outputs.update_factors()
        if self._run.recording is not None:
            self._run.ranks.announce()

    def _join(self, engine: Watched) -> None:
        """Join a session if it updates the model."""
        if engine not in self._sessions and self._updated(engine):
            if self._run.scale.is_given:
                raise PolicyError(
                    "a recorder in a session is not given a loss scale",
                    where=repr(self),
                    why="the session knows which scale its gradients carry",
                    write="Recorder(model, optimizer), without loss_scale=",
                )
            self._sessions.append(engine)
            self._run.join_session(engine.weights.policy, engine.ranks.group if engine.ranks.size > 1 else None)

    def enters(self, engine: Watched) -> None:
        """Count the weights that a captured step is about to move: here, since its graph would count at each replay."""
        self._join(engine)
        if engine not in self._sessions:
            return
        self._run.outputs.capture()
        if self._run.recording is not None:
            self._run.ranks.announce()
            with torch.no_grad():
                self._run.recording.weights.before(self._updated(engine))

    def leaves(self, engine: Watched, is_done: bool) -> None:
        """Count the updates of a captured step, and add what its graph has counted."""
        if engine not in self._sessions:
            return
        self._run.outputs.is_captured = False
        recording, step = self._run.recording, self._captured
        if recording is not None and not is_done:
            recording.weights.drop_unmoved(())
        if not is_done or step is None:
            return
        if recording is not None:
            with torch.no_grad():
                for param, row in self._run.outputs.params.items():
                    recording.weights.add_row(param, row)
                recording.weights.after()
        self._end(engine, step)

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """Count the weights that a step is about to move, and the gradients of the step."""
        if engine not in self._sessions:
            return
        updated, recording = self._updated(engine), self._run.recording
        factor = None if judged.scale is None else inverse(judged.scale)
        taken = [(param, g) for param, g in zip(judged.params, judged.gradients, strict=True) if param in updated]
        if engine.is_captured:  # which counts them in each step, recorded or not
            for param, gradient in taken if "weight_gradients" in self._run.choices.kinds else ():
                if param in self._run.choices.subject.params and is_countable(gradient):
                    self._run.outputs.count_gradient(param, gradient, factor)
            return
        is_first = self._stepping is not engine  # and no further evaluation of a closure
        self._stepping = engine
        self._moved = updated.intersection(judged.params)
        if recording is None:
            return
        if is_first:
            recording.weights.before(self._moved)
        recording.weights.drop_unmoved(self._moved)
        for param, gradient in taken:
            recording.weights.gradient(param, gradient, factor)

    def stepped(self, engine: Watched, step: Step) -> None:
        """Count the updates, once the step is done."""
        if engine.is_captured:
            self._captured = step if engine in self._sessions else self._captured
            return
        is_session, self._stepping = engine is self._stepping and bool(self._moved), None
        if not is_session:
            return
        if self._run.recording is not None:
            self._run.recording.weights.after()
        self._end(engine, step)

    def _end(self, engine: Watched, step: Step) -> None:
        is_scaled = engine.weights.policy.loss_scale.mode != "none"
        self._run.advance([step.scale] if is_scaled else [], [step.skipped])

    def _updated(self, engine: Watched) -> set[Tensor]:
        """Return the model's parameters that a session's optimizers update, of those that were chosen."""
        own = set(self._run.choices.subject.model.parameters())
        updated = {param for param in engine.weights.updated() if param in own}
        chosen = [updated_by(optimizer) for optimizer in self._run.choices.optimizers]
        return updated.intersection(set().union(*chosen)) if chosen else updated


class Recorder:
    """Record what a training run does to numbers: where they lie in each binade, and which updates vanish.

    In the first step, and then in each that comes ``every`` steps later, the values of weights, activations, activation
    gradients, weight gradients and updates are counted by their exponent, module by module. From the counts follows
    what any number format at any loss scale would lose of them, used in this run or not. Of products below sixteen
    bits, in eager mode, what quantising loses of each operand of the kinds recorded, and with ``weight_gradients`` how
    much noise it adds to them: :meth:`mezzo.numerics.Evidence.operands`.

    Gradients are recorded unscaled. Weight gradients are those that the optimizer gets, before they are clipped.
    Weights and updates are those of the FP32 value where one is kept. A skipped step has no updates. What a module
    returns is counted in passes that gradients can come back through: neither under ``no_grad``, nor twice where
    checkpointing runs a pass again; in evaluation mode where they do come. The calls of a step are summed.

    A session tells of its steps by itself. In a loop without one call :meth:`step`.

    Args:
        model: The model. Functions that use parameters directly are not seen. Where it is compiled, whole or in parts,
            graphs count: of what a module returns the first four tensors. Under DDP, ``fully_shard`` and in sessions on
            several ranks each rank makes a recorder, and all have the same counts; where only some do, each of these
            has those of its own share, and a warning says so.
        optimizer: What updates it, or several. In a session it may be left out; in a loop without one there are then
            no updates, and weights are those that :meth:`step` finds.
        every: Steps from one recorded step to the next. Where two optimizers take turns, an odd number, or only one of
            them is recorded.
        formats: The storage formats that updates are rounded to.
        kinds: What to record, of :data:`mezzo.numerics.KINDS`.
        modules: Globs of module paths, each of which stands for what is inside as well; all when omitted.
        keep: How many recorded steps are kept in memory, the newest; ``None`` keeps all.
        stream: A file, or a folder for it, that each recorded step is written to at once, as a line. Ranks need a file
            each.
        loss_scale: Of a loop without a session: its ``torch.amp.GradScaler``, or the number that losses are multiplied
            by. Left out, gradients are recorded as the backward pass makes them, with the scale of a scaler that is
            used all the same; only a fused optimizer, which is told of it, tells.

    Raises:
        PolicyError: Arguments that make no sense, all of them together; from ``optimizer.step()``, a scaler's scale
            that the recorder does not know.
        OSError: There is no folder for the stream; where the run begins, that it cannot be written.

    **Cost**: on recorded steps a pass over everything that is recorded, one transfer from the device, and with
    ``updates`` a copy of the weights while the step runs. Of each product below sixteen bits two more products in FP32,
    each of its operands in FP32 twice, and two FP32 values for each element of its weight. On other steps nothing in
    eager mode: there are hooks only in recorded ones. In graphs a call for each tensor, 4 to 9 µs on a CPU, which ends
    fusions; the first block has torch.compile forget what it has made, and inside it graphs are made for the hooks of
    modules. A graph's backward pass runs once there, whatever ``retain_graph`` says. On several ranks one reduction a
    recorded step. In memory 9 KB for each tensor, in graphs 36 KB for each module.

    Example:
        >>> import torch
        >>> from mezzo.numerics import Recorder
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> with Recorder(model, optimizer, every=2) as recorder:
        ...     for _ in range(4):
        ...         model(torch.ones(4, 8)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         recorder.step()
        >>> [step.step for step in recorder.evidence.steps]
        [1, 3]
        >>> recorder.histogram("weights", step="all").total
        18
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        every: int = 50,
        formats: Sequence[str | torch.dtype | Format] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *,
        kinds: Iterable[str] = KINDS,
        modules: str | Sequence[str] | None = None,
        keep: int | None = 32,
        stream: str | os.PathLike[str] | None = None,
        loss_scale: float | Tensor | Any = None,
    ) -> None:
        choices = Choices.of(model, optimizer, every, formats, kinds, modules, keep)
        self._run = RecordedRun(choices, loss_scale, keep, None if stream is None else _file_at(stream))
        self._watching = ExitStack()
        self._stage: Literal["new", "open", "ended"] = "new"

    def __repr__(self) -> str:
        return repr(self._run)

    def __enter__(self) -> Self:
        if self._stage != "new":
            raise StateError(
                "a recorder records one run", where=repr(self), write="with Recorder(model, optimizer) as recorder: …"
            )
        self._run.open()
        self._watching.enter_context(watching(SessionSource(self._run)))
        self._stage = "open"
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watching.close()
        self._run.close()
        self._stage = "ended"

    def step(self) -> None:
        """End a step, after ``optimizer.step()``. In a session, which ends its own steps, this does nothing.

        Raises:
            StateError: Outside of the ``with`` block.

        **Cost**: on recorded steps one transfer from the device.
        """
        if self._stage != "open":
            raise StateError(
                "recorder.step() outside of its block", write="with Recorder(model, optimizer) as recorder: …"
            )
        self._run.count_loop_step()

    # What was recorded ---------------------------------------------------------------------------------

    @property
    def evidence(self) -> Evidence:
        """What was recorded up to now."""
        return Evidence(header=self._run.header, steps=tuple(self._run.steps), num_steps=self._run.taken)

    def histogram(
        self, kind: str | Iterable[str], module: str | None = None, *, step: Steps = "newest", name: str | None = None
    ) -> ExponentHistogram:
        """Return how many values of some tensors lie in each binade: :meth:`mezzo.numerics.Evidence.histogram`."""
        return self.evidence.histogram(kind, module, step=step, name=name)

    def swallowed(
        self, module: str | None = None, *, step: Steps = "newest", name: str | None = None
    ) -> SwallowedUpdates:
        """Return how many updates of some weights vanish: :meth:`mezzo.numerics.Evidence.swallowed`."""
        return self.evidence.swallowed(module, step=step, name=name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps that are in memory to a file that :func:`mezzo.numerics.read_evidence` reads.

        Raises:
            OSError: It cannot be written.
        """
        write(self.evidence, path)


def _file_at(path: str | os.PathLike[str]) -> Path:
    """Return the file of a stream, which exists or can be made."""
    return regular_or_new(Path(path) / FILE if Path(path).is_dir() else path)[0]
