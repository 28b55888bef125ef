"""Measurements at the kernels of a watched pass: each number stays on its device until the pass is over."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from mezzo.tensors import LOW, dtype_name, tensors, values_of, versions
from mezzo.trace import measure
from mezzo.trace.kernels import Storages
from mezzo.trace.measure import LostIntegers
from mezzo.trace.table import KernelRecord

#: Whether a probe measures at a kernel.
Wanted = Callable[[KernelRecord], bool]
#: Results with more entries along a dimension get one ratio alone.
_MOST_ENTRIES: Final = 2**12
_MOST_POSITIONS: Final = 2**16
_AS_THEY_ARE: Final[Mapping[int, Tensor]] = MappingProxyType({})


class Probe:
    """Measures at kernels, without a host sync.

    Attributes:
        name: Under which :attr:`~mezzo.trace.table.KernelRecord.probes` holds what was measured.
        gives: Makes the result of the numbers.
        wants: Whether to measure at a kernel that has run.
    """

    name: str
    gives: Callable[..., Any]

    def __init__(self, wants: Wanted) -> None:
        self.wants = wants

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Return what :meth:`measure` needs of the operands, before the kernel runs."""

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return the measured numbers on the device, as one row in FP64; ``None`` if nothing was measured."""
        raise NotImplementedError

    def read(self, numbers: list[float]) -> Any:
        """Return the result for :attr:`~mezzo.trace.table.KernelRecord.probes`, from the fetched numbers."""
        return self.gives(*numbers)


def is_measurable(tensor: Any) -> TypeGuard[Tensor]:
    """Whether a tensor is a plain one that holds real numbers."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type != "meta" and not tensor.is_complex() and bool(tensor.numel())


def _row(*numbers: Tensor) -> Tensor:
    return torch.stack([number.double() for number in numbers])


def _sizes(tensor: Tensor) -> Tensor:
    return tensor.detach().double().abs()


def _with_exact(
    record: KernelRecord, args: Any, kwargs: Any, out: Any, before: Mapping[int, Tensor] = _AS_THEY_ARE
) -> tuple[Tensor, Tensor] | None:
    """Return a kernel's first result, and that of the same kernel in FP64; both in FP64."""
    result = next(tensors(out), None)
    if not is_measurable(result):
        return None
    exact = measure.widened(torch.float64, record.kernel, args, kwargs, before)
    if not exact or not is_measurable(exact[0]) or exact[0].shape != result.shape:
        return None
    return result.detach().double(), exact[0].double()


