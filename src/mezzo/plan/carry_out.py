"""Carry a placement out in its graph: each op in its precision, each cast once."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.fx import Node

from mezzo.cast.products import placed
from mezzo.compiling import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from mezzo.plan.graph import Graph, GraphOp, is_floating, value_of


def carry_out(graph: Graph, low: Sequence[bool]) -> fx.GraphModule:
    """Insert casts into a graph, in place, so that each op runs in its precision where autocast is off.

    Args:
        graph: The graph.
        low: Whether each op is low.

    Returns:
        Its module.
    """
    writer = _Writer(graph, low)
    for op in graph.ops:
        for node in op.nodes:
            writer.call(op, node)
    for node in reversed(graph.dropped):  # what leaves refers to what enters
        node.graph.erase_node(node)
    for module in dict.fromkeys(graph.parents.values()):
        module.graph.lint()
        module.recompile()
    return graph.whole


class _Writer:
    """Write casts, in the order in which the graph runs."""

    def __init__(self, graph: Graph, low: Sequence[bool]) -> None:
        self.graph, self.low = graph, low
        # Of each graph its own: what a checkpoint's body casts, it casts again when it is run again.
        self.casts: dict[tuple[fx.Graph, Node, torch.dtype], Node] = {}
        self.rounded: dict[Node, Node] = {}
        # Of what runs without gradients, as the power iteration of a spectral norm: the call that turned them off.
        self.without_grad: dict[Node, Node] = {}
        for module in dict.fromkeys(graph.parents.values()):
            off: Node | None = None
            for node in module.graph.nodes:
                if node.target is SET_GRAD_ENABLED:
                    off = None if node.args[0] else off or node
                elif off is not None:
                    self.without_grad[node] = off

    def call(self, op: GraphOp, node: Node) -> None:
        """Have a call take what it reads in its dtype, and give what its op gives."""
        is_first = node is op.nodes[0] and op.kind != "source"
        if is_first and op.kind == "inside":
            self._with_autocast(node)
        if is_first and op.kind == "asked":
            self._as_asked(op, node)
        if is_first and op.kind in ("inside", "asked"):
            return
        low = self.graph.policy.dtype
        given = self.graph.dtype_of(op, self.low)
        rounds = is_first and op.is_wide_inside and given == low and op.kind != "own"
        for each in (*op.reads, *op.wide_reads):
            now = self.rounded.get(each, each)
            if now not in node.all_input_nodes:
                continue
            has = self.graph.dtype_of(self.graph.makers[each], self.low)
            wanted = value_of(each).dtype if op.kind == "own" else given
            if each in op.wide_reads:
                taken = self._cast(each, has, torch.float32, node)
            else:
                taken = self._cast(each, has, wanted, node)
                taken = self._to(taken, torch.float32, node) if rounds else taken
            if taken is not now:
                node.replace_input_with(now, taken)
        for result in list(_results(node)) if rounds else ():
            self._round(result, low)
        if is_first and op.recipe is not None:
            recipe, is_turned = op.recipe
            node.op, node.target, node.args = "call_function", placed, (op.name, recipe.key, is_turned, *node.args)

    def _as_asked(self, op: GraphOp, node: Node) -> None:
        """Have a cast of the program's own give what it gives without a policy, and share it."""
        others = [each for each in node.all_input_nodes[1:] if is_floating(each)]
        if any(self.graph.dtype_of(self.graph.makers[each], self.low) != value_of(each).dtype for each in others):
            # It asks for the dtype of a tensor that has another one now.
            node.target, node.args, node.kwargs = "to", (node.args[0], value_of(node).device, op.dtype), {}
        for each in op.reads:
            has = self.graph.dtype_of(self.graph.makers[each], self.low)
            if (
                has == op.dtype
                or self.graph.is_written(each)
                or self.graph.is_written(node)
                or self.graph.cast_at(each) is not each
                or node in self.without_grad
            ):
                continue
            shared = self.casts.setdefault((node.graph, each, op.dtype), node)
            if shared is not node:
                node.replace_input_with(self.rounded.get(each, each), shared)

    def _cast(self, node: Node, has: torch.dtype, wanted: torch.dtype, before: Node) -> Node:
        """Return a tensor in another dtype; its cast is shared, unless the tensor is written to in between."""
        now = self.rounded.get(node, node)
        if has == wanted:
            return now
        if self.graph.is_written(node):
            return self._to(now, wanted, before)
        if value_of(node).requires_grad and node not in self.without_grad:
            before = self.without_grad.get(before, before)  # others share the cast, and its gradient
        key = (before.graph, node, wanted)
        if key not in self.casts:
            if self.graph.cast_at(node) is node:
                self.casts[key] = self._to(now, wanted, before)
            else:  # a view that repeats elements: of the cast of what it looks at
                viewed = self.graph.views[node]
                behind = self._cast(viewed, has, wanted, before)
                instead = {viewed: behind, self.rounded.get(viewed, viewed): behind}  # it may view what is rounded
                with before.graph.inserting_before(before):
                    self.casts[key] = before.graph.node_copy(node, lambda each: instead.get(each, each))
        return self.casts[key]

    def _to(self, node: Node, dtype: torch.dtype, before: Node) -> Node:
        with before.graph.inserting_before(before):
            return before.graph.call_method("to", (node, dtype))

    def _round(self, result: Node, dtype: torch.dtype) -> None:
        users = list(result.users)
        with result.graph.inserting_after(result):
            rounded = result.graph.call_method("to", (result, dtype))
        for user in users:
            user.replace_input_with(result, rounded)
        self.rounded[result] = rounded

    def _with_autocast(self, node: Node) -> None:
        """Let torch's own autocast cast what a function is made of."""
        with node.graph.inserting_before(node):
            entered = node.graph.call_function(
                ENTER_AUTOCAST, (self.graph.device_type, self.graph.policy.dtype, True, None)
            )
        with node.graph.inserting_after(node):
            node.graph.call_function(EXIT_AUTOCAST, (entered,))


def _results(node: Node) -> Iterator[Node]:
    """Yield the floating tensors that a call gives: itself, or what is taken out of its tuple."""
    if is_floating(node):
        yield node
    elif not isinstance(value_of(node), Tensor):
        for user in node.users:
            if user.target is operator.getitem:
                yield from _results(user)
