"""``Replay``: keeping what a training step is computed from, and after an overflow running its calls again.

Each call of a model is kept with what it was given and the gradients that came back, everything by reference with the
version that it had: nothing is copied but random states.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.backward import number_of_pass
from mezzo.cast.model.places import has_forward
from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, shown
from mezzo.hooks import OwnHook
from mezzo.overflow.diagnose import Changed, Context, Overflow, diagnose, highest_scale, report_outside_models
from mezzo.overflow.watch import Watch
from mezzo.policy import Policy
from mezzo.tensors import LOW, dtype_name, mapped, mark, tensors
from mezzo.trace.function_calls import Locator, frame_id, user_line
from mezzo.trace.measure import is_finite, named_inputs, numbered, shape_text
from mezzo.trace.modes import after_forward, before_forward, is_watched
from mezzo.trace.sandbox import RandomStates, devices_of, gradients_aside, leaves_of, untouched

# ``locate``: one watched forward and backward pass, and the first non-finite tensor that leads on.

#: Runs a backward pass from several tensors, as ``torch.autograd.backward`` does.
Backward = Callable[..., None]


def locate(
    fn: Callable[[], Any],
    model: nn.Module | Iterable[nn.Module],
    *,
    loss_scale: float | Tensor = 1.0,
    policy: Policy | str | os.PathLike[str] | None = None,
) -> Overflow | None:
    """Find the first tensor of a training step that is not finite and leads on, forward or backward.

    ``fn`` is run once with a look at every kernel's results, then the backward pass of what it returns times the loss
    scale. A tensor counts if it reaches the loss or a gradient: an attention mask's -inf, which a softmax consumes, is
    not blamed. A gradient that overflows because of the loss scale is told from others by trying lower scales.

    Gradients, buffers and random states are as before afterwards; what ``fn`` writes to other objects is written.

    Args:
        fn: Runs the forward pass, in its own autocast region if there is one, and returns the loss, or any tensors in
            containers, whose sum then takes the loss's place.
        model: The model, or the models, that ``fn`` runs; they give modules and parameters their names.
        loss_scale: What the loss is multiplied by.
        policy: The policy that ``fn`` trains under, its text or file. It makes the cure exact, and lets activation
            checkpoints of plain functions be recomputed under its rules.

    Returns:
        The report, or ``None`` where the loss and all gradients are finite.

    Raises:
        PolicyError: ``fn`` returned no floating tensor, ``model`` is not a module, or the loss scale is not positive.

    **Cost**: one training step with a host sync and up to 1 ms of Python for each kernel, a copy of all buffers, and
    for a gradient that overflows some more backward passes, three where the first guess at the scale is right.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.overflow import locate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> policy = mezzo.Policy.O1("float16", emulate=True)
        >>> def fn():
        ...     with mezzo.autocast(policy):
        ...         return model(torch.full((2, 4), 6e4)).square().sum()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(4 * torch.eye(4))
        >>> overflow = locate(fn, model, policy=policy)
        >>> overflow.module, overflow.op, overflow.phase, overflow.tensor.dtype, overflow.cure
        ('0', 'linear', 'forward', 'float16', 'policy = policy.keep_fp32(modules=["0"])   # the text fp32_module=0')
    """
    models = checked_models(model)
    if not callable(fn):
        raise PolicyError(
            f"fn is {shown(fn)}, no function",
            why="a search runs the forward pass itself",
            write="mezzo.overflow.locate(lambda: criterion(model(x), y), model)",
        )
    policy = None if policy is None else Policy.of(policy)
    scale = float(loss_scale)
    if not 0.0 < scale < float("inf"):
        raise PolicyError(f"the loss scale is {scale!r}", why="a scale is positive and finite", write="loss_scale=1.0")
    search = Search(Context(models, policy, scale))
    backward: Backward = torch.autograd.backward if policy is None else autocast(policy).run_backward
    with untouched(models), search.hooked():
        outputs = [tensor for tensor in tensors(search.forward(fn)) if tensor.is_floating_point()]
        if not outputs:
            raise PolicyError(
                "fn returned no floating tensor",
                why="a search begins at the loss and goes backward",
                write="mezzo.overflow.locate(lambda: criterion(model(x), y), model)",
            )
        origin = search.watch.first(outputs)
        if origin is not None and (
            not origin.may_be_meant or any(end.numel() == 1 and not is_finite(end) for end in outputs)
        ):
            return diagnose(origin, search.context)
        starts = [_wide(end) * scale for end in outputs if end.requires_grad]
        return search.backward(starts, [torch.ones_like(start) for start in starts], backward) if starts else None


def checked_models(model: Any) -> list[nn.Module]:
    """Return models as a list.

    Raises:
        PolicyError: The list is empty, or holds something else than modules.
    """
    models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else [model]
    if not models or not all(isinstance(value, nn.Module) for value in models):
        classes = ", ".join(type(value).__name__ for value in models) or "nothing"
        raise PolicyError(f"a model must be an nn.Module, not {classes}", write="mezzo.overflow.locate(fn, model)")
    return models


class Search:
    """A watched forward pass, and backward passes from it.

    Args:
        context: The models, their policy and the loss scale.
        where: Where the pass begins.
    """

    def __init__(self, context: Context, where: Locator | None = None) -> None:
        self.context = context
        self.watch = Watch(context, where)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook every module inside the block, so that each kernel is recorded with the module that runs it."""
        with ExitStack() as hooks:
            for prefix, model in numbered(self.context.models):
                learn = partial(self._learn, prefix)
                hooks.callback(before_forward(model, learn, prepend=True, with_kwargs=True).remove)
            hooks.enter_context(self.watch.recorder.hooked(self.context.models))
            yield

    def _learn(self, prefix: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.watch.names.put_inputs(prefix, args, kwargs)

    def forward(self, fn: Callable[[], Any]) -> Any:
        """Run a forward pass, watched."""
        with self.watch.recorder.watching():
            return fn()

    def backward(self, starts: Sequence[Tensor], gradients: Sequence[Tensor], run: Backward) -> Overflow | None:
        """Run a backward pass, watched, and report what makes a gradient non-finite.

        Args:
            starts: Where it starts.
            gradients: The gradients that arrive there.
            run: What runs it.
        """
        with gradients_aside(leaves := self._leaves(starts)):
            with self.watch.recorder.watching(backward=True):
                run(starts, grad_tensors=gradients, retain_graph=True)
            param_gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        origin = self.watch.first(param_gradients)
        if origin is None:
            return None
        if origin.phase == "forward" or origin.source != "made":
            return diagnose(origin, self.context)

        def is_finite_at(scale: float) -> bool:
            lower = [gradient * (scale / self.context.loss_scale) for gradient in gradients]
            with gradients_aside(leaves):
                run(starts, grad_tensors=lower, retain_graph=True)
                return all(is_finite(leaf.grad) for leaf in leaves if leaf.grad is not None)

        lowered = highest_scale(self.context.loss_scale, origin.needed, torch.finfo(origin.dtype).max, is_finite_at)
        # In a wider format a scale below 1 would only hide that the gradient itself has no bound.
        is_cure = origin.dtype == torch.float16 or (lowered or 0) >= 1
        return diagnose(origin, self.context, lowered if is_cure else None)

    def _leaves(self, starts: Iterable[Tensor]) -> list[Tensor]:
        """Return every tensor that a backward pass may give a gradient to."""
        # Reentrant checkpoints hide parameters from the graph, and a loss may read leaves that are no parameters.
        params = (param for model in self.context.models for param in model.parameters())
        all_leaves = (*(param for param in params if param.requires_grad), *leaves_of(starts))
        return list({id(leaf): leaf for leaf in all_leaves}.values())


def _wide(loss: Tensor) -> Tensor:
    """Return a loss in FP32 or wider, as a session has it before the multiplication by the scale."""
    return loss.float() if loss.dtype in LOW else loss


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor by reference, with the mark by which later writes to it are seen."""

    name: str
    tensor: Tensor
    mark: tuple[int, int]

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Kept:
        """Return a reference to a tensor, marked as it is now."""
        return cls(name, tensor, mark(tensor))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place, or given other storage.

        Writes through ``.data``, and to tensors that were made in inference mode, are not seen: they count no version.
        """
        return mark(self.tensor) != self.mark

    def __str__(self) -> str:
        return f"{self.name} ({dtype_name(self.tensor.dtype)}, {shape_text(self.tensor.shape)})"


class _Graph:
    """A token that the hooks of a call's outputs hold: it lives as long as their autograd graph."""


@dataclass(eq=False, slots=True)
class KeptCall:
    """One call of a model.

    Attributes:
        module: The model.
        args: Its positional arguments; containers are copied, tensors are not.
        kwargs: Its keyword arguments.
        inputs: The tensors among them.
        states: The random states before it.
        line: The user's line that made it.
        arrivals: The gradients that arrived at its outputs, by backward pass and by output.
        graph: A reference that is dead once no backward pass can reach the call any more.
        handles: Hooks on outputs that outlive their graph.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Kept]
    states: RandomStates
    line: str | None
    arrivals: dict[int, dict[int, Kept]] = field(default_factory=dict)
    graph: weakref.ref[_Graph] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def is_pending(self) -> bool:
        """Whether its backward pass may still come."""
        return not self.arrivals and self.graph is not None and self.graph() is not None


class Event(NamedTuple):
    """A forward pass, or a backward pass by its number, in the order in which they happened."""

    call: KeptCall
    task: int | None


class CallKeeper:
    """Hooks on models that keep each call with gradients, until it is forgotten.

    Of a copied or pickled model nothing is kept.

    Args:
        models: The models. Of one that calls another only the outer call is kept.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.events: list[Event] = []
        self._devices = devices_of(models)
        self._open: defaultdict[int, list[KeptCall | None]] = defaultdict(list)  # by thread
        self._hooks = [
            handle
            for model in models
            for handle in (
                # Before the hooks that cast, and after those that cast back.
                before_forward(model, OwnHook(self._before), prepend=True, with_kwargs=True),
                after_forward(model, OwnHook(self._after), always_call=True),
            )
        ]

    def clear(self) -> None:
        """Forget every call whose backward pass has been, or cannot come any more.

        It is called after each step, and when gradients are cleared. A forward pass that still waits for its backward
        pass stays, since gradients may be cleared between the two.
        """
        done = {event.call for event in self.events if not event.call.is_pending}
        self.events = [event for event in self.events if event.call not in done]
        for call in done:
            call.arrivals.clear()
            for handle in call.handles:
                handle.remove()

    def remove(self) -> None:
        """Remove the hooks from the models, and forget all calls."""
        for hook in self._hooks:
            hook.remove()
        self.clear()
        self.events.clear()

    # Hooks --------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        opened = self._open[threading.get_ident()]
        if opened or not torch.is_grad_enabled() or is_watched():
            opened.append(None)
            return
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor)
        inputs = [Kept.of(tensor, name) for name, tensor in named_inputs(args, kwargs)]
        opened.append(KeptCall(module, args, kwargs, inputs, RandomStates.now(self._devices), user_line()))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        opened = self._open[threading.get_ident()]
        call = opened.pop() if opened else None
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if call is None or not outputs:
            return
        graph = _Graph()
        call.graph = weakref.ref(graph)
        for number, tensor in enumerate(outputs):
            hook = partial(self._arrive, call, graph, number)
            handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                call.handles.append(handle)
        # Passes of which no backward pass will come, as in an evaluation without no_grad, would pile up.
        self.events = [event for event in self.events if event.call.arrivals or event.call.is_pending]
        self.events.append(Event(call, None))

    def _arrive(self, call: KeptCall, graph: _Graph, number: int, gradient: Tensor) -> None:
        task = number_of_pass()
        if not any(event.call is call for event in self.events):
            self.events.append(Event(call, None))  # forgotten meanwhile, and used by another backward pass
        if task not in call.arrivals:
            call.arrivals[task] = {}
            self.events.append(Event(call, task))
        call.arrivals[task][number] = Kept.of(gradient, f"gradient of output {number}")


