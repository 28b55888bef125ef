"""One call of a torch function: what the policy decided about it, and what its kernels really did.

Only here does anything look inside the active region: what it opens, and which parameter rule speaks about a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.cast.differences import OPENED
from mezzo.cast.mode import acting_differences, pinned_parameter
from mezzo.errors import PolicyError
from mezzo.policy import Decision, Policy, Rule, Treatment
from mezzo.policy.ops import OPS
from mezzo.tensors import CASTABLE, dtype_name, has_fraction, tensors
from mezzo.trace.frames import kernel_name, op_name
from mezzo.trace.kernels import Storages, is_allocation, is_cast, is_view

_CASTABLE: Final = frozenset(map(dtype_name, CASTABLE))
_CONVERSIONS: Final = frozenset("to float half bfloat16 double type type_as to_copy _to_copy".split())


class Decider:
    """Ask the policy about calls.

    Args:
        policy: The policy.
        ruled: Rule and path of each parameter and buffer that a rule speaks about, by ``id``.
    """

    def __init__(self, policy: Policy, ruled: Mapping[int, tuple[Rule, str]]) -> None:
        self.policy, self.ruled = policy, ruled
        self._decisions: dict[tuple[str, str | None, str], Decision] = {}

    def call(self, function: Any, args: Any, kwargs: Any, module: str | None) -> OpCall:
        """Begin a call: name it, decide about it, note the dtypes that it is given."""
        given = list(tensors((args, kwargs)))
        device_type = given[0].device.type if given else "cpu"
        op = op_name(function)
        param, differences = self._param_decision(args, kwargs), acting_differences(args, kwargs)
        return OpCall(
            op=op,
            decision=param or self._decision(op, module, device_type),
            goes_back=param is not None and differences is not None and differences.gives_back,
            low=dtype_name(self.policy.dtype),
            given=_names(given),
            cause=_cause(kwargs, is_off=self.policy.autocast and not _autocasts(device_type)),
        )

    def _param_decision(self, args: Any, kwargs: Any) -> Decision | None:
        found = _pinned(args, kwargs)
        if found is None:
            return None
        param, treatment = found
        rule, path = self.ruled.get(id(param), (None, "a parameter"))
        reason = (rule.reason if rule else "") or f"it reads {path}, which the rule {rule} pins"
        return Decision(treatment=treatment, rule=rule, reason=reason, source="policy")

    def _decision(self, op: str, module: str | None, device_type: str) -> Decision:
        key = (op, module, device_type)
        if key not in self._decisions:
            try:
                found = self.policy.explain(op, module, device_type=device_type)
            except PolicyError:  # a name that only torch's internals use
                found = Decision(treatment="native", rule=None, reason="no list names this op", source="op table")
            self._decisions[key] = found
        return self._decisions[key]


@dataclass(slots=True)
class OpCall:
    """What is known of one call, growing while it runs.

    Attributes:
        op: The op's base name.
        decision: What the policy decided.
        low: Name of the policy's compute dtype.
        given: Names of the dtypes of the arguments that hold fractions.
        goes_back: Whether FP32 results go back to the compute dtype: of a parameter with a rule, without autocast.
        cause: Why the policy would not reach this call, should it turn out so.
        line: The user's line.
        hidden: Whether mezzo itself made the call: a cast, and no op of the model's.
        has_run: Whether any kernel computed or converted something.
        emulated: Whether a product was computed in FP32 from rounded operands.
        kernels: Base names of the kernels that ran.
    """

    op: str
    decision: Decision
    low: str
    given: tuple[str, ...]
    goes_back: bool
    cause: str
    line: str | None = None
    hidden: bool = False
    has_run: bool = False
    emulated: bool = False
    kernels: set[str] = field(default_factory=set)
    _computed: bool = False
    _inputs: dict[str, None] = field(default_factory=dict)
    _converted: dict[str, None] = field(default_factory=dict)
    _made_here: Storages[bool] = field(default_factory=Storages)

    @property
    def why(self) -> str:
        """What decided about the call, in a few words."""
        return f"rule {self.decision.rule}" if self.decision.rule else self.cause or self.decision.reason

    @property
    def is_conversion(self) -> bool:
        """Whether the call is there to convert: ``x.float()``."""
        return self.op in _CONVERSIONS

    def asks_for(self, before: Tensor, after: Tensor) -> bool:
        """Whether a cast of an argument is what the policy's decision about this call asks for."""
        if self.is_conversion or self._made_here.get(before) is not None:
            return False
        match self.decision.treatment:
            case "low":
                return dtype_name(after.dtype) == self.low
            case "fp32" | "fp32_math":
                return after.dtype == torch.float32
            case treatment:
                return treatment == "promote"

    def kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, *, emulated: bool) -> None:
        """Take note of a kernel: what enters it from outside the call is what the call computes in."""
        if is_cast(kernel, args, out):
            self.has_run = True
            from_outside = self._made_here.get(args[0]) is None
            self.emulated |= emulated
            if from_outside:
                (self._inputs if emulated else self._converted)[dtype_name(args[0].dtype)] = None
            if emulated or not from_outside:
                self._made_here.put([out], True)
            return
        if is_view(kernel):
            return  # its storage is its base's, and labelled
        if is_allocation(kernel):
            self._made_here.put(tensors(out), True)
            return
        self.has_run = self._computed = True
        self.kernels.add(kernel_name(kernel))
        for tensor in tensors((args, kwargs)):
            if has_fraction(tensor.dtype) and self._made_here.get(tensor) is None:
                self._inputs[dtype_name(tensor.dtype)] = None
        if not kernel._schema.is_mutable:
            self._made_here.put(tensors(out), True)

    def row(self, module: str, out: Any) -> tuple[Any, ...] | None:
        """Return the fields of a :class:`~mezzo.explanation.Row`, all but the count; ``None`` for integers."""
        computes_in = tuple(self._inputs if self._computed or self.emulated else self._converted)
        results = list(tensors(out))
        if not computes_in and not any(has_fraction(tensor.dtype) for tensor in results):
            return None
        returns = tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in results))
        decision = self.decision
        return (
            module, self.op, self.given, computes_in, returns, decision.treatment,
            None if decision.rule is None else str(decision.rule), decision.reason, decision.source,
            self.line, self.emulated, self._disagreement(computes_in, returns),
        )  # fmt: skip

    def _disagreement(self, computes_in: tuple[str, ...], returns: tuple[str, ...]) -> str:
        """Compare what was measured with what was decided."""
        if self.is_conversion:
            return ""  # the model's own code names the dtype
        ins, given = [[name for name in names if name in _CASTABLE] for names in (computes_in, self.given)]
        outs = [name for name in returns if name in _CASTABLE]
        match self.decision.treatment:
            case "low":
                wanted, agrees = self.low, not set(ins) - {self.low}
            case "fp32":
                returned = {"float32", self.low} if self.goes_back else {"float32"}
                wanted, agrees = "float32", not set(ins) - {"float32"} and not (given and set(outs) - returned)
            case "fp32_math":
                wanted = f"float32 inside, {given[0] if given else 'float32'} out"
                agrees = not set(ins) - {"float32"} and not (given and set(outs) - {given[0]})
            case "promote":
                wanted, agrees = "one dtype", len(set(ins)) <= 1
            case _:
                wanted, agrees = "the dtypes it is given", not (given and set(ins) - set(given))
        if agrees:
            return ""
        return f"decided: {wanted}; measured: {'+'.join(ins)} in, {'+'.join(outs) or 'none'} out; {self._because()}"

    def _because(self) -> str:
        inner = sorted(self.kernels - {self.op})
        parts = f"; its kernels: {', '.join(inner)}" if inner else ""
        return (self.cause or "torch runs it as one C++ function, whose parts it casts by itself") + parts


