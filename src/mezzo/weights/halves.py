"""``Halves``: the low 16 bits of every weight that a model stores in low precision, and so its FP32 value."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import StateError
from mezzo.sharded import hold_as, is_distributed, local, placed, sharded_as
from mezzo.step.storage import decode, encode_into, refuse_beyond
from mezzo.tensors import LOW, described

#: A storage, which is not kept alive, and where in it.
_Memory: TypeAlias = tuple[StorageWeakRef, int | torch.SymInt]

_DTYPE: Final = attrgetter("dtype")
#: All that live, since models may share a tensor.
_LIVE: Final[weakref.WeakSet[Halves]] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class _Held:
    """What is known of one tensor.

    Attributes:
        before: The dtype that it had.
        low: The dtype that it has.
        rest: int16, of a DTensor of this rank's part: the low half; ``None`` where the high half is the value.
        memory: Where the high half lies.
        memory_before: The memory that it had.
        version: Of a buffer: how often it had been written when the rest was made. A rest belongs to what was encoded.
        left: Where it has lain before the tensor was given other memory, and the rest that belongs to what lies there:
            as long as a program keeps that.
    """

    before: torch.dtype
    low: torch.dtype
    rest: Tensor | None
    memory_before: _Memory
    memory: _Memory | None = None
    version: int | None = None
    left: list[tuple[_Memory | None, Tensor]] = field(default_factory=list)


class Halves:
    """Owns the FP32 values of a model whose weights are stored in 16 bits.

    A model computes with the high half of each weight, a BF16 or FP16 tensor. Here is the other one, 16 bits that make
    the FP32 value whole. **The value of a weight is always** ``decode(what it holds now, its rest)``: there is no copy
    that could disagree. So whatever has written the low weight is seen, through ``.data`` as well: the value is exact
    where an element's bits did not change, and within half a spacing of the low format elsewhere.

    :func:`mezzo.prepare` makes one for each model: ``mezzo.prepare(model, policy).halves``.

    Attributes:
        num_replaced: How often low halves were given other memory, for what keeps their addresses.

    **Cost**: 2 bytes a parameter beside the model's 2.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.1]))
        >>> halves = Halves()
        >>> halves.store({weight: torch.bfloat16})
        >>> weight.detach(), halves.read(weight)
        (tensor([1.0000, 0.1001], dtype=torch.bfloat16), tensor([1.0000, 0.1000]))
        >>> halves.write(weight, torch.tensor([2.0, 0.3]))
        >>> halves.remove()
        >>> weight.detach()
        tensor([2.0000, 0.3000])
    """

    def __init__(self) -> None:
        self.num_replaced = 0
        self._held: dict[Tensor, _Held] = {}
        _LIVE.add(self)
        self._lows: list[torch.dtype] = []
        self._are_away = False

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._held

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._held)

    # Storing and giving back ------------------------------------------------------------------------------

    @torch.no_grad()
    def store(self, dtypes: Mapping[Tensor, torch.dtype]) -> None:
        """Store tensors in halves from now on; each stays the object that it is.

        Args:
            dtypes: FP32 tensors, or such as are low already, each with the low dtype that it is to have.

        Raises:
            NumericsError: A finite value beyond the range of its dtype; nothing was changed.
        """
        refuse_beyond([(local(t.detach()), dtype) for t, dtype in dtypes.items() if t.dtype != dtype])
        known = {t: held for other in _LIVE for t, held in other._held.items() if t in dtypes}
        for tensor, dtype in dtypes.items():
            if tensor in known:  # of two models that share it, either may be asked
                self._held[tensor] = known[tensor]
                continue
            high, rest = _encoded(tensor, dtype)
            # Known before it is stored: remove() gives back what was interrupted.
            self._held[tensor] = held = _Held(tensor.dtype, dtype, rest, _memory_of(tensor))
            if tensor.dtype != dtype:
                give(tensor, high)
            held.memory = _memory_of(tensor)
            if not isinstance(tensor, nn.Parameter):
                held.version = tensor._version
        self._note()

    @torch.no_grad()
    def remove(self) -> None:
        """Give each tensor back in the dtype that it had, with all bits of its value, and forget it.

        Called again after an interrupt it finishes what is left.
        """
        for tensor, held in [*self._held.items()]:
            give_back(tensor, self.read(tensor).to(held.before))
            del self._held[tensor]
        self._note()

    def forget(self, tensor: Tensor) -> None:
        """Own the value of a tensor no longer, as another one stands in its place; it stays as it is."""
        del self._held[tensor]
        self._note()

    def drop(self) -> None:
        """Give up the low halves of parameters: from now on what one holds is its value."""
        for tensor, held in self._held.items():
            if isinstance(tensor, nn.Parameter):
                held.rest, held.left = None, []
        self.num_replaced += 1

    def move(self, to: Mapping[Tensor, Tensor]) -> None:
        """Let other tensors stand for some: DTensors, each of which lies in parts on several ranks.

        Args:
            to: The new ones, in the same low dtype, by the old.

        **Cost**: a copy of this rank's part of each rest; no communication.
        """
        for old, new in to.items():
            held = self._held.pop(old)
            if held.rest is not None:
                held.rest = local(placed(held.rest, new)).clone()
            held.memory = _memory_of(new)
            self._held[new] = held
        self._note()

    def _note(self) -> None:
        self.num_replaced += 1
        self._lows = [held.low for held in self._held.values()]

    # Values -----------------------------------------------------------------------------------------------

    def has_rest(self, tensor: Tensor) -> bool:
        """Whether a tensor is stored in two halves."""
        held = self._held.get(tensor)
        return held is not None and held.rest is not None

    def dtype_before(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor had before it was stored here."""
        return self._held[tensor].before

    def rest_of(self, tensor: Tensor) -> Tensor:
        """Return the low half of a tensor, int16, of a DTensor of this rank's part: for what writes both halves."""
        held, here = self._held[tensor], local(tensor)
        if held.left:
            self.settle()
        assert held.rest is not None, "asked of what has_rest()"
        if held.rest.device != here.device:  # model.to(device)
            held.rest, held.memory = held.rest.to(here.device), _memory_of(tensor)
            self.num_replaced += 1
        if held.version is not None and held.version != tensor._version:
            held.rest.zero_()
            held.version = tensor._version
        return held.rest

    def memories(self) -> set[StorageWeakRef]:
        """Return what identifies the memory of all tensors here, now and before they were stored."""
        return {
            memory[0]
            for held in self._held.values()
            for memory in (held.memory, held.memory_before)
            if memory is not None
        }

    @torch.no_grad()
    def read(self, tensor: Tensor) -> Tensor:
        """Return the FP32 value of a tensor, as a new one.

        Args:
            tensor: Any; of one that is not stored here it is what that holds, at least in FP32.

        **Cost**: 4 bytes a weight; a pass over both halves. No host sync.
        """
        held = self._held.get(tensor)
        if held is None or held.rest is None or tensor.dtype != held.low:
            return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        value = decode(local(tensor.detach()), self.rest_of(tensor))
        return sharded_as(value, tensor) if is_distributed(tensor) else value

    @torch.no_grad()
    def write(self, tensor: Tensor, value: Tensor, *, copies: bool = False) -> None:
        """Give a tensor that is stored here another value, in place: its memory stays where it is.

        Args:
            tensor: The tensor.
            value: Of its shape; a DTensor, or whole, for a DTensor. In FP32 it is kept whole. In a low dtype it leaves
                the FP32 value of each element that rounds to it already.
            copies: Whether the tensor is about to be copied onto itself, as ``load_state_dict`` does.

        Raises:
            StateError: Another shape; nothing was changed.
            NumericsError: A finite value beyond the range of the low dtype; nothing was changed.
        """
        if value.shape != tensor.shape:
            raise StateError(
                "a weight is given a value of another shape",
                where=f"{described(value)} for {described(tensor)}",
                write="a value of the weight's shape",
            )
        self.settle()
        held, value = self._held[tensor], placed(value.detach().to(tensor.device), tensor)
        if value.dtype in LOW and held.rest is not None:
            exact = self.read(tensor)
            is_same = tensor == value if value.dtype == held.low else exact.to(value.dtype) == value
            value = torch.where(is_same, exact, value.to(torch.float32))
        value = value.to(torch.float32)
        refuse_beyond([(local(value), held.low)])
        if held.rest is None:
            local(tensor.data).copy_(local(value))
        else:
            encode_into(local(value), local(tensor.data), self.rest_of(tensor))
        increment_version(tensor)
        if held.version is not None:
            held.version = tensor._version + copies

    @torch.no_grad()
    def set_rest(self, tensor: Tensor, rest: Tensor) -> None:
        """Put a saved low half beside what a tensor holds now; a DTensor's lies as the tensor, or is whole."""
        held, rest = self._held[tensor], placed(rest.to(tensor.device), tensor)
        self.rest_of(tensor).copy_(local(rest))
        held.left = []
        if held.version is not None:
            held.version = tensor._version

    def settle(self) -> None:
        """Store low again what was given FP32 memory through ``.data``, so that the model computes in one dtype.

        Programs swap weights so: ``param.data = shadow`` for an evaluation, and ``param.data = backup`` after it. What
        comes back to its own memory has its own FP32 value again.

        **Cost**: 0.05 µs a tensor where nothing was swapped.
        """
        with DisableTorchFunction():  # a region's mode is asked for each dtype that is read, too
            is_settled = not self._are_away and list(map(_DTYPE, self._held)) == self._lows
        if not is_settled:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        for tensor, held in self._held.items():
            if tensor.dtype != held.low:
                high, rest = _encoded(tensor, held.low)
                if held.rest is not None:
                    held.left.append((held.memory, held.rest))
                    held.rest = rest
                give(tensor, high, with_gradients=False)  # what was set of them outlives a swap
                held.memory = _memory_of(tensor)
            elif held.left and held.rest is not None:
                now, before = _memory_of(tensor), (held.memory, held.rest)
                held.memory, held.rest = next((each for each in held.left if each[0] == now), before)
                held.left.append(before)
            held.left = [each for each in held.left if each[0] != held.memory and _lives(each[0])]
        self._are_away = any(held.left for held in self._held.values())
        self.num_replaced += 1