# Running them again ----------------------------------------------------------------------------------


class Replay(CallKeeper):
    """The calls of a step, kept so that an overflow's origin can be found by running them again.

    Each call of a model is kept with the random states before it and the gradients that arrive at its outputs. After
    an overflow the calls are run again with a look at every kernel, the forward and backward passes in the order in
    which they were; the loss itself is not known here, and not needed. Buffers are not kept: statistics are those of
    now, which training mode does not read. Calls inside a function that torch compiles are not seen; those of
    ``torch.compile(model)`` are, and are run uncompiled.

    Args:
        models: The models, or one; of a model without a ``forward``, such as a ``ModuleList``, its parts are called.
        region: Returns the context that the models run in, a new one for each call.

    **Cost**: without an overflow no computation on a device, no copy and no sync. From a call until :meth:`clear` its
    inputs and output gradients stay alive, beside 10 KB of random states; under 100 µs of Python for each call.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.overflow import Replay
        >>> model = torch.nn.Linear(4, 1)
        >>> prepared = mezzo.prepare(model, "O1,emulate=true")
        >>> replay = Replay(model, region=prepared.autocast)
        >>> with prepared.autocast():
        ...     loss = model(torch.full((2, 4), 1000.0)).float().sum()
        >>> (loss * 65536).backward()
        >>> overflow = replay.locate(loss_scale=65536.0)
        >>> overflow.phase, overflow.tensor.name, overflow.tensor.num_inf
        ('backward', 'gradient of output 0', 2)
        >>> replay.remove()
    """

    def __init__(
        self, models: nn.Module | Iterable[nn.Module], *, region: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._models = checked_models(models)
        self._region = region
        super().__init__([part for model in self._models for part in _called_from_outside(model)])

    def locate(self, loss_scale: float | Tensor = 1.0) -> Overflow | Changed | None:
        """Find the first non-finite tensor that led on, in the calls since :meth:`clear`.

        Args:
            loss_scale: The scale that the gradients carry.

        Returns:
            The report; :class:`Changed` where inputs were changed in place since, so that a call cannot be run again;
            ``None`` where all is finite, as when finite gradients overflow only in the sum of their squares, or as FP16
            numbers that several backward passes add up.

        **Cost**: as :func:`locate`, once for each call and again for each of its backward passes that came later.
        """
        replayed = _Replayed(self._models, self._region, float(loss_scale))
        with untouched(self._models):
            for _, group in groupby(list(self.events), key=lambda event: id(event.call)):
                if (overflow := replayed.overflow_of(list(group))) is not None:
                    return overflow
        return Changed(tensors=tuple(replayed.changed)) if replayed.changed else replayed.late


@dataclass(slots=True)
class _Replayed:
    """One run through all that was kept.

    Attributes:
        models: The models.
        region: Returns the context that they run in.
        scale: The scale that the gradients carry.
        changed: What was changed in place.
        late: An overflow in a forward pass whose gradients were finite nevertheless.
    """

    models: list[nn.Module]
    region: Callable[[], AbstractContextManager[Any]]
    scale: float
    changed: dict[str, None] = field(default_factory=dict)
    late: Overflow | None = None

    def overflow_of(self, events: list[Event]) -> Overflow | None:
        """Return the overflow of one call, which is run again: forward, and backward where that followed at once."""
        call = events[0].call
        tasks = [event.task for event in events if event.task is not None]
        needed = [*call.inputs, *(tensor for task in tasks for tensor in call.arrivals[task].values())]
        if changed := [str(tensor) for tensor in needed if tensor.is_changed]:
            self.changed.update(dict.fromkeys(changed))
            return None
        region = self.region()
        where = Locator(until=frame_id(), instead=call.line)
        search = Search(Context(self.models, getattr(region, "policy", None), self.scale), where)
        with search.hooked():
            outputs = self._forward(search, call)
            if (overflow := self._forward_overflow(search, call, outputs)) is not None:
                return overflow
            run = getattr(region, "run_backward", torch.autograd.backward)
            for task in tasks:
                gradients = {number: arrival.tensor for number, arrival in call.arrivals[task].items()}
                bad = [number for number, gradient in gradients.items() if not is_finite(gradient)]
                if bad:
                    number = bad[0]
                    return report_outside_models(gradients[number], number, outputs[number], call.line, search.context)
                starts = [outputs[number] for number in gradients]
                if (overflow := search.backward(starts, list(gradients.values()), run)) is not None:
                    # The input of one model may be the output of another.
                    return self.late if overflow.kind == "input" and self.late is not None else overflow
        return None

    def _forward(self, search: Search, call: KeptCall) -> list[Tensor]:
        """Run a call on its inputs as new leaves, and return the outputs in the order in which they were kept."""
        args, kwargs = mapped((call.args, call.kwargs), _leaf)
        call.states.restore()
        with self.region():
            output = search.forward(lambda: call.module(*args, **kwargs))
        return [tensor for tensor in tensors(output) if tensor.requires_grad]

    def _forward_overflow(self, search: Search, call: KeptCall, outputs: list[Tensor]) -> Overflow | None:
        """Return the report of a non-finite forward pass, if the gradients that came back are not finite either."""
        arrivals = [arrival for of_pass in call.arrivals.values() for arrival in of_pass.items()]
        origin = search.watch.first([outputs[number] for number in dict(arrivals)])
        if origin is None:
            return None
        if any(not is_finite(gradient.tensor) for _, gradient in arrivals):
            return diagnose(origin, search.context)
        if not origin.may_be_meant:
            self.late = self.late or diagnose(origin, search.context)
        return None


def _called_from_outside(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that a user may call: itself, or its parts, as a ``training_step`` calls them."""
    yield from dict.fromkeys([*_called(model), *(part for child in model.children() for part in _called(child))])


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a module that has a ``forward``; of a mere container its parts that have one."""
    if has_forward(model):
        yield model
        return
    for part in model.children():
        yield from _called(part)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
