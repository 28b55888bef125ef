"""Where a non-finite number first arose: the origin as a value, and what ops do with numbers that are too large."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from mezzo.overflow.report import Phase
from mezzo.policy import Rule
from mezzo.policy.ops import NORMS, OPS
from mezzo.trace.measure import Range
from mezzo.trace.names import Role

__all__ = ["BOUNDED", "SOFTMAX", "Origin", "Reader"]

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


@dataclass(slots=True, kw_only=True)
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
