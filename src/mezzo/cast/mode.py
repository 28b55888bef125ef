"""The function mode that carries out what a policy treats differently from torch."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezzo.cast.arguments import BY_ARGUMENTS, SPARSE_LAYOUTS, STRIDED, cast_sparse
from mezzo.cast.casts import WeightCasts, widest
from mezzo.cast.differences import (
    DIFFERENTIATE,
    INPUT_ONLY,
    OPENED_BY_NAME,
    Differences,
    Direct,
    Handler,
    Traced,
    in_place_form,
    is_called_in_place,
    open_function,
    remember,
    traced,
)
from mezzo.cast.emulate import emulate, with_dtypes_of_states, without_autocast
from mezzo.cast.fallback import LOW_COMPLEX, no_kernel, retry_in_fp32, says_no_kernel, write_back
from mezzo.cast.notes import WATCHERS, during
from mezzo.cast.products import cast_as, operands_or_reason, product
from mezzo.compiling import casts_are_placed, compiled_inside_alone, is_exporting, is_scripted
from mezzo.dispatch import (
    OpOverload,
    OpOverloadPacket,
    function_modes,
    innermost_function_mode,
    is_batched,
    is_transformed,
    num_dispatch_modes,
    num_function_modes,
    unwrapped,
)
from mezzo.errors import UnsupportedError
from mezzo.policy.ops import QUANTISED
from mezzo.policy.rules import both
from mezzo.tensors import CASTABLE, tensors

#: What ``torch.ops.aten.mm`` is, and ``torch.ops.aten.mm.default``.
_OPERATORS: Final = (OpOverloadPacket, OpOverload)


_SET_ITEM: Final = Tensor.__setitem__
_CASTABLE: Final = frozenset(CASTABLE)
#: Arguments that hold no tensor.
_HOLDS_NONE: Final = frozenset({type(None), bool, int, float, str})
#: The types in a tuple of sizes.
_INTS: Final = {int}
#: A call for :meth:`PolicyMode._handle`, and one that is left alone.
_NEEDS_HANDLE, _IDLE = object(), Direct(torch.float32, None, None)
_NO_NAMES: Final = types.MappingProxyType[str, Any]({})


class ModeTable(NamedTuple):
    """What a mode looks functions up in: worked out once for each region.

    Attributes:
        per_device: What it does on each device.
        autocasts: The devices on which ops are cast.
        only: That of the one device; ``None`` where there are several.
        keys: A text for what it does on each device.
        key: That of the one device, by which compiled code finds it; none where it is about certain tensors.
        direct: How eager code carries out most functions at once; ``None`` where each call is looked at in full.
    """

    per_device: Mapping[str, Differences]
    autocasts: Sequence[str]
    only: Differences | None
    keys: tuple[str, ...]
    key: str
    direct: Mapping[Callable[..., Any], Direct | None] | None

    @classmethod
    def of(cls, per_device: Sequence[Differences]) -> ModeTable:
        """Work it out."""
        only = per_device[0] if len(per_device) == 1 else None
        has_own = any(
            differences.pinned or differences.memories for differences in per_device
        )  # which no text can stand for
        return cls(
            per_device={differences.device_type: differences for differences in per_device},
            autocasts=[differences.device_type for differences in per_device if differences.autocast],
            only=only,
            keys=tuple([differences.key for differences in per_device]),
            key="" if only is None or has_own else remember(only),
            direct=None if only is None or only.pinned else only.direct,
        )


class PolicyMode(TorchFunctionMode):
    """Handle the functions a policy treats differently, and open Python functions that call them.

    Args:
        table: What it does.
        casts: What casts weights.
        recomputing: Whether it serves what a backward pass runs again.
    """

    def __init__(self, table: ModeTable, casts: WeightCasts, *, recomputing: bool = False) -> None:
        self.casts, self.recomputing = casts, recomputing
        self.per_device, self.autocasts, self.only, self.keys, self.key, self.direct = table
        self.num_inner_regions = 0  # how many regions inside this one are active
        self.is_exported = is_exporting()  # as a region inside of a program is, and none around it

    @compiled_inside_alone
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (torch.compiler.is_dynamo_compiling() or self.direct is None or self.num_inner_regions or WATCHERS):
            direct = self.direct.get(func, _IDLE)
            if direct is _IDLE:
                if type(func) not in _OPERATORS:
                    return self._run_idle(func, args, kwargs or {})
            elif (
                direct is not None and not kwargs and (out := self._run_direct(direct, func, args)) is not _NEEDS_HANDLE
            ):
                return out
        if WATCHERS and func not in DIFFERENTIATE:  # in a backward pass the user's own functions run too
            return during("op", func, self._handle, func, args, kwargs or {})
        return self._handle(func, args, kwargs or {})

    def _run_idle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that is left alone, as most are, and all that read a tensor's attribute."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            return _retry_or_raise(error, cast(Differences, self.only), func, args, kwargs)

    def _run_direct(self, direct: Direct, func: Any, args: Any) -> Any:
        """Run a function on plain operands that are cast; any other call is one for :meth:`_handle`."""
        differences = cast(Differences, self.only)
        device_type, target = differences.device_type, direct.target
        enabled = torch.is_autocast_enabled(device_type)
        if differences.autocast and not (enabled and torch.get_autocast_dtype(device_type) == differences.dtype):
            return func(*args)
        if is_transformed() or num_dispatch_modes() or is_scripted() or torch.compiler.is_exporting():
            return _NEEDS_HANDLE
        if direct.contracts is not None and not direct.contracts(args, _NO_NAMES):
            return _NEEDS_HANDLE
        operands, uncast, is_low = [*args], [], target is not torch.float32
        for index, value in enumerate(args):
            # Asking whether something is a Parameter is a Python call; activations are plain tensors.
            if (is_plain := type(value) is Tensor) or isinstance(value, nn.Parameter):
                if value.layout is not STRIDED:
                    return _NEEDS_HANDLE
                if (dtype := value.dtype) != target:
                    if dtype in _CASTABLE:
                        uncast.append((index, is_plain))
                    elif is_low:
                        return _NEEDS_HANDLE
            elif type(value) not in _HOLDS_NONE and not (type(value) is tuple and {*map(type, value)} <= _INTS):
                return _NEEDS_HANDLE
        # Once it is known that the call is carried out here: uses of weights are counted.
        for index, is_plain in uncast:
            value = args[index]
            operands[index] = value.to(target) if is_plain else self.casts.cast(value, target, is_plain=True)
        torch.set_autocast_enabled(device_type, False)
        try:
            return func(*operands) if direct.emulation is None else direct.emulation(func, *operands)
        except RuntimeError:
            return _NEEDS_HANDLE  # which knows why, and runs into it again
        finally:
            torch.set_autocast_enabled(device_type, enabled)

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        compiling = torch.compiler.is_dynamo_compiling()  # torch.export, which says that it compiles, may run Python
        if self.num_inner_regions:
            return func(*args, **kwargs)
        if not compiling and self.only is not None and _is_idle(func, self.only, args, kwargs):
            return self._run_idle(func, args, kwargs)
        # As under torch.autocast a program that is exported has no casts.
        if not self.is_exported and (is_exporting() if compiling else torch.compiler.is_exporting()):
            return func(*args, **kwargs)
        if self.recomputing and func is torch.autograd.backward:  # a checkpoint inside a checkpoint
            with self:
                return OPENED_BACKWARD(*args, **kwargs)
        if not compiling and func in DIFFERENTIATE:
            # A pass that begins inside the region is to compute as one that begins after it.
            with without_autocast(self.autocasts):
                return func(*args, **kwargs)
        if compiling and casts_are_placed():
            return func(*args, **kwargs)
        # A graph depends on the key of the differences and on no table of theirs.
        differences = traced(self.key, func) if compiling and self.key else self.differences(args, kwargs)
        if differences is None or not _acts(differences):
            return func(*args, **kwargs)
        if isinstance(differences, Traced):
            handler, opened = differences.handler, OPENED_BY_NAME[differences.opened] if differences.opened else None
        else:
            handler, opened = differences.handlers.get(func), differences.opened.get(func)
            if handler is None and isinstance(func, _OPERATORS):
                handler = differences.handler(func)
            if differences.pinned and (param := pinned_parameter(differences, args, kwargs)) is not None:
                treatment = differences.pinned[id(param)]
                if treatment in QUANTISED:
                    handler = handler and differences.as_pinned(handler, treatment)
                elif (form := in_place_form(func, treatment)) is None:
                    return _read_pinned(param, differences, self.casts, func, args, kwargs)
                else:
                    handler = form
        if func is _SET_ITEM and handler is not None:
            return _set_item(self.casts, *args)
        if handler is not None and handler.by_arguments:
            instead = BY_ARGUMENTS[handler.op](args, kwargs)
            if instead is not None and instead.parts is not None:
                with self:
                    return instead.parts()
            if instead is not None:
                handler = next(answer for answer in handler.answers if answer.treatment == instead.treatment)
            elif handler.treatment == "native" and handler.written == "left":
                handler = None
        if handler is not None:
            return _carry_out(handler, differences, self.casts, func, args, kwargs)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        return _run_plain(differences, func, args, kwargs)

    def differences(self, args: Any, kwargs: Any) -> Differences | None:
        """Return the differences for the device of a call's tensors."""
        if self.only is not None:
            return self.only
        device_types = (x.device.type for x in tensors((args, kwargs)))
        return next(
            (self.per_device[device_type] for device_type in device_types if device_type in self.per_device), None
        )


