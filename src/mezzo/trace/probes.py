"""What is measured at the kernels of a watched pass: each number stays on its device until the pass is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from mezzo.tensors import LOW, dtype_name, tensors, values_of, versions
from mezzo.trace import measure
from mezzo.trace.kernels import Storages
from mezzo.trace.measure import LostIntegers
from mezzo.trace.table import KernelRecord

#: Which kernels a probe is for.
Wanted = Callable[[KernelRecord], bool]


class Probe(Protocol):
    """Measures at kernels, without a host sync."""

    name: str

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Look at what a kernel is about to read; what it returns goes to :meth:`measure`."""

    def wants(self, record: KernelRecord) -> bool:
        """Whether anything is to be measured at a kernel that has run."""

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return numbers on the device, as one row in FP64; ``None`` where there is nothing to measure."""

    def read(self, numbers: list[float]) -> Any:
        """Make of the numbers what :attr:`~mezzo.trace.table.KernelRecord.probes` holds."""


def is_measurable(tensor: Any) -> TypeGuard[Tensor]:
    """Whether a tensor is a plain one that holds real numbers."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type != "meta" and not tensor.is_complex() and bool(tensor.numel())


def _row(*numbers: Tensor) -> Tensor:
    return torch.stack([each.double() for each in numbers])


class AfterKernels:
    """What measures kernels once they have run, and needs nothing before."""

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> None:
        """Keep nothing."""


