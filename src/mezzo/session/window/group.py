"""Optimizers that share gradients: what is done to their window before and after a backward pass and a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.scale.scaler import Scaler
from mezzo.scale.state import inverse
from mezzo.session.window.unscaled import Unscaled
from mezzo.session.window.window import Carried, Share, Window
from mezzo.step.gradients import dense, mark, multiplications, norms
from mezzo.step.passes import judge
from mezzo.step.whole import Call, at_once
from mezzo.tensors import LOW, moved
from mezzo.tensors import mark as mark_of_dense

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
            self.window.beside = {}
        for masters in self.masters:
            masters.take_edits()
            masters.gather()

    def give_back(self) -> None:
        """Let the models' parameters hold, in FP32, what lies with their masters: there users see it, and clear it."""
        if self._unscaled is not None:
            self._unscaled.withdraw()
        for param, master in self._pairs():
            if master.grad is None:
                continue
            total = master.grad.float() if param.grad is None else _sum(master.grad.float(), param.grad)
            at_once(
                partial(setattr, self, "_widened", True),
                partial(setattr, param, "grad_dtype", None),
                partial(setattr, param, "grad", total),
                partial(setattr, master, "grad", None),
            )

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield the low-precision parameters that have masters, each with its own."""
        return (pair for masters in self.masters for pair in masters.masters().items())

    def _widen(self) -> None:
        """Let gradients be summed, and unscaled, in FP32 where their parameters have FP32 weights elsewhere."""
        for param in self._kept_exactly():
            if param.grad_dtype != torch.float32:
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
            still = False
            for param in self.summed_in_fp32():
                if param.grad is None:
                    param.grad_dtype = param.dtype
                else:  # cleared to zeros, which have the dtype that they had
                    still = True
            self._widened = still

    def _kept_exactly(self) -> Iterator[Any]:
        """Yield the low-precision parameters whose FP32 weights are kept: in halves, or in masters."""
        own = (optimizer for optimizer in self.optimizers if isinstance(optimizer, OnePassOptimizer))
        yield from (param for optimizer in own for param in optimizer.stored())
        yield from (param for param, _ in self._pairs())

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
            if self._agrees(self.window.carried, scaler):
                self.give_back()
            else:
                for masters in self.masters:
                    masters.gather()
                self._set_aside(self.window)
            self.window.beside = {}
            self._widen()
        self.window.micro_batches += 1
        self.window.losses.append((loss_id, loss.detach()))
        self.window.carried = Carried(
            loss_id, scale, scale._version, is_one=not scaler.changes_gradients, is_common=not scaler.keeps_apart
        )

    def end(self) -> None:
        """Note the gradients that the backward pass made, where earlier ones are aside, out of a user's reach."""
        if self._widened:
            for param in self.summed_in_fp32():  # users write ``p.grad = torch.zeros_like(p)``
                param.grad_dtype = None
        self.note_beside()

    def note_beside(self) -> None:
        """Take the gradients there are for what the last backward pass made, beside those that were set aside."""
        window = self.window
        if window is not None and window.aside:
            there = ((param, leaf.grad) for param, leaf in self._leaves())
            window.beside = {param: (gradient, mark(gradient)) for param, gradient in there if gradient is not None}

    def _agrees(self, carried: Carried | None, scaler: Scaler) -> bool:
        """Whether new gradients can be added to those in ``.grad``."""
        if carried is None:
            return not scaler.changes_gradients
        return carried.scale is scaler.state.scale or not scaler.keeps_apart

    def _refuse_leftovers(self) -> None:
        """Refuse to add scaled gradients to those that the last step left, which carry another scale or none."""
        held = (p.grad for pair in self._leaves() for p in pair if p.grad is not None) if self._left else ()
        if not self._left.isdisjoint(map(mark, held)):
            raise StateError(
                "the last step's gradients are still there",
                why="they are unscaled by now, and the new ones would be added to them with the loss scale",
                write="amp.zero_grad() after each amp.step()",
            )
        self._left.clear()

    def forget_cleared(self, name_of: Callable[[Tensor], str]) -> None:
        """Drop what is aside for parameters whose gradient was cleared since the last backward pass, to None or zeros.

        Where all of them were, everything aside is dropped: ``model.zero_grad()`` leaves no trace on a parameter that
        the last backward pass did not reach.

        Args:
            name_of: Gives a parameter's name, for errors.

        Raises:
            StateError: A gradient was edited otherwise, which can be meant for what is aside as well, or not.

        **Cost**: none, but two host syncs for each gradient that was edited while others are aside.
        """
        window = self.window
        if window is None or not window.beside:
            return
        cleared, edited = [], []
        for param, leaf in self._leaves():
            gradient: Tensor | None = leaf.grad
            if param not in window.beside:
                continue
            before, written = window.beside[param]
            if gradient is None:
                cleared.append(param)
            elif gradient is not before or mark(gradient) != written:
                size = torch.linalg.vector_norm(dense([leaf])[0], float("inf"))
                if size == 0:
                    cleared.append(param)
                elif param in window.aside and torch.isfinite(size):  # a step with any other skips, whatever is aside
                    edited.append(leaf)
        if edited:
            raise StateError(
                "a gradient was edited while an earlier part of it is set aside",
                where=some_of([name_of(leaf) for leaf in edited]),
                why="losses with different scales are summed apart, and .grad is only what the last of them made",
                write="amp.unscale_(), which shows the whole sum, before the edit; amp.zero_grad() to begin anew",
            )
        kept = {} if len(cleared) == len(window.beside) else window.aside.copy()
        for param in cleared:
            kept.pop(param, None)
        if cleared:
            at_once(partial(setattr, window, "aside", kept), partial(setattr, window, "beside", {}))
            self.note_beside()

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
            found = judge(norms(gradients, carried.scale.device), over_scale).found_inf
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
        pairs = ((master, param) for param, master in self._pairs())
        self._unscaled = Unscaled([*pairs, *((param, param) for param in self.shown_in_fp32())], name_of)

    def shown_in_fp32(self) -> Iterator[Any]:
        """Yield the low-precision parameters whose optimizers, mezzo's, take FP32 gradients, with halves or without."""
        own = (optimizer for optimizer in self.optimizers if isinstance(optimizer, OnePassOptimizer))
        params = (param for optimizer in own for group in optimizer.param_groups for param in group["params"])
        return (param for param in params if param.dtype in LOW)

    def summed_in_fp32(self) -> Iterator[Any]:
        """Yield the low-precision parameters that hold FP32 gradients from a window's second backward pass on."""
        yield from self.shown_in_fp32()
        yield from (param for param, _ in self._pairs())

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
            left = set(map(mark_of_dense, gradients or dense(self._with_gradients())))
        self._left, self._unscaled, self.window = left, None, None
        self._narrow()

    def resume(self, window: Window | None) -> None:
        """Go on in a window that was saved; its gradients are there already, in the dtype that they were summed in."""
        self.window = window
        self._widened = any(param.grad_dtype != param.dtype for param in self.summed_in_fp32())
        if window is not None and not window.is_unscaled:
            self.give_back()  # states of earlier releases have earlier gradients with the masters
        self.note_beside()

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