@contextlib.contextmanager
def shadowed() -> Iterator[list[tuple[PolicyMode, int]]]:
    """Silence the regions around this one, and give what :func:`silence` does."""
    outer: list[tuple[PolicyMode, int]] = []
    silence(outer)
    try:
        yield outer
    finally:
        unsilence(outer)


@contextlib.contextmanager
def acting(per_device: Sequence[Differences]) -> Iterator[None]:
    """Activate differences in place of the surrounding ones, with the present casts of weights, or their own."""
    with shadowed() as outer, PolicyMode(ModeTable.of(per_device), casts_inside(outer)):
        yield


def casts_inside(outer: Sequence[tuple[PolicyMode, int]]) -> WeightCasts:
    """Return the casts of weights for a region inside of others: those of the outermost, as long as that lasts."""
    return outer[-1][0].casts if outer and outer[-1][0].casts.keeps else WeightCasts()


def silence(outer: list[tuple[PolicyMode, int]]) -> None:
    """Silence the regions around until :func:`unsilence`, which may follow wherever a signal ends this.

    Args:
        outer: Gets the modes of these regions, the innermost last, each with its count of before.
    """
    for mode in function_modes() if num_function_modes() else ():
        if isinstance(mode, PolicyMode):
            outer.append((mode, mode.num_inner_regions))
            mode.num_inner_regions += 1


