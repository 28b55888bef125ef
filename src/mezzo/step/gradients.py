"""The gradients of one step, their values and norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from mezzo import tensors
from mezzo.sharded import is_distributed, local
from mezzo.step.executors.choose import executor_for
from mezzo.tensors import CASTABLE, LOW, foreach_mul_, foreach_norm, foreach_zero_, moved

#: Gradients at an earlier time, by their ``id``: the version that each had then, and the tensor.
Stale: TypeAlias = dict[int, tuple[int, ReferenceType[Tensor]]]
#: Indices of tensors by device and dtype, as :func:`alike` returns them.
Alike: TypeAlias = Mapping[tuple[torch.device, torch.dtype], Sequence[int]]

_PLAIN: Final = {Tensor}
_LOW: Final = frozenset(LOW)
_IS_SPARSE: Final = attrgetter("is_sparse")
_GRADIENT: Final = attrgetter("grad")
_DTYPE: Final = attrgetter("dtype")
_IS_ON_CPU: Final = attrgetter("is_cpu")
_DEVICE_AND_DTYPE: Final = attrgetter("device", "dtype")


def with_gradients(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that have a gradient, and these gradients. Each ``grad`` is read once."""
    gradients = list(map(_GRADIENT, params))
    if all(has_gradient := list(map(is_not, gradients, repeat(None)))):
        return list(params), gradients
    return list(compress(params, has_gradient)), list(compress(gradients, has_gradient))


def any_gradient(params: list[Tensor]) -> bool:
    """Whether any parameter has a gradient."""
    return any(map(is_not, map(_GRADIENT, params), repeat(None)))


