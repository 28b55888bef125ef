"""The ops of a graph of torch's functions, as Dynamo captures it: the policy's decision on each, and what each reads.

An *op* is a call that makes a tensor's memory, with all calls that write to it afterwards: views of a tensor, and the
results of in-place functions, belong to the op that made the tensor, and so have its precision.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from mezzo.cast.device import Family, emulated_families
from mezzo.cast.differences import find_differences
from mezzo.cast.emulate import COMPOSED, EMULATED, REACHED, RECURRENT, family_of
from mezzo.cast.model.checks import wanted_storage
from mezzo.cast.model.prepare import as_named, with_low_ends
from mezzo.cast.products import Operands, Recipe, operands_or_reason, recipe_on
from mezzo.compiling import ENTER_AUTOCAST, EXIT_AUTOCAST, as_given, capture_errors, require_switches
from mezzo.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket
from mezzo.errors import MezzoError, PolicyError, UnsupportedError
from mezzo.policy import Decision, Policy
from mezzo.policy.ops import OPS, QUANTISABLE, QUANTISED
from mezzo.policy.rules import both
from mezzo.tensors import dtype_name, tensors, values_of
from mezzo.trace.function_calls import op_name

#: The choice that an op leaves. ``source``: a parameter, a buffer, an input, a constant; ``low``, ``fp32``: in this
#: precision, by a rule or a list; ``free``: in either; ``follow``: in either, but low only if all its operands are;
#: ``asked``: a cast in the program itself; ``inside``: composed of ops that torch's own autocast casts one by one;
#: ``own``: left alone, in the dtypes that it has without a policy.
Role = Literal["source", "low", "fp32", "free", "follow", "asked", "inside", "own"]

#: Functions whose other arguments are FP32 statistics, updated in place, and weights, which kernels take in FP32 too.
_READS_FIRST: Final = frozenset({"batch_norm", "instance_norm"})
#: Ops that take mixed dtypes, and add nothing up.
_JOINS: Final = frozenset({"cat", "stack"})
_CONVERTS: Final = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
#: Functions that draw random numbers of a tensor's shape.
_DRAWS: Final = frozenset({"bernoulli", "normal", "multinomial", "poisson", "rand_like", "randn_like", "randint_like"})
#: Products, and ops that are composed of products.
_EMULATED: Final = frozenset({*EMULATED, *COMPOSED, *REACHED, *RECURRENT})
#: Functions that make a new tensor in the dtype of a given one, without reading its numbers.
_LIKE: Final = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
#: The folders of code that is not the program's.
_INSTALLED: Final = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(slots=True, eq=False)
class GraphOp:
    """One op of a graph.

    Attributes:
        index: Its index among the graph's ops.
        name: Its base name, as the op table has it; for a source its name in the program.
        role: The choice that it leaves.
        module: Path of the module in which it runs; of a parameter its own path.
        line: ``file:line`` of the program, or ``""``.
        dtype: The dtype of its result without a policy.
        nodes: Its calls: the node that makes the tensor, then those that write to it.
        reads: The tensors that it reads in its own precision; each is cast where it has another one.
        wide_reads: The tensors that it reads in FP32 in either precision: weights of a norm, which is FP32 inside.
        decision: The policy's decision; None for sources and for ops that are left alone.
        reason: Why it has its role, in words.
        is_wide_inside: Whether its arithmetic is FP32 even if it is low: it rounds its operands and its result.
        recipe: For a product below sixteen bits: how it is computed, and whether its result is transposed.
    """

    index: int
    name: str
    role: Role
    module: str
    line: str
    dtype: torch.dtype
    nodes: list[Node] = field(default_factory=list)
    reads: list[Node] = field(default_factory=list)
    wide_reads: list[Node] = field(default_factory=list)
    decision: Decision | None = None
    reason: str = ""
    is_wide_inside: bool = False
    recipe: tuple[Recipe, bool] | None = None

    @property
    def fixed(self) -> bool | None:
        """Whether it is low; None if that is for the cut to choose."""
        match self.role:
            case "low":
                return True
            case "fp32":
                return False
            case "free" | "follow":
                return None
            case _:
                return self.dtype != torch.float32


@dataclass(slots=True, eq=False)
class Graph:
    """The ops of a captured graph, and of the bodies of its activation checkpoints.

    Attributes:
        whole: The graph module.
        policy: The policy that decided about the ops.
        device_type: The device that its tensors are on.
        emulated: The families of products that compute in FP32 from rounded operands there.
        ops: The ops, in the order in which they run.
        makers: The op that each floating tensor belongs to.
        views: The base of each view.
        parents: The graph module of each node.
        written: Memories that in-place functions write to.
        dropped: Nodes that enter or leave an autocast of the policy's dtype, which the casts replace.
        checkpoints: Calls whose bodies run again in the backward pass.
    """

    whole: fx.GraphModule
    policy: Policy
    device_type: str
    emulated: frozenset[Family]
    ops: list[GraphOp] = field(default_factory=list)
    makers: dict[Node, GraphOp] = field(default_factory=dict)
    views: dict[Node, Node] = field(default_factory=dict)
    parents: dict[Node, fx.GraphModule] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    dropped: list[Node] = field(default_factory=list)
    checkpoints: list[Node] = field(default_factory=list)

    def emulates(self, op: str) -> bool:
        """Whether an op is a product, or composed of products, of a family that is emulated."""
        return op in _EMULATED and family_of(op) in self.emulated

    def is_written(self, node: Node) -> bool:
        """Whether a tensor is written to after it was made, so that a cast of it is right for one reader alone."""
        value = value_of(node)
        return memory_of(value) in self.written or (not value.is_inference() and value._version > 0)

    def is_run_again(self, node: Node) -> bool:
        """Whether a call is in the body of an activation checkpoint."""
        return self.parents.get(node, self.whole) is not self.whole

    def dtype_of(self, op: GraphOp, low: Sequence[bool]) -> torch.dtype:
        """Return the dtype of an op's result in a placement."""
        if op.role in ("low", "fp32", "free", "follow"):
            return self.policy.dtype if low[op.index] else torch.float32
        return op.dtype

    def promoting(self, op: GraphOp) -> list[Node]:
        """Return the operands that decide the dtype of an op without casts, by torch's type promotion.

        A 0-d tensor beside others is none of them, nor is a tensor that is later written to the op's result.
        """
        first = op.nodes[0].all_input_nodes if op.nodes else []
        made_of = [node for node in op.reads if node in first]
        return [node for node in made_of if value_of(node).dim()] or made_of

    def cast_at(self, node: Node) -> Node:
        """Return the tensor to cast for a view in another precision: the smallest base, whose cast all views share."""
        smallest = node
        while node in self.views and not self.is_written(node):
            node = self.views[node]
            if num_elements(node) <= num_elements(smallest):
                smallest = node
        return smallest


