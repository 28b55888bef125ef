"""Bytes that live through a step and from one to the next, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.releases import private
from mezzo.tensors import tensors
from mezzo.weights.halves import in_halves
from mezzo.weights.stepping import in_memory

#: Where the storage of a tensor lies, which its own data_ptr() would separate from what it shares with others.
_ADDRESS: Final = private("torch._C._data_address")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What lives from one step to the next, each storage counted once, where it first appears.

    Attributes:
        weights: Parameters and buffers of the model, of those in two halves the high ones.
        gradients: Gradients held.
        remainders: The low halves.
        optimizer: Moments and other tensors of the optimizer's state.
    """

    weights: int
    gradients: int
    remainders: int
    optimizer: int

    @property
    def total(self) -> int:
        """All four together."""
        return self.weights + self.gradients + self.remainders + self.optimizer


def state_bytes(model: nn.Module, *optimizers: Optimizer) -> StateBytes:
    """Count the bytes of weights, gradients, low halves and optimizer state as they are now.

    Args:
        model: The model, with gradients held if they are to count.
        *optimizers: Their ``state`` is searched for tensors at any depth.

    Returns:
        The count. Views of one storage, tied weights among them, count once and whole.

    **Cost**: reads sizes only; no device sync.

    Example:
        >>> layer = nn.Linear(8, 8, bias=False)  # 64 weights
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> state_bytes(layer, sgd)
        StateBytes(weights=256, gradients=256, remainders=0, optimizer=0)
    """
    params, seen = list(model.parameters()), set[int]()
    remainders = _fresh_bytes((halves.lo for halves in map(in_halves, params) if halves is not None), seen)
    return StateBytes(
        weights=_fresh_bytes([*params, *model.buffers()], seen),
        gradients=_fresh_bytes((param.grad for param in params if param.grad is not None), seen),
        remainders=remainders,
        optimizer=_fresh_bytes(tensors([optimizer.state for optimizer in optimizers]), seen),
    )


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count, inside the block, what autograd saves for the backward pass.

    Every storage counts once and whole. Parameters and buffers do not count, as they are there anyway, but
    copies of them do, such as the low-precision weights that autocast makes. Tensors that an op keeps outside
    of ``save_for_backward`` are not seen.

    Args:
        model: The model whose own storages are left out.

    **Cost**: a Python call per saved tensor, so a step inside the block is not one to time.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> with SavedBytes(nn.Identity()) as saved:
        ...     y = x.exp()
        >>> saved.total  # the result of exp, 4 bytes each
        4000

    References:
        ``torch.autograd.graph.saved_tensors_hooks``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen: set[int] = set()
        _fresh_bytes([*model.parameters(), *model.buffers()], self._seen)
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):  # as those that FSDP gathers, and lets go after the forward pass
            self.total += _fresh_bytes([tensor], self._seen)
        return tensor


def _fresh_bytes(values: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in in_memory(values):
        size, address = tensor.untyped_storage().nbytes(), _ADDRESS(tensor)
        if size and address not in seen:
            seen.add(address)
            total += size
    return total
