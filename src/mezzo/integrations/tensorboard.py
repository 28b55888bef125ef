"""A session's account of its steps, for TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.session import MixedPrecision, Step

__all__ = ["TensorBoard"]


class TensorBoard:
    """Write how a session's steps went as curves over their number, in the group ``mezzo``.

    ==========================  =====================================================================
    ``mezzo/loss_scale``        the loss scale; ``loss_scale_0``, ``loss_scale_1``, … for several losses
    ``mezzo/growths``           how often it rose so far; numbered as the scales are
    ``mezzo/backoffs``          how often it fell so far; numbered as the scales are
    ``mezzo/skipped_steps``     how many steps updated nothing so far
    ``mezzo/skip_rate``         share of skipped steps among the last ``interval`` of the loss scale, 0 to 1
    ``mezzo/grad_norm``         2-norm of all unscaled gradients, before clipping; of the step that is given
    ==========================  =====================================================================

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter`` (or anything with its ``add_scalar`` and ``flush``), or the
            folder for a new one.

    Raises:
        PolicyError: Neither a writer nor a folder.
        UnsupportedError: TensorBoard is not installed.

    Example:
        >>> import mezzo, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,emulate=true")
        >>> board = mezzo.integrations.TensorBoard(tempfile.mkdtemp())
        >>> amp.backward(model.weight.sum())
        >>> board.log(amp, amp.step())
        >>> board.close()
    """

    def __init__(self, writer: Any) -> None:
        self._is_own = isinstance(writer, str | os.PathLike)
        self.writer = _new_writer(writer) if self._is_own else writer
        if not callable(getattr(self.writer, "add_scalar", None)):
            raise PolicyError(
                f"TensorBoard writes with a SummaryWriter or into a folder, not with a {type(writer).__name__}",
                write='TensorBoard("runs/first")',
            )

    def log(self, amp: MixedPrecision, step: Step | None = None) -> None:
        """Write one point of each curve, at the number of steps that the session has taken so far.

        Args:
            amp: The session.
            step: What its last ``step()`` returned, for the norm of its gradients.

        Raises:
            PolicyError: Not a session, or not a step.

        **Cost**: waits for the device: call it every so-many steps.
        """
        if not isinstance(amp, MixedPrecision):
            raise PolicyError(f"a {type(amp).__name__} is no session", write="board.log(amp, step)")
        if not isinstance(step, Step | None):
            raise PolicyError(
                f"step is a {type(step).__name__}, not what amp.step() returned",
                why="points are written at the number of the session's own steps",
                write="step = amp.step(), then board.log(amp, step)",
            )
        stats = [amp.stats(loss_id) for loss_id in range(amp.loss_scale.numel())]
        values = {"skipped_steps": stats[0].skipped, "skip_rate": stats[0].skip_rate}
        for number, each in enumerate(stats):
            suffix = f"_{number}" if len(stats) > 1 else ""
            values |= {f"loss_scale{suffix}": each.scale, f"growths{suffix}": each.growths}
            values[f"backoffs{suffix}"] = each.backoffs
        if step is not None:
            values["grad_norm"] = step.grad_norm.item()
        for name, value in values.items():
            self.writer.add_scalar(f"mezzo/{name}", value, stats[0].steps)

    def close(self) -> None:
        """Write what is still in memory, and close the file unless the writer was given."""
        if self._is_own:
            self.writer.close()
        else:
            self.writer.flush()


def _new_writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            "logging for TensorBoard needs tensorboard", why=str(error), write="pip install 'mezzo[trackers]'"
        ) from error
    return SummaryWriter(os.fspath(folder))
