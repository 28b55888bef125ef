"""The autocast region: ``torch.autocast`` plus the policy's differences from it.

``torch.autocast`` does the ordinary casting. Where the policy wants something else on this device (the
portable lists on a CPU, a user's rule, emulated arithmetic), a ``TorchFunctionMode`` handles just those
functions; with no difference there is no mode, and no Python runs per op.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mezzo.cast import device
from mezzo.cast.emulate import emulate
from mezzo.cast.plan import OPENED, Handler, Plan, Traced, open_function, plan_for, remember, traced
from mezzo.cast.weights import WeightCasts
from mezzo.errors import UnsupportedError
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import functions

__all__ = [
    "Differences",
    "accumulation",
    "autocast",
    "checkpoint_contexts",
    "emulates_here",
    "pinned_parameter",
]

#: How torch says that it has no kernel for a dtype.
_NO_KERNEL: Final = ("not implemented for", "dtypes not supported", "Unsupported dtype")
#: Their other arguments are FP32 statistics, updated in place, and weights, which kernels take in FP32 too.
_INPUT_ONLY: Final = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_CASTABLE: Final = (torch.float32, torch.float16, torch.bfloat16)


class autocast(ContextDecorator):  # noqa: N801 - the name torch.autocast has
    """Run ops in the precision that a policy says.

    A context manager and a decorator; re-entrant. A region inside another replaces it until it ends.

    Args:
        policy: A policy, its text, or the path of a policy file.
        device_type: The device to cover; the CPU and the current accelerator when omitted.

    Raises:
        PolicyError: The policy's text or file is wrong.
        UnsupportedError: The device cannot honour the policy; the error says what to write instead.

    **Cost**: that of ``torch.autocast`` where the policy equals torch's own lists on this device; otherwise a
    function mode, about 2 µs of Python for each torch function called.

    Example:
        >>> import mezzo, torch
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     y = torch.randn(4, 4) @ torch.randn(4, 4)
        >>> y.dtype
        torch.bfloat16
    """

    def __init__(self, policy: Policy | str | os.PathLike[str], device_type: str | None = None) -> None:
        resolved = _RESOLVED[_resolve(policy, device_type)]
        self.policy = resolved.policy
        self.device_types = resolved.device_types
        self._plans = list(resolved.plans)
        self._casts: WeightCasts | None = None  # of its own, for as long as it is entered
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    @classmethod
    def inside(
        cls,
        policy: Policy,
        module: str,
        pinned: Mapping[int, Treatment],
        device_types: tuple[str, ...],
        casts: WeightCasts | None = None,
    ) -> autocast:
        """Make the region of one module of a prepared model.

        Args:
            policy: The model's policy.
            module: Path of the module, for rules that name one.
            pinned: Treatment of every op that reads a parameter, by the parameter's ``id``.
            device_types: The devices to cover.
            casts: Where weight casts are kept; those of the region around it, or its own, when omitted.
        """
        region = cls.__new__(cls)
        region.policy, region.device_types, region._entered, region._casts = policy, device_types, [], casts
        region._plans = [plan_for(policy, kind, module, tuple(pinned.items())) for kind in device_types]
        return region

    def with_wide_norm(self) -> autocast:
        """Return this region with batch norm's weights widened to the FP32 of its statistics, for the call only."""
        handler = Handler(op="batch_norm", treatment="native", wide_weights=True)
        wide = dict.fromkeys((*functions("batch_norm"), *functions("instance_norm")), handler)
        region = self._recreate_cm()
        region._plans = [
            dataclasses.replace(plan, handlers={**plan.handlers, **wide}, key=f"{plan.key}, wide norms")
            for plan in self._plans
        ]
        return region

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on any of the devices."""
        return any(plan.emulated for plan in self._plans)

    @property
    def has_differences(self) -> bool:
        """Whether entering the region changes anything but ``torch.autocast``'s own state."""
        return any(plan.handlers or plan.pinned for plan in self._plans)

    def run_backward(self, tensor: Tensor, **kwargs: Any) -> None:
        """Run a backward pass whose activation checkpoints are recomputed under this region's differences.

        ``torch.utils.checkpoint`` restores torch's autocast by itself, but knows nothing of a function mode. One is
        therefore kept active inside ``torch.autograd.backward``. Where the policy autocasts it acts only while
        autocast is on, so in recomputation and not in the backward functions themselves.

        Args:
            tensor: What to differentiate.
            **kwargs: As ``torch.autograd.backward`` takes them.
        """
        with accumulation(self.policy), _shadowed():
            if self.has_differences:
                casts = WeightCasts() if self._casts is None else self._casts
                with Differences(self._plans, casts, recomputing=True):
                    _OPENED_BACKWARD(tensor, **kwargs)
            else:
                torch.autograd.backward(tensor, **kwargs)

    def __enter__(self) -> autocast:
        active = _active(self.policy, self._plans, self._casts)
        active.__enter__()
        self._entered.append(active)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def _recreate_cm(self) -> autocast:
        """Give each call of a decorated function a region of its own, so that threads do not share one."""
        fresh = type(self).__new__(type(self))
        fresh.policy, fresh.device_types, fresh._plans, fresh._entered = (
            self.policy,
            self.device_types,
            self._plans,
            [],
        )
        fresh._casts = self._casts
        return fresh


