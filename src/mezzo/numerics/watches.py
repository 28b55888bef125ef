"""What is counted of one step: what modules return, gradients that come back, weights, and by how much they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from mezzo.backward import runs_backward
from mezzo.compiling import compiled_inside_alone, is_imported
from mezzo.dispatch import DisableTorchFunction, holds_tensors, is_wrapped
from mezzo.errors import PolicyError, shown
from mezzo.formats import Format
from mezzo.hooks import OwnHook
from mezzo.numerics.evidence import SwallowedUpdates
from mezzo.numerics.histogram import standing_alone
from mezzo.numerics.subject import Subject
from mezzo.sharded import is_distributed, local
from mezzo.tensors import dtype_name, each_tensor, foreach_zero_, leaves, mapped, moved
from mezzo.trace.modes import is_watched
from mezzo.trace.observe import COUNTABLE, LARGEST, WIDTH, observe
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
        known = torch.zeros_like(move.update) if move.gradient is None else move.gradient
        for weight, update, gradient in zip(*(torch.split(each, most) for each in (*move[:2], known)), strict=True):
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
    """Say of each element whether it is updated, whether its weight is beyond, and which formats swallow it."""
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
    pairs = zip(*(torch.split(each.detach().reshape(-1), _CHUNK) for each in (weight, update)), strict=True)
    count_moves((Move(stored.to(wide), change.to(wide), None, row) for stored, change in pairs), [target])
    updated, *_, lost = row.tolist()
    return lost / updated if updated else math.nan


#: Rows that are allocated together.
_TOGETHER: Final = 64
#: What modules return is recorded in graphs up to so many tensors: the one that is returned, or the first of others.
IN_GRAPHS: Final = 5
#: Whether torch.compile traces hooks of tensors as it does in 2.13.
TRACES_HOOKS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
#: Observations that there can be in graphs: kinds of what modules return, times modules.
MOST: Final = 1 << 12


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


def count(tensor: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None = None) -> None:
    """Count a tensor's values: of a sparse one what it holds.

    Args:
        tensor: One that :func:`is_countable`.
        row: Where they are counted, on its device.
        flag: Whether they are, on its device.
        factor: 0-d, on any device: what to multiply them by in FP32; ``None`` for 1.

    **Cost**: one kernel; no host sync.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    observe(values, row, flag, None if factor is None else moved(factor, values.device))


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
        """Take a row of zeros on a device, and return its number."""
        free = self._free.get(device)
        if not free:
            free = self._free[device] = [
                *reversed(torch.zeros((_TOGETHER, self.width), dtype=torch.int64, device=device).unbind())
            ]
        return self.take(free.pop())

    def take(self, row: Tensor) -> int:
        """Take in a row in which something else counts, and return its number."""
        self._rows.append(row)
        return len(self._rows) - 1

    def beside(self, number: int) -> Tensor:
        """Return what a row holds behind what was counted."""
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
            end = len(rows) * self.width
            for place, row in zip(rows, host[:end].view(len(rows), self.width), strict=True):
                found[place] = row
            for place, bits in zip(beside, host[end:].int().view(torch.float32).tolist(), strict=True):
                read[place] = bits
        return found, read


#: What tells a tensor from others: kind, module and name.
Place = tuple[str, str, str]
#: The rows of each tensor, with its dtype where that is not the one of what was counted.
Places = dict[Place, tuple[str | None, list[int]]]
#: Of rows that modules fill: the place, the number, and that of another row; it counts only if that was counted in.
Returned = tuple[Place, int, int | None]
#: A tensor's dtype, and its row on the host.
Counted = tuple[str, Tensor]


