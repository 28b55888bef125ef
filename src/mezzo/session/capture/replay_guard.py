"""What a graph holds of a session, compared with what the session has before each replay."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from mezzo.errors import StateError
from mezzo.optim.optimizer import as_one_pass, one_pass
from mezzo.session.capture.snapshot import Snapshot
from mezzo.session.core import Core, are_same
from mezzo.tensors import tensors

__all__ = ["ReplayGuard"]


class ReplayGuard:
    """A session as one graph knows it: the addresses that it reads and writes, and what Python decided meanwhile.

    Args:
        snapshot: The session while its train step was captured.

    **Cost**: a look at each parameter and each tensor of optimizer state for each replay, some 0.1 µs each.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.core = snapshot.core
        self._scales = snapshot.scales
        self._tensors = [(tensor, tensor.data_ptr(), tensor.requires_grad) for tensor in snapshot.tensors]
        self._parts = _parts(self.core)
        self._choices = _choices(self.core)
        self._frozen = [each for each in snapshot.options if as_one_pass(each.optimizer) is None]
        self._edited = snapshot.edited()

    def has_moved(self) -> bool:
        """Whether the session has other memory, or has decided otherwise, than when the graph was recorded."""
        return (
            any(t.data_ptr() != address or t.requires_grad != trains for t, address, trains in self._tensors)
            or not are_same([_parts(self.core)], [self._parts])
            or _choices(self.core) != self._choices
        )

    def check(self) -> None:
        """Refuse a replay that would not be the session's next step; nothing is changed.

        Raises:
            StateError: The session is closed, its last update is half-way, an accumulation window is open, or an option
                that the graph has frozen is another now.
            ScaleCollapsed: As ``amp.step()`` raises it.
        """
        core = self.core
        core.require_open("captured")
        if core.has_gradients_to_step:
            raise StateError(
                "a captured step inside an accumulation window",
                why="its gradients are its own, and those of amp.backward() outside it would be left over",
                write="amp.step() or amp.zero_grad() first",
            )
        core.stats.check()
        for options in self._frozen:
            for group, name, before, now in options.changes():
                if name in options.optimizer.defaults and now is not before:
                    raise StateError(
                        f"{name} was changed, and the graph has the old one",
                        where=f"{group}: {before} → {now}",
                        why="torch's kernels get such numbers from Python, which ran when the step was captured",
                        write=f'group["{name}"].fill_(…), in place'
                        if isinstance(before, Tensor)
                        else "mezzo.optim, whose kernels read it on the device; or mezzo.capture(…) again",
                    )

    def refresh(self) -> None:
        """Bring over what has changed since the last replay: loss scales, hyper-parameters, edited weights. No sync."""
        core = self.core
        for scaler, scale in zip(core.scalers, self._scales, strict=True):
            scaler.enter(scale)
        core.weights.take_edits()
        for optimizer in one_pass(core.optimizers):
            optimizer.upload()

    def replayed(self) -> None:
        """Let the session take the weights as changed: a replay writes them, and counts no version up."""
        increment_version(self._edited)  # masters take over what the train step wrote after its step
        self.core.forget_passes()
        self.core.weights.restored.clear()
        stepped: list[Any] = self.core.optimizers
        for optimizer in stepped:
            optimizer._opt_called = True  # or schedulers warn that nothing has stepped


def _choices(core: Core) -> tuple[Any, ...]:
    """Return what Python decides while a step runs, as far as a session knows it."""
    groups = [(optimizer, group) for optimizer in core.optimizers for group in optimizer.param_groups]
    return (
        core.max_grad_norm,
        [model.training for model in core.models],
        [len(group["params"]) for _, group in groups],
        [o.rule_of(group) for o in one_pass(core.optimizers) for group in o.param_groups],
    )


def _parts(core: Core) -> list[Any]:
    """Return the objects that optimizers may replace by others, while a graph goes on with the memory of these.

    Their state, the tensors in it, and of mezzo's optimizers the hyper-parameters that are tensors in the device's
    memory; numbers, and tensors in the host's, are brought over before each replay.
    """
    states = [optimizer.state for optimizer in core.optimizers]
    groups = [group for optimizer in one_pass(core.optimizers) for group in optimizer.param_groups]
    hypers = tensors([value for group in groups for name, value in group.items() if name != "params"])
    by_param = [kept for state in states for kept in state.values() if isinstance(kept, dict)]
    moments = [value for kept in by_param for value in kept.values() if isinstance(value, Tensor)]
    return [*states, *moments, *(each for each in hypers if each.device.type != "cpu")]
