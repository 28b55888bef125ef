"""``capture``: a whole train step as one CUDA graph.

The first calls of a captured step are real steps, on the stream that is captured later. The next call is recorded, and
is a step too: Python goes through it once, while nothing is computed, and the first replay computes it. So there is
nothing to put back, and what each step leaves on the device, the next replay finds there: weights, moments, the loss
scale. Python keeps what is Python's: the account of steps, learning rates, the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, message, raise_together, shown
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.session.engine import Engine
from mezzo.session.observers import GraphObserver, StepObserver, Watched, context_observers, watching
from mezzo.session.session import MixedPrecision, engine_of, weights_of
from mezzo.session.stats import Step, StepOutcome
from mezzo.step.executors.portable import uploaded_once
from mezzo.step.verdict import JudgedGradients
from mezzo.tensors import Frame, addresses, described, leaves, mapped, tensors
from mezzo.weights.stepping import in_memory, keep_memory

R = TypeVar("R")
T = TypeVar("T")

#: Calls that are real steps before the recording: they compile kernels, and make the states of optimizers.
_NUM_REHEARSALS: Final = 3


def capture(fn: Callable[..., R], amp: MixedPrecision) -> Captured[R]:
    """Capture a whole train step as one CUDA graph: forward, backward, check, clip, update, change of the loss scale.

    What is returned is called with each batch, in place of ``fn``, and each call is a step. The first three run ``fn``;
    the fourth is recorded, and from then on a call is one launch for the host, and computes bit for bit what ``fn``
    computes: a step that overflows is skipped on the device.

    Python runs only until then. What it decides (dropout rates, ``if``, the options of optimizers that are not the
    session's) is part of the graph. Batches, hyper-parameters of ``mezzo.optim`` and learning rates that are tensors
    are read at each call, so that schedulers step after it as ever. Steps without the graph may come in between, and
    models and sessions may load states. Gradients live and die inside the graph: a call begins without any.

    A batch of another shape, dtype or structure, or with other plain values, is a real step without the graph, and is
    warned of once. What the graph reads must stay where it is: once an optimizer has loaded a state, capture again.
    After ``amp.change(policy)`` three calls are real steps, and the next one is recorded anew.

    While it captures, no other thread may wait for a GPU, such as a loader that copies batches there ahead of time:
    torch refuses waits for the whole process while it looks for those of the train step. Where the session is not on a
    GPU, a call is a call of ``fn``.

    Args:
        fn: Runs the loop's body for one batch, with all of the session's calls up to ``amp.step()``: several backward
            passes, losses and optimizers too. Each optimizer must be able to skip on the device: mezzo's, or torch's
            with ``fused=True, capturable=True`` and a tensor as ``lr``.
        amp: The session, on one rank.

    Returns:
        What to call with each batch: nests of tensors and plain values. Tensors in host memory are copied to the device
        before ``fn`` sees them. It returns what ``fn`` returned, tensors detached: from the graph the same tensors each
        time (those of a :class:`Step` too), which the next call overwrites.

    Raises:
        PolicyError: What is given is no function, or no session.
        UnsupportedError: The session's options or an optimizer need the host.
        StateError: From a call: ``fn`` takes no step, leaves an accumulation window open, steps a scheduler or another
            session; what the graph holds has changed.
        RuntimeError: Torch's, from the third or fourth call: a line of ``fn`` waits for the device.

    **Cost**: the graph keeps the memory of one step's activations and gradients, and with torch's optimizers 4 bytes
    for each element of a weight in halves, where its FP32 value lies during a step. A call: the copies of the batch,
    one launch, some one-element kernels; no host sync.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
        >>> def train_step(x):
        ...     with amp.autocast():
        ...         loss = model(x).square().mean()
        ...     amp.backward(loss)
        ...     step = amp.step()
        ...     amp.zero_grad()
        ...     return loss, step.skipped
        >>> captured = mezzo.capture(train_step, amp)
        >>> loss, skipped = captured(torch.ones(4, 8))
        >>> bool(skipped)
        False

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    arguments: tuple[Any, Any] = fn, amp  # whatever their types say
    if not callable(arguments[0]) or not isinstance(arguments[1], MixedPrecision):
        kinds = ", ".join(map(shown, arguments))
        raise PolicyError(f"no train step and its session: {kinds}", write="mezzo.capture(train_step, amp)")
    device = engine_of(amp).device
    return Captured(fn, amp, CudaGraph(device) if device.type == "cuda" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded(Generic[R]):
    """What was recorded.

    Attributes:
        output: What the train step returned.
        outcomes: What each replay tells the account, with its numbers as one vector.
        scale: Where the graph reads the loss scale's state, and leaves the next one.
        holds: What the graph has of the session: see :func:`_held`.
        memory: What else the graph writes: FP32 values of halves, for which a step without the graph may have others.
    """

    output: R
    outcomes: list[tuple[StepOutcome, Tensor]]
    scale: Any
    holds: dict[str, Any]
    memory: list[Any]


class Captured(Generic[R]):
    """A captured train step, as :func:`capture` returns it.

    Args:
        fn: The train step.
        amp: Its session.
        graph: What to record it in; ``None`` to call the train step itself.
    """

    def __init__(self, fn: Callable[..., R], amp: MixedPrecision, graph: CudaGraph | None) -> None:
        self._fn, self._amp, self._graph = fn, amp, graph
        self._batch: _Batch | None = None
        self._recorded: _Recorded[R] | None = None
        self._rehearsed: dict[str, Any] | None = None  # what the last step without a graph had of the session
        self._observers: list[StepObserver] = []  # which own memory that the graph writes
        self._calls, self._has_warned, self._changes = 0, False, engine_of(amp).changes
        if graph is not None:
            raise_together(_problems(engine_of(amp)))
            optimizers: list[Any] = weights_of(amp).optimizers
            for optimizer in optimizers:
                optimizer._warned_capturable_if_run_uncaptured = True  # as its first steps are
                keep_memory(optimizer)

    def __repr__(self) -> str:
        return f"Captured({getattr(self._fn, '__qualname__', repr(self._fn))})"

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Run a train step with this batch: by the graph, or as a real step where the graph does not fit.

        Raises:
            StateError: A closed session, an open accumulation window, or something that the graph holds has changed.
            UnsupportedError: What watches the session needs Python.
            ScaleCollapsed: As ``amp.step()`` raises it, at most two steps late.
        """
        graph, engine = self._graph, engine_of(self._amp)
        if graph is None:
            return _detached(self._fn(*args, **kwargs))
        self._amp.autocast()  # which a closed session refuses
        raise_together(_observer_errors(engine))
        engine.writes.require_whole()
        engine.account.check()
        _require_no_window(engine)
        if self._changes != engine.changes:  # of the policy: what is computed is something else, at the same addresses
            self._changes, self._calls, self._recorded, self._observers = engine.changes, 0, None, []
            graph.clear()
        observers = [observer for observer in context_observers() if isinstance(observer, GraphObserver)]
        late_observers = [observer for observer in observers if observer not in self._observers]
        if self._recorded is not None and late_observers:
            raise StateError(
                "a recorder was put on after the graph was captured",
                where=repr(late_observers[0]),
                why="a graph counts what it was captured with",
                write="with Recorder(…) as recorder: around all calls of captured = mezzo.capture(…), once more",
            )
        for observer in observers:
            observer.enters(engine)
        is_done = False
        try:
            output = self._call(graph, args, kwargs)
            is_done = True
        finally:
            for observer in observers:
                observer.leaves(engine, is_done)
        return output

    def _call(self, graph: CudaGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        engine = engine_of(self._amp)
        batch = self._batch = self._batch or _Batch(args, kwargs, engine.device)
        if difference := batch.difference(args, kwargs):
            self._warn(difference)
            engine.scaler.leave()
            placed = mapped((args, kwargs), batch.placed)
            return graph.run(lambda: self._run(placed))
        batch.copy_in(args, kwargs)
        waits = self._recorded is None and (
            self._rehearsed != _places(engine) or any(map(_lacks_momentum, engine.weights.optimizers))
        )
        if waits or self._calls < _NUM_REHEARSALS:
            self._calls += 1
            is_last = self._calls >= _NUM_REHEARSALS and not waits
            with _with_capture_note() if is_last else nullcontext():
                output = graph.run(lambda: self._run(batch.arguments), refuses_syncs=is_last)
            self._rehearsed = _places(engine)
            return output
        if self._recorded is None:
            with _with_capture_note():
                self._recorded = self._record(graph, batch)
            self._observers = [*context_observers()]
        else:
            _refuse_changes(self._recorded.holds, _held(engine))
            engine.update()  # what a step outside has left to the next loss
            engine.scaler.enter(self._recorded.scale)
            self._upload()
        return self._replay(graph, self._recorded)

    # A call ------------------------------------------------------------------------------------------------

    def _run(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> R:
        """Return what the train step returns; raise for operations that no graph can follow."""
        engine, (args, kwargs) = engine_of(self._amp), arguments
        observer, before = _CaptureObserver(self, engine), _options(engine.weights.optimizers, counts_writes=True)
        engine.is_captured = True
        try:
            with watching(observer), torch.enable_grad():
                output = _detached(self._fn(*args, **kwargs))
        finally:
            engine.is_captured = False
        observer.require_step()
        if changed := _changes(before, _options(engine.weights.optimizers, counts_writes=True)):
            raise StateError(
                "the train step changes its optimizer's options",
                where="\n".join(changed),
                why="Python runs only until the graph is recorded: a scheduler inside would never step again",
                write="scheduler.step() after each call of the captured step",
            )
        return output

    def _record(self, graph: CudaGraph, batch: _Batch) -> _Recorded[R]:
        """Record the kernels of a step; nothing is computed before the first replay."""
        engine = engine_of(self._amp)
        raise_together(_problems(engine))
        engine.clear()
        engine.update()
        self._upload()
        scaler, before, scale = engine.scaler, engine.scaler.state, engine.scaler.tensors()
        outcomes: list[tuple[StepOutcome, Tensor]] = []

        def run() -> R:
            # A copy, since the outcome of a step keeps its scale beyond the next step.
            scaler.hold(scale.clone(), in_graph=True)
            output = self._run(batch.arguments)
            engine.update()  # which outside of a graph the next loss does, where an optimizer has not stepped
            scale.copy_(scaler.state)
            scaler.hold(scale, in_graph=True)
            return output

        engine.account.kept = outcomes
        try:
            with uploaded_once() as upload:
                output = graph.record(run)
            upload()
        except BaseException:
            # No kernel has run, so what Python has recorded of this step is dropped, and the session is as before.
            scaler.hold(before, in_graph=False)
            engine.writes.broken = ""
            engine.clear()
            raise
        finally:
            engine.account.kept = None
        memory = [keep_memory(optimizer) for optimizer in engine.weights.optimizers]
        return _Recorded(output=output, outcomes=outcomes, scale=scale, holds=_held(engine), memory=memory)

    def _upload(self) -> None:
        """Bring over the hyper-parameters that have changed on the host since the last step. No sync."""
        for optimizer in one_pass(weights_of(self._amp).optimizers):
            optimizer.upload()

    def _replay(self, graph: CudaGraph, recorded: _Recorded[R]) -> R:
        engine = engine_of(self._amp)
        with torch.no_grad():
            graph.replay()
            for outcome, packed in recorded.outcomes:
                engine.account.note(outcome, packed)
        stepped: list[Any] = engine.weights.optimizers
        for optimizer in stepped:
            optimizer._opt_called = True  # or schedulers warn that nothing has stepped
        return recorded.output

    def _warn(self, difference: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = message(
                "a step is taken without its graph",
                where=difference,
                why="a graph is captured for one structure, shape and dtype; all but tensors is part of it",
                write="DataLoader(…, drop_last=True); a tensor for a number that changes; or mezzo.capture(…) for each",
            )
            warnings.warn(text, stacklevel=4)


def _detached(output: R) -> R:
    detached: R = mapped(output, Tensor.detach)
    return detached


@contextmanager
def _with_capture_note() -> Iterator[None]:
    """Say, beside what torch raises, what no graph can hold."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, MezzoError):
            error.add_note(
                "mezzo.capture: in a train step nothing may wait for the device (.item(), print or if on a tensor, a "
                "tensor made of Python numbers on the GPU), make graphs of its own (torch.compile(mode="
                '"reduce-overhead")), or keep the loss of an earlier step, which ties gradients to another stream'
            )
        raise


# What a train step may not do ------------------------------------------------------------------------------


class _CaptureObserver:
    """Watches a train step that runs for a graph, and refuses what the graph could not follow."""

    def __init__(self, captured: Captured[Any], engine: Engine) -> None:
        self._captured, self._engine, self._steps = captured, engine, 0

    def __repr__(self) -> str:
        return repr(self._captured)

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """Refuse the passes of another session."""
        if engine is not self._engine:
            raise StateError(
                "another session takes part in a captured train step",
                where=repr(self._captured),
                why="its loss scale would stay what it was when the step was recorded",
                write="MixedPrecision([model, other], [optimizer, another], policy), one session for both",
            )

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """Gradients are the graph's own."""

    def stepped(self, engine: Watched, step: Step) -> None:
        """Count a step of the captured session."""
        self._steps += 1

    def require_step(self) -> None:
        """Refuse a train step that only Python could continue.

        Raises:
            StateError: It has taken no step, or a window is open at its end.
        """
        _require_no_window(self._engine)
        if not self._steps:
            raise StateError(
                "the train step takes no step of its session",
                where=repr(self._captured),
                write="amp.autocast(), amp.backward(loss), amp.step() in the train step",
            )


def _require_no_window(engine: Engine) -> None:
    """Refuse gradients around a captured step, or after it.

    Raises:
        StateError: There are some.
    """
    if any(window.now.passes for window in engine.windows):
        raise StateError(
            "a captured step begins or ends inside an accumulation window",
            why="gradients live and die inside the graph: it takes none in, and leaves none",
            write="amp.step() after the last amp.backward(loss), in the train step and outside of it",
        )


def _observer_errors(engine: Engine) -> Iterator[MezzoError]:
    """Yield what looks at each step by Python, of which a replay has none."""
    for observer in (*engine.observers, *context_observers()):
        if isinstance(observer, GraphObserver):
            continue
        yield UnsupportedError(
            "a captured step where each step is looked at",
            where=repr(observer),
            why="it looks by Python, of which a replayed graph runs none",
            write='on_overflow="skip", and mezzo.overflow.locate(fn, model) once amp.stats() shows skipped steps',
        )


def _problems(engine: Engine) -> Iterator[MezzoError]:
    """Yield all that keeps a session's steps from being captured."""
    yield from _observer_errors(engine)
    weights, device = engine.weights, engine.device
    if engine.plain or engine.waits:
        yield UnsupportedError(
            "the steps of a loop by calls of its own cannot be captured",
            why="what optimizer.step() and scaler.update() do depends on what the host knows",
            write="amp = MixedPrecision(model, optimizer, policy), and its calls in the train step;\n"
            "or the train step without mezzo.capture",
        )
    if engine.ranks.size > 1:
        yield UnsupportedError(
            "a step of several ranks cannot be captured",
            where=f"{engine.ranks.size} ranks",
            why="wrappers that reduce gradients remember the stream on which they were made",
            write="the train step without mezzo.capture",
        )
    held_tensors = [t for model in weights.models for t in (*model.parameters(), *model.buffers())]
    if other_devices := {str(t.device) for t in held_tensors if t.device != device}:
        yield UnsupportedError(
            "a graph is of one device, and the session is not",
            where=f"loss scale on {device}, parameters on {', '.join(sorted(other_devices))} too",
            write=f'model.to("{device}") before the session is made',
        )
    for optimizer in weights.optimizers:
        reasons = [] if as_one_pass(optimizer) is not None else list(_missing_options(optimizer, device))
        if reasons:
            name = type(optimizer).__name__
            yield UnsupportedError(
                f"{name} cannot be captured as it was made",
                where="\n".join(dict.fromkeys(reasons)),
                why="the host decides whether it steps, or its kernel keeps the learning rate of the recorded step",
                write=f"torch.optim.{name}(…, fused=True, capturable=True, "
                f'lr=torch.tensor(…, device="{device}")), where it has these; or mezzo.optim.AdamW(…)',
            )


def _missing_options(optimizer: Optimizer, device: torch.device) -> Iterator[str]:
    """Yield what an optimizer that is not mezzo's lacks to be captured."""
    for number, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or not group.get("fused", True):
            yield f"group {number}, no kernel that skips: fused=False"
        elif not group.get("capturable", True):
            yield f"group {number}, capturable=False"
        elif not isinstance(lr, Tensor) or lr.device != device:
            where = f"on {lr.device}" if isinstance(lr, Tensor) else "a Python number"
            yield f"group {number}, lr={float(lr):.4g}, {where}"


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """Whether torch's SGD has yet to take its first step, which makes momentum buffers and differs from all others."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and param.requires_grad and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


# What a replay reads ---------------------------------------------------------------------------------------


class _Batch:
    """Where a graph reads its batch, and what batches look like.

    Args:
        args: The arguments of the first call.
        kwargs: Those by name.
        device: The graph's; tensors in host memory are copied there, best from pinned memory.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._device = device
        self._frame, batch = Frame((args, kwargs)), leaves((args, kwargs))
        self._leaves = {path: _empty(leaf, device) if isinstance(leaf, Tensor) else leaf for path, leaf in batch}
        self._tensors = list(tensors(self._leaves))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the train step is given, with no gradients to add to."""
        for recorded in self._tensors:
            recorded.grad = None
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = self._frame.filled(self._tensors)
        return arguments

    def placed(self, tensor: Tensor) -> Tensor:
        """Return what the train step is given of another batch."""
        return tensor.to(self._device, non_blocking=True)

    @torch.no_grad()
    def copy_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the tensors of a batch here, without waiting."""
        for recorded, value in zip(self._tensors, tensors((args, kwargs)), strict=True):
            recorded.copy_(value, non_blocking=True)

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the first difference of a batch from the recorded one, in words; empty where there is none."""
        batch = dict(leaves((args, kwargs)))
        if list(batch) != list(self._leaves):
            return "the structure of its arguments"
        pairs = zip(self._leaves.values(), batch.values(), strict=True)
        unlike = ((recorded, value) for recorded, value in pairs if not _is_same_leaf(recorded, value))
        return next((f"{_shown(recorded)} → {_shown(value)}" for recorded, value in unlike), "")


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(like, device=device).requires_grad_(like.requires_grad)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    return described(value) + (", requires_grad" if value.requires_grad else "")


def _is_same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    return one is other or bool(one == other)


def _held(engine: Engine) -> dict[str, Any]:
    """Return the facts that a graph was recorded with, by name: addresses, and decisions of Python's.

    **Cost**: a look at each parameter and each tensor of optimizer state, some 0.1 µs each.
    """
    engine.replan(writes=True)
    weights, plan = engine.weights, engine.plan
    settings: dict[str, Any] = {"max_grad_norm": engine.max_grad_norm}
    for number, model in enumerate(weights.models):
        name = f"{type(model).__name__}, model {number}"
        settings[f"parameters and buffers of {name}"] = addresses([*in_memory(model.parameters()), *model.buffers()])
        settings[f"requires_grad of {name}"] = [param.requires_grad for param in model.parameters()]
        settings[f"training of {name}"] = [module.training for module in model.modules()]
    settings["what optimizers update"] = [*plan.ends_of_params, *map(id, plan.params)]
    for number, optimizer in enumerate(weights.optimizers):
        name = f"{type(optimizer).__name__}, optimizer {number}"
        settings[f"state of {name}"] = addresses(list(tensors(list(optimizer.state.values()))))
        one_pass_optimizer = as_one_pass(optimizer)
        if one_pass_optimizer is not None:  # numbers, and tensors in host memory, are copied before each replay
            values = [v for group in optimizer.param_groups for key, v in group.items() if key != "params"]
            settings[f"hyper-parameters of {name}"] = addresses([t for t in tensors(values) if t.device.type != "cpu"])
            settings[f"state of {name} as its steps have left it"] = [one_pass_optimizer.is_followed()]
            settings[f"rules of {name}"] = [one_pass_optimizer.settings_of(group) for group in optimizer.param_groups]
    return settings | _options([optimizer for optimizer in weights.optimizers if as_one_pass(optimizer) is None])


def _places(engine: Engine) -> dict[str, Any]:
    """Return the addresses of all that a graph reads; a recording needs a step before it that leaves them unchanged.

    State that is made inside of a graph begins anew with each replay.
    """
    return {name: value for name, value in _held(engine).items() if isinstance(value, list)}


def _options(optimizers: Sequence[Optimizer], *, counts_writes: bool = False) -> dict[str, Any]:
    """Return the options of parameter groups by name; of tensors where they lie, and how often they were written."""
    return {
        f"{type(optimizer).__name__}, group {number}: {name}": [value.data_ptr(), value._version * counts_writes]
        if isinstance(value, Tensor)
        else value
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name in optimizer.defaults
    }


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the facts that have changed since the recording, in words."""
    return [
        name if isinstance(value, list) else f"{name} {value} → {now.get(name)}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def _refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a replay that would not be the session's next step; nothing is changed.

    Raises:
        StateError: What the graph reads has moved, or what it has frozen is another now.
    """
    if changed := _changes(before, now):
        raise StateError(
            "the captured step holds what the session has left",
            where="\n".join(changed),
            why="a graph goes on with the memory, the options and the choices of the step that was recorded; "
            "optimizer.load_state_dict, tensor.data = …, add_param_group and eval() put others in their place",
            write="captured = mezzo.capture(train_step, amp), once more; of torch's optimizers "
            'group["lr"].fill_(…), in place',
        )


# The graph -------------------------------------------------------------------------------------------------


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: cuBLAS keeps some 64 MiB for each stream that it has met."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class CudaGraph:
    """One recorded run of some code on one device, with a memory pool of its own.

    What comes before runs on the stream that is captured later, since autograd remembers the stream of a parameter's
    first use. Other threads may go on (a loader that pins memory), as ``capture_error_mode="thread_local"`` allows.

    Args:
        device: The CUDA device.

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = _stream_of(torch.cuda.current_device())
            self._graph = torch.cuda.CUDAGraph()

    def run(self, run: Callable[[], T], *, refuses_syncs: bool = False) -> T:
        """Run a call on the stream that is captured.

        Args:
            run: The code.
            refuses_syncs: Whether to let torch raise where it waits for the device: with the line at fault, and no
                stream left half captured.
        """
        outer_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer_stream)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), _refuse_syncs(when=refuses_syncs):
                return run()
        finally:
            outer_stream.wait_stream(self._stream)

    def record(self, run: Callable[[], T]) -> T:
        """Record a call; nothing is computed.

        Raises:
            RuntimeError: The code asks the device for a value.
        """
        with torch.cuda.device(self._device):  # around all of this, since set_stream changes the device too
            outer_stream = torch.cuda.current_stream()
            self._stream.wait_stream(outer_stream)
            try:
                with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                    return run()
            except BaseException:
                self._graph.reset()
                # Or the device's random numbers would wait for that graph: "Offset increment outside graph capture".
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
                raise
            finally:
                torch.cuda.set_stream(outer_stream)  # which torch leaves undone where the capture has failed

    def clear(self) -> None:
        """Drop what was recorded, and its memory, so that another run can be recorded."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # replays may still be running
            self._graph.reset()
            self._graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        """Run the recorded kernels again, without waiting, on the values that their memory holds now."""
        self._graph.replay()


@contextmanager
def _refuse_syncs(*, when: bool) -> Iterator[None]:
    """Make torch raise where code in the block waits for the device."""
    before = torch.cuda.get_sync_debug_mode() if when else None
    try:
        if when:
            with warnings.catch_warnings():  # a warning raised as an error would leave the mode set
                warnings.filterwarnings("ignore", message="Synchronization debug mode")
                torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if before is not None:
            torch.cuda.set_sync_debug_mode(before)