def summed(counted: dict[Place, Counted], group: Any, device: torch.device) -> dict[Place, Counted]:
    """Add up what several ranks have counted.

    Args:
        counted: What this one has; others may have counted other tensors.
        group: Their process group.
        device: One that it reduces on.

    **Cost**: a reduction, and before it one of the names.
    """
    known: list[Any] = [None] * group.size()
    dist.all_gather_object(known, {place: (dtype, len(row)) for place, (dtype, row) in counted.items()}, group=group)
    every = {place: told for each in known for place, told in each.items()}
    if not every:
        return counted
    width = next(iter(every.values()))[1]
    table = torch.zeros(len(every), width + len(known), dtype=torch.int64)
    for number, place in enumerate(every):
        if place in counted:
            row = counted[place][1]
            table[number, :width] = row
            table[number, width + group.rank()] = row[LARGEST]  # a column for each rank: a sum keeps all of them
    table = table.to(device)
    dist.all_reduce(table, group=group)
    table = table.cpu()
    table[:, LARGEST] = table[:, width:].max(1).values
    return {place: (every[place][0], table[number, :width]) for number, place in enumerate(every)}


# What modules return ------------------------------------------------------------------------------------------


class _Pair:
    """The rows of one tensor that a module returns, and of the gradient that comes back to it.

    Attributes:
        name: What it is called; ``None`` for one of those that graphs count in, which are called by their place.
        values: The row of its values.
        gradient: That of its gradient.
        flag: Whether anything is counted.
        factor: What graphs multiply the gradient by.
        late: Rows of tensors that turned out to be part of training only when their gradients came.
    """

    def __init__(self, doors: Doors, device: torch.device, name: str | None) -> None:
        self.name = name
        self.values, self.gradient = doors.new_row(device), doors.new_row(device)
        self.flag, self.factor = doors.of_device(device)
        self.late: list[Tensor] = []

    def arrived(self, gradient: Tensor) -> None:
        """Count a gradient in a graph."""
        torch.ops.mezzo.observe(gradient, self.gradient, self.flag, self.factor)


class _Arrival(Function):
    """Counts a gradient in graphs of torch 2.11, where hooks of tensors lose what is used outside of them too.

    A copy: a tensor that is handed on as it is could not be changed in place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor, flag: Tensor, factor: Tensor) -> Tensor:
        """Return a copy."""
        ctx.save_for_backward(row, flag, factor)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Count the gradient, and hand it on."""
        torch.ops.mezzo.observe(gradient, *ctx.saved_tensors)
        return gradient, None, None, None


