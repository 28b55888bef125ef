"""From a graph of torch's functions, as Dynamo captures it, to ops, what a policy says of each, and what each reads.

An *op* is what makes a tensor's memory, with all that writes to it afterwards: views of a tensor, and what an in-place
function returns, belong to the op that made the tensor, and so have its precision.
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
from mezzo.cast.products import Operands, Recipe, asked, recipe_on
from mezzo.compiling import ENTER_AUTOCAST, EXIT_AUTOCAST, as_given, capture_errors, require_switches
from mezzo.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket
from mezzo.errors import MezzoError, PolicyError, UnsupportedError
from mezzo.policy import Decision, Policy
from mezzo.policy.ops import OPS, QUANTISABLE, QUANTISED
from mezzo.policy.rules import both
from mezzo.tensors import CASTABLE, dtype_name, tensors, values_of
from mezzo.trace.function_calls import op_name

#: What an op may be: ``source``: a parameter, a buffer, an input, a constant; ``low``, ``fp32``: in this precision, by
#: a rule or a list; ``free``: in either; ``follow``: in either, but low only where all that it reads is; ``asked``: a
#: cast that the program itself asks for; ``inside``: made of ops that torch's own autocast casts one by one; ``own``:
#: left alone, in the dtypes that it has without a policy.
Kind = Literal["source", "low", "fp32", "free", "follow", "asked", "inside", "own"]

#: Functions whose other arguments are FP32 statistics, updated in place, and weights, which kernels take in FP32 too.
_READS_FIRST: Final = frozenset({"batch_norm", "instance_norm"})
#: What mixes dtypes and adds nothing up.
_JOINS: Final = frozenset({"cat", "stack"})
_CONVERTS: Final = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
#: What a function that draws numbers of a tensor's shape is called.
_DRAWS: Final = frozenset({"bernoulli", "normal", "multinomial", "poisson", "rand_like", "randn_like", "randint_like"})
#: Ops that are products, or made of some.
_EMULATED: Final = frozenset({*EMULATED, *COMPOSED, *REACHED, *RECURRENT})
#: What makes a tensor of numbers of its own, in the dtype of one that it is given.
_LIKE: Final = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
#: Where code lies that is not the program's.
_INSTALLED: Final = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(slots=True, eq=False)
class GraphOp:
    """One op of a graph.

    Attributes:
        index: Its place among the graph's ops.
        name: Its base name, as the op table has it; of a source what it is called in the program.
        kind: What it may be.
        module: Path of the module in which it runs; of a parameter its own path.
        line: ``file:line`` of the program, or ``""``.
        dtype: What it has without a policy.
        nodes: What computes: the node that makes the tensor, then those that write to it.
        reads: Tensors that it takes in its own precision; each is cast where it has another one.
        wide_reads: Tensors that it takes in FP32 whatever its precision: weights of a norm, which is FP32 inside.
        decision: What the policy says; None for sources and for what is left alone.
        reason: Why it is of its kind, in words.
        is_wide_inside: Whether its arithmetic is FP32 where it is low: it rounds what it takes, and what it gives.
        recipe: Of a product below sixteen bits: how it is computed, and whether its result is transposed.
    """

    index: int
    name: str
    kind: Kind
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
        """Whether it is low, where that is no choice."""
        match self.kind:
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
        policy: What decided about the ops.
        device_type: The device that its tensors are on.
        emulated: The families of products that compute in FP32 from rounded operands there.
        ops: The ops, in the order in which they run.
        makers: The op that each floating tensor belongs to.
        views: What each view looks at.
        parents: The graph module that has each node.
        written: Memories that in-place functions write to.
        dropped: Nodes that enter or leave an autocast of the policy's own.
        checkpoints: Calls whose bodies are run again in the backward pass.
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
        """Whether an op is a product, or made of some, of a family that is emulated."""
        return op in _EMULATED and family_of(op) in self.emulated

    def is_written(self, node: Node) -> bool:
        """Whether a tensor is written to after it was made: a cast of it holds for one reader."""
        value = value_of(node)
        return memory_of(value) in self.written or (not value.is_inference() and value._version > 0)

    def is_run_again(self, node: Node) -> bool:
        """Whether a call is in the body of an activation checkpoint."""
        return self.parents.get(node, self.whole) is not self.whole

    def dtype_of(self, op: GraphOp, low: Sequence[bool]) -> torch.dtype:
        """Return what an op gives in a placement."""
        if op.kind in ("low", "fp32", "free", "follow"):
            return self.policy.dtype if low[op.index] else torch.float32
        return op.dtype

    def promoting(self, op: GraphOp) -> list[Node]:
        """Return the tensors by which an op that nobody casts has its dtype.

        A number beside a tensor is none of them, nor what is written to the op's tensor afterwards.
        """
        first = op.nodes[0].all_input_nodes if op.nodes else []
        made_of = [node for node in op.reads if node in first]
        return [node for node in made_of if value_of(node).dim()] or made_of

    def cast_at(self, node: Node) -> Node:
        """Return the tensor to cast where a view is wanted in another precision: the smallest behind, for all views."""
        smallest = node
        while node in self.views and not self.is_written(node):
            node = self.views[node]
            if num_elements(node) <= num_elements(smallest):
                smallest = node
        return smallest


def value_of(node: Any) -> Any:
    """Return the fake value that Dynamo has for a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def memory_of(tensor: Tensor) -> int:
    """Return what is equal for tensors of one memory."""
    return int(tensor.untyped_storage()._cdata)


