"""What an explanation is made of, as values: rows, casts, misaligned products, findings; and alike ones as one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, Literal, TypeVar

# Numbers and formats as people read them.

#: Formats by dtype name, short enough for tables.
_FORMATS: Final[Mapping[str, str]] = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "float4_e2m1fn": "E2M1",
}


def byte_text(num_bytes: int) -> str:
    """Write a size with three digits and a binary unit.

    Example:
        >>> byte_text(512), byte_text(1536), byte_text(10_485_760)
        ('512 B', '1.50 KiB', '10.0 MiB')
    """
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{num_bytes} B"
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def share_text(part: float, whole: float) -> str:
    """Write a share in per cent; what is not all is never rounded to all, nor what is something to nothing.

    Example:
        >>> share_text(1, 3), share_text(3, 3), share_text(999_999, 1_000_000), share_text(1, 1_000_000)
        ('33.3 %', '100 %', 'over 99.9 %', 'under 0.1 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 99.9 < share < 100:
        return "over 99.9 %"
    return "under 0.1 %" if 0 < share < 0.1 else f"{share:.3g} %"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Write a number of things; their plural only where it has more than an s.

    Example:
        >>> counted(1, "product"), counted(1200, "cast"), counted(2, "policy", "policies")
        ('1 product', '1,200 casts', '2 policies')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def format_text(dtypes: Iterable[str]) -> str:
    """Write formats, short.

    Example:
        >>> format_text(["float16", "float32"]), format_text([])
        ('FP16+FP32', '–')
    """
    return "+".join(_FORMATS.get(name, name) for name in dtypes) or "–"


def scale_text(scale: float | None) -> str:
    """Write a loss scale: powers of two as such, since that is what they all should be.

    Example:
        >>> scale_text(65536.0), scale_text(1.0), scale_text(1000.0), scale_text(None)
        ('2^16', '1', '1000', '–')
    """
    if scale is None:
        return "–"
    scale = float(scale)  # JSON has infinity and NaN as texts
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale != 1 else f"{scale:.6g}"


FindingKind = Literal[
    "disagreement",
    "idle rule",
    "shadowed rule",
    "unreachable",
    "FP32 product",
    "no backward",
    "lost integers",
    "logits",
    "tied weights",
    "sum by hand",
    "positions",
    "basis",
    "criterion",
    "forward derivative",
    "codes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op in one module, in one precision.

    Attributes:
        module: Path of the module; ``""`` is the model itself, ``(loss)`` the loss function.
        op: The op's base name. Casts that the model's own code makes are ops too (``to``, ``float``).
        given: Floating dtypes of the arguments, as the model's code passed them.
        computes_in: Floating dtypes that entered the kernels, measured there. Under emulation, those of the rounded
            operands.
        returns: Dtypes of the result.
        count: How many calls.
        treatment: What the policy decided.
        rule: Text of the rule that decided; ``None`` where the level or the op table did.
        reason: Why.
        source: Whose decision it is.
        line: ``file:line`` in the user's code; ``None`` where only torch's own modules are on the stack.
        emulated: Whether it was computed in FP32 from rounded operands.
        disagreement: How what was measured differs from what the policy decided; ``""`` where it does not.
    """

    module: str
    op: str
    given: tuple[str, ...]
    computes_in: tuple[str, ...]
    returns: tuple[str, ...]
    count: int
    treatment: str
    rule: str | None
    reason: str
    source: str
    line: str | None
    emulated: bool = False
    disagreement: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Conversions between floating dtypes, of one kind in one place.

    Attributes:
        module: Path of the module in whose forward or backward pass they happen.
        op: The op whose argument it is, or whose gradient; ``""`` at the doors of modules and between ops.
        phase: ``forward`` or ``backward``; recomputation of checkpoints belongs to ``backward``.
        what: ``parameter``, ``buffer``, ``activation`` or ``gradient``.
        before: The dtype that is read.
        after: The dtype that is written.
        by: ``policy``; ``model``, its own code such as ``x.float()``; ``torch``, inside a function that the policy
            leaves alone and in the backward pass of mixed dtypes; ``emulation``, which a device with the arithmetic
            does not do.
        count: How many.
        num_bytes: Read and written together.
    """

    module: str
    op: str
    phase: str
    what: str
    before: str
    after: str
    by: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix products or convolutions of the forward pass, of one kind in one place.

    Attributes:
        module: Path of the module.
        op: The op's base name.
        dtype: The format of the operands; under emulation that of the rounded ones.
        count: How many kernels.
        flops: Their floating-point operations, together.
        why: The rule or the reason that gave them this format.
        line: ``file:line`` in the user's code.
    """

    module: str
    op: str
    dtype: str
    count: int
    flops: int
    why: str
    line: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misaligned:
    """A matrix product or convolution with a dimension that tensor cores do not like.

    Attributes:
        module: Path of the module.
        op: The op's base name.
        shape: Every dimension by name: ``M`` rows, ``N`` columns of the result and ``K`` summed over for products
            (of a linear layer: rows of the input, output features, input features).
        dtype: The format of the operands.
        multiple: What each dimension should be a multiple of: 8 for 16-bit formats, 16 for FP8.
        count: How many calls.
        line: ``file:line`` in the user's code.

    References:
        NVIDIA, *Train With Mixed Precision*, "Satisfying tensor core shape constraints".
    """

    module: str
    op: str
    shape: tuple[tuple[str, int], ...]
    dtype: str
    multiple: int
    count: int
    line: str | None

    @property
    def pads(self) -> str:
        """What to pad, in a few words: ``N 50257 → 50264``."""
        short = ((name, size, -size % self.multiple) for name, size in self.shape)
        return ", ".join(f"{name} {size} → {size + more}" for name, size, more in short if more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about the policy or the model that a table would hide.

    Attributes:
        kind: ``disagreement``: measured dtypes are not what the policy decided. ``idle rule``: it decided nothing in
            this run. ``shadowed rule``: earlier rules match all that it matches. ``unreachable``: a rule names an op
            inside a C++ composite, where nothing reaches. ``FP32 product``: a product ran in FP32 under a policy that
            computes in low precision, by its own decision or not, with its share of the FLOPs of all products in the
            forward pass. ``no backward``: nothing
            requires a gradient. ``lost integers``: positions, indices or times, exact in FP32, are rounded on their
            way into a low product. ``logits``: they are the largest activation. ``tied weights``: one tensor
            under two names, of which a rule speaks about one. Of numbers that sixteen bits do not hold: ``sum by
            hand``, ``positions``, ``basis`` (a filter bank, or another product with constants), ``criterion`` (a loss
            that computes low), ``forward derivative`` and ``codes`` (integers that are read off low numbers).
        where: A rule, or a module and an op.
        text: What was found, and what to do about it.
        rule: Text of the rule that cures it; empty where none does.
    """

    kind: FindingKind
    where: str
    text: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Emulated:
    """A family of products that computed in FP32 from rounded operands.

    Attributes:
        family: ``products`` (linear layers and all that is of no other family), ``convolution``, ``attention`` or
            ``recurrent``; or those of a treatment, ``fp8 products``.
        why: Why, in words.
    """

    family: str
    why: str


# Alike modules as one: rows that agree in all but the indices in their paths become ``blocks.{0..11}.norm1 ×12``.
T = TypeVar("T")
Counted = TypeVar("Counted", Row, Cast, Product, Misaligned)

#: What rows that are alike have together.
_SUMS: Final = ("count", "flops", "num_bytes")


def summed(rows: Sequence[Counted]) -> Counted:
    """Return the first of some rows, with the sums of all of them."""
    sums: dict[str, Any] = {name: sum(map(attrgetter(name), rows)) for name in _SUMS if hasattr(rows[0], name)}
    return replace(rows[0], **sums)


def tallied(rows: Iterable[Counted]) -> tuple[Counted, ...]:
    """Return one row for all rows that differ in their counts alone, at the position of the first of them."""
    groups: dict[Counted, list[Counted]] = {}
    for row in rows:
        zeros: dict[str, Any] = {name: 0 for name in _SUMS if hasattr(row, name)}
        groups.setdefault(replace(row, **zeros), []).append(row)
    return tuple(map(summed, groups.values()))


#: A path, whose indices are sets: ``("blocks", {0, 1}, "norm")``.
Parts = tuple[str | frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Fold(Generic[T]):
    """Rows that are alike, in one.

    Attributes:
        path: Their paths, as one: ``blocks.{0..11}.norm1``.
        rows: The rows, in their order; never empty.
    """

    path: str
    rows: tuple[T, ...]

    @property
    def text(self) -> str:
        """The path, and how many rows there are."""
        return f"{self.path} ×{len(self.rows)}" if len(self.rows) > 1 else self.path


def folded(rows: Iterable[T], path: Callable[[T], str], rest: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Fold rows that agree in all but indices in their paths.

    Args:
        rows: Any rows; those with one path are not folded with each other.
        path: Reads a row's module path, whose components that are numbers are its indices.
        rest: Reads all else in which rows must agree.

    Returns:
        The folds, each where its first row was. Together they hold every row once.

    Example:
        >>> modules = "stem blocks.0.norm blocks.1.norm blocks.2.norm head".split()
        >>> [each.text for each in folded(modules, str, lambda row: None)]
        ['stem', 'blocks.{0..2}.norm ×3', 'head']
        >>> nested = [f"layers.{i}.{j}" for i, depth in enumerate((2, 2, 6)) for j in range(depth)]
        >>> [each.text for each in folded(nested, str, lambda row: None)]
        ['layers.{0,1}.{0,1} ×4', 'layers.2.{0..5} ×6']
    """
    groups: dict[Hashable, dict[Parts, list[tuple[int, T]]]] = {}
    for number, row in enumerate(rows):
        parts = tuple(_part(part) for part in path(row).split("."))
        shape = tuple(part if isinstance(part, str) else None for part in parts)
        turn = 0  # rows of one path stay apart: the second of each module is folded with the other seconds
        while parts in groups.setdefault((turn, shape, rest(row)), {}):
            turn += 1
        groups[turn, shape, rest(row)][parts] = [(number, row)]
    folds = [(members, parts) for group in groups.values() for parts, members in _merged(group).items()]
    folds.sort(key=lambda fold: fold[0][0][0])
    return [Fold(_text(parts), tuple(row for _, row in members)) for members, parts in folds]


def as_glob(path: str) -> str:
    """Return a glob that matches each of the paths of a fold, which are globs by themselves."""
    return re.sub(r"\{[^}]*\}", "*", path)


def _part(text: str) -> str | frozenset[int]:
    is_index = text.isascii() and text.isdecimal() and str(int(text)) == text
    return frozenset([int(text)]) if is_index else text


def _merged(group: dict[Parts, list[tuple[int, T]]]) -> dict[Parts, list[tuple[int, T]]]:
    """Return paths joined where they differ in one index: first in the last index, then in each one before."""
    for position, part in reversed([*enumerate(next(iter(group)))]):
        if isinstance(part, str):  # a name, which all paths of a group share
            continue
        joined: dict[tuple[Parts, Parts], tuple[frozenset[Any], list[tuple[int, T]]]] = {}
        for parts, rows in group.items():
            both_sides = parts[:position], parts[position + 1 :]
            indices, before = joined.get(both_sides, (frozenset[Any](), []))
            joined[both_sides] = indices.union(parts[position]), sorted([*before, *rows], key=itemgetter(0))
        group = {(*left, indices, *right): rows for (left, right), (indices, rows) in joined.items()}
    return group


def _text(parts: Parts) -> str:
    return ".".join(part if isinstance(part, str) else _set_text(sorted(part)) for part in parts)


def _set_text(indices: list[int]) -> str:
    """Return indices as text, neighbours as a range: ``{0..11}``, ``{0,2..5}``."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs += [f"{numbers[0]}..{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    return f"{{{','.join(runs)}}}"
