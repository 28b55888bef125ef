"""What has no kernel for a dtype: it runs in FP32, or the error says what to write."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor

from mezzo.cast.emulate import without_autocast
from mezzo.cast.notes import WATCHERS, during
from mezzo.dispatch import OpOverload, OpOverloadPacket
from mezzo.errors import PolicyError, UnsupportedError
from mezzo.policy.ops import VIEWS, is_in_place, resolve
from mezzo.policy.rules import both
from mezzo.tensors import LOW, dtype_name, mapped, tensors

#: How torch, and those who write operators for it, say that there is no kernel for a dtype; and what they say of
#: arguments that do not go together, or are to be integers.
_SAYS_NO_KERNEL: Final = re.compile(r"not implemented for|not supported|nsupported dtype|but (got|found)")
_SAYS_MISMATCH: Final = re.compile(
    r"same (dtype|type|scalar type)|xpected (scalar type|dtype|object of)|\b(Long|Int)\b"
)
#: What an error says that may be about dtypes.
_MENTIONS_DTYPE: Final = re.compile(r"[Dd]type|[Ss]calar ?[Tt]ype|types other|[Ff]loat|[Hh]alf|[Pp]recision")
#: How they write these dtypes.
_DTYPE_WORDS: Final = {
    torch.float16: ("Half", "float16"),
    torch.bfloat16: ("BFloat16", "bfloat16"),
    torch.float32: ("Float", "float32"),
}
#: Complex numbers of two times 16 bits, which nothing else casts.
LOW_COMPLEX: Final = frozenset(dtype.to_complex() for dtype in LOW) - {torch.complex64}
#: The dtypes that replace those of 16 bits where an op has no kernel for them.
_WIDE: Final = {**dict.fromkeys(LOW, torch.float32), **dict.fromkeys(LOW_COMPLEX, torch.complex64)}
#: What is not called a second time with other tensors: it returns their memory, or does something to them.
_NEVER_RERUN: Final = VIEWS | {"__set__", "__setitem__", "__delitem__", "set_", "resize_", "resize_as_", "swap_tensors"}


def says_no_kernel(error: RuntimeError, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether an error says that there is no kernel for one of some dtypes."""
    text = str(error)
    is_about_kernels = (
        _SAYS_NO_KERNEL.search(text) and not _SAYS_MISMATCH.search(text) and not isinstance(error, UnsupportedError)
    )
    return bool(is_about_kernels) and any(word in text for dtype in dtypes for word in _DTYPE_WORDS.get(dtype, ()))


def retry_in_fp32(error: RuntimeError, function: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """Run a function in FP32 that raises for the 16 bits that it was given.

    Whether these are the reason is found by trying: errors have many words. torch asks for a kernel before it writes or
    draws anything. What writes to a tensor of 16 bits writes there what comes out, rounded.

    Args:
        error: What the function raised.
        function: A function of torch's, or an operator of others.
        args: Its arguments.
        kwargs: Those with names.
        device_type: The device of the region.

    Raises:
        RuntimeError: The error, where FP32 is no cure; what the function raises in FP32, where a kernel was missing.
        UnsupportedError: There is no kernel for FP32 either.
    """
    low_dtypes = {x.dtype for x in tensors((args, kwargs)) if x.dtype in _WIDE}
    name = getattr(function, "__name__", "")
    if (
        not low_dtypes
        or name in _NEVER_RERUN
        or isinstance(error, UnsupportedError)
        or not _MENTIONS_DTYPE.search(str(error))
    ):
        raise error
    writes = (name.endswith("_") and not name.endswith("__")) or is_in_place(name) or bool(kwargs.get("inplace"))
    if writes and "without overflow" in str(error):
        raise error  # a number that what is written to cannot hold: -1e9 would be written as minus infinity
    wide_args, wide_kwargs = mapped((args, kwargs), _widened)
    try:
        with without_autocast([device_type]):
            if WATCHERS:
                out = during("widened", function, functools.partial(function, *wide_args, **wide_kwargs))
            else:
                out = function(*wide_args, **wide_kwargs)
    except RuntimeError as fp32_error:
        if says_no_kernel(fp32_error, [torch.float32]):
            raise no_kernel(name_of(function), (*low_dtypes, torch.float32), error, device_type) from error
        raise (fp32_error if says_no_kernel(error, low_dtypes) else error) from None
    written, computed = kwargs.get("out"), wide_kwargs.get("out")
    if writes:
        written, computed = args[0], wide_args[0]
    if written is None:
        write_back(function, (args, kwargs), (wide_args, wide_kwargs))
        return out
    _copy(written, computed)
    return written if out is not None else None


def _widened(x: Tensor) -> Tensor:
    if (wide := _WIDE.get(x.dtype)) is None:
        return x
    return cast(Tensor, during("cast", wide, x.to, wide)) if WATCHERS else x.to(wide)


def _copy(target: Any, computed: Any) -> None:
    for old, new in zip(tensors([target]), tensors([computed]), strict=True):
        if old is not new:
            if old.shape != new.shape:  # as out= does
                old.resize_(new.shape)
            old.copy_(new)


def write_back(function: Any, original: tuple[Any, Any], run_with: tuple[Any, Any]) -> None:
    """Copy what an operator wrote to casts of its arguments into the arguments themselves.

    Args:
        function: The operator; for any other function nothing is copied.
        original: The program's arguments, and those with names.
        run_with: The casts of these that the operator was run with.
    """
    for index, name in _written_arguments(function) if isinstance(function, OpOverload | OpOverloadPacket) else ():
        argument, cast_argument = (
            args[index] if index < len(args) else named.get(name) for args, named in (original, run_with)
        )
        _copy(argument, cast_argument)


@functools.lru_cache(maxsize=1024)
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operator writes to: where they stand, and their names."""
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, x) for x in operator.overloads()]
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(overloads[0]._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def no_kernel(op: str, dtypes: Iterable[torch.dtype], error: RuntimeError, device_type: str) -> UnsupportedError:
    """Build the error of an op without a kernel for what it is to run in; the module around it adds its path.

    Args:
        op: Its name, as rules have it.
        dtypes: What it cannot run in.
        error: What torch says.
        device_type: The device.
    """
    dtypes = [*dict.fromkeys(dtypes)]
    cure = "operands of a dtype that it has a kernel for, integers or x.double(), which nothing casts"
    refusal = UnsupportedError(
        f"{op} has no kernel in {' or '.join(map(dtype_name, dtypes))}",
        where=f"op {op}, device {device_type}, in a mezzo.autocast region",
        why=str(error).splitlines()[0],
        write=f"{cure}; no rule helps, not {both(f'fp32={op}')}"
        if torch.float32 in dtypes
        else f"{both(f'fp32_math={op}')}: FP32 inside, low out; or {both(f'fp32={op}')}",
    )
    refusal.awaits_place = True
    return refusal


def name_of(function: Any) -> str:
    """Return the name by which a rule can speak about a function: ``erfcx``, ``mylib::fused``."""
    packet = function.overloadpacket if isinstance(function, OpOverload) else function
    name = packet._qualified_op_name if isinstance(packet, OpOverloadPacket) else str(function.__name__)
    try:
        return resolve(name, in_place=True)
    except PolicyError:
        return name
