"""What a policy changes on one device: the functions that torch alone would treat differently."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mezzo.cast.arguments import BY_ARGUMENTS, MAKES_COMPLEX, AskProducts, Instead
from mezzo.cast.device import Family, emulated_families
from mezzo.cast.emulate import COMPOSED, EMULATED, REACHED, RECURRENT, family_of
from mezzo.cast.products import Memory, Recipe, recipe_on
from mezzo.compiling import constant_in_graphs, differentiated_plainly
from mezzo.dispatch import OpOverload, OpOverloadPacket
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import (
    MOVES,
    OPS,
    QUANTISABLE,
    QUANTISED,
    VIEWS,
    callables,
    functions,
    in_place_forms,
    is_in_place,
    out_of_place,
)
from mezzo.policy.policy import Written


def is_called_in_place(index: int, args: Any, kwargs: Any) -> bool:
    """Whether a call tells its function to write in place."""
    return bool(kwargs.get("inplace") or (len(args) > index and args[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """How one torch function is carried out where the policy differs from torch."""

    op: str
    treatment: Treatment
    emulated: bool = False
    recipe: Recipe | None = None  # of a product of a weight, below sixteen bits
    low_result: bool = False  # what comes out goes to the compute dtype
    keeps_states: bool = False  # a recurrent op, whose FP32 states stay FP32
    rounds_to: Literal["first", "widest"] = "first"  # of operands, whose dtype fp32_math returns
    by_arguments: bool = False  # whether a call's arguments are asked what it gets: where no rule decides
    answers: tuple[Handler, ...] = ()  # how it is carried out, by what they say
    written: Written = "left"  # how it is carried out where it writes into tensors that keep their dtype
    out_of_place_form: Callable[..., Any] | None = None  # of an in-place form, the function that returns a new tensor
    inplace: int | None = None  # the place of that argument, which tells a Python function to write in place
    reason: str = ""  # of a ban


#: Their other arguments are FP32 statistics, updated in place, and weights, which kernels take in FP32 too.
INPUT_ONLY: Final = frozenset(
    """batch_norm instance_norm native_batch_norm fused_moving_avg_obs_fake_quant
    _fused_moving_avg_obs_fq_helper""".split()
)
#: What begins a backward pass; torch.func differentiates by the last of them.
DIFFERENTIATE: Final[frozenset[Callable[..., Any]]] = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


class Direct(NamedTuple):
    """How eager code carries out a call whose operands are plain tensors: they are cast, and the function runs.

    Attributes:
        target: The dtype that its operands are cast to.
        contracts: Whether a product sums over anything, which is asked before; ``None`` for what is no such product.
        emulation: What computes it in FP32 from the rounded operands; ``None`` where the device does.
    """

    target: torch.dtype
    contracts: Callable[[Any, Any], bool] | None
    emulation: Callable[..., Any] | None


def _directly(handler: Handler, dtype: torch.dtype) -> Direct | None:
    """Return how a function is carried out directly, if a handler asks for no more than that."""
    if handler.treatment not in ("low", "fp32") or handler != Handler(
        op=handler.op, treatment=handler.treatment, emulated=handler.emulated, rounds_to=handler.rounds_to,
        by_arguments=handler.by_arguments, answers=handler.answers, written=handler.written, reason=handler.reason,
    ):  # fmt: skip
        return None
    ask = BY_ARGUMENTS[handler.op] if handler.by_arguments else None
    if "::" in handler.op or handler.op in INPUT_ONLY or (handler.by_arguments and not isinstance(ask, AskProducts)):
        return None
    contracts = ask.contracts if isinstance(ask, AskProducts) else None
    target = dtype if handler.treatment == "low" else torch.float32
    return Direct(target, contracts, EMULATED[handler.op] if handler.emulated else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The resolved differences between a policy and torch on one device."""

    policy: Policy
    device_type: str
    dtype: torch.dtype
    autocast: bool
    returns_compute_dtype: bool  # whether ops return it that read a parameter with a rule of its own
    emulated: frozenset[Family]  # the families of products that compute in FP32 from rounded operands
    handlers: Mapping[Callable[..., Any], Handler]
    direct: Mapping[Callable[..., Any], Direct | None]  # of eager code: what is not in it is left alone
    ops_by_arguments: frozenset[str]  # the ops whose calls' arguments are asked what they get
    opened: Mapping[Callable[..., Any], Callable[..., Any]]
    pinned: Mapping[int, Treatment]
    pins_buffers: bool  # whether one of the pinned tensors is no ``nn.Parameter``
    memories: tuple[Memory, ...]  # what products below sixteen bits remember of earlier steps
    of_library: Callable[[str], Handler | None]  # how an operator of another library is carried out, by its full name
    names_libraries: bool  # whether a rule speaks about such operators
    key: str  # equal for equal differences, and for nothing else

    def handler(self, function: Callable[..., Any]) -> Handler | None:
        """Find the handler of a function, or of an operator of ``torch.ops.aten`` by what it is called in Python.

        Compiled code calls overloads by name, after a policy has been carried out in it. Autocast is off there, so
        that it is left alone; where a policy has no autocast that tells it from, no call of an overload is treated.
        """
        if isinstance(function, OpOverloadPacket) or (isinstance(function, OpOverload) and self.autocast):
            name, functions = _of_operator(function)
            if not name.startswith("aten::"):
                return self.of_library(name)
            return next((self.handlers[function] for function in functions if function in self.handlers), None)
        return self.handlers.get(function)

    @property
    def has_any(self) -> bool:
        """Whether there is a function that torch alone would treat differently."""
        return len(self.handlers) > 0 or len(self.pinned) > 0 or self.names_libraries  # torch 2.11 traces no bool(dict)

    def instead(self, op: str, args: Any, kwargs: Any) -> Instead | None:
        """Return what a call gets instead of its op's treatment, if its arguments say so."""
        return BY_ARGUMENTS[op](args, kwargs) if op in self.ops_by_arguments else None

    def as_pinned(self, handler: Handler, treatment: Treatment) -> Handler:
        """Return how a function is carried out that reads a parameter under a rule on its products."""
        if handler.op not in QUANTISABLE:
            return handler
        recipe = recipe_on(self.device_type, self.policy, treatment, emulated=handler.emulated)
        return dataclasses.replace(handler, treatment=treatment, recipe=recipe, by_arguments=False, answers=())

    def native(self) -> contextlib.AbstractContextManager[Any]:
        """Return torch's own autocast in the state these differences are from."""
        if not self.autocast:
            return torch.autocast(self.device_type, enabled=False)
        context = _AUTOCAST(self.device_type, dtype=self.dtype)
        return differentiated_plainly(context) if self.has_any and not torch.compiler.is_compiling() else context


