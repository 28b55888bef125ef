"""Optimizers that share gradients: what is done to their window before and after a backward pass and a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.scale.scaler import Scaler
from mezzo.scale.state import inverse
from mezzo.scale.transfer import moved
from mezzo.session.gradients import dense, mark, multiplications, norms, not_finite
from mezzo.session.unscaled import Unscaled
from mezzo.session.window import Carried, Share, Window
from mezzo.step.master import MasterWeights
from mezzo.step.whole import Call, at_once

__all__ = ["Cluster", "clusters", "give_gradient", "gradient_dtypes", "regrouped"]


class Cluster:
    """Optimizers that share parameters, and therefore gradients; most often one optimizer alone.

    Attributes:
        optimizers: The optimizers.
        masters: The masters of those that have any.
        window: The open accumulation window, if there is one.
        num_groups: How many parameter groups the optimizers had when they were grouped.
    """

    def __init__(self, optimizers: list[Optimizer], masters: list[MasterWeights]) -> None:
        self.optimizers = optimizers
        self.masters = masters
        self.window: Window | None = None
        self.num_groups = _num_groups(optimizers)
        self._left: set[tuple[int, int]] = set()
        self._widened = False
        self._unscaled: Unscaled | None = None

    def params(self, optimizers: Iterable[Optimizer] | None = None) -> list[Tensor]:
        """Return what the optimizers update, each tensor once: masters, or the parameters themselves."""
        wanted = None if optimizers is None else {id(optimizer) for optimizer in optimizers}
        chosen = [o for o in self.optimizers if wanted is None or id(o) in wanted]
        # By id: hashing a tensor is a Python call.
        once = {id(param): param for o in chosen for group in o.param_groups for param in group["params"]}
        return list(once.values())

    def leaves(self, optimizers: Iterable[Optimizer] | None = None) -> Iterator[Tensor]:
        """Yield the parameters of the models in whose ``.grad`` a backward pass puts its gradients."""
        return (leaf for _, leaf in self._leaves(optimizers) if leaf.requires_grad)

    def _leaves(self, optimizers: Iterable[Optimizer] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what the optimizers update, each with the parameter of the model that it stands for."""
        of: dict[Tensor, Tensor] = {m: param for masters in self.masters for param, m in masters.masters().items()}
        return ((param, of.get(param, param)) for param in self.params(optimizers))

    def has_gradients(self) -> bool:
        """Whether a step of the optimizers would find a gradient."""
        return bool(self._with_gradients()) or any(leaf.grad is not None for leaf in self.leaves())

    def _with_gradients(self) -> list[Tensor]:
        return [param for param in self.params() if param.grad is not None]

    def gather(self) -> None:
        """Move gradients of low-precision parameters to their masters, summing in FP32."""
        if self._unscaled is not None:
            self._unscaled.withdraw()
        if self.window is not None:
            self._forget_cleared(self.window)
        for masters in self.masters:
            masters.take_edits()
            masters.gather()

    def _widen(self) -> None:
        """Let gradients be summed, and unscaled, in FP32 where their parameters are the masters' high halves."""
        for param in self._stored():
            if hasattr(param, "grad_dtype") and param.grad_dtype != torch.float32:
                wide = None if param.grad is None else param.grad.float()
                at_once(
                    partial(setattr, self, "_widened", True),
                    partial(setattr, param, "grad", None),
                    partial(setattr, param, "grad_dtype", torch.float32),
                    partial(setattr, param, "grad", wide),
                )

    def _narrow(self) -> None:
        """Let the first gradients of a window come as the backward pass makes them."""
        if self._widened:
            self._widened = False
            for param in self.shown_in_fp32():
                if param.grad is None:
                    param.grad_dtype = param.dtype
                else:  # cleared to zeros, which have the dtype that they had
                    self._widened = True

    def _stored(self) -> Iterator[Any]:
        own = (optimizer for optimizer in self.optimizers if isinstance(optimizer, OnePassOptimizer))
        return (param for optimizer in own for param in optimizer.stored())

    # Around a backward pass ---------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, scaler: Scaler, loss_id: int, loss: Tensor) -> None:
        """Make ready for gradients with one scale to be added to what is there."""
        scale = scaler.state.scale
        if self.window is None:
            self._refuse_leftovers()
            self._narrow()
            self.window = Window()
        else:
            self.window.require_unchanged()
            if self._unscaled is not None:
                self._unscaled.withdraw()
            self._forget_cleared(self.window)
            for masters in self.masters:
                masters.gather()
            if not self._agrees(self.window.carried, scaler):
                self._set_aside(self.window)
            self._widen()
        self.window.micro_batches += 1
        self.window.losses.append((loss_id, loss.detach()))
        self.window.carried = Carried(
            loss_id, scale, scale._version, is_one=not scaler.changes_gradients, is_common=not scaler.keeps_apart
        )

    def end(self) -> None:
        """Note which parameters got gradients, where earlier ones are kept elsewhere, out of a user's reach."""
        window = self.window
        if window is not None and (window.aside or (self.masters and window.micro_batches > 1)):
            window.beside = [param for param, leaf in self._leaves() if leaf.grad is not None]

    def _agrees(self, carried: Carried | None, scaler: Scaler) -> bool:
        """Whether new gradients can be added to those in ``.grad``."""
        if carried is None:
            return not scaler.changes_gradients
        return carried.scale is scaler.state.scale or not scaler.keeps_apart

    def _refuse_leftovers(self) -> None:
        """Refuse to add scaled gradients to those that the last step left, which carry another scale or none."""
        if self._left and not self._left.isdisjoint(mark(p.grad) for p in self.params() if p.grad is not None):
            raise StateError(
                "the last step's gradients are still there",
                why="they are unscaled by now, and the new ones would be added to them with the loss scale",
                write="amp.zero_grad() after each amp.step()",
            )
        self._left.clear()

    def _forget_cleared(self, window: Window) -> None:
        """Drop all earlier gradients of parameters whose own the user has cleared since the last backward pass."""
        if window.beside:
            noted = set(map(id, window.beside))
            for param, leaf in self._leaves():
                if id(param) in noted and leaf.grad is None:
                    param.grad = None
                    window.aside.pop(param, None)
        window.beside = []

    def _set_aside(self, window: Window) -> None:
        """Empty ``.grad`` into unscaled sums, so that gradients with another scale can follow."""
        params = self._with_gradients()
        factor, share = self._share(window, dense(params))
        window.settled += share  # first: after an interrupt the rest gets a share of its own
        for param in params:
            gradient: Any = param.grad
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if factor is not None:
                wide = wide * moved(factor, wide.device)
            before = window.aside.get(param)
            total = wide if before is None else _sum(before, wide)
            at_once(partial(setitem, window.aside, param, total), partial(setattr, param, "grad", None))
        window.carried = None

    def _share(self, window: Window, gradients: list[Tensor]) -> tuple[Tensor | None, list[Share]]:
        """Return the inverse of the scale that gradients carry, ``None`` for none, and whether they overflowed."""
        carried = window.carried
        if carried is None:
            return None, []
        over_scale = inverse(carried.scale)
        share = []
        if gradients:
            norm, _ = norms(gradients, carried.scale.device)
            found = not_finite(norm * over_scale)
            share = [Share(loss_id=carried.loss_id, scale=carried.scale, found_inf=found)]
        return None if carried.is_one else over_scale, share

    # Before and after a step --------------------------------------------------------------------------

    def settle(self) -> None:
        """Make ``.grad`` the unscaled sum of everything in the window."""
        window = self.window
        if window is None:
            return
        window.require_unchanged()
        self.gather()
        self._widen()
        if window.aside:
            self._set_aside(window)
            calls: list[Call] = []
            for param, total in window.aside.items():
                kept = getattr(param, "grad_dtype", None) or param.dtype
                kind = total.to(kept) if total.layout == torch.strided else total
                calls.append(partial(setattr, param, "grad", kind))
            at_once(*calls, partial(setattr, window, "aside", {}))
            return
        gradients = dense(self._with_gradients())
        factor, share = self._share(window, gradients)
        calls = [] if factor is None else multiplications(gradients, factor)
        at_once(partial(window.settled.extend, share), *calls, partial(setattr, window, "carried", None))

    def show(self, name_of: Callable[[Tensor], str]) -> None:
        """Let users see unscaled gradients, and edit them, on the models' parameters as on their masters.

        Args:
            name_of: Gives a parameter's name, for errors.
        """
        pairs = ((m, param) for masters in self.masters for param, m in masters.masters().items())
        self._unscaled = Unscaled([*pairs, *((param, param) for param in self.shown_in_fp32())], name_of)

    def shown_in_fp32(self) -> Iterator[Any]:
        """Yield the low-precision parameters whose optimizers, mezzo's, take FP32 gradients, with halves or without."""
        own = (optimizer for optimizer in self.optimizers if isinstance(optimizer, OnePassOptimizer))
        params = (param for optimizer in own for group in optimizer.param_groups for param in group["params"])
        return (param for param in params if param.dtype in (torch.float16, torch.bfloat16))

    def agree(self) -> None:
        """Let a parameter and its master have the gradient that either was given since they were shown it."""
        if self._unscaled is not None:
            self._unscaled.agree()

    def close(self, gradients: Iterable[Tensor] | None = None) -> None:
        """End the window after a step; what is left in ``.grad`` must be cleared before the next scaled gradients.

        Args:
            gradients: All gradients of the optimizers, dense, if the caller knows them.
        """
        window = self.window
        if window is None:
            return
        if self._unscaled is not None:
            self._unscaled.put_back()
            gradients = None  # some are in another dtype now, and elsewhere
        left = self._left
        if window.carried is None or not window.carried.is_one:
            left = {(g.data_ptr(), g._version) for g in gradients or dense(self._with_gradients())}
        self._left, self._unscaled, self.window = left, None, None

    def resume(self, window: Window | None) -> None:
        """Go on in a window that was saved; its gradients are there already, in the dtype that they were summed in."""
        self.window = window
        self._widened = any(getattr(param, "grad_dtype", None) == torch.float32 for param in self.shown_in_fp32())

    def forget(self) -> None:
        """Drop the window, gradients set aside included, once gradients were cleared."""
        self.window = None
        if self._unscaled is not None:
            self._unscaled.put_back()
            self._unscaled = None
        self._narrow()
        self._left.clear()

    # What a step has left over ------------------------------------------------------------------------

    def is_left(self, gradient: Tensor) -> bool:
        """Whether a step has left this gradient over, unscaled, and nobody has cleared or written it since."""
        return mark(gradient) in self._left

    def leave(self, gradients: Iterable[Tensor]) -> None:
        """Take these gradients, and no others, for those that a step has left over."""
        self._left = {mark(gradient) for gradient in gradients}

    def remembering(self) -> Callable[[], None]:
        """Return what drops the window, and brings back what is known of gradients now; they are not looked at."""
        left, widened = set(self._left), self._widened

        def restore() -> None:
            self.window, self._unscaled = None, None
            self._left, self._widened = set(left), widened

        return restore


