"""Backward passes of a session, and the passes that run inside of them: the leaves that they reach, and the scale.

While a pass runs each gradient carries the scale once, in passes inside of it too. After it only gradients of the
session's own parameters carry the scale, and their windows know it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar
from weakref import ref

import torch
from torch import Tensor, empty, is_grad_enabled, nn, ones
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.backward import (
    call_at_end,
    door,
    may_run_others,
    node_of,
    number_of_pass,
    runs_hooks_of_modules,
    set_thread_owner,
    thread_owner,
    will_run,
)
from mezzo.compiling import never_compiled
from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import StateError, UnsupportedError
from mezzo.interrupts import uninterrupted
from mezzo.patches import Binding
from mezzo.scale.state import inverse
from mezzo.session.step_plan import StepPlan
from mezzo.session.window import Window
from mezzo.sharded import local
from mezzo.tensors import LOW, moved

R = TypeVar("R")

# What a pass reaches -------------------------------------------------------------------------------------

#: What in a graph accumulates the gradient of a leaf.
_ACCUMULATES: Final = type(get_gradient_edge(ones(1, requires_grad=True)).node)
_EDGES: Final = attrgetter("next_functions")
_VARIABLE: Final = attrgetter("variable")


class Walk:
    """The part of an autograd graph that a backward pass reaches.

    Attributes:
        leaves: Its leaves.
        nodes: The nodes between its roots and the leaves.
        runs_others: Whether some nodes may run passes of their own, over leaves that the graph does not show.
        is_anothers: Whether the graph goes through a loss that a session has scaled.
        runs_hooks: Whether backward hooks of modules run in it.
    """

    __slots__ = ("is_anothers", "leaves", "nodes", "runs_hooks", "runs_others")

    def __init__(self, leaves: list[Any], nodes: list[Any]) -> None:
        self.leaves, self.nodes = leaves, nodes
        kinds, self.runs_others = set(map(type, nodes)), False
        self.is_anothers, self.runs_hooks = node_of(_Entry) in kinds, runs_hooks_of_modules(kinds)
        for node_class in kinds:
            if issubclass(node_class, BackwardCFunction) and may_run_others(node_class):
                self.runs_others = True


def walked(roots: Iterable[Any]) -> Walk:
    """Walk through a graph, from its roots to its leaves.

    Args:
        roots: Tensors, or ``GradientEdge`` of the graph.

    **Cost**: Python for each node, about 0.2 µs.
    """
    leaves, first = list[Tensor](), list[tuple[Any, int]]()
    for root in roots:
        node = root.node if isinstance(root, GradientEdge) else root.grad_fn
        if node is not None:
            first.append((node, 0))
        elif root.requires_grad:
            leaves.append(root)
    nodes, accumulators, seen = list[Any](), list[Any](), {None}
    for edges in chain([first], map(_EDGES, nodes)):  # `nodes` grows in this loop
        for node, _ in edges:
            if node not in seen:
                seen.add(node)
                (accumulators if type(node) is _ACCUMULATES else nodes).append(node)
    leaves += map(_VARIABLE, accumulators)
    return Walk(leaves, nodes)


def walk_of(roots: Iterable[Any], inputs: Collection[Any]) -> Walk:
    """Return the part of a graph that a pass reaches, given the arguments of autograd's engine.

    Args:
        roots: Tensors, or ``GradientEdge`` of the graph.
        inputs: Where it is told to end, if anywhere.
    """
    if not inputs:
        return walked(roots)
    leaves = (getattr(end.node, "variable", end) if isinstance(end, GradientEdge) else end for end in inputs)
    return Walk(list(leaves), [])


def refuse_scaled(roots: Iterable[Any], inner: Iterable[Any], *, creates_graph: bool) -> None:
    """Refuse passes in which the loss scale could not be taken out again.

    Args:
        roots: Where it begins.
        inner: Where it is told to end, but for the session's parameters.
        creates_graph: Whether its gradients can be differentiated.

    Raises:
        StateError: It begins at an edge of a graph, ends inside of it, or its gradients are to be differentiated.
    """
    bfloat16 = 'a policy without a scale: Policy.O1("bfloat16"), the text O1,dtype=bfloat16'
    if creates_graph:
        raise StateError(
            "gradients that carry the loss scale would be differentiated again",
            where="a backward pass with create_graph=True",
            why="what is computed of .grad would have the scale in it, and its own gradients a power of it",
            write="torch.autograd.grad(loss, params, create_graph=True), which returns them without it, or amp.grad;\n"
            f"or {bfloat16}",
        )
    is_inside = GradientEdge in set(map(type, roots))
    for end in inner:
        is_inside = is_inside or isinstance(end, GradientEdge) or end.grad_fn is not None
    if is_inside:
        raise StateError(
            "a backward pass under a loss scale begins, or stops, inside of its graph",
            why="the loss scale is multiplied into a loss, and taken out at the leaves",
            write=f"amp.grad(loss, inputs), which returns unscaled gradients; or {bfloat16}",
        )


# Gradients inside of graphs ------------------------------------------------------------------------------

#: Tensors that are no leaves, whose gradients a program wants to read after a pass.
_RETAINED: Final[Any] = WeakTensorKeyDictionary()


def retaining(_: object, plain: Callable[..., None], tensor: Tensor, /, *args: Any, **kwargs: Any) -> None:
    """Retain the gradient of a tensor after a pass, without the scale: what ``tensor.retain_grad()`` does."""
    plain(tensor, *args, **kwargs)
    if not tensor.is_leaf:
        _RETAINED[tensor] = None


# A pass --------------------------------------------------------------------------------------------------


class Opens(Protocol):
    """What backward passes open and end: an engine.

    Attributes:
        under_way: The passes that autograd holds, weakly.
        has_door: Whether each backward pass of the process goes through :func:`run_inside`, or begins one.
        plan: What the session is made of.
    """

    under_way: list[ref[SessionPass]]
    has_door: bool
    plan: StepPlan

    def next_scale(self) -> Tensor | None:
        """Return what the next loss is multiplied by; ``None`` where gradients carry no scale."""

    def reached(self, walk: Walk) -> list[Window]:
        """Return the windows whose gradients a pass makes; hooks of modules that see the scale there are warned of."""

    def foreign_leaves(self, leaves: Iterable[Any]) -> list[Any]:
        """Return the leaves of a graph that are none of the session's."""

    def begin(
        self, windows: list[Window], scale: Tensor | None, foreign: Iterable[Tensor], *, is_first: bool
    ) -> list[Tensor]:
        """Make ready for gradients of a pass that will carry a scale; return leaves of which they shall not."""

    def end(self, losses: Mapping[Window, list[Tensor]], *, has_failed: bool) -> None:
        """End a pass: unscale or mark its gradients; after a failed pass restore the gradients of before."""


