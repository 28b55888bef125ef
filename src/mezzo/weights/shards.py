"""Weights in halves under torch's ``fully_shard``: a rank's shard, and the gathered weight of a forward pass.

The high half is gathered, without a cast, and products read it as it arrives. The low half is gathered when FP32 values
are read: by an embedding, or by a model that is called outside a region.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.dispatch import DisableTorchFunction, casts_by_itself, without_dispatch_modes
from mezzo.sharded import local
from mezzo.step.storage import encode_into
from mezzo.tensors import LOW
from mezzo.weights.cell import Cell
from mezzo.weights.halves import Halves

#: Of several names those of later releases, which deprecate the former.
_ALL_GATHER: Final[Any] = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_LAZILY: Final = torch.ops.aten._lazy_clone.default
_CASTS: Final = frozenset({torch.ops.aten._to_copy.default, _LAZILY})


class HeldShard(Halves):
    """A rank's shard of a weight in halves: the local tensor of a DTensor.

    ``fully_shard`` looks for the methods here. What it makes to pad a part is in halves, too.
    """

    def new_zeros(self, *size: Any, **kwargs: Any) -> Any:
        """Return zeros, in halves, as ``fully_shard`` asks for to pad what it holds."""
        if kwargs:
            return super().new_zeros(*size, **kwargs)
        shard: HeldShard = HeldShard(self.hi.new_zeros(*size), self.lo.new_zeros(*size))
        shard.path = self.path
        return shard

    def is_pinned(self, *_: Any) -> bool:
        """Whether the halves lie in memory of the host's that a device can read."""
        return self.hi.is_pinned()

    def pin_memory(self, *_: Any) -> Any:
        """Return a copy in memory of the host's that a device can read."""
        shard: HeldShard = HeldShard(self.hi.pin_memory(), self.lo.pin_memory())
        shard.path = self.path
        return shard

    # The extension of FSDP2's all-gather ----------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: the high half, or all in a dtype that ``MixedPrecisionPolicy`` names.

        Args:
            mesh: The ranks that hold parts.
            outer_size: Of the whole weight.
            outer_stride: Of the whole weight.
            module: The module that has it.
            mp_policy: What the user of torch's ``fully_shard`` wants parameters to be cast to.
        """
        self.store_lent()
        hi, lo = self.hi, self.lo
        if self.cell.decoded is not None:  # as while an optimizer's step runs the model
            hi, lo = torch.empty_like(hi), torch.empty_like(lo)
            encode_into(self.value(), hi, lo)
        rows = -(-outer_size[0] // mesh.size()) if self.shape[1:] == outer_size[1:] else self.shape[0]
        param_dtype = mp_policy.param_dtype
        if param_dtype in LOW:  # which is then what stands in the model
            return (_padded(hi if param_dtype == hi.dtype else self.value().to(param_dtype), rows),), None
        return (_padded(hi, rows),), _Sent(mesh, _padded(lo, rows), outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the whole weight over what has arrived; or let ``out``, which lies there already, know of it."""
        if out is not None:
            if isinstance(here := local(out), Gathered):
                here.cell.replace(sent)
            return None
        if sent is None:
            return outputs[0], ()
        weight: Gathered = Gathered(outputs[0])
        weight.cell, weight.path = Whole(), self.path
        weight.cell.replace(sent)
        return weight, weight.cell.freed


def _padded(half: Tensor, rows: int) -> Tensor:
    """Return a rank's part, with rows of zeros up to the number that every rank sends."""
    if half.shape[0] == rows:
        return half
    padded = half.new_zeros((rows, *half.shape[1:]))
    padded[: half.shape[0]].copy_(half)
    return padded


class _Sent:
    """The low half of a rank's part, which is sent only when FP32 values are read.

    Args:
        mesh: The ranks that hold parts.
        lo: This rank's low half, in as many rows as every rank sends.
        size: Of the whole weight.
    """

    __slots__ = ("lo", "mesh", "size")

    def __init__(self, mesh: Any, lo: Tensor, size: torch.Size) -> None:
        self.mesh, self.lo, self.size = mesh, lo, size

    def gather(self) -> Tensor:
        """Gather the low half: flat, laid out as the high one is, which FSDP has gathered."""
        parts = self.lo.contiguous().view(torch.float16)  # of integers of 16 bits neither gloo nor NCCL sends any
        count, group = self.mesh.size(), self.mesh.get_group()
        flat = parts.new_empty(count * parts.numel())
        _ALL_GATHER(flat, parts.view(-1), group=group)
        low_half = flat.view(torch.int16)
        dim = next((at for at, (a, b) in enumerate(zip(parts.shape, self.size, strict=True)) if a != b), 0)
        if dim:
            low_half = torch.cat(low_half.view(count, *parts.shape).unbind(), dim).view(-1)
        return low_half


class Whole(Cell):
    """The state that a gathered weight shares with its views.

    Attributes:
        freed: Tensors that ``fully_shard`` frees together with the weight: the low half, once it was gathered.
    """

    __slots__ = ("_sent", "freed")

    def __init__(self) -> None:
        super().__init__(0)
        self.freed: list[Tensor] = []
        self._sent: _Sent | None = None

    def replace(self, sent: _Sent) -> None:
        """Discard the state of earlier values: others were gathered."""
        self.freed.clear()
        self.decoded, self.is_lent, self._sent = None, False, sent

    def lo(self) -> Tensor:
        """Return the low half, flat; it is gathered at the first call."""
        if not self.freed:
            assert self._sent is not None
            self.freed.append(self._sent.gather())
        return self.freed[0]


class Gathered(Halves):
    """A whole weight, in the memory that ``fully_shard`` gathers into, fills anew and frees.

    A cast that a region makes is the high half itself, so that what graphs save is freed with it. The low half is
    gathered when it is first read: **a collective, which all ranks that hold parts take part in**. As for what
    ``fully_shard`` gathers by itself they have to do the same.
    """

    cell: Any

    @staticmethod
    def __new__(cls, hi: Tensor, lo: Tensor | None = None) -> Any:
        """Make a weight without its low half; with it where its use is traced."""
        weight: Any = Halves.__new__(cls, hi, hi if lo is None else lo)
        if lo is None:
            del weight.lo
        return weight

    def __getattr__(self, name: str) -> Any:
        if name != "lo":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with DisableTorchFunction(), without_dispatch_modes():
            whole, (of, here) = self.cell.lo(), vars(self).get("_low_half", (None, None))
            if whole is not of:  # the same object until it is gathered again: compiled code guards tensors by identity
                here = whole.as_strided(self.hi.size(), self.hi.stride(), self.hi.storage_offset())
                vars(self)["_low_half"] = whole, here
            return here

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            args[0].store_lent()
            hi = args[0].hi
            if args[0].cell.decoded is None and (func is _LAZILY or kwargs == {"dtype": hi.dtype}):
                # What the program has asked for it may write, and what is copied lazily torch cannot resize.
                return hi.detach() if func is _LAZILY or casts_by_itself(hi.device.type) else hi.clone()
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: Any, name: str, size: Any, stride: Any) -> Halves:
        weight: Gathered = Gathered(inner["hi"], inner["lo"])
        weight.path = name
        return weight

    def _seen(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if "lo" in vars(self):
            return super()._seen(func, *args, **kwargs)
        hi = func(self.hi, *args, **kwargs)
        return self._view(hi, None) if isinstance(hi, Tensor) else type(hi)(self._view(part, None) for part in hi)

    def _copied(self, hi: Tensor, lo: Tensor) -> Halves:
        copied: Halves = Halves(hi, lo)
        return copied
