"""What an explanation is made of, as values: rows, casts, misaligned products, findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mezzo.errors import PolicyError

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
            way into a low product. ``logits``: their cast is a large share of all casts. ``tied weights``: one tensor
            under two names, of which a rule speaks about one.
        where: A rule, or a module and an op.
        text: What was found, and what to do about it.
    """

    kind: FindingKind
    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """All that an explanation holds.

    Attributes:
        model: Class of the model.
        policy: The policy's text.
        devices: Types of the devices that held tensors.
        torch: The torch version.
        emulated: Whether products were computed in FP32 from rounded operands.
        rows: Every op that read or made floating numbers in the forward pass, in the order of first use.
        casts: Every conversion between floating dtypes, forward and backward, largest first.
        misaligned: Products and convolutions in a low format whose dimensions should be padded.
        findings: What else there is to know.
        products: The matrix products and convolutions of the forward pass, those with the most operations first.
        moved_bytes: What all kernels of both passes read and write, casts included.
    """

    model: str
    policy: str
    devices: tuple[str, ...]
    torch: str
    emulated: bool
    rows: tuple[Row, ...]
    casts: tuple[Cast, ...]
    misaligned: tuple[Misaligned, ...]
    findings: tuple[Finding, ...]
    products: tuple[Product, ...] = ()
    moved_bytes: int = 0

    def num_casts(self, **fields: str) -> int:
        """Count the casts whose fields have these values, emulation left out unless ``by="emulation"``.

        Args:
            **fields: Attributes of :class:`Cast`, such as ``phase="backward"``.
        """
        return sum(cast.count for cast in self._chosen(fields))

    def cast_bytes(self, **fields: str) -> int:
        """Add up the bytes that casts read and write, chosen as in :meth:`num_casts`."""
        return sum(cast.num_bytes for cast in self._chosen(fields))

    def _chosen(self, fields: Mapping[str, str]) -> Iterable[Cast]:
        known = {field.name for field in dataclasses.fields(Cast)}
        if unknown := [name for name in fields if name not in known]:
            raise PolicyError(f"a cast has no {unknown[0]}", write=f"one of {', '.join(sorted(known))}")
        return (
            cast
            for cast in self.casts
            if all(getattr(cast, name) == value for name, value in fields.items())
            and (cast.by != "emulation" or "by" in fields)
        )