def run_pass(
    engine: Opens,
    roots: Collection[Any],
    run: Callable[[tuple[Any, ...]], R],
    windows: list[Window],
    walk: Walk | None = None,
    *,
    inputs: Collection[Any] = (),
    creates_graph: bool = False,
) -> R:
    """Run a backward pass as a session's: gradients carry the scale on the way, and not at the end.

    Args:
        engine: The session's engine.
        roots: The roots of the graph: losses, or any tensors, or ``GradientEdge``.
        run: Runs the pass from the roots times the scale.
        windows: The windows whose gradients the pass makes.
        walk: The leaves that the pass reaches, where they are known.
        inputs: The inputs at which the pass ends, if it is given such.
        creates_graph: Whether its gradients can be differentiated.

    Returns:
        What ``run`` has returned.

    Raises:
        StateError: What :func:`refuse_scaled` refuses; or gradients that it would add to. Nothing was run.
    """
    scale, foreign, losses = engine.next_scale(), list[Any](), list[Tensor]()
    if scale is not None:
        walk = walk_of(roots, inputs) if walk is None else walk
        foreign = engine.foreign_leaves(walk.leaves)
        refuse_scaled(roots, foreign if inputs else (), creates_graph=creates_graph)
    for root in roots:
        if isinstance(root, Tensor):
            losses += _judged(root)
    with SessionPass(engine, scale) as this:
        this.open(windows, losses, foreign)
        scaled_roots = list(roots)
        for number, root in enumerate(scaled_roots if scale is not None else ()):
            scaled_roots[number] = times(scale, root) if root.requires_grad else root
        return run(tuple(scaled_roots))


