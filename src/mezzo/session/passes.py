"""Backward passes that carry a scale: which parameters they reach, where they begin, and where they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from torch import Tensor, is_grad_enabled, nn, ones
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from mezzo.errors import StateError
from mezzo.scale.state import inverse
from mezzo.tensors import LOW, moved

if TYPE_CHECKING:
    from mezzo.session.window import Window

__all__ = ["ScaledLoss", "ScaledPass", "Walk", "hooked", "unscaled", "walked"]

#: What in a graph accumulates the gradient of a leaf.
_ACCUMULATES: Final = type(get_gradient_edge(ones(1, requires_grad=True)).node)
#: What in a graph runs a pass of its own, over parameters of which the graph says nothing.
_RUNS_ANOTHER: Final = CheckpointFunction._backward_cls


class Walk:
    """What a backward pass reaches.

    Attributes:
        leaves: The leaves of its graph.
        runs_others: Whether reentrant checkpoints run passes inside of it, whose leaves nothing shows.
    """

    __slots__ = ("leaves", "runs_others")

    def __init__(self, leaves: list[Tensor], *, runs_others: bool = False) -> None:
        self.leaves, self.runs_others = leaves, runs_others


def walked(roots: Iterable[Any]) -> Walk:
    """Walk through a graph, from its roots to its leaves.

    Args:
        roots: Tensors, or ``GradientEdge`` of the graph.

    **Cost**: Python for each node, less than 0.5 µs.
    """
    leaves, nodes = list[Tensor](), list[Any]()
    for root in roots:
        node = root.node if isinstance(root, GradientEdge) else root.grad_fn
        if node is not None:
            nodes.append(node)
        elif root.requires_grad:
            leaves.append(root)
    seen, near = {None, *nodes}, set(nodes)
    while near:
        near = {edge[0] for node in near for edge in node.next_functions} - seen
        seen |= near
    seen.discard(None)
    leaves += [node.variable for node in seen if type(node) is _ACCUMULATES]  # type: ignore[attr-defined]
    return Walk(leaves, runs_others=any(issubclass(kind, _RUNS_ANOTHER) for kind in set(map(type, seen))))


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
        windows: Those of its gradients.
        under_way: The pass that runs now, or who runs it; ``None`` between passes.
    """

    windows: list[Window]
    under_way: object

    def begin(self, windows: list[Window], scale: Tensor | None, by: object) -> None:
        """Make ready for a pass whose gradients will carry a scale."""

    def end(self, windows: list[Window], losses: list[Tensor]) -> None:
        """Take note of what a pass has made."""

    def fail(self, windows: list[Window]) -> None:
        """Put back what made way for a pass that has raised."""

    def others(self, leaves: Iterable[Any]) -> list[Any]:
        """Return the leaves of a graph that are none of the session's."""


class ScaledLoss:
    """A loss times the scale, in a loop of which the session does not run the backward pass.

    The pass that goes through it opens the session's windows, and ends them when all else has ended: a framework calls
    ``scaler.scale(loss).backward()``, or its own ``backward``.

    Args:
        engine: The engine.
        loss: The loss, as it was given.
        scaled: The loss times the scale; what is differentiated.
        scale: The scale; ``None`` for none.
    """

    def __init__(self, engine: Opens, loss: Tensor, scaled: Tensor, scale: Tensor | None) -> None:
        self._engine, self._loss, self._scale = engine, loss.detach().sum().reshape(()), scale
        self._others: list[Tensor] = []
        if scale is not None:
            self._others = engine.others(walked([scaled]).leaves)
        scaled.register_hook(self._enter)  # type: ignore[no-untyped-call]

    def _enter(self, _: Tensor) -> None:
        under_way = self._engine.under_way
        if under_way is None:
            begun = ScaledPass(self._engine, self._scale)
            Variable._execution_engine.queue_callback(begun)
            begun.join(self._loss, self._others)
        elif isinstance(under_way, ref) and isinstance(joined := under_way(), ScaledPass):
            joined.join(self._loss, self._others)


class ScaledPass:
    """A backward pass that goes through scaled losses: autograd calls it at the end, or drops it if the pass fails.

    Autograd alone holds it: the engine knows it by a weak reference, so that a pass that fails is dropped at once.

    Args:
        engine: The engine, whose windows are open from now on.
        scale: What the gradients carry.
    """

    def __init__(self, engine: Opens, scale: Tensor | None) -> None:
        self._engine, self._scale = engine, scale
        self._losses: list[Tensor] = []
        self._hooks = ExitStack()
        self._hooked = set[int]()
        self._is_last, self._is_open = False, False
        if scale is not None:
            refuse_scaled((), (), creates_graph=is_grad_enabled())
        self._is_open = True
        engine.begin(engine.windows, scale, ref(self))

    def join(self, loss: Tensor, others: list[Tensor]) -> None:
        """Go through a loss.

        Args:
            loss: 0-d, detached.
            others: Leaves of its graph that are none of the session's.
        """
        self._losses.append(loss)
        new = [leaf for leaf in others if id(leaf) not in self._hooked]
        self._hooked.update(map(id, new))
        self._hooks.enter_context(unscaled(new, self._scale))

    def __call__(self) -> None:
        """End the pass: at its very end, since wrappers finish their reductions in such calls too."""
        if not self._is_last:
            self._is_last = True
            Variable._execution_engine.queue_callback(self)
            return
        self._is_open = False
        self._hooks.close()
        self._engine.end(self._engine.windows, self._losses)

    def __del__(self) -> None:
        """Put back what made way for a pass that has not come to its end."""
        if self._is_open:
            self._hooks.close()
            self._engine.fail(self._engine.windows)


def hooked(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have hooks of the user's, which run inside the pass."""
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, nn.Parameter) and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
    ]
