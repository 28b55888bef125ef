"""What ranks decide together of a step: whether it is taken, where its scales go, and whose error ends it.

All that one rank knows goes into a few numbers, of which each rank gets the largest of all ranks. What follows is a
pure function of equal numbers: equal on all ranks. The host reads none of them in a step that goes well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import DistributedError, StateError, UnsupportedError, some_of
from mezzo.scale.scaler import Scaler
from mezzo.session.scale import parts_of
from mezzo.session.verdict import Judged
from mezzo.session.window.window import LossShare, NoGradient
from mezzo.step.consensus import Consensus, Heard
from mezzo.step.executors.choose import shared
from mezzo.step.passes import not_finite
from mezzo.step.ranks import PROBLEMS, Problem

__all__ = ["Agreement", "by_value"]

logger = logging.getLogger(__name__)

#: Numbers that ranks exchange: those of a step, and those of each loss.
_OF_STEP: Final = 5
_OF_LOSS: Final = 3


class Agreement:
    """The ranks of a session, step by step.

    Args:
        consensus: The ranks.
        scalers: The scale of each loss.
        checks_ranks: Whether the scales of all ranks are compared in each step.

    Attributes:
        consensus: See above.
        checks_ranks: See above.
    """

    def __init__(self, consensus: Consensus, scalers: list[Scaler], *, checks_ranks: bool) -> None:
        self.consensus, self._scalers, self.checks_ranks = consensus, scalers, checks_ranks
        self._is_due = self._has_norms = False

    def begin(self, step: int) -> None:
        """Begin a step, or one evaluation of its closure: the other ranks expect this one's numbers.

        Args:
            step: Its number, for messages.
        """
        self.consensus.step, self._is_due, self._has_norms = step, True, False

    def whole(self, params: list[Tensor], norms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of whole gradients, and numbers whose 2-norm is that of all gradients of all stages.

        Args:
            params: Whose gradients.
            norms: (params,) float32: of what this rank holds of these.
        """
        self._has_norms = True
        found = self.consensus.norms(params, norms)
        return found, self.consensus.of_stages(found)

    def judged(self, judged: Judged, inner: Mapping[int, Tensor], call: int) -> Judged:
        """Return what all ranks make of the gradients of a step: one verdict, and one for each loss.

        Args:
            judged: What this rank makes of them.
            inner: Whether gradients that a loss was computed from had overflowed here, by loss.
            call: Which optimizers step, as bits: ranks that differ in it do not step.

        Raises:
            DistributedError: Another rank has raised, or is gone. Where the host would have to wait for the answer, the
                account of the step has it.
            StateError: The scales of ranks differ, with ``check_ranks``.
        """
        consensus, device = self.consensus, judged.verdict.found_inf.device
        parts = parts_of(self._scalers, judged.shares, judged.losses, inner, device)
        losses: list[tuple[int, int] | None] = [None] * len(self._scalers)
        tensors = [judged.verdict.found_inf, judged.found_here]
        for part in parts:
            flags = [flag for _, found in part.verdicts for flag in found]
            before = [] if part.inner is None else [part.inner]
            losses[part.loss_id] = len(flags), len(before)
            tensors += [part.loss, *flags, *before]
        call = (call * 257 + sum(1 << part.loss_id for part in parts)) % (1 << 24)
        (told,) = shared(_told, (consensus.rank, consensus.size, call, tuple(losses)), tensors)
        self._is_due = False
        numbers = consensus.largest(told).unbind()
        wanted = [n for part in parts for n in numbers[_OF_STEP + _OF_LOSS * part.loss_id :][:_OF_LOSS]]
        found = iter(shared(_heard, (consensus.size,), [*numbers[:_OF_STEP], *wanted]))
        found_inf, problem = islice(found, 2)
        heard = Heard(consensus=consensus, blame=numbers[1], problem=problem)
        if device.type == "cpu":  # the host knows already
            heard.require_none()
        if self.checks_ranks:
            self._compare(heard, judged)
        shares, kept = list[LossShare](), []
        for part, flag, loss in zip(parts, found, found, strict=False):
            kept.append((part.loss_id, loss))
            shares += [LossShare(loss_id=part.loss_id, scale=scale, found_inf=flag) for scale, _ in part.verdicts]
        return replace(judged, verdict=judged.verdict.flagged(found_inf), shares=shares, losses=kept, heard=heard)

    def problems_of_capture(self, device: torch.device) -> Iterator[UnsupportedError]:
        """Yield what keeps the exchanges of a step from being part of a graph.

        Args:
            device: The graph's.
        """
        backend = self.consensus.backend(device)
        if backend != "nccl":
            yield UnsupportedError(
                f"exchanges over {backend} cannot be captured",
                where=f"the process group of the session, rank {self.consensus.rank} of {self.consensus.size}",
                why="the host carries them out, and a replayed graph has no host",
                write='torch.distributed.init_process_group("nccl"); or the train step without mezzo.capture',
            )
        if self.checks_ranks:
            yield UnsupportedError(
                "check_ranks=True cannot be captured",
                why="the host compares the loss scales in each step, and a replayed graph has no host",
                write="check_ranks=False, and MEZZO_CHECK_RANKS unset; or the train step without mezzo.capture",
            )

    def refuse(self, error: Exception, device: torch.device) -> Heard | None:
        """Tell the other ranks that this one cannot take a step, where they expect its numbers.

        Args:
            error: Why.
            device: Where the loss scales live.

        Returns:
            What ranks with gradients go on with, if this one has none, and nothing worse happened; the step is skipped
            on all. ``None`` where the error is to be raised.
        """
        consensus = self.consensus
        if isinstance(error, DistributedError):
            return None
        if not isinstance(error, NoGradient):
            consensus.say(f"{type(error).__name__}: {error}")
        if not self._is_due:
            return None
        self._is_due = False
        if not self._has_norms:
            self.whole([], torch.zeros(0, device=device))
        names = [kind.__name__ for kind in type(error).__mro__]
        code = next((PROBLEMS.index(name) for name in names if name in PROBLEMS), PROBLEMS.index("another error"))
        if isinstance(error, NoGradient):
            code = PROBLEMS.index("no gradient")
        numbers = torch.zeros(_OF_STEP + _OF_LOSS * len(self._scalers))
        numbers[2] = Problem(code, consensus.rank).number(consensus.size)
        numbers[3:5] = -torch.inf  # whatever the others step with
        numbers = consensus.largest(numbers.to(device))
        heard = Heard(consensus=consensus, blame=numbers[1], problem=numbers[2])
        if PROBLEMS[code] != "no gradient" or not float(numbers[3]) > -torch.inf:
            return None
        heard.require_none()
        return heard

    def _compare(self, heard: Heard, judged: Judged) -> None:
        """Refuse to go on with scales that differ; the host waits for the device.

        Raises:
            StateError: With the scale of each rank.
        """
        heard.require_none()
        if float(heard.problem):  # a rank without gradients compares nothing
            return
        mine = torch.stack([*(scaler.state.scale for scaler in self._scalers), judged.verdict.grad_norm]).tolist()
        found: list[list[float]] = self.consensus.gathered(mine, "the loss scales")
        if any(theirs[:-1] != found[0][:-1] for theirs in found):
            texts = [" and ".join(f"{scale:.6g}" for scale in theirs[:-1]) for theirs in found]
            raise StateError(
                "the ranks have different loss scales",
                where=f"step {self.consensus.step}: {by_value(texts)}",
                why="gradients with several scales would be added up",
                write="the same amp.load_state_dict(…) on all ranks",
            )
        norms = [theirs[-1] for theirs in found]
        if all(map(math.isfinite, norms)) and len(set(norms)) > 1:
            logger.warning(
                "the norms of gradients differ in step %d: %s; they were not reduced, or ranks hold other parameters",
                self.consensus.step,
                by_value([f"{norm:.6g}" for norm in norms]),
            )


