"""``capture``: a whole train step as one CUDA graph."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError
from mezzo.session.capture.batch import Batch, Layout
from mezzo.session.capture.cuda import CudaGraph
from mezzo.session.capture.replay_guard import ReplayGuard
from mezzo.session.capture.run import Elsewhere, GraphRun
from mezzo.session.capture.snapshot import Snapshot
from mezzo.session.core import Core, current
from mezzo.session.scale import StepOutcome
from mezzo.step.executors.tables import uploaded_once

__all__ = ["Captured", "capture"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: How torch says that something asked the device for a value, or cannot be part of a graph.
_NOT_CAPTURABLE: Final = ("captur", "synchronizing CUDA operation")


def capture(train_step: Callable[..., R], *example_batch: Any) -> Captured[R]:
    """Capture a whole train step as one CUDA graph: forward, backward, check, clip, update, change of the loss scale.

    A captured step is one launch for the host, and computes bit for bit what the train step computes: a step that
    overflows is skipped on the device. ``capture`` itself trains nothing. It runs the train step a few times, with
    every step skipped, for what happens only once (lazy initialisation, compilation), and puts back all that this has
    changed: weights, buffers, loss scales, random states, accounts. Optimizers keep the zeros they would begin with.

    Python runs only then. What it decides there (dropout rates, ``if``, ``train()``) is part of the graph; what it
    changes outside a session is not put back. Batches, hyper-parameters of ``mezzo.optim`` and learning rates that are
    tensors are read at each call, so that schedulers step after it as ever. Eager steps may come in between, and
    weights and states may be loaded: a session that has moved to other memory (``optimizer.load_state_dict``), has
    other options or other parameters that train, is captured anew by the next call.

    While it captures, no other thread may wait for a GPU, such as a loader that copies batches there ahead of time:
    torch refuses waits for the whole process while it looks for those of the train step.

    Where nothing is on a GPU, a call is a call of the train step, with the same demands on its arguments.

    Args:
        train_step: Runs the loop's body for one batch, with all of a session's calls up to ``amp.step()``: several
            backward passes, losses, optimizers and sessions too. Each optimizer must be able to skip on the device:
            mezzo's, or torch's with ``fused=True, capturable=True`` and a tensor as ``lr``.
        *example_batch: Its arguments: nests of tensors and plain values. Only values may change from call to call, and
            only those of tensors. Tensors in host memory are copied to the device before the train step sees them.

    Returns:
        What to call with each batch. It returns what the train step returned, tensors detached: on a GPU the same
        tensors each time (those of a :class:`Step` too), which the next call overwrites. ``.grad`` is left alone:
        gradients live and die inside the graph.

    Raises:
        PolicyError: The train step cannot be called.
        StateError: The train step uses no session, leaves an accumulation window open, or steps a scheduler.
        UnsupportedError: The session's options, an optimizer, or a line of the train step need the host. Whatever is
            raised, everything is as it was.

    **Cost**: some seconds, and while it captures a copy of parameters, buffers and masters. The graph keeps the memory
    of one step's activations and gradients. A call: the copies of the batch, one launch, some one-element kernels; no
    host sync.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
        >>> def train_step(x):
        ...     with amp.autocast():
        ...         loss = model(x).square().mean()
        ...     amp.backward(loss)
        ...     step = amp.step()
        ...     amp.zero_grad()
        ...     return loss, step.skipped
        >>> captured = mezzo.capture(train_step, torch.ones(4, 8))
        >>> loss, skipped = captured(torch.ones(4, 8))
        >>> bool(skipped)
        False

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    if not callable(train_step):
        raise PolicyError(
            f"a train step is a function, not {type(train_step).__name__}",
            write="mezzo.capture(train_step, x, y)",
        )
    if not torch.cuda.is_available():
        return Captured(train_step, example_batch, None)
    there = [leaf.device for leaf in tree_leaves(example_batch) if isinstance(leaf, Tensor) and leaf.is_cuda]
    device = there[0] if there else torch.device("cuda", torch.cuda.current_device())
    try:
        return Captured(train_step, example_batch, lambda: CudaGraph(device))
    except Elsewhere as elsewhere:
        if not there:
            return Captured(train_step, example_batch, None)
        raise UnsupportedError(
            "the batch is on a GPU, and the session is not",
            where=f"batch on {device}, loss scale on {elsewhere}",
            write=f'model.to("{device}") before MixedPrecision(model, optimizer, policy)',
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded(Generic[R]):
    """A graph, with what its replays concern."""

    graph: CudaGraph
    output: R
    outcomes: list[tuple[Core, StepOutcome, Tensor]]
    guards: list[ReplayGuard]


class Captured(Generic[R]):
    """A captured train step, as :func:`capture` returns it.

    Args:
        train_step: The train step.
        example: An example of its arguments.
        make_graph: Makes an empty graph; ``None`` to call the train step itself.
    """

    def __init__(
        self, train_step: Callable[..., R], example: tuple[Any, ...], make_graph: Callable[[], CudaGraph] | None
    ) -> None:
        self._train_step = train_step
        self._layout = Layout(train_step, example)
        self._make_graph = make_graph
        self._batch: Batch | None = None
        self._recorded: _Recorded[R] | None = None
        current().refuse_capture("mezzo.capture()")
        if make_graph is not None:
            self._recorded = self._record(make_graph(), self._layout.leaves(example))

    @property
    def is_graph(self) -> bool:
        """Whether a call replays a graph, or runs the train step itself."""
        return self._make_graph is not None

    def __repr__(self) -> str:
        name = getattr(self._train_step, "__qualname__", repr(self._train_step))
        return f"Captured({name}({', '.join(self._layout.names)}), {'graph' if self.is_graph else 'plain calls'})"

    def __call__(self, *batch: Any) -> R:
        """Run the train step for a batch.

        Args:
            *batch: As the example: the same structure, shapes, dtypes and devices.

        Returns:
            What the train step returned when it was captured, with the values of this call.

        Raises:
            PolicyError: A batch unlike the example.
            StateError: A closed session, an open accumulation window, or a frozen option that has changed.
            ScaleCollapsed: As ``amp.step()`` raises it, at most two steps late.
        """
        leaves = self._layout.leaves(batch)
        current().refuse_capture("a captured step")
        if self._make_graph is None:
            return _detached(self._train_step(*batch))
        for guard in self._recorded.guards if self._recorded is not None else ():
            guard.check()
        if self._recorded is not None and any(guard.has_moved() for guard in self._recorded.guards):
            logger.info("weights, states or options have moved since %s was captured: it is captured anew", self)
            self._recorded = None  # its memory first
        recorded = self._recorded = self._recorded or self._record(self._make_graph(), leaves)
        with torch.no_grad():
            for guard in recorded.guards:
                guard.refresh()
            if self._batch is not None:
                self._batch.take(leaves)
            recorded.graph.replay()
            for guard in recorded.guards:
                guard.replayed()
            for core, outcome, packed in recorded.outcomes:
                core.stats.note(outcome, packed)
        return recorded.output

    def _record(self, graph: CudaGraph, leaves: list[Any]) -> _Recorded[R]:
        """Rehearse and record, leaving everything as it was."""
        from mezzo.trace.sandbox import RandomStates

        self._batch = self._batch or Batch(self._layout, leaves, graph.device)
        self._batch.take(leaves)
        snapshots: dict[Core, Snapshot] = {}
        states = RandomStates.now([graph.device])
        try:
            with _explained():
                graph.rehearse(lambda: self._rehearse(snapshots, graph.device))
                if not snapshots:
                    raise StateError(
                        "the train step uses no session",
                        why="without one its weights are not known: what it did while it was rehearsed stays done",
                        write="amp = MixedPrecision(model, optimizer, policy), and amp.autocast(), "
                        "amp.backward(loss), amp.step() in the train step",
                    )
                run = GraphRun(snapshots, graph.device, rehearsing=False)
                with uploaded_once() as upload:
                    output = graph.record(lambda: self._run(run))
                upload()
            for each in snapshots.values():
                each.require_complete()
        finally:
            for each in snapshots.values():
                each.restore()
            states.restore()
        guards = [ReplayGuard(each) for each in snapshots.values()]
        return _Recorded(graph=graph, output=_detached(output), outcomes=run.outcomes, guards=guards)

    def _rehearse(self, snapshots: dict[Core, Snapshot], device: torch.device) -> None:
        self._run(GraphRun(snapshots, device, rehearsing=True))  # whose output is gone: it would keep its own graph
        for each in snapshots.values():
            each.require_complete()
            each.between_runs()

    def _run(self, run: GraphRun) -> R:
        assert self._batch is not None, "a graph has a batch"
        self._batch.forget_gradients()
        with run.under_way(), torch.enable_grad():
            output = self._train_step(*self._batch.arguments)
            run.finish()
        return output


def _detached(output: R) -> R:
    found: R = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
    return found


@contextmanager
def _explained() -> Iterator[None]:
    """Say which line a graph cannot hold, and why."""
    try:
        yield
    except MezzoError:
        raise
    except RuntimeError as error:
        chain: list[BaseException] = [error]  # ending a graph that failed raises again
        while (before := chain[-1].__context__) is not None:
            chain.append(before)
        lines = [line for each in chain for line in _lines(each)]
        if any(module.startswith("torch._inductor.cudagraph_") for module, _ in lines):
            raise UnsupportedError(
                "the train step makes CUDA graphs of its own",
                where='torch.compile(…, mode="reduce-overhead") or "max-autotune"',
                why=str(error).splitlines()[0] if str(error) else type(error).__name__,
                write='torch.compile(…) without that mode, or "max-autotune-no-cudagraphs", inside mezzo.capture',
            ) from error
        if not any(words in str(error) for words in _NOT_CAPTURABLE):
            raise
        *_, first = takewhile(lambda each: isinstance(each, RuntimeError), chain)
        users = [line for module, line in _lines(first) if module.partition(".")[0] not in ("torch", "mezzo")]
        raise UnsupportedError(
            "a line of the train step cannot be part of a CUDA graph",
            where=users[-1] if users else "",
            why=str(first).splitlines()[0],
            write="nothing that waits for the device there: no .item(), print or if on a tensor, no tensor made from "
            "Python numbers on the GPU; return tensors, and read them after the call",
        ) from error


def _lines(error: BaseException) -> list[tuple[str, str]]:
    """Return the modules and lines that an error came through, the innermost last."""
    return [
        (str(frame.f_globals.get("__name__")), f"{frame.f_code.co_filename}:{number}")
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
