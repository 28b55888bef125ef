"""What is counted of one step: rows of counts, weights, their gradients, and by how much they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.dispatch import holds_tensors, is_wrapped
from mezzo.errors import PolicyError, shown
from mezzo.formats import Format
from mezzo.numerics.evidence import SwallowedUpdates
from mezzo.numerics.histogram import standing_alone
from mezzo.numerics.subject import Subject
from mezzo.sharded import is_distributed, local
from mezzo.tensors import dtype_name, moved
from mezzo.trace.observe import COUNTABLE, WIDTH, observe
from mezzo.weights import Halves

# Updates that vanish: added to a weight in some storage format, they round away.

#: Weights at least so many times as large as their update lose it in FP16: an addition shifts it out.
BEYOND: Final = 2048.0
#: What is counted before the formats: elements that are updated; of these, those whose weight is :data:`BEYOND`;
#: elements with a gradient; of these, those that are not updated.
FIELDS: Final = 4
#: Elements that torch's operations look at at a time.
_MOVES_ON_CPU, _MOVES_ON_GPU = 1 << 16, 1 << 22
#: Elements that are widened at a time, to bound the scratch memory.
_CHUNK: Final = 1 << 21


class Move(NamedTuple):
    """A weight and what a step adds to it, as vectors of one device.

    Attributes:
        weight: Float32 or float64; in a storage format it is the nearest value.
        update: Of its dtype.
        gradient: Any floating dtype; ``None`` for zeros.
        row: (FIELDS + formats) int64: where the numbers are added.
    """

    weight: Tensor
    update: Tensor
    gradient: Tensor | None
    row: Tensor


def count_moves(moves: Iterable[Move], formats: Sequence[Format]) -> None:
    """Count of each update :data:`FIELDS`, then for each format how many elements it swallows.

    An update is swallowed where it is not zero, and less than half of the gap between the stored weight and its
    neighbour on that side; an exact half goes to the even one of the two. The sum itself is never rounded before it is
    judged.

    Args:
        moves: The updates, of one device.
        formats: The storage formats.

    **Cost**: no host sync; some ten kernels of torch's for each format, for small tensors together.
    """
    batch: list[Move] = []
    size = 0
    for move in moves:
        most = _MOVES_ON_CPU if move.weight.device.type == "cpu" else _MOVES_ON_GPU
        gradients = torch.zeros_like(move.update) if move.gradient is None else move.gradient
        for weight, update, gradient in zip(
            *(torch.split(tensor, most) for tensor in (*move[:2], gradients)), strict=True
        ):
            if batch and size + weight.numel() > most:
                _count(batch, formats)
                batch, size = [], 0
            batch.append(Move(weight, update, gradient, move.row))
            size += weight.numel()
    if batch:
        _count(batch, formats)


def _count(batch: Sequence[Move], formats: Sequence[Format]) -> None:
    gradient = torch.cat([move.gradient != 0 for move in batch if move.gradient is not None])
    masks = _masks(torch.cat([move.weight for move in batch]), torch.cat([move.update for move in batch]), formats)
    moves, beyond, *lost = masks
    together = torch.stack([moves, beyond, gradient, gradient & ~moves, *lost])
    for part, move in zip(torch.split(together, [move.update.numel() for move in batch], dim=1), batch, strict=True):
        move.row.add_(part.sum(1))


def _masks(weight: Tensor, update: Tensor, formats: Sequence[Format]) -> list[Tensor]:
    """Return masks of the elements: updated ones, those whose weight is beyond, and those that each format swallows."""
    moves, size = update != 0, update.abs()
    masks = [moves, moves & (weight.abs() >= BEYOND * size)]
    twice = size * 2
    for target in formats:
        stored = target.round(weight)
        total = stored + update
        if target.dtype == weight.dtype:  # what is added in the format itself is rounded once
            masks.append(moves & (total == stored))
            continue
        gap = _power(torch.nextafter(stored, total)).clamp_(min=target.smallest_normal).mul_(target.eps)
        stays = (twice < gap) | ((twice == gap) & (target.round(total) == stored))
        masks.append(stays.logical_and_(moves).logical_and_(total == total))  # a weight that is NaN is none
    return masks


def _power(values: Tensor) -> Tensor:
    """Return the largest power of two that each magnitude reaches; 0 for subnormals."""
    if values.dtype == torch.float64:
        return (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return (values.view(torch.int32) & 0x7F80_0000).view(torch.float32)


def swallowed(weight: Tensor, update: Tensor, dtype: str | torch.dtype | Format) -> float:
    """Return the share of updates that vanish when they are added to a weight stored in some format.

    Among the elements with ``update != 0``, those where ``round(weight + update) == weight`` in the format: the weight
    does not move, however many such steps are taken. An update that is NaN moves it.

    Args:
        weight: Any floating dtype; rounded to the format first where it is not on its grid.
        update: What a step adds, of the weight's shape.
        dtype: The storage: any of ``mezzo.formats`` but E2M1 and E8M0, a name or a dtype of one.

    Returns:
        A share from 0 to 1; NaN where no element is updated.

    Raises:
        PolicyError: The shapes differ, or one is no tensor of a floating dtype.

    **Cost**: one host sync, at the end; less than 128 MiB of scratch memory, whatever the size.

    Example:
        >>> import torch
        >>> swallowed(torch.tensor([1.0, 1.0]), torch.tensor([1e-3, 1e-2]), "bfloat16")
        0.5
    """
    target = standing_alone(dtype)
    for tensor in (weight, update):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            wrong = f"{dtype_name(tensor.dtype)} tensors" if isinstance(tensor, Tensor) else shown(tensor)
            raise PolicyError(
                f"no updates are swallowed by {wrong}",
                why="a weight and its update are real floating-point numbers",
                write="swallowed(weight, new_weight - weight, dtype)",
            )
    if weight.shape != update.shape:
        raise PolicyError(
            "a weight and its update differ in shape",
            where=f"weight {tuple(weight.shape)}, update {tuple(update.shape)}",
            write="swallowed(weight, new_weight - weight, dtype)",
        )
    row = torch.zeros(FIELDS + 1, dtype=torch.int64, device=weight.device)
    wide = torch.float64 if torch.float64 in (weight.dtype, update.dtype) else torch.float32
    pairs = zip(*(torch.split(tensor.detach().reshape(-1), _CHUNK) for tensor in (weight, update)), strict=True)
    count_moves((Move(stored.to(wide), change.to(wide), None, row) for stored, change in pairs), [target])
    updated, *_, lost = row.tolist()
    return lost / updated if updated else math.nan


#: Rows that are allocated together.
_TOGETHER: Final = 64


def is_countable(tensor: Tensor) -> bool:
    """Whether a tensor holds values that a histogram can count; wrappers and nests hold none themselves."""
    return (
        tensor.dtype in COUNTABLE
        and tensor.layout in (torch.strided, torch.sparse_coo)
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not is_wrapped(tensor)
        and not holds_tensors(tensor)
    )


def count(tensor: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None = None, name: int = 0) -> None:
    """Count a tensor's values: of a sparse one what it holds.

    Args:
        tensor: One that :func:`is_countable`.
        row: Where they are counted, on its device.
        flag: Whether they are, on its device.
        factor: 0-d, on any device: what to multiply them by in FP32; ``None`` for 1.
        name: What the row is to say of it.

    **Cost**: one kernel; no host sync.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    observe(values, row, flag, None if factor is None else moved(factor, values.device), name)