@contextlib.contextmanager
def _active(policy: Policy, plans: list[Plan], casts: WeightCasts | None) -> Iterator[None]:
    """Run what a region is made of; a generator, since torch.compile can follow one across enter and exit."""
    with accumulation(policy), _native(plans), _shadowed() as around:
        if not any(plan.handlers or plan.pinned for plan in plans):
            yield
            return
        own = WeightCasts()
        if casts is None:
            casts = around[-1].casts if around else own
        with Differences(plans, casts):
            yield
        own.clear()


@contextlib.contextmanager
def _native(plans: list[Plan]) -> Iterator[None]:
    """Enter torch's own autocast for each device."""
    with plans[0].native():
        if len(plans) == 1:
            yield
        else:
            with _native(plans[1:]):
                yield


@contextlib.contextmanager
def _shadowed() -> Iterator[list[Differences]]:
    """Silence the regions around this one."""
    active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    outer = [mode for mode in active if isinstance(mode, Differences)]
    for mode in outer:
        mode.shadows += 1
    try:
        yield outer
    finally:
        for mode in outer:
            mode.shadows -= 1


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts in which an activation checkpoint runs first and is recomputed.

    For ``torch.utils.checkpoint`` without reentry, where the backward pass is a bare ``loss.backward()``:
    ``MixedPrecision.backward`` and modules of a prepared O2 or O3 model need no such help.

    Returns:
        A context that does nothing, for the first run, and one that brings the current region's differences back.

    Example:
        >>> import mezzo, torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     y = checkpoint(torch.exp, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)
        >>> y.sum().backward()
        >>> x.grad.dtype
        torch.float32
    """
    active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in active if isinstance(mode, Differences) and not mode.shadows]
    if not modes:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), Differences(list(modes[-1].plans.values()), modes[-1].casts)


def emulates_here(device_type: str) -> bool:
    """Whether the innermost active region emulates arithmetic on a device."""
    active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in active if isinstance(mode, Differences) and device_type in mode.plans]
    return bool(modes) and modes[-1].plans[device_type].emulated


@dataclasses.dataclass(frozen=True, slots=True)
class _Resolved:
    policy: Policy
    device_types: tuple[str, ...]
    plans: tuple[Plan, ...]


#: A memo of what regions resolve to; torch.compile can guard what it finds in a global, and by a text.
_RESOLVED: Final[dict[str, _Resolved]] = {}


def _resolve(policy: Policy | str | os.PathLike[str], device_type: str | None) -> str:
    value = Policy.of(policy)
    kinds = (device_type,) if device_type else tuple(device.devices())
    key = f"{value} on {'+'.join(kinds)}"
    if key not in _RESOLVED:
        _RESOLVED[key] = _Resolved(value, kinds, tuple(plan_for(value, kind) for kind in kinds))
    return key


# What torch._dynamo.assume_constant_result sets, without a second of imports: a region entered inside a compiled
# function is resolved while it is traced.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def accumulation(policy: Policy) -> Iterator[None]:
    """Forbid reduced-precision accumulation inside GEMMs while ``policy.accumulate`` is ``fp32``.

    The flags are torch's own and process-wide; they are put back on exit.
    """
    if policy.accumulate != "fp32" or not torch.cuda.is_available():
        yield
        return
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = before


# Carrying them out ----------------------------------------------------------------------------------


class Differences(TorchFunctionMode):
    """Handle the functions a policy treats differently, and open Python functions that call them."""

    def __init__(self, plans: list[Plan], casts: WeightCasts, *, recomputing: bool = False) -> None:
        super().__init__()
        self.casts = casts
        self.recomputing = recomputing  # in a backward pass
        self.plans = {plan.device_type: plan for plan in plans}
        self.key = remember(plans[0]) if len(plans) == 1 and not plans[0].pinned else ""
        self.shadows = 0  # how many regions inside this one are active

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.shadows:
            return func(*args, **kwargs)
        if self.recomputing and func is torch.autograd.backward:  # a checkpoint inside a checkpoint
            with self:
                return _OPENED_BACKWARD(*args, **kwargs)
        if self.key and torch.compiler.is_compiling():
            return self._trace(func, args, kwargs)
        plan = self._plan_for(args, kwargs)
        # With autocast switched off inside the region, or in the functions of a backward pass, nothing is cast.
        if plan is None or (plan.autocast and not torch.is_autocast_enabled(plan.device_type)):
            return func(*args, **kwargs)
        if plan.pinned and (param := pinned_parameter(plan, args, kwargs)) is not None:
            return _read_pinned(param, plan, self.casts, func, args, kwargs)
        if (handler := plan.handlers.get(func)) is not None:
            return _carry_out(handler, plan, self.casts, func, args, kwargs)
        if (opened := plan.opened.get(func)) is not None:
            with self:
                return opened(*args, **kwargs)
        return func(*args, **kwargs)

    def _trace(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do the same for a graph, which then depends on the plan's key and on no table of it."""
        found = traced(self.key, func)
        if found.autocast and not torch.is_autocast_enabled(found.device_type):
            return func(*args, **kwargs)
        if found.handler is not None:
            return _carry_out(found.handler, found, self.casts, func, args, kwargs)
        if found.is_opened:
            with self:
                return OPENED[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _plan_for(self, args: Any, kwargs: Any) -> Plan | None:
        if len(self.plans) == 1:
            return next(iter(self.plans.values()))
        kinds = (x.device.type for x in _tensors((args, kwargs)))
        return next((self.plans[kind] for kind in kinds if kind in self.plans), None)


def _carry_out(handler: Handler, plan: Plan | Traced, casts: WeightCasts, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one function with its treatment, native autocast off for the call."""
    # In-place and out= variants are never cast, as in torch.autocast.
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    target: torch.dtype | None = None
    match handler.treatment:
        case "low":
            target = plan.dtype
        case "fp32" | "fp32_math":
            if handler.treatment == "fp32" and kwargs.get("dtype") is not None:
                return func(*args, **kwargs)  # the caller's own dtype wins, as in torch's set_opt_dtype
            target = torch.float32
        case "promote":
            dtypes = {x.dtype for x in _floats(args, kwargs)}
            target = functools.reduce(torch.promote_types, dtypes) if dtypes else None
        case "ban":
            raise _banned(handler.op)
    back = _floats(args, kwargs)[:1] if handler.treatment == "fp32_math" else []
    if handler.wide_weights:
        args, kwargs = (
            (*args[:1], *_cast(args[1:], torch.float32)),
            kwargs | {name: _cast(value, torch.float32) for name, value in kwargs.items() if name != "input"},
        )
    if target is not None:
        if handler.op in _INPUT_ONLY:
            args = (*_cast(args[:1], target), *args[1:])
            kwargs = kwargs | {name: _cast(value, target) for name, value in kwargs.items() if name == "input"}
        else:
            args, kwargs = _cast(args, target, casts), _cast(kwargs, target, casts)
    if torch.compiler.is_compiling():
        with torch.autocast(plan.device_type, enabled=False):
            out = _run(handler, plan, func, args, kwargs)
    else:  # the same without the 10 µs of entering a context
        enabled = torch.is_autocast_enabled(plan.device_type)
        torch.set_autocast_enabled(plan.device_type, False)
        try:
            out = _run(handler, plan, func, args, kwargs)
        finally:
            torch.set_autocast_enabled(plan.device_type, enabled)
    return _cast(out, back[0].dtype) if back else out


def _run(handler: Handler, plan: Plan | Traced, func: Any, args: Any, kwargs: Any) -> Any:
    if handler.emulated and _all_low((args, kwargs), plan.dtype):
        return emulate(handler.op, func, args, kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if handler.treatment != "low" or not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise UnsupportedError(
            f"{handler.op} has no kernel in {str(plan.dtype).removeprefix('torch.')}",
            where=f"device {plan.device_type}",
            why=str(error).splitlines()[0],
            write=f'policy.fp32_math("{handler.op}")   # FP32 inside, low out; or policy.fp32("{handler.op}")',
        ) from error


def pinned_parameter(plan: Plan, args: Any, kwargs: Any) -> Tensor | None:
    """Return the first parameter among the arguments, or behind a view among them, that a rule speaks about."""
    for x in _tensors((args, kwargs)):
        if id(x) in plan.pinned:
            return x
        if x._base is not None and id(x._base) in plan.pinned:
            return x._base
    return None


def _read_pinned(param: Tensor, plan: Plan, casts: WeightCasts, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that reads a pinned parameter in the precision of that parameter's rule.

    Without autocast (O2, O3) the result goes back to the compute dtype, as for a pinned module; views and
    properties of the parameter itself stay what they are.
    """
    handler = Handler(op="", treatment=plan.pinned[id(param)])
    out = _carry_out(handler, plan, casts, func, args, kwargs)
    if plan.autocast or not isinstance(out, Tensor) or out.untyped_storage()._cdata == param.untyped_storage()._cdata:
        return out
    return _cast(out, plan.dtype)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a call's arguments, those in lists too."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors(item)
    elif type(value) is dict:
        yield from _tensors(list(value.values()))


def _floats(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in _tensors((args, kwargs)) if x.dtype in _CASTABLE]


def _all_low(value: Any, dtype: torch.dtype) -> bool:
    """Whether every number with a fraction is in the low dtype: what emulation is for."""
    dtypes = {x.dtype for x in _tensors(value) if x.is_floating_point() or x.is_complex()}
    return dtypes == {dtype}


def _cast(value: Any, dtype: torch.dtype, casts: WeightCasts | None = None) -> Any:
    """Cast floating tensors, those in lists too; float64, complex, integer and bool ones are never cast."""
    if isinstance(value, Tensor):
        if value.dtype not in _CASTABLE:
            return value
        return casts.cast(value, dtype) if casts is not None and isinstance(value, nn.Parameter) else value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype, casts) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype, casts) for key, item in value.items()}
    return value


def _banned(op: str) -> UnsupportedError:
    instead = {"binary_cross_entropy": "binary_cross_entropy_with_logits on the values before the sigmoid"}
    return UnsupportedError(
        f"{op} is banned under this policy",
        where=f"a mezzo.autocast region, op {op}",
        why="its gradient overflows in low precision" if op in instead else "a rule of the policy bans it",
        write=f'{instead.get(op, "another op")}; or allow it: policy.fp32("{op}")',
    )


#: torch.autograd.backward hands itself over to a mode whole; opened, the mode stays active while it runs.
_OPENED_BACKWARD: Final = open_function(cast(types.FunctionType, torch.autograd.backward))
