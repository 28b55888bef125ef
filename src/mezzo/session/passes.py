"""Backward passes that carry a scale: which parameters they reach, where they begin, and where they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from torch import _C, Tensor, empty, is_grad_enabled, nn, ones
from torch._compile import _disable_dynamo
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from mezzo.errors import StateError
from mezzo.scale.state import inverse
from mezzo.tensors import LOW, moved

if TYPE_CHECKING:
    from mezzo.session.window import Window

__all__ = ["ScaledPass", "Walk", "entered", "hooked", "unscaled", "walked"]

#: What in a graph accumulates the gradient of a leaf.
_ACCUMULATES: Final = type(get_gradient_edge(ones(1, requires_grad=True)).node)
#: What in a graph runs a pass of its own, over parameters of which the graph says nothing.
_RUNS_ANOTHER: Final = CheckpointFunction._backward_cls
_EDGES: Final = attrgetter("next_functions")


class Walk:
    """What a backward pass reaches.

    Attributes:
        leaves: The leaves of its graph.
        nodes: What is between its roots and them.
        runs_others: Whether reentrant checkpoints run passes inside of it, whose leaves nothing shows.
    """

    __slots__ = ("leaves", "nodes", "runs_others")

    def __init__(self, leaves: list[Tensor], nodes: list[Any]) -> None:
        self.leaves, self.nodes = leaves, nodes
        self.runs_others = any(issubclass(kind, _RUNS_ANOTHER) for kind in set(map(type, nodes)))


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
    nodes, ends, seen = list[Any](), list[Any](), {None}
    for edges in chain([first], map(_EDGES, nodes)):  # of those that are found meanwhile, too
        for node, _ in edges:
            if node not in seen:
                seen.add(node)
                (ends if type(node) is _ACCUMULATES else nodes).append(node)
    return Walk([*leaves, *(end.variable for end in ends)], nodes)


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
    ends = any(isinstance(each, GradientEdge) or each.grad_fn is not None for each in inner)
    if ends or any(isinstance(root, GradientEdge) for root in roots):
        raise StateError(
            "a backward pass under a loss scale begins, or stops, inside of its graph",
            why="the loss scale is multiplied into a loss, and taken out at the leaves",
            write=f"amp.grad(loss, inputs), which returns unscaled gradients; or {bfloat16}",
        )


@contextmanager
def unscaled(leaves: list[Tensor], scale: Tensor | None) -> Iterator[None]:
    """Let leaves that are none of the session's have gradients without the scale, meanwhile.

    Args:
        leaves: Inputs, other models' parameters, and those that no optimizer of the session has.
        scale: 0-d float32; ``None`` for none.
    """
    if not leaves or scale is None:
        yield
        return
    back = inverse(scale)

    def unscale(gradient: Tensor) -> Tensor:
        factor = moved(back, gradient.device)
        return (gradient.float() * factor).to(gradient.dtype) if gradient.dtype in LOW else gradient * factor

    with ExitStack() as handles:
        for leaf in leaves:
            handle = leaf.register_hook(unscale)  # type: ignore[no-untyped-call]
            handles.callback(handle.remove)
            # Before hooks of the user's: C runs them in the order in which they lie in memory.
            hooks: Any = leaf._backward_hooks
            keys = [key for key in hooks if key != handle.id]
            deque(map(hooks.__setitem__, keys, map(hooks.pop, keys)), maxlen=0)
        yield


class Opens(Protocol):
    """What a backward pass begins and ends: an engine.

    Attributes:
        under_way: The pass that runs now, or who runs it; ``None`` between passes.
    """

    under_way: object

    def reached(self, walk: Walk) -> list[Window]:
        """Return the windows whose gradients a pass makes."""

    def others(self, leaves: Iterable[Any]) -> list[Any]:
        """Return the leaves of a graph that are none of the session's."""

    def begin(self, windows: list[Window], scale: Tensor | None, by: object) -> None:
        """Make ready for a pass whose gradients will carry a scale."""

    def end(self, losses: Mapping[Window, list[Tensor]]) -> None:
        """Take note of what a pass has made, and of what it has differentiated."""

    def fail(self, windows: Iterable[Window]) -> None:
        """Put back what made way for a pass that has raised."""