def unsilence(outer: Sequence[tuple[PolicyMode, int]]) -> None:
    """Undo the silencing of regions."""
    for mode, count in outer:
        mode.num_inner_regions = count


def acting_modes() -> list[PolicyMode]:
    """Return the modes of the active regions, the innermost last, without those that another one replaces."""
    active = function_modes()
    return [mode for mode in active if isinstance(mode, PolicyMode) and not mode.num_inner_regions]


def acts_here() -> bool:
    """Whether the innermost mode of all is that of a region, in a forward pass."""
    mode = innermost_function_mode()
    return type(mode) is PolicyMode and not mode.num_inner_regions and not mode.recomputing


def acting_differences(args: Any, kwargs: Any) -> Differences | None:
    """Return the differences of the innermost region for a call, where it acts."""
    modes = acting_modes()
    differences = modes[-1].differences(args, kwargs) if modes else None
    return differences if differences is not None and _acts(differences) else None


def _is_idle(func: Any, differences: Differences, args: Any, kwargs: Any) -> bool:
    """Whether nothing is done about a call: of most functions, and of all that read a tensor's attribute."""
    if differences.pinned:
        return False
    if (handler := differences.handlers.get(func)) is not None:
        if not handler.by_arguments or handler.treatment != "native" or handler.written != "left":
            return False
        if BY_ARGUMENTS[handler.op](args, kwargs) is not None:
            return False
    return not (func in differences.opened or func in DIFFERENTIATE or type(func) in _OPERATORS)


def _acts(differences: Differences | Traced) -> bool:
    """Whether differences hold now.

    Nothing is cast where autocast is switched off inside the region, or in the functions of a backward pass; and
    ``torch.autocast`` with another dtype, entered inside, is torch's own, as on devices where regions have no mode.
    """
    device_type = differences.device_type
    return not differences.autocast or (
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == differences.dtype
    )


