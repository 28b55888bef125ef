"""What one tensor or one kernel's call says about its numbers: finite or not, its range, what a wider format holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from mezzo.cast.casts import is_further_use
from mezzo.tensors import COMPRESSED, dtype_name, each_tensor, has_fraction, leaves, mapped, tensors, values_of

#: In-place kernels that do not read what they write to, which may be memory that nothing was written to before.
_OVERWRITING: Final = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ set_".split()
)
_LAYOUTS: Final = (torch.strided, torch.sparse_coo, *COMPRESSED)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel reads.

    Attributes:
        name: Its name in the kernel's schema.
        tensor: Its numbers: the argument itself, or a copy where the kernel writes to it.
        argument: The argument itself.
    """

    name: str
    tensor: Tensor
    argument: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where the numbers of one tensor lie, in the range of its format.

    Attributes:
        name: What the tensor is: a parameter's path, ``output``, ``gradient of input 0``, a kernel's argument.
        dtype: Its format.
        shape: Its shape.
        smallest: Smallest magnitude that is not zero; ``None`` where all finite numbers are zero.
        largest: Largest finite magnitude.
        num_zeros: How many zeros.
        num_inf: How many infinities.
        num_nan: How many NaN.
        share: ``largest`` as a share of the format's largest number.
        headroom: Powers of two between ``largest`` and the format's largest number; ``None`` for zeros only.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float | None
    largest: float
    num_zeros: int
    num_inf: int
    num_nan: int
    share: float
    headroom: float | None

    def __str__(self) -> str:
        text = f"{self.name} ({self.dtype}, {shape_text(self.shape)}): "
        if self.headroom is None:
            return ", ".join([f"{text}{'all zero' if self.num_zeros else 'no finite number'}", *self.not_finite])
        text += f"|x| from {self.smallest:.4g} to {self.largest:.4g}, "
        text += f"{100 * self.share:.3g} % of the range, " if self.share > 1e-4 else ""
        zeros = f", {self.num_zeros} zeros" if self.num_zeros else ""
        return ", ".join([f"{text}{self.headroom:.3g} powers of two left{zeros}", *self.not_finite])

    @property
    def not_finite(self) -> list[str]:
        """How many infinities and NaN there are, in words."""
        return [f"{count} {word}" for count, word in ((self.num_inf, "inf"), (self.num_nan, "nan")) if count]


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape: ``4×3``."""
    return "×".join(map(str, shape)) or "scalar"


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither inf nor NaN; a host sync. Tensors without numbers of their own are finite."""
    if not has_fraction(tensor.dtype) or tensor.device.type == "meta" or tensor.layout not in _LAYOUTS:
        return True
    return bool(torch.isfinite(_values(tensor)).all())


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor holds NaN; a host sync."""
    return bool(torch.isnan(_values(tensor)).any())


def is_like_a_mask(tensor: Tensor) -> bool:
    """Whether -inf is all that a tensor holds beside finite numbers, as attention masks do; a host sync."""
    values = _values(tensor)
    return not values.is_complex() and not bool((torch.isnan(values) | torch.isposinf(values)).any())


def range_of(tensor: Tensor, name: str) -> Range:
    """Measure where the numbers of a tensor lie; a few host syncs."""
    values = _values(tensor)
    magnitudes = (torch.view_as_real(values) if values.is_complex() else values).abs()
    finite = magnitudes[torch.isfinite(magnitudes)]
    positive = finite[finite > 0]
    largest = float(positive.amax()) if positive.numel() else 0.0
    limit = torch.finfo(tensor.dtype).max
    return Range(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple((values if tensor.is_nested else tensor).shape),
        smallest=float(positive.amin()) if positive.numel() else None,
        largest=largest,
        num_zeros=finite.numel() - positive.numel(),
        num_inf=int(torch.isinf(magnitudes).sum()),
        num_nan=int(torch.isnan(magnitudes).sum()),
        share=largest / limit,
        headroom=math.log2(limit / largest) if largest else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostIntegers:
    """Integers that a format does not hold.

    Attributes:
        dtype: The format.
        largest: The largest magnitude.
        num_changed: How many become other numbers.
        num_all: How many there are.
    """

    dtype: str
    largest: int
    num_changed: int
    num_all: int


def _values(tensor: Tensor) -> Tensor:
    """Return the numbers themselves, in a format that has arithmetic."""
    values = values_of(tensor)
    return values.float() if values.element_size() == 1 else values


# Kernels --------------------------------------------------------------------------------------------


def operands(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Operand]:
    """Return what a kernel is about to read: copies of tensors that it writes to too, and none that it only writes."""
    read = []
    overwrites = str(kernel._schema.name).removeprefix("aten::") in _OVERWRITING
    for position, argument in enumerate(kernel._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if value is None or argument.is_out or (is_written and overwrites):
            continue
        members = list(tensors(value))
        for number, tensor in enumerate(members):
            if has_fraction(tensor.dtype):
                name = argument.name if len(members) == 1 else f"{argument.name}[{number}]"
                read.append(Operand(name, tensor.clone() if is_written else tensor, tensor))
    return read


def has_literal(args: Any, kwargs: Any) -> bool:
    """Whether an argument of the call is an infinity or NaN, as in ``masked_fill(mask, -inf)``."""
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for _, leaf in leaves((args, kwargs)))


def widened(
    dtype: torch.dtype, kernel: Any, args: Any, kwargs: Any, before: Mapping[int, Tensor] = MappingProxyType({})
) -> list[Tensor] | None:
    """Run a kernel again in a wider format.

    Args:
        dtype: The wider format.
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        before: Tensors to read in the stead of arguments, by the argument's ``id``.

    Returns:
        Its results that hold fractions; ``None`` where the kernel draws random numbers or has no such form.
    """
    if torch.Tag.nondeterministic_seeded in kernel.tags or any(
        argument.is_out for argument in kernel._schema.arguments
    ):
        return None

    kinds = Tensor, torch.dtype

    def widen(leaf: Tensor | torch.dtype) -> Tensor | torch.dtype:
        if isinstance(leaf, Tensor):
            return before.get(id(leaf), leaf).to(dtype) if leaf.dtype.is_floating_point else leaf
        return dtype if leaf.is_floating_point else leaf

    try:
        results = kernel(*mapped(args, widen, kinds), **mapped(kwargs, widen, kinds))
        return [result for result in tensors(results) if has_fraction(result.dtype)]
    except Exception:  # a user's kernel refuses a format in its own way, an assert or a KeyError; the report goes on
        return None


def needed(
    dtype: torch.dtype, kernel: Any, args: Any, kwargs: Any, read: list[Operand], position: int
) -> tuple[float | None, torch.dtype | None]:
    """Return what a result would be in a wider format, and the format that holds it, by running the kernel again.

    Args:
        dtype: The result's format.
        kernel: The kernel.
        args: Its positional arguments; what it wrote to is taken from ``read``.
        kwargs: Its keyword arguments.
        read: What it read, as :func:`operands` listed it before the call.
        position: Which of its results with fractions.

    Returns:
        The largest magnitude, and the next wider format that holds it. Inf or NaN, and no format, where none does;
        ``None`` where no wider kernel could be run.
    """
    magnitude, before = None, {id(operand.argument): operand.tensor for operand in read}
    for wider in (torch.float32, torch.float64):
        if torch.finfo(wider).bits > torch.finfo(dtype).bits:
            results = (widened(wider, kernel, args, kwargs, before) or [])[position:]
            magnitude = float(_values(results[0]).abs().amax()) if results and results[0].numel() else None
            if magnitude is not None and math.isfinite(magnitude):
                return magnitude, wider
    return magnitude, None


# Names of tensors: a parameter's or buffer's path, an input of the model, the gradient of one of them.

Role = Literal["parameter", "buffer", "input"]
#: An autograd node and the number of its result; for a leaf, the tensor's id and 0.
Edge = tuple[Any, int]

#: Autograd nodes that pass on a gradient in another shape, layout or format.
_SAME_NUMBERS: Final = (
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze", "ToCopy",
    "Alias", "Clone", "Contiguous",
)  # fmt: skip


def numbered(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with the prefix of its paths: empty for a single model, else its number."""
    return (("" if len(models) == 1 else f"{number}.", model) for number, model in enumerate(models))


