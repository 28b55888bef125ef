"""A backward pass of the user's own that goes through scaled losses: the session's windows around it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from mezzo.cast.accumulation import accumulation
from mezzo.errors import StateError
from mezzo.scale.scaler import Scaler
from mezzo.session.backward import WindowPass
from mezzo.session.core import Core
from mezzo.step.whole import at_once

__all__ = ["Root", "UnderWay"]


@dataclass(frozen=True, slots=True)
class Root:
    """A scaled loss: what a backward pass that goes through it has to know.

    Attributes:
        scaler: Whose scale it carries.
        scale: That scale.
        loss_id: The loss's number.
        loss: 0-d: the loss itself, or a sum of it.
        optimizers: Those whose parameters get gradients; ``None`` for all.
    """

    scaler: Scaler
    scale: Tensor
    loss_id: int
    loss: Tensor
    optimizers: list[Optimizer] | None


class UnderWay:
    """A backward pass from its first scaled loss to its end: what the engine calls then, or lets go of if it fails.

    Args:
        core: The session.
        dropped: Gets the optimizers whose gradients were dropped.
        keeps_plain: Whether gradients that were there before are summed apart.
    """

    def __init__(self, core: Core, dropped: set[Optimizer], *, keeps_plain: bool) -> None:
        self._core, self._dropped, self._keeps_plain = core, dropped, keeps_plain
        self._passes: list[tuple[WindowPass, Root]] = []
        self._held: dict[Tensor, Tensor | None] = {}
        self._stack = contextlib.ExitStack()  # of flags that are torch's own
        self._is_last = False

    def join(self, root: Root) -> None:
        """Begin, or go on, with a scaled loss.

        Raises:
            StateError: Its gradients would be added to those of another scale.
        """
        core = self._core
        wanted = core.optimizers if root.optimizers is None else root.optimizers
        for earlier, other in self._passes:
            if other.scale is not root.scale and root.scaler.keeps_apart:
                raise StateError(
                    "one backward pass goes through losses with different scales",
                    where="losses {} and {}".format(*sorted((other.loss_id, root.loss_id))),
                    why="the engine adds up what they make of a parameter, and nothing could tell the parts apart",
                    write="a backward pass for each; or one loss_id for both",
                )
            for group in earlier.groups:
                if group.window is not None and not set(group.optimizers).isdisjoint(wanted):
                    group.window.losses.append((root.loss_id, root.loss))
        known = {optimizer for each, _ in self._passes for group in each.groups for optimizer in group.optimizers}
        if not (new := [optimizer for optimizer in wanted if optimizer not in known]) and self._passes:
            return
        if not self._passes and core.device.type == "cuda":
            region = core.weights.region().region
            self._stack.enter_context(accumulation(region.policy, region.per_device))
        made = WindowPass(core, new)
        self._passes.append((made, root))
        mine = {optimizer for group in made.groups for optimizer in group.optimizers}
        self._release(mine)
        for group in made.groups if self._keeps_plain and root.scaler.changes_gradients else ():
            group.keep_unscaled()
        made.begin(root.scaler, root.scale, root.loss_id, root.loss)
        self._dropped -= mine
        self._hold(known | mine)

    def __call__(self) -> None:
        """End the pass: at its very end, since wrappers finish their reductions in such calls too."""
        if not self._is_last:
            self._is_last = True
            Variable._execution_engine.queue_callback(self)
            return
        try:
            for each, _ in self._passes:
                each.end()
            self._passes.clear()
        finally:
            self.fail()

    def fail(self) -> None:
        """Put back what made way for a pass that is over without having come to its end; after it, what is left."""
        for each, _ in self._passes:
            each.come_back()
        self._passes.clear()
        self._release()
        self._stack.close()

    __del__ = fail

    # Gradients of parameters that the pass is not for ---------------------------------------------------------

    def _hold(self, involved: set[Optimizer]) -> None:
        """Keep the gradients that other optimizers' parameters have, whatever the pass makes."""
        others = (group for group in self._core.groups if involved.isdisjoint(group.optimizers))
        for leaf in [leaf for group in others for leaf in group.leaves() if leaf not in self._held]:
            at_once(partial(self._held.__setitem__, leaf, leaf.grad), partial(setattr, leaf, "grad", None))

    def _release(self, optimizers: set[Optimizer] | None = None) -> None:
        """Give gradients back to the parameters of some optimizers, or of all others.

        Args:
            optimizers: Which; where omitted, those whose parameters the pass has reached nevertheless are noted.
        """
        for group in self._core.groups if self._held else ():
            for leaf in group.leaves():
                if leaf in self._held and (optimizers is None or not optimizers.isdisjoint(group.optimizers)):
                    if leaf.grad is not None and optimizers is None:
                        self._dropped.update(group.optimizers)
                    gradient = self._held[leaf]
                    at_once(partial(setattr, leaf, "grad", gradient), partial(self._held.pop, leaf))
