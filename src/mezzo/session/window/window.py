"""The accumulation window: which losses gradients come from, and with which scales."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import StateError, message
from mezzo.step.gradients import mark

__all__ = ["CarriedScale", "EditWatch", "LossShare", "NoGradient", "Window"]

logger = logging.getLogger(__name__)

#: Gradients looked at for edits: clipping writes to all of them, and a model may have thousands.
_WATCHED: Final = 16
#: What is saved of a :class:`CarriedScale`, beside the scale.
_SAVED: Final = ("loss_id", "is_one", "is_common", "ranks")


class NoGradient(StateError):  # noqa: N818 - an error by its base
    """There is nothing to step with; where other ranks have gradients, that is a vote and no mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShare:
    """The part of a step's gradients that one loss made with one scale.

    Attributes:
        loss_id: The loss.
        scale: 0-d float32: the scale that these gradients carried.
        found_inf: 0-d bool: whether they were not finite, before or after unscaling.
    """

    loss_id: int
    scale: Tensor
    found_inf: Tensor


@dataclass(frozen=True, slots=True)
class CarriedScale:
    """The scale that the gradients carry, and the loss that it belongs to."""

    loss_id: int
    scale: Tensor
    version: int
    #: A constant 1, which no gradient notices.
    is_one: bool
    #: The same for all losses, which need not be told apart.
    is_common: bool = False
    #: How many ranks' gradients were summed, and not divided; 1 for those of one rank, and for means.
    ranks: int = 1

    @property
    def kind(self) -> tuple[int | None, int]:
        """Equal for scales that gradients may carry together."""
        return None if self.is_common else id(self.scale), self.ranks

    def divisor(self) -> Tensor:
        """Return what the gradients are divided by to be means over ranks, unscaled; 0-d float32."""
        return self.scale if self.ranks == 1 else self.scale * self.ranks