class RoundedIntegers(AfterKernels):
    """What rounding to a low format does to tensors of integers, at casts of the forward pass."""

    name = "integers"

    def wants(self, record: KernelRecord) -> bool:
        """Whether it is a cast to a low format, in the forward pass."""
        return record.phase == "forward" and record.kind in ("cast", "rounding") and record.gives[0].dtype in LOW

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return what :meth:`read` needs of a cast's argument."""
        return self.numbers(args[0], out.dtype)

    @staticmethod
    def numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the largest magnitude, how many have a fraction, how many change and how many there are, and bounds.

        Of floating numbers none may exceed what its own format counts by halves: above that all are integers, whatever
        they stand for. Every integer up to the lower bound has its place in the low format.
        """
        values = values_of(tensor)
        if not (type(tensor) in (Tensor, nn.Parameter) or tensor.is_nested) or not is_measurable(values):
            return None
        highest = 1 / torch.finfo(values.dtype).eps if values.is_floating_point() else 2.0**53
        values = values.double() if not values.is_floating_point() or values.element_size() == 1 else values
        low, high = values.aminmax()
        largest = torch.maximum(-low, high)
        if values.device.type == "cpu" and not 2 / torch.finfo(dtype).eps < float(largest) <= highest:
            return None  # most casts are of small numbers, and here they are known at once
        rounded = values.to(dtype).to(values.dtype)
        known = values.new_tensor([values.numel(), highest, LOW.index(dtype)], dtype=torch.float64)
        return torch.cat([_row(largest, (values != values.trunc()).sum(), (rounded != values).sum()), known])

    @staticmethod
    def read(numbers: list[float]) -> LostIntegers | None:
        """Say what was lost; ``None`` where a number has a fraction or is not finite, or where none changes."""
        largest, num_fractions, num_changed, num_all, highest, number = numbers
        dtype = LOW[int(number)]
        if not 2 / torch.finfo(dtype).eps < largest <= highest or num_fractions or not num_changed:
            return None
        return LostIntegers(
            dtype=dtype_name(dtype), largest=int(largest), num_changed=int(num_changed), num_all=int(num_all)
        )


def lost_integers(tensor: Tensor, dtype: torch.dtype) -> LostIntegers | None:
    """Say what rounding to a format does to a tensor of integers; a host sync.

    Example:
        >>> lost_integers(torch.arange(300.0), torch.bfloat16)
        LostIntegers(dtype='bfloat16', largest=299, num_changed=22, num_all=300)
        >>> lost_integers(torch.tensor([0.5, 299.0]), torch.bfloat16) is None
        True
    """
    numbers = RoundedIntegers.numbers(tensor, dtype)
    return None if numbers is None else RoundedIntegers.read(numbers.tolist())


class ExtentOf(NamedTuple):
    """Where the numbers of a result lie.

    Attributes:
        num_inf: How many infinities.
        num_nan: How many NaN.
        num_zeros: How many zeros.
        smallest: Smallest finite magnitude that is not zero; inf where there is none.
        largest: Largest finite magnitude; 0 where there is none.
    """

    num_inf: int
    num_nan: int
    num_zeros: int
    smallest: float
    largest: float


@dataclass(slots=True)
class Extent:
    """Where the numbers of the first result lie; of a cast, or a kernel that gives integers, those of what it reads.

    Attributes:
        wants: At which kernels.
        of_operand: Whether the first operand is measured instead of the result.
    """

    wants: Wanted
    of_operand: bool = False
    name: str = "extent"

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the first operand, if it is that which is measured."""
        return next(tensors((args, kwargs)), None) if self.of_operand else None

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return the five numbers."""
        tensor = begun if self.of_operand else next(tensors(out), None)
        if not is_measurable(tensor):
            return None
        sizes = tensor.detach().double().abs()
        finite = torch.isfinite(sizes)
        return _row(
            torch.isinf(sizes).sum(), torch.isnan(sizes).sum(), (sizes == 0).sum(),
            torch.where(finite & (sizes > 0), sizes, math.inf).amin(), torch.where(finite, sizes, 0.0).amax(),
        )  # fmt: skip

    def read(self, numbers: list[float]) -> ExtentOf:
        """Name the five numbers."""
        num_inf, num_nan, num_zeros, smallest, largest = numbers
        return ExtentOf(int(num_inf), int(num_nan), int(num_zeros), smallest, largest)


class TotalOf(NamedTuple):
    """Sums in FP64.

    Attributes:
        terms: The sum of each of the first two operands, before the kernel.
        magnitudes: The sum of the magnitudes of each of them.
        result: The sum of the first result.
    """

    terms: tuple[float, ...]
    magnitudes: tuple[float, ...]
    result: float


@dataclass(slots=True)
class Total:
    """The sums of what an addition reads, before it writes, and of what it gives.

    Attributes:
        wants: At which kernels.
        starts: Whether a kernel may be wanted: the sums are made before it runs.
    """

    wants: Wanted
    starts: Callable[[Any], bool]
    name: str = "total"

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Add up what is read."""
        read = list(tensors((args, kwargs)))[:2]
        if not self.starts(kernel) or not read or not all(map(is_measurable, read)):
            return None
        values = [each.detach().double() for each in read]
        return _row(*(each.sum() for each in values), *(each.abs().sum() for each in values))

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Add up what was given."""
        result = next(tensors(out), None)
        if begun is None or not is_measurable(result):
            return None
        return torch.cat([begun, _row(result.detach().double().sum())])

    def read(self, numbers: list[float]) -> TotalOf:
        """Name the sums."""
        half = len(numbers) // 2
        return TotalOf(tuple(numbers[:half]), tuple(numbers[half:-1]), numbers[-1])


class DistinctOf(NamedTuple):
    """How many different numbers there are.

    Attributes:
        given: In the result.
        exact: In the result of the same kernel in FP64.
        error: The largest difference between both.
        step: The smallest distance between two different numbers in FP64; inf where there are none.
        num_all: How many numbers there are.
    """

    given: int
    exact: int
    error: float
    step: float
    num_all: int


@dataclass(slots=True)
class Distinct(AfterKernels):
    """How many numbers of a result are different, and how many are in FP64: of positions, anchors and grids.

    Attributes:
        wants: At which kernels.
        most: Of larger results nothing is measured.
    """

    wants: Wanted
    most: int = 2**16
    name: str = "distinct"

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Run the kernel again in FP64, and compare neighbours of both results, in their order."""
        result = next(tensors(out), None)
        if not is_measurable(result) or result.numel() > self.most:
            return None
        exact = measure.widened(torch.float64, record.kernel, args, kwargs)
        if not exact or not is_measurable(exact[0]) or exact[0].shape != result.shape:
            return None
        ours, theirs = result.detach().double().flatten(), exact[0].double().flatten()
        gaps, exact_gaps = ours.sort().values.diff(), theirs.sort().values.diff()
        steps = torch.where(exact_gaps > 0, exact_gaps, math.inf)
        least = torch.cat([steps, steps.new_full((1,), math.inf)]).amin()
        count = steps.new_tensor(float(result.numel()))
        return _row((gaps > 0).sum() + 1, (exact_gaps > 0).sum() + 1, (ours - theirs).abs().amax(), least, count)

    def read(self, numbers: list[float]) -> DistinctOf:
        """Name the numbers."""
        given, exact, error, step, num_all = numbers
        return DistinctOf(int(given), int(exact), error, step, int(num_all))