def value_of(node: Any) -> Any:
    """Return Dynamo's fake value of a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def memory_of(tensor: Tensor) -> int:
    """Return an id of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def hint(number: Any) -> int:
    """Return a size as it is in the captured call; 1 for a size that depends on values of tensors."""
    if isinstance(number, torch.SymInt):
        return int(number.node.hint) if number.node.has_hint() else 1
    return int(number)


def num_elements(node: Node) -> int:
    """Return how many elements a tensor has."""
    count = 1
    for size in values_of(value_of(node)).shape:
        count *= hint(size)
    return count


def trains(node: Node) -> bool:
    """Whether a call is differentiated. Its weights say nothing: they need gradients under ``no_grad`` too."""
    return any(tensor.requires_grad for tensor in tensors(value_of(node)))


def is_floating(node: Any) -> bool:
    """Whether a node is one floating tensor."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


# Capturing a model -----------------------------------------------------------------------------------------------


class _Stop(Exception):  # noqa: N818 - it is no error
    """Ends a call once its graph is captured: nothing is compiled, and nothing runs."""


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Graph:
    """Return a model's forward pass as one graph of torch's functions, captured by Dynamo; nothing of it runs.

    Args:
        model: The model, in the state in which it is to run: ``train()`` or ``eval()``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        policy: The policy, as for :func:`read`.

    Raises:
        PolicyError: As :func:`read`, or the model takes no such arguments.
        StateError: The model is prepared.
        UnsupportedError: Dynamo cannot capture it as one graph.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        name = type(model).__name__
        raise PolicyError(
            f"{name} does not take these inputs", why=str(error), write="plan(model, *inputs, policy=…)"
        ) from error
    names = list(inspect.signature(model.forward).parameters)
    policy = with_low_ends(model, as_named(model, policy))
    storage = wanted_storage(model, policy, expects_session=True)
    # Ops read the high half of a weight in halves, which costs no cast.
    dtypes: dict[Tensor, torch.dtype] = dict((*storage.plain.items(), *storage.halves.items()))
    stored = {path: dtypes[param] for path, param in model.named_parameters() if param in dtypes}
    outcomes: list[Graph | MezzoError] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        try:
            outcomes.append(read(graph, policy, names=names, stored=stored))
        except MezzoError as error:
            outcomes.append(error)
        raise _Stop

    keep.places_casts = True  # type: ignore[attr-defined]  # so that no region casts before

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo caches graphs by a function's code object, and gives up after some variants of one: copy the object.
    call.__code__ = call.__code__.replace()
    # Sizes are those of these inputs, whatever other models were called with before; a call of a logger is no op.
    dynamos, programs = capture_errors()
    with as_given(left_out=_logging()):
        try:
            torch.compile(call, backend=keep, fullgraph=True)(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, dynamos) and _USERS_CODE not in str(error):
                raise  # no error of capturing: to an error of the program Dynamo adds the user's lines
            where, why = _user_line(str(error)), _why(str(error))
            if not outcomes and isinstance(error, programs):  # it raises this without Dynamo, too
                what = f"{type(model).__name__} does not run with these inputs"
                raise PolicyError(what, where=where, why=why, write="inputs as it is trained with") from error
            if not outcomes:
                raise UnsupportedError(
                    f"{type(model).__name__} cannot be captured as one graph",
                    where=where,
                    why=why,
                    write="mezzo.plan.plan(part, inputs, policy=…) of each part of the model",
                ) from error
    if not outcomes:
        raise UnsupportedError(f"{type(model).__name__} runs no op of torch's on tensors")
    if isinstance(outcomes[0], MezzoError):
        raise outcomes[0]
    return outcomes[0]


