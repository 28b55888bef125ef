"""What one kernel says about itself: a cast, a view, a product and its dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.tensors import LOW, values_of
from mezzo.weights import Halves

_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_ALLOCATIONS: Final = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())

#: Kernels that put the same numbers elsewhere, and no others.
_REARRANGING: Final = frozenset("clone cat repeat index_select gather index constant_pad_nd flip roll".split())
#: Kernels that read of a table only what they give.
_LOOKS_UP: Final = frozenset("embedding gather index index_select".split())
#: Products that add a term, which stands first.
_ADDING: Final = frozenset("addmm baddbmm addbmm addmv addr".split())

Shape = tuple[tuple[str, int], ...]
Label = TypeVar("Label")
Read = TypeVar("Read")


def is_cast(kernel: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a kernel converts one floating dtype to another."""
    return (
        kernel is torch.ops.aten._to_copy.default
        and args[0].dtype != out.dtype
        and args[0].dtype.is_floating_point
        and out.dtype.is_floating_point
    )


def is_free_cast(kernel: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a kernel returns the high half of a weight that is stored in halves, which moves nothing."""
    casts = kernel in (torch.ops.aten._to_copy.default, torch.ops.aten._lazy_clone.default)
    return casts and isinstance(args[0], Halves) and out.dtype == args[0].hi.dtype


def is_rounding(kernel: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a kernel converts floating numbers or integers to a low format."""
    return kernel is torch.ops.aten._to_copy.default and out.dtype in LOW and args[0].dtype != out.dtype


@functools.cache
def is_rearranging(kernel: Any) -> bool:
    """Whether what a kernel returns are numbers that it has read."""
    return bare_name(kernel) in _REARRANGING


@functools.cache
def is_view(kernel: Any) -> bool:
    """Whether a kernel returns its argument's memory; torch does not mark ``_unsafe_view`` as one."""
    return bool(kernel.is_view) or kernel is torch.ops.aten._unsafe_view.default


@functools.cache
def is_allocation(kernel: Any) -> bool:
    """Whether a kernel returns memory that nothing has been written to."""
    return bare_name(kernel) in _ALLOCATIONS


@functools.cache
def bare_name(kernel: Any) -> str:
    """Return a kernel's name without that of torch's library: ``_softmax``."""
    return str(kernel._schema.name).removeprefix("aten::")


@functools.cache
def written_places(kernel: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that a kernel writes to."""
    each = enumerate(kernel._schema.arguments) if kernel._schema.is_mutable else ()
    return tuple((n, a.name) for n, a in each if a.alias_info is not None and a.alias_info.is_write)


def flat(*values: Any) -> Iterator[Any]:
    """Yield what a kernel is given or returns, opening its lists: a schema knows no other containers."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among what a kernel is given or returns, in their order."""
    return [leaf for leaf in flat(*values) if isinstance(leaf, Tensor)]


def read_bytes(tensor: Tensor) -> int:
    """Return what there is to read of a tensor: of an expanded one, what is in memory."""
    storage, whole = _storage(tensor), tensor.numel() * tensor.element_size()
    return whole if storage is None else min(whole, storage.nbytes())


def moved_bytes(kernel: Any, given: Sequence[Tensor], results: Sequence[Tensor], emulated: torch.dtype | None) -> int:
    """Count what a kernel reads and writes, each tensor once.

    Args:
        kernel: The kernel; no view, and no allocation.
        given: The tensors that it is given.
        results: Those that it returns.
        emulated: The format that its FP32 tensors stand for, under emulation.
    """

    def size(tensor: Tensor) -> int:
        read = read_bytes(tensor)
        return read * emulated.itemsize // 4 if emulated is not None and tensor.dtype == torch.float32 else read

    if bare_name(kernel) in _LOOKS_UP:
        return 2 * sum(map(size, results)) + sum(size(each) for each in given if not each.is_floating_point())
    return sum({id(each): size(each) for each in (*given, *results)}.values())


def multiple_of(dtype: torch.dtype) -> int | None:
    """Return what dimensions should be multiples of in this format; ``None`` where it does not matter."""
    if dtype in LOW:
        return 8
    return 16 if dtype in _FP8 else None


class Storages(Generic[Label]):
    """A label for each storage, which lasts as long as this object, though it keeps no memory alive."""

    def __init__(self) -> None:
        self._labels: dict[int, tuple[Label, StorageWeakRef]] = {}

    def get(self, tensor: Tensor) -> Label | None:
        """Return the label of a tensor's storage."""
        storage = _storage(tensor)
        found = None if storage is None else self._labels.get(storage._cdata)
        return None if found is None else found[0]

    def put(self, each: Iterable[Tensor], label: Label, *, replace: bool = True) -> None:
        """Label the storages of tensors."""
        for tensor in each:
            storage = _storage(tensor)
            if storage is not None and (replace or storage._cdata not in self._labels):
                # The weak reference keeps the address from being used again.
                self._labels[storage._cdata] = (label, StorageWeakRef(storage))  # type: ignore[no-untyped-call]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or that of the numbers that it holds; opaque ones have none."""
    try:
        is_whole = tensor.layout == torch.strided and not tensor.is_nested
        return (tensor if is_whole else values_of(tensor)).untyped_storage()
    except RuntimeError:  # torch keeps no list of the layouts that have none; what is not labelled is an activation
        return None


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    mine, theirs = _storage(one), _storage(other)
    return mine is not None and theirs is not None and bool(mine._cdata == theirs._cdata)


# Products -------------------------------------------------------------------------------------------


def product(kernel: Any, args: tuple[Any, ...]) -> tuple[Shape, torch.dtype] | None:
    """Return a product's dimensions by name and its operands' dtype; ``None`` for any other kernel."""
    found = _measured_by(kernel)
    if found is None:
        return None
    position, measure = found
    return measure(args[position:]), args[position].dtype


@functools.cache
def _measured_by(kernel: Any) -> tuple[int, Callable[[tuple[Any, ...]], Shape]] | None:
    name = bare_name(kernel)
    if "scaled_dot_product" in name and not name.endswith("_backward"):
        name = "attention"
    return _PRODUCTS.get(name)


def flops(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, torch.dtype] | None:
    """Return the floating-point operations of a product and its operands' dtype; ``None`` for any other kernel.

    The formulas are those of ``torch.utils.flop_counter``, and here where it has none.
    """
    formula = _formula(kernel)
    dtype = formula and next((tensor.dtype for tensor in tensors_in(*args) if tensor.dtype.is_floating_point), None)
    return None if formula is None or dtype is None else (formula(args, kwargs, out), dtype)


@functools.cache
def _formula(kernel: Any) -> Callable[[Any, Any, Any], int] | None:
    """Return what counts a product's operations, from its arguments and its result."""
    from torch.utils.flop_counter import flop_registry

    own, torchs = _FLOPS.get(bare_name(kernel)), flop_registry.get(kernel.overloadpacket)
    if own is not None:
        return lambda args, kwargs, out: own(args)
    return None if torchs is None else lambda args, kwargs, out: int(torchs(*args, **kwargs, out_val=out))


def factors(kernel: Any, reads: Sequence[Read]) -> Sequence[Read]:
    """Return what a product multiplies, of all that it reads: no bias that it adds, and no mask.

    Args:
        kernel: The product.
        reads: The tensors that it is given, in their order.
    """
    name = bare_name(kernel)
    last = 3 if "scaled_dot_product" in name else 2
    return reads[1:3] if name in _ADDING else reads[:last]


def _scaled_flops(args: tuple[Any, ...]) -> int:
    a, b = args[:2]  # (n, k), (k, m); where two elements share a byte, k is half as long
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1]) * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)