class Door(OwnHook):
    """A forward hook: counts what a module returns, and the gradients that come back to it.

    torch.compile traces it. But for tensors it reads nothing there that differs between modules which share a graph.

    Args:
        doors: All of them.
        path: Where the module is recorded.
        device: The module's.

    Attributes:
        path: As given.
        pairs: The rows of each tensor that it returns.
        late: Those in graphs of passes that are training only if gradients come back, as evaluation is.
    """

    def __init__(self, doors: Doors, path: str, device: torch.device) -> None:
        super().__init__()
        self.path, self._doors, self._device = path, doors, device
        self.pairs: list[_Pair] = []
        self.late: list[_Pair] = []

    @compiled_inside_alone
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Count, but in passes that no backward pass can follow."""
        if torch.compiler.is_compiling():
            return self._traced(output) if torch.is_grad_enabled() else None
        if self._doors.is_open and torch.is_grad_enabled() and not is_watched():
            self._doors.called[self.path] = None
            with DisableTorchFunction():
                for place, tensor in each_tensor(output):
                    if is_countable(tensor) and tensor.numel():
                        self._count(tensor, f"output{place}")
        return None

    def make_ready(self) -> None:
        """Make the rows that a graph counts in, which it cannot make itself."""
        for pairs in (self.pairs, self.late):
            pairs += [_Pair(self._doors, self._device, None) for _ in range(len(pairs), IN_GRAPHS)]

    def named(self) -> Iterator[tuple[str, _Pair, bool]]:
        """Yield the rows of each tensor, its name before them, and whether they count only if gradients came."""
        for pairs in (self.pairs, self.late):
            for number, pair in enumerate(pairs):
                yield pair.name or f"output{f'[{number - 1}]' if number else ''}", pair, pairs is self.late

    def _traced(self, output: Any) -> Any:
        counts = self._doors.model.training and not runs_backward()
        pairs = self.pairs if counts else self.late
        number = 0 if isinstance(output, Tensor) else 1
        through: list[Tensor] = []
        for _, tensor in leaves(output):
            if number < len(pairs) and isinstance(tensor, Tensor) and self._is_plain(tensor):
                pair = pairs[number]
                if self._doors.has_values:
                    torch.ops.mezzo.observe(tensor, pair.values, pair.flag, None)
                if tensor.requires_grad and (self._doors.has_gradients or not counts):
                    if TRACES_HOOKS:
                        tensor.register_hook(pair.arrived)  # type: ignore[no-untyped-call]
                    else:
                        tensor = _Arrival.apply(tensor, pair.gradient, pair.flag, pair.factor)  # type: ignore[no-untyped-call]
            number += 1
            if isinstance(tensor, Tensor):
                through.append(tensor)
        if TRACES_HOOKS:
            return None
        following = iter(through)
        return mapped(output, lambda _: next(following))

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether graphs count a tensor: what :func:`is_countable` asks besides cannot be traced."""
        is_here = tensor.device == self._device and tensor.layout == torch.strided
        return is_here and tensor.dtype in COUNTABLE and not tensor.is_nested

    def _count(self, tensor: Tensor, name: str) -> None:
        # Evaluation without no_grad, and what checkpointing runs again, get no gradients.
        doors, counts = self._doors, self._doors.model.training and not runs_backward()
        if not counts and not tensor.requires_grad:
            return
        pair, late = self._pair(name, tensor.device), None
        if doors.has_values:
            row = pair.values if counts else doors.new_row(tensor.device)
            late = None if counts else row
            count(tensor, row, pair.flag)
        if tensor.requires_grad and (doors.has_gradients or not counts):
            hook = OwnHook(partial(self._arrived, pair, late, doors.step))
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _pair(self, name: str, device: torch.device) -> _Pair:
        """Return the rows of a tensor by its name: those that graphs count in where there are some."""
        for each, pair, is_late in self.named():
            if each == name and not is_late and pair.values.device == device:
                return pair
        self.pairs.append(_Pair(self._doors, device, name))
        return self.pairs[-1]

    def _arrived(self, pair: _Pair, late: Tensor | None, step: int, gradient: Tensor) -> None:
        """Count the gradient of an output, which then has been part of training."""
        doors = self._doors
        if not doors.is_open or doors.step != step or gradient is None or is_watched():
            return
        with DisableTorchFunction():
            if late is not None and all(late is not each for each in pair.late):
                pair.late.append(late)
            if doors.has_gradients and is_countable(gradient) and gradient.numel():
                count(gradient, pair.gradient, pair.flag, doors.factor())