class RatioOf(NamedTuple):
    """Signal to noise in dB; inf where the numbers are exact.

    Attributes:
        whole: Of all numbers.
        places: For each place along one dimension; nothing where there are too many.
    """

    whole: float
    places: tuple[float, ...]


@dataclass(slots=True)
class Ratio(AfterKernels):
    """Signal to noise of the first result against the same kernel in FP64.

    Operands that a cast made are taken as they were before it; of others their own numbers, in FP64.

    Attributes:
        wanted: At which kernels.
        along: The dimension of a kernel's result along which places are told apart.
        most: Up to how many places.

    **Cost**: what casts read stays in memory until the pass is over.
    """

    wanted: Wanted
    along: Callable[[KernelRecord], int] = lambda record: -1
    most: int = 2**12
    name: str = "ratio"
    _casts: Storages[_KeptCast] = field(default_factory=Storages)

    def wants(self, record: KernelRecord) -> bool:
        """Whether it is a cast, which is kept, or one of the kernels asked for."""
        return record.kind == "cast" or self.wanted(record)

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Run the kernel again in FP64, and add up the squares of its numbers and of the differences."""
        numbers = None
        result = next(tensors(out), None)
        if self.wanted(record) and not record.kernel._schema.is_mutable and is_measurable(result):
            before = {id(each): self._exact(each) for each in tensors((args, kwargs))}
            exact = measure.widened(torch.float64, record.kernel, args, kwargs, before)
            if exact and is_measurable(exact[0]) and exact[0].shape == result.shape:
                right = exact[0].double()
                wrong = result.detach().double() - right
                along = self.along(record)
                size = result.shape[along] if result.dim() else 1
                squares = [each.square() for each in (right, wrong)]
                rows = [each.movedim(along, -1) if each.dim() else each for each in squares]
                places = [each.reshape(-1, size).sum(0) for each in rows]
                numbers = torch.cat(
                    [*(each.sum().reshape(1) for each in places), *(places if size <= self.most else ())]
                )
        if record.kind == "cast" and is_measurable(args[0]) and is_measurable(out):
            if record.by == "emulation" and out.dtype in LOW:  # a device with the arithmetic makes no such cast
                return numbers
            self._casts.put([out], _KeptCast(args[0], out.detach(), versions((args[0], out))))
        return numbers

    def _exact(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it was before the casts that made it, if nothing was written to either since."""
        while (cast := self._casts.get(tensor)) is not None:
            if versions((cast.before, tensor)) != cast.versions:
                break
            if cast.before.stride() != cast.after.stride() or cast.before is tensor:
                break
            moved = tensor.storage_offset() - cast.after.storage_offset() + cast.before.storage_offset()
            tensor = cast.before.detach().as_strided(tensor.shape, tensor.stride(), moved)
        return tensor

    def read(self, numbers: list[float]) -> RatioOf:
        """Turn the sums into dB."""
        ratios = [_decibel(right, wrong) for right, wrong in zip(*_halves(numbers[2:]), strict=True)]
        return RatioOf(_decibel(*numbers[:2]), tuple(ratios))


class _KeptCast(NamedTuple):
    before: Tensor
    after: Tensor
    versions: list[int]  # of both


def _halves(numbers: list[float]) -> tuple[list[float], list[float]]:
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


def _decibel(right: float, wrong: float) -> float:
    if not wrong:
        return math.inf
    if math.isnan(wrong) or math.isinf(wrong) or not right:
        return -math.inf
    return 10 * math.log10(right / wrong)