def _logging() -> set[Any]:
    """Return the functions of loggers that write, with those that libraries add, as ``warning_once``."""
    words = {"debug", "info", "warn", "warning", "error", "exception", "critical", "log"}
    return {function for name, function in vars(logging.Logger).items() if name.partition("_")[0] in words}


def _why(text: str) -> str:
    """Return the first line of an error of Dynamo's, with its explanation if it has one."""
    explained = re.search(r"^  Explanation: (.+)$", text, re.MULTILINE)
    return "; ".join([text.splitlines()[0], *(explained.groups() if explained else ())])


_USERS_CODE: Final = "from user code:"


def _user_line(text: str) -> str:
    """Return the last of the user's lines that an error of Dynamo's names."""
    return _last_line(text.partition(_USERS_CODE)[2])


def _last_line(text: str) -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor mezzo's."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    users = [f"{file}:{line}" for file, line in lines if not file.startswith(_INSTALLED)]
    return users[-1] if users else ""


def require_choice(policy: Policy) -> None:
    """Refuse a policy that casts no op."""
    if not policy.casts:
        raise PolicyError(
            f"{policy.level} casts no op, so that there is no choice to make",
            write=f"{both('O1,dtype=bfloat16')}; or with weights in halves {both('O2,dtype=bfloat16')}",
        )