#: Torch's own, whatever stands under its name while ``mezzo run`` runs a script.
_AUTOCAST: Final = torch.autocast


class ParamFacts(NamedTuple):
    """What a region knows of the parameters of models.

    Attributes:
        pinned: Treatment of every op that reads a parameter, by the parameter's ``id``.
        memories: What products below sixteen bits remember, of each model.
        pins_buffers: Whether one of these parameters is a buffer, or another tensor that is no ``nn.Parameter``.
    """

    pinned: Mapping[int, Treatment] = types.MappingProxyType({})
    memories: tuple[Memory, ...] = ()
    pins_buffers: bool = False


_OF_NONE: Final = ParamFacts()


def find_differences(
    policy: Policy,
    device_type: str,
    module: str | None = None,
    facts: ParamFacts = _OF_NONE,
) -> Differences:
    """Find the functions that a policy treats differently from torch on this device.

    Args:
        policy: The policy.
        device_type: The device.
        module: Path of the module whose region it is, for rules that name one.
        facts: What is known of the parameters of models.

    Raises:
        UnsupportedError: The device has no such arithmetic and ``emulate=False``.
    """
    if not any(rule.module is not None for rule in policy.rules):
        module = None  # it is all the same then, and planned once
    emulated = emulated_families(policy.dtype, device_type, policy.emulate)
    differences = _find(policy, device_type, module, emulated, tuple(rule.reason for rule in policy.rules))
    # Parameters come and go (torch.func.functional_call brings others for one call): such ones are not kept.
    if not facts.pinned and not facts.memories:
        return differences
    key = f"{differences.key} with {tuple(facts.pinned.items())} and {[id(memory) for memory in facts.memories]}"
    return dataclasses.replace(differences, **facts._asdict(), key=key)


