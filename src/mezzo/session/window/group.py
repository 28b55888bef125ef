"""Optimizers that share gradients: what happens to these around a backward pass, and before and after a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import setitem

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.optim.masters import MasterWeights
from mezzo.scale.scaler import Scaler
from mezzo.scale.state import inverse
from mezzo.session.window.sums import unscaled
from mezzo.session.window.together import batches
from mezzo.session.window.waiting import Waiting
from mezzo.session.window.wide import WideGradients
from mezzo.session.window.window import CarriedScale, LossShare, Window
from mezzo.session.window.wrappers import Reduction
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import Stale, dense, is_left, left_over, mark, multiplications, norms
from mezzo.step.passes import judge
from mezzo.step.whole import Call, at_once
from mezzo.tensors import is_distributed

__all__ = ["GradientGroup", "grouped"]


class GradientGroup:
    """Optimizers that share parameters, and therefore gradients; most often one optimizer alone.

    A backward pass puts gradients into the model's parameters, the leaves. A step reads them from what the optimizers
    update: the masters of these leaves, or the leaves themselves.

    Args:
        optimizers: The optimizers.
        masters: The masters of those that have any.
        name_of: Gives a parameter's name, for errors.
        stale: See below.

    Attributes:
        optimizers: The optimizers.
        masters: The masters of those that have any.
        window: The open accumulation window, if there is one.
        wide: The dtypes of low-precision parameters' gradients.
        waiting: What is known of gradients that wrappers reduce.
        stale: Marks of gradients that a step has left in ``.grad``: unscaled by now, and not to be added to.
        keeps_left: Whether they may be added to, nevertheless: each scale apart.
    """

    def __init__(
        self, optimizers: list[Optimizer], masters: list[MasterWeights], name_of: Callable[[Tensor], str], stale: Stale
    ) -> None:
        self.optimizers, self.masters, self._name_of, self.stale = optimizers, masters, name_of, stale
        self.window: Window | None = None
        self.keeps_left = False
        self.wide = WideGradients(optimizers, masters, name_of)
        self.waiting = Waiting(self.wide)

    def params(self, optimizers: Collection[Optimizer] | None = None) -> list[Tensor]:
        """Return what the optimizers update, each tensor once: masters, or the parameters themselves."""
        chosen = [o for o in self.optimizers if optimizers is None or o in optimizers]
        # By id: hashing a tensor is a Python call.
        once = {id(param): param for o in chosen for group in o.param_groups for param in group["params"]}
        return list(once.values())

    def leaves(self, optimizers: Collection[Optimizer] | None = None) -> Iterator[Tensor]:
        """Yield the parameters of the models in whose ``.grad`` a backward pass puts its gradients."""
        return (leaf for _, leaf in self.with_leaves(optimizers) if leaf.requires_grad)

    def with_leaves(self, optimizers: Collection[Optimizer] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what the optimizers update, each with the parameter of the model that it stands for."""
        of: dict[int, Tensor] = {id(master): param for param, master in self.wide.pairs()}
        return ((param, of.get(id(param), param)) for param in self.params(optimizers))

    def has_gradients(self) -> bool:
        """Whether a step of the optimizers would find a gradient."""
        return any(param.grad is not None for param in (*self.params(), *self.leaves()))

    # Around a backward pass ---------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, scaler: Scaler, scale: Tensor, loss_id: int, loss: Tensor, reduction: Reduction | None = None
    ) -> None:
        """Make ready for a backward pass, whose gradients are added to those of earlier ones.

        Args:
            scaler: What gives its scale.
            scale: The scale.
            loss_id: Its loss.
            loss: The loss itself.
            reduction: What it reduces, where wrappers reduce these gradients.

        Raises:
            StateError: The last step's gradients are still there; or those of a loss with another scale are not
                reduced.
        """
        window, is_first = self.window, self.window is None
        if window is None:
            self._refuse_stale()
            window = self._open()
        else:
            if self._can_be_added(window.carried, scaler, scale):
                # What lies with the masters goes back, so that autograd adds to all of it, and users can clear it.
                self.wide.give_back()
            else:
                self.waiting.require_reduced(window.micro_batches)
                self.wide.withdraw()
                for masters in self.masters:
                    masters.gather()
                self._set_aside(window)
                self.waiting.start()
            window.new_gradients = {}
            # Only now: one backward pass alone needs no FP32 gradients, and most windows have one.
            self.wide.begin(frozenset() if reduction is None else frozenset(map(id, reduction.leaves)))
        self.waiting.step_aside(reduction, is_first=is_first)
        window.micro_batches += 1
        window.losses.append((loss_id, loss.detach()))
        # With its version: a scale that is written to afterwards is not the one that these gradients carry.
        window.carried = CarriedScale(
            loss_id, scale, scale._version, is_one=not scaler.changes_gradients, is_common=not scaler.keeps_apart
        )

    def find(self, scaler: Scaler, scale: Tensor) -> None:
        """Open a window for gradients that no backward pass of the session's has made, unless one is open.

        Args:
            scaler: What gave the scale that they carry.
            scale: That scale.
        """
        if self.window is None:
            window = self._open()
            window.is_found, window.micro_batches = True, 1
            window.carried = CarriedScale(0, scale, scale._version, is_one=not scaler.changes_gradients)

    def keep_unscaled(self) -> None:
        """Begin a window with gradients that carry no scale, if there is none: backward passes add to these.

        Raises:
            StateError: They are those of the last step.
        """
        if self.window is None and any(leaf.grad is not None for leaf in self.leaves()):
            self._refuse_stale()
            self._open()

    def _open(self) -> Window:
        """Begin a window; nothing is known of its gradients yet."""
        self.wide.end()
        self.waiting.start()
        self.window = Window()
        return self.window

    def sets_aside(self, scaler: Scaler, scale: Tensor) -> bool:
        """Whether a backward pass with a scale would set earlier gradients aside, which carry another."""
        return self.window is not None and not self._can_be_added(self.window.carried, scaler, scale)

    def end(self) -> None:
        """Take note of what the backward pass has made."""
        self.come_back()
        self.wide.allow_any()
        self._note_new_gradients()

    def come_back(self) -> None:
        """Put earlier gradients back that made way for a backward pass, to its end or not."""
        self.waiting.come_back()
        window = self.window
        if window is not None and window.carried is not None and window.carried.ranks != self.waiting.ranks:
            window.carried = replace(window.carried, ranks=self.waiting.ranks)

    def _note_new_gradients(self) -> None:
        """Remember the gradients in ``.grad`` where sums of other scales are set aside, which no user sees."""
        window = self.window
        if window is not None and window.unscaled_sums:
            there = ((param, leaf.grad) for param, leaf in self.with_leaves())
            window.new_gradients = {param: (grad, mark(grad)) for param, grad in there if grad is not None}

    def _can_be_added(self, carried: CarriedScale | None, scaler: Scaler, scale: Tensor) -> bool:
        if carried is None:
            return not scaler.changes_gradients
        return carried.scale is scale or not scaler.keeps_apart

    def _refuse_stale(self) -> None:
        """Refuse to add scaled gradients to those that the last step left, which carry another scale or none."""
        held = (p.grad for pair in self.with_leaves() for p in pair if p.grad is not None) if self.stale else ()
        if not self.keeps_left and any(is_left(gradient, self.stale) for gradient in held):
            raise StateError(
                "the last step's gradients are still there",
                why="they are unscaled by now, and the new ones would be added to them with the loss scale",
                write="amp.zero_grad(), or optimizer.zero_grad(), after each step",
            )
        self.stale.clear()

    # Several scales in one window -----------------------------------------------------------------------

    def take_clearing(self) -> None:
        """Drop the sums set aside of parameters whose gradient was cleared since the last backward pass.

        Clearing means None or zeros: users clear ``.grad``, and mean all of the gradient. Where all of them were
        cleared, all sums are dropped, since ``model.zero_grad()`` leaves no trace on a parameter that the last
        backward pass did not reach.

        Raises:
            StateError: The scale of the gradients was written to; or a gradient was edited otherwise than cleared,
                which can be meant for the sum as well, or not.

        **Cost**: none, but two host syncs for each gradient that was edited while sums are set aside.
        """
        window = self.window
        if window is None:
            return
        window.require_unchanged()
        cleared, edited = set[Tensor](), list[Tensor]()
        for param, leaf in self.with_leaves() if window.new_gradients else ():
            noted, gradient = window.new_gradients.get(param), leaf.grad
            if noted is None or (gradient is noted[0] and mark(gradient) == noted[1]):
                continue
            size = 0 if gradient is None else torch.linalg.vector_norm(dense([leaf])[1][0], float("inf"))
            if size == 0:
                cleared.add(param)
            elif param in window.unscaled_sums and size < float("inf"):  # a step with any other is skipped
                edited.append(leaf)
        if edited:
            raise StateError(
                "a gradient was edited while an earlier part of it is set aside",
                where=some_of([self._name_of(leaf) for leaf in edited]),
                why="losses with different scales are summed apart, and .grad is only what the last of them made",
                write="amp.unscale_(), which shows the whole sum, before the edit; amp.zero_grad() to begin anew",
            )
        if cleared:
            # A new dict in one assignment: after an interrupt either nothing was dropped, or all of it.
            all_sums = {} if len(cleared) == len(window.new_gradients) else window.unscaled_sums
            kept = {param: total for param, total in all_sums.items() if param not in cleared}
            at_once(partial(setattr, window, "unscaled_sums", kept), partial(setattr, window, "new_gradients", {}))
            self._note_new_gradients()

    def _set_aside(self, window: Window) -> None:
        """Empty ``.grad`` into unscaled sums, so that gradients with another scale can follow."""
        params, gradients = dense(self.params())
        factor, share = self._share(window, gradients)
        window.settled += share  # first: after an interrupt the rest gets a share of its own
        for together in batches(params):
            totals = unscaled([param.grad for param in together], factor, list(map(window.unscaled_sums.get, together)))
            # A sum and the emptied .grad change together: an interrupt would lose the gradient, or count it twice.
            for param, total in zip(together, totals, strict=True):
                at_once(partial(setitem, window.unscaled_sums, param, total), partial(setattr, param, "grad", None))
        window.carried = None

    def _share(self, window: Window, gradients: list[Tensor]) -> tuple[Tensor | None, list[LossShare]]:
        """Return the inverse of the scale that gradients carry, ``None`` for none, and whether they overflowed."""
        carried = window.carried
        if carried is None:
            return None, []
        if not gradients:
            return None if carried.is_one else inverse(carried.divisor()), []
        over_scale, found = shared(_judged, (), [norms(gradients, carried.scale.device), carried.divisor()])
        share = LossShare(loss_id=carried.loss_id, scale=carried.scale, found_inf=found)
        return None if carried.is_one else over_scale, [share]

    # Before a step --------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Move gradients of low-precision parameters to their masters, summing in FP32."""
        self.wide.withdraw()
        if self.window is not None:
            self.window.new_gradients = {}
        for masters in self.masters:
            masters.take_edits()
            masters.gather()

    def settle(self) -> None:
        """Make ``.grad`` the unscaled sum of everything in the window."""
        window = self.window
        assert window is not None, "asked of an open window"
        self.gather()
        self.wide.begin()  # dividing an FP16 gradient by its scale in FP16 would flush small ones to zero
        if window.unscaled_sums:
            self._set_aside(window)  # the last scale's gradients, too: then all sums are unscaled
            calls: list[Call] = []
            for param, total in window.unscaled_sums.items():
                kept = param.grad_dtype or (total if is_distributed(param) else param).dtype
                kind = total.to(kept) if total.layout == torch.strided else total
                calls.append(partial(setattr, param, "grad", kind))
            at_once(*calls, partial(setattr, window, "unscaled_sums", {}))
            return
        _, gradients = dense(self.params())
        factor, share = self._share(window, gradients)
        calls = [] if factor is None else multiplications(gradients, factor)
        at_once(partial(window.settled.extend, share), *calls, partial(setattr, window, "carried", None))

    # After a step ---------------------------------------------------------------------------------------

    def close(self, gradients: Iterable[Tensor] | None = None) -> None:
        """End the window after a step; what the step leaves in ``.grad`` is stale.

        Args:
            gradients: All gradients of the optimizers, dense, if the caller knows them.
        """
        window = self.window
        if window is None:
            return
        if self.wide.end():
            gradients = None  # some have another dtype now, and other memory
        # Gradients that never carried a scale may be added to, as in a loop without mezzo.
        if window.carried is None or not window.carried.is_one:
            self.stale = left_over(gradients or dense(self.params())[1])
        self.window = None

    def abandon(self) -> None:
        """End a window whose gradients are not the scaled ones any more, since an optimizer has raised."""
        self.gather()  # a gradient of a closure is then known as stale, masters or not
        self.close()
        self.wide.give_back()  # where users see it, and clear it

    def forget(self) -> None:
        """Drop the window, sums set aside included, once gradients were cleared."""
        self.window = None
        self.waiting.start()
        self.wide.end()
        self.stale = {}

    def resume(self, window: Window | None) -> None:
        """Go on in a window that was saved; its gradients are there already, in the dtype that they were summed in."""
        self.window = window
        ranks = 1 if window is None or window.carried is None else window.carried.ranks
        self.waiting.resume(ranks, self.leaves())
        self.wide.is_on = any(param.grad_dtype != param.dtype for param in self.wide.params())
        if window is not None:
            if window.is_unscaled:
                self.wide.show()
            else:
                self.wide.give_back()  # states of earlier releases have earlier gradients with the masters
        self._note_new_gradients()

    def remembering(self) -> Callable[[], None]:
        """Return what drops the window, and brings back what is known of gradients now; they are not looked at."""
        stale, is_wide = dict(self.stale), self.wide.is_on

        def restore() -> None:
            self.window, self.stale, self.wide.is_on, self.wide.shown = None, dict(stale), is_wide, None
            self.waiting.start()

        return restore


