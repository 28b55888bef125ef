"""What a policy changes on one device: the functions that torch alone would treat differently."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from mezzo.cast import device
from mezzo.cast.emulate import EMULATED
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import OPS, functions

__all__ = ["OPENED", "Handler", "Plan", "Traced", "open_function", "plan_for", "remember", "traced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """How one torch function is carried out where the policy differs from torch."""

    op: str
    treatment: Treatment
    emulated: bool = False
    wide_weights: bool = False  # every argument but the first goes to FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The resolved differences between a policy and torch on one device."""

    device_type: str
    dtype: torch.dtype
    autocast: bool
    emulated: bool
    handlers: Mapping[Callable[..., Any], Handler]
    opened: Mapping[Callable[..., Any], Callable[..., Any]]
    pinned: Mapping[int, Treatment]
    key: str  # equal for equal differences, and for nothing else

    def native(self) -> contextlib.AbstractContextManager[Any]:
        """Return torch's own autocast in the state this plan was made for."""
        if not self.autocast:
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, dtype=self.dtype)


@functools.lru_cache(maxsize=256)
def plan_for(
    policy: Policy,
    device_type: str,
    module: str | None = None,
    pinned: tuple[tuple[int, Treatment], ...] = (),
) -> Plan:
    """Find the functions that a policy treats differently from torch on this device.

    Raises:
        UnsupportedError: The device has no such arithmetic and ``emulate=False``.
    """
    emulated = device.will_emulate(policy.dtype, device_type, policy.emulate).active
    if policy.dtype != torch.float32 and not emulated:
        # Where the kernel would kill the process, protect() has set the limit or asks for emulation instead.
        must = device.protect(device_type, policy.dtype).action == "emulate"
        emulated = must and policy.emulate is not False
    # A module pinned to FP32 gets FP32 inputs at its boundary: inside, nothing has to be cast.
    whole = _whole_module(policy, module)
    native_autocast = policy.autocast and whole not in ("fp32", "fp32_math", "native", "promote")
    handlers: dict[Callable[..., Any], Handler] = {}
    alike: dict[str, Handler] = {}
    for op in dict.fromkeys([*OPS, *(op for rule in policy.rules for op in rule.ops), *(EMULATED if emulated else ())]):
        decision = policy.explain(op, module, device_type=device_type)
        wanted: Treatment = decision.treatment
        if decision.rule is not None and decision.rule.op is None and not native_autocast:
            wanted = "native"
        torch_does = _torch_does(op, device_type) if native_autocast else "native"
        if decision.rule is None and device_type != "cpu" and native_autocast and policy.norms == "fp32":
            wanted = torch_does  # portable means what torch does on an accelerator: there is no difference there
        by_emulation = emulated and op in EMULATED and wanted in ("low", "native", "promote")
        if wanted == "native" and torch_does == "fp32" and decision.rule is None:
            wanted = "fp32_math"  # a CPU without the low-precision kernel: same dtypes, FP32 inside
        # torch's CPU promotion refuses FP16 and BF16 in one call, which built-in promotion (CUDA's way) widens.
        built_in = wanted == "promote" and policy.lists == "portable" and device_type == "cpu"
        if wanted == torch_does and not by_emulation and not built_in:
            if wanted == "low":
                alike[op] = Handler(op=op, treatment="low", emulated=False)
            continue
        handler = Handler(op=op, treatment=wanted, emulated=by_emulation)
        handlers.update(dict.fromkeys(functions(op), handler))
    if handlers:  # the mode runs anyway: products go through it too, so that their weights are cast once
        for op, handler in alike.items():
            handlers.update(dict.fromkeys(functions(op), handler))
    return Plan(
        device_type=device_type, dtype=policy.dtype, autocast=native_autocast, emulated=emulated,
        handlers=handlers, opened=_concerned(handlers),
        pinned=dict(pinned),
        key=f"{policy} in {module!r} on {device_type} with {pinned} {'emulated' if emulated else ''}",
    )  # fmt: skip


class Traced(NamedTuple):
    """What a compiled graph needs to know of a plan and a function."""

    dtype: torch.dtype
    device_type: str
    autocast: bool
    handler: Handler | None
    is_opened: bool


#: The plans that a mode was made for, by key: what torch.compile asks for while it traces.
_PLANS: Final[dict[str, Plan]] = {}


def remember(plan: Plan) -> str:
    """Make a plan known to :func:`traced`, and return its key."""
    _PLANS.setdefault(plan.key, plan)
    return plan.key


def traced(key: str, function: Callable[..., Any]) -> Traced:
    """Look a function up in a plan, as a constant of the graph: it is guarded by the plan's key alone."""
    plan = _PLANS[key]
    return Traced(plan.dtype, plan.device_type, plan.autocast, plan.handlers.get(function), function in plan.opened)


# What torch._dynamo.assume_constant_result sets, without a second of imports.
traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _whole_module(policy: Policy, module: str | None) -> Treatment | None:
    """Return the treatment that a rule gives to a whole module, if one does."""
    rules = (rule for rule in policy.rules if module is not None and rule.op is None and rule.matches_module(module))
    return next((rule.treatment for rule in rules), None)


def _torch_does(op: str, device_type: str) -> Treatment:
    entry = OPS.get(op)
    if entry is None:
        return "native"
    return entry.cpu if device_type == "cpu" else entry.cuda


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


def _concerned(handlers: Mapping[Any, Handler]) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Pick the functions to open: those that call a handled op, directly or through another of them."""
    names = {handler.op for handler in handlers.values()}
    opened: dict[Callable[..., Any], Callable[..., Any]] = {}
    while True:
        more = {
            function: copy
            for function, copy in OPENED.items()
            if function not in handlers and function not in opened and names & set(_calls(function))
        }
        if not more:
            return opened
        opened.update(more)
        names |= {function.__name__ for function in more}


def _calls(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that a Python function's body uses."""
    return function.__code__.co_names if isinstance(function, types.FunctionType) else ()


#: Python-implemented functions of torch.nn.functional and torch.functional, opened once.
OPENED: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = types.MappingProxyType(
    {
        function: open_function(function)
        for place in (functional, torch.functional)
        for function in vars(place).values()
        if inspect.isfunction(function)
        and function.__module__ == place.__name__
        and any(name.startswith("has_torch_function") for name in function.__code__.co_names)
    }
)