@functools.lru_cache(maxsize=256)
def _find(
    policy: Policy,
    device_type: str,
    module: str | None,
    emulated: frozenset[Family],
    _reasons: tuple[str, ...],  # in the cache key alone: equal policies may differ in them, and a ban says its own
) -> Differences:
    """Find them, but for what is known of the parameters of models."""
    module_rule = policy.module_rule(module or "")
    is_island = module_rule is not None and module_rule.treatment == "fp32"
    native_autocast = policy.casts and not is_island
    ops = [*OPS, *(op for rule in policy.rules for op in rule.ops), *((*EMULATED, *COMPOSED) if emulated else ())]
    by_op, differing, same_as_torch = dict[str, Handler](), dict[str, Handler](), dict[str, Handler]()
    for op in dict.fromkeys(ops):
        handler, differs = _treated(
            op, policy, device_type, module, emulated=emulated, autocasts=native_autocast, is_island=is_island
        )
        by_op[op] = handler
        if differs:
            differing[op] = handler
        elif handler.treatment == "low" or handler.by_arguments:
            same_as_torch[op] = handler
    if any(rule.param is not None and rule.treatment in QUANTISED for rule in policy.rules):
        differing.update({op: by_op[op] for op in QUANTISABLE})
        for rule in policy.rules:
            if rule.param is not None and rule.treatment in QUANTISED:  # it may find that the device lacks them
                recipe_on(device_type, policy, rule.treatment, emulated="products" in emulated)
    if differing:  # the mode runs anyway: products go through it too, so that their weights are cast once
        differing.update(same_as_torch)
    handlers = {
        function: handler
        for op, handler in differing.items()
        for function in (callables if handler.by_arguments and op in VIEWS else functions)(op)
    }
    if differing:
        _add_in_place_forms(handlers, by_op)
        # Torch casts the value only where no tensor indexes; the portable lists cast it always.
        if native_autocast and policy.lists == "portable":
            handlers[Tensor.__setitem__] = _SET_ITEM_HANDLER
    handlers = {
        function: _with_answers(handler) if handler.by_arguments else handler for function, handler in handlers.items()
    }

    @functools.cache
    def of_library(name: str) -> Handler | None:
        handler, differs = _treated(
            name, policy, device_type, module, emulated=emulated, autocasts=native_autocast, is_island=is_island
        )
        return handler if differs else None

    opened = _functions_to_open(handlers)
    direct = {function: _directly(handler, policy.dtype) for function, handler in handlers.items()}
    differences = Differences(
        policy=policy, device_type=device_type, dtype=policy.dtype, autocast=native_autocast, emulated=emulated,
        returns_compute_dtype=not policy.casts and not is_island, handlers=handlers, opened=opened,
        direct={**dict.fromkeys((*opened, *DIFFERENTIATE)), **direct},
        ops_by_arguments=frozenset(handler.op for handler in handlers.values() if handler.by_arguments),
        pinned={}, pins_buffers=False, memories=(), of_library=of_library,
        names_libraries=any("::" in rule.op for rule in policy.rules if rule.op is not None),
        key=", emulated ".join((f"{policy.region_text()} in {module!r} on {device_type}", *sorted(emulated))),
    )  # fmt: skip
    remember(differences)  # here too, for a region that is first entered while torch.compile traces
    return differences


def _add_in_place_forms(handlers: dict[Callable[..., Any], Handler], by_op: Mapping[str, Handler]) -> None:
    """Add how functions that write in place are carried out, where what they write is another number than torch's."""
    for op, handler in by_op.items():
        if handler.written == "left" and not handler.emulated:
            continue
        by_arguments = handler.by_arguments and op not in MAKES_COMPLEX  # a real tensor takes no complex number
        for function, form in in_place_forms(op).items():
            handlers[function] = dataclasses.replace(handler, out_of_place_form=form, by_arguments=by_arguments)
        for function in handlers.keys() & INPLACE.keys() & {*functions(op)}:
            handlers[function] = dataclasses.replace(handler, inplace=INPLACE[function])


