"""Backward passes of the user's own: which of them are the session's, and how these carry its scale."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from mezzo.cast.model.boundary import runs_backward
from mezzo.errors import StateError, some_of
from mezzo.session.attached.attached import Attached
from mezzo.session.window.group import GradientGroup
from mezzo.tensors import LOW

__all__ = ["Passes"]

#: What in a graph accumulates the gradient of a leaf.
_ACCUMULATES: Final = type(get_gradient_edge(torch.ones(1, requires_grad=True)).node)
#: What in a graph runs a pass of its own, over parameters of which the graph says nothing.
_RUNS_ANOTHER: Final = CheckpointFunction._backward_cls


class Passes:
    """Run backward passes that reach parameters of a session as the session's, and all others as they are.

    Such a pass is found by walking through its graph. Leaves that are reached besides, an input or a parameter that no
    optimizer of the session has, get their gradients without the scale.

    Args:
        attached: The session.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached, self._core = attached, attached.core
        self._groups: list[GradientGroup] | None = None
        self._group_of: dict[int, GradientGroup] = {}

    def run(self, plain: Callable[..., Any], roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a pass, scaled if it is the user's own and reaches parameters of the session.

        Args:
            plain: torch's function, which runs it.
            roots: What is differentiated.
            gradients: Their gradients, or ``None``.
            *args: What the engine takes besides: whether to keep the graph, to make one, and the inputs.
            **kwargs: As it takes them.

        Raises:
            StateError: It begins at an edge of a graph, or ends inside of it; or its gradients, which carry the scale,
                are to be differentiated.
        """
        core = self._core
        are_others = core.is_closed or core.runs_backward or runs_backward()  # or part of one that runs
        if are_others or not kwargs.get("accumulate_grad"):
            return plain(roots, gradients, *args, **kwargs)
        inputs = args[2] if len(args) > 2 else ()
        leaves, runs_others = (_given(inputs), False) if inputs else _walked(roots)
        groups, others = self._split(leaves)
        if not groups and not runs_others:
            return plain(roots, gradients, *args, **kwargs)
        _refuse_edges(roots, inputs, others)
        if len(args) > 1 and args[1] and core.scalers[0].changes_gradients:
            raise StateError(
                "gradients that carry the loss scale would be differentiated again",
                where="loss.backward(create_graph=True)",
                why="what is computed of .grad would have the scale in it, and its own gradients a power of it",
                write="torch.autograd.grad(loss, params, create_graph=True), which returns them without the scale;\n"
                "or a policy of dtype=bfloat16, which has none",
            )
        wanted: list[Optimizer] | None = None
        if not runs_others and len(groups) < len(core.groups):
            wanted = [optimizer for group in groups for optimizer in group.optimizers]
        for group in groups:
            self._begin_anew(group)
        scaled = tuple([self._attached.scaled(root, 0, wanted) if root.requires_grad else root for root in roots])
        naming = contextlib.nullcontext() if core.consensus is None else core.consensus.naming("a backward pass")
        with self._unscaled(others), naming:
            return plain(scaled, gradients, *args, **kwargs)

    def _split(self, leaves: list[Tensor]) -> tuple[list[GradientGroup], list[Tensor]]:
        """Return the groups whose parameters are reached, and the other leaves."""
        core = self._core
        core.group_optimizers()
        if core.weights.shards:  # the leaves of a graph are whole parameters, which are none of ours
            return core.groups, []
        if self._groups is not core.groups:
            self._groups = core.groups
            self._group_of = {id(leaf): group for group in core.groups for _, leaf in group.with_leaves()}
        found, others = dict[GradientGroup, None](), list[Tensor]()
        for leaf in leaves:
            if (group := self._group_of.get(id(leaf))) is None:
                others.append(leaf)
            else:
                found[group] = None
        return list(found), others

    @staticmethod
    def _begin_anew(group: GradientGroup) -> None:
        """Forget a window whose gradients were all cleared: another optimizer's loss may have left them."""
        if group.window is not None and not group.has_gradients():
            group.take_clearing()
            if not group.window.unscaled_sums:
                group.forget()

    @contextlib.contextmanager
    def _unscaled(self, others: list[Tensor]) -> Iterator[None]:
        """Let leaves that are none of the session's have gradients without the scale."""
        scaler = self._core.scalers[0]
        if not others or not scaler.changes_gradients:
            yield
            return
        inverse = scaler.state.inverse()

        def unscale(gradient: Tensor) -> Tensor:
            factor = inverse.to(gradient.device)
            return (gradient.float() * factor).to(gradient.dtype) if gradient.dtype in LOW else gradient * factor

        with contextlib.ExitStack() as handles:
            for leaf in others:
                handle = leaf.register_hook(unscale)  # type: ignore[no-untyped-call]
                handles.callback(handle.remove)
                # Before hooks of the user's, and in one piece: C runs them in the order in which they lie in memory.
                hooks: Any = leaf._backward_hooks
                keys = [key for key in hooks if key != handle.id]
                deque(map(hooks.__setitem__, keys, map(hooks.pop, keys)), maxlen=0)
            yield


def _walked(roots: Iterable[Any]) -> tuple[list[Tensor], bool]:
    """Walk through a graph, from the roots to its leaves.

    Returns:
        The leaves, and whether passes of its own are run inside, as reentrant checkpoints do.
    """
    nodes: list[Any] = []
    leaves = [root for root in roots if isinstance(root, Tensor) and root.grad_fn is None and root.requires_grad]
    for root in roots:
        node = root.node if isinstance(root, GradientEdge) else root.grad_fn
        if node is not None:
            nodes.append(node)
    seen = set(nodes)
    for node in nodes:
        for near, _ in node.next_functions:
            if near is not None and near not in seen:
                seen.add(near)
                nodes.append(near)
    kinds = list(map(type, nodes))
    leaves += [node.variable for node, kind in zip(nodes, kinds, strict=True) if kind is _ACCUMULATES]
    return leaves, any(issubclass(kind, _RUNS_ANOTHER) for kind in set(kinds))


def _given(inputs: Iterable[Any]) -> list[Any]:
    """Return the leaves that a call names."""
    return [getattr(each.node, "variable", each) if isinstance(each, GradientEdge) else each for each in inputs]


def _refuse_edges(roots: Iterable[Any], inputs: Iterable[Any], others: list[Any]) -> None:
    edges = [root for root in roots if not isinstance(root, Tensor)]
    inner = [each for each in others if inputs and (isinstance(each, GradientEdge) or each.grad_fn is not None)]
    if not edges and not inner:
        return
    raise StateError(
        "a backward pass through an attached model begins at an edge of its graph"
        if edges
        else "a backward pass through an attached model stops inside of it",
        where=some_of([f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else "a GradientEdge"
                       for each in edges or inner]),
        why="the loss scale is multiplied into tensors, at a loss"
        if edges
        else "what stops there would carry the loss scale, and the parameters' gradients with it would not",
        write="loss.backward()" if edges else "amp.grad(loss, inputs), which returns unscaled gradients",
    )  # fmt: skip
