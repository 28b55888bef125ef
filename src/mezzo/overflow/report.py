"""What a search for the first non-finite tensor reports, as values: ranges, the overflow, inputs that have changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mezzo.errors import message, printable
from mezzo.trace.document import Document
from mezzo.trace.measure import Range, shape_text
from mezzo.trace.where import MODEL

__all__ = ["Changed", "Kind", "Overflow", "Phase"]

Phase = Literal["forward", "backward"]
Kind = Literal[
    "range", "scale", "zero", "domain", "unbounded", "masked", "written", "input", "parameter", "buffer", "loss"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow(Document):
    """The first non-finite tensor of a training step that led on, why it arose, and what to change.

    It prints as an error does, compares by value, and goes to JSON and back.

    Attributes:
        kind: ``range``: a number beyond a format that a wider one holds. ``scale``: a gradient that a lower loss scale
            keeps finite. ``zero``: a division by zero, a logarithm or an infinite derivative at zero. ``domain``: no
            number at all, such as the root of -1. ``unbounded``: beyond float32 too. ``masked``: a softmax over -inf
            alone. ``written``: the code's own ``inf`` or ``nan``. ``input``, ``parameter``, ``buffer``: non-finite
            before the step. ``loss``: made outside the models, between their outputs and the loss.
        module: Path of the module; ``""`` is the model itself, ``(loss)`` what runs outside of it. With several models
            paths begin with the model's number.
        op: Base name of the op; in the backward phase of the op whose gradient it is.
        kernel: Name of the kernel that wrote the tensor.
        phase: ``forward`` or ``backward``.
        tensor: The tensor, what is finite of it.
        inputs: What that kernel read.
        needed: The magnitude that the tensor should have held, where a wider format tells.
        share: ``needed`` as a share of the format's largest number.
        line: ``file:line`` of the user's code that called the op.
        code: That line.
        loss_scale: The scale that the gradients carried.
        cause: Why, in words.
        cure: What to write instead, as text to paste.
    """

    kind: Kind
    module: str
    op: str
    kernel: str
    phase: Phase
    tensor: Range
    inputs: tuple[Range, ...]
    needed: float | None
    share: float | None
    line: str | None
    code: str | None
    loss_scale: float
    cause: str
    cure: str

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.module or MODEL, self.op)))
        tensor = f"{self.tensor.name} ({self.tensor.dtype}, {shape_text(self.tensor.shape)})"
        counts = ((self.tensor.num_inf, "inf"), (self.tensor.num_nan, "nan"))
        lines = [
            f"{place}{f' ({self.kernel})' if self.kernel else ''}, {tensor}: "
            + " and ".join(f"{count} {word}" for count, word in counts if count),
            *([f"{self.line}  {self.code or ''}".rstrip()] if self.line else []),
            *(f"reads {each}" for each in self.inputs),
        ]
        what = printable(f"the first non-finite tensor: {self.tensor.name}, in the {self.phase} pass of {place}")
        return message(what, where="\n".join(map(printable, lines)), why=self.cause, write=self.cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Tensors that a replay would need, and that were changed in place since they were used: nothing was located.

    Attributes:
        tensors: What each is: ``input 0 of the model``, with its dtype and shape.
    """

    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return message(
            "the overflow cannot be located: what the step was computed from has changed since",
            where="\n".join(map(printable, self.tensors)),
            why="changed in place after the model had used it, so that a replay would compute another step",
            write="x = x + 1 in place of x += 1, until amp.step(); or mezzo.numerics.locate(fn, model)",
        )
