"""What all rooms say of tensors: dtypes and their names, tensors in containers, memory order, writes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from types import EllipsisType, FunctionType, NoneType
from typing import Any, Final, TypeAlias

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

_VERSION: Final = operator.attrgetter("_version")

#: torch's own functions of containers, also of those that programs have registered.
tree_flatten: Final[Callable[..., tuple[list[Any], Any]]] = private("torch.utils._pytree.tree_flatten")
tree_is_leaf: Final[Callable[..., bool]] = private("torch.utils._pytree.tree_is_leaf")
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


#: What holds no tensor, of the arguments that functions and modules are called with most.
HOLDS_NONE: Final = frozenset(
    {NoneType, bool, int, float, complex, str, slice, EllipsisType, FunctionType}
    | {torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format}
)

#: A container, opened: the way to each of its items, the items, and what makes the container anew of other ones.
_Opened: TypeAlias = tuple[Iterable[str], Sequence[Any], Callable[[list[Any]], Any]]


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, such as a call's arguments, in order.

    Containers are tuples, lists, dicts, named tuples, dataclasses, mappings, packed sequences, and whatever programs
    have registered with ``torch.utils._pytree``; here, in :func:`leaves` and in :func:`mapped`.
    """
    if isinstance(value, Tensor):
        yield value
        return
    cls = type(value)
    if cls is tuple or cls is list:
        items = value
    elif cls is dict:
        items = value.values()
    else:
        opened = None if cls in HOLDS_NONE else _opened(value)
        items = () if opened is None else opened[1]
    for item in items:  # a generator for each would cost more than all the rest
        if isinstance(item, Tensor):
            yield item
        elif type(item) not in HOLDS_NONE:
            yield from tensors(item)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all that is no container, and containers that are empty, in order, with the paths to them."""
    opened = None if isinstance(value, Tensor) or type(value) in HOLDS_NONE else _opened(value)
    if opened is None or not opened[1]:
        yield path, value
        return
    for way, item in zip(*opened[:2], strict=True):
        yield from leaves(item, path + way)


def each_tensor(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, such as a model's output, in order, with their paths."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor))


def mapped(value: Any, change: Callable[[Any], Any], classes: type | tuple[type, ...] = Tensor) -> Any:
    """Change each tensor in nested containers.

    Args:
        value: The containers, as for :func:`tensors`.
        change: Returns the new value of one.
        classes: The classes whose objects are changed; tensors by default.

    Returns:
        Containers of the same types. Dataclasses, mappings and sequences of a program's own classes are copied, and
        only where something in them is another; other leaves are the same objects.
    """
    if isinstance(value, classes):
        return change(value)
    cls = type(value)
    if cls in HOLDS_NONE or isinstance(value, Tensor):
        return value
    if cls is tuple or cls is list:
        return cls([mapped(item, change, classes) for item in value])
    if cls is dict:
        return {key: mapped(item, change, classes) for key, item in value.items()}
    if (opened := _opened(value)) is None:
        return value
    _, items, anew = opened
    return anew([mapped(item, change, classes) for item in items])


class Frame:
    """Nested containers without their tensors, to be filled with others.

    Args:
        value: The containers, as for :func:`tensors`.

    Example:
        >>> Frame(([torch.ones(2)], {"bias": None})).filled([torch.zeros(1)])
        ([tensor([0.])], {'bias': None})
    """

    def __init__(self, value: Any) -> None:
        self._frame = mapped(value, lambda _: _NO_TENSOR)

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return the containers anew with one tensor in each place, in the order of :func:`tensors`."""
        following = iter(tensors)
        return mapped(self._frame, lambda _: next(following))


_NO_TENSOR: Final = torch.empty(0)


def _opened(value: Any) -> _Opened | None:
    """Return the paths and items of a container, and a function that builds another one; ``None`` for no container.

    This function alone decides what a container is.
    """
    if not tree_is_leaf(value):  # Python's own, named tuples, and what programs have registered
        items, nest = tree_flatten(value, lambda node: node is not value)
        keys: Iterable[Any] = value if isinstance(value, dict) else range(len(items))
        return [f"[{key!r}]" for key in keys], items, lambda new: tree_unflatten(new, nest)
    if isinstance(value, tuple):
        return [f"[{number}]" for number in range(len(value))], value, lambda new: tuple.__new__(type(value), new)
    if isinstance(value, (MutableMapping, list)):
        keys = list(value) if isinstance(value, MutableMapping) else range(len(value))
        items = [value[key] for key in keys]
        return [f"[{key!r}]" for key in keys], items, lambda new: _copy(value, keys, items, new, operator.setitem)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = [getattr(value, name) for name in names]
        # Frozen ones cannot be assigned to, nor always be constructed anew.
        return [f".{name}" for name in names], items, lambda new: _copy(value, names, items, new, object.__setattr__)
    return None


def _copy(value: Any, keys: Iterable[Any], before: list[Any], now: list[Any], write: Callable[..., None]) -> Any:
    """Return a container with other items: a copy, or itself where there are none."""
    changed = [(key, new) for key, old, new in zip(keys, before, now, strict=True) if new is not old]
    out = copy.copy(value) if changed else value
    for key, new in changed:
        write(out, key, new)
    return out


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
