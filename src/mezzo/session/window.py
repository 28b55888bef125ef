"""Gradients between a backward pass and the step that takes them. They carry one scale, which is known here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.hooks import with_gradient_hooks
from mezzo.scale.state import inverse
from mezzo.session.weights import Weights
from mezzo.sharded import is_distributed
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import Stale, alike, dense, is_left, left_over, norms, with_gradients
from mezzo.step.verdict import not_finite
from mezzo.tensors import LOW, foreach_copy_, foreach_mul_, marks, moved
from mezzo.weights.halves import Halves

#: How a weight was used of which autograd computes a gradient of 16 bits: ``Cell.uses``.
_ONE_CAST: Final = [1, 0]
#: Bytes of low gradients that are widened together.
_TOGETHER: Final = 1 << 26


class Window:
    """The gradients of one optimizer, or of several that share parameters.

    All of them carry one scale, or none. Another scale rescales what is there, in place, in FP32. An overflow that
    unscaling has found skips the step, whatever is done to the gradients after; clearing them all begins a new window,
    and where a loop is the user's own so do zeros in all of them.

    While no pass is open the parameters' ``grad_dtype`` is their own. In a window it is FP32 as soon as there is
    something to add to, so that sums are FP32, and after a pass any dtype may be assigned.

    Args:
        weights: The models and optimizers of the engine.
        optimizers: Those of them whose gradients these are.

    Attributes:
        optimizers: Those whose gradients these are.
        scale: What ``.grad`` carries now, 0-d float32, the very tensor; ``None`` for plain gradients.
        made_with: The scale of the last pass, which ``.grad`` may carry no more.
        passes: How many backward passes there were since the last step.
        found: 0-d bool: whether gradients were not finite when they were unscaled; ``None`` before that.
        losses: What these passes have differentiated, 0-d and detached.
        narrows: Whether gradients of halves may have 16 bits, where that loses nothing.
        given: Whether the session has made gradients since the last step, or given out such without a scale; ``False``
            once those that carried one were cleared, of which a program may have kept copies.
        left: Marks of the gradients that the last step has left in ``.grad``, with what these carry.
    """

    def __init__(self, weights: Weights, optimizers: list[Optimizer]) -> None:
        self.weights, self.optimizers, self.narrows = weights, optimizers, False
        self.left: Stale = {}
        self.given: bool | None = None
        self._left_scale: Tensor | None = None
        self._skipped: Tensor | None = None
        self._grad_dtypes: dict[Tensor, torch.dtype | None] = {}  # as programs have set them, of gradients of theirs
        self._known: tuple[Any, dict[int, Tensor], list[Tensor]] = (None, {}, [])  # one value, whatever signal comes
        self.forget()

    def forget(self) -> None:
        """Be as before the first pass."""
        self.scale: Tensor | None = None
        self.made_with: Tensor | None = None
        self.found: Tensor | None = None
        self.losses: list[Tensor] = []
        self.passes = 0
        self._marks: list[tuple[int, int]] = []

    # Whose they are -------------------------------------------------------------------------------------

    def leaves(self, optimizers: Collection[Optimizer] | None = None) -> list[Tensor]:
        """Return the models' parameters that some of the optimizers update, or all of them; each once."""
        if optimizers is None or all(each in optimizers for each in self.optimizers):
            return self._found_once()[1]
        chosen = [each for each in self.optimizers if each in optimizers]
        return list({id(leaf): leaf for each in chosen for leaf in self.weights.leaves(each)}.values())

    def owns(self, leaf: Tensor) -> bool:
        """Whether a tensor is one of these parameters."""
        return id(leaf) in self._found_once()[0]

    def ids(self) -> Iterable[int]:
        """Return the ``id`` of each of these parameters."""
        return self._found_once()[0]

    def _found_once(self) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Return the parameters by ``id``, and as a list."""
        key = [list(map(id, group["params"])) for each in self.optimizers for group in each.param_groups]
        if self._known[0] != key:  # groups were added since
            each_once = {id(leaf): leaf for each in self.optimizers for leaf in self.weights.leaves(each)}
            self._known = key, each_once, list(each_once.values())
        return self._known[1:]

    def has_gradients(self) -> bool:
        """Whether a step would find a gradient."""
        return any(leaf.grad is not None for leaf in self.leaves())

    # A backward pass ------------------------------------------------------------------------------------

    def refuse_left(self, optimizers: Collection[Optimizer] | None = None) -> None:
        """Refuse to add to what the last step has left, or to take it again beside others.

        Args:
            optimizers: Whose gradients; all when omitted.

        Raises:
            StateError: Its gradients are still there.
        """
        params, gradients = with_gradients(self.leaves(optimizers)) if self.left else ([], [])
        pairs = zip(params, gradients, strict=True)
        if stale := [self.weights.name_of(param) for param, gradient in pairs if is_left(gradient, self.left)]:
            raise StateError(
                "the last step's gradients are still there",
                where=some_of(stale),
                why="this pass would add to them, and the next step would take both",
                write="amp.zero_grad() after amp.step(), or optimizer.zero_grad()",
            )

    def written(self, optimizers: Collection[Optimizer] | None = None) -> list[str]:
        """Return the parameters whose gradients a program has written, where no pass of the session has.

        Args:
            optimizers: Whose; all when omitted.
        """
        params, gradients = ([], []) if self.passes else with_gradients(self.leaves(optimizers))
        pairs, known = zip(params, marks(gradients), gradients, strict=True), set(self._marks)
        new = [param for param, mark, each in pairs if not (mark in known or is_left(each, self.left))]
        return list(map(self.weights.name_of, new))

    def refuse_copies(self) -> None:
        """Refuse to add to gradients that may carry the scale already.

        Raises:
            StateError: A program has put some in the place of those that were cleared while they carried it.
        """
        if self.given is False and (names := self.written()):
            raise self.unknown("backward()", names)

    def unknown(self, call: str, names: list[str]) -> StateError:
        """Return the error of a call with gradients of which nothing says whether they carry the loss scale.

        Args:
            call: The call.
            names: Whose gradients they are.
        """
        made = "amp.backward(loss) makes such that do; what a program writes itself may, and may not"
        copied = "they may be copies of those that were cleared while they did, or made in another way"
        return StateError(
            f"{call} before backward(): a program has written these gradients",
            where=some_of(names),
            why=f"whether they carry the loss scale is not known: {made if self.given is None else copied}",
            write="amp.unscale_() after each amp.backward(loss), before gradients are read; or amp.grad(loss, params), "
            "which returns them without it;\nor mezzo.attach(model, optimizer, policy), where loss.backward() leaves "
            'them without it; or a policy in bfloat16: Policy.O1("bfloat16"), the text O1,dtype=bfloat16',
        )

    @torch.no_grad()
    def drop_skipped(self) -> None:
        """Clear what a skipped step has left, unwritten since, before a pass adds to it; decided on the device.

        A loop that clears only after steps that were taken would else skip for ever.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is None or not self.left:
            return
        stale = [each for each in dense(self.leaves())[1] if is_left(each, self.left)]
        for gradient in stale:
            gradient.masked_fill_(moved(skipped, gradient.device), 0)
        self.left = left_over(stale)

    def has_skipped(self) -> list[Tensor]:
        """Return whether the last step was skipped, 0-d bool, where what it has left is all that there is."""
        return [] if self.passes or self._skipped is None or not self.has_left_alone() else [self._skipped]

    def has_left_alone(self) -> bool:
        """Whether what the last step has left is all that there is, unwritten since."""
        if not self.left:
            return False
        _, gradients = with_gradients(self.leaves())
        return all(is_left(gradient, self.left) for gradient in gradients)

    @torch.no_grad()
    def forget_cleared(self) -> None:
        """Forget what was found of gradients that were cleared to zeros since; decided on the device."""
        if not self.passes or (self.found is None and not self.losses) or self._now() == self._marks:
            return
        _, gradients = dense(self.leaves())
        if gradients:
            device = self.weights.device
            stays = torch.linalg.vector_norm(norms(gradients, device)) != 0
            self.found = None if self.found is None else moved(self.found, device) & stays
            self.losses = [moved(loss, device).masked_fill(~stays, 0) for loss in self.losses]

    def begin(self, scale: Tensor | None, *, is_wide: bool, is_wrapped: bool) -> None:
        """Make ready for gradients that carry a scale.

        Args:
            scale: The scale.
            is_wide: Whether the first gradients of low parameters are FP32 already, and not only sums.
            is_wrapped: Whether ``DistributedDataParallel`` is around a model, whose buckets have the parameters' dtypes
                and take gradients in no other.
        """
        leaves = self.leaves()
        there = [leaf for leaf in leaves if leaf.grad is not None]
        if not there:
            self.forget()
        else:
            self.drop_skipped()
            if self.has_left_alone():
                self.scale = self._left_scale
        self.left = {}
        self.rescale(scale)
        self.made_with = scale
        if is_wrapped:
            _have_dtypes_of_parameters(leaves)
        elif is_wide:
            _widen(leaves)
        else:
            for leaf in _low(leaves):
                if leaf.grad is None:
                    leaf.grad_dtype = self._first_dtype(leaf)  # it may have been FP32, and cleared by others
            _widen(there)
        self.passes += 1

    def _first_dtype(self, leaf: Tensor) -> torch.dtype:
        """Return the dtype of a leaf's first gradient: 16 bits where that is what autograd computes.

        What a single cast of a weight hands back has 16 bits; whatever else has read it is added to that in FP32, and
        hooks of the user's compute in FP32.
        """
        if isinstance(leaf, Halves) and self.narrows and leaf.cell.wide is None and leaf.cell.uses == _ONE_CAST:
            return leaf.dtype if hooked([leaf]) else leaf.hi.dtype
        return leaf.dtype

    @torch.no_grad()
    def take(self, scale: Tensor) -> None:
        """Begin with gradients of passes that began without the engine.

        Args:
            scale: What they carry; but not those that the last step has left, if there are no others.
        """
        is_new = not self.has_left_alone()
        self.scale = self.made_with = scale if is_new else self._left_scale
        self.found = None if is_new else self._skipped
        left = [each for each in dense(self.leaves())[1] if is_left(each, self.left)] if is_new and self.left else []
        if left:  # beside new ones
            self.found = self._skipped
            multiply(left, scale if self._left_scale is None else scale * inverse(self._left_scale))
        self.passes = 1
        self._grad_dtypes = {leaf: leaf.grad_dtype for leaf in self.leaves() if leaf.dtype in LOW}

    def end(self, losses: list[Tensor]) -> None:
        """Take note of what a pass has made.

        Args:
            losses: What was differentiated, 0-d and detached.
        """
        self.losses += losses
        for leaf in _low(self.leaves()):
            if leaf.grad is None:
                leaf.grad_dtype = leaf.dtype  # so that torch.autograd.grad returns what it does in plain torch
            elif leaf.grad.dtype != leaf.dtype:
                leaf.grad_dtype = None
        self._marks = self._now()
        if self._marks:
            self.given = True

    # What they carry ------------------------------------------------------------------------------------

    @torch.no_grad()
    def rescale(self, to: Tensor | None, *, checks: bool = False) -> None:
        """Have ``.grad`` carry another scale, in FP32.

        Args:
            to: The scale; ``None`` makes them plain.
            checks: Whether those that carry none are checked, too. Scaled ones always are, as they lose their scale.

        **Cost**: one pass that reads them, for the check, and one that multiplies them in place. No host sync.
        """
        if self.scale is to and not checks:
            return
        params, _ = dense(self.leaves())
        if params:
            _widen(params)
            params, gradients = dense(params)
            back: Tensor | None = None
            if self.scale is not None or checks:
                sizes = norms(gradients, self.weights.device)
                found, *inverses = shared(found_with, (), [sizes, *([] if self.scale is None else [self.scale])])
                back = inverses[0] if inverses else None
                self.found = found if self.found is None else self.found | found
            if self.scale is not to:
                factor = back if to is None else to if back is None else to * back
                assert factor is not None
                multiply(gradients, factor)
            for leaf in params:
                if leaf.dtype in LOW:
                    leaf.grad_dtype = None  # so that any may be assigned
        self.scale, self._marks = to, self._now()

    @property
    def was_edited(self) -> bool:
        """Whether gradients were written in place since they have got the scale that they carry."""
        if (now := self._now()) == self._marks:
            return False
        before = {address: version for version, address in self._marks if address}  # sparse ones have none
        return any(before.get(address, version) != version for version, address in now)

    def _now(self) -> list[tuple[int, int]]:
        return marks(with_gradients(self.leaves())[1])

    # After a step ---------------------------------------------------------------------------------------

    def close(self, skipped: Tensor | None = None) -> None:
        """Be done with gradients that a step has taken: what it leaves is known by marks.

        Args:
            skipped: 0-d bool: whether it was skipped, where another step may follow without a pass in between.
        """
        self._skipped, self._left_scale = skipped, self.scale
        self._forget_uses()
        for leaf, dtype in self._grad_dtypes.items():
            if leaf.grad is None or leaf.grad.dtype == dtype:  # unscale_() lets any be assigned, until here
                leaf.grad_dtype = dtype
        self._grad_dtypes = {}
        self.left, self.given = left_over(dense(self.leaves())[1]), None
        self.forget()

    def clear(self, *, to_zeros: bool) -> None:
        """Be as new, once the gradients were cleared.

        Args:
            to_zeros: Whether they are zeros now, which no step is to take for a program's.
        """
        self._forget_uses()
        for leaf in _low(self.leaves()) if self.passes else ():
            if leaf.grad is None:
                leaf.grad_dtype = None  # so that what is made of copies of them may be assigned
        self.left = {}
        if self.scale is not None:
            self.given = False
        self.forget()
        if to_zeros:
            self._marks = self._now()

    def _forget_uses(self) -> None:
        for leaf in _low(self.leaves()):
            if leaf.grad is None:
                leaf.grad_dtype = leaf.dtype
            if type(leaf) is Halves:
                leaf.cell.uses[:] = 0, 0