def _memory_of(tensor: Tensor) -> _Memory:
    """Return what no other memory equals as long as this is kept: an address that is free is given to the next."""
    here = local(tensor)
    return StorageWeakRef(here.untyped_storage()), int(here.storage_offset())  # type: ignore[no-untyped-call]


def _lives(memory: _Memory | None) -> bool:
    return memory is not None and not bool(memory[0].expired())  # type: ignore[no-untyped-call]


def owner_of(tensor: Tensor, among: Sequence[Halves]) -> Halves | None:
    """Return what owns a tensor's FP32 value, where it is stored in two halves."""
    return next((halves for halves in among if halves.has_rest(tensor)), None)


def give(tensor: Any, data: Tensor, *, with_gradients: bool = True) -> None:
    """Give a tensor other data, and gradients of that dtype if they had the dtype of the tensor until now.

    Args:
        tensor: The tensor.
        data: Of a DTensor this rank's part, or a DTensor that lies as it does.
        with_gradients: Whether gradients follow; where nobody set their dtype, torch has them follow by itself.
    """
    follows = with_gradients and isinstance(tensor, nn.Parameter) and tensor.grad_dtype == tensor.dtype
    whole: Any = sharded_as(data, tensor) if is_distributed(tensor) and not is_distributed(data) else data
    tensor.data = whole
    if is_distributed(tensor):  # torch gives it the other's dtype, but not what it holds
        hold_as(tensor, whole)
    if follows and tensor.grad_dtype != data.dtype:  # torch keeps one that was ever set, whatever the tensor becomes
        tensor.grad_dtype = data.dtype


def give_back(tensor: Any, data: Tensor) -> None:
    """Give a tensor data in the dtype that it had, and its gradient with it; one that has it is left alone."""
    if tensor.dtype != data.dtype:
        gradient, tensor.grad = tensor.grad, None
        give(tensor, data)
        tensor.grad = None if gradient is None else gradient.to(data.dtype)


def _encoded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the halves of what a tensor holds; what is too large becomes infinite."""
    wide = local(tensor.detach()).to(torch.float32)
    high, rest = torch.empty_like(wide, dtype=dtype), torch.empty_like(wide, dtype=torch.int16)
    encode_into(wide, high, rest)
    return high, rest