def grouped(
    known: list[GradientGroup],
    optimizers: list[Optimizer],
    masters: Mapping[int, MasterWeights],
    name_of: Callable[[Tensor], str],
) -> list[GradientGroup]:
    """Group optimizers that share parameters.

    Args:
        known: How they were grouped before one was given parameter groups; none of these has an open window.
        optimizers: All of a session's.
        masters: Their masters, by ``id`` of the optimizer.
        name_of: Gives a parameter's name, for errors.

    Raises:
        StateError: Two of them have a master of the same parameter now.
    """
    sharing: list[tuple[list[Optimizer], set[int]]] = []
    for optimizer in optimizers:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        near = [each for each in sharing if each[1] & params]
        sharing = [each for each in sharing if each not in near]
        sharing.append(([*(o for others, _ in near for o in others), optimizer], params.union(*(p for _, p in near))))
    stale = {key: kept for group in known for key, kept in group.stale.items()}
    groups = [
        GradientGroup(found, [masters[id(o)] for o in found if id(o) in masters], name_of, dict(stale))
        for found, _ in sharing
    ]
    leaves = [id(leaf) for group in groups for _, leaf in group.with_leaves()]
    if len(set(leaves)) < len(leaves):
        raise StateError(
            "two optimizers update the same parameters, which can have only one master each",
            where="a parameter group that was added since the last step",
            write="add_param_group with parameters of no other optimizer; or O1, which needs no masters",
        )
    return groups


def _judged(norms: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of a scale that gradients of these norms carry, and whether they overflowed."""
    over_scale = inverse(scale)
    return over_scale, judge(norms, over_scale).found_inf
