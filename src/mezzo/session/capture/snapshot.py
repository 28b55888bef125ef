"""A session as it was before its train step was captured, and how it becomes that again, in the same memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.cast.accumulators import marks
from mezzo.errors import MezzoError, StateError, UnsupportedError, raise_together, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.core import Core
from mezzo.session.update import lacks_momentum, takes_flag

__all__ = ["ONE_SYNC", "Options", "Snapshot"]

#: Why what asks the host cannot be part of a graph.
ONE_SYNC: Final = "the host would have to ask the device for it, and a replayed graph has no host"


class Snapshot:
    """A session as it was before its train step was captured, and how it becomes that again, in the same memory.

    Attributes:
        tensors: Parameters, buffers and masters.
        scales: What the graph reads each loss scale's state from, and writes the next one to.
        options: Those of each optimizer.

    Args:
        core: The session; all that could refuse has its say first.
        device: The graph's.

    **Cost**: a copy of parameters, buffers and masters. Moments need none, since every rehearsed step is skipped.
    """

    def __init__(self, core: Core, device: torch.device) -> None:
        raise_together(_problems(core, device))
        core.stats.settle()  # an event under way could not be asked about while a graph is made
        core.stats.check()
        core.weights.take_edits()
        core.forget_passes()  # casts of weights are parts of a graph too
        self.core = core
        of_models = [t for model in core.models for t in (*model.parameters(), *model.buffers())]
        found = [*of_models, *core.weights.updated()]
        self.tensors = list({id(tensor): tensor for tensor in found}.values())
        self._before = [tensor.detach().clone() for tensor in self.tensors]
        self.stepped()
        leaves: list[Any] = [tensor for tensor in self.tensors if tensor.requires_grad]
        self._earlier = _EarlierGraphs(leaves)
        self.options = [Options(optimizer) for optimizer in core.optimizers]
        self._state = _python_state(core)
        self._scales_before = [partial(scaler.hold, scaler.state, in_graph=scaler.in_graph) for scaler in core.scalers]
        self.scales = [scaler.tensors() for scaler in core.scalers]
        for scaler, scale in zip(core.scalers, self.scales, strict=True):
            scaler.enter(scale)
        optimizers: list[Any] = core.optimizers
        for optimizer in optimizers:
            optimizer._warned_capturable_if_run_uncaptured = True  # as rehearsals run
        self._gradients = [(leaf, leaf.grad, leaf.grad_dtype) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None  # the graph would add to it in each replay, wherever its memory is by then

    def finish(self) -> None:
        """Write the next loss scales into the memory that this run read them from."""
        for scaler, scale in zip(self.core.scalers, self.scales, strict=True):
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
        core = self.core
        self._earlier.require_gone(core.weights.name_of)
        if core.has_gradients_to_step:
            raise StateError(
                "an accumulation window is open at the end of the train step",
                why="gradients live and die inside the graph, and none outlive it",
                write="amp.step() after the last amp.backward(loss) of the train step; all micro-batches in one call",
            )
        if changes := [change for options in self.options for change in options.changes()]:
            raise StateError(
                "the train step changes its optimizer's options",
                where="\n".join(
                    f"{group}: {name} {'was written in place' if now is before else f'{before} → {now}'}"
                    for group, name, before, now in changes
                ),
                why="Python runs only while the graph is made: a scheduler inside would never step again",
                write="scheduler.step() after each call of the captured step",
            )

    def between_runs(self) -> None:
        """Put back all that the host keeps, gradients apart: each run begins without any."""
        for scaler, scale in zip(self.core.scalers, self.scales, strict=True):
            scaler.hold(scale, in_graph=True)
        for leaf, _, dtype in self._gradients:
            leaf.grad = None
            if dtype is not None and leaf.grad_dtype != dtype:
                leaf.grad_dtype = dtype
        for options in self.options:
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
        for hold_on in self._scales_before:
            hold_on()


def _put_back(tensor: Tensor, before: Tensor) -> None:
    tensor.data.copy_(before)
    if before.is_cuda:  # made on the stream of the rehearsals, where its memory would be given away before it is read
        before.record_stream(torch.cuda.current_stream(before.device))


class _EarlierGraphs:
    """The nodes that add up gradients and that were there before a train step ran.

    Such a node runs on the stream of the forward pass that made it, and stays as long as anything keeps its graph. New
    passes use it again, and a capture on another stream breaks there. Each node gets a mark, which dies with it: a mark
    that is still there after a run says that something keeps the node. The marks are looked for after the run, and not
    before it, because a train step may drop the last loss before it calls its session.

    Args:
        leaves: The tensors that gradients are added up for.
    """

    _MARK: Final = "mezzo.session.capture"

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        for leaf in leaves:
            marks(leaf)[self._MARK] = True
        self._leaves = self._alive()  # a mark dies at once where there is no node

    def _alive(self) -> list[Any]:
        return [leaf for leaf in self._leaves if leaf.requires_grad and self._MARK in marks(leaf)]

    def require_gone(self, name_of: Callable[[Tensor], str]) -> None:
        """Refuse a train step that uses them.

        Raises:
            StateError: Something keeps them.
        """
        if self._alive():
            gc.collect()  # a node that is only part of a cycle is kept by nothing
        if alive := self._alive():
            raise StateError(
                "a graph of an earlier step is still alive",
                where=some_of([name_of(leaf) for leaf in alive]),
                why="a loss that was kept, or DistributedDataParallel built before, ties the gradients of these to the "
                "stream of that step, and a CUDA graph is captured on another",
                write="del loss, or keep loss.detach(), before mezzo.capture(…)",
            )
        self._leaves = []

    def forget(self) -> None:
        """Take the marks away."""
        for leaf in self._alive():
            del marks(leaf)[self._MARK]
        self._leaves = []


def _python_state(core: Core) -> Callable[[], None]:
    """Return what puts a session's own Python state back, loss scales and accounts apart."""
    groups, params = core.groups, core.grouped_params
    on_the_way, exact = dict(core.inner_overflows), set(core.weights.restored)
    remembering = [group.remembering() for group in groups]

    def restore() -> None:
        core.groups, core.grouped_params = groups, params
        for each in remembering:
            each()
        core.inner_overflows = dict(on_the_way)
        core.weights.restored |= exact
        core.edits.remember(())
        if core.buffers is not None:
            core.buffers.before = {}
        core.forget_passes()

    return restore


