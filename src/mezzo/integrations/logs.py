"""What a session has for the logs of frameworks, and the options that all of their plugins take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from mezzo.errors import not_switches, raise_together
from mezzo.session import MixedPrecision, Step
from mezzo.session.refusals.beginning import wrong_options

__all__ = ["ToldPrecision", "check_options", "explain_to"]


class ToldPrecision(MixedPrecision):
    """A session that keeps what belongs into a log.

    Args:
        models: See :class:`mezzo.MixedPrecision`, and so on.
        optimizers: See there.
        policy: See there.
        **options: See there.

    Attributes:
        last_step: What the last step found and did; ``None`` before the first.
    """

    def __init__(self, models: Any, optimizers: Any, policy: Any, **options: Any) -> None:
        super().__init__(models, optimizers, policy, **options)
        self.last_step: Step | None = None
        self._overflows: list[str] = []

    def step(
        self,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        closure: Callable[[], Any] | None = None,
        scheduler: Any = None,
    ) -> Step:
        """Check the gradients, update or skip: what ``optimizer.step()`` comes to."""
        self.last_step = super().step(optimizers, closure, scheduler)
        if self.last_step.overflow is not None:
            self._overflows.append(str(self.last_step.overflow))
        return self.last_step

    def metrics(self) -> dict[str, float | str]:
        """Return what belongs into a log: the loss scale, the count of skipped steps, explanations since the last call.

        **Cost**: waits for the device.
        """
        stats, told = self.stats(), self._overflows
        self._overflows = []
        found: dict[str, float | str] = {"mezzo/scale": stats.scale, "mezzo/skipped": stats.skipped}
        return found | ({"mezzo/overflow": "\n\n".join(told)} if told else {})


def check_options(on_overflow: Any, **switches: Any) -> None:
    """Refuse a wrong option before anything begins.

    Raises:
        PolicyError: With all that are wrong.
    """
    raise_together([*wrong_options(on_overflow=on_overflow), *not_switches(**switches)])


def explain_to(loggers: Iterable[Any], text: str, step: int | None) -> None:
    """Tell Lightning's loggers where an overflow began, as ``mezzo/overflow``; those that take numbers alone are not.

    Args:
        loggers: The loggers.
        text: The report.
        step: The step that it is of.
    """
    for logger in loggers:
        if hasattr(logger.experiment, "add_text"):  # TensorBoard's
            logger.experiment.add_text("mezzo/overflow", text, step)
            continue
        with contextlib.suppress(TypeError, ValueError):
            logger.log_metrics({"mezzo/overflow": text}, step)
