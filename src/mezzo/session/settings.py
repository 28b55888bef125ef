"""What can be asked of a session, set between its steps, and added to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import PolicyError, raise_together
from mezzo.policy import Policy
from mezzo.session.begin import add
from mezzo.session.core import Core, current
from mezzo.session.refusals import beginning
from mezzo.session.scale import one_or_all

__all__ = ["Settings", "core_of"]


class Settings:
    """A session's policy, options and loss scales, as users read and set them."""

    _core: Core

    @property
    def policy(self) -> Policy:
        """The policy, for as long as the session is open."""
        return self._core.policy

    @property
    def max_grad_norm(self) -> float | None:
        """What the 2-norm of a step's gradients is clipped to; ``None`` does not clip. It may be set between steps."""
        return self._core.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        raise_together(beginning.wrong_options(max_grad_norm=value))
        self._core.max_grad_norm = value

    @property
    def on_overflow(self) -> Literal["skip", "explain", "raise"]:
        """What a skipped step does besides; ``"skip"`` and ``"raise"`` may be exchanged between steps."""
        return self._core.on_overflow

    @on_overflow.setter
    def on_overflow(self, value: Literal["skip", "explain", "raise"]) -> None:
        raise_together(beginning.wrong_options(on_overflow=value))
        before = self._core.on_overflow
        if "explain" in (value, before) and value != before:
            raise PolicyError(
                f'on_overflow is "{before}", and cannot become "{value}"',
                why="what explains an overflow watches the models from the start",
                write=f'MixedPrecision(…, on_overflow="{value}")',
            )
        self._core.on_overflow = value

    @property
    def waited_s(self) -> float:
        """Seconds that this process has waited for other ranks in the session's exchanges; 0 where there is one rank.

        Over gloo that is all of it; over NCCL devices wait for each other, and the host does not.
        """
        agreement = self._core.agreement
        return 0.0 if agreement is None else agreement.consensus.waited_s

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on this device."""
        return self._core.weights.region().emulated

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, 0-d float32 on the device; one for each loss where there are several."""
        states = ((scaler.state.scale, scaler.in_graph) for scaler in self._core.scalers)
        return one_or_all([scale.clone() if in_graph else scale for scale, in_graph in states])

    # Added to it ------------------------------------------------------------------------------------------

    def add(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """Take in optimizers that are made after the session has begun: for a part that is thawed, or a second phase.

        From here on they are the session's as those that it began with: in its steps, checkpoints and ``close()``.
        Under a policy with masters these begin from the weights as they are stored, since what rounding took from
        parameters is kept for those alone that an optimizer updates.

        Args:
            optimizers: One or several, over parameters of the session's models.

        Raises:
            PolicyError: Not an optimizer, one that the session has, or over parameters that are not the models';
                with masters also parameters that another optimizer updates.
            StateError: There are gradients to step with, or the optimizer is another session's.
            UnsupportedError: Low-precision weights would train without masters; masters for models that
                ``fully_shard`` has sharded; or within a step that is being captured.
            DistributedError: Another rank has refused its part. Whatever is raised, nothing has changed.

        **Cost**: a copy of the masters; where there are several ranks, an exchange, so that all of them call it.

        Example:
            >>> import mezzo, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            >>> amp = mezzo.MixedPrecision(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "O1,emulate=true")
            >>> amp.add(torch.optim.SGD(model[0].parameters(), lr=0.01))
            >>> len(list(amp.master_params()))
            4
        """
        current().refuse_capture(
            "amp.add()",
            why="a graph holds the optimizers that there are when it is made",
            write="amp.add(optimizer) before mezzo.capture(…), or between two of its steps",
        )
        self._core.require_open("add")
        add(self._core, optimizers)


def core_of(session: Settings) -> Core:
    """Return the core of a session, for call styles that stand beside its face."""
    return session._core