class Options:
    """The options of an optimizer's parameter groups, as they were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # The groups themselves, since a loaded state puts others in their place.
        self._before = [(group, {k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        tensors = (v for _, before in self._before for v in before.values() if isinstance(v, Tensor))
        self._values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]

    def changes(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield each that has changed: its group, name, value before and value now, the same where written in place."""
        written = {id(tensor) for tensor, version, _ in self._values if tensor._version != version}
        for number, (group, before) in enumerate(self._before):
            for name, value in before.items():
                now = group.get(name)
                other = now is not value and (isinstance(value, Tensor) or now != value)
                if other or id(value) in written:
                    yield f"{type(self.optimizer).__name__}, group {number}", name, value, now if other else value

    def restore(self) -> None:
        """Put them back."""
        for group, before in self._before:
            group.update(before)
        for tensor, version, value in self._values:
            if tensor._version != version:
                _put_back(tensor, value)


def _problems(core: Core, device: torch.device) -> Iterator[MezzoError]:
    """Yield all that keeps a session's steps from being captured."""
    if core.is_lent or not core.guards:
        yield UnsupportedError(
            "the calls of a GradScaler cannot be captured, nor those of a decorated model's optimizer",
            why="the session behind them finds gradients when a step comes, and its scale moves when the host says so",
            write="amp = MixedPrecision(model, optimizer, policy), and its calls in the train step;\n"
            "or the train step without mezzo.capture",
        )
        return
    if core.has_gradients_to_step:
        yield StateError(
            "a train step cannot be captured inside an accumulation window",
            why="the gradients that are there now would be part of every replay, or of none",
            write="amp.step() or amp.zero_grad() before mezzo.capture(…)",
        )
    if core.on_overflow != "skip":
        yield UnsupportedError(
            f'on_overflow="{core.on_overflow}" cannot be captured',
            why=f"whether a step overflowed decides what happens next; {ONE_SYNC}",
            write='on_overflow="skip", and mezzo.overflow.locate(fn, model) once amp.stats() shows skipped steps',
        )
    params = [param for model in core.models for param in model.parameters()]
    elsewhere = {str(t.device) for t in (*params, *core.scale_tensors()) if t.device != device}
    if elsewhere:
        yield UnsupportedError(
            "a graph is of one device, and the session is not",
            where=f"graph on {device}, parameters and loss scale on {', '.join(sorted(elsewhere))} too",
            write=f'model.to("{device}") before the session is made, and an example batch there',
        )
    if core.agreement is not None:
        yield from core.agreement.problems_of_capture(device)
    for optimizer in core.optimizers:
        if as_one_pass(optimizer) is None:
            yield from _of_torchs(optimizer, device)


def _of_torchs(optimizer: Optimizer, device: torch.device) -> Iterator[UnsupportedError]:
    """Yield what keeps an optimizer that is not mezzo's from being captured."""
    name = type(optimizer).__name__
    if not takes_flag(optimizer):
        yield UnsupportedError(
            f"{name} cannot skip a step on the device",
            why=f"its step runs or it does not; {ONE_SYNC}",
            write="mezzo.optim.AdamW(…), or torch.optim.AdamW(…, fused=True, capturable=True, lr=torch.tensor(…))",
        )
        return
    if lacks_momentum(optimizer, lambda param: param.requires_grad):
        yield UnsupportedError(
            f"torch's fused {name} has no momentum yet",
            why="its first step differs from all others, and only one step is captured",
            write="one step of the train step before mezzo.capture(…), or mezzo.optim.SGD(…)",
        )
    for number, group in enumerate(optimizer.param_groups):
        if not group.get("capturable", True):
            yield UnsupportedError(
                f"{name} was not made to be captured",
                where=f"group {number}, capturable=False",
                write=f"torch.optim.{name}(…, fused=True, capturable=True, lr=torch.tensor(…))",
            )
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device != device:
            kind = f"on {lr.device}" if isinstance(lr, Tensor) else "a Python number"
            yield UnsupportedError(
                f"the learning rate of {name} would be frozen into the graph",
                where=f"group {number}, lr={float(lr):.4g}, {kind}",
                why="its kernel gets the number it has while the graph is made, and no scheduler reaches it there",
                write=f'lr=torch.tensor({float(lr):.4g}, device="{device}"); or mezzo.optim.{name}(…)',
            )