class Doors:
    """Counts where modules end, in recorded steps: hooks on the modules of a model.

    Once graphs of torch.compile count, hooks stay between these steps too: torch guards no hooks, and would take a
    graph that was made without them. There a flag in the device's memory turns counting on and off.

    Args:
        subject: What is watched.
        kinds: ``activations``, ``activation_gradients`` or both.
        width: Numbers of a row.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        model: What trains.
        is_open: Whether a step is recorded.
        step: How many were.
        called: The paths of modules that Python called in it, in the order in which their calls ended.
        has_values: Whether activations are counted.
        has_gradients: Whether their gradients are.
        stays: Whether hooks stay on between recorded steps.
        factor: As given.
    """

    def __init__(
        self, subject: Subject, kinds: Collection[str], width: int, factor: Callable[[], Tensor | None]
    ) -> None:
        self.model, self.factor = subject.model, factor
        self.has_values, self.has_gradients = (kind in kinds for kind in ("activations", "activation_gradients"))
        self.is_open, self.step, self.called = False, 0, dict[str, None]()
        self.stays, self._width = False, width
        self._shared: dict[torch.device, tuple[Tensor, Tensor]] = {}
        first = next(subject.model.parameters()).device
        self._doors = {
            module: Door(self, path, next((param.device for param in module.parameters()), first))
            for module, path in subject.paths.items()
        }
        self._handles: list[RemovableHandle] = []

    def new_row(self, device: torch.device) -> Tensor:
        """Return zeros to count in, in a storage of their own: a graph is made for tensors, not for places in one."""
        return torch.zeros(self._width, dtype=torch.int64, device=device)

    def of_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a device's flag, and its factor of gradients in graphs."""
        if device not in self._shared:
            flag = torch.full((1,), int(self.is_open), dtype=torch.int32, device=device)
            self._shared[device] = flag, torch.ones((), device=device)
        return self._shared[device]

    def stay(self) -> None:
        """Leave the hooks on between recorded steps, for graphs.

        Raises:
            PolicyError: They would be too many.
        """
        number = len(self._doors) * (self.has_values + self.has_gradients)
        if number > MOST:
            raise PolicyError(
                f"{number} observations are too many for graphs of torch.compile",
                where=f"{len(self._doors)} modules of {type(self.model).__name__}",
                why=f"{MOST} at most: the memory of each is made before the model is compiled, and stays",
                write='Recorder(…, modules=["layers.0", "layers.31"]), or fewer kinds=',
            )
        self.stays = True

    def open(self) -> None:
        """Count from here on, anew."""
        self.is_open, self.step = True, self.step + 1
        self.called.clear()
        if self.stays or is_imported():
            for door in self._doors.values():
                door.make_ready()
        pairs = [pair for door in self._doors.values() for _, pair, _ in door.named()]
        if pairs:
            foreach_zero_([row for pair in pairs for row in (pair.values, pair.gradient)])
        for pair in pairs:
            pair.late.clear()
        for flag, _ in self._shared.values():
            flag.fill_(1)
        self.scaled()
        if not self._handles:
            self._handles = [module.register_forward_hook(door) for module, door in self._doors.items()]

    def close(self) -> None:
        """Count no more."""
        self.is_open = False
        for flag, _ in self._shared.values():
            flag.zero_()
        if not self.stays:
            self.remove()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def scaled(self) -> None:
        """Let graphs know by what to multiply the gradients that come now. No host sync."""
        for _, known in self._shared.values() if self.is_open and is_imported() else ():
            factor = self.factor()
            memory = known.data  # a graph has it from the forward pass, and torch would refuse what was written since
            memory.fill_(1.0) if factor is None else memory.copy_(factor, non_blocking=known.device.type != "cpu")

    def found(self, tally: Tally) -> list[Returned]:
        """Hand on all rows."""
        made: list[Returned] = []
        for door in self._doors.values():
            for name, pair, is_late in door.named():
                gradient = tally.take(pair.gradient)
                if self.has_gradients:
                    made.append((("activation_gradients", door.path, name), gradient, None))
                if self.has_values:
                    values = (tally.take(row) for row in (pair.values, *pair.late))
                    made += [(("activations", door.path, name), row, gradient if is_late else None) for row in values]
        return made