def hint(number: Any) -> int:
    """Return a size of the first shapes, those that the program is captured with; 1 where numbers decide about it."""
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
    """Whether a call is differentiated; weights need gradients also where none are taken."""
    return any(each.requires_grad for each in tensors(value_of(node)))


def is_floating(node: Any) -> bool:
    """Whether a node is one floating tensor."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


# Capturing a model -----------------------------------------------------------------------------------------------


class _Stop(Exception):  # noqa: N818 - it is no error
    """Ends a call when its graph is known: nothing is compiled, and nothing runs."""


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Graph:
    """Have Dynamo capture a model's forward pass as one graph of torch's functions, and read it; nothing of it runs.

    Args:
        model: The model, in the state in which it is to run: ``train()`` or ``eval()``.
        args: What it is called with.
        kwargs: By name.
        policy: As :func:`read` takes it.

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
    storage = wanted_storage(model, policy, waits=True)
    # Of halves the high one is read, which costs no cast.
    dtypes: dict[Tensor, torch.dtype] = dict((*storage.plain.items(), *storage.halves.items()))
    stored = {path: dtypes[param] for path, param in model.named_parameters() if param in dtypes}
    found: list[Graph | MezzoError] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        try:
            found.append(read(graph, policy, names=names, stored=stored))
        except MezzoError as error:
            found.append(error)
        raise _Stop

    keep.places_casts = True  # type: ignore[attr-defined]  # no region is to place any before

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo keeps what it has compiled by a function's code, and gives up after some variants of one.
    call.__code__ = call.__code__.replace()
    # Sizes are those of these inputs, whatever other models were called with before; what is logged is no op.
    dynamos, programs = capture_errors()
    with as_given(left_out=_logging()):
        try:
            torch.compile(call, backend=keep, fullgraph=True)(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, dynamos) and _USERS_CODE not in str(error):
                raise  # no error of capturing: Dynamo writes the user's lines under others' that it hands on
            where, why = _user_line(str(error)), _why(str(error))
            if not found and isinstance(error, programs):  # the program's own, as without Dynamo
                what = f"{type(model).__name__} does not run with these inputs"
                raise PolicyError(what, where=where, why=why, write="inputs as it is trained with") from error
            if not found:
                raise UnsupportedError(
                    f"{type(model).__name__} cannot be captured as one graph",
                    where=where,
                    why=why,
                    write="mezzo.plan.plan(part, inputs, policy=…) of each part of the model",
                ) from error
    if not found:
        raise UnsupportedError(f"{type(model).__name__} runs no op of torch's on tensors")
    if isinstance(found[0], MezzoError):
        raise found[0]
    return found[0]


def _logging() -> set[Any]:
    """Return the functions of loggers that write, those that a library adds (``warning_once``) too."""
    words = {"debug", "info", "warn", "warning", "error", "exception", "critical", "log"}
    return {each for name, each in vars(logging.Logger).items() if name.partition("_")[0] in words}