class Tally:
    """Rows of counts, each of one tensor.

    Args:
        width: How many more numbers each row holds, behind what :mod:`mezzo.trace.observe` counts.
    """

    def __init__(self, width: int) -> None:
        self.width = WIDTH + width
        self._rows: list[Tensor] = []
        self._free: dict[torch.device, list[Tensor]] = {}
        self._flags: dict[torch.device, Tensor] = {}

    def row(self, device: torch.device) -> int:
        """Add a row of zeros on a device, and return its number."""
        free = self._free.get(device)
        if not free:
            free = self._free[device] = [
                *reversed(torch.zeros((_TOGETHER, self.width), dtype=torch.int64, device=device).unbind())
            ]
        return self.append(free.pop())

    def append(self, row: Tensor) -> int:
        """Add a row that a hook or a graph counts in, and return its number."""
        self._rows.append(row)
        return len(self._rows) - 1

    def extra(self, number: int) -> Tensor:
        """Return the numbers of a row behind its histogram."""
        return self._rows[number][WIDTH:]

    def count(self, tensor: Tensor, factor: Tensor | None = None, number: int | None = None) -> int:
        """Count a tensor's values, and return the number of the row.

        Args:
            tensor: As for :func:`count`.
            factor: As there.
            number: That of the row whose counts these take the place of; ``None`` for a new one.
        """
        if number is None:
            number = self.row(tensor.device)
        else:
            self._rows[number].zero_()
        if tensor.device not in self._flags:
            self._flags[tensor.device] = torch.ones(1, dtype=torch.int32, device=tensor.device)
        count(tensor, self._rows[number], self._flags[tensor.device], factor)
        return number

    def fetch(self, numbers: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """Bring all rows to the host, and some numbers with them.

        Args:
            numbers: 0-d, of any dtype that float32 holds.

        Returns:
            The rows, as views of one tensor for each device; the numbers.

        **Cost**: one transfer from each device that holds any.
        """
        host_rows: list[Tensor] = [torch.empty(0)] * len(self._rows)
        read: list[float] = [0.0] * len(numbers)
        devices = dict.fromkeys([*(row.device for row in self._rows), *(number.device for number in numbers)])
        for device in devices:
            rows = [index for index, row in enumerate(self._rows) if row.device == device]
            scalars = [index for index, number in enumerate(numbers) if number.device == device]
            parts = [self._rows[index] for index in rows]
            # As bits, so that everything travels in one tensor.
            parts += [numbers[index].detach().reshape(1).float().view(torch.int32).long() for index in scalars]
            host = torch.cat(parts).cpu()
            end = len(rows) * self.width
            for index, row in zip(rows, host[:end].view(len(rows), self.width), strict=True):
                host_rows[index] = row
            for index, bits in zip(scalars, host[end:].int().view(torch.float32).tolist(), strict=True):
                read[index] = bits
        return host_rows, read


#: What identifies a recorded tensor: kind, module and name.
TensorKey = tuple[str, str, str]
#: The rows of each tensor, with its dtype where that is not the one of what was counted.
TensorRows = dict[TensorKey, tuple[str | None, list[int]]]


class WeightWatch:
    """Counts what one step does to the parameters.

    Args:
        subject: What is watched.
        kinds: Which of ``weights``, ``weight_gradients`` and ``updates``.
        formats: The storage formats that updates are rounded to.
        tally: What counts.
        tensor_rows: Gets the rows of each tensor.
        group: Returns the ranks whose counts are added up; ``None`` for this one's.
    """

    def __init__(
        self,
        subject: Subject,
        kinds: Iterable[str],
        formats: Sequence[Format],
        tally: Tally,
        tensor_rows: TensorRows,
        group: Callable[[], Any],
    ) -> None:
        self._group = group
        self._subject, self._kinds, self._formats = subject, frozenset(kinds), formats
        self._tally, self._tensor_rows = tally, tensor_rows
        self._before: dict[Tensor, tuple[Tensor, torch.dtype]] = {}
        self._gradients: dict[Tensor, Tensor] = {}

    def before(self, updated: Container[Tensor]) -> None:
        """Count the weights that a step may move, and copy them.

        Args:
            updated: The parameters that the step updates.
        """
        mine = filter(self._counts_here, self._subject.params)
        moving = (param for param in mine if param.requires_grad and param in updated)
        for param, value in _values(moving):
            if "weights" in self._kinds:
                self._set_row("weights", param, None, self._tally.count(value))
            if "updates" in self._kinds:
                self._before[param] = value.to(torch.float32, copy=True), value.dtype

    def drop_unmoved(self, moved: Container[Tensor]) -> None:
        """Drop the copies of parameters that the step does not move after all."""
        self._before = {param: before for param, before in self._before.items() if param in moved}

    def rest(self) -> None:
        """Count the weights that no step has moved."""
        params = self._subject.params if "weights" in self._kinds else {}
        unmoved = [param for param, name in params.items() if ("weights", *name) not in self._tensor_rows]
        unmoved = [*filter(self._counts_here, unmoved)]
        for param, value in _values(unmoved):
            self._set_row("weights", param, None, self._tally.count(value))

    def gradient(self, param: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        """Count a gradient, instead of an earlier one of the same parameter.

        Args:
            param: The model's parameter.
            gradient: Its gradient.
            factor: What to multiply it by; ``None`` for 1.
        """
        if param not in self._subject.params or not is_countable(gradient := local(gradient)):
            return
        if not self._counts_here(param):
            return
        if "updates" in self._kinds:
            self._gradients[param] = gradient
        if "weight_gradients" in self._kinds:
            _, earlier = self._tensor_rows.get(("weight_gradients", *self._subject.params[param]), (None, [None]))
            self._set_row("weight_gradients", param, None, self._tally.count(gradient, factor, earlier[0]))

    def add_row(self, param: Tensor, row: Tensor) -> None:
        """Add the row of a gradient that was counted in a graph."""
        self._set_row("weight_gradients", param, None, self._tally.append(row))

    def after(self) -> None:
        """Count the updates of the weights that were copied, and drop the copies."""
        moves = []
        for param, value in _values(self._before):
            before, dtype = self._before[param]
            update = value.float() - before
            row = self._tally.count(update)
            self._set_row("updates", param, dtype, row)
            gradient = self._gradients.pop(param, None)
            if gradient is not None:
                is_alike = gradient.shape == update.shape and gradient.layout == torch.strided
                gradient = gradient.detach().reshape(-1) if is_alike else None
            moves.append(Move(before.reshape(-1), update.reshape(-1), gradient, self._tally.extra(row)))
        self._before.clear()
        for device in dict.fromkeys(move.update.device for move in moves):
            count_moves([move for move in moves if move.update.device == device], self._formats)

    def _counts_here(self, param: Any) -> bool:
        """Whether this rank counts a parameter or its shard: of ranks with the same values, the first does."""
        group = self._group()
        if group is None:
            return True
        if not is_distributed(param):
            return bool(group.rank() == 0)
        placements = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
        return all(number == 0 for placement, number in placements if placement.is_replicate())

    def _set_row(self, tensor_kind: str, param: Tensor, dtype: torch.dtype | None, row: int) -> None:
        self._tensor_rows[tensor_kind, *self._subject.params[param]] = (
            None if dtype is None else dtype_name(dtype),
            [row],
        )


def _values(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter whose values can be counted, with the values that this rank holds."""
    for param in params:
        shard = local(param.detach())
        value = shard.value() if isinstance(shard, Halves) else shard  # halves are decoded once
        if is_countable(value):
            yield param, value


def swallowed_of(numbers: Sequence[int], formats: Sequence[Format]) -> SwallowedUpdates:
    """Return what :class:`WeightWatch` counted behind the histogram of an update."""
    updated, beyond, with_gradient, unmoved, *lost = numbers
    return SwallowedUpdates(
        updated=updated,
        swallowed={target.name: count for target, count in zip(formats, lost, strict=True)},
        beyond=beyond,
        with_gradient=with_gradient,
        unmoved=unmoved,
    )
