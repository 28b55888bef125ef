"""``capture``: a whole train step as one CUDA graph.

The first calls of a captured step are real steps, on the stream that is captured later. The next call is recorded, and
is a step too: Python goes through it once, while nothing is computed, and the first replay computes it. So there is
nothing to put back, and what each step leaves on the device, the next replay finds there: weights, moments, the loss
scale. Python keeps what is Python's: the account of steps, learning rates, the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, message, raise_together
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.session.engine import Engine
from mezzo.session.graph import CudaGraph, explained
from mezzo.session.observers import Judged, Watched, observing, watching
from mezzo.session.session import MixedPrecision
from mezzo.session.stats import Step, StepOutcome
from mezzo.step.executors.tables import uploaded_once
from mezzo.tensors import described, tensors, versions

__all__ = ["Captured", "capture"]

R = TypeVar("R")

#: Calls that are real steps before one is recorded: what is missing is made and compiled, states of optimizers begin.
_FIRST: Final = 3
_ONE_SYNC: Final = "the host would have to ask the device for it, and a replayed graph has no host"


def capture(fn: Callable[..., R], amp: MixedPrecision) -> Captured[R]:
    """Capture a whole train step as one CUDA graph: forward, backward, check, clip, update, change of the loss scale.

    What is returned is called with each batch, in place of ``fn``, and each call is a step. The first three run ``fn``;
    the fourth is recorded, and from then on a call is one launch for the host, and computes bit for bit what ``fn``
    computes: a step that overflows is skipped on the device.

    Python runs only until then. What it decides (dropout rates, ``if``) is part of the graph. Batches, hyper-parameters
    of ``mezzo.optim`` and learning rates that are tensors are read at each call, so that schedulers step after it as
    ever. Steps without the graph may come in between, and models and sessions may load states. Gradients live and die
    inside the graph: a call begins without any.

    A batch of another shape, dtype or structure, or with other plain values, is a real step without the graph, and is
    warned of once. What the graph reads must stay where it is: once an optimizer has loaded a state, capture again.

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
        PolicyError: No function, or no session.
        UnsupportedError: The session's options or an optimizer need the host; from a call, a line of ``fn`` does. The
            steps before are done, and the call that was refused while it was recorded is not.
        StateError: From a call: ``fn`` takes no step, leaves an accumulation window open, steps a scheduler, or another
            session or optimizer; what the graph reads has moved.

    **Cost**: the graph keeps the memory of one step's activations and gradients. A call: the copies of the batch, one
    launch, some one-element kernels; no host sync.

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
    if not callable(fn):
        raise PolicyError(
            f"a train step is a function, not {type(fn).__name__}", write="mezzo.capture(train_step, amp)"
        )
    if not isinstance(amp, MixedPrecision):
        raise PolicyError(
            f"a train step is captured with its session, not with {type(amp).__name__}",
            write="amp = MixedPrecision(model, optimizer, policy); mezzo.capture(train_step, amp), and then the batch "
            "to what it returns",
        )
    device = amp.engine.device
    return Captured(fn, amp, CudaGraph(device) if device.type == "cuda" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded(Generic[R]):
    """What was recorded.

    Attributes:
        output: What the train step returned.
        outcomes: What each replay tells the account, with its numbers as one vector.
        scale: Where the graph reads the loss scale's state, and leaves the next one.
        edited: The weights that the train step has written after its last step.
        guard: What a replay would not follow.
    """

    output: R
    outcomes: list[tuple[StepOutcome, Tensor]]
    scale: Any
    edited: list[Tensor]
    guard: _Guard


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
        self._edited: list[Tensor] = []  # weights that the train step has written after its last step
        self._calls, self._has_warned = 0, False
        if graph is not None:
            raise_together(_problems(amp.engine))

    @property
    def is_graph(self) -> bool:
        """Whether calls replay a graph, once it is recorded; else they run the train step itself."""
        return self._graph is not None

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        kind = "plain calls" if self._graph is None else "a graph" if self._recorded else "to be recorded"
        return f"Captured({name}, {kind})"

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Take a step with a batch.

        Raises:
            StateError: A closed session, an open accumulation window, or something that the graph reads has moved.
            UnsupportedError: What watches the session needs Python.
            ScaleCollapsed: As ``amp.step()`` raises it, at most two steps late.
        """
        graph, engine = self._graph, self._amp.engine
        if graph is None:
            return _detached(self._fn(*args, **kwargs))
        self._amp.autocast()  # which a closed session refuses
        raise_together(_looked_at(engine))
        engine.require_whole()
        engine.account.check()
        if any(window.passes for window in engine.windows):
            raise StateError(
                "a captured step inside an accumulation window",
                why="its gradients are its own, and those of amp.backward() outside it would be left over",
                write="amp.step() or amp.zero_grad() first",
            )
        batch = self._batch = self._batch or _Batch(args, kwargs, engine.device)
        if difference := batch.difference(args, kwargs):
            self._warn(difference)
            engine.scaler.leave()
            placed = tree_map(batch.placed, (args, kwargs))
            return explained(lambda: graph.run(lambda: self._run(placed)))
        batch.take(args, kwargs)
        waits = self._recorded is None and any(map(_lacks_momentum, engine.weights.optimizers))
        if waits or self._calls < _FIRST:
            self._calls += 1
            refuses = self._calls >= _FIRST and not waits
            return explained(lambda: graph.run(lambda: self._run(batch.arguments), refuses_syncs=refuses))
        if self._recorded is None:
            self._recorded = explained(lambda: self._record(graph, batch))
        else:
            self._recorded.guard.check()
            self._refresh(self._recorded)
        return self._replay(graph, self._recorded)

    # A call ------------------------------------------------------------------------------------------------

    def _run(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> R:
        """Run the train step, and refuse what no graph could follow."""
        engine, (args, kwargs) = self._amp.engine, arguments
        looks, before = _Looks(self, engine), _options(engine.weights.optimizers)
        hook = register_optimizer_step_pre_hook(looks.refuse_foreign)
        engine.is_captured = True
        try:
            with watching(looks), torch.enable_grad():
                output = _detached(self._fn(*args, **kwargs))
        finally:
            engine.is_captured = False
            hook.remove()
        looks.require_step()
        if changed := _changes(before, _options(engine.weights.optimizers), written=True):
            raise StateError(
                "the train step changes its optimizer's options",
                where="\n".join(changed),
                why="Python runs only until the graph is recorded: a scheduler inside would never step again",
                write="scheduler.step() after each call of the captured step",
            )
        self._edited = looks.edited()
        return output

    def _record(self, graph: CudaGraph, batch: _Batch) -> _Recorded[R]:
        """Go through a step while its kernels are recorded; nothing is computed before the first replay."""
        engine = self._amp.engine
        raise_together(_problems(engine))
        engine.clear()
        self._prepare()
        scaler, before, scale = engine.scaler, engine.scaler.state, engine.scaler.tensors()
        outcomes: list[tuple[StepOutcome, Tensor]] = []

        def run() -> R:
            # A copy: what steps say of the scale that they had must outlive the next one.
            scaler.hold(scale.clone(), in_graph=True)
            output = self._run(batch.arguments)
            scale.copy_(scaler.state)
            scaler.hold(scale, in_graph=True)
            return output

        engine.account.kept = outcomes
        try:
            with uploaded_once() as upload:
                output = graph.record(run)
            upload()
        except BaseException:
            # No kernel has run: what Python has of this step is forgotten, and the session is as it was.
            scaler.hold(before, in_graph=False)
            engine.broken = ""
            engine.clear()
            raise
        finally:
            engine.account.kept = None
        guard = _Guard(engine)
        return _Recorded(output=output, outcomes=outcomes, scale=scale, edited=self._edited, guard=guard)

    def _prepare(self) -> None:
        """Bring over what has changed on the host since the last step: hyper-parameters, edited weights. No sync."""
        weights = self._amp.engine.weights
        for keeper in weights.keepers():
            keeper.take_edits()
        for optimizer in one_pass(weights.optimizers):
            optimizer.upload()

    def _refresh(self, recorded: _Recorded[R]) -> None:
        self._amp.engine.scaler.enter(recorded.scale)
        self._prepare()

    def _replay(self, graph: CudaGraph, recorded: _Recorded[R]) -> R:
        engine = self._amp.engine
        with torch.no_grad():
            graph.replay()
            increment_version(recorded.edited)  # a replay counts none up, and masters take over what was edited
            for outcome, packed in recorded.outcomes:
                engine.account.note(outcome, packed)
        engine.weights.forget_casts()
        engine.weights.restored.clear()
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
            warnings.warn(text, stacklevel=3)


def _detached(output: R) -> R:
    found: R = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
    return found


# What a train step may not do ------------------------------------------------------------------------------


class _Looks:
    """Looks on while a train step runs for a graph: an observer, which refuses what the graph could not follow."""

    def __init__(self, captured: Captured[Any], engine: Engine) -> None:
        self._captured, self._engine, self._steps = captured, engine, 0
        models = [t for model in engine.weights.models for t in (*model.parameters(), *model.buffers())]
        self._tensors = list({id(t): t for t in (*models, *engine.weights.updated())}.values())
        self._versions = versions(self._tensors)

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

    def judged(self, engine: Watched, judged: Judged) -> None:
        """Gradients are the graph's own."""

    def stepped(self, engine: Watched, step: Step) -> None:
        """Take note of what was written until now."""
        self._steps += 1
        self._versions = versions(self._tensors)

    def edited(self) -> list[Tensor]:
        """Return the weights that were written in place after the last step."""
        now = versions(self._tensors)
        return [t for t, one, two in zip(self._tensors, self._versions, now, strict=True) if one != two]

    def require_step(self) -> None:
        """Refuse a train step that only Python could continue.

        Raises:
            StateError: It has taken no step, or a window is open at its end.
        """
        if any(window.passes for window in self._engine.windows):
            raise StateError(
                "an accumulation window is open at the end of the train step",
                why="gradients live and die inside the graph, and none outlive it",
                write="amp.step() after the last amp.backward(loss) of the train step; all micro-batches in one call",
            )
        if not self._steps:
            raise StateError(
                "the train step takes no step of its session",
                where=repr(self._captured),
                write="amp.autocast(), amp.backward(loss), amp.step() in the train step",
            )

    def refuse_foreign(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse the step of an optimizer that the session does not know: a hook before each."""
        if self in observing() and optimizer not in self._engine.weights.optimizers:
            raise StateError(
                "an optimizer that belongs to no session steps inside a captured train step",
                where=type(optimizer).__name__,
                why="it knows of no skipped step, and its hyper-parameters would be part of the graph",
                write="MixedPrecision(model, [optimizer, other], policy), and amp.step()",
            )


def _looked_at(engine: Engine) -> Iterator[MezzoError]:
    """Yield what looks at each step by Python, of which a replay has none."""
    for observer in (*engine.observers, *observing()):
        yield UnsupportedError(
            "a captured step where each step is looked at",
            where=repr(observer),
            why=f"a recorder records and a reaction reacts by Python; {_ONE_SYNC}",
            write='on_overflow="skip", and mezzo.overflow.locate(fn, model) once amp.stats() shows skipped steps; '
            "the train step itself in a recorder's block",
        )


def _problems(engine: Engine) -> Iterator[MezzoError]:
    """Yield all that keeps a session's steps from being captured."""
    yield from _looked_at(engine)
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
    held = [t for model in weights.models for t in (*model.parameters(), *model.buffers())]
    if elsewhere := {str(t.device) for t in held if t.device != device}:
        yield UnsupportedError(
            "a graph is of one device, and the session is not",
            where=f"loss scale on {device}, parameters on {', '.join(sorted(elsewhere))} too",
            write=f'model.to("{device}") before the session is made',
        )
    for optimizer in weights.optimizers:
        if as_one_pass(optimizer) is None:
            yield from _of_torchs(optimizer, device)


def _of_torchs(optimizer: Optimizer, device: torch.device) -> Iterator[UnsupportedError]:
    """Yield what keeps an optimizer that is not mezzo's from being captured."""
    name, groups = type(optimizer).__name__, list(enumerate(optimizer.param_groups))
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(g.get("fused", True) for _, g in groups):
        yield UnsupportedError(
            f"{name} cannot skip a step on the device",
            why=f"its step runs or it does not; {_ONE_SYNC}",
            write="mezzo.optim.AdamW(…), or torch.optim.AdamW(…, fused=True, capturable=True, lr=torch.tensor(…))",
        )
        return
    anything: Any = optimizer
    anything._warned_capturable_if_run_uncaptured = True  # as its first steps are
    for number, group in groups:
        lr = group["lr"]
        if not group.get("capturable", True):
            yield UnsupportedError(
                f"{name} was not made to be captured",
                where=f"group {number}, capturable=False",
                write=f"torch.optim.{name}(…, fused=True, capturable=True, lr=torch.tensor(…))",
            )
        elif not isinstance(lr, Tensor) or lr.device != device:
            kind = f"on {lr.device}" if isinstance(lr, Tensor) else "a Python number"
            yield UnsupportedError(
                f"the learning rate of {name} would be frozen into the graph",
                where=f"group {number}, lr={float(lr):.4g}, {kind}",
                why="its kernel gets the number it has while the graph is recorded, and no scheduler reaches it there",
                write=f'lr=torch.tensor({float(lr):.4g}, device="{device}"); or mezzo.optim.{name}(…)',
            )


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
        leaves, self._nest = tree_flatten((args, kwargs))
        self._leaves = [_empty(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the train step is given, with no gradients to add to."""
        for mine in self._leaves:
            if isinstance(mine, Tensor):
                mine.grad = None
        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(self._leaves, self._nest)
        return found

    def placed(self, leaf: Any) -> Any:
        """Return what the train step is given of another batch."""
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    @torch.no_grad()
    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the tensors of a batch here, without waiting."""
        for mine, given in zip(self._leaves, tree_flatten((args, kwargs))[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return in which a batch is unlike the first one; empty where it is like it."""
        leaves, nest = tree_flatten((args, kwargs))
        if nest != self._nest:
            return "the structure of its arguments"
        if all(map(_alike, self._leaves, leaves)):
            return ""
        for mine, (path, given) in zip(self._leaves, tree_flatten_with_path((args, kwargs))[0], strict=True):
            if not _alike(mine, given):
                (of, first, *rest) = path
                name = f"argument {first.idx + 1}" if of.idx == 0 else str(first.key)  # type: ignore[attr-defined]
                return f"{name}{keystr(tuple(rest))}: {_shown(mine)} → {_shown(given)}"
        raise AssertionError("a batch is like the first one, and is not")


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(like, device=device).requires_grad_(like.requires_grad)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return described(value) + (", requires_grad" if value.requires_grad else "")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if type(one) is not type(other):
            return False
        return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (ValueError, RuntimeError):  # such as NumPy's arrays, of which nobody knows whether "all" is meant
        return False


class _Guard:
    """What a graph holds of a session, compared with what the session has before each replay.

    Args:
        engine: The session while its train step was recorded.

    **Cost**: a look at each parameter and each tensor of optimizer state for each replay, some 0.1 µs each.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory, self._choices = _memory(engine), _choices(engine)
        self._addresses = {name: list(map(Tensor.data_ptr, held)) for name, held in self._memory.items()}
        self._options = _options(_frozen(engine))

    def check(self) -> None:
        """Refuse a replay that would not be the session's next step; nothing is changed.

        Raises:
            StateError: What the graph reads has moved, or what it has frozen is another now.
        """
        engine, again = self._engine, "captured = mezzo.capture(train_step, amp), once more"
        now = _memory(engine)
        if moved := [name for name, held in now.items() if not self._is_where_it_was(name, held)]:
            raise StateError(
                "the captured step reads memory that the session has left",
                where="\n".join(moved),
                why="a graph goes on with the tensors that were there when it was recorded; optimizer.load_state_dict, "
                "tensor.data = … and add_param_group put others in their place",
                write=again,
            )
        if other := _changes(self._choices, _choices(engine)):
            raise StateError(
                "the captured step has decided otherwise",
                where="\n".join(other),
                why="Python decides it, which ran when the step was recorded",
                write=again,
            )
        if frozen := _changes(self._options, _options(_frozen(engine))):
            raise StateError(
                "an option was changed, and the graph has the old one",
                where="\n".join(frozen),
                why="torch's kernels get such numbers from Python, which ran when the step was recorded",
                write='group["lr"].fill_(…), in place, of tensors; mezzo.optim, whose kernels read all of them on the '
                f"device; or {again}",
            )

    def _is_where_it_was(self, name: str, held: list[Tensor]) -> bool:
        before, addresses = self._memory.get(name, []), self._addresses.get(name, [])
        same = len(before) == len(held) and all(one is two for one, two in zip(before, held, strict=True))
        return same and addresses == list(map(Tensor.data_ptr, held))


def _memory(engine: Engine) -> dict[str, list[Tensor]]:
    """Return the tensors that a graph reads and writes by their addresses, by what to call them."""
    weights = engine.weights
    held = [t for model in weights.models for t in (*model.parameters(), *model.buffers())]
    found = {"parameters and buffers": held, "what the optimizers update": list(weights.updated())}
    for number, optimizer in enumerate(weights.optimizers):
        name = f"{type(optimizer).__name__}, optimizer {number}"
        found[f"state of {name}"] = list(tensors(list(optimizer.state.values())))
        if as_one_pass(optimizer) is not None:  # numbers, and tensors in the host's memory, are brought over
            values = [v for group in optimizer.param_groups for key, v in group.items() if key != "params"]
            found[f"hyper-parameters of {name}"] = [each for each in tensors(values) if each.device.type != "cpu"]
    return found


def _choices(engine: Engine) -> dict[str, tuple[Any, int]]:
    """Return what Python decides while a step runs, as far as a session knows it."""
    weights = engine.weights
    rules = [o.rule_of(group) for o in one_pass(weights.optimizers) for group in o.param_groups]
    found: dict[str, Any] = {"max_grad_norm": engine.max_grad_norm, "rules of the optimizers": rules}
    for number, model in enumerate(weights.models):
        name = f"{type(model).__name__}, model {number}"
        found[f"training of {name}"] = [module.training for module in model.modules()]
        found[f"requires_grad of {name}"] = [param.requires_grad for param in model.parameters()]
    return {name: (value, 0) for name, value in found.items()}


def _frozen(engine: Engine) -> list[Optimizer]:
    return [optimizer for optimizer in engine.weights.optimizers if as_one_pass(optimizer) is None]


def _options(optimizers: Sequence[Optimizer]) -> dict[str, tuple[Any, int]]:
    """Return the options of parameter groups by name, each with how often it was written in place."""
    return {
        f"{type(optimizer).__name__}, group {number}: {name}": (
            value,
            value._version if isinstance(value, Tensor) else 0,
        )
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name in optimizer.defaults
    }


def _changes(
    before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]], *, written: bool = False
) -> list[str]:
    """Return what is another now, in words; with ``written`` tensors that were written in place too."""
    found = []
    for name, (old, version) in before.items():
        new, now = after.get(name, (None, 0))
        if new is not old and (isinstance(old, Tensor) or isinstance(new, Tensor) or new != old):
            found.append(name if isinstance(old, list) else f"{name} {old} → {new}")
        elif written and now != version:
            found.append(f"{name} was written in place")
    return found
