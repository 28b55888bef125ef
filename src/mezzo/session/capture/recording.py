"""One run of a train step for a graph: which sessions it uses, what their steps hand over, and the way back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.cast.accumulators import marks
from mezzo.errors import StateError, some_of
from mezzo.session.capture.refusals import check_capturable, unfinished
from mezzo.session.stats import Outcome
from mezzo.session.verdict import Judged

if TYPE_CHECKING:
    from mezzo.session.session import MixedPrecision

__all__ = ["Elsewhere", "Held", "Noted", "Run", "current"]

#: What a step left for the session's accounts: the outcome, and its numbers as a vector that each replay writes.
Noted = tuple["MixedPrecision", Outcome, Tensor]

_CURRENT: Final[ContextVar[Run | None]] = ContextVar("mezzo.session.recording", default=None)


def current() -> Run | None:
    """Return the run that is under way in this context, if one is; torch.compile, which cannot ask, is told of none."""
    return None if torch.compiler.is_compiling() else _CURRENT.get()


class Elsewhere(Exception):  # noqa: N818 - it never leaves this room
    """A session turned out to live on another kind of device than the graph."""


class Run:
    """One run of a train step: a rehearsal, which changes nothing since each step is skipped, or the recorded one.

    Attributes:
        noted: What the steps left for the accounts, in order.

    Args:
        held: The sessions that are known to take part; others join at their first call.
        device: The graph's.
        rehearsing: Whether steps are skipped.
    """

    def __init__(self, held: dict[MixedPrecision, Held], device: torch.device, *, rehearsing: bool) -> None:
        self.noted: list[Noted] = []
        self._held, self._device, self._rehearsing = held, device, rehearsing

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Let sessions find this run with :func:`current`, and allow only their optimizers to step."""
        token = _CURRENT.set(self)
        hook = register_optimizer_step_pre_hook(self._refuse_foreign)
        try:
            yield
        finally:
            hook.remove()
            _CURRENT.reset(token)

    def join(self, session: MixedPrecision) -> None:
        """Take part, unless the session does already.

        Raises:
            Elsewhere: The session lives on another kind of device than the graph.
            UnsupportedError: Its steps cannot be captured; nothing was changed.
            StateError: An accumulation window is open.
        """
        if session not in self._held:
            if session._device.type != self._device.type:
                raise Elsewhere(session._device)
            self._held[session] = Held(session, self._device)

    def seen(self, judged: Judged) -> Judged:
        """Return what a step goes on with: in a rehearsal, that it is skipped, so that nothing is written."""
        return replace(judged, verdict=judged.verdict.skipped()) if self._rehearsing else judged

    def note(self, session: MixedPrecision, outcome: Outcome) -> None:
        """Keep an outcome for the accounts, with its numbers."""
        self.noted.append((session, outcome, session._accounts.packed(outcome)))
        self._held[session].stepped()

    def finish(self) -> None:
        """Leave the next loss scales where the next run finds them; the last thing a run does on the device."""
        if not self._rehearsing:
            for held in self._held.values():
                held.finish()

    def _refuse_foreign(self, optimizer: Optimizer, *_: Any) -> None:
        if current() is self and not any(optimizer in session._optimizers for session in self._held):
            raise StateError(
                "an optimizer that belongs to no session steps inside a captured train step",
                where=type(optimizer).__name__,
                why="it knows of no skipped step, and what it changes while the graph is made could not be undone",
                write="MixedPrecision(model, [optimizer, other], policy), and amp.step()",
            )