class WeightWatch:
    """Counts what one step does to the parameters.

    Args:
        subject: What is watched.
        kinds: Which of ``weights``, ``weight_gradients`` and ``updates``.
        formats: The storage formats that updates are rounded to.
        tally: What counts.
        places: What is told of the rows.
        group: Returns the ranks whose counts are added up; ``None`` for this one's.

    Attributes:
        has_gradients: Whether a parameter has had a gradient.
    """

    def __init__(
        self,
        subject: Subject,
        kinds: Iterable[str],
        formats: Sequence[Format],
        tally: Tally,
        places: Places,
        group: Callable[[], Any],
    ) -> None:
        self._group = group
        self._subject, self._kinds, self._formats = subject, frozenset(kinds), formats
        self._tally, self._places = tally, places
        self._before: dict[Tensor, tuple[Tensor, torch.dtype]] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self.has_gradients = False

    def before(self, updated: Container[Tensor]) -> None:
        """Count the weights that a step may move, and copy them.

        Args:
            updated: The parameters that the step is one of.
        """
        mine = filter(self._is_mine, self._subject.params)
        moving = (param for param in mine if param.requires_grad and param in updated)
        for param, value in _values(moving):
            if "weights" in self._kinds:
                self._put("weights", param, None, self._tally.count(value))
            if "updates" in self._kinds:
                self._before[param] = value.to(torch.float32, copy=True), value.dtype

    def keep(self, moved: Container[Tensor]) -> None:
        """Let go of the copies of parameters that the step is not one of after all."""
        self._before = {param: before for param, before in self._before.items() if param in moved}

    def rest(self) -> None:
        """Count the weights that no step has moved."""
        places = self._subject.params if "weights" in self._kinds else {}
        others = [param for param, place in places.items() if ("weights", *place) not in self._places]
        others = [*filter(self._is_mine, others)]
        for param, value in _values(others):
            self._put("weights", param, None, self._tally.count(value))

    def gradient(self, param: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        """Count a gradient, instead of an earlier one of the same parameter.

        Args:
            param: The model's parameter.
            gradient: Its gradient.
            factor: What to multiply it by; ``None`` for 1.
        """
        if param not in self._subject.params or not is_countable(gradient := local(gradient)):
            return
        self.has_gradients = True
        if not self._is_mine(param):
            return
        if "updates" in self._kinds:
            self._gradients[param] = gradient
        if "weight_gradients" in self._kinds:
            _, known = self._places.get(("weight_gradients", *self._subject.params[param]), (None, [None]))
            self._put("weight_gradients", param, None, self._tally.count(gradient, factor, known[0]))

    def after(self) -> None:
        """Count the updates of the weights that were copied, and let go of the copies."""
        moves = []
        for param, value in _values(self._before):
            before, dtype = self._before[param]
            update = value.float() - before
            row = self._tally.count(update)
            self._put("updates", param, dtype, row)
            gradient = self._gradients.pop(param, None)
            if gradient is not None:
                is_alike = gradient.shape == update.shape and gradient.layout == torch.strided
                gradient = gradient.detach().reshape(-1) if is_alike else None
            moves.append(Move(before.reshape(-1), update.reshape(-1), gradient, self._tally.beside(row)))
        self._before.clear()
        for device in dict.fromkeys(move.update.device for move in moves):
            count_moves([move for move in moves if move.update.device == device], self._formats)

    def _is_mine(self, param: Any) -> bool:
        """Whether this rank counts a parameter, or its shard of it: of ranks that hold the same, the first does."""
        group = self._group()
        if group is None:
            return True
        if not is_distributed(param):
            return bool(group.rank() == 0)
        places = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
        return all(number == 0 for placement, number in places if placement.is_replicate())

    def _put(self, kind: str, param: Tensor, dtype: torch.dtype | None, row: int) -> None:
        self._places[kind, *self._subject.params[param]] = None if dtype is None else dtype_name(dtype), [row]


def _values(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters whose values can be counted, each with those that this rank holds."""
    for param in params:
        held = local(param.detach())
        value = held.value() if isinstance(held, Halves) else held  # halves are decoded once
        if is_countable(value):
            yield param, value


def swallowed_of(numbers: Sequence[int], formats: Sequence[Format]) -> SwallowedUpdates:
    """Read what :class:`WeightWatch` has put beside the histogram of an update."""
    updated, beyond, with_gradient, unmoved, *lost = numbers
    return SwallowedUpdates(
        updated=updated,
        swallowed={target.name: count for target, count in zip(formats, lost, strict=True)},
        beyond=beyond,
        with_gradient=with_gradient,
        unmoved=unmoved,
    )
