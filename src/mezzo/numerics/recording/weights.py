"""Weights before a step, the gradients it gets, and by how much it moves the weights: counted for one step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import PolicyError
from mezzo.formats import Format
from mezzo.numerics.evidence import SwallowedUpdates
from mezzo.numerics.moves import Move, count_moves
from mezzo.numerics.recording.passes import Places
from mezzo.numerics.recording.subject import Subject
from mezzo.numerics.recording.tally import Tally, is_countable
from mezzo.tensors import dtype_name
from mezzo.weights.halves import owner_of
from mezzo.weights.models import halves_in

__all__ = ["WeightWatch", "given_optimizers", "swallowed_of", "updated_by"]


class WeightWatch:
    """Counts what one step does to the parameters.

    Args:
        subject: What is watched.
        kinds: Which of ``weights``, ``weight_gradients`` and ``updates``.
        formats: The storage formats that updates are rounded to.
        tally: What counts.
        places: What is told of the rows.

    Attributes:
        has_gradients: Whether a parameter has had a gradient.
    """

    def __init__(
        self, subject: Subject, kinds: Iterable[str], formats: Sequence[Format], tally: Tally, places: Places
    ) -> None:
        self._subject, self._kinds, self._formats = subject, frozenset(kinds), formats
        self._tally, self._places = tally, places
        self._before: dict[Tensor, tuple[Tensor, torch.dtype]] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self.has_gradients = False

    def before(self, updated: Container[Tensor]) -> None:
        """Count the weights that a step may move, and copy them.

        Args:
            updated: The parameters that the step is one of.
        """
        moving = (param for param in self._subject.params if param.requires_grad and param in updated)
        for param, value in self._values(filter(is_countable, moving)):
            if "weights" in self._kinds:
                self._put("weights", param, value.dtype, self._tally.count(value))
            if "updates" in self._kinds:
                self._before[param] = value.to(torch.float32, copy=value.dtype == param.dtype), value.dtype

    def keep(self, moved: Container[Tensor]) -> None:
        """Let go of the copies of parameters that the step is not one of after all."""
        self._before = {param: before for param, before in self._before.items() if param in moved}

    def rest(self) -> None:
        """Count the weights that no step has moved."""
        places = self._subject.params if "weights" in self._kinds else {}
        others = [param for param, place in places.items() if ("weights", *place) not in self._places]
        for param, value in self._values(filter(is_countable, others)):
            self._put("weights", param, value.dtype, self._tally.count(value))

    def gradient(self, param: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        """Count a gradient, instead of an earlier one of the same parameter.

        Args:
            param: The model's parameter.
            gradient: Its gradient.
            factor: What to multiply it by; ``None`` for 1.
        """
        if param not in self._subject.params or not is_countable(gradient):
            return
        self.has_gradients = True
        if "updates" in self._kinds:
            self._gradients[param] = gradient
        if "weight_gradients" in self._kinds:
            self._put("weight_gradients", param, gradient.dtype, self._tally.count(gradient, factor))

    def after(self) -> None:
        """Count the updates of the weights that were copied, and let go of the copies."""
        moves = []
        for param, value in self._values(self._before):
            before, dtype = self._before[param]
            update = value.float() - before
            row = self._tally.count(update)
            self._put("updates", param, dtype, row)
            gradient = self._gradients.pop(param, None)
            if gradient is not None:
                is_alike = gradient.shape == update.shape and gradient.layout == torch.strided
                gradient = gradient.detach().reshape(-1) if is_alike else None
            moves.append(Move(before.reshape(-1), update.reshape(-1), gradient, self._tally.beside(row)))
        self._before.clear()
        for device in dict.fromkeys(move.update.device for move in moves):
            count_moves([move for move in moves if move.update.device == device], self._formats)

    def _values(self, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters, each with its FP32 value if it is stored in two halves, and else with what it holds."""
        owners = [*dict.fromkeys(each for module in self._subject.model.modules() for each in halves_in(module))]
        for param in params:
            owner = owner_of(param, owners)
            yield param, param.detach() if owner is None else owner.read(param)

    def _put(self, kind: str, param: Tensor, dtype: torch.dtype, row: int) -> None:
        self._places[kind, *self._subject.params[param]] = dtype_name(dtype), [row]


def swallowed_of(numbers: Sequence[int], formats: Sequence[Format]) -> SwallowedUpdates:
    """Read what :class:`WeightWatch` has put beside the histogram of an update."""
    updated, beyond, with_gradient, unmoved, *lost = numbers
    return SwallowedUpdates(
        updated=updated,
        swallowed={target.name: count for target, count in zip(formats, lost, strict=True)},
        beyond=beyond,
        with_gradient=with_gradient,
        unmoved=unmoved,
    )


# Optimizers ---------------------------------------------------------------------------------------------------


def given_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers that a recorder was given.

    Args:
        given: An optimizer, several, or ``None``.

    Raises:
        PolicyError: Anything else.
    """
    if given is None:
        return []
    found = [given] if isinstance(given, Optimizer) or not isinstance(given, Iterable) else [*given]
    wrong = [type(each).__name__ for each in found if not isinstance(each, Optimizer)] or ["an empty list"][: not found]
    if wrong:
        raise PolicyError(
            f"a recorder takes a torch.optim.Optimizer, not {wrong[0]}",
            write="Recorder(model, optimizer), and of a torch.amp.GradScaler loss_scale=scaler",
        )
    return found


def updated_by(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters that an optimizer updates."""
    return {param for group in optimizer.param_groups for param in group["params"]}