@_disable_dynamo  # what it does, it does while autograd's own engine runs
def entered(engine: Opens, loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return a loss through which a backward pass is the session's, whoever runs it.

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
    """The identity, in a graph: a pass that comes through knows what lies behind, and what of that it will run."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _: Tensor, engine: Opens, scale: Tensor | None) -> Tensor:
        """Return the loss; the empty leaf beside it is reached by each pass that is not told where to end."""
        ctx.engine, ctx.scale = engine, scale
        ctx.loss = loss.detach().reshape(()) if loss.numel() == 1 else None
        return loss.view_as(loss)

    @staticmethod
    @_disable_dynamo
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Begin the pass, or join the one that is under way."""
        loss, leaf = ctx.next_functions[:2]
        walk, under_way = walked([GradientEdge(*loss)]), ctx.engine.under_way
        if ctx.scale is not None and not _C._will_engine_execute_node(leaf[0]):
            _refuse_stops(walk)
        if under_way is None:
            begun = ScaledPass(ctx.engine, ctx.scale)
            Variable._execution_engine.queue_callback(begun)
            begun.join(ctx.loss, walk)
        elif isinstance(under_way, ref) and isinstance(joined := under_way(), ScaledPass):
            joined.join(ctx.loss, walk)
        return gradient, None, None, None


def _refuse_stops(walk: Walk) -> None:
    """Refuse a pass that is told to end inside of a graph: what it leaves there would carry the scale.

    A tensor that it is told of and goes on behind is as one that was told to retain its gradient.

    Raises:
        StateError: It does.
    """
    for node in filter(_runs, walk.nodes):
        behind = [each for each, _ in node.next_functions if each is not None]
        if behind and not any(map(_runs, behind)):
            refuse_scaled((), [GradientEdge(node, 0)], creates_graph=False)


def _runs(node: Any) -> bool:
    """Whether the pass under way runs a node of its graph."""
    try:
        return _C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


class ScaledPass:
    """A backward pass that goes through scaled losses: autograd calls it at the end, or drops it if the pass fails.

    Autograd alone holds it: the engine knows it by a weak reference, so that a pass that fails is dropped at once.

    Args:
        engine: The engine.
        scale: What the gradients carry.
    """

    def __init__(self, engine: Opens, scale: Tensor | None) -> None:
        self._engine, self._scale = engine, scale
        self._losses: dict[Window, list[Tensor]] = {}  # by the windows that they reach, which are open from then on
        self._hooks = ExitStack()
        self._hooked = set[int]()
        self._is_last, self._is_open = False, False
        if scale is not None:
            refuse_scaled((), (), creates_graph=is_grad_enabled())

    def join(self, loss: Tensor | None, walk: Walk) -> None:
        """Go through a loss.

        Args:
            loss: 0-d, detached; ``None`` for many numbers, which are no loss that could be judged.
            walk: What the pass reaches from there.
        """
        windows = self._engine.reached(walk)
        new = [window for window in windows if window not in self._losses]
        self._losses |= {window: [] for window in new}
        if new or not self._is_open:
            self._is_open = True
            self._engine.begin(new, self._scale, ref(self))
        if loss is not None:
            for window in windows:
                self._losses[window].append(loss)
        others = [] if self._scale is None else self._engine.others(walk.leaves)
        others = [leaf for leaf in others if id(leaf) not in self._hooked]
        self._hooked.update(map(id, others))
        self._hooks.enter_context(unscaled(others, self._scale))

    @_disable_dynamo
    def __call__(self) -> None:
        """End the pass: at its very end, since wrappers finish their reductions in such calls too."""
        if not self._is_last:
            self._is_last = True
            Variable._execution_engine.queue_callback(self)
            return
        self._is_open = False
        self._hooks.close()
        self._engine.end(self._losses)

    def __del__(self) -> None:
        """Put back what made way for a pass that has not come to its end."""
        if self._is_open:
            self._hooks.close()
            self._engine.fail(self._losses)


def hooked(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have hooks of the user's, which run inside the pass."""
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, nn.Parameter) and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
    ]
