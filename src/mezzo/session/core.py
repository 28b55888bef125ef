"""What a session is made of, with public fields: what its face, its rooms and each step work on."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError, UnsupportedError, some_of
from mezzo.optim.hypers import changes_nothing
from mezzo.optim.masters import MasterWeights
from mezzo.policy import Policy
from mezzo.scale.held import HeldScaler
from mezzo.scale.scaler import Scaler
from mezzo.session.agreement import Agreement
from mezzo.session.scale import StepOutcome
from mezzo.session.stats import Noted, StepStats
from mezzo.session.update import Writes
from mezzo.session.verdict import Judged
from mezzo.session.weights.phases import Handles
from mezzo.session.weights.weights import Weights
from mezzo.session.window.buffers import NormBuffers
from mezzo.session.window.group import GradientGroup, grouped
from mezzo.session.window.window import EditWatch, NoGradient
from mezzo.step.consensus import Consensus, Sharding
from mezzo.step.executors.choose import shared

if TYPE_CHECKING:
    from mezzo.overflow import Replay

__all__ = ["Core", "PlainRun", "are_same", "current", "under_way"]


class Core:
    """A session's parts.

    Args:
        models: The models.
        optimizers: The optimizers over their parameters.
        policy: What precision each thing gets.
        num_losses: How many losses have a scale of their own.
        device: Where the loss scales live; the first parameter's when omitted.
        handles: The handles of those models that were prepared before.
        scaler: What holds the scale of its one loss, where there is such a thing already.
        guards: See below.

    Attributes:
        models: The models.
        optimizers: The optimizers.
        policy: The policy.
        max_grad_norm: What the 2-norm of a step's gradients is clipped to; ``None`` does not clip.
        on_overflow: What a skipped step does besides.
        weights: Models and optimizers, as the policy has them.
        groups: The optimizers by the gradients they share, each group with its accumulation window.
        grouped_params: What each optimizer updated when they were grouped.
        scalers: The scale of each loss.
        stats: The count of steps.
        buffers: Batch norm's statistics before the window, with ``restore_buffers=True``.
        edits: What tells that scaled gradients were written in place.
        inner_overflows: Whether ``grad()`` overflowed since the last step, 0-d bool, by loss.
        writes: What a step writes, done whole or not at all.
        evaluating: The optimizer that evaluates a closure now.
        replay: What finds where an overflow began, with ``on_overflow="explain"``.
        has_begun: Whether there was a backward pass, before which the models were looked at again.
        guards: Whether it refuses what is done with its optimizers and weights without it: steps, and training weights
            of low precision. Where only an optimizer is known, and no model, that is their owner's business.
        masters: What keeps the FP32 values of weights for torch's optimizers.
        consensus: What the ranks that step together share; ``None`` where there is one rank.
        agreement: What the ranks that step together decide in each step; ``None`` where there is one rank.
        is_lent: Whether scalers that come from outside may have it, one after the other, instead of its own.
        sums_wide: Whether the first gradients of a window are FP32 already, where a parameter has an FP32 value.
        is_closed: Whether the preparation was undone.
        runs_backward: Whether a backward pass of its own runs now.
        keeps_left: Whether gradients that a step has left are added to, as in plain loops, and not refused.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        policy: Policy,
        *,
        num_losses: int,
        device: torch.device | str | None,
        handles: Handles,
        consensus: Consensus | None = None,
        checks_ranks: bool = False,
        scaler: Scaler | None = None,
        guards: bool = True,
        masters: type[MasterWeights] = MasterWeights,
    ) -> None:
        self.models, self.optimizers, self.policy = models, optimizers, policy
        self.guards = guards
        self.max_grad_norm: float | None = None
        self.on_overflow: Literal["skip", "explain", "raise"] = "skip"
        self.weights = Weights(models, optimizers, policy, handles, masters)
        self.weights.low.guards = guards
        self.groups: list[GradientGroup] = []
        self.grouped_params: list[list[Tensor]] = []
        device = device or next(self.weights.updated()).device
        made = (Scaler(policy.loss_scale, device, shared) for _ in range(num_losses))
        self.scalers = [*made] if scaler is None else [scaler]
        self.consensus = consensus
        self.agreement = None if consensus is None else Agreement(consensus, self.scalers, checks_ranks=checks_ranks)
        ranks = 1 if consensus is None else consensus.size
        if consensus is None:
            Sharding.of(self.weights.updated(), self.weights.name_of).require_within()
        else:
            consensus.follow(self.weights.updated(), self.weights.name_of)
            consensus.require(self.device)
        is_held = isinstance(scaler, HeldScaler)
        names = self.weights.name_of
        self.stats = StepStats(policy.loss_scale, self.scale_tensors(), names, ranks=ranks, moves_later=is_held)
        self.buffers: NormBuffers | None = None
        self.edits = EditWatch()
        self.inner_overflows: dict[int, Tensor] = {}
        self.writes = Writes()
        self.evaluating: Optimizer | None = None
        self.replay: Replay | None = None
        self.has_begun = self.is_closed = self.is_lent = self.sums_wide = False
        self.runs_backward = self.keeps_left = False

    def take_scaler(self, scaler: Scaler) -> None:
        """Go on with the scale of another scaler, between two windows."""
        self.scalers[0] = scaler  # in place: what ranks agree on is this list's

    @property
    def device(self) -> torch.device:
        """Where the loss scales live."""
        return self.scalers[0].state.scale.device

    @property
    def place(self) -> str:
        """Which of the ranks that step together this is."""
        return "one process" if self.consensus is None else f"rank {self.consensus.rank} of {self.consensus.size}"

    def scale_tensors(self) -> list[Tensor]:
        """Return the scale of each loss now."""
        return [scaler.state.scale for scaler in self.scalers]

    def alike(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks."""
        return {
            "policy": str(self.policy),
            "num_losses": len(self.scalers),
            "max_grad_norm": self.max_grad_norm,
            "on_overflow": self.on_overflow,
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "check_ranks": self.agreement is not None and self.agreement.checks_ranks,
        }

    # Gradients --------------------------------------------------------------------------------------------

    @property
    def has_gradients_to_step(self) -> bool:
        """Whether there are gradients that no step has taken yet."""
        return bool(self.inner_overflows) or any(group.window for group in self.groups)

    def group_optimizers(self) -> None:
        """Group the optimizers, anew if one updates other parameters since, outside an accumulation window."""
        params = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self.optimizers]
        if not are_same(params, self.grouped_params) and not any(group.window for group in self.groups):
            self.groups = grouped(self.groups, self.optimizers, self.weights.masters, self.weights.name_of)
            self.grouped_params = params
            self.weights.take_thawed()
            for group in self.groups if self.sums_wide else ():
                group.wide.stay_on()
            for group in self.groups:
                group.keeps_left = self.keeps_left
            if self.consensus is not None:
                self.consensus.follow(self.weights.updated(), self.weights.name_of)

    def keep_left(self) -> None:
        """Let backward passes add to gradients that a step has left."""
        self.keeps_left, self.grouped_params = True, []
        self.group_optimizers()

    def open_groups(self, optimizers: list[Optimizer], call: str) -> list[GradientGroup]:
        """Return the groups of some optimizers that have gradients to step with.

        Args:
            optimizers: The optimizers.
            call: The user's call, for errors.

        Raises:
            StateError: No group has.
        """
        wanted = set(optimizers)
        found = [group for group in self.groups if group.window is not None and not wanted.isdisjoint(group.optimizers)]
        if not found:
            near = [o for group in self.groups if not wanted.isdisjoint(group.optimizers) for o in group.optimizers]
            others = some_of([type(o).__name__ for o in near if o not in wanted])
            raise NoGradient(
                f"{call}() before backward()",
                why=f"it shares parameters with {others}: step both in one call, or each after its own backward()"
                if others
                else "",
                write=f"amp.backward(loss), then amp.{call}()",
            )
        return found

    def look_for_edits(self, groups: list[GradientGroup]) -> None:
        """Take note of cleared gradients, and say it where code that writes to scaled ones may have meant to clip."""
        for group in groups:
            group.take_clearing()
        carrying = any(group.window is not None and group.window.carries_scale for group in groups)
        self.edits.look(carrying=carrying and self.max_grad_norm is None)
        wrappers = self.weights.wrappers
        if wrappers is not None and any(group.waiting.is_known and not group.waiting.is_reduced for group in groups):
            wrappers.tell(
                "these gradients were never reduced over ranks, whose weights will differ",
                why="DistributedDataParallel reduces in one backward pass for each forward pass outside no_sync()",
                write="the last micro-batch outside amp.no_sync(); the sum of two losses of one forward pass",
            )

    def close(self, groups: list[GradientGroup], judged: Judged) -> None:
        """Close the windows of groups that have stepped; to do it twice is to do it once.

        Args:
            groups: The groups.
            judged: Their gradients.
        """
        for group in groups:
            for masters in group.masters:
                masters.drop_gradients()
            group.close(judged.gradients if len(group.optimizers) == 1 else None)
        for share in judged.shares:
            self.inner_overflows.pop(share.loss_id, None)
        if self.buffers is not None:
            self.buffers.restore_where(judged.verdict.found_inf)
        self.weights.restored.clear()
        self.weights.shards.reshard()
        self.forget_passes()

    def forget_passes(self) -> None:
        """Let go of what forward passes left behind: casts of weights, and what a replay would need."""
        self.weights.forget_casts()
        if self.replay is not None:
            self.replay.clear()

    def clear(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget unfinished accumulation windows."""
        self.weights.zero_grad(set_to_none)
        if self.buffers is not None and any(group.window for group in self.groups):
            self.buffers.before = {}
        self.forget_passes()
        for group in self.groups:
            group.forget()
        self.inner_overflows.clear()

    # Refusals ---------------------------------------------------------------------------------------------

    def require_open(self, call: str, *, whole: bool = True) -> None:
        """Refuse a call after ``close()``, and let the run that is under way know of this session.

        Args:
            call: The user's call, for errors.
            whole: Whether to refuse it too after an update that was interrupted half-way.
        """
        if whole:
            self.writes.require_whole()
        if self.is_closed:
            raise StateError(f"{call}() after close()", write="a new MixedPrecision(model, optimizer, policy)")
        current().join(self)

    def refuse_other_ranks(self) -> None:
        """Refuse ranks that gradients are reduced with, and that do not step with this one.

        Raises:
            StateError: There were no ranks yet when the session began.
            PolicyError: They are not in its process group.
        """
        if self.weights.wrappers is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise StateError(
                    "torch.distributed was initialised after the session began",
                    where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
                    why="the ranks would not agree on which steps to skip, and their loss scales would drift apart",
                    write="torch.distributed.init_process_group() first, then MixedPrecision(…)",
                )
            return
        group = None if self.consensus is None else self.consensus.everyone
        ours = {dist.get_rank()} if group is None else {*dist.get_process_group_ranks(group)}
        if others := sorted(self.weights.wrappers.ranks() - ours):
            raise PolicyError(
                "DistributedDataParallel reduces gradients with ranks that are not in the session's process group",
                where=f"rank {some_of(list(map(str, others)))}",
                why="their loss scales and skipped steps are others, and gradients of several scales would be added up",
                write="MixedPrecision(…) without process_group=; or DistributedDataParallel(…, process_group=…) over "
                "the same ranks",
            )

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step of an optimizer's that is none of the session's: a hook before each of its steps."""
        if self.guards and self.writes.is_done and self.evaluating is not optimizer:
            self._refuse_foreign_step(optimizer)
        self.writes.entering()  # the last line: what follows is the optimizer's own code

    def _refuse_foreign_step(self, optimizer: Optimizer) -> None:
        group = next((group for group in self.groups if optimizer in group.optimizers), None)
        if group is None or (group.window is None and not group.has_gradients()):
            return  # the first is of a wrapper that shares an optimizer's hooks
        involved = (*group.params([optimizer]), *group.leaves([optimizer]))
        if changes_nothing(optimizer.param_groups, (p.grad for p in involved if p.grad is not None)):
            return  # torch.distributed.checkpoint lets an optimizer make its state so
        calls = 0 if group.window is None else group.window.micro_batches
        raise StateError(
            "optimizer.step() behind the session's back",
            where=f"{type(optimizer).__name__}, {calls or 'no'} amp.backward() call(s) since the last step",
            why="the gradients still carry the loss scale, and were neither checked nor clipped"
            if calls
            else "amp.step() took these gradients already, or loss.backward() made them without the session",
            write="amp.step()" if calls else "amp.backward(loss), then amp.step()",
        )


class PlainRun:
    """What a session's calls are part of: here the user's own loop, which asks nothing of them.

    A train step that is being captured is another one, which overrides all of this.
    """

    def join(self, core: Core) -> None:
        """Learn that a session takes part."""

    def begin(self, scaler: Scaler) -> None:
        """Make ready for gradients that will carry a scale, which stays as it is when a captured step is replayed."""
        scaler.leave()

    def refuse(self, core: Core, closure: Any, scheduler: Any) -> None:
        """Refuse a step that cannot be part of this run, by what ``amp.step()`` was given."""
        if core.device.type != "cuda":
            return
        with torch.cuda.device(core.device):  # torch asks the current device's stream
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            # The account of the step would become part of that graph, with an event that nobody may ask afterwards.
            raise UnsupportedError(
                "amp.step() cannot be captured by torch.cuda.graph",
                where=f"the current stream of {core.device}",
                why="loss scales, hyper-parameters and the account of skipped steps live on between replays",
                write="mezzo.capture(train_step, *example_batch), which makes the graph",
            )

    def seen(self, judged: Judged) -> Judged:
        """Look at the gradients of a step, before anything multiplies them, and return what it goes on with.

        An optimizer that evaluates a closure has several such gradients in one step.
        """
        return judged

    def refuse_capture(self, what: str, **words: str) -> None:
        """Refuse a call that cannot be part of a captured step; the user's own loop refuses none.

        Args:
            what: The call.
            **words: ``why`` and ``write`` of the error, where it is no captured step.
        """

    def noted(self, core: Core, outcome: StepOutcome) -> Noted:
        """Return what takes an outcome into the statistics."""
        return core.stats.noted(outcome)


_LOOP: Final = PlainRun()
_CURRENT: Final[ContextVar[PlainRun]] = ContextVar("mezzo.session.run", default=_LOOP)


def current() -> PlainRun:
    """Return the run that is under way in this context; torch.compile, which cannot ask, is told of the user's loop."""
    return _LOOP if torch.compiler.is_compiling() else _CURRENT.get()


@contextmanager
def under_way(run: PlainRun) -> Iterator[None]:
    """Let sessions find a run with :func:`current`."""
    token = _CURRENT.set(run)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def are_same(some: list[list[Any]], others: list[list[Any]]) -> bool:
    """Whether two lists of lists hold the same objects; without Python for each, since every backward pass asks."""
    alike = list(map(len, some)) == list(map(len, others))
    return alike and all(map(operator.is_, chain.from_iterable(some), chain.from_iterable(others)))