def _judged(loss: Tensor) -> list[Tensor]:
    """Return what a step asks of a loss, 0-d and detached, of a DTensor this rank's part; of many numbers nothing."""
    here = local(loss.detach())
    return [here.reshape(())] if here.numel() == 1 else []


class SessionPass:
    """A backward pass of a session, with all the passes that run inside of it: checkpoints', hooks', functions'.

    The gradients that inner passes begin with carry the scale already. Inner passes come through the door that this
    pass holds, open the windows that they reach, and end with this pass. It is a context manager around a call of
    torch's; of a pass that a framework runs, autograd calls its end: see :meth:`around_now`.

    Gradients of foreign leaves lose the scale when they are accumulated: after the hooks on the tensor, whose passes
    need the scale, and before those that run on ``.grad``. Gradients of an inner pass's own leaves, as a checkpoint's
    inputs, lose it when this pass ends: they are the gradients that the next node gets.

    Args:
        engine: The engine.
        scale: The loss scale that gradients carry; ``None`` for none.

    **Cost**: some 10 µs of host time; for leaves that are none of the session's 2 µs each and a product.
    """

    is_closed = True  # also of a pass whose __init__ a signal has interrupted

    def __init__(self, engine: Opens, scale: Tensor | None) -> None:
        self._engine, self._scale = engine, scale
        # In the five lines without a scale passes inside find all windows open.
        self._holds = scale is not None or engine.plan.is_driven
        self._back: Tensor | None = None  # 1/scale, computed at its first use
        self._outer_number: int | None = number_of_pass()  # the number of the pass in which this one begins, or -1
        self._number: int | None = None
        self._losses: dict[Window, list[Tensor]] = {}  # by window that the pass has opened
        self._said: list[Tensor] = []
        self._has_begun = self._is_last = self._has_door = False
        self._undo: list[Callable[[], object]] = []
        self._hooked: dict[ref[Tensor], Any] = {}  # by foreign leaf: its accumulating node, which has our hook
        self._waiting: dict[
            ref[Tensor], Tensor | None
        ] = {}  # the earlier gradients of tensors that lose the scale at the end

    def _open(self) -> None:
        self.is_closed = False
        self._has_door = self._holds and not (self._engine.has_door and self._outer_number is not None)
        if self._has_door:
            self._undo.append(Binding.join(*door(), ref(self), _inside))
        if _RETAINED and self._scale is not None:
            self._set_aside()

    def __enter__(self) -> Self:
        """Begin the pass: backward calls of this thread belong to it from here on."""
        try:
            self._open()
            if self._holds:
                self._undo.append(set_thread_owner(self))
        except BaseException:
            self._close(has_failed=True)
            raise
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """End, or put back."""
        self._close(has_failed=error_class is not None)

    @classmethod
    def around_now(cls, engine: Opens, scale: Tensor | None) -> Self:
        """Return the pass that runs now. Autograd alone holds it: ends it, or drops it if the pass fails."""
        session_pass = cls(engine, scale)
        session_pass._outer_number, session_pass._number = None, number_of_pass()
        if scale is not None:
            refuse_scaled((), (), creates_graph=is_grad_enabled())
        call_at_end(session_pass)
        engine.under_way.append(ref(session_pass))
        session_pass._open()
        return session_pass

    def runs_here(self) -> bool:
        """Whether this thread works for this pass, in a node of its graph or of a pass inside."""
        number = number_of_pass()
        return number == self._number or (number != self._outer_number and thread_owner() is self)

    def runs_in(self, engine: Opens) -> bool:
        """Whether this pass is the engine's, and this thread works for it."""
        return self._engine is engine and self.runs_here()

    def needs_door(self, engine: Opens) -> bool:
        """Whether the engine holds the door, where this pass sees the passes inside of it."""
        return self._engine is engine and not self._has_door

    # What it reaches ------------------------------------------------------------------------------------

    def join(self, losses: list[Tensor], walk: Walk, *, is_inside: bool = False) -> None:
        """Open the windows that some losses reach, in this pass or in a pass inside of it.

        Args:
            losses: What is differentiated, 0-d and detached.
            walk: What is reached from there.
            is_inside: Whether it is a pass inside.
        """
        windows = self._engine.reached(walk)
        foreign = [] if self._scale is None else self._engine.foreign_leaves(walk.leaves)
        self.open(windows, losses, foreign, is_inside=is_inside)

    def open(
        self, windows: list[Window], losses: list[Tensor], foreign: Iterable[Tensor], *, is_inside: bool = False
    ) -> None:
        """Open windows, and have other leaves lose the scale.

        Args:
            windows: Whose gradients are made.
            losses: What is differentiated.
            foreign: Leaves that are none of the session's.
            is_inside: Whether a pass inside of this one reaches them.
        """
        if foreign:
            foreign = [leaf for leaf in foreign if isinstance(leaf, Tensor) and leaf.is_leaf and not self._knows(leaf)]
        new = list[Window]()
        for window in windows:
            if window not in self._losses:
                self._losses[window] = list(self._said) if is_inside else []
                new.append(window)
        if new or foreign or not self._has_begun:
            is_first, self._has_begun = not self._has_begun, True
            foreign = [*foreign, *self._engine.begin(new, self._scale, foreign, is_first=is_first)]
        self._said += losses
        for window in windows:
            self._losses[window] += losses
        if foreign and self._back is None and self._scale is not None:
            self._back = inverse(self._scale)
        for leaf in foreign:
            if is_inside and not isinstance(leaf, nn.Parameter):
                self._waiting[ref(leaf)], leaf.grad = leaf.grad, None
            else:
                node = self._hooked[ref(leaf)] = get_gradient_edge(leaf).node
                self._undo.append(node.register_prehook(partial(_accumulated, self._back)).remove)

    def _knows(self, leaf: Tensor) -> bool:
        return ref(leaf) in self._hooked or ref(leaf) in self._waiting

    # Its end --------------------------------------------------------------------------------------------

    @never_compiled
    def __call__(self) -> None:
        """End a pass that autograd ends: at its very end, since wrappers finish their reductions in such calls too."""
        if not self._is_last:
            self._is_last = True
            call_at_end(self)
        else:
            self._close(has_failed=False)

    def __del__(self) -> None:
        """Restore gradients that were set aside, where the pass has not come to its end."""
        if not self.is_closed:
            self._close(has_failed=True)

    def _close(self, *, has_failed: bool) -> None:
        engine = self._engine
        with uninterrupted():  # no signal leaves a pass that is over half closed
            self.is_closed = True
            if engine.under_way:
                engine.under_way[:] = [running for running in engine.under_way if running() not in (None, self)]
            while self._undo:
                self._undo.pop()()
            if self._waiting:
                self._settle()
            if not self._has_begun:
                return
            try:
                engine.end(self._losses, has_failed=has_failed)
            except BaseException:
                engine.end(self._losses, has_failed=True)
                raise

    def _set_aside(self) -> None:
        """Set aside retained gradients of tensors inside of graphs until this pass ends."""
        assert self._scale is not None
        self._back = inverse(self._scale)
        with DisableTorchFunction():
            for tensor in list(_RETAINED):
                self._waiting[ref(tensor)], tensor.grad = tensor.grad, None

    @torch.no_grad()
    def _settle(self) -> None:
        """Unscale the gradients of tensors that were set aside, and add them to the earlier ones."""
        with DisableTorchFunction():
            for reference, before in self._waiting.items():
                if (tensor := reference()) is None:
                    continue
                new = None if tensor.grad is None else _unscaled(self._back, tensor.grad)
                if before is not None:
                    tensor.grad = before if new is None else before.add_(new)
                else:
                    tensor.grad = new


