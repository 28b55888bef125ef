"""Weights before a step, the gradients it gets, and by how much it moves the weights: counted for one step."""

from __future__ import annotations
from typing import Any

from collections.abc import Container, Iterable, Mapping, Sequence
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
Keeper: Any = ()
MasterWeights: Any = ()
masters_of: Any = ()
from mezzo.optim.optimizer import as_one_pass
from mezzo.tensors import dtype_name

__all__ = ["WeightWatch", "given_optimizers", "kept_by", "swallowed_of", "updated_by"]


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

    def before(self, kept: Mapping[Tensor, Keeper], updated: Container[Tensor]) -> None:
        """Count the weights that a step may move, and copy them.

        Args:
            kept: What keeps the FP32 value of each low-precision parameter that has one.
            updated: The parameters that the step is one of.
        """
        for param in self._subject.params:
            if not param.requires_grad or param not in updated or not is_countable(param):
                continue
            value = _value(param, kept)
            if "weights" in self._kinds:
                self._put("weights", param, value.dtype, self._tally.count(value))
            if "updates" in self._kinds:
                self._before[param] = value.to(torch.float32, copy=True), value.dtype

    def keep(self, moved: Container[Tensor]) -> None:
        """Let go of the copies of parameters that the step is not one of after all."""
        self._before = {param: before for param, before in self._before.items() if param in moved}

    def rest(self) -> None:
        """Count the weights that no step has moved."""
        for param, place in self._subject.params.items():
            if "weights" in self._kinds and ("weights", *place) not in self._places and is_countable(param):
                self._put("weights", param, param.dtype, self._tally.count(param))

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

    def after(self, kept: Mapping[Tensor, Keeper]) -> None:
        """Count the updates of the weights that were copied, and let go of the copies."""
        moves = []
        for param, (before, dtype) in self._before.items():
            update = _value(param, kept).float() - before
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


def _value(param: Tensor, kept: Mapping[Tensor, Keeper]) -> Tensor:
    return (kept[param].master_of(param) if param in kept else param).detach()


# Optimizers ---------------------------------------------------------------------------------------------------


def given_optimizers(given: Any) -> list[tuple[Optimizer, Keeper | None]]:
    """Return the optimizers that a recorder was given, each with what keeps FP32 values of its parameters.

    Args:
        given: An optimizer, one with masters around it, several of either, or ``None``.

    Raises:
        PolicyError: Anything else.
    """
    if given is None:
        return []
    several = [given] if isinstance(given, Optimizer | MasterWeights) or not isinstance(given, Iterable) else [*given]
    found = [each.optimizer if isinstance(each, MasterWeights) else each for each in several]
    wrong = [type(each).__name__ for each in found if not isinstance(each, Optimizer)] or ["an empty list"][: not found]
    if wrong:
        raise PolicyError(
            f"a recorder takes a torch.optim.Optimizer, not {wrong[0]}",
            write="Recorder(model, optimizer), and of a torch.amp.GradScaler loss_scale=scaler",
        )
    return [(each, masters_of(each) or as_one_pass(each)) for each in found]


def kept_by(keepers: Iterable[Keeper | None]) -> dict[Tensor, Keeper]:
    """Return the low-precision parameters, each with the keeper of its FP32 value."""
    return {param: keeper for keeper in keepers if keeper is not None for param in keeper.stored()}


def updated_by(optimizer: Optimizer, keeper: Keeper | None) -> set[Tensor]:
    """Return the parameters of a model that an optimizer updates, itself or through their masters."""
    own = {param for group in optimizer.param_groups for param in group["params"]}
    return own if keeper is None else own | set(keeper.stored())