def dense(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that have a gradient, and the tensors that hold the values of these gradients.

    A sparse gradient is coalesced, and its values are returned. Of a sharded gradient this rank's shard is returned:
    all tensors of a step are local ones.
    """
    params, gradients = with_gradients(params)
    return params, gradient_values(params, gradients)


def gradient_values(params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the values of gradients, as :func:`dense` does; the list itself if it holds them.

    Args:
        params: Parameters that have a gradient.
        gradients: Their gradients.
    """
    if not {*map(type, gradients)} <= _PLAIN and any(map(is_distributed, gradients)):
        gradients = _summed_shards(params)
    if not any(map(_IS_SPARSE, gradients)):
        return gradients
    values = [*gradients]
    for index, gradient in enumerate(gradients):
        if gradient.is_sparse:
            params[index].grad = gradient = gradient.coalesce()
            values[index] = gradient._values()
    return values


def _summed_shards(params: list[Any]) -> list[Tensor]:
    """Return this rank's shards of gradients; one that does not lie as its parameter does is made to first."""
    for param in params:
        gradient = param.grad
        # Tensor parallelism leaves partial sums with parameters that all ranks hold, as the bias of a layer, and whole
        # gradients with tables of which each rank holds a part: their norm would count once for each rank.
        if is_distributed(gradient) and gradient.placements != param.placements:
            param.grad = gradient.redistribute(placements=param.placements)
    return [local(param.grad) for param in params]


def left_over(gradients: Sequence[Tensor]) -> Stale:
    """Return the versions of gradients now, for :func:`is_left` to compare with later.

    The tensors are held weakly: once one is gone, another may have its ``id``.
    """
    values = gradients if {*map(type, gradients)} <= _PLAIN else list(map(local, gradients))
    return dict(zip(map(id, gradients), zip(tensors.versions(values), map(ref, gradients), strict=True), strict=True))


def is_left(gradient: Tensor, stale: Stale) -> bool:
    """Whether :func:`left_over` recorded a gradient, and no program has written into it since.

    A write through ``.data`` leaves no trace.
    """
    version, tensor = stale.get(id(gradient), (None, None))
    return tensor is not None and tensor() is gradient and version == tensors.versions([local(gradient)])[0]


def norms(
    gradients: list[Tensor], device: torch.device, *, one_pass: bool = False, groups: Alike | None = None
) -> Tensor:
    """Return the 2-norm of each gradient, accumulated in FP32, without a sync.

    Args:
        gradients: At least one dense tensor, of any floating or complex dtype, on any device.
        device: The device of the result.
        one_pass: Whether mezzo's optimizers step next: then the executor that they use reads these gradients too.
        groups: The result of :func:`alike` for them, if the caller has it.

    Returns:
        ``(len(gradients),)`` float32.
    """
    groups = alike(gradients) if groups is None else groups
    batches = _read_together(groups) if one_pass and len(groups) > 1 else list(groups.values())
    if len(batches) == 1:
        sizes = _norms_of_alike(gradients, one_pass)
        sizes = sizes if isinstance(sizes, Tensor) else torch.stack([*sizes])
        return sizes if sizes.device == device else moved(sizes, device)
    norm_of: dict[int, Tensor] = {}
    for group in batches:
        group_norms = _norms_of_alike([gradients[i] for i in group], one_pass)
        if group_norms[0].device != device:  # by one transfer
            group_norms = moved(group_norms if isinstance(group_norms, Tensor) else torch.stack([*group_norms]), device)
        norm_of.update(
            zip(group, group_norms.unbind() if isinstance(group_norms, Tensor) else group_norms, strict=True)
        )
    return torch.stack([norm_of[i] for i in range(len(gradients))])


def _read_together(groups: Alike) -> list[Sequence[int]]:
    """Return the indices of gradients that one executor reads in one pass: real ones, and on CPUs up to FP32."""
    batches: defaultdict[tuple[torch.device, torch.dtype | None], list[int]] = defaultdict(list)
    for (device, dtype), indices in groups.items():
        is_read = not dtype.is_complex if device.type == "cuda" else device.type == "cpu" and dtype in CASTABLE
        batches[device, None if is_read else dtype] += indices
    return list(batches.values())


def _norms_of_alike(values: list[Tensor], one_pass: bool) -> Tensor | Sequence[Tensor]:
    """Return the FP32 norms of tensors of one device, and of one dtype unless one pass reads several."""
    if values[0].is_complex():
        wide = (torch.view_as_real(value) for value in values)
        return [torch.linalg.vector_norm(value, dtype=torch.float32) for value in wide]
    # torch's own norm of low precision takes three times as long on a CPU.
    is_low = not _LOW.isdisjoint(map(_DTYPE, values))
    if (is_low and values[0].device.type == "cpu") or (one_pass and values[0].device.type == "cuda"):
        return executor_for(values[0].device).norms(values)
    if values[0].dtype == torch.float64:
        return torch.stack(foreach_norm(values, 2)).float()
    return foreach_norm(values, 2, dtype=torch.float32)


@torch.no_grad()
def clear_to_zeros(params: Iterable[Tensor]) -> None:
    """Write zeros into the gradients of parameters, as ``zero_grad(set_to_none=False)`` does, in few launches."""
    plain = []
    for gradient in (param.grad for param in params if param.grad is not None):
        if gradient.grad_fn is None:
            gradient.requires_grad_(False)
        else:
            gradient.detach_()
        if gradient.layout == torch.strided and not is_distributed(gradient):
            plain.append(gradient)
        else:
            gradient.zero_()
    for indices in alike(plain).values():
        foreach_zero_([plain[index] for index in indices])


def alike(tensors: list[Tensor]) -> Alike:
    """Return the indices of tensors by device and dtype."""
    # To make a device object takes four times as long as to read the index of a device. An index names a device of the
    # one kind of accelerator that a process has; -1 is the CPU, among others.
    indices = {*map(Tensor.get_device, tensors)}
    is_one_device = all(map(_IS_ON_CPU, tensors)) if -1 in indices else len(indices) == 1
    if is_one_device and len({*map(_DTYPE, tensors)}) == 1:
        return {_DEVICE_AND_DTYPE(tensors[0]): range(len(tensors))}
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(i)
    return groups


def multiply(gradients: list[Tensor], factor: Tensor, groups: Alike | None = None) -> None:
    """Multiply gradients in place by a number on a device, in as few kernels as there are devices and dtypes.

    Args:
        gradients: The gradients.
        factor: 0-d.
        groups: The result of :func:`alike` for them, if the caller has it.
    """
    groups = alike(gradients) if groups is None else groups
    for (device, _), indices in groups.items():
        group = gradients if len(groups) == 1 else [gradients[index] for index in indices]
        foreach_mul_(group, moved(factor, device))