def _why(text: str) -> str:
    """Return what an error of Dynamo's says first, with its explanation where it has one."""
    explained = re.search(r"^  Explanation: (.+)$", text, re.MULTILINE)
    return "; ".join([text.splitlines()[0], *(explained.groups() if explained else ())])


_USERS_CODE: Final = "from user code:"


def _user_line(text: str) -> str:
    """Find the last line of the user's that an error of Dynamo's names."""
    return _last_line(text.partition(_USERS_CODE)[2])


def _last_line(text: str) -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor mezzo's."""
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [f"{file}:{line}" for file, line in found if not file.startswith(_INSTALLED)]
    return own[-1] if own else ""


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
    """Find the ops of a captured graph, and ask a policy about each.

    Args:
        whole: The graph.
        policy: The policy.
        root_of: Returns the path that a module has in the model, by the local variable that holds it in what was
            captured.
        names: Of the model's arguments, where what was captured takes any.
        stored: What parameters will be read in without a cast, by their paths, where that is not what they are now.

    Raises:
        PolicyError: The policy casts no op, or bans one that the graph has.
    """
    require_switches()
    require_choice(policy)
    kinds = [value_of(node).device.type for node in whole.graph.nodes if is_floating(node)]
    device_type = next((kind for kind in kinds if kind != "cpu"), "cpu")
    emulated = emulated_families(policy.dtype, device_type, policy.emulate)
    graph = Graph(whole, policy, device_type, emulated)
    _Reader(graph, root_of, names, stored).read(whole, {})
    return graph


