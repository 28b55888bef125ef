"""A scaler by itself: optimizers without a model, whose gradients come scaled from calls of the user's own."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError
from mezzo.policy import Policy
from mezzo.scale.held import HeldScaler
from mezzo.session.begin import begun
from mezzo.session.core import Core
from mezzo.session.refusals.beginning import owners
from mezzo.session.scale import Step
from mezzo.session.step import take, take_together
from mezzo.session.update import Writes, takes_flag
from mezzo.session.window.group import GradientGroup
from mezzo.step.consensus import Consensus

__all__ = ["ScaledOptimizer"]


class ScaledOptimizer:
    """An optimizer as a scaler has it: a session over its parameters, with windows over gradients that are there.

    The session belongs to the optimizer, which it ends with: a scaler that finds one made by another ends that one. It
    has no say in what else is done with optimizer and weights, and its loss scale moves when the scaler says so. An
    optimizer whose session is lent (:func:`lend`) keeps that one, with its models and masters, and others of its
    optimizers may come with other scalers.

    Args:
        optimizer: The optimizer.
        scaler: What holds the scale, for all optimizers of a scaler.
        masters: What a user writes to have FP32 masters, for errors.

    Raises:
        MezzoError: The optimizer has a session already that is no scaler's, has no parameter, or asks for the scaler
            itself; another rank refuses.

    **Cost**: the first time for an optimizer, two exchanges where there are several ranks.
    """

    def __init__(self, optimizer: Optimizer, scaler: HeldScaler, masters: str = "") -> None:
        self.optimizer, self._scaler, self._masters = optimizer, scaler, masters
        cores = [owner for owner in owners(optimizer) if isinstance(owner, Core)]
        if (lent := next((core for core in cores if core.is_lent), None)) is not None:
            lent.take_scaler(scaler)
            self._core = lent
            return
        known = (core for core in cores if not core.guards and core.scalers[0] is scaler)
        self._core = next(known, None) or self._begun()

    def _begun(self) -> Core:
        if "grad_scaler" in inspect.signature(self.optimizer.step).parameters:
            raise UnsupportedError(
                "an optimizer whose step takes the scaler itself",
                where=type(self.optimizer).__name__,
                why="torch is about to stop passing it: what such a step needs are its attributes found_inf and "
                "grad_scale, two tensors",
                write="self.found_inf and self.grad_scale in its step, without grad_scaler=",
            )
        holder = nn.Module()
        # By hand: an optimizer takes tensors that are no nn.Parameter, and all of them are to have names in errors.
        holder._parameters = {
            f"group {number}, parameter {place}": param
            for number, group in enumerate(getattr(self.optimizer, "param_groups", ()))
            for place, param in enumerate(group["params"])
        }
        return begun(
            holder,
            self.optimizer,
            Policy.O0(loss_scale=self._scaler.config),
            consensus=Consensus.of(),
            checks_ranks=False,
            max_grad_norm=None,
            on_overflow="skip",
            restore_buffers=False,
            num_losses=1,
            device=None,
            scaler=self._scaler,
            guards=False,
        )

    # What it does -------------------------------------------------------------------------------------------

    def find(self, scale: Tensor) -> None:
        """Take the gradients that are there for those of one loss.

        Args:
            scale: What they carry, unless they are unscaled by now.
        """
        self._core.group_optimizers()
        for group in self._groups():
            group.find(self._scaler, scale)

    def unscale_(self) -> None:
        """Unscale the gradients that were found.

        Raises:
            UnsupportedError: They are FP16, and have no FP32 value to be unscaled for.
        """
        self._core.require_open("unscale_")
        self._core.weights.low.refuse_unscaling(self.optimizer, self._scaler.config, self._masters)
        with torch.no_grad():
            for group in self._groups():
                group.settle()
                if self._core.is_lent:  # users look at the model's parameters, and what they edit has masters
                    group.wide.show()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step, Any]:
        """Step with gradients that were found, or skip.

        Args:
            closure: Evaluates the loss, and finds the gradients, for an optimizer that asks for it.
            args: What ``optimizer.step`` is given besides.
            kwargs: By name.

        Returns:
            What happened, and what ``optimizer.step`` returned; ``None`` where it was not called.

        Raises:
            UnsupportedError: The gradients are FP16, and the optimizer cannot unscale them in FP32.
        """
        core, optimizer = self._core, self.optimizer
        if closure is not None or not takes_flag(optimizer):
            core.weights.low.refuse_unscaling(optimizer, self._scaler.config, self._masters)
        plain, plain_steps = core.writes.step_of(optimizer), core.writes.plain_steps
        taken_over = plain_steps.get(optimizer)
        # A dict that C fills: were it a function of Python's, an interrupt could come between the step and its note.
        found = defaultdict[str, Any](partial(plain, *args, **kwargs))

        def evaluated(closure: Callable[[], Any]) -> None:
            found["value"] = plain(closure, *args, **kwargs)

        plain_steps[optimizer] = partial(found.__getitem__, "value") if closure is None else evaluated
        try:
            core.require_open("step")
            together = core.agreement
            taken = (
                take(core, optimizer, closure, None)
                if together is None
                else take_together(core, together, optimizer, closure, None)
            )
        except BaseException:
            self.forget()
            raise
        finally:
            if taken_over is None:
                plain_steps.pop(optimizer, None)
            else:
                plain_steps[optimizer] = taken_over
        return taken, found.get("value")

    def overflows(self) -> list[Tensor]:
        """Return whether gradients that were unscaled, without a step after it, are not finite, on any rank."""
        windows = [group.window for group in self._groups() if group.window is not None]
        flags = [share.found_inf for window in windows for share in window.settled]
        if flags and self._core.consensus is not None:
            flags = [self._core.consensus.largest(reduce(or_, flags).float().reshape(1)).ne(0).reshape(())]
        return flags

    def forget(self) -> None:
        """Know of no gradients any more; they are not touched."""
        for group in self._groups():
            group.forget()

    @property
    def writes(self) -> Writes:
        """What does its steps, for as long as the optimizer lives."""
        return self._core.writes

    def _groups(self) -> list[GradientGroup]:
        return [group for group in self._core.groups if self.optimizer in group.optimizers]
