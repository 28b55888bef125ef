"""Counts of one step that wait on their devices, to be fetched together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mezzo.errors import StateError
from mezzo.numerics.counting import COUNTABLE, ROW, count_into
from mezzo.tensors import flat, moved

__all__ = ["Tally", "is_countable"]

#: Rows that are allocated together, and rows after which nothing will come that fetches them.
_TOGETHER: Final = 64
_MOST: Final = 1 << 16
#: Elements that are unscaled at a time: on the CPU they stay in its cache, on a GPU a launch is worth more.
_ON_CPU, _ON_GPU = 1 << 16, 1 << 24


def is_countable(tensor: Tensor) -> bool:
    """Whether a tensor holds values that a histogram can count; wrappers and nests hold none themselves."""
    return (
        tensor.dtype in COUNTABLE
        and tensor.layout in (torch.strided, torch.sparse_coo)
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not is_traceable_wrapper_subclass(tensor)
    )


class Tally:
    """Rows of counts, each of one tensor.

    Args:
        width: How many more numbers each row holds, behind its histogram.
    """

    def __init__(self, width: int) -> None:
        self._width = ROW + width
        self._rows: list[Tensor] = []
        self._free: dict[torch.device, list[Tensor]] = {}

    def row(self, device: torch.device) -> int:
        """Take a row of zeros on a device, and return its number."""
        free = self._free.get(device)
        if not free:
            free = self._free[device] = [
                *reversed(torch.zeros((_TOGETHER, self._width), dtype=torch.int64, device=device).unbind())
            ]
        if len(self._rows) == _MOST:
            raise StateError(
                f"{_MOST} tensors were counted, and no step came",
                why="a recorder keeps what it has counted until its step is done",
                write="recorder.step() after optimizer.step(); or modules=, for fewer",
            )
        self._rows.append(free.pop())
        return len(self._rows) - 1

    def beside(self, number: int) -> Tensor:
        """Return what a row holds behind its histogram."""
        return self._rows[number][ROW:]

    def count(self, tensor: Tensor, factor: Tensor | None = None) -> int:
        """Count a tensor's values in a new row, and return its number.

        Args:
            tensor: A tensor that :func:`is_countable`; of a sparse one what it holds.
            factor: 0-d: what to multiply the values by in FP32; ``None`` for 1.

        **Cost**: one kernel, two with a factor; no host sync.
        """
        number = self.row(tensor.device)
        row, values = self._rows[number][:ROW], tensor.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if factor is None:
            count_into(row, values)
            return number
        factor = moved(factor, values.device)
        vectors = flat(values)
        for chunk in torch.split(
            vectors[0] if vectors else values.reshape(-1), _ON_CPU if values.device.type == "cpu" else _ON_GPU
        ):
            count_into(row, chunk.float() * factor)
        return number

    def fetch(self, numbers: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """Bring all rows to the host, and some numbers with them.

        Args:
            numbers: 0-d, of any dtype that float32 holds.

        Returns:
            The rows, as views of one tensor for each device; the numbers.

        **Cost**: one transfer from each device that holds any.
        """
        found: list[Tensor] = [torch.empty(0)] * len(self._rows)
        read: list[float] = [0.0] * len(numbers)
        devices = dict.fromkeys([*(row.device for row in self._rows), *(number.device for number in numbers)])
        for device in devices:
            rows = [place for place, row in enumerate(self._rows) if row.device == device]
            beside = [place for place, number in enumerate(numbers) if number.device == device]
            parts = [self._rows[place] for place in rows]
            # As bits, so that everything travels in one tensor.
            parts += [numbers[place].detach().reshape(1).float().view(torch.int32).long() for place in beside]
            host = torch.cat(parts).cpu()
            end = len(rows) * self._width
            for place, row in zip(rows, host[:end].view(len(rows), self._width), strict=True):
                found[place] = row
            for place, bits in zip(beside, host[end:].int().view(torch.float32).tolist(), strict=True):
                read[place] = bits
        return found, read
