"""Watched passes of two models: what the first one's modules read and return, and how far the second one's part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import PolicyError
from mezzo.explanation.explaining import copied_inputs
from mezzo.formats import Format
from mezzo.numerics.distances import Distance, is_comparable, measured
from mezzo.sharded import reshard, units
from mezzo.tensors import LOW, dtype_name, each_tensor, mapped, mark

#: A module's path, and which of its calls it was.
Key: TypeAlias = tuple[str, int]
#: The same with the way to one tensor that it returned.
RowKey: TypeAlias = tuple[str, int, str]


@dataclass(slots=True)
class ModuleCall:
    """Copies of what a module of the first model read and returned in one call, by the ways to the tensors.

    Attributes:
        number: Its number among all calls.
        inputs: What it read.
        outputs: What it returned.
        has_written: Whether it wrote into its inputs.
    """

    number: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    has_written: bool = False


@dataclass(slots=True)
class _Frame:
    """A call that has not returned yet: the dtypes of what it was handed, and what its inputs were when it began."""

    key: Key
    dtypes: set[torch.dtype]
    marks: list[tuple[Tensor, tuple[int, int]]]


@dataclass(slots=True, kw_only=True)
class Parted:
    """What a module's own code does otherwise.

    Attributes:
        key: The module's call.
        before: The module in it that was handed the tensor; ``None`` where the module returned it.
        output: The way to the tensor in what it returned.
        distance: How far it is from the first model's.
    """

    key: Key
    before: str | None
    output: str
    distance: Distance


class ForwardPass:
    """One forward pass of a model whose modules are watched; its classes say what is done with tensors.

    Args:
        calls: Those of the first model, in their order.
    """

    def __init__(self, calls: dict[Key, ModuleCall]) -> None:
        self.calls, self.frames = calls, list[_Frame]()
        self._counts, self._paths = Counter[str](), dict[nn.Module, str]()

    def run(
        self,
        model: nn.Module,
        paths: Mapping[nn.Module, str],
        region: Callable[[], AbstractContextManager[Any]],
        batch: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        """Return what a model returns under the watch.

        Args:
            model: The model.
            paths: The path of each module to watch.
            region: Makes the region that it runs in.
            batch: Arguments and keyword arguments; the model gets copies.
        """
        args, kwargs = copied_inputs(batch)
        self._paths |= paths
        with ExitStack() as stack:
            stack.callback(lambda: reshard(units(model)))
            for module in paths:  # after all other hooks that it has
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(region())
            return model(*args, **kwargs)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths[module]
        key = path, self._counts[path]
        self._counts[path] += 1
        with DisableTorchFunction():
            replaced = self.enters(key, (args, kwargs), comparable((args, kwargs)))
            handed = list(comparable((args, kwargs) if replaced is None else replaced).values())
            self.frames.append(_Frame(key, {x.dtype for x in handed}, [(x, mark(x)) for x in handed]))
        return replaced

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        path = self._paths[module]
        while (frame := self.frames.pop()).key[0] != path:
            pass  # a call has raised, and the program has caught it
        with DisableTorchFunction():
            returned = comparable(output)
            replaced = self.leaves(frame, output, returned)
            if self.frames:
                self.frames[-1].dtypes |= {tensor.dtype for tensor in returned.values()}
        return replaced

    def enters(self, key: Key, inputs: Any, read: dict[str, Tensor]) -> Any:
        """Return what a module is to read in place of its inputs; ``None`` for these."""
        return None

    def leaves(self, frame: _Frame, output: Any, returned: dict[str, Tensor]) -> Any:
        """Return what a module is to return in place of its output; ``None`` for that."""
        return None


class FirstPass(ForwardPass):
    """The pass of the first model: copies of what its modules read and return."""

    def __init__(self, calls: dict[Key, ModuleCall]) -> None:
        super().__init__(calls)
        self._copies: Any = WeakTensorKeyDictionary()

    def enters(self, key: Key, inputs: Any, read: dict[str, Tensor]) -> None:
        """Copy what a module reads."""
        self.calls[key] = ModuleCall(len(self.calls), {at: self._copy(x) for at, x in read.items()})

    def leaves(self, frame: _Frame, output: Any, returned: dict[str, Tensor]) -> None:
        """Copy what it returns."""
        call = self.calls[frame.key]
        call.has_written = any(mark(tensor) != before for tensor, before in frame.marks)
        call.outputs = {at: self._copy(x) for at, x in returned.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy; that of before where the tensor has not changed since: most outputs are inputs next."""
        before, copy = self._copies.get(tensor, (None, tensor))
        if before != mark(tensor):
            copy = tensor.detach().clone()
            self._copies[tensor] = mark(tensor), copy
        kept_copy: Tensor = copy
        return kept_copy


