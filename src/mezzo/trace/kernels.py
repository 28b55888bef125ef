"""What one kernel says about itself: a cast, a view, a product and its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.tensors import LOW, tensors, values_of
from mezzo.weights import Halves

_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_ALLOCATIONS: Final = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())

#: Kernels that put the same numbers elsewhere, and no others.
_REARRANGING: Final = frozenset("clone cat repeat index_select gather index constant_pad_nd flip roll".split())
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


def is_rearranging(kernel: Any) -> bool:
    """Whether what a kernel returns are numbers that it has read."""
    return str(kernel._schema.name).removeprefix("aten::") in _REARRANGING


def is_view(kernel: Any) -> bool:
    """Whether a kernel returns its argument's memory; torch does not mark ``_unsafe_view`` as one."""
    return bool(kernel.is_view) or kernel is torch.ops.aten._unsafe_view.default


def is_allocation(kernel: Any) -> bool:
    """Whether a kernel returns memory that nothing has been written to."""
    return str(kernel._schema.name).removeprefix("aten::") in _ALLOCATIONS


def moved_bytes(kernel: Any, args: Any, kwargs: Any, out: Any, emulated: torch.dtype | None) -> int:
    """Count what a kernel reads and writes; nothing for views and fresh memory.

    Args:
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
        emulated: The format that its FP32 tensors stand for, under emulation.
    """
    if is_view(kernel) or is_allocation(kernel):
        return 0
    sizes = {torch.float32: emulated.itemsize} if emulated is not None else {}
    return sum(each.numel() * sizes.get(each.dtype, each.element_size()) for each in tensors((args, kwargs, out)))


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
    name = str(kernel._schema.name).removeprefix("aten::")
    if name.endswith("_backward"):
        return None
    if "scaled_dot_product" in name:
        name = "attention"
    found = _PRODUCTS.get(name)
    if found is None:
        return None
    position, measure = found
    return measure(args[position:]), args[position].dtype


def flops(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, torch.dtype] | None:
    """Return the floating-point operations of a product and its operands' dtype; ``None`` for any other kernel.

    The formulas are those of ``torch.utils.flop_counter``, and here where it has none.
    """
    from torch.utils.flop_counter import flop_registry

    name = str(kernel._schema.name).removeprefix("aten::")
    dtype = next((tensor.dtype for tensor in tensors(args) if tensor.dtype.is_floating_point), None)
    if dtype is None:
        return None
    if (own := _FLOPS.get(name)) is not None:
        return own(args), dtype
    formula = flop_registry.get(kernel.overloadpacket)
    return None if formula is None else (int(formula(*args, **kwargs, out_val=out)), dtype)


def factors(name: str, reads: Sequence[Read]) -> Sequence[Read]:
    """Return what a product multiplies, of all that it reads: no bias that it adds, and no mask.

    Args:
        name: The kernel's name.
        reads: The tensors that it is given, in their order.
    """
    name = name.removeprefix("aten::")
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
