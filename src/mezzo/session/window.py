"""Gradients between a backward pass and the step that uses them: a window knows the one scale that they carry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain, compress, repeat
from operator import attrgetter, is_
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.hooks import with_gradient_hooks
from mezzo.scale.state import inverse
from mezzo.session.step_plan import WindowPlan
from mezzo.session.weights import Weights
from mezzo.sharded import is_distributed
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import (
    Stale,
    alike,
    any_gradient,
    dense,
    gradient_values,
    is_left,
    left_over,
    multiply,
    norms,
    with_gradients,
)
from mezzo.step.verdict import not_finite
from mezzo.tensors import LOW, foreach_copy_, marks, moved
from mezzo.weights.halves import Halves

#: How a weight was used of which autograd computes a gradient of 16 bits: ``Cell.uses``.
_ONE_CAST: Final = [1, 0]
#: Bytes of low gradients that are widened together.
_TOGETHER: Final = 1 << 26
_LOW: Final = frozenset(LOW)
_DTYPE: Final = attrgetter("dtype")
_GRADIENT: Final = attrgetter("grad")
_CELL: Final = attrgetter("cell")
_NOTHING: Final[Stale] = {}


class Carried(NamedTuple):
    """The state of a window: the scale that its gradients carry, and the gradients that the last step has left.

    Attributes:
        scale: The loss scale that ``.grad`` carries now, 0-d float32, compared by identity; ``None`` for none.
        made_with: The scale of the last pass, which ``.grad`` may carry no more.
        found_inf: 0-d bool: whether gradients were not finite when they were unscaled; ``None`` before that.
        losses: What the passes since the last step have differentiated, 0-d and detached.
        passes: How many there were.
        marks: Marks of the gradients since they have got what they carry.
        has_made: Whether the session has made gradients since the last step, or given out unscaled ones; ``False`` once
            scaled ones were cleared, of which the program may have kept copies.
        left: Marks of the gradients that the last step has left in ``.grad``.
        left_scale: The scale that these carry.
        skipped: 0-d bool: whether the last step was skipped, where another one may follow without a pass in between.
    """

    scale: Tensor | None = None
    made_with: Tensor | None = None
    found_inf: Tensor | None = None
    losses: tuple[Tensor, ...] = ()
    passes: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    has_made: bool | None = None
    left: Stale = _NOTHING
    left_scale: Tensor | None = None
    skipped: Tensor | None = None

    def begun(self, scale: Tensor | None) -> Carried:
        """Return this state in a pass whose gradients will carry a scale."""
        return self._replace(scale=scale, made_with=scale, passes=self.passes + 1, left=_NOTHING)

    def cleared(self) -> Carried:
        """Return this state once all gradients were cleared; those that the last step has left stay known."""
        return self._replace(scale=None, made_with=None, found_inf=None, losses=(), passes=0, marks=())


class Window:
    """The gradients of one optimizer, or of several that share parameters.

    All of them carry one scale, or none. A pass under another scale rescales earlier gradients, in place, in FP32. An
    overflow that unscaling has found skips the step, whatever is done to the gradients after; clearing them all begins
    a new window, and where a loop is the user's own so do zeros in all of them.

    While no pass is open the parameters' ``grad_dtype`` is their own. In a window it is FP32 from the second pass on,
    so that sums are FP32, and after a pass any dtype may be assigned.

    Args:
        weights: The models and optimizers of the engine.
        plan: Whose gradients these are.

    Attributes:
        plan: Whose gradients these are.
        now: What they carry.
    """

    def __init__(self, weights: Weights, plan: WindowPlan) -> None:
        self.weights, self.plan, self.now = weights, plan, Carried()
        self._grad_dtypes: dict[Tensor, torch.dtype | None] = {}  # as programs have set them, of gradients of theirs

    def adopt_plan(self, plan: WindowPlan) -> None:
        """Adopt a new plan of some of the same parameters."""
        narrow = set(map(id, plan.halves))
        _let_go([leaf for leaf in self.plan.halves if id(leaf) not in narrow])
        self.plan = plan

    @property
    def carried(self) -> Tensor | None:
        """The scale that gradients carry here if a pass has made them: ``None`` where none has since the last step."""
        return self.now.scale if self.now.passes else None

    def gradients(self, optimizers: Collection[Optimizer] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of some optimizers, or of all, that have a gradient, and these gradients."""
        return with_gradients(self.plan.leaves if optimizers is None else self.plan.leaves_of(optimizers))

    def has_gradients(self) -> bool:
        """Whether a step would find a gradient."""
        return any_gradient(self.plan.leaves)

    def marks(self) -> tuple[tuple[int, int], ...]:
        """Return the marks of the gradients as they are now."""
        return tuple(marks(with_gradients(self.plan.leaves)[1]))

    # What a pass would add to ---------------------------------------------------------------------------

    def refuse_left(self, optimizers: Collection[Optimizer] | None = None) -> None:
        """Refuse to add to gradients that the last step has left, or to step with them again.

        Args:
            optimizers: Whose gradients; all when omitted.

        Raises:
            StateError: The last step's gradients were not cleared.
        """
        if self.now.left and (stale := self._left(optimizers)):
            raise StateError(
                "the last step's gradients are still there",
                where=some_of(list(map(self.weights.name_of, stale))),
                why="this pass would add to them, and the next step would take both",
                write="amp.zero_grad() after amp.step(), or optimizer.zero_grad()",
            )

    def names_of_written(self, optimizers: Collection[Optimizer] | None = None) -> list[str]:
        """Return the parameters whose gradients a program has written, where no pass of the session has.

        Args:
            optimizers: Whose; all when omitted.
        """
        if self.now.passes:
            return []
        params, gradients = self.gradients(optimizers)
        pairs, marks_of_passes = zip(params, marks(gradients), gradients, strict=True), set(self.now.marks)
        new = [
            param
            for param, mark, gradient in pairs
            if not (mark in marks_of_passes or is_left(gradient, self.now.left))
        ]
        return list(map(self.weights.name_of, new))

    def refuse_copies(self) -> None:
        """Refuse to add to gradients that may carry the scale already.

        Raises:
            StateError: A program has put some in the place of those that were cleared while they carried it.
        """
        if self.now.has_made is False and (names := self.names_of_written()):
            raise self.unknown("backward() would add to what it has not made", names)

    def unknown(self, call: str, names: list[str]) -> StateError:
        """Return the error of a call with gradients of which nothing says whether they carry the loss scale.

        Args:
            call: What the call would do, or comes before.
            names: The parameters that have these gradients.
        """
        reason = "those of amp.backward(loss) do, those of loss.backward() do not, and a program's own may"
        copied = "they may be copies of those that were cleared while they did, or made in another way"
        return StateError(
            f"{call}: gradients are there, but not from amp.backward(loss)",
            where=some_of(names),
            why=f"whether they carry the loss scale is not known: {reason if self.now.has_made is None else copied}",
            write="amp.backward(loss) in place of loss.backward(); or amp.unscale_() after each amp.backward(loss), "
            "before gradients are read;\nor amp.grad(loss, params), which returns them without the scale; or "
            "mezzo.attach(model, optimizer, policy), where\nloss.backward() leaves them without it; or a policy in "
            'bfloat16: Policy.O1("bfloat16"), the text O1,bf16',
        )

    @torch.no_grad()
    def drop_skipped(self) -> None:
        """Clear gradients that a skipped step has left, before a pass adds to them; decided on the device.

        A loop that clears only after steps that were taken would else skip for ever.
        """
        skipped, self.now = self.now.skipped, self.now._replace(skipped=None)
        if skipped is None or not self.now.left:
            return
        stale = self._left()
        for gradient in dense(stale)[1]:
            gradient.masked_fill_(moved(skipped, gradient.device), 0)
        self.now = self.now._replace(left=left_over(with_gradients(stale)[1]))

    def _left(self, optimizers: Collection[Optimizer] | None = None) -> list[Tensor]:
        """Return the parameters that have a gradient which the last step has left, unwritten since."""
        pairs = zip(*self.gradients(optimizers), strict=True)
        return [leaf for leaf, gradient in pairs if is_left(gradient, self.now.left)]

    def skip_flags(self) -> list[Tensor]:
        """Return whether the last step was skipped, 0-d bool, if all gradients are its own; else nothing."""
        skipped = self.now.skipped
        return [] if skipped is None or not self.has_left_alone() else [skipped]

    def has_left_alone(self) -> bool:
        """Whether all gradients are those that the last step has left, unwritten since."""
        left = self.now.left
        return bool(left) and all(is_left(gradient, left) for gradient in self.gradients()[1])

    @torch.no_grad()
    def forget_cleared(self) -> None:
        """Forget overflows of gradients that were cleared to zeros since; decided on the device."""
        now = self.now
        if not now.passes or (now.found_inf is None and not now.losses) or self.marks() == now.marks:
            return
        _, gradients = dense(self.plan.leaves)
        if gradients:
            device = self.weights.device
            stays = torch.linalg.vector_norm(norms(gradients, device)) != 0
            found_inf = None if now.found_inf is None else moved(now.found_inf, device) & stays
            losses = tuple(moved(loss, device).masked_fill(~stays, 0) for loss in now.losses)
            self.now = now._replace(found_inf=found_inf, losses=losses)

    # A backward pass ------------------------------------------------------------------------------------

    def begin(self, scale: Tensor | None) -> None:
        """Begin a pass whose gradients will carry a scale: rescale earlier gradients, and set the dtypes of new ones.

        Where the plan says so (:func:`mezzo.session.step_plan.may_narrow`) the first gradients of weights in halves
        have 16 bits: the gradient of a single cast of a weight has no more. The gradients of all other readers of the
        weight are added in FP32, and hooks of the user's compute in FP32.

        Args:
            scale: The scale.
        """
        plan = self.plan
        params, gradients = with_gradients(plan.leaves)
        if gradients:
            self.drop_skipped()
            if self.has_left_alone():
                self.now = self.now._replace(scale=self.now.left_scale)
            self.rescale(scale)
            self.now = self.now.begun(scale)
        else:
            now = self.now
            self.now = now._replace(
                scale=scale, made_with=scale, found_inf=None, losses=(), passes=1, marks=(), left=_NOTHING, skipped=None
            )
        if plan.wide == "none":
            _have_dtypes_of_parameters(plan.low)
            return
        if not _LOW.isdisjoint(map(_DTYPE, gradients)):
            _widen(params)
        if plan.low:
            _widen(plan.low if plan.wide == "all" else [leaf for leaf in plan.low if leaf.grad is not None])
        if plan.wide == "sums":
            hooked = set(map(id, with_gradient_hooks(plan.halves))) if plan.halves else ()
            for leaf in plan.low:
                if leaf.grad is None:
                    leaf.grad_dtype = leaf.dtype  # which was FP32, if other code has cleared the gradient
            for leaf in plan.halves:
                if leaf.grad is None:
                    cell = leaf.cell
                    is_low = cell.uses == _ONE_CAST and cell.decoded is None and id(leaf) not in hooked
                    leaf.grad_dtype = leaf.hi.dtype if is_low else leaf.dtype

    @torch.no_grad()
    def adopt_gradients(self, scale: Tensor) -> None:
        """Adopt gradients of passes that began without the engine.

        Args:
            scale: What they carry; but not those that the last step has left, if there are no others.
        """
        now, is_new = self.now, not self.has_left_alone()
        carried, found_inf = (scale, None) if is_new else (now.left_scale, now.skipped)
        left = dense(self._left())[1] if is_new and now.left else []
        if left:  # besides new gradients, which carry `scale`
            found_inf = now.skipped
            multiply(left, scale if now.left_scale is None else scale * inverse(now.left_scale))
        self.now = now._replace(scale=carried, made_with=carried, found_inf=found_inf, passes=1)
        self._grad_dtypes = {leaf: leaf.grad_dtype for leaf in self.plan.low}

    def end(self, losses: Iterable[Tensor], *, unscales: bool) -> None:
        """End a pass: count its losses; unscale its gradients, or mark them as they are.

        Args:
            losses: What was differentiated, 0-d and detached.
            unscales: Whether gradients lose the scale now.
        """
        for leaf in chain(self.plan.low, self.plan.halves):
            if leaf.grad is None:
                leaf.grad_dtype = leaf.dtype  # so that torch.autograd.grad returns what it does in plain torch
            elif leaf.grad.dtype != leaf.dtype:
                leaf.grad_dtype = None
        now = self.now
        self.now = now._replace(losses=(*now.losses, *losses))
        if unscales:
            self.rescale(None, checks=True)
        else:
            self.now = self.now._replace(marks=self.marks())
        if self.now.marks:
            self.now = self.now._replace(has_made=True)

    # What they carry ------------------------------------------------------------------------------------

    @torch.no_grad()
    def rescale(self, to: Tensor | None, *, checks: bool = False) -> None:
        """Rescale the gradients from the scale that they carry to another one, in FP32.

        Args:
            to: The scale; ``None`` makes them plain.
            checks: Whether those that carry none are checked, too. Scaled ones always are, as they lose their scale.

        **Cost**: one pass that reads them, for the check, and one that multiplies them in place. No host sync.
        """
        scale, found_inf = self.now.scale, self.now.found_inf
        if scale is to and not checks:
            return
        leaves, grads = with_gradients(self.plan.leaves)
        if leaves:
            if not _LOW.isdisjoint(map(_DTYPE, grads)):
                _widen(leaves)
                grads = with_gradients(leaves)[1]
            gradients = gradient_values(leaves, grads)
            groups = alike(gradients)
            back: Tensor | None = None
            if scale is not None or checks:
                sizes = norms(gradients, self.weights.device, groups=groups)
                flag, *inverses = shared(found_with, (), [sizes] if scale is None else [sizes, scale])
                back = inverses[0] if inverses else None
                found_inf = flag if found_inf is None else found_inf | flag
            if scale is not to:
                factor = back if to is None else to if back is None else to * back
                assert factor is not None
                multiply(gradients, factor, groups)
            for leaf in self.plan.low:
                if leaf.grad is not None:
                    leaf.grad_dtype = None  # so that any may be assigned
            if gradients is not grads:
                grads = with_gradients(leaves)[1]
        self.now = self.now._replace(scale=to, found_inf=found_inf, marks=tuple(marks(grads)))

    def lost_scale(self, optimizers: Collection[Optimizer], found_inf: Tensor | None = None) -> None:
        """Record that the gradients of some optimizers carry no scale any more, if this window has such.

        Args:
            optimizers: The optimizers.
            found_inf: Whether they were finite, where they have been multiplied because of that.
        """
        if not set(self.plan.optimizers).isdisjoint(optimizers):
            self.now = self.now._replace(scale=None, found_inf=self.now.found_inf if found_inf is None else found_inf)

    @property
    def was_edited(self) -> bool:
        """Whether gradients were written in place since they have got the scale that they carry."""
        if not self.now.marks or (marks := self.marks()) == self.now.marks:
            return False
        before = {address: version for version, address in self.now.marks if address}  # sparse ones have none
        return any(before.get(address, version) != version for version, address in marks)

    # After a step ---------------------------------------------------------------------------------------

    def close(self, skipped: Tensor | None = None) -> None:
        """End the window after a step; the gradients that the step leaves are recognised by their marks.

        Args:
            skipped: 0-d bool: whether it was skipped, where another step may follow without a pass in between.
        """
        params, gradients = with_gradients(self.plan.leaves)
        if len(params) < len(self.plan.leaves):
            _let_go((*self.plan.low, *self.plan.halves))
        if self.plan.halves:
            _count_anew(self.plan.halves)
        for leaf, dtype in self._grad_dtypes.items():
            if leaf.grad is None or leaf.grad.dtype == dtype:  # unscale_() lets any be assigned, until here
                leaf.grad_dtype = dtype
        self._grad_dtypes = {}
        left = left_over(gradients)
        self.now = Carried(left=left, left_scale=self.now.scale, skipped=skipped)

    def clear(self, *, to_zeros: bool) -> None:
        """Begin a new window, once the gradients were cleared.

        Args:
            to_zeros: Whether they are zeros now, which no step is to take for a program's.
        """
        narrow_leaves = [*self.plan.low, *self.plan.halves]
        _let_go(narrow_leaves)
        _count_anew(self.plan.halves)
        for leaf in narrow_leaves if self.now.passes else ():
            if leaf.grad is None:
                leaf.grad_dtype = None  # so that copies of the gradients, in any dtype, may be assigned
        has_made = self.now.has_made if self.now.scale is None else False
        self.now = self.now.cleared()._replace(has_made=has_made, left=_NOTHING, marks=self.marks() if to_zeros else ())