def _run_plain(differences: Differences | Traced, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that neither the op table nor a rule names.

    Where it has no low kernel it runs in FP32, which a compiled graph cannot try.
    """
    if isinstance(differences, Traced):
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        return _retry_or_raise(error, differences, func, args, kwargs)


def _retry_or_raise(error: RuntimeError, differences: Differences, func: Any, args: Any, kwargs: Any) -> Any:
    """Run in FP32 what has raised, where ops are cast; else, and where FP32 is no cure, raise the error."""
    if not differences.autocast or not _acts(differences) or differences.policy.lists == "device":
        raise error
    return retry_in_fp32(error, func, args, kwargs, differences.device_type)


def _carry_out(
    handler: Handler, differences: Differences | Traced, casts: WeightCasts, func: Any, args: Any, kwargs: Any
) -> Any:
    """Run one function with its treatment, native autocast off for the call."""
    if (
        out_of_place_form := differences.out_of_place_form
        if isinstance(differences, Traced)
        else handler.out_of_place_form
    ) is not None:
        return _write_in_place(handler, out_of_place_form, differences, casts, func, args, kwargs, {})
    if handler.inplace is not None and is_called_in_place(handler.inplace, args, kwargs):
        args, kwargs = args[: handler.inplace], {key: value for key, value in kwargs.items() if key != "inplace"}
        return _write_in_place(handler, func, differences, casts, func, args, kwargs, {"inplace": True})
    if kwargs.get("out") is not None:
        return _write_out(handler, differences, casts, func, args, kwargs)
    if handler.treatment == "fp32" and kwargs.get("dtype") is not None:
        return func(*args, **kwargs)  # the caller's own dtype wins, as in torch's set_opt_dtype
    target = _target(handler, differences, args, kwargs)
    back: torch.dtype | None = None
    if handler.treatment == "fp32_math":
        floats = _floats(args, kwargs)
        back = widest(floats if handler.rounds_to == "widest" else floats[:1])
    out = _compute(handler, differences, casts, func, args, kwargs, target)
    if handler.keeps_states:
        states = (handler.op, (*args, *kwargs.values()), out, differences.dtype)
        return during("emulation", func, with_dtypes_of_states, *states) if WATCHERS else with_dtypes_of_states(*states)
    if handler.low_result:
        return _cast(out, differences.dtype)
    return out if back is None else _cast(out, back)


def _target(handler: Handler, differences: Differences | Traced, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype in which a function computes under its treatment; ``None`` where it is that of its operands."""
    match handler.treatment:
        case "low" | "fp8" | "mxfp8" | "nvfp4":
            return differences.dtype
        case "fp32" | "fp32_math":
            return torch.float32
        case "promote":
            return widest(_floats(args, kwargs))
        case "ban":
            raise _banned(handler)
    return None


def _compute(
    handler: Handler, differences: Differences | Traced, casts: WeightCasts, func: Any, args: Any, kwargs: Any,
    target: torch.dtype | None,
) -> Any:  # fmt: skip
    """Run one function on operands that are cast, native autocast off for the call."""
    original = args, kwargs
    if target is not None:
        if handler.op in INPUT_ONLY:
            args = (*_cast(args[:1], target), *args[1:])
            kwargs = kwargs | {name: _cast(value, target) for name, value in kwargs.items() if name == "input"}
        else:
            args, kwargs = _cast(args, target, casts), kwargs and _cast(kwargs, target, casts)
    if torch.compiler.is_compiling():
        with torch.autocast(differences.device_type, enabled=False):
            return _run(handler, differences, func, args, kwargs, original)
    enabled = torch.is_autocast_enabled(differences.device_type)  # the same, without the cost of entering a context
    torch.set_autocast_enabled(differences.device_type, False)
    try:
        out = _run(handler, differences, func, args, kwargs, original)
    finally:
        torch.set_autocast_enabled(differences.device_type, enabled)
    if "::" in handler.op:
        write_back(func, original, (args, kwargs))
    return out


def _write_in_place(
    handler: Handler, out_of_place_form: Callable[..., Any], differences: Differences | Traced, casts: WeightCasts,
    func: Any, args: Any, kwargs: Any, flags: dict[str, Any],
) -> Any:  # fmt: skip
    """Run a function that writes into its first operand, which keeps its dtype, as another argument may tell it to.

    Where that is the dtype in which it computes it runs itself, on operands that are cast. Else what returns a new
    tensor runs, and the result is rounded, once, to what is written to.
    """
    if not args:
        first, *rest = kwargs.items()
        args, kwargs = (first[1],), dict(rest)
    into = args[0]
    target: torch.dtype | None = None
    match handler.written:
        case "treated":
            target = _target(handler, differences, args, kwargs)
        case "follows":
            target = into.dtype
        case "left" if _all_low((args, kwargs), differences.dtype):
            target = differences.dtype  # emulated; of other dtypes nothing is cast
    if target is None or not target.is_floating_point:
        return _run_plain(differences, func, args, kwargs)
    is_computed_elsewhere = target == differences.dtype and (handler.emulated or handler.recipe is not None)
    if not is_computed_elsewhere and (into.dtype == target or into.dtype not in CASTABLE):
        return _compute(handler, differences, casts, func, args, kwargs | flags, target)
    # What is saved for the backward pass is not what is written to.
    before = into.clone() if into.dtype == target else into
    return into.copy_(_compute(handler, differences, casts, out_of_place_form, (before, *args[1:]), kwargs, target))


def _write_out(
    handler: Handler, differences: Differences | Traced, casts: WeightCasts, func: Any, args: Any, kwargs: Any
) -> Any:
    """Run a function that writes into the tensors of ``out=``, as :func:`_write_in_place` runs one.

    Where autocast is off nothing tells a call of compiled code, which writes its products so, from a model's own.
    """
    into, operands = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
    if handler.written == "left" or not differences.autocast:
        return func(*args, **kwargs)
    dtypes = {target.dtype for target in ((into,) if isinstance(into, Tensor) else into)}
    target = next(iter(dtypes)) if handler.written == "follows" else _target(handler, differences, args, operands)
    if target is None or not target.is_floating_point:
        return _run_plain(differences, func, args, kwargs)
    is_computed_elsewhere = target == differences.dtype and (handler.emulated or handler.recipe is not None)
    if not is_computed_elsewhere and (dtypes == {target} or dtypes.isdisjoint(CASTABLE)):
        return _compute(handler, differences, casts, func, args, kwargs, target)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors((args, operands))):
        return func(*args, **kwargs)  # torch refuses that: nothing differentiates what writes so
    return _put(_compute(handler, differences, casts, func, args, operands, target), into)