def _names(each: list[Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in each if has_fraction(tensor.dtype)))


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _cause(kwargs: Any, *, is_off: bool) -> str:
    if kwargs.get("out") is not None:
        return "out= variants are never cast, as in torch.autocast"
    if kwargs.get("dtype") is not None:
        return "the call's own dtype= wins"
    if is_off:
        return "the model's code switches autocast off here"
    return ""


# The active region -----------------------------------------------------------------------------------


def opened_by_region(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the copy of a Python function to run in its place, so that the ops inside it are seen one by one.

    What the region itself would open is opened here first, with the region below, which changes nothing. Other
    Python functions are opened where the op table has no decision about the function as a whole; to them too it is
    all the same, unless an argument's class overrides torch functions.
    """
    differences = acting_differences(args, kwargs)
    if differences is not None:
        if _pinned(args, kwargs) is not None or differences.handler(function) is not None:
            return None
        if (opened := differences.opened.get(function)) is not None:
            return opened
    if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
        return None
    entry = OPS.get(op_name(function))
    return None if entry is not None and not entry.parts else OPENED.get(function)


def _pinned(args: Any, kwargs: Any) -> tuple[Tensor, Treatment] | None:
    """Return the parameter among the arguments that a parameter rule speaks about, and its treatment."""
    differences = acting_differences(args, kwargs)
    if differences is None or not differences.pinned:
        return None
    param = pinned_parameter(differences, args, kwargs)
    return None if param is None else (param, differences.pinned[id(param)])