class SecondPass(ForwardPass):
    """A pass of the second model as it runs: what its modules return is compared.

    Args:
        calls: Those of the first model.
        spacing: The format whose spacings are the unit.

    Attributes:
        called: The calls of the second model.
        dtypes: The dtypes of each tensor in both.
        unmatched: What only one of the models was given, or returned.
    """

    def __init__(self, calls: dict[Key, ModuleCall], spacing: Format) -> None:
        super().__init__(calls)
        self.called, self.unmatched = list[Key](), dict[str, None]()
        self.dtypes: dict[RowKey, tuple[str, str]] = {}
        self.spacing = spacing
        self._measured: dict[RowKey, tuple[Tensor, torch.Size]] = {}

    def distances(self) -> dict[RowKey, Distance]:
        """Return how far tensors are apart, by module, call and output: one host sync."""
        return dict(zip(self._measured, _read([*self._measured.values()]), strict=True))

    def leaves(self, frame: _Frame, output: Any, returned: dict[str, Tensor]) -> Any:
        """Compare what a module returns."""
        self.called.append(frame.key)
        for at, (first, second) in self.pairs(frame.key, "returned", returned).items():
            self.dtypes[(*frame.key, at)] = dtype_name(first.dtype), dtype_name(second.dtype)
            self._measured[(*frame.key, at)] = measured(first, second, self.spacing), first.shape

    def pairs(self, key: Key, verb: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the tensors that both models have in a call, by the way to them.

        Args:
            key: The call.
            verb: ``"was given"`` or ``"returned"``.
            tensors: Those of the second model.

        Raises:
            PolicyError: They have other shapes.
        """
        if (call := self.calls.get(key)) is None:
            return {}
        name, firsts = f"what {key[0] or 'the model'} {verb}", call.outputs if verb == "returned" else call.inputs
        if firsts.keys() != tensors.keys():
            self.unmatched[name] = None
        both = {at: (firsts[at], tensor) for at, tensor in tensors.items() if at in firsts}
        for at, (first, second) in both.items():
            if first.shape != second.shape:
                raise PolicyError(
                    "tensors of the two models have other shapes",
                    where=f"{name}{at}: {list(first.shape)} and {list(second.shape)}",
                    write="two models of one structure, which remember nothing between two calls",
                )
        return both


class ByItselfPass(SecondPass):
    """A pass of the second model in which every module reads, and hands on, what the first model's did."""

    def __init__(self, calls: dict[Key, ModuleCall], spacing: Format) -> None:
        super().__init__(calls, spacing)
        self._parted: list[tuple[Key, str | None, str, Tensor, torch.Size]] = []

    def parted(self) -> list[Parted]:
        """Return what was compared, in the order in which the second model came to it: one host sync."""
        distances = _read([(numbers, shape) for *_, numbers, shape in self._parted])
        return [
            Parted(key=key, before=before, output=output, distance=distance)
            for (key, before, output, *_), distance in zip(self._parted, distances, strict=True)
        ]

    def enters(self, key: Key, inputs: Any, read: dict[str, Tensor]) -> Any:
        """Compare what the module around it hands to it, and hand it what the first model's read."""
        both = self.pairs(key, "was given", read)
        for first, second in both.values() if self.frames else ():
            self._compare(self.frames[-1], key[0], "", first, second)
        return self._replaced(key, inputs, both)

    def leaves(self, frame: _Frame, output: Any, returned: dict[str, Tensor]) -> Any:
        """Compare what it returns, and hand on what the first model's returned."""
        both = self.pairs(frame.key, "returned", returned)
        for at, (first, second) in both.items():
            self._compare(frame, None, at, first, second)
        return self._replaced(frame.key, output, both)

    def _compare(self, frame: _Frame, before: str | None, output: str, first: Tensor, second: Tensor) -> None:
        """Compare with what the first model has, in the precision in which the module was handed numbers."""
        row = measured(first.to(second.dtype) if second.dtype in frame.dtypes else first, second, self.spacing)
        for low_dtype in frame.dtypes & {*LOW} - {second.dtype} if first.is_floating_point() else ():
            rounded = measured(first.to(low_dtype), second, self.spacing)
            row = torch.where(row[1] <= rounded[1], row, rounded)
        self._parted.append((frame.key, before, output, row, first.shape))

    def _replaced(self, key: Key, value: Any, both: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
        if not both:
            return None
        if self.calls[key].has_written:  # what the program reads next may be what the module has written into
            for first, second in both.values():
                second.copy_(first)
            return None
        new = {id(second): first.to(second.device, second.dtype, copy=True) for first, second in both.values()}
        return mapped(value, lambda tensor: new.get(id(tensor), tensor))


def comparable(value: Any) -> dict[str, Tensor]:
    """Return the tensors in nested containers that can be compared, by the ways to them."""
    return {at: tensor for at, tensor in each_tensor(value) if is_comparable(tensor)}


def _read(rows: Sequence[tuple[Tensor, torch.Size]]) -> list[Distance]:
    """Read distances from their devices: one transfer from each."""
    numbers: dict[int, list[float]] = {}
    for device in dict.fromkeys(row.device for row, _ in rows):
        indices = [index for index, (row, _) in enumerate(rows) if row.device == device]
        numbers |= zip(indices, torch.stack([rows[index][0] for index in indices]).tolist(), strict=True)
    return [Distance.of(numbers[index], shape) for index, (_, shape) in enumerate(rows)]