def named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a model's arguments, each with its name."""
    for key, value in (*enumerate(args), *kwargs.items()):
        for path, tensor in each_tensor(value):
            yield f"input {key}{path}", tensor


class Names:
    """The names of the models' parameters, buffers and inputs.

    Args:
        models: The models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names_by_id: dict[int, tuple[Role, str, Tensor]] = {}
        self._sound: set[int] = set()
        for prefix, model in numbered(models):
            for name, param in model.named_parameters():
                self._names_by_id.setdefault(id(param), ("parameter", prefix + name, param))
            for name, buffer in model.named_buffers():
                self._names_by_id.setdefault(id(buffer), ("buffer", prefix + name, buffer))
                if is_finite(buffer):
                    self._sound.add(id(buffer))

    def put_inputs(self, prefix: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Name the inputs of a model.

        Args:
            prefix: The prefix of the model's paths.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        of_model = f" of model {prefix[:-1]}" if prefix else ""
        for name, tensor in named_inputs(args, kwargs):
            # A reference to the tensor keeps its id from being used again.
            self._names_by_id.setdefault(id(tensor), ("input", f"{name}{of_model}", tensor))

    def was_finite(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer that was finite at first: batch norm's kernels write without saying so."""
        return id(tensor) in self._sound

    def of(self, tensor: Tensor) -> tuple[Role, str, Tensor] | None:
        """Return the role and name of a tensor, a view or a cast, and the tensor that has the name."""
        for candidate in (tensor, tensor._base):
            if candidate is not None and (named := self._names_by_id.get(id(candidate))) is not None:
                return named
        node = tensor.grad_fn
        while node is not None and (edge := _handed_on(node)) is not None:
            node = edge[0]
        return self._names_by_id.get(id(getattr(node, "variable", None)))

    def of_edge(self, edge: Edge, arguments: Mapping[Edge, str]) -> str:
        """Return the name of the tensor whose gradient goes along an edge of the autograd graph.

        Args:
            edge: The edge.
            arguments: The op's own arguments, by :func:`edges`.
        """
        node, slot = edge
        while True:
            variable = getattr(node, "variable", None)
            if (named := self._names_by_id.get(id(variable))) is not None:
                return named[1]
            if (name := arguments.get((node, slot), arguments.get((id(variable), 0)))) is not None:
                return name
            if (following := _handed_on(node)) is None:
                return "an input"
            node, slot = following


def edges(args: Any, kwargs: Any) -> dict[Edge, str]:
    """Return the names of the arguments that need a gradient, by the edge along which the gradient goes."""
    names: dict[Edge, str] = {}
    for number, tensor in enumerate(tensors((args, kwargs))):
        if tensor.requires_grad:
            edge = (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
            names.setdefault(edge, f"input {number}")
    return names


def _handed_on(node: Any) -> Edge | None:
    """Return the edge along which a node sends its gradient on, if it changes no more than its shape or format."""
    name = node.name().removesuffix("0").removesuffix("Backward")
    following = [edge for edge in node.next_functions if edge[0] is not None]
    hands_on = name in _SAME_NUMBERS or is_further_use(node)
    return following[0] if hands_on and len(following) == 1 else None