def times(scale: Tensor | None, tensor: Tensor) -> Tensor:
    """Multiply by a scale, at least in FP32, so that the product itself cannot overflow."""
    if scale is None:
        return tensor
    wide = tensor.float() if tensor.dtype in LOW else tensor
    return wide * moved(scale, tensor.device)


def _unscaled(back: Tensor | None, gradient: Tensor) -> Tensor:
    """Return a gradient times the inverse of a scale, rounded once."""
    if back is None:
        return gradient
    factor = moved(back, gradient.device)
    return (gradient.float() * factor).to(gradient.dtype) if gradient.dtype in LOW else gradient * factor


def _accumulated(back: Tensor | None, gradients: tuple[Tensor | None]) -> tuple[Tensor | None]:
    """Return the gradient that is about to be accumulated, without the scale."""
    (gradient,) = gradients
    return (None if gradient is None else _unscaled(back, gradient),)


def run_inside(
    outer: Any, engine: Opens, plain: Callable[..., Any], roots: Any, gradients: Any, *engine_arguments: Any
) -> Any:
    """Run a pass that begins inside of another: as a part of that one, if that is a pass of this engine.

    Args:
        outer: What this thread works for.
        engine: The engine, which has the door.
        plain: What runs it.
        roots: Where it begins.
        gradients: The gradients of these.
        *engine_arguments: What else torch's engine is given.
    """
    if isinstance(outer, SessionPass) and outer.needs_door(engine):
        return _inside(outer, plain, roots, gradients, *engine_arguments)
    return plain(roots, gradients, *engine_arguments)


