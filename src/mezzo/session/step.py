"""The end of a step: windows closed, scales adapted, all of it counted; and what the step returns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.session.capture.recording import current
from mezzo.session.result import Step
from mezzo.session.stats import Outcome
from mezzo.session.update import Adapted, Found, adapt
from mezzo.session.verdict import Judged
from mezzo.session.window.group import Cluster
from mezzo.step.whole import Call, Piece

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow
    from mezzo.session.session import MixedPrecision

__all__ = ["Finishing"]

logger = logging.getLogger(__name__)


class Finishing:
    """What a session writes down of a step, after its optimizers.

    Args:
        session: The session.
        judged: The gradients.
        involved: The clusters that step.
    """

    def __init__(self, session: MixedPrecision, judged: Judged, involved: list[Cluster]) -> None:
        self._session, self._judged, self._involved = session, judged, involved
        self._scales_before = [scaler.remembering() for scaler in session._scalers]
        self._adapted: Adapted | None = None
        self._then: Callable[[], object] = dict

    def pieces(self, found: Found, schedulers: list[Callable[[], object]]) -> list[Piece]:
        """Return it as pieces of the step's work.

        Args:
            found: Whether the step is skipped.
            schedulers: Stepped if it is not.
        """
        after: list[Piece] = [partial(_one, each) for each in schedulers] if schedulers and not found else []
        return [self._close, self._adapt, self._settle, self._note, self._session._update.end, *after]

    def _close(self) -> list[Call]:
        for cluster in self._involved:
            for masters in cluster.masters:
                masters.drop_gradients()
            cluster.close(self._judged.gradients if len(cluster.optimizers) == 1 else None)
        self._session._parts.exact.restored.clear()
        return []

    def _adapt(self) -> list[Call]:
        for restore in self._scales_before:  # an interrupt may have come in the middle
            restore()
        self._adapted = adapt(self._session._scalers, self._judged, self._session._on_the_way)
        return []

    def _settle(self) -> list[Call]:
        for share in self._judged.shares:
            self._session._on_the_way.pop(share.loss_id, None)
        if self._session._buffers is not None:
            self._session._buffers.restore_where(self._judged.verdict.found_inf)
        self._session._forget_passes()
        return []

    def _note(self) -> list[Call]:
        adapted = self._known()
        outcome = Outcome(
            skipped=self._judged.verdict.found_inf,
            scales=adapted.after,
            norms=self._judged.verdict.norms,
            params=self._judged.params,
            loss_failed=adapted.loss_failed,
        )
        if (run := current()) is not None:
            run.note(self._session, outcome)
            return []
        calls, self._then = self._session._accounts.noted(outcome)
        return calls

    def step(self, overflow: Overflow | Changed | None) -> Step:
        """Tell the log, and return what the step did.

        Args:
            overflow: Where an overflow began, if that was looked for.
        """
        self._then()
        if overflow is not None:
            logger.warning("%s", overflow)
        adapted = self._known()
        before = _one_or_all(list(adapted.before.values()))
        return Step(
            skipped=self._judged.verdict.found_inf,
            # A graph writes the next scale into the memory of this one.
            scale=before if current() is None else before.clone(),
            next_scale=_one_or_all([after.scale for after in adapted.after.values()]),
            grad_norm=self._judged.verdict.grad_norm,
            overflow=overflow,
            check=self._session._accounts.check,
        )

    def _known(self) -> Adapted:
        assert self._adapted is not None, "scales are adapted before anything is told of them"
        return self._adapted


def _one(call: Call) -> list[Call]:
    return [call]


def _one_or_all(scales: list[Tensor]) -> Tensor:
    return scales[0] if len(scales) == 1 else torch.stack(scales)
