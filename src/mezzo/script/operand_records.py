"""What products below sixteen bits lose in a script's run, by layer, recorded every so many of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from torch import nn

from mezzo.numerics import Recorder
from mezzo.numerics.evidence import OPERANDS
from mezzo.policy import Policy
from mezzo.policy.ops import QUANTISED

#: Steps from one recorded step to the next.
EVERY: Final = 50


class OperandLog:
    """A recording of runs in which a policy has products below sixteen bits; of other runs nothing is recorded.

    Args:
        policies: The policies of the runs.

    **Cost**: in each 50th step that of a :class:`mezzo.numerics.Recorder` of operands and weight gradients.
    """

    def __init__(self, *policies: Policy) -> None:
        self._is_asked = any(rule.treatment in QUANTISED for policy in policies for rule in policy.rules)
        self._recorders: list[Recorder] = []

    @contextmanager
    def around(self, models: list[nn.Module]) -> Iterator[None]:
        """Record the largest of these models inside the block."""
        if not self._is_asked:
            yield
            return
        largest = max(models, key=lambda model: sum(param.numel() for param in model.parameters()))
        kinds = (*OPERANDS.values(), "weight_gradients")
        with Recorder(largest, every=EVERY, keep=None, kinds=kinds) as recorder:
            self._recorders.append(recorder)
            yield

    @property
    def losses(self) -> list[dict[str, Any]]:
        """What was lost of each operand, as plain values: those of :class:`mezzo.numerics.OperandLosses`."""
        return [asdict(operand) for recorder in self._recorders for operand in recorder.evidence.operands()]
