"""What one kernel says about itself: a cast, a view, a product and its dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

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
    arguments = enumerate(kernel._schema.arguments) if kernel._schema.is_mutable else ()
    return tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among what a kernel is given or returns, in their order, those of its lists too."""
    opened = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [leaf for leaves in opened for leaf in leaves if isinstance(leaf, Tensor)]


def read_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are read from memory; an expanded tensor has fewer than its elements take."""
    storage, dense_bytes = _storage(tensor), tensor.numel() * tensor.element_size()
    return dense_bytes if storage is None else min(dense_bytes, storage.nbytes())


def moved_bytes(
    kernel: Any, operands: Sequence[Tensor], results: Sequence[Tensor], emulated: torch.dtype | None
) -> int:
    """Count what a kernel reads and writes, each tensor once.

    Args:
        kernel: The kernel; no view, and no allocation.
        operands: The tensors that it reads.
        results: Those that it returns.
        emulated: The format that its FP32 tensors stand for, under emulation.
    """

    def size(tensor: Tensor) -> int:
        read = read_bytes(tensor)
        return read * emulated.itemsize // 4 if emulated is not None and tensor.dtype == torch.float32 else read

    if bare_name(kernel) in _LOOKS_UP:
        return 2 * sum(map(size, results)) + sum(size(tensor) for tensor in operands if not tensor.is_floating_point())
    return sum({id(tensor): size(tensor) for tensor in (*operands, *results)}.values())


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
        labelled = None if storage is None else self._labels.get(storage._cdata)
        return None if labelled is None else labelled[0]

    def put(self, tensors: Iterable[Tensor], label: Label) -> None:
        """Label the storages of tensors."""
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None:
                # The weak reference keeps the address from being used again.
                self._labels[storage._cdata] = (label, StorageWeakRef(storage))  # type: ignore[no-untyped-call]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or that of the values of a sparse one; ``None`` for opaque layouts."""
    try:
        is_whole = tensor.layout == torch.strided and not tensor.is_nested
        return (tensor if is_whole else values_of(tensor)).untyped_storage()
    except RuntimeError:  # torch has no list of the layouts without a storage; an unlabelled tensor is an activation
        return None


# Products -------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """How a product is measured, from its operands.

    Attributes:
        first: The position of the first operand: behind the term that it adds.
        sizes: Its dimensions by name; ``None`` where it has none that matter.
        flops: Its operations; ``None`` where ``torch.utils.flop_counter`` has a formula.
    """

    first: int = 0
    sizes: Callable[[tuple[Any, ...]], Shape] | None = None
    flops: Callable[[tuple[Any, ...]], int] | None = None


def _scaled_flops(operands: tuple[Any, ...]) -> int:
    a, b = operands[:2]  # (n, k), (k, m); where two elements share a byte, k is half as long
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1]) * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)


def _grouped_flops(operands: tuple[Any, ...]) -> int:
    a, b = operands[:2]  # the groups lie along the first dimension, or one after the other along rows or along K
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
    return int(2 * a.numel() * b.shape[-1] // groups)


def _vector_flops(operands: tuple[Any, ...]) -> int:
    return 2 * int(operands[0].numel())


def _weights(operands: tuple[Any, ...]) -> Sequence[Tensor]:
    """Return the weights of a recurrent layer: one kernel takes a list, another one argument for each."""
    return operands[1] if isinstance(operands[1], (list, tuple)) else operands[1:3]


def _recurrent_flops(operands: tuple[Any, ...]) -> int:
    weights = sum(weight.numel() for weight in _weights(operands) if weight.dim() > 1)
    return int(2 * operands[0].numel() // operands[0].shape[-1] * weights)


def _matrices(operands: tuple[Any, ...]) -> Shape:
    a, b = operands[:2]  # (..., M, K), (..., K, N)
    return ("M", a.shape[-2]), ("N", b.shape[-1]), ("K", a.shape[-1])


def _convolution(operands: tuple[Any, ...]) -> Shape:
    weight, transposed, groups = operands[1], operands[6], operands[8]
    inputs, outputs = (weight.shape[0] // groups, weight.shape[1]) if transposed else (
        weight.shape[1], weight.shape[0] // groups
    )  # fmt: skip
    if groups > 1 and inputs == 1:  # depthwise: no sum over channels, all of them side by side
        return (("channels", groups * outputs),)
    return ("channels in", inputs), ("channels out", outputs)


def _attention(operands: tuple[Any, ...]) -> Shape:
    query, key, value = operands[:3]  # (batch, heads, tokens, head_dim)
    widths = [("head_dim", query.shape[-1])]
    if value.shape[-1] != query.shape[-1]:
        widths.append(("value head_dim", value.shape[-1]))
    return ("queries", query.shape[-2]), ("keys", key.shape[-2]), *widths


def _recurrent(operands: tuple[Any, ...]) -> Shape:
    features, hidden = (weight.shape[-1] for weight in _weights(operands)[:2])
    return ("batch", operands[0].shape[1]), ("input features", features), ("hidden features", hidden)


# By aten kernel.
_PRODUCTS: Final[Mapping[str, _Measured]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), _Measured(0, _matrices)),
    "_scaled_mm_v2": _Measured(0, _matrices, _scaled_flops),
    "_grouped_mm": _Measured(0, None, _grouped_flops),
    **dict.fromkeys(("addmm", "baddbmm"), _Measured(1, _matrices)),
    "addbmm": _Measured(1, _matrices, lambda operands: 2 * operands[0].numel() * operands[1].shape[-1]),
    **dict.fromkeys(("mv", "dot", "vdot"), _Measured(0, None, _vector_flops)),
    "addmv": _Measured(1, None, _vector_flops),
    "addr": _Measured(1, None, lambda operands: 2 * operands[0].numel() * operands[1].numel()),
    "convolution": _Measured(0, _convolution),
    "attention": _Measured(0, _attention),
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), _Measured(0, _recurrent, _recurrent_flops)),
}


@functools.cache
def _measured(kernel: Any) -> _Measured:
    name = bare_name(kernel)
    return _PRODUCTS.get("attention" if _is_attention(name) else name, _Measured())


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name and not name.endswith("_backward")


@functools.cache
def _formula(kernel: Any) -> Callable[..., Any] | None:
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(kernel.overloadpacket)


def product(kernel: Any, args: tuple[Any, ...]) -> tuple[Shape, torch.dtype] | None:
    """Return a product's dimensions by name and its operands' dtype; ``None`` for any other kernel."""
    first, sizes, _ = _measured(kernel)
    return None if sizes is None else (sizes(args[first:]), args[first].dtype)


def flops(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, torch.dtype] | None:
    """Return the floating-point operations of a product and its operands' dtype; ``None`` for any other kernel."""
    (first, _, counted), formula = _measured(kernel), _formula(kernel)
    dtypes = (tensor.dtype for tensor in tensors_in(*args) if tensor.dtype.is_floating_point)
    dtype = next(dtypes, None) if counted or formula else None
    if dtype is None:
        return None
    if counted is not None:
        return counted(args[first:]), dtype
    return None if formula is None else (int(formula(*args, **kwargs, out_val=out)), dtype)


def factors(kernel: Any, reads: Sequence[Read]) -> Sequence[Read]:
    """Return the tensors that a product multiplies, without the bias that it adds and without a mask.

    Args:
        kernel: The product.
        reads: The tensors that it reads, in their order.
    """
    first = _measured(kernel).first
    return reads[first : first + (3 if _is_attention(bare_name(kernel)) else 2)]