def clusters(optimizers: list[Optimizer], masters: dict[int, MasterWeights]) -> list[Cluster]:
    """Group optimizers that share parameters.

    Args:
        optimizers: All of a session's.
        masters: Their masters, by ``id`` of the optimizer.
    """
    groups: list[tuple[list[Optimizer], set[int]]] = []
    for optimizer in optimizers:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        together = [optimizer]
        apart = []
        for others, theirs in groups:
            if theirs & params:
                together, params = [*others, *together], params | theirs
            else:
                apart.append((others, theirs))
        groups = [*apart, (together, params)]
    return [Cluster(found, [masters[id(o)] for o in found if id(o) in masters]) for found, _ in groups]


def regrouped(known: list[Cluster], optimizers: list[Optimizer], masters: dict[int, MasterWeights]) -> list[Cluster]:
    """Group optimizers anew if they were given parameter groups since, outside an accumulation window.

    Args:
        known: How they were grouped.
        optimizers: As of :func:`clusters`.
        masters: As of :func:`clusters`.

    Raises:
        StateError: Two of them have a master of the same parameter now.
    """
    if all(c.num_groups == _num_groups(c.optimizers) for c in known) or any(c.window for c in known):
        return known
    found = clusters(optimizers, masters)
    leaves = [leaf for cluster in found for _, leaf in cluster._leaves()]
    if len(set(map(id, leaves))) < len(leaves):
        raise StateError(
            "two optimizers update the same parameters, which can have only one master each",
            where="a parameter group that was added since the last step",
            write="add_param_group with parameters of no other optimizer; or O1, which needs no masters",
        )
    left = {mark for cluster in known for mark in cluster._left}
    for cluster in found:
        cluster._left = set(left)
    return found


def _num_groups(optimizers: list[Optimizer]) -> int:
    return sum(len(optimizer.param_groups) for optimizer in optimizers)


def gradient_dtypes(param: Tensor, *, summed_in_fp32: bool) -> list[torch.dtype]:
    """Return what dtypes a parameter's gradient may have in the middle of a window.

    Args:
        param: The parameter.
        summed_in_fp32: Whether several backward passes are summed in FP32, and the first comes as it is made.
    """
    given: torch.dtype | None = getattr(param, "grad_dtype", None)
    wide = [torch.float32] if summed_in_fp32 and hasattr(param, "grad_dtype") else []
    return list(dict.fromkeys([param.dtype, *([given] if given is not None else []), *wide]))


def give_gradient(param: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter a copy of a gradient, of one of :func:`gradient_dtypes`."""
    param.grad = None
    if gradient is not None:
        given: Any = param
        if getattr(param, "grad_dtype", None) not in (None, gradient.dtype):
            given.grad_dtype = gradient.dtype
        param.grad = gradient.to(param.device, copy=True)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients, of which either may be sparse."""
    return other + one if one.layout == torch.sparse_coo else one + other
