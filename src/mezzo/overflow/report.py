"""What a search for the first non-finite tensor finds, as values: the origin, the report of it, changed inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from mezzo.documents import jsonable
from mezzo.errors import message, printable
from mezzo.policy import Rule
from mezzo.policy.ops import NORMS, OPS
from mezzo.trace.measure import Range, shape_text
from mezzo.trace.names import Role
from mezzo.trace.where import MODEL

Phase = Literal["forward", "backward"]
Kind = Literal[
    "range", "scale", "zero", "domain", "unbounded", "masked", "written", "input", "parameter", "buffer", "loss"
]  # fmt: skip


#: Kernels that turn -inf into 0, unless a whole row is -inf.
SOFTMAX: Final = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp"})

#: Ops whose results lie in a narrow range however large their arguments are.
BOUNDED: Final = (
    NORMS
    | frozenset(
        """batch_norm native_batch_norm instance_norm normalize cosine_similarity sigmoid logsigmoid tanh erf erfc clamp
    clamp_max clamp_min hardtanh relu6 hardsigmoid softsign atan sin cos sign nan_to_num argmax log log2 log10 log1p
    sqrt""".split()
    )
    | frozenset(name for name, op in OPS.items() if op.reason == "loss")
)


@dataclass(frozen=True, slots=True)
class Reader:
    """A call that reads what an origin made, before an op brings it back into range."""

    module: str
    op: str
    is_low: bool  # whether its arguments are cast to low precision


@dataclass(slots=True, kw_only=True, eq=False)
class Origin:
    """A tensor that is the first on its path to be non-finite.

    Attributes:
        number: Its place in the order of execution.
        source: ``made`` of finite numbers; ``masked``, made of -inf alone; ``written`` as a constant by the code;
            ``given``, there before the pass.
        may_be_meant: Whether it is an infinity that is often meant, as in an attention mask, and is an origin only if
            it reaches the end.
        phase: ``forward`` or ``backward``.
        module: Path of the module.
        op: The op.
        kernel: The kernel.
        line: The user's line.
        rule: The user's rule that decided the op's precision.
        dtype: Format of the tensor.
        tensor: Its range.
        inputs: What the kernel read.
        needed: The largest magnitude that it should hold; inf or NaN where no format tells another, ``None`` where no
            other format could be tried.
        holds: The format that holds ``needed``.
        role: What it is, where it is a parameter, buffer or input, or a cast of one.
        path: The name of that.
        cast_by: Whose cast overflowed: the ``policy``'s or the ``model``'s own code's; ``None`` for other ops.
        made_nan_by: Where it may be meant: op and line that first made NaN of it.
        readers: The calls that read it while it is as large, in order.
    """

    number: int
    source: Literal["made", "masked", "written", "given"]
    may_be_meant: bool = False
    phase: Phase
    module: str
    op: str
    kernel: str
    line: str | None
    rule: Rule | None = None
    dtype: torch.dtype
    tensor: Range
    inputs: tuple[Range, ...]
    needed: float | None = None
    holds: torch.dtype | None = None
    role: Role | None = None
    path: str = ""
    cast_by: Literal["policy", "model"] | None = None
    made_nan_by: str = ""
    readers: dict[Reader, None] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[bool, int]:
        """The order in which origins are blamed: what is often meant comes last."""
        return self.may_be_meant, self.number

    def rename(self, name: str) -> None:
        """Call the tensor by another name."""
        self.tensor = dataclasses.replace(self.tensor, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """The first non-finite tensor of a training step that led on, why it arose, and what to change.

    It prints as an error does, and compares by value.

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        found: dict[str, Any] = jsonable(dataclasses.asdict(self))
        return found

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.module or MODEL, self.op)))
        tensor = f"{self.tensor.name} ({self.tensor.dtype}, {shape_text(self.tensor.shape)})"
        lines = [
            f"{place}{f' ({self.kernel})' if self.kernel else ''}, {tensor}: {' and '.join(self.tensor.not_finite)}",
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
            write="x = x + 1 in place of x += 1, until amp.step(); or mezzo.overflow.locate(fn, model)",
        )