def _inside(this: SessionPass, plain: Callable[..., Any], roots: Any, gradients: Any, *engine_arguments: Any) -> Any:
    """Run a pass; if this thread works for an outer one, as a part of it, whose gradients carry the scale already."""
    if not this.runs_here():
        return plain(roots, gradients, *engine_arguments)
    *_, inputs, _, accumulates = engine_arguments
    if accumulates:
        this.join([], walk_of(roots, inputs), is_inside=True)
    forget = set_thread_owner(this)
    try:
        return plain(roots, gradients, *engine_arguments)
    finally:
        forget()


@never_compiled  # it acts while autograd's engine runs
def entered(engine: Opens, loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return a loss of which every backward pass is the session's.

    The pass opens the windows that it reaches from here, and ends them when all else has ended: a framework calls
    ``scaler.scale(loss).backward()``, or its own ``backward``.

    Args:
        engine: The engine.
        loss: The loss.
        scale: What it is multiplied by; ``None`` for nothing.
    """
    if not loss.requires_grad:
        return loss
    entry: Tensor = _Entry.apply(loss, empty(0, requires_grad=True), engine, scale)  # type: ignore[no-untyped-call]
    return entry


class _Entry(Function):
    """The identity in a graph, whose backward knows the graph behind it, and which of its nodes the pass will run."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _: Tensor, engine: Opens, scale: Tensor | None) -> Tensor:
        """Return the loss. The empty leaf is reached by each pass without ``inputs=``."""
        ctx.engine, ctx.scale = engine, scale
        ctx.losses = _judged(loss)
        return loss.view_as(loss)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Begin the session's pass, or join the pass that is under way."""
        loss, leaf = ctx.next_functions[:2]
        walk = walked([GradientEdge(*loss)])
        if ctx.scale is not None and not will_run(leaf[0]):
            _refuse_stops(walk)
        passes = (thread_owner(), *(running() for running in ctx.engine.under_way))
        this = next(
            (candidate for candidate in passes if isinstance(candidate, SessionPass) and candidate.runs_in(ctx.engine)),
            None,
        )
        (this or SessionPass.around_now(ctx.engine, ctx.scale)).join(ctx.losses, walk)
        return gradient, None, None, None


def _refuse_stops(walk: Walk) -> None:
    """Refuse a pass whose ``inputs=`` are inside of the graph: gradients that it leaves there would carry the scale.

    A tensor that it is told of and goes on behind is as one that was told to retain its gradient.

    Raises:
        StateError: It does.
    """
    for node in filter(_runs, walk.nodes):
        behind = [following for following, _ in node.next_functions if following is not None]
        if behind and not any(map(_runs, behind)):
            refuse_scaled((), [GradientEdge(node, 0)], creates_graph=False)


def _runs(node: Any) -> bool:
    """Whether the pass under way runs a node of its graph."""
    try:
        return will_run(node)
    except UnsupportedError:  # a release of torch without the name
        raise
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True
