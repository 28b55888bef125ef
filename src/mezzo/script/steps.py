"""What each step of a script came to: the loss of its own backward pass, and what the session knows of the step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.numerics.footprint import state_bytes
from mezzo.recipes import StepRecord
from mezzo.script.measuring import Measuring
from mezzo.script.program import Enough
from mezzo.script.report import Ledger
from mezzo.script.seams import Seams
from mezzo.session.core import Core, PlainRun
from mezzo.session.scale import StepOutcome
from mezzo.session.stats import Noted

__all__ = ["StepLog"]


class StepLog(PlainRun):
    """Tell of each step that sessions take, and end the script after enough of them.

    A step's loss is that of the first backward pass since the step before.

    Args:
        policy: The policy's text.
        told: Is told of each step; ``None`` where nothing is to be read from the device.
        most: After how many steps the script ends, in its next backward pass; ``None`` where it ends by itself.
        ledger: Where steps are told of, gets what the second one finds in memory: there is an optimizer's state then.
        seams: Replaces names of torch.

    Attributes:
        measuring: Counts the products of the first steps.

    **Cost**: where steps are told of, one transfer from the device for each.
    """

    def __init__(
        self, policy: str, told: Callable[[StepRecord], None] | None, most: int | None, ledger: Ledger, seams: Seams
    ) -> None:
        self.measuring = Measuring(ledger)
        self._policy, self._told, self._most, self._ledger = policy, told, most, ledger
        self._taken, self._began = 0, time.perf_counter()
        self._loss: Tensor | None = None
        self._watch(seams)

    def noted(self, core: Core, outcome: StepOutcome) -> Noted:
        """Tell of a step, once it is done."""
        calls, then = super().noted(core, outcome)

        def after() -> None:
            then()
            self._stepped(core, outcome)

        return Noted(calls, after)

    def _watch(self, seams: Seams) -> None:
        log, plain = self, torch.autograd.backward

        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if log._taken == log._most:
                raise Enough
            if log._told is not None and log._loss is None:
                log._loss = _first_scalar([tensors] if isinstance(tensors, Tensor) else tensors)
            plain(tensors, *args, **kwargs)

        seams.replace(torch.autograd, "backward", backward)

    def _stepped(self, core: Core, outcome: StepOutcome) -> None:
        self._taken += 1
        self.measuring.stepped()
        if self._told is None:
            return
        if self._ledger.state_bytes is None and self._taken > 1:
            self._ledger.state_bytes = state_bytes(nn.ModuleList(core.models), core.weights.updated(), *core.optimizers)
        verdict = outcome.verdict
        loss = verdict.grad_norm.new_full((), float("nan")) if self._loss is None else self._loss
        numbers = (loss, outcome.scale.max(), verdict.found_inf, verdict.grad_norm)
        read = torch.stack([each.detach().to(loss.device, torch.float32) for each in numbers]).tolist()
        now = time.perf_counter()
        record = StepRecord(
            policy=self._policy,
            step=self._taken,
            loss=read[0],
            scale=read[1],
            skipped=bool(read[2]),
            grad_norm=read[3],
            ms=(now - self._began) * 1e3,
        )
        self._loss, self._began = None, now
        self._told(record)


def _first_scalar(tensors: Iterable[Tensor]) -> Tensor | None:
    return next((each.detach().reshape(()).clone() for each in tensors if each.numel() == 1), None)
