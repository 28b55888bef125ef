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

#: Gradients as they were, by their ``id``: their versions, and the tensors.
Stale: TypeAlias = dict[int, tuple[int, ReferenceType[Tensor]]]
Alike: TypeAlias = Mapping[tuple[torch.device, torch.dtype], Sequence[int]]

_PLAIN: Final = {Tensor}
_LOW: Final = frozenset(LOW)
_IS_SPARSE: Final = attrgetter("is_sparse")
_GRADIENT: Final = attrgetter("grad")
_DTYPE: Final = attrgetter("dtype")
_IS_ON_CPU: Final = attrgetter("is_cpu")
_KIND: Final = attrgetter("device", "dtype")


def with_gradients(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return those of some parameters that have a gradient, and these gradients: each is asked for once."""
    gradients = list(map(_GRADIENT, params))
    if all(there := list(map(is_not, gradients, repeat(None)))):
        return list(params), gradients
    return list(compress(params, there)), list(compress(gradients, there))


def any_gradient(params: list[Tensor]) -> bool:
    """Whether any of some parameters has a gradient."""
    return any(map(is_not, map(_GRADIENT, params), repeat(None)))


def dense(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return those of some parameters that have a gradient, and the tensors that hold these gradients' values.

    Of a sparse gradient those are its coalesced form's. Of a sharded one it is this rank's shard: from here on all
    tensors are local ones.
    """
    params, gradients = with_gradients(params)
    return params, gradient_values(params, gradients)


def gradient_values(params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the values of gradients as :func:`dense` does: the same list where they do so.

    Args:
        params: Parameters that have a gradient.
        gradients: These.
    """
    if not {*map(type, gradients)} <= _PLAIN and any(map(is_distributed, gradients)):
        gradients = _summed_shards(params)
    if not any(map(_IS_SPARSE, gradients)):
        return gradients
    found = [*gradients]
    for place, gradient in enumerate(gradients):
        if gradient.is_sparse:
            params[place].grad = gradient = gradient.coalesce()
            found[place] = gradient._values()
    return found


def _summed_shards(params: list[Any]) -> list[Tensor]:
    """Return this rank's shards of gradients; those that are sums over ranks not taken yet are taken first."""
    for param in params:
        gradient = param.grad
        # Tensor parallelism leaves such gradients with parameters that all ranks hold: the bias of a layer.
        if is_distributed(gradient) and any(placement.is_partial() for placement in gradient.placements):
            param.grad = gradient.redistribute(placements=param.placements)
    return [local(param.grad) for param in params]


def left_over(gradients: Sequence[Tensor]) -> Stale:
    """Return what knows gradients as they are now: see :func:`is_left`.

    The tensors are held weakly: once one is gone, another may have its ``id``.
    """
    values = gradients if {*map(type, gradients)} <= _PLAIN else list(map(local, gradients))
    return dict(zip(map(id, gradients), zip(tensors.versions(values), map(ref, gradients), strict=True), strict=True))


def is_left(gradient: Tensor, known: Stale) -> bool:
    """Whether a gradient is one of those that :func:`left_over` was given, wherever it lies, and unwritten since.

    What is written through ``.data`` leaves no trace.
    """
    version, tensor = known.get(id(gradient), (None, None))
    return tensor is not None and tensor() is gradient and version == tensors.versions([local(gradient)])[0]


def norms(
    gradients: list[Tensor], device: torch.device, *, one_pass: bool = False, groups: Alike | None = None
) -> Tensor:
    """Return the 2-norm of each gradient, accumulated in FP32, without a sync.

    Args:
        gradients: At least one dense tensor, of any floating or complex dtype, on any device.
        device: Where they go.
        one_pass: Whether mezzo's optimizers go on with them: then their executor reads these gradients too.
        groups: What :func:`alike` says of them, where it was asked before.

    Returns:
        ``(len(gradients),)`` float32.
    """
    groups = alike(gradients) if groups is None else groups
    together = _read_together(groups) if one_pass and len(groups) > 1 else list(groups.values())
    if len(together) == 1:
        sizes = _norms_of_alike(gradients, one_pass)
        sizes = sizes if isinstance(sizes, Tensor) else torch.stack([*sizes])
        return sizes if sizes.device == device else moved(sizes, device)
    found: dict[int, Tensor] = {}
    for group in together:
        theirs = _norms_of_alike([gradients[i] for i in group], one_pass)
        if theirs[0].device != device:  # by one transfer
            theirs = moved(theirs if isinstance(theirs, Tensor) else torch.stack([*theirs]), device)
        found.update(zip(group, theirs.unbind() if isinstance(theirs, Tensor) else theirs, strict=True))
    return torch.stack([found[i] for i in range(len(gradients))])


def _read_together(groups: Alike) -> list[Sequence[int]]:
    """Return the places of gradients by what one executor reads in one pass: real ones, on CPUs up to FP32."""
    found: defaultdict[tuple[torch.device, torch.dtype | None], list[int]] = defaultdict(list)
    for (device, dtype), places in groups.items():
        is_read = not dtype.is_complex if device.type == "cuda" else device.type == "cpu" and dtype in CASTABLE
        found[device, None if is_read else dtype] += places
    return list(found.values())


def _norms_of_alike(values: list[Tensor], one_pass: bool) -> Tensor | Sequence[Tensor]:
    """Return the FP32 norms of tensors of one device, and of one dtype unless one pass reads several."""
    if values[0].is_complex():
        wide = (torch.view_as_real(value) for value in values)
        return [torch.linalg.vector_norm(value, dtype=torch.float32) for value in wide]
    # torch's own norm of low precision takes three times as long on a CPU.
    low = not _LOW.isdisjoint(map(_DTYPE, values))
    if (low and values[0].device.type == "cpu") or (one_pass and values[0].device.type == "cuda"):
        return executor_for(values[0].device).norms(values)
    if values[0].dtype == torch.float64:
        return torch.stack(foreach_norm(values, 2)).float()
    return foreach_norm(values, 2, dtype=torch.float32)


@torch.no_grad()
def clear_to_zeros(params: Iterable[Tensor]) -> None:
    """Write zeros into the gradients of parameters, as ``zero_grad(set_to_none=False)`` does; few launches for all."""
    together = []
    for gradient in (param.grad for param in params if param.grad is not None):
        if gradient.grad_fn is None:
            gradient.requires_grad_(False)
        else:
            gradient.detach_()
        if gradient.layout == torch.strided and not is_distributed(gradient):
            together.append(gradient)
        else:
            gradient.zero_()
    for places in alike(together).values():
        foreach_zero_([together[place] for place in places])


def alike(tensors: list[Tensor]) -> Alike:
    """Return the places of tensors by device and dtype."""
    # Making devices takes four times as long as asking for an index, which is one of the process's one accelerator, or
    # -1 for the CPU among others.
    indices = {*map(Tensor.get_device, tensors)}
    is_one_place = all(map(_IS_ON_CPU, tensors)) if -1 in indices else len(indices) == 1
    if is_one_place and len({*map(_DTYPE, tensors)}) == 1:
        return {_KIND(tensors[0]): range(len(tensors))}
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(i)
    return groups


def multiply(gradients: list[Tensor], factor: Tensor, groups: Alike | None = None) -> None:
    """Multiply gradients in place by a number on a device, in as few kernels as there are devices and dtypes.

    Args:
        gradients: The gradients.
        factor: 0-d.
        groups: What :func:`alike` says of them, where it was asked before.
    """
    groups = alike(gradients) if groups is None else groups
    for (device, _), places in groups.items():
        some = gradients if len(groups) == 1 else [gradients[place] for place in places]
        foreach_mul_(some, moved(factor, device))