class RoundedIntegers(Probe):
    """What rounding to a low format does to tensors of integers, at casts of the forward pass."""

    name = "integers"

    def __init__(self) -> None:
        super().__init__(
            lambda record: (
                record.phase == "forward" and record.effect in ("cast", "rounding") and record.gives[0].dtype in LOW
            )
        )

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return what :meth:`read` needs of a cast's argument."""
        return self.numbers(args[0], out.dtype)

    @staticmethod
    def numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the largest magnitude, how many have a fraction, how many change and how many there are, and bounds.

        Floating numbers above the upper bound are integers whatever they stand for, since their format has no fractions
        there. The low format holds every integer up to the lower bound.
        """
        values = values_of(tensor)
        if not (type(tensor) in (Tensor, nn.Parameter) or tensor.is_nested) or not is_measurable(values):
            return None
        highest = 1 / torch.finfo(values.dtype).eps if values.is_floating_point() else 2.0**53
        values = values.double() if not values.is_floating_point() or values.element_size() == 1 else values
        least, greatest = values.aminmax()
        largest = torch.maximum(-least, greatest)
        if values.device.type == "cpu" and not 2 / torch.finfo(dtype).eps < float(largest) <= highest:
            return None  # most casts are of small numbers, and on a CPU reading them waits for nothing
        rounded = values.to(dtype).to(values.dtype)
        constants = values.new_tensor([values.numel(), highest, LOW.index(dtype)], dtype=torch.float64)
        return torch.cat([_row(largest, (values != values.trunc()).sum(), (rounded != values).sum()), constants])

    def read(self, numbers: list[float]) -> LostIntegers | None:
        """Return what was lost; ``None`` where a number has a fraction or is not finite, or where none changes."""
        largest, num_fractions, num_changed, num_all, highest, number = numbers
        dtype = LOW[int(number)]
        if not 2 / torch.finfo(dtype).eps < largest <= highest or num_fractions or not num_changed:
            return None
        return LostIntegers(
            dtype=dtype_name(dtype), largest=int(largest), num_changed=int(num_changed), num_all=int(num_all)
        )


def lost_integers(tensor: Tensor, dtype: torch.dtype) -> LostIntegers | None:
    """Return what rounding to a format does to a tensor of integers; a host sync.

    Example:
        >>> lost_integers(torch.arange(300.0), torch.bfloat16)
        LostIntegers(dtype='bfloat16', largest=299, num_changed=22, num_all=300)
        >>> lost_integers(torch.tensor([0.5, 299.0]), torch.bfloat16) is None
        True
    """
    numbers = RoundedIntegers.numbers(tensor, dtype)
    return None if numbers is None else RoundedIntegers().read(numbers.tolist())


class Largest(Probe):
    """The largest finite magnitude of a kernel's first operand."""

    name, gives = "largest", float

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Measure the operand."""
        sizes = _sizes(args[0]) if is_measurable(args[0]) else None
        return None if sizes is None else _row(torch.where(torch.isfinite(sizes), sizes, 0.0).amax())


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


class Total(Probe):
    """The sums of the operands of an addition or subtraction, before it writes, and of its result."""

    name = "total"

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the sums of the operands, and of their magnitudes."""
        if kernel.overloadpacket not in _ADDITIONS:
            return None
        read = list(tensors((args, kwargs)))[:2]
        if not read or not all(map(is_measurable, read)):
            return None
        return _row(*(operand.double().sum() for operand in read), *(_sizes(operand).sum() for operand in read))

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Return the sums of the operands and of the result."""
        return torch.cat([begun, _row(out.double().sum())]) if begun is not None and is_measurable(out) else None

    def read(self, numbers: list[float]) -> TotalOf:
        """Return the sums by name."""
        half = len(numbers) // 2
        return TotalOf(tuple(numbers[:half]), tuple(numbers[half:-1]), numbers[-1])


_ADDITIONS: Final = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_)


class DistinctOf(NamedTuple):
    """How many different numbers there are.

    Attributes:
        result: In the result.
        exact: In the result of the same kernel in FP64.
        error: The largest difference between both.
        step: The smallest distance between two different numbers in FP64; inf where there are none.
        num_all: How many numbers there are.
    """

    result: float
    exact: float
    error: float
    step: float
    num_all: float


class Distinct(Probe):
    """How many numbers of a result are different, and how many are in FP64: of positions, anchors and grids."""

    name, gives = "distinct", DistinctOf

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Run the kernel again in FP64, and compare neighbours of both results, in their order."""
        results = _with_exact(record, args, kwargs, out) if out.numel() <= _MOST_POSITIONS else None
        if results is None:
            return None
        ours, theirs = (result.flatten() for result in results)
        gaps, exact_gaps = ours.sort().values.diff(), theirs.sort().values.diff()
        steps = torch.where(exact_gaps > 0, exact_gaps, math.inf)
        least = torch.cat([steps, steps.new_full((1,), math.inf)]).amin()
        count = steps.new_tensor(float(ours.numel()))
        return _row((gaps > 0).sum() + 1, (exact_gaps > 0).sum() + 1, (ours - theirs).abs().amax(), least, count)


class DifferenceOf(NamedTuple):
    """Sums of magnitudes in FP64, where entries of one tensor are subtracted from others of it.

    Attributes:
        subtracted: Of the first operand.
        result: Of the differences.
        exact: Of the differences of the same numbers, had the arithmetic that made them been in FP64.
    """

    subtracted: float
    result: float
    exact: float