class Held:
    """A session as it was before its train step was captured, and how it becomes that again, in the same memory.

    Attributes:
        tensors: Parameters, buffers and masters.
        scales: What the graph reads each loss scale's state from, and writes the next one to.

    Args:
        session: The session; all that could refuse has its say first.
        device: The graph's.

    **Cost**: a copy of parameters, buffers and masters. Moments need none, since every rehearsed step is skipped.
    """

    def __init__(self, session: MixedPrecision, device: torch.device) -> None:
        check_capturable(session, device)
        session._accounts.settle()  # an event under way could not be asked about while a graph is made
        session._accounts.check()
        session._parts.take_edits()
        session._forget_passes()  # casts of weights are parts of a graph too
        self.session = session
        models = session._models
        found = [t for model in models for t in (*model.parameters(), *model.buffers())] + [*session.master_params()]
        self.tensors = list({id(tensor): tensor for tensor in found}.values())
        self._before = [tensor.detach().clone() for tensor in self.tensors]
        self.stepped()
        leaves: list[Any] = [tensor for tensor in self.tensors if tensor.requires_grad]
        self._earlier = _EarlierGraphs(leaves)
        self._options = [_Options(optimizer) for optimizer in session._optimizers]
        self._state = _plain_state(session)
        self._scales_before = [(scaler.state, scaler.in_graph) for scaler in session._scalers]
        self.scales = [scaler.tensors() for scaler in session._scalers]
        for scaler, scale in zip(session._scalers, self.scales, strict=True):
            scaler.enter(scale)
        optimizers: list[Any] = session._optimizers
        for optimizer in optimizers:
            optimizer._warned_capturable_if_run_uncaptured = True  # as rehearsals run
        self._gradients = [(leaf, leaf.grad, getattr(leaf, "grad_dtype", None)) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None  # the graph would add to it in each replay, wherever its memory is by then

    def finish(self) -> None:
        """Write the next loss scales into the memory that this run read them from."""
        for scaler, scale in zip(self.session._scalers, self.scales, strict=True):
            if scaler.state is not scale:
                scale.copy_(scaler.state)

    def stepped(self) -> None:
        """Remember how often the weights were written in place until now."""
        self._versions = [tensor._version for tensor in self.tensors]

    def edited(self) -> list[Tensor]:
        """Return the weights that the train step itself has written after its last step."""
        return [t for t, version in zip(self.tensors, self._versions, strict=True) if t._version != version]

    def require_complete(self) -> None:
        """Refuse a run that only Python could continue.

        Raises:
            StateError: A window is open at its end, options of an optimizer have changed, or something keeps the
                graph of an earlier step.
        """
        session = self.session
        self._earlier.require_gone(session)
        if unfinished(session):
            raise StateError(
                "an accumulation window is open at the end of the train step",
                why="gradients live and die inside the graph, and none outlive it",
                write="amp.step() after the last amp.backward(loss) of the train step; all micro-batches in one call",
            )
        if changes := [line for options in self._options for line in options.changes()]:
            raise StateError(
                "the train step changes its optimizer's options",
                where="\n".join(changes),
                why="Python runs only while the graph is made: a scheduler inside would never step again",
                write="scheduler.step() after each call of the captured step",
            )

    def between_runs(self) -> None:
        """Put back all that the host keeps, gradients apart: each run begins without any."""
        for scaler, scale in zip(self.session._scalers, self.scales, strict=True):
            scaler.hold(scale, in_graph=True)
        for leaf, _, dtype in self._gradients:
            leaf.grad = None
            if dtype is not None and leaf.grad_dtype != dtype:
                leaf.grad_dtype = dtype
        for options in self._options:
            options.restore()
        self._state()

    def restore(self) -> None:
        """Put everything back; through ``.data``, so that no version tells of it."""
        self.between_runs()
        self._earlier.forget()
        for leaf, gradient, _ in self._gradients:
            leaf.grad = gradient
        for tensor, before in zip(self.tensors, self._before, strict=True):
            _put_back(tensor, before)
        for scaler, (state, in_graph) in zip(self.session._scalers, self._scales_before, strict=True):
            scaler.hold(state, in_graph=in_graph)


def _put_back(tensor: Tensor, before: Tensor) -> None:
    tensor.data.copy_(before)
    if before.is_cuda:  # made on the stream of the rehearsals, where its memory would be given away before it is read
        before.record_stream(torch.cuda.current_stream(before.device))


class _EarlierGraphs:
    """The nodes that add up gradients and that were there before a train step ran.

    Such a node runs on the stream of the forward pass that made it, and stays as long as anything keeps its graph. New
    passes use it again, and a capture on another stream breaks there. Nodes are marked, since a node that nobody keeps
    dies at once, its mark with it; and looked for after a run, since a train step may begin before its session knows.

    Args:
        leaves: The tensors that gradients are added up for.
    """

    _MARK: Final = "mezzo.session.recording"

    def __init__(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            marks(leaf)[self._MARK] = True
        self._leaves = self._alive(leaves)

    def _alive(self, leaves: list[Any]) -> list[Any]:
        return [leaf for leaf in leaves if leaf.requires_grad and self._MARK in marks(leaf)]

    def require_gone(self, session: MixedPrecision) -> None:
        """Refuse a train step that uses them.

        Raises:
            StateError: Something keeps them.
        """
        if self._leaves and self._alive(self._leaves):
            gc.collect()  # what is only part of a cycle is not kept by anybody
        if self._leaves and (alive := self._alive(self._leaves)):
            raise StateError(
                "a graph of an earlier step is still alive",
                where=some_of([session._parts.name_of(leaf) for leaf in alive]),
                why="a loss that was kept, or DistributedDataParallel built before, ties the gradients of these to the "
                "stream of that step, and a CUDA graph is captured on another",
                write="del loss, or keep loss.detach(), before mezzo.capture(…)",
            )
        self._leaves = []

    def forget(self) -> None:
        """Take the marks away."""
        for leaf in self._alive(self._leaves):
            del marks(leaf)[self._MARK]
        self._leaves = []


def _plain_state(session: MixedPrecision) -> Callable[[], None]:
    """Return what puts a session's own Python state back, loss scales and accounts apart."""
    clusters, on_the_way, exact = session._clusters, dict(session._on_the_way), set(session._parts.exact.restored)
    remembering = [cluster.remembering() for cluster in clusters]

    def restore() -> None:
        session._clusters = clusters
        for each in remembering:
            each()
        session._on_the_way = dict(on_the_way)
        session._parts.exact.restored |= exact
        session._edits.forget()
        if session._buffers is not None:
            session._buffers.forget()
        session._forget_passes()

    return restore


class _Options:
    """The options of an optimizer's parameter groups, as they were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        tensors = (v for group in self._before for v in group.values() if isinstance(v, Tensor))
        self._values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]

    def changes(self) -> Iterator[str]:
        """Yield what has changed, to be read."""
        written = {id(tensor) for tensor, version, _ in self._values if tensor._version != version}
        for number, (group, before) in enumerate(zip(self._optimizer.param_groups, self._before, strict=False)):
            for name, value in before.items():
                now = group.get(name)
                if now is not value and (isinstance(value, Tensor) or now != value):
                    yield f"{type(self._optimizer).__name__}, group {number}: {name} {value} → {now}"
                elif id(value) in written:
                    yield f"{type(self._optimizer).__name__}, group {number}: {name} was written in place"

    def restore(self) -> None:
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            group.update(before)
        for tensor, version, value in self._values:
            if tensor._version != version:
                _put_back(tensor, value)
