"""A session begins: on all ranks or on none, and with everything as it was where one of them refuses."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from mezzo.errors import DistributedError, PolicyError, UnsupportedError, shown, some_of
from mezzo.optim.masters import MasterWeights
from mezzo.scale.scaler import Scaler
from mezzo.session.agreement import by_value
from mezzo.session.core import Core
from mezzo.session.refusals import beginning
from mezzo.session.state.load_hooks import watch
from mezzo.session.weights.phases import with_handles
from mezzo.session.window.buffers import NormBuffers
from mezzo.step.consensus import Consensus

__all__ = ["add", "begun"]

logger = logging.getLogger(__name__)


def begun(
    models: Any,
    optimizers: Any,
    policy: Any,
    *,
    consensus: Consensus | None,
    checks_ranks: bool,
    max_grad_norm: float | None,
    on_overflow: Literal["skip", "explain", "raise"],
    restore_buffers: bool,
    scaler: Scaler | None = None,
    guards: bool = True,
    masters: type[MasterWeights] = MasterWeights,
    **options: Any,
) -> Core:
    """Check everything, carry the policy out, and return what a session is made of.

    Args:
        models: See :class:`mezzo.MixedPrecision`, and so on.
        optimizers: See there.
        policy: See there.
        consensus: The ranks that step together; ``None`` for one alone.
        checks_ranks: Whether these compare their scales in each step.
        max_grad_norm: See there.
        on_overflow: See there.
        restore_buffers: See there.
        scaler: As :class:`Core` takes it.
        guards: As :class:`Core` takes it.
        masters: As :class:`Core` takes it.
        **options: ``num_losses`` and ``device``; see there.
    """
    with _starting(consensus) as agree:
        subjects, given = beginning.models_and_optimizers(models, optimizers)
        if not isinstance(checks_ranks, bool):
            raise PolicyError(f"check_ranks is {shown(checks_ranks)}, not True or False", write="check_ranks=True")
        trained, options["handles"], policy = with_handles(subjects, policy)
        beginning.check_session(trained, given, policy, max_grad_norm=max_grad_norm, on_overflow=on_overflow, **options)
        options |= {"consensus": consensus, "checks_ranks": checks_ranks, "scaler": scaler, "guards": guards}
        options["masters"] = masters
        core = Core(trained, given, policy, **options)
        core.max_grad_norm, core.on_overflow = max_grad_norm, on_overflow
        core.buffers = NormBuffers(core.models) if restore_buffers else None
        if consensus is not None and on_overflow == "explain" and core.weights.shards:
            raise UnsupportedError(
                "an overflow in a model that fully_shard has sharded cannot be explained in the run",
                where=f"rank {consensus.rank} of {consensus.size}",
                why="the rank that overflowed would run its batch again, and all ranks gather parameters together",
                write='on_overflow="skip", and step.rank_found, which names the rank; '
                "mezzo.overflow.locate with its batch and a model that is not sharded",
            )
        agree(core.alike())
        _take_over(given)
        with core.weights.converted(core.before_step, core.writes.leaving):
            core.group_optimizers()
            if policy.dtype != torch.float32:
                kind = "emulated in float32" if core.weights.region().emulated else "native"
                logger.info("%s arithmetic on %s is %s", policy.dtype, next(core.weights.updated()).device.type, kind)
            if policy.master_weights or core.weights.untrained:
                watch(core.weights)
            if on_overflow == "explain":
                from mezzo.overflow import Replay

                core.replay = Replay(core.models, region=core.weights.region)
            agree(core.alike())
    return core


def add(core: Core, optimizers: Any) -> None:
    """Let a session go on with more optimizers: on all of its ranks, or on none, and then with nothing changed.

    Args:
        core: The session.
        optimizers: One or several.
    """
    with _starting(core.consensus) as agree:
        given = beginning.check_added(optimizers, core)
        agree(core.alike())
        _take_over(given)
        groups, params = core.groups, core.grouped_params
        try:
            with core.weights.joined(given, core.before_step, core.writes.leaving):
                core.group_optimizers()
                agree(core.alike())
        except BaseException:
            core.groups, core.grouped_params = groups, params
            raise


def _take_over(optimizers: list[Optimizer]) -> None:
    """End the sessions that scalers by themselves have with optimizers; they begin another when they need one."""
    for owner in {id(owner): owner for each in optimizers for owner in beginning.owners(each)}.values():
        if isinstance(owner, Core):
            owner.weights.undo()
            owner.is_closed = True


@contextmanager
def _starting(consensus: Consensus | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Begin, or add to, a session on all ranks or on none: what one of them refuses is refused on all.

    Args:
        consensus: The ranks; ``None`` for one alone.

    Yields:
        What waits until all ranks have come as far, called twice: before anything is changed, and after. It is given
        what has to be the same on all ranks.

    Raises:
        PolicyError: That differs.
        DistributedError: Another rank has refused; with its reason.
    """
    if consensus is None:
        yield lambda _: None
        return
    is_told = False

    def exchange(alike: Mapping[str, Any] | None, refusal: str) -> list[tuple[Any, ...]]:
        nonlocal is_told
        is_told = True  # what is raised from here on is known to the others
        found = consensus.gathered((alike, refusal, socket.gethostname(), os.getpid()), "what a session begins with")
        consensus.peers = [(host, process) for *_, host, process in found]
        return found

    def agree(alike: Mapping[str, Any]) -> None:
        nonlocal is_told
        found = exchange(alike, "")
        _require_alike(consensus, [options for options, *_ in found], [refusal for _, refusal, *_ in found])
        is_told = False

    try:
        yield agree
    except Exception as error:
        if not is_told:
            exchange(None, f"{type(error).__name__}: {error}")
        raise


def _require_alike(consensus: Consensus, options: list[Mapping[str, Any]], refusals: list[str]) -> None:
    """Raise what ranks that begin a session have refused, or differ in; by rank."""
    if refused := [rank for rank, text in enumerate(refusals) if text]:
        raise DistributedError(
            f"rank {some_of(list(map(str, refused)))} refused the session",
            where=f"rank {consensus.rank} of {consensus.size}",
            why=refusals[refused[0]],
            write="see there",
        )
    for name, first in options[0].items():
        values = [each[name] for each in options]
        if any(value != first for value in values):
            raise PolicyError(
                f"the ranks were given different values of {name}",
                where=by_value(list(map(str, values))),
                why="their steps would differ",
                write="MixedPrecision(…) with the same arguments on all ranks",
            )