def _treated(
    op: str,
    policy: Policy,
    device_type: str,
    module: str | None,
    *,
    emulated: frozenset[Family],
    autocasts: bool,
    is_island: bool,
) -> tuple[Handler, bool]:
    """Return how an op is carried out in a region, and whether torch alone would do otherwise."""
    decision = policy.explain(op, module, device_type=device_type)
    wanted: Treatment = decision.treatment
    is_ruled = decision.rule is not None and decision.rule.op is not None
    if wanted == "native" and op in OPS and OPS[op].parts:
        is_ruled = False  # what it is made of decides, under a rule too
    # A module pinned to FP32 gets FP32 inputs at its boundary: inside nothing has to be cast, unless something is low.
    is_mixed = is_island and any(rule.treatment in ("low", *QUANTISED) for rule in policy.rules)
    if decision.rule is not None and not is_ruled and not autocasts and not is_mixed:
        wanted = "native"
    torch_does: Treatment = OPS[op].by_torch(device_type) if autocasts and op in OPS else "native"
    is_emulated = family_of(op) in emulated
    if is_emulated and autocasts and wanted == "native" and not is_ruled:
        if op in COMPOSED:
            # torch's autocast would run the products inside in arithmetic that the device lacks. They are rounded
            # once, at the end, instead of one by one.
            return Handler(op=op, treatment="fp32", low_result=True), True
        if op in RECURRENT and torch_does == "native":
            # torch's CPU autocast casts what is inside, and that would mix dtypes here, where autocast is off.
            return Handler(op=op, treatment="low", emulated=True, keeps_states=True), True
        if op in REACHED and torch_does == "native":
            # Torch, too, casts at the products that an equation reaches.
            return Handler(op=op, treatment="low", emulated=True, by_arguments=op == "einsum"), True
    by_emulation = is_emulated and op in EMULATED and wanted in ("low", "native", "promote")
    # torch's CPU promotion refuses FP16 and BF16 in one call, which built-in promotion (CUDA's way) widens.
    built_in = wanted == "promote" and policy.lists == "portable" and device_type == "cpu"
    if wanted in QUANTISED:
        recipe = recipe_on(device_type, policy, wanted, emulated=is_emulated)
        written: Written = "follows" if autocasts and policy.lists == "portable" else "left"
        return Handler(op=op, treatment=wanted, emulated=is_emulated, recipe=recipe, written=written), True
    reason = decision.rule.reason if wanted == "ban" and decision.rule is not None else ""
    # A rule is about the whole op; torch's lists may name what is inside (of norm) or one way to call it (of pad).
    differs = is_ruled or wanted != torch_does or by_emulation or built_in
    # Where torch's own lists hold, or nothing is cast, no argument changes that.
    by_arguments = autocasts and not is_ruled and policy.lists == "portable" and op in BY_ARGUMENTS
    by_arguments &= op not in MAKES_COMPLEX or policy.dtype.to_complex() != torch.complex64
    is_mixing = not is_ruled and op in OPS and OPS[op].reason == "type-mixing"
    rounds_to: Literal["first", "widest"] = "widest" if is_mixing else "first"
    written = policy.written(op, decision, device_type) if autocasts or is_ruled else "left"
    return Handler(
        op=op, treatment=wanted, emulated=by_emulation, rounds_to=rounds_to, by_arguments=by_arguments,
        written=written, reason=reason,
    ), differs  # fmt: skip


@functools.lru_cache(maxsize=512)
def _with_answers(handler: Handler) -> Handler:
    """Add how a function is carried out whose arguments ask for another treatment.

    Elementwise products of low operands run where other low products do: emulated, too.
    """
    treatments: tuple[Treatment, ...] = ("promote", "fp32", "fp32_math", "native")
    answers = tuple(
        dataclasses.replace(handler, treatment=answer, written="treated", recipe=None) for answer in treatments
    )
    return dataclasses.replace(handler, answers=answers)


#: How ``x[index] = value`` is carried out: its value takes the dtype of ``x``.
_SET_ITEM_HANDLER: Final = Handler(op="index_put", treatment="promote", written="follows")


@constant_in_graphs
@functools.lru_cache(maxsize=1024)
def in_place_form(function: Callable[..., Any], treatment: Treatment) -> Handler | None:
    """Return how a function that writes in place reads a tensor under a rule; ``None`` if it returns a new tensor.

    Args:
        function: Any function of torch's. What it writes to is never cast: the write would be lost in a copy.
        treatment: The rule's.
    """
    if function is Tensor.__setitem__:
        return _SET_ITEM_HANDLER
    name = getattr(function, "__name__", "").partition(".")[0]
    op = out_of_place(name) if is_in_place(name) else None
    if op is None or not (forms := in_place_forms(op) if op in OPS else {}):
        return Handler(op=name, treatment="native", out_of_place_form=function) if is_in_place(name) else None
    out_of_place_form = forms.get(function, next(iter(forms.values())))
    written: Written = "follows" if op in MOVES else "treated"
    return Handler(op=op, treatment=treatment, written=written, out_of_place_form=out_of_place_form)