@torch.no_grad()
def carry_over(leaf: Tensor, before: Tensor | None, to: Tensor | None) -> None:
    """Rescale the gradient of a parameter that goes over to another window, or to none, in FP32.

    Args:
        leaf: The parameter.
        before: What its gradient carries, if it has one.
        to: What it is to carry.
    """
    if before is not to and leaf.grad is not None:
        _widen([leaf])
        for scale in () if before is None else (inverse(before),):
            multiply(dense([leaf])[1], scale)
        for scale in () if to is None else (to,):
            multiply(dense([leaf])[1], scale)


def _let_go(leaves: Sequence[Tensor]) -> None:
    """Restore the gradient dtype of parameters without a gradient to their own."""
    for leaf in compress(leaves, map(is_, map(_GRADIENT, leaves), repeat(None))):
        leaf.grad_dtype = leaf.dtype


def _count_anew(leaves: Iterable[Halves]) -> None:
    """Count the uses of weights in halves from here on."""
    for cell in map(_CELL, leaves):
        cell.uses[:] = 0, 0


@torch.no_grad()
def _have_dtypes_of_parameters(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is not None and gradient.dtype != leaf.dtype:
            leaf.grad = None
        leaf.grad_dtype = leaf.dtype
        if gradient is not None and leaf.grad is None:
            leaf.grad = gradient.to(leaf.dtype)


@torch.no_grad()
def _widen(leaves: Iterable[Tensor]) -> None:
    """Widen the gradients of low parameters to FP32, many in one kernel; later gradients may be FP32 too."""
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
    while waiting:  # a part at a time, so that few gradients exist in both dtypes at once
        ends_in_bytes = accumulate(leaf.nbytes for leaf in waiting)
        size = next((count for count, end in enumerate(ends_in_bytes, 1) if end > _TOGETHER), len(waiting))
        now, waiting = waiting[:size], waiting[size:]
        gradients = [leaf.grad for leaf in now if leaf.grad is not None]
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        for places in alike(gradients).values():
            foreach_copy_([wide[index] for index in places], [gradients[index] for index in places])
        for leaf, gradient in zip(now, wide, strict=True):
            leaf.grad, leaf.grad_dtype = None, torch.float32
            leaf.grad = gradient


def found_with(norms: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """Return whether gradients are not finite without the scale that they carry, and the inverse of it.

    Args:
        norms: (gradients,) float32: their 2-norms.
        *scales: The scale, if they carry one.
    """
    inverses, total = tuple(map(inverse, scales)), torch.linalg.vector_norm(norms)
    for back in inverses:
        total = total * back
    return not_finite(total), *inverses