class Window:
    """The backward passes since the last step of some optimizers.

    Most windows have one loss and one scale: ``.grad`` carries that scale until the step, which unscales on the way.
    A second scale cannot be added to the first. ``.grad`` is then emptied into ``unscaled_sums``, and filled anew.

    Attributes:
        micro_batches: How many backward passes there were.
        carried: The scale that ``.grad`` carries; ``None`` once it is unscaled.
        settled: The shares of losses whose gradients are unscaled already.
        unscaled_sums: What earlier backward passes of other scales made, in FP32 or wider, by parameter.
        new_gradients: Where there are unscaled sums: each parameter that the last backward pass reached, with its
            gradient and that gradient's mark. Clearing or editing it later shows in these.
        losses: The losses, detached, with their ids.
        is_found: Whether its gradients were there before it was opened, or were clipped by a function of torch's. What
            was found of them once then counts, whatever they are edited to be.
        overflowed: 0-d bool: whether a pass that these gradients come from overflowed, here or in gradients of other
            optimizers, where all that it was for step together or not at all; ``None`` where each is judged by its own.
        judged_losses: For how many of the losses the scale has moved already, before the step.
    """

    def __init__(self) -> None:
        self.micro_batches = 0
        self.carried: CarriedScale | None = None
        self.settled: list[LossShare] = []
        self.unscaled_sums: dict[Tensor, Tensor] = {}
        self.new_gradients: dict[Tensor, tuple[Tensor, tuple[int, int]]] = {}
        self.losses: list[tuple[int, Tensor]] = []
        self.is_found = False
        self.overflowed: Tensor | None = None
        self.judged_losses = 0

    @property
    def is_plain(self) -> bool:
        """Whether one scale is all that the gradients carry, so that unscaling can be part of the step."""
        return self.carried is not None and not self.settled and not self.unscaled_sums

    @property
    def carries_scale(self) -> bool:
        """Whether ``.grad`` differs from plain gradients."""
        return self.carried is not None and not self.carried.is_one

    @property
    def is_unscaled(self) -> bool:
        """Whether ``.grad`` is the unscaled sum of everything, as ``unscale_`` leaves it."""
        return self.carried is None and not self.unscaled_sums

    def require_unchanged(self) -> None:
        """Refuse gradients whose scale was written to since they were made."""
        if self.carried is not None and self.carried.version != self.carried.scale._version:
            raise StateError(
                "the loss scale was changed inside an accumulation window",
                where=f"after {self.micro_batches} backward pass(es) since the last step",
                why="the gradients carry the scale they were made with",
                write="amp.zero_grad(), then amp.backward(loss) again",
            )

    # State ---------------------------------------------------------------------------------------------

    def state_dict(self, name_of: Callable[[Tensor], str], number_of: Callable[[Tensor], int]) -> dict[str, Any]:
        """Return the window as plain values; gradients and scales are saved beside it.

        Args:
            name_of: Gives the name of a tensor that the optimizers update.
            number_of: Gives the number of a scale among those that are saved.
        """
        carried = self.carried
        return {
            "micro_batches": self.micro_batches,
            "carried": carried and {n: getattr(carried, n) for n in _SAVED} | {"scale": number_of(carried.scale)},
            "settled": [
                {"loss_id": share.loss_id, "scale": number_of(share.scale), "found_inf": bool(share.found_inf)}
                for share in self.settled
            ],
            "aside": {name_of(param): total.clone() for param, total in self.unscaled_sums.items()},
            "beside": [name_of(param) for param in self.new_gradients],
            "losses": [{"loss_id": loss_id, "value": float(loss)} for loss_id, loss in self.losses],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], scales: list[Tensor], params: Mapping[str, Tensor]) -> Window:
        """Restore a window.

        Args:
            state: What :meth:`state_dict` returned.
            scales: The scales by number, those that losses have now among them: gradients that carry one of these
                carry it again, and not only its value.
            params: The tensors that the optimizers update, by name.
        """
        # A scale is the same tensor for all that carried it, and for the scaler: which one it was tells whether later
        # gradients may be added, so that a copy of its value would not do.
        window = cls()
        window.micro_batches = state["micro_batches"]
        if (carried := state["carried"]) is not None:
            scale = scales[carried["scale"]]
            # States of earlier versions have no ranks.
            values = {name: carried[name] for name in _SAVED if name in carried}
            window.carried = CarriedScale(scale=scale, version=scale._version, **values)
        for each in state["settled"]:
            scale = scales[each["scale"]]
            found_inf = torch.tensor(each["found_inf"], device=scale.device)
            window.settled.append(LossShare(loss_id=each["loss_id"], scale=scale, found_inf=found_inf))
        aside = ((params[name], total) for name, total in state["aside"].items())
        window.unscaled_sums = {param: total.to(param.device, copy=True) for param, total in aside}
        # In float64, which holds any loss: what counts is whether it was finite.
        window.losses = [(e["loss_id"], torch.tensor(e["value"], dtype=torch.float64)) for e in state["losses"]]
        return window


class EditWatch:
    """Sees by version counters that gradients were written in place since the last backward pass, and says so once."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, tuple[int, int]]] = []
        self._told = False

    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Note the gradients, which carry a scale, as a backward pass left them.

        Args:
            leaves: The parameters that may have one.
        """
        if not self._told:
            there = ((leaf, leaf.grad) for leaf in leaves)
            found = ((leaf, mark(gradient)) for leaf, gradient in there if gradient is not None)
            self._seen = list(islice(found, _WATCHED))

    def look(self, *, carrying: bool) -> None:
        """Say it if a gradient was written since, and forget them.

        Args:
            carrying: Whether they carry a scale still, and nothing but their owner clips them.
        """
        seen, self._seen = self._seen, []
        now = ((mark(leaf.grad), before) for leaf, before in seen if leaf.grad is not None)
        written = (address == kept and version > before for (version, address), (before, kept) in now)
        if carrying and not self._told and any(written):
            self._told = True
            # No warning: multiplying all gradients, or averaging them over ranks, is right with a scale too.
            logger.info(
                "%s",
                message(
                    "gradients were edited while they still carry the loss scale",
                    where="in place, between amp.backward() and the next amp.step() or amp.unscale_()",
                    why="clipping them there clips to a limit that is too small by the scale (multiplying all is fine)",
                    write="MixedPrecision(…, max_grad_norm=1.0); or amp.unscale_() before the edit",
                ),
            )