@functools.lru_cache(maxsize=1024)
def _of_operator(
    operator: OpOverload[..., Any] | OpOverloadPacket[..., Any],
) -> tuple[str, tuple[Callable[..., Any], ...]]:
    """Return the full name of an operator, and the Python functions behind one of torch's."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    full = packet._qualified_op_name
    library, _, name = full.partition("::")
    name = name.removeprefix("special_")
    if library != "aten":
        return full, ()
    return full, tuple(in_place_forms(out_of_place(name) or "")) if is_in_place(name) else functions(name)


class Traced(NamedTuple):
    """What a compiled graph needs to know of differences and a function."""

    dtype: torch.dtype
    device_type: str
    autocast: bool
    handler: Handler | None
    opened: str  # its name in OPENED_BY_NAME, or nothing
    out_of_place_form: Callable[..., Any] | None  # the handler's: torch 2.11 reads no function of a dataclass


#: The differences that a mode was made for, by key: what torch.compile asks for while it traces.
_BY_KEY: Final[dict[str, Differences]] = {}


def remember(differences: Differences) -> str:
    """Make differences known to :func:`traced`, and return their key."""
    if (
        differences.key not in _BY_KEY
    ):  # setdefault would have compiled code guard the whole dict, and compile anew as it grows
        _BY_KEY[differences.key] = differences
    return differences.key


@constant_in_graphs
def traced(key: str, function: Callable[..., Any]) -> Traced:
    """Return a function's handler in differences, as a constant of the graph: their key alone is guarded."""
    differences = _BY_KEY[key]
    opened = _name(differences.opened.get(function))
    handler = differences.handler(function)
    out_of_place_form = None if handler is None else handler.out_of_place_form
    return Traced(differences.dtype, differences.device_type, differences.autocast, handler, opened, out_of_place_form)


def open_function(function: types.FunctionType) -> Callable[..., Any]:
    """Copy a Python function of torch so that the functions it calls are seen by the mode.

    Such a function first asks ``has_torch_function`` and hands itself over whole; in the copy that question
    answers False, so its body runs, op by op, under the mode that is pushed again.
    """
    blind = {name: _never for name in function.__code__.co_names if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__,
        function.__globals__ | blind,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False


def _functions_to_open(handlers: Mapping[Any, Handler]) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Pick the functions to open: those that call a handled op, directly or through another of them."""
    names = {handler.op for handler in handlers.values()}
    opened: dict[Callable[..., Any], Callable[..., Any]] = {}
    while True:
        more = {
            function: copy
            for function, copy in OPENED.items()
            if function not in opened and names & set(_calls(copy)) and _is_composite(handlers.get(function))
        }
        if not more:
            return opened
        opened.update(more)
        names |= {function.__name__ for function in more}


def _is_composite(handler: Handler | None) -> bool:
    """Whether what a function is made of decides about it: it has no handler, or one that asks for its arguments."""
    return handler is None or (handler.by_arguments and OPS[handler.op].reason == "composite")


def _calls(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that a Python function's body uses."""
    return function.__code__.co_names if isinstance(function, types.FunctionType) else ()


def _rmatmul(self: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, self)


#: Python-implemented functions of torch.nn.functional and torch.functional, opened once, and an operator of Tensor's.
OPENED: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = types.MappingProxyType(
    {
        **{
            function: open_function(function)
            for namespace in (functional, torch.functional)
            for function in vars(namespace).values()
            if inspect.isfunction(function)
            and function.__module__ == namespace.__name__
            and any(name.startswith("has_torch_function") for name in function.__code__.co_names)
        },
        torch.Tensor.__rmatmul__: _rmatmul,
    }
)


def _name(copy: Callable[..., Any] | None) -> str:
    return "" if copy is None else f"{copy.__module__}.{copy.__name__}"


#: The same by a name: what torch.compile can look up, and guard.
OPENED_BY_NAME: Final = {_name(copy): copy for copy in OPENED.values()}


#: The index of the argument ``inplace``, the last one, of functions that have it. With it they write to the operand
#: itself, and not to a cast of it.
INPLACE: Final = {
    function: index
    for function in OPENED
    for index, name in enumerate(inspect.signature(function).parameters)
    if name == "inplace"
}