def by_value(values: list[str]) -> str:
    """List values with the ranks that have them."""
    ranks = {value: [str(rank) for rank, each in enumerate(values) if each == value] for value in values}
    return "; ".join(f"{value} on rank {some_of(those)}" for value, those in ranks.items())


# What is exchanged ----------------------------------------------------------------------------------------


def _told(
    rank: int,
    size: int,
    call: int,
    losses: tuple[tuple[int, int] | None, ...],
    found_inf: Tensor,
    found_here: Tensor,
    *rest: Tensor,
) -> tuple[Tensor]:
    """Return what a rank tells the others, as a vector of which each gets the largest.

    Args:
        rank: This rank.
        size: How many there are.
        call: What must be the same on all ranks: their largest, and their smallest with the sign changed, say whether.
        losses: By loss: how many flags and inner flags there are; ``None`` where it takes no part.
        found_inf: Whether the norm of all gradients is not finite.
        found_here: Whether this rank's own part of it is not.
        *rest: Loss by loss: the loss, its flags, its inner flags.
    """
    zero = found_inf.to(torch.float32) * 0
    tensors, own = iter(rest), zero
    numbers = list[Tensor]()
    for kind in losses:
        if kind is None:
            numbers += [zero] * _OF_LOSS
            continue
        failed = not_finite(next(tensors)).to(torch.float32)
        found, inner = (reduce(torch.maximum, [f.to(torch.float32) for f in islice(tensors, n)], zero) for n in kind)
        numbers += [found, failed, inner]
        own = torch.maximum(own, torch.maximum(failed, inner))
    blame = torch.maximum(found_here.to(torch.float32) * (size - rank), own * (2 * size - rank))
    return (torch.stack([found_inf.to(torch.float32), blame, zero, zero + call, zero - call, *numbers]),)


def _heard(size: int, found_inf: Tensor, _: Tensor, problem: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Return what ranks have found together, from the largest of their numbers.

    Args:
        size: How many ranks there are.
        found_inf: As told, and so are the others.
        problem: The worst problem.
        *numbers: What the ranks step with, twice, and the numbers of each loss that takes part.

    Returns:
        Whether nothing may be written, and the problem; of each loss whether its gradients overflowed, and a number
        that is not finite where the loss is not. With a problem the scale of each loss stays, as for losses that fail.
    """
    most, least, *rest = numbers
    differs = (most + least).ne(0).to(torch.float32)
    problem = torch.maximum(problem, differs * ((len(PROBLEMS) - 1) * (size + 1)))
    stops = problem.ne(0)
    found = [found_inf.ne(0) | stops, problem]
    losses = iter(rest)
    for overflowed, failed, inner in zip(losses, losses, losses, strict=True):
        fails = (failed * (1 - inner)).ne(0) | stops
        bad = fails.to(torch.float32)
        found += [(overflowed + inner).ne(0) | stops, (bad - bad) / (1 - bad)]
    return tuple(found)