def _low(leaves: list[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients may have 16 bits."""
    return [leaf for leaf in leaves if type(leaf) is Halves or leaf.dtype in LOW]


@torch.no_grad()
def _have_dtypes_of_parameters(leaves: list[Tensor]) -> None:
    for leaf in _low(leaves):
        gradient = leaf.grad
        if gradient is not None and gradient.dtype != leaf.dtype:
            leaf.grad = None
        leaf.grad_dtype = leaf.dtype
        if gradient is not None and leaf.grad is None:
            leaf.grad = gradient.to(leaf.dtype)


@torch.no_grad()
def _widen(leaves: list[Tensor]) -> None:
    """Let low parameters have FP32 gradients, and widen those that they have: many in one kernel."""
    waiting: list[Tensor] = []
    for leaf in leaves:
        gradient = leaf.grad
        if leaf.dtype not in LOW and (gradient is None or gradient.dtype not in LOW):
            continue
        if gradient is None or gradient.dtype not in LOW:
            if leaf.grad_dtype != torch.float32:
                leaf.grad, leaf.grad_dtype = None, torch.float32
                leaf.grad = gradient
        elif gradient.layout != torch.strided or is_distributed(gradient):
            leaf.grad, leaf.grad_dtype = None, torch.float32
            leaf.grad = gradient.float()
        else:
            waiting.append(leaf)
    while waiting:  # a part at a time, so that not all are there twice
        ends = accumulate(leaf.nbytes for leaf in waiting)
        size = next((place for place, end in enumerate(ends, 1) if end > _TOGETHER), len(waiting))
        now, waiting = waiting[:size], waiting[size:]
        gradients = [leaf.grad for leaf in now if leaf.grad is not None]
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        for places in alike(gradients).values():
            foreach_copy_([wide[place] for place in places], [gradients[place] for place in places])
        for leaf, gradient in zip(now, wide, strict=True):
            leaf.grad, leaf.grad_dtype = None, torch.float32
            leaf.grad = gradient


def found_with(norms: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """Return whether gradients are not finite without the scale that they carry, and the inverse of it.

    Args:
        norms: (gradients,) float32: their 2-norms.
        *scales: The scale, if they carry one.
    """
    inverses, total = [inverse(scale) for scale in scales], torch.linalg.vector_norm(norms)
    for back in inverses:
        total = total * back
    return not_finite(total), *inverses


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a number on a device, in as few kernels as there are devices and dtypes."""
    for (device, _), places in alike(gradients).items():
        foreach_mul_([gradients[place] for place in places], moved(factor, device))


def hooked(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have hooks of the user's, which run inside the pass."""
    return with_gradient_hooks(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
