"""What all rooms say of tensors: dtypes and their names, tensors in containers, memory order, writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.releases import private

#: The dtypes of low-precision weights and arithmetic.
LOW: Final = (torch.float16, torch.bfloat16)
#: The dtypes that a policy converts. FP64, integers and complex numbers stay what they are.
CASTABLE: Final = (torch.float32, *LOW)

#: The words for a dtype, wherever one stands.
DTYPES: Final[dict[str, Any]] = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
}  # fmt: skip

_VERSION: Final = attrgetter("_version")

#: torch's own functions of nested containers, also of those that programs have registered.
tree_flatten: Final[Callable[..., tuple[list[Any], Any]]] = private("torch.utils._pytree.tree_flatten")
tree_is_leaf: Final[Callable[..., bool]] = private("torch.utils._pytree.tree_is_leaf")
tree_leaves: Final[Callable[..., list[Any]]] = private("torch.utils._pytree.tree_leaves")
tree_map: Final[Callable[..., Any]] = private("torch.utils._pytree.tree_map")
tree_map_only: Final[Callable[..., Any]] = private("torch.utils._pytree.tree_map_only")
tree_unflatten: Final[Callable[..., Any]] = private("torch.utils._pytree.tree_unflatten")

#: torch's own functions of many tensors at once, as few kernels as there are devices and dtypes.
foreach_copy_: Final[Callable[..., None]] = private("torch._foreach_copy_")
foreach_mul: Final[Callable[..., list[Tensor]]] = private("torch._foreach_mul")
foreach_mul_: Final[Callable[..., None]] = private("torch._foreach_mul_")
foreach_norm: Final[Callable[..., list[Tensor]]] = private("torch._foreach_norm")
foreach_zero_: Final[Callable[..., None]] = private("torch._foreach_zero_")


# Dtypes -----------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """Write a dtype as policies do.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(word: Any) -> Any:
    """Return the dtype that a word stands for, whatever its case; what is none is returned as it is.

    Example:
        >>> dtype_of("BF16"), dtype_of("torch.float16"), dtype_of(torch.float32), dtype_of("int4")
        (torch.bfloat16, torch.float16, torch.float32, 'int4')
    """
    return DTYPES.get(word.removeprefix("torch.").lower(), word) if isinstance(word, str) else word


def has_fraction(dtype: torch.dtype) -> bool:
    """Whether a dtype holds floating or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def overflows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values become infinite in another dtype; a host sync where they could."""
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return False
    return bool((tensor.isfinite() & ~tensor.to(dtype).isfinite()).any())


def described(tensor: Tensor) -> str:
    """Write a tensor's dtype and shape.

    Example:
        >>> described(torch.zeros(4, 3))
        'float32 [4, 3]'
    """
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


# Containers -------------------------------------------------------------------------------------------


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, such as a call's arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def each_tensor(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers and dataclasses, such as a model's output, in order, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from each_tensor(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from each_tensor(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from each_tensor(getattr(value, field.name, None), f"{path}.{field.name}")


# Memory -----------------------------------------------------------------------------------------------


def mark(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written in place or given other memory.

    What is written through ``.data`` leaves no trace. Tensors made in inference mode have no version, sparse and opaque
    ones no address.
    """
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:
        version = -1 if tensor.is_inference() else tensor._version
    try:
        return version, tensor.data_ptr()
    except RuntimeError:
        return version, 0


def marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the :func:`mark` of each of many tensors."""
    try:
        return list(zip(map(_VERSION, tensors), map(Tensor.data_ptr, tensors), strict=True))
    except RuntimeError:
        return [mark(tensor) for tensor in tensors]


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the first half of many tensors' marks: what changes when one is written in place."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [mark(tensor)[0] for tensor in tensors]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the other half: what changes when one is given other memory."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return [mark(tensor)[1] for tensor in tensors]


def flat(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """View tensors that lie in memory alike as vectors in memory order; None where they do not.

    Element ``i`` of one vector belongs to element ``i`` of each other, whatever the common layout (channels last,
    transposed), as long as it has neither gaps nor overlaps.
    """
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.detach().view(-1) for tensor in tensors)
    dense = torch.empty_like(first, device="meta").stride() == first.stride()
    if not dense or any(tensor.stride() != first.stride() for tensor in tensors):
        return None
    return tuple(t.detach().as_strided((t.numel(),), (1,), t.storage_offset()) for t in tensors)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, without waiting unless it goes to the CPU.

    There the host would read memory that nothing has arrived in yet: ``non_blocking=True`` returns at once.

    References:
        https://github.com/pytorch/pytorch/issues/86264
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


#: Layouts whose numbers lie in one tensor of their own.
COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)


def values_of(tensor: Tensor) -> Tensor:
    """Return the numbers themselves, whatever the layout: of a sparse or nested tensor those that it holds."""
    values = tensor.detach()
    if values.layout == torch.sparse_coo:
        return values._values()
    return values.values() if values.is_nested or values.layout in COMPRESSED else values