def _grouped_flops(args: tuple[Any, ...]) -> int:
    a, b = args[:2]  # the groups lie along the first dimension, or one after the other along rows or along K
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
    return int(2 * a.numel() * b.shape[-1] // groups)


def _recurrent_flops(args: tuple[Any, ...]) -> int:
    weights = args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    return int(2 * args[0].numel() // args[0].shape[-1] * sum(each.numel() for each in weights if each.dim() > 1))


_FLOPS: Final[Mapping[str, Callable[[tuple[Any, ...]], int]]] = {
    "_grouped_mm": _grouped_flops,
    "_scaled_mm_v2": _scaled_flops,
    **dict.fromkeys(("mv", "dot", "vdot"), lambda args: 2 * args[0].numel()),
    "addmv": lambda args: 2 * args[1].numel(),
    "addr": lambda args: 2 * args[1].numel() * args[2].numel(),
    "addbmm": lambda args: 2 * args[1].numel() * args[2].shape[-1],
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), _recurrent_flops),
}


def _matrices(operands: tuple[Any, ...]) -> Shape:
    a, b = operands[:2]  # (..., M, K), (..., K, N)
    return ("M", a.shape[-2]), ("N", b.shape[-1]), ("K", a.shape[-1])


def _convolution(operands: tuple[Any, ...]) -> Shape:
    weight, transposed, groups = operands[0], operands[5], operands[7]
    inputs, outputs = (weight.shape[0] // groups, weight.shape[1]) if transposed else (
        weight.shape[1], weight.shape[0] // groups
    )  # fmt: skip
    if groups > 1 and inputs == 1:  # depthwise: no sum over channels, all of them side by side
        return (("channels", groups * outputs),)
    return ("channels in", inputs), ("channels out", outputs)


def _attention(args: tuple[Any, ...]) -> Shape:
    query, key, value = args[:3]  # (batch, heads, tokens, head_dim)
    widths = [("head_dim", query.shape[-1])]
    if value.shape[-1] != query.shape[-1]:
        widths.append(("value head_dim", value.shape[-1]))
    return ("queries", query.shape[-2]), ("keys", key.shape[-2]), *widths


def _recurrent(args: tuple[Any, ...]) -> Shape:
    weights = args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    features, hidden = weights[0].shape[-1], weights[1].shape[-1]
    return ("batch", args[0].shape[1]), ("input features", features), ("hidden features", hidden)


# By aten kernel: the position of the operand whose dtype counts, and what reads the dimensions from it and the rest.
_PRODUCTS: Final[Mapping[str, tuple[int, Callable[[tuple[Any, ...]], Shape]]]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_scaled_mm_v2"), (0, _matrices)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), (1, _matrices)),
    "convolution": (1, _convolution),
    "attention": (0, _attention),
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), (0, _recurrent)),
}
