"""What products below sixteen bits remember from step to step: largest values of their operands, and random draws.

Delayed scaling quantises an operand by the largest value that it had in the steps before, which is known before the
operand is. A product takes note of what its operands had when it is differentiated, and the session moves all histories
on at the end of a step that was not skipped: so evaluation, recomputation and skipped steps cannot move them.

Source: Micikevicius et al., *FP8 Formats for Deep Learning*, 2022, section 4; NVIDIA Transformer Engine's recipe
``DelayedScaling``, whose defaults these are: 1024 steps, their largest, no margin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.formats.noise import drawn, noise, seeded
from mezzo.policy import Policy

#: The operands of a product of a weight, in the order in which their largest values are kept.
Role = Literal["activation", "weight", "gradient"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


def moved_on(history: Tensor, window: Tensor, skipped: Tensor) -> Tensor:
    """Return histories after a step, the newest value first.

    Args:
        history: (weights, 3, steps) float32, zeros where nothing is known yet.
        window: (weights, 3): the largest values since the step before, zeros where nothing was differentiated.
        skipped: 0-d bool: whether the step was skipped, whose values are dropped.
    """
    latest = torch.where(window.isfinite() & (window > 0), window, history[..., 0])
    return torch.where(skipped, history, torch.cat([latest.unsqueeze(-1), history[..., :-1]], -1))


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The scales and the record of one weight's products, as views of the tables of all."""

    kept: Tensor  # (3,)
    window: Tensor  # (3,)

    def amax(self, role: Role, now: Tensor) -> Tensor:
        """Return what to quantise an operand by: its largest value now, where nothing is known yet.

        Args:
            role: One of :data:`ROLES`.
            now: 0-d float32: the operand's largest value.
        """
        largest = self.kept[ROLES.index(role)]
        return torch.where(largest > 0, largest, now)

    def record(self, role: Role, now: Tensor) -> None:
        """Record the largest value of an operand that has been differentiated."""
        at = ROLES.index(role)
        self.window[at] = torch.maximum(self.window[at], now)


class Memory:
    """The histories of a model's weights, and how many random draws were made.

    Args:
        owners: The module and the name of each weight, by its path. The weight is looked up when a region begins.
        policy: How long histories are, and what is taken of them.

    Attributes:
        counts: Whether a backward pass of the session runs: only what that differentiates is noted, and only its draws
            are counted. Passes that look at a model again, of a replay for instance, leave no trace here.

    **Cost**: 12 bytes for each weight, a whole tensor, and step of the history; a few kernels a step, no host sync.
    """

    def __init__(self, owners: Mapping[str, tuple[nn.Module, str]], policy: Policy) -> None:
        self.names, self._places = tuple(owners), tuple(owners.values())
        self._takes_latest = policy.fp8_amax == "latest"
        self.history = torch.zeros(len(owners), len(ROLES), policy.fp8_history)
        self.kept = torch.zeros(len(owners), len(ROLES))
        self.window = torch.zeros_like(self.kept)
        self.draws = torch.zeros((), dtype=torch.int64)
        self.counts = False
        self._numbers: dict[int, int] = {}
        self._bound_weights: list[nn.Parameter | None] = []
        self._parts: dict[Tensor, Tensor] = {}
        self.rebind({})

    def rebind(self, gathered: Mapping[Tensor, Tensor]) -> None:
        """Update the table of weights, and move the histories to their device.

        Args:
            gathered: The tensors that replace sharded parameters while these are gathered, by their shard.
        """
        now = self.standing()
        device = next((weight.device for weight in now if weight is not None), self.history.device)
        is_bound = len(now) == len(self._bound_weights) and all(map(is_, now, self._bound_weights))
        if is_bound and not gathered and device == self.history.device:
            return  # as at nearly every region of a module
        self._bound_weights, self._parts = now, {whole: part for part, whole in gathered.items()}
        weights = [(number, weight) for number, weight in enumerate(now) if weight is not None]
        self._numbers = {id(weight): number for number, weight in weights}
        self._numbers |= {id(gathered[weight]): number for number, weight in weights if weight in gathered}
        if device != self.history.device:
            for name in ("history", "kept", "window"):
                setattr(self, name, getattr(self, name).to(device))

    def standing(self) -> list[nn.Parameter | None]:
        """Return the weights that stand in its places now: pruning takes some away."""
        return [module._parameters.get(name) for module, name in self._places]

    def knows(self, weight: Tensor) -> bool:
        """Whether a weight, or what it is a view of, is one of the model's."""
        return self._number(weight) is not None

    def _number(self, weight: Tensor) -> int | None:
        number = self._numbers.get(id(weight))
        return number if number is not None or weight._base is None else self._numbers.get(id(weight._base))

    def slot(self, weight: Tensor) -> Slot | None:
        """Return the slot of a weight; ``None`` for one that is not the model's."""
        number = self._number(weight)
        return None if number is None else Slot(self.kept[number], self.window[number])

    def draw(self, device: torch.device) -> Tensor:
        """Return the key of the next noise, 0-d: on each rank another one; outside of the session's passes torch's.

        Args:
            device: Where the noise is made: a kernel there reads the key.
        """
        if not self.counts:
            return drawn(device)
        if self.draws.device != device:
            self.draws = self.draws.to(device)
        self.draws += 1
        # A hash of the number: noise adds the key to elements' numbers, and that of the next draw would be this one's,
        # shifted by an element. Ranks round other gradients of one weight, whose errors are to average out.
        return noise(self.draws.to(torch.int32), torch.full_like(self.draws, seeded(_rank()), dtype=torch.int32))

    @torch.no_grad()
    def move(self, skipped: Tensor) -> None:
        """Move the histories on after a step."""
        if self.names:
            self.history.copy_(moved_on(self.history, self.window, skipped.to(self.history.device)))
            self.window.zero_()
            self._take()

    def forget(self) -> None:
        """Drop what was noted since the last step: its gradients were cleared."""
        self.window.zero_()

    def _take(self) -> None:
        self.kept.copy_(self.history[..., 0] if self._takes_latest else self.history.amax(-1))

    def histories(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with its history, (3, steps); of one that is gathered now its part."""
        for number, (module, name) in enumerate(self._places):
            if (weight := module._parameters.get(name)) is not None:
                yield self._parts.get(weight, weight), self.history[number]

    def load(self, histories: Mapping[int, Tensor], draws: int) -> None:
        """Load saved histories, by the ``id`` of their weights; those of other weights are cleared."""
        for weight, mine in self.histories():
            saved = histories.get(id(weight))
            mine.copy_(saved) if saved is not None else mine.zero_()
        self.draws.fill_(draws)
        self.window.zero_()
        self._take()