class _Reader:
    """Walk a graph in the order in which it runs."""

    def __init__(
        self,
        graph: Graph,
        root_of: Callable[[str], str],
        names: Sequence[str],
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self.graph, self.root_of, self.names, self.stored = graph, root_of, names, stored
        self.policy = graph.policy
        self.results: dict[Node, Sequence[Any]] = {}  # of checkpoints: the nodes inside that they return
        self.wide = set[GraphOp]()  # FP32 that the program asks for, and what comes of it
        self.autocasts: list[str] = []  # of the program's own that are entered: "" for one of the policy's

    def read(self, module: fx.GraphModule, given: Mapping[Node, GraphOp]) -> None:
        """Read a graph.

        Args:
            module: It.
            given: The ops of a body's placeholders.
        """
        for node in module.graph.nodes:
            self.graph.parents[node] = module
            if node.op == "output":
                return
            if node in given:
                self.graph.makers[node] = given[node]
            elif node.op in ("placeholder", "get_attr"):
                if is_floating(node):
                    self._begin(node, "source", self._source_path(node))
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
        own = "" if enabled and dtype in (None, self.policy.dtype) else "the program's own autocast is around it"
        if not own:
            self.graph.dropped.append(node)
        self.autocasts.append(own)

    def _checkpoint(self, module: fx.GraphModule, node: Node) -> None:
        if module is self.graph.whole:
            self.graph.checkpoints.append(node)
        body: fx.GraphModule = getattr(module, str(cast(Node, node.args[0]).target))
        inside = [each for each in body.graph.nodes if each.op == "placeholder"]
        pairs = zip(inside, cast(tuple[Node, ...], node.args[1:]), strict=True)
        self.read(body, {place: self.graph.makers[given] for place, given in pairs if given in self.graph.makers})
        (returned,) = body.graph.find_nodes(op="output")
        self.results[node] = returned.args[0]

    def _alias(self, node: Node, inside: Any) -> None:
        if inside in self.graph.makers:
            self.graph.makers[node] = self.graph.makers[inside]

    def _call(self, node: Node) -> None:
        """Read a call: a new op, more work on one that there is, or a view of it."""
        value, name, makers = value_of(node), _name(node), self.graph.makers
        given = [each for each in node.all_input_nodes if each in makers]
        results = list(tensors(value))
        if node.target is operator.getitem and not isinstance(value_of(node.args[0]), Tensor):
            if is_floating(node) and (whole := makers.get(cast(Node, node.args[0]))) is not None:  # of several results
                makers[node] = whole
            return
        if node.target is operator.setitem and given:
            self.graph.written.add(memory_of(value_of(given[0])))
            self._work_on(makers[given[0]], node, name, given[0])
            return
        converts = name in _CONVERTS and _names_dtype(node)
        same = next((each for each in given if any(_shares(each, result) for result in results)), None)
        if same is not None and (not converts or (self.graph.is_written(same) and makers[same].fixed is not True)):
            makers[node] = makers[same]
            if converts and makers[same].fixed is None:  # what is written through it is written to both
                makers[same].kind, makers[same].reason = "fp32", "the program writes to it through a cast that is none"
            elif name.endswith("_") or node.kwargs.get("inplace") or _is_in_place(node.target):
                self.graph.written.add(memory_of(value_of(same)))
                self._work_on(makers[same], node, name, same)
            elif isinstance(value, Tensor):
                self.graph.views[node] = same
            return
        read = [each for each in given if is_floating(each) or not isinstance(value_of(each), Tensor)]
        if read or any(result.is_floating_point() for result in results):
            self._begin(node, *self._decided(node, name, read))

    def _begin(self, node: Node, kind: Kind, name: str, decision: Decision | None = None, reason: str = "") -> GraphOp:
        value = value_of(node)
        floats = [each for each in tensors(value) if each.is_floating_point()]
        module = name.rpartition(".")[0] if kind == "source" else self._module_path(node)
        made = GraphOp(
            index=len(self.graph.ops), name=name, kind=kind, module=module,
            line="" if kind == "source" else _line(node), dtype=floats[0].dtype if floats else torch.float32,
            decision=decision, reason=reason,
        )  # fmt: skip
        if kind == "source":
            made.dtype = self.stored.get(name, made.dtype)
        self.graph.ops.append(made)
        self.graph.makers[node] = made
        reads_wide = any(self.graph.makers.get(each) in self.wide for each in node.all_input_nodes)
        if (kind == "asked" and made.dtype == torch.float32) or (kind == "follow" and reads_wide):
            self.wide.add(made)
        if kind != "source":
            is_norm = kind == "free" and name in OPS and OPS[name].is_norm
            keeps_weights = is_norm or (decision is not None and decision.treatment == "fp32_math")
            if decision is not None and decision.treatment in QUANTISED:
                made.recipe = self._recipe(node, name, decision)
            made.is_wide_inside = (self.graph.emulates(name) and made.recipe is None) or keeps_weights
            self._work_on(made, node, name, None)
            if keeps_weights:
                made.reads, made.wide_reads = made.reads[:1], made.reads[1:]
        return made

    def _recipe(self, node: Node, name: str, decision: Decision) -> tuple[Recipe, bool] | None:
        """Return how a product below sixteen bits is computed, and whether transposed; None where it stays low."""
        graph, treatment = self.graph, decision.treatment
        recipe = recipe_on(graph.device_type, graph.policy, treatment, emulated="products" in graph.emulated)
        if recipe.remembers:
            what, write = ("delayed scaling", "fp8_recipe=tensorwise") if recipe.delayed else (
                "stochastic rounding", "nvfp4_tricks=rht+2d"
            )  # fmt: skip
            raise PolicyError(
                f"{what} has no place in a plan",
                where=f"{self._module_path(node)} {_line(node)}".strip(),
                why="it goes by what is known of earlier steps, which the session keeps, and a graph does not",
                write=f"{both(write)}; or torch.compile without mezzo's backend",
            )
        args: Any = fx.map_arg(node.args, value_of)
        kwargs: Any = fx.map_arg(node.kwargs, value_of)
        found = asked(name, args, dict(kwargs), recipe.multiple)
        return (recipe, found.is_turned) if isinstance(found, Operands) else None

    def _work_on(self, op: GraphOp, node: Node, name: str, target: Node | None) -> None:
        """Let a node compute as a part of an op; what it writes to keeps its dtype."""
        op.nodes.append(node)
        others = [each for each in node.all_input_nodes if each in self.graph.makers and each is not target]
        others = [each for each in others if is_floating(each)]
        op.reads += others[:1] if name in _READS_FIRST or name in _CONVERTS else others

    def _decided(self, node: Node, name: str, given: list[Node]) -> tuple[Kind, str, Decision | None, str]:
        """Say what a new op may be, and why."""
        results = list(tensors(value_of(node)))
        floats = [each for each in results if each.is_floating_point()]
        if node.op != "call_method" and not given:
            return "source", name, None, "it makes a tensor of numbers of its own"
        if name in _CONVERTS:
            if not _names_dtype(node):
                return "follow", name, None, "it moves what there is to another device"
            if floats and floats[0].dtype in (torch.float32, self.policy.dtype):
                return "asked", name, None, f"the program asks for {dtype_name(floats[0].dtype)}"
            return "own", name, None, "the program asks for another dtype"
        if (why := self._why_own(node, name, given, floats)) is not None:
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
        if any(self.graph.makers[each] in self.wide for each in given):
            return "follow", name, decision, "the program asks for FP32 before it"
        return "free", name, decision, reason

    def _why_own(self, node: Node, name: str, given: list[Node], floats: list[Tensor]) -> str | None:
        """Say why a call is to be left alone; None where it is not."""
        known = (*CASTABLE[:1], self.policy.dtype)
        if own := next(filter(None, reversed(self.autocasts)), ""):
            return own
        if isinstance(node.target, HigherOrderOperator):
            return "it is a program in itself"
        if any(value_of(each).dtype not in known for each in given if is_floating(each)):
            return "it reads another dtype"
        if any(each.dtype not in known for each in floats):
            return "it gives another dtype"
        if isinstance(node.kwargs.get("dtype"), torch.dtype) or node.kwargs.get("out") is not None:
            return "the call itself names a dtype, or where to write"
        if name in _DRAWS:
            return "in another dtype other numbers would be drawn"
        if name not in OPS and name not in _LIKE and (floats or not _is_torchs(node)):
            return "no list names this op"
        return None

    def _decision(self, node: Node, name: str) -> Decision:
        """Ask the policy: first about parameters that the node reads."""
        for each in node.all_input_nodes:
            path = self._source_path(each) if each.op == "placeholder" else ""
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
        """Return a parameter's or a buffer's path; of anything else what the program calls it."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if source is None:
            return str(node.target)
        text = str(source.name() if callable(source.name) else source.name)
        held = "_parameters[" in text or "_buffers[" in text
        if held:
            return self._path(text)
        words = re.findall(r"\w+", text)[1:]
        if self.names and words[0] == "args" and int(words[1]) < len(self.names):
            words = [self.names[int(words[1])], *words[2:]]
        elif self.names and words[0] == "kwargs":
            words = words[1:]
        return "".join(words)

    def _module_path(self, node: Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        last = next(reversed(stack.values()), None)  # none: the captured function calls it
        return self.root_of("self") if last is None else self._path(str(last[0]))

    def _path(self, text: str) -> str:
        """Return a path in the model of what Dynamo calls ``L['self']._modules['head']._parameters['weight']``."""
        found = _VARIABLE.match(text)
        bare = text[found.end() :] if found else text
        bare = _PARTS.sub(r".\1", bare).strip(".")
        return ".".join(filter(None, (self.root_of(found[1] if found else ""), bare)))


#: The variable with which Dynamo begins a path, and how it goes on.
_VARIABLE: Final = re.compile(r"^[A-Z]\['(\w+)'\]")
_PARTS: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


def _shares(node: Node, result: Tensor) -> bool:
    """Whether a node and a result are of one memory."""
    return any(memory_of(each) == memory_of(result) for each in tensors(value_of(node)))


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
    """Whether a call is of torch's own function, which takes any floating dtype if it gives no floating numbers."""
    of = getattr(node.target, "__module__", None) or ""
    is_custom = isinstance(node.target, OpOverload | OpOverloadPacket | HigherOrderOperator)
    return node.op == "call_method" or (not is_custom and of.partition(".")[0] in ("torch", "_operator"))


def _names_dtype(node: Node) -> bool:
    """Whether a conversion names a dtype, and no device alone."""
    if str(node.target) != "to":
        return True
    given = [*node.args[1:], *node.kwargs.values()]
    return any(isinstance(each, torch.dtype) or is_floating(each) for each in given)


def _line(node: Node) -> str:
    """Return the program's line that has the call."""
    return _last_line(node.meta.get("stack_trace") or "")
