"""What products below sixteen bits lose of their operands in one step, and of the gradients of their weights.

An element saturates where it lies beyond the largest that its scale reaches, and is flushed where it is not zero and
becomes zero.

Where gradients are quantised, the weight's gradient is computed once more, in FP32, from the output's gradient as it
was before: g. What quantising it added is the noise. Where ‖g‖ < √3 ‖noise‖, quantised training becomes less
effective (Chmiel et al., *FP4 All the Way: Fully Quantized Training of LLMs*, arXiv 2505.19115).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from mezzo.cast.notes import listening, product_beside
from mezzo.dispatch import DisableTorchFunction
from mezzo.formats import E2M1, Quantized
from mezzo.numerics.evidence import OPERANDS, RecordedOperand
from mezzo.numerics.ranks import Counted
from mezzo.numerics.subject import Subject
from mezzo.numerics.watches import Place, Tally
from mezzo.tensors import moved
from mezzo.trace.modes import is_watched
from mezzo.trace.observe import WIDTH

#: What the kinds of places begin with that operands are counted at; role and format follow.
_KIND: Final = "operands"
#: Norms of a weight's gradient and its noise that were not computed.
_UNKNOWN: Final[tuple[float | None, float | None]] = (None, None)
#: By how much more than the largest element an element saturates: less is what FP32 arithmetic makes of scales.
SLACK: Final = 2.0**-20


def losses(operand: Tensor, made: Quantized) -> Tensor:
    """Count what quantising a tensor has lost.

    Args:
        operand: What was quantised.
        made: What it became.

    Returns:
        (3,) int64: elements, those that saturate, those that are flushed.

    **Cost**: the tensor in FP32 twice, a dozen element-wise kernels; no host sync.
    """
    element = made.format.element
    code = element.encode(element.max)
    code = code << 4 | code if element == E2M1 else code
    largest = torch.full_like(made.values.view(torch.uint8), code).view(made.values.dtype)
    limit = dataclasses.replace(made, values=largest).wide()
    size = operand.detach().float().abs()
    flushed = (size > 0) & (made.wide() == 0)
    saturated = size.isfinite() & (size > limit * (1 + SLACK)) & ~flushed
    return torch.stack([size.new_tensor(size.numel()), saturated.sum(), flushed.sum()]).long()


def noise(operand: Tensor, made: Quantized, kept: Quantized | Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a weight without what quantising its output's gradient adds, and that.

    Args:
        operand: The output's gradient, (rows, out).
        made: What it became.
        kept: The input, (rows, in), as it was kept.

    Returns:
        Both (out, in), float32.

    **Cost**: two products in FP32.
    """
    exact, x = operand.detach().float(), kept.wide() if isinstance(kept, Quantized) else kept.detach().float()
    return product_beside(exact.mT, x), product_beside((made.wide() - exact).mT, x)