class Difference(Probe):
    """How much larger numbers are than their differences, where entries of one tensor are subtracted.

    Args:
        subtracts: Whether a kernel is such a subtraction.
        makes: Whether a kernel is pointwise, so that its result can be computed again in FP64.

    **Cost**: the operands of such kernels stay in memory until the pass is over.
    """

    name, gives = "difference", DifferenceOf

    def __init__(self, subtracts: Wanted, makes: Wanted) -> None:
        super().__init__(lambda record: subtracts(record) or makes(record))
        self._subtracts = subtracts
        self._made = Storages[_Made]()

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Add up the magnitudes."""
        if record.kernel._schema.is_mutable or not is_measurable(out):
            return None
        if self._subtracts(record):
            one, other = map(self._exact, args[:2])
            return _row(_sizes(args[0]).sum(), _sizes(out).sum(), (one - other).abs().sum())
        read = list(tensors((args, kwargs)))
        self._made.put([out], _Made(record.kernel, args, kwargs, read, out.stride(), versions([*read, out])))
        return None

    def _exact(self, tensor: Tensor) -> Tensor:
        """Return a tensor in FP64, as if the pointwise kernels that made it had computed in FP64."""
        maker = self._made.get(tensor)
        if maker is None or maker.versions != versions([*maker.read, tensor]):
            return tensor.detach().double()
        before = {id(operand): self._exact(operand) for operand in maker.read} if len(maker.read) == 1 else {}
        exact = measure.widened(torch.float64, maker.kernel, maker.args, maker.kwargs, before)
        if not exact or exact[0].stride() != maker.strides:
            return tensor.detach().double()
        return exact[0].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Made(NamedTuple):
    """A pointwise kernel that has run, with its operands."""

    kernel: Any
    args: Any
    kwargs: Any
    read: list[Tensor]
    strides: tuple[int, ...]  # of its result
    versions: list[int]  # of what it has read, then of its result


class RatioOf(NamedTuple):
    """Signal to noise in dB; inf where the numbers are exact.

    Attributes:
        whole: Of all numbers.
        entries: For each entry along one dimension; empty where there are too many.
    """

    whole: float
    entries: tuple[float, ...]


class Ratio(Probe):
    """Signal to noise of the first result against the same kernel in FP64.

    An operand that a cast made counts as it was before the cast, as long as the program holds the cast's operand. Other
    operands count as they are, in FP64.

    Args:
        wanted: Whether to measure at a kernel.
        along: The dimension of a kernel's result along which each entry gets a ratio of its own.
    """

    name = "ratio"

    def __init__(self, wanted: Wanted, along: Callable[[KernelRecord], int] = lambda record: -1) -> None:
        super().__init__(lambda record: record.effect == "cast" or wanted(record))
        self._wanted, self._along = wanted, along
        self._casts = Storages[_CastRead]()

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Run the kernel again in FP64, and add up the squares of its numbers and of the differences."""
        numbers = None
        if self._wanted(record) and not record.kernel._schema.is_mutable:
            before = {id(operand): self._before(operand) for operand in tensors((args, kwargs))}
            if (results := _with_exact(record, args, kwargs, out, before)) is not None:
                numbers = self._squares(*results, self._along(record))
        # Emulation's casts to a low format are made by no device that has the arithmetic.
        is_made_up = record.by == "emulation" and record.gives[0].dtype in LOW
        if record.effect == "cast" and not is_made_up and is_measurable(args[0]) and is_measurable(out):
            cast = _CastRead(weakref.ref(args[0]), out.stride(), int(out.storage_offset()), versions((args[0], out)))
            self._casts.put([out], cast)
        return numbers

    @staticmethod
    def _squares(ours: Tensor, right: Tensor, along: int) -> Tensor:
        size = ours.shape[along] if ours.dim() else 1
        rows = [
            squares.movedim(along, -1) if squares.dim() else squares
            for squares in (right.square(), (ours - right).square())
        ]
        sums = [squares.reshape(-1, size).sum(0) for squares in rows]
        return torch.cat([*(squares.sum().reshape(1) for squares in sums), *(sums if size <= _MOST_ENTRIES else ())])

    def _before(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it was before the casts that made it, if neither was written to since."""
        while (cast := self._casts.get(tensor)) is not None and (read := cast.read()) is not None:
            if read is tensor or read.stride() != cast.strides or versions((read, tensor)) != cast.versions:
                break
            moved = tensor.storage_offset() - cast.offset + read.storage_offset()
            tensor = read.detach().as_strided(tensor.shape, tensor.stride(), moved)
        return tensor

    def read(self, numbers: list[float]) -> RatioOf:
        """Turn the sums into dB."""
        half = len(numbers) // 2
        sums = zip(numbers[2 : half + 1], numbers[half + 1 :], strict=True)
        return RatioOf(_decibel(*numbers[:2]), tuple(_decibel(*pair) for pair in sums))


class _CastRead(NamedTuple):
    """The operand of a cast, and the layout of its result."""

    read: weakref.ref[Tensor]
    strides: tuple[int, ...]
    offset: int
    versions: list[int]  # of both


def _decibel(right: float, wrong: float) -> float:
    if not wrong:
        return math.inf
    if math.isnan(wrong) or math.isinf(wrong) or not right:
        return -math.inf
    return 10 * math.log10(right / wrong)