# Reading a graph -------------------------------------------------------------------------------------------------


def read(
    whole: fx.GraphModule,
    policy: Policy,
    root_of: Callable[[str], str] = lambda variable: "",
    names: Sequence[str] = (),
    stored: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> Graph:
    """Return the ops of a captured graph, with a policy's decision on each.

    Args:
        whole: The graph.
        policy: The policy.
        root_of: Returns the path of a module in the model, by the local variable that holds it in the captured frame.
        names: The names of the model's arguments, if the captured function takes any.
        stored: The dtypes in which parameters will be stored, by their paths, where they are not their present ones.

    Raises:
        PolicyError: The policy casts no op, or bans one that the graph has.
    """
    require_switches()
    require_choice(policy)
    devices = [value_of(node).device.type for node in whole.graph.nodes if is_floating(node)]
    device_type = next((device for device in devices if device != "cpu"), "cpu")
    emulated = emulated_families(policy.dtype, device_type, policy.emulate)
    graph = Graph(whole, policy, device_type, emulated)
    _Reader(graph, root_of, names, stored).read(whole, {})
    return graph


class _Reader:
    """Reads a graph in the order in which it runs."""

    def __init__(
        self,
        graph: Graph,
        root_of: Callable[[str], str],
        names: Sequence[str],
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self.graph, self.root_of, self.names, self.stored = graph, root_of, names, stored
        self.policy = graph.policy
        self.results: dict[Node, Sequence[Any]] = {}  # of each checkpoint: the nodes inside that it returns
        self.wide = set[GraphOp]()  # casts to FP32 in the program, and ops that follow them
        self.autocasts: list[str] = []  # of each open autocast, why ops inside are left alone; "" if they are not

    def read(self, module: fx.GraphModule, arguments: Mapping[Node, GraphOp]) -> None:
        """Read a graph, or a checkpoint's body.

        Args:
            module: The graph.
            arguments: The ops of a body's placeholders.
        """
        for node in module.graph.nodes:
            self.graph.parents[node] = module
            if node.op == "output":
                return
            if node in arguments:
                self.graph.makers[node] = arguments[node]
            elif node.op in ("placeholder", "get_attr"):
                if is_floating(node):
                    self._add_op(node, "source", self._source_path(node))
            elif node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
                self._autocast(node)
            elif node.target is _CHECKPOINT:
                self._checkpoint(module, node)
            elif node.target is operator.getitem and node.args[0] in self.results:
                self._alias(node, self.results[node.args[0]][node.args[1]])
            else:
                self._call(node)

    def _autocast(self, node: Node) -> None:
        if node.target is EXIT_AUTOCAST:
            if not self.autocasts.pop():
                self.graph.dropped.append(node)
            return
        _, dtype, enabled, *_ = node.args
        reason = "" if enabled and dtype in (None, self.policy.dtype) else "the program's own autocast is around it"
        if not reason:
            self.graph.dropped.append(node)
        self.autocasts.append(reason)

    def _checkpoint(self, module: fx.GraphModule, node: Node) -> None:
        if module is self.graph.whole:
            self.graph.checkpoints.append(node)
        body: fx.GraphModule = getattr(module, str(cast(Node, node.args[0]).target))
        placeholders = list(body.graph.find_nodes(op="placeholder"))
        makers = [self.graph.makers.get(argument) for argument in cast(tuple[Node, ...], node.args[1:])]
        pairs = zip(placeholders, makers, strict=True)
        self.read(body, {placeholder: maker for placeholder, maker in pairs if maker is not None})
        (returned,) = body.graph.find_nodes(op="output")
        self.results[node] = returned.args[0]

    def _alias(self, node: Node, source: Any) -> None:
        if source in self.graph.makers:
            self.graph.makers[node] = self.graph.makers[source]

    def _call(self, node: Node) -> None:
        """Read a call: a new op, one that writes to a tensor of an earlier op, or a view."""
        value, name, makers = value_of(node), _name(node), self.graph.makers
        inputs = [read for read in node.all_input_nodes if read in makers]
        results = list(tensors(value))
        if node.target is operator.getitem and not isinstance(value_of(node.args[0]), Tensor):
            if is_floating(node) and (maker := makers.get(cast(Node, node.args[0]))) is not None:
                makers[node] = maker  # one of several results
            return
        if node.target is operator.setitem and inputs:
            self.graph.written.add(memory_of(value_of(inputs[0])))
            self._add_node(makers[inputs[0]], node, name, inputs[0])
            return
        converts = name in _CONVERTS and _names_dtype(node)
        same = next((read for read in inputs if any(_shares(read, result) for result in results)), None)
        if same is not None and (not converts or (self.graph.is_written(same) and makers[same].fixed is not True)):
            makers[node] = makers[same]
            if converts and makers[same].fixed is None:  # a write through the alias would be a write to both
                makers[same].role, makers[same].reason = "fp32", "the program writes to it through a cast that is none"
            elif name.endswith("_") or node.kwargs.get("inplace") or _is_in_place(node.target):
                self.graph.written.add(memory_of(value_of(same)))
                self._add_node(makers[same], node, name, same)
            elif isinstance(value, Tensor):
                self.graph.views[node] = same
            return
        operands = [read for read in inputs if is_floating(read) or not isinstance(value_of(read), Tensor)]
        if operands or any(result.is_floating_point() for result in results):
            self._add_op(node, *self._decided(node, name, operands))

    def _add_op(self, node: Node, role: Role, name: str, decision: Decision | None = None, reason: str = "") -> GraphOp:
        value = value_of(node)
        floats = [tensor for tensor in tensors(value) if tensor.is_floating_point()]
        module = name.rpartition(".")[0] if role == "source" else self._module_path(node)
        op = GraphOp(
            index=len(self.graph.ops), name=name, role=role, module=module,
            line="" if role == "source" else _line(node), dtype=floats[0].dtype if floats else torch.float32,
            decision=decision, reason=reason,
        )  # fmt: skip
        if role == "source":
            op.dtype = self.stored.get(name, op.dtype)
        self.graph.ops.append(op)
        self.graph.makers[node] = op
        reads_wide = any(self.graph.makers.get(read) in self.wide for read in node.all_input_nodes)
        if (role == "asked" and op.dtype == torch.float32) or (role == "follow" and reads_wide):
            self.wide.add(op)
        if role != "source":
            is_norm = role == "free" and name in OPS and OPS[name].is_norm
            keeps_weights = is_norm or (decision is not None and decision.treatment == "fp32_math")
            if decision is not None and decision.treatment in QUANTISED:
                op.recipe = self._recipe(node, name, decision)
            op.is_wide_inside = (self.graph.emulates(name) and op.recipe is None) or keeps_weights
            self._add_node(op, node, name, None)
            if keeps_weights:
                op.reads, op.wide_reads = op.reads[:1], op.reads[1:]
        return op

    def _recipe(self, node: Node, name: str, decision: Decision) -> tuple[Recipe, bool] | None:
        """Return how a product below sixteen bits is computed, and whether transposed; None if it stays low."""
        graph, treatment = self.graph, decision.treatment
        recipe = recipe_on(graph.device_type, graph.policy, treatment, emulated="products" in graph.emulated)
        if recipe.remembers:
            feature, write = ("delayed scaling", "fp8_recipe=tensorwise") if recipe.delayed else (
                "stochastic rounding", "nvfp4_tricks=rht+2d"
            )  # fmt: skip
            raise PolicyError(
                f"{feature} has no place in a plan",
                where=f"{self._module_path(node)} {_line(node)}".strip(),
                why="it goes by what is known of earlier steps, which the session keeps, and a graph does not",
                write=f"{both(write)}; or torch.compile without mezzo's backend",
            )
        args: Any = fx.map_arg(node.args, value_of)
        kwargs: Any = fx.map_arg(node.kwargs, value_of)
        operands = operands_or_reason(name, args, dict(kwargs), recipe.multiple)
        return (recipe, operands.is_turned) if isinstance(operands, Operands) else None

    def _add_node(self, op: GraphOp, node: Node, name: str, target: Node | None) -> None:
        """Add a node to an op, and the tensors that it reads; the dtype of one that it writes to stays."""
        op.nodes.append(node)
        reads = [read for read in node.all_input_nodes if read in self.graph.makers and read is not target]
        reads = [read for read in reads if is_floating(read)]
        op.reads += reads[:1] if name in _READS_FIRST or name in _CONVERTS else reads

    def _decided(self, node: Node, name: str, inputs: list[Node]) -> tuple[Role, str, Decision | None, str]:
        """Return the role of a new op, its name, the policy's decision, and the reason."""
        results = list(tensors(value_of(node)))
        floats = [result for result in results if result.is_floating_point()]
        if node.op != "call_method" and not inputs:
            return "source", name, None, "it makes a tensor of numbers of its own"
        if name in _CONVERTS:
            if not _names_dtype(node):
                return "follow", name, None, "it moves what there is to another device"
            if floats and floats[0].dtype in (torch.float32, self.policy.dtype):
                return "asked", name, None, f"the program asks for {dtype_name(floats[0].dtype)}"
            return "own", name, None, "the program asks for another dtype"
        if (why := self._why_left_alone(node, name, inputs, floats)) is not None:
            return "own", name, None, why
        if name in _LIKE:
            return "follow", name, None, "it has the dtype of the tensor that it is given"
        decision = self._decision(node, name)
        treatment, reason = decision.treatment, decision.reason
        match treatment:
            case "ban":
                where = f"{self._module_path(node)} {_line(node)}".strip()
                raise PolicyError(f"{name} is banned", where=where, why=reason, write=both(f"fp32={name}"))
            case "fp32":
                return treatment, name, decision, reason
            case "low" | "fp8" | "mxfp8" | "nvfp4" if floats:
                return "low", name, decision, reason
        if name == "einsum" and treatment == "native":
            return "own", name, decision, reason
        if not floats:
            return "follow", name, decision, "it gives no floating numbers, and reads what there is"
        if decision.rule is not None and treatment in ("native", "promote"):
            return "follow", name, decision, reason
        if treatment == "native" and OPS[name].parts:
            if any(map(self.graph.emulates, OPS[name].parts)):
                return "own", name, decision, "products inside it would have to be emulated"
            return "inside", name, decision, "torch's own autocast casts what it is made of"
        if (
            name not in _READS_FIRST
            and (treatment == "promote" or OPS[name].reason == "reduction")
            and name not in _JOINS
        ):
            return "follow", name, decision, "to add up what was rounded for it would lose precision"
        if any(self.graph.makers[read] in self.wide for read in inputs):
            return "follow", name, decision, "the program asks for FP32 before it"
        return "free", name, decision, reason

    def _why_left_alone(self, node: Node, name: str, inputs: list[Node], floats: list[Tensor]) -> str | None:
        """Return why a call is left alone; None if it is not."""
        dtypes = (torch.float32, self.policy.dtype)
        if reason := next(filter(None, reversed(self.autocasts)), ""):
            return reason
        if isinstance(node.target, HigherOrderOperator):
            return "it is a higher-order operator, a graph of its own"
        if any(value_of(read).dtype not in dtypes for read in inputs if is_floating(read)):
            return "it reads another dtype"
        if any(result.dtype not in dtypes for result in floats):
            return "it gives another dtype"
        if isinstance(node.kwargs.get("dtype"), torch.dtype) or node.kwargs.get("out") is not None:
            return "the call itself names a dtype, or where to write"
        if name in _DRAWS:
            return "in another dtype other numbers would be drawn"
        if name not in OPS and name not in _LIKE and (floats or not _is_torchs(node)):
            return "no list names this op"
        return None

    def _decision(self, node: Node, name: str) -> Decision:
        """Return the policy's decision on a call; rules on parameters that it reads come first."""
        for read in node.all_input_nodes:
            path = self._source_path(read) if read.op == "placeholder" else ""
            if path:
                products = self.policy.product_rule(path) if name in QUANTISABLE else None
                rule = products or self.policy.storage(path, path.rpartition(".")[0])[1]
                if rule is not None and rule.param is not None:
                    why = rule.reason or f"it reads {path}, which the rule {rule} pins"
                    return Decision(treatment=rule.treatment, rule=rule, reason=why, source="policy")
        module = self._module_path(node)
        decision = self.policy.explain(name, module, device_type=self.graph.device_type)
        differences = find_differences(self.policy, self.graph.device_type, module)
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if (instead := differences.instead(name, args, kwargs)) is not None:
            return dataclasses.replace(decision, treatment=instead.treatment, reason=instead.reason)
        return decision

    def _source_path(self, node: Node) -> str:
        """Return a parameter's or a buffer's path, and of another source its name in the program."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if source is None:
            return str(node.target)
        text = str(source.name() if callable(source.name) else source.name)
        is_stored = "_parameters[" in text or "_buffers[" in text
        if is_stored:
            return self._path(text)
        words = re.findall(r"\w+", text)[1:]
        if self.names and words[0] == "args" and int(words[1]) < len(self.names):
            words = [self.names[int(words[1])], *words[2:]]
        elif self.names and words[0] == "kwargs":
            words = words[1:]
        return "".join(words)

    def _module_path(self, node: Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        last = next(reversed(stack.values()), None)  # none where the captured function itself calls
        return self.root_of("self") if last is None else self._path(str(last[0]))

    def _path(self, text: str) -> str:
        """Return the path in the model for Dynamo's ``L['self']._modules['head']._parameters['weight']``."""
        match = _VARIABLE.match(text)
        bare = text[match.end() :] if match else text
        bare = _PARTS.sub(r".\1", bare).strip(".")
        return ".".join(filter(None, (self.root_of(match[1] if match else ""), bare)))


#: The variable at the beginning of Dynamo's paths, and a step of the rest.
_VARIABLE: Final = re.compile(r"^[A-Z]\['(\w+)'\]")
_PARTS: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


def _shares(node: Node, result: Tensor) -> bool:
    """Whether a node and a result share memory."""
    return any(memory_of(tensor) == memory_of(result) for tensor in tensors(value_of(node)))


def _is_in_place(target: Any) -> bool:
    return (
        getattr(target, "__module__", "") == "_operator"
        and target.__name__.startswith("i")
        and hasattr(operator, target.__name__[1:])
    )


def _name(node: Node) -> str:
    """Return the base name of a call's op; an in-place one's ends in an underscore."""
    if node.op == "call_method":
        return op_name(getattr(Tensor, str(node.target), node.target))
    if getattr(node.target, "__module__", "") == "_operator":
        name = str(node.target.__name__).strip("_")  # type: ignore[union-attr]
        return op_name(getattr(Tensor, f"__{name}__", node.target))
    return op_name(node.target)


def _is_torchs(node: Node) -> bool:
    """Whether a call is of torch's own function: those without floating results read any floating dtype."""
    of = getattr(node.target, "__module__", None) or ""
    is_custom = isinstance(node.target, OpOverload | OpOverloadPacket | HigherOrderOperator)
    return node.op == "call_method" or (not is_custom and of.partition(".")[0] in ("torch", "_operator"))


def _names_dtype(node: Node) -> bool:
    """Whether a conversion names a dtype, and no device alone."""
    if str(node.target) != "to":
        return True
    arguments = [*node.args[1:], *node.kwargs.values()]
    return any(isinstance(value, torch.dtype) or is_floating(value) for value in arguments)


def _line(node: Node) -> str:
    """Return the program's line that has the call."""
    return _last_line(node.meta.get("stack_trace") or "")