def _put(results: Any, into: Any) -> Any:
    """Write results into the tensors of ``out=``, which take their shapes, and return those as the function would."""
    if not isinstance(into, Tensor):
        return type(results)([_put(result, target) for result, target in zip(results, into, strict=True)])
    if into.shape != results.shape:
        into.resize_(results.shape)
    return into.copy_(results)


def _set_item(casts: WeightCasts, x: Tensor, index: Any, value: Any) -> None:
    """Write ``x[index] = value`` with the value in the dtype of ``x``: torch casts it only where no tensor indexes."""
    if isinstance(value, Tensor) and value.dtype != x.dtype and x.is_floating_point() and value.is_floating_point():
        parts = index if type(index) is tuple else (index,)
        if not all(isinstance(part, int | slice | None | types.EllipsisType) for part in parts):
            value = _cast(value, x.dtype, casts, kinds=(*CASTABLE, torch.float64))
    x[index] = value


def _run(
    handler: Handler, differences: Differences | Traced, func: Any, args: Any, kwargs: Any, original: tuple[Any, Any]
) -> Any:
    if handler.recipe is not None and _all_low((args, kwargs), differences.dtype):
        operands = operands_or_reason(handler.op, *original, handler.recipe.multiple)
        if not isinstance(operands, str):
            out = cast_as(operands, handler.op, args, kwargs)
            memories = differences.memories if isinstance(differences, Differences) else ()
            if WATCHERS:
                about = handler.recipe.as_note
                return during("quantised", about, product, out, handler.recipe, memories, operands.weight)
            return product(out, handler.recipe, memories, operands.weight)
    if handler.emulated and _all_low((args, kwargs), differences.dtype):
        if WATCHERS:
            return during("emulation", func, emulate, handler.op, func, args, kwargs)
        return emulate(handler.op, func, args, kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        may_retry = handler.treatment == "promote" or any(x.dtype in LOW_COMPLEX for x in tensors((args, kwargs)))
        if may_retry and not torch.compiler.is_compiling():
            return retry_in_fp32(error, func, args, kwargs, differences.device_type)
        dtypes = {x.dtype for x in _floats(args, kwargs)}
        if handler.treatment == "ban" or not says_no_kernel(error, dtypes) or torch.compiler.is_compiling():
            raise
        raise no_kernel(handler.op, dtypes, error, differences.device_type) from error


def pinned_parameter(differences: Differences, args: Any, kwargs: Any) -> Tensor | None:
    """Return the first parameter among the arguments, or behind a view among them, that a rule speaks about.

    A tensor that cannot be one is not asked who it is: torch.compile would make a graph for that tensor alone.
    """
    for x in tensors((args, kwargs)):
        for tensor in (x, x._base):
            if (
                isinstance(tensor, Tensor if differences.pins_buffers else nn.Parameter)
                and id(tensor) in differences.pinned
            ):
                return tensor
    return None


def _read_pinned(param: Tensor, differences: Differences, casts: WeightCasts, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that reads a pinned parameter in the precision of that parameter's rule.

    Without autocast (O2, O3) the result goes back to the compute dtype, but in a module pinned to FP32, or where it may
    be an FP32 buffer's next value, as what has its shape; views and properties of the parameter stay what they are.
    """
    handler = Handler(op="", treatment=differences.pinned[id(param)], written="treated")
    out = _carry_out(handler, differences, casts, func, args, kwargs)
    is_given = kwargs.get("out") is not None or not isinstance(out, Tensor) or _storage(out) == _storage(param)
    if is_given or not differences.returns_compute_dtype:
        return out
    if handler.treatment == "promote" and out.shape == param.shape and not is_batched(out):
        return out  # that of a buffer
    return _cast(out, differences.dtype)


def _storage(x: Tensor) -> Any:
    """Name a tensor's memory; what torch.func wraps tensors in has none of its own."""
    return unwrapped(x).untyped_storage()._cdata


def _floats(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in tensors((args, kwargs)) if x.dtype in CASTABLE]


def _all_low(value: Any, dtype: torch.dtype) -> bool:
    """Whether every number with a fraction is in the low dtype: what emulation is for. Sparse kernels are torch's."""
    is_any = False
    for x in tensors(value):
        if x.dtype == dtype:
            is_any = True
        elif x.is_floating_point() or x.is_complex():
            return False
        if x.layout != torch.strided:
            return False
    return is_any


def _cast(
    value: Any, dtype: torch.dtype, casts: WeightCasts | None = None, kinds: Container[torch.dtype] = CASTABLE
) -> Any:
    """Cast floating tensors, those in lists too; float64, complex, integer and bool ones are never cast."""
    if isinstance(value, Tensor):
        if value.dtype == dtype or value.dtype not in kinds:
            return value
        if dtype == torch.float32 and value.requires_grad and value.layout in SPARSE_LAYOUTS:  # never low
            return cast_sparse(value, dtype)
        # Asking whether something is a Parameter is a Python call; activations are plain tensors.
        if casts is None or type(value) is Tensor or not isinstance(value, nn.Parameter):
            return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)
        return during("cast", dtype, casts.cast, value, dtype) if WATCHERS else casts.cast(value, dtype)
    if type(value) in (tuple, list) or type(value).__module__ == "torch.return_types":
        return type(value)([_cast(item, dtype, casts) for item in value])
    if type(value) is dict:
        return {key: _cast(item, dtype, casts) for key, item in value.items()}
    return value


def _banned(handler: Handler) -> UnsupportedError:
    op = handler.op
    instead = {"binary_cross_entropy": "binary_cross_entropy_with_logits on the values before the sigmoid"}
    error = UnsupportedError(
        f"{op} is banned under this policy",
        where=f"a mezzo.autocast region, op {op}",
        why=handler.reason
        or ("its gradient overflows in low precision" if op in instead else "a rule of the policy bans it"),
        write=f"{instead.get(op, 'another op')}; or allow it: {both(f'fp32={op}')}",
    )
    error.awaits_place = True
    return error


#: torch.autograd.backward hands itself over to a mode whole; opened, the mode stays active while it runs.
OPENED_BACKWARD: Final = open_function(cast(types.FunctionType, torch.autograd.backward))
