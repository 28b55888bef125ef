"""A placement carried out in its graph: each op in its precision, each cast once."""

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
    """Inserts casts, in the order in which the graph runs."""

    def __init__(self, graph: Graph, low: Sequence[bool]) -> None:
        self.graph, self.low = graph, low
        # By graph, too: a checkpoint's body, which runs again in the backward pass, must contain its own casts.
        self.casts: dict[tuple[fx.Graph, Node, torch.dtype], Node] = {}
        self.rounded: dict[Node, Node] = {}
        # For calls without gradients, as of a spectral norm's power iteration: the call that turned gradients off.
        self.without_grad: dict[Node, Node] = {}
        for module in dict.fromkeys(graph.parents.values()):
            off: Node | None = None
            for node in module.graph.nodes:
                if node.target is SET_GRAD_ENABLED:
                    off = None if node.args[0] else off or node
                elif off is not None:
                    self.without_grad[node] = off

    def call(self, op: GraphOp, node: Node) -> None:
        """Cast the operands of a call, and its result where the op computes wider than it returns."""
        is_first = node is op.nodes[0] and op.role != "source"
        if is_first and op.role == "inside":
            self._with_autocast(node)
        if is_first and op.role == "asked":
            self._as_asked(op, node)
        if is_first and op.role in ("inside", "asked"):
            return
        low_dtype = self.graph.policy.dtype
        dtype = self.graph.dtype_of(op, self.low)
        rounds = is_first and op.is_wide_inside and dtype == low_dtype and op.role != "own"
        for read in (*op.reads, *op.wide_reads):
            now = self.rounded.get(read, read)
            if now not in node.all_input_nodes:
                continue
            has = self.graph.dtype_of(self.graph.makers[read], self.low)
            wanted = value_of(read).dtype if op.role == "own" else dtype
            if read in op.wide_reads:
                cast = self._cast(read, has, torch.float32, node)
            else:
                cast = self._cast(read, has, wanted, node)
                cast = self._to(cast, torch.float32, node) if rounds else cast
            if cast is not now:
                node.replace_input_with(now, cast)
        for result in list(_results(node)) if rounds else ():
            self._round(result, low_dtype)
        if is_first and op.recipe is not None:
            recipe, is_turned = op.recipe
            node.op, node.target, node.args = "call_function", placed, (op.name, recipe.key, is_turned, *node.args)

    def _as_asked(self, op: GraphOp, node: Node) -> None:
        """Keep the dtype that a cast of the program's own returns without a policy, and share the cast."""
        models = [read for read in node.all_input_nodes[1:] if is_floating(read)]  # as y is in x.type_as(y)
        if any(self.graph.dtype_of(self.graph.makers[read], self.low) != value_of(read).dtype for read in models):
            # The cast names the dtype of a tensor, which the placement has changed.
            node.target, node.args, node.kwargs = "to", (node.args[0], value_of(node).device, op.dtype), {}
        for read in op.reads:
            has = self.graph.dtype_of(self.graph.makers[read], self.low)
            if (
                has == op.dtype
                or self.graph.is_written(read)
                or self.graph.is_written(node)
                or self.graph.cast_at(read) is not read
                or node in self.without_grad
            ):
                continue
            shared = self.casts.setdefault((node.graph, read, op.dtype), node)
            if shared is not node:
                node.replace_input_with(self.rounded.get(read, read), shared)

    def _cast(self, node: Node, has: torch.dtype, wanted: torch.dtype, before: Node) -> Node:
        """Return a tensor in another dtype; its cast is shared, unless the tensor is written to in between."""
        now = self.rounded.get(node, node)
        if has == wanted:
            return now
        if self.graph.is_written(node):
            return self._to(now, wanted, before)
        if value_of(node).requires_grad and node not in self.without_grad:
            before = self.without_grad.get(before, before)  # calls with gradients share the cast, and need its gradient
        key = (before.graph, node, wanted)
        if key not in self.casts:
            if self.graph.cast_at(node) is node:
                self.casts[key] = self._to(now, wanted, before)
            else:  # a view that repeats elements: the base is cast, and the view taken of that
                viewed = self.graph.views[node]
                behind = self._cast(viewed, has, wanted, before)
                replaced = {viewed: behind, self.rounded.get(viewed, viewed): behind}  # it may view what is rounded
                with before.graph.inserting_before(before):
                    self.casts[key] = before.graph.node_copy(node, lambda original: replaced.get(original, original))
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
        """Wrap a call in torch's own autocast, which casts the ops that the function is composed of."""
        with node.graph.inserting_before(node):
            entered = node.graph.call_function(
                ENTER_AUTOCAST, (self.graph.device_type, self.graph.policy.dtype, True, None)
            )
        with node.graph.inserting_after(node):
            node.graph.call_function(EXIT_AUTOCAST, (entered,))


def _results(node: Node) -> Iterator[Node]:
    """Yield the nodes of the floating tensors that a call returns: the call, or the items of its tuple."""
    if is_floating(node):
        yield node
    elif not isinstance(value_of(node), Tensor):
        for user in node.users:
            if user.target is operator.getitem:
                yield from _results(user)