class OperandWatch:
    """Listens to products below sixteen bits for one step: those of a model's weights that gradients come back through.

    Args:
        subject: What is watched.
        kinds: ``weights``, ``activations`` and ``activation_gradients`` for operands of these roles, and
            ``weight_gradients`` for the noise; others ask for nothing.
        tally: What counts, with three numbers at least behind its histograms.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        roles: The roles of the operands that are counted.
        has_noise: Whether noise is.
        is_open: Whether the step is still watched.
    """

    def __init__(
        self, subject: Subject, kinds: Collection[str], tally: Tally, factor: Callable[[], Tensor | None]
    ) -> None:
        self._params, self._tally, self._factor = subject.params, tally, factor
        self.roles = {role for role, kind in OPERANDS.items() if kind in kinds}
        self.has_noise, self.is_open = "weight_gradients" in kinds, True
        self._rows: dict[Place, int] = {}
        self._noise: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._listening = ExitStack()
        if self.roles or self.has_noise:
            self._listening.enter_context(listening(self._asked))

    def remove(self) -> None:
        """Listen no more."""
        self._listening.close()
        self.is_open = False

    def _asked(self, weight: Tensor) -> _Call | None:
        """Follow a call of a product, if it is one of a weight of the model's."""
        place = self._params.get(weight) or (None if weight._base is None else self._params.get(weight._base))
        return None if place is None or is_watched() else _Call(self, place)

    def take(self, place: tuple[str, str], role: str, form: str, counts: Tensor) -> None:
        """Take what an operand has lost into the step."""
        key = (f"{_KIND} {role} {form}", *place)
        if key not in self._rows:
            self._rows[key] = self._tally.row(counts.device)
        self._tally.beside(self._rows[key])[: len(counts)].add_(counts)

    def add(self, place: tuple[str, str], *parts: Tensor) -> None:
        """Add the gradient of a call, and its noise, to those of the step."""
        factor = self._factor()
        for at, part in enumerate(parts):
            if factor is not None:
                part *= moved(factor, part.device)
            if place in self._noise:
                self._noise[place][at].add_(part)
        if place not in self._noise:
            self._noise[place] = parts[0], parts[1]

    @property
    def norms(self) -> list[Tensor]:
        """Norms of gradient and noise, 0-d, of each weight that has them."""
        return [torch.linalg.vector_norm(part) for parts in self._noise.values() for part in parts]

    def counted(self, rows: Sequence[Tensor]) -> dict[Place, Counted]:
        """Return what was counted, as ranks add it up.

        Args:
            rows: Those of the tally, on the host.
        """
        return {place: ("int64", rows[row]) for place, row in self._rows.items()}

    def found(self, counted: Mapping[Place, Counted], norms: Sequence[float]) -> tuple[RecordedOperand, ...]:
        """Return what was lost.

        Args:
            counted: What :meth:`counted` returned, on all ranks, among other counts.
            norms: What :attr:`norms` came to, on this one.
        """
        by_weight = dict(zip(self._noise, zip(norms[::2], norms[1::2], strict=True), strict=True))
        made = []
        for (kind, *place), (_, row) in counted.items():
            if not kind.startswith(_KIND):
                continue
            _, role, form = kind.split()
            gradient, noise = by_weight.pop((place[0], place[1]), _UNKNOWN) if role == "gradient" else _UNKNOWN
            elements, saturated, flushed = row[WIDTH : WIDTH + 3].tolist()
            made.append(
                RecordedOperand(
                    module=place[0], name=place[1], role=role, format=form, elements=elements, saturated=saturated,
                    flushed=flushed, gradient_norm=gradient, noise_norm=noise,
                )
            )  # fmt: skip
        order = {place: at for at, place in enumerate(self._params.values())}
        return tuple(sorted(made, key=lambda each: (order[each.module, each.name], [*OPERANDS].index(each.role))))


@dataclass(eq=False, slots=True)
class _Call:
    """A call that is followed, and what is known of it before a backward pass uses it."""

    watch: OperandWatch
    place: tuple[str, str]
    counted: list[tuple[str, str, Tensor]] = field(default_factory=list)
    last: tuple[Tensor, Quantized] | None = None

    def quantised(self, role: str, operand: Tensor, made: Quantized) -> None:
        """Count an operand, and keep the last gradient for :meth:`differentiated`."""
        if not self.watch.is_open or is_watched():
            return
        with torch.no_grad(), DisableTorchFunction():
            if role in self.watch.roles:
                self.counted.append((role, str(made.format), losses(operand, made)))
            if role == "gradient" and self.watch.has_noise:
                self.last = operand, made

    def differentiated(self, kept: Quantized | Tensor | None) -> None:
        """Take the call into the step, once for each backward pass through it."""
        counted, last, self.counted, self.last = self.counted, self.last, [], None
        if not self.watch.is_open or is_watched():
            return
        with torch.no_grad(), DisableTorchFunction():
            for each in counted:
                self.watch.take(self.place, *each)
            if kept is not None and last is not None:
                self.watch.add(self.place, *noise(*last, kept))
