"""What all rooms say of tensors: dtypes and their names, tensors in containers and in shards, memory order, writes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

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


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode AD is at work, which see into no autograd function of Python's."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def described(tensor: Tensor) -> str:
    """Write a tensor's dtype and shape.

    Example:
        >>> described(torch.zeros(4, 3))
        'float32 [4, 3]'
    """
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


# Shards -----------------------------------------------------------------------------------------------


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank holds a shard."""
    # A program that has none need not import them, which takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a ``DTensor``, in the same memory, without communication; any other as it is."""
    if not is_distributed(tensor):
        return tensor
    held: Any = tensor
    shard: Tensor = held._local_tensor
    return shard if type(shard) is Tensor else _arrived(shard)


def _arrived(shard: Any) -> Tensor:
    """Wait for a shard that a collective is still writing."""
    found: Tensor = shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard
    return found


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


# Tensors that lie in shards on several ranks (``torch.distributed.tensor.DTensor``): how they lie, and making them.

_PLAIN: Final = {Tensor, nn.Parameter}


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return :func:`mezzo.tensors.local` of each of many tensors: the same list where none is a DTensor."""
    if {*map(type, tensors)} <= _PLAIN:
        return tensors
    found = list(map(local, tensors))
    return tensors if all(map(is_, found, tensors)) else found


def sharded_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as another one is, from this rank's shard of it.

    Args:
        shard: Of any dtype, in the shape of ``local(whole)``.
        whole: Any tensor; where it is no DTensor the shard is all there is.

    **Cost**: a copy of the shard, where ``whole`` is a DTensor. No communication.
    """
    if not is_distributed(whole):
        return shard
    made = torch.empty_like(whole, dtype=shard.dtype, requires_grad=False)
    local(made).copy_(shard)
    return made


def placed(value: Any, whole: Any) -> Tensor:
    """Return a tensor that lies over the ranks as another one of its shape does.

    Args:
        value: A DTensor, or the whole tensor on every rank.
        whole: Any tensor.

    **Cost**: communication only where ``value`` is a DTensor that lies otherwise.
    """
    found: Tensor = value
    meets = is_distributed(value) and is_distributed(whole) and value.device_mesh == whole.device_mesh
    if meets and value.placements == whole.placements:
        return found
    if is_distributed(value) and value.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return placed(value.view(torch.float16), whole).view(torch.int16)
    if meets:
        found = value.redistribute(placements=whole.placements)
    elif is_distributed(value):
        found = value.full_tensor()
    if meets or not is_distributed(whole):
        return found
    from torch.distributed.tensor import distribute_tensor

    # Every rank has all of it: none sends its own to the others.
    mesh = whole.device_mesh
    return distribute_tensor(found.detach().to(mesh.device_type), mesh, whole.placements, src_data_rank=None)


def sharding(tensor: Any) -> Hashable:
    """Return what tells apart how tensors are cut into shards, the same on all ranks: ``None`` of a plain tensor."""
    return (tensor.device_mesh, tuple(_cut(tensor))) if is_distributed(tensor) else None


def number_of_shard(tensor: Any) -> int:
    """Return the number of this rank's shard: copies of one shard have the same; 0 of a plain tensor."""
    number = 0
    if is_distributed(tensor) and (coordinate := tensor.device_mesh.get_coordinate()) is not None:
        for dim in _cut(tensor):
            number = number * tensor.device_mesh.size(dim) + coordinate[dim]
    return number


def _cut(tensor: Any) -> Sequence[int]:
    """Return the dims of the mesh along which a DTensor is cut."""
    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
