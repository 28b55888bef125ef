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
from mezzo.numerics.watches import Tally, TensorKey
from mezzo.tensors import moved
from mezzo.trace.modes import is_watched
from mezzo.trace.observe import WIDTH

#: How the kind begins in the key of an operand's counts; role and format follow.
_KIND: Final = "operands"
#: Norms of a weight's gradient and its noise that were not computed.
_UNKNOWN: Final[tuple[float | None, float | None]] = (None, None)
#: By how much more than the largest element an element saturates: less is what FP32 arithmetic makes of scales.
SLACK: Final = 2.0**-20


def losses(operand: Tensor, quantized: Quantized) -> Tensor:
    """Return how many elements quantising a tensor has lost.

    Args:
        operand: What was quantised.
        quantized: The same, quantised.

    Returns:
        (3,) int64: elements, those that saturate, those that are flushed.

    **Cost**: the tensor in FP32 twice, a dozen element-wise kernels; no host sync.
    """
    element = quantized.format.element
    code = element.encode(element.max)
    code = code << 4 | code if element == E2M1 else code
    largest = torch.full_like(quantized.values.view(torch.uint8), code).view(quantized.values.dtype)
    limit = dataclasses.replace(quantized, values=largest).wide()
    size = operand.detach().float().abs()
    flushed = (size > 0) & (quantized.wide() == 0)
    saturated = size.isfinite() & (size > limit * (1 + SLACK)) & ~flushed
    return torch.stack([size.new_tensor(size.numel()), saturated.sum(), flushed.sum()]).long()


def noise(operand: Tensor, quantized: Quantized, saved_input: Quantized | Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight's gradient without the error of quantising its output's gradient, and that error.

    Args:
        operand: The output's gradient, (rows, out).
        quantized: The same, quantised.
        saved_input: The input, (rows, in), as it was saved for the backward pass.

    Returns:
        Both (out, in), float32.

    **Cost**: two products in FP32.
    """
    exact = operand.detach().float()
    x = saved_input.wide() if isinstance(saved_input, Quantized) else saved_input.detach().float()
    return product_beside(exact.mT, x), product_beside((quantized.wide() - exact).mT, x)


class OperandWatch:
    """The products below sixteen bits of one step: those of a model's weights that gradients come back through.

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
        self.roles = {role for role, tensor_kind in OPERANDS.items() if tensor_kind in kinds}
        self.has_noise, self.is_open = "weight_gradients" in kinds, True
        self._rows: dict[TensorKey, int] = {}
        self._noise: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._listening = ExitStack()
        if self.roles or self.has_noise:
            self._listening.enter_context(listening(self._listener_of))

    def remove(self) -> None:
        """Stop listening."""
        self._listening.close()
        self.is_open = False

    def _listener_of(self, weight: Tensor) -> _Call | None:
        """Return the record of a product's call, if its weight is the model's."""
        param_name = self._params.get(weight) or (None if weight._base is None else self._params.get(weight._base))
        return None if param_name is None or is_watched() else _Call(self, param_name)

    def count(self, param_name: tuple[str, str], role: str, form: str, counts: Tensor) -> None:
        """Add what an operand has lost to the counts of the step."""
        key = (f"{_KIND} {role} {form}", *param_name)
        if key not in self._rows:
            self._rows[key] = self._tally.row(counts.device)
        self._tally.extra(self._rows[key])[: len(counts)].add_(counts)

    def add(self, param_name: tuple[str, str], *parts: Tensor) -> None:
        """Add the gradient of a call, and its noise, to those of the step."""
        factor = self._factor()
        for at, part in enumerate(parts):
            if factor is not None:
                part *= moved(factor, part.device)
            if param_name in self._noise:
                self._noise[param_name][at].add_(part)
        if param_name not in self._noise:
            self._noise[param_name] = parts[0], parts[1]

    @property
    def norms(self) -> list[Tensor]:
        """Norms of gradient and noise, 0-d, of each weight that has them."""
        return [torch.linalg.vector_norm(part) for parts in self._noise.values() for part in parts]

    def counted(self, rows: Sequence[Tensor]) -> dict[TensorKey, Counted]:
        """Return what was counted, as ranks add it up.

        Args:
            rows: Those of the tally, on the host.
        """
        return {key: ("int64", rows[row]) for key, row in self._rows.items()}

    def recorded(self, counted: Mapping[TensorKey, Counted], norms: Sequence[float]) -> tuple[RecordedOperand, ...]:
        """Return what each operand lost in the step.

        Args:
            counted: What :meth:`counted` returned, on all ranks, among other counts.
            norms: What :attr:`norms` came to, on this one.
        """
        by_weight = dict(zip(self._noise, zip(norms[::2], norms[1::2], strict=True), strict=True))
        operands = []
        for (key, module, name), (_, row) in counted.items():
            if not key.startswith(_KIND):
                continue
            _, role, form = key.split()
            gradient, noise = by_weight.pop((module, name), _UNKNOWN) if role == "gradient" else _UNKNOWN
            elements, saturated, flushed = row[WIDTH : WIDTH + 3].tolist()
            operands.append(
                RecordedOperand(
                    module=module, name=name, role=role, format=form, elements=elements, saturated=saturated,
                    flushed=flushed, gradient_norm=gradient, noise_norm=noise,
                )
            )  # fmt: skip
        order = {param_name: index for index, param_name in enumerate(self._params.values())}
        roles = [*OPERANDS]
        return tuple(sorted(operands, key=lambda lost: (order[lost.module, lost.name], roles.index(lost.role))))


@dataclass(eq=False, slots=True)
class _Call:
    """A call of a product, and what was counted of it until a backward pass uses it."""

    watch: OperandWatch
    param_name: tuple[str, str]  # module and name
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

    def differentiated(self, saved_input: Quantized | Tensor | None) -> None:
        """Add the call's counts to the step, once for each backward pass through it."""
        counted, last, self.counted, self.last = self.counted, self.last, [], None
        if not self.watch.is_open or is_watched():
            return
        with torch.no_grad(), DisableTorchFunction():
            for role, form, counts in counted:
                self.watch.count(self.param_name, role, form, counts)
            if saved_input is not None and last is not None:
                self.watch.add(self.param_name, *noise(*last, saved_input))
