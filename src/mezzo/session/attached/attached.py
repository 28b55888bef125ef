"""A session whose backward passes and steps are made by the user's own calls, ``loss.backward()`` for one."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from mezzo.session.attached.under_way import Root, UnderWay
from mezzo.session.backward import scaler_of
from mezzo.session.refusals.calls import chosen
from mezzo.session.session import MixedPrecision
from mezzo.step.whole import Call, at_once

__all__ = ["Attached"]


class Attached:
    """Let calls of the user's own do what those of a session do.

    What :meth:`scaled` returns may be differentiated by whatever call: ``scaled.backward()``, or
    ``torch.autograd.backward`` of several, or of something that is computed from it. As that pass begins, the session's
    windows open, and as it ends they take note of what it made, so that gradients are summed, told apart by their
    scales and counted as those of ``amp.backward`` are. A pass that begins elsewhere is left alone.

    :meth:`take_over` has ``optimizer.step()`` do what is said there, until :meth:`give_back`.

    Args:
        amp: The session.

    Attributes:
        amp: The session.
        without_gradients: Optimizers whose parameters were reached by a pass that was not for them, since it was last
            for them: these gradients were dropped.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.session.attached import Attached
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true")
        >>> attached = Attached(amp)
        >>> attached.take_over(optimizer, lambda optimizer, closure: amp.step(optimizer, closure))
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> attached.scaled(loss).backward()
        >>> step = optimizer.step()
        >>> bool(step.skipped), amp.stats().steps
        (False, 1)
    """

    def __init__(self, amp: MixedPrecision) -> None:
        self.amp, self._core = amp, amp._core
        self.without_gradients: set[Optimizer] = set()
        self._under_way: Callable[[], UnderWay | None] = lambda: None
        self._taken: dict[Optimizer, tuple[Any, types.MethodType]] = {}  # what was there before on the instance, ours

    # Backward passes ----------------------------------------------------------------------------------------

    def scaled(
        self, loss: Tensor, loss_id: int = 0, optimizers: Optimizer | Iterable[Optimizer] | None = None
    ) -> Tensor:
        """Return a loss times its scale, in FP32 or wider; a backward pass that reaches it is one of the session's.

        Several may be reached by one pass, as long as their gradients carry one scale.

        Args:
            loss: Any floating tensor; where it requires no gradient, nothing but the product is made.
            loss_id: Which of the session's losses this is, and so which scale it gets: that of now, whenever the
                backward pass comes.
            optimizers: Whose parameters get gradients; all when omitted. As after ``amp.backward(loss, optimizers)``,
                gradients of others' parameters are what they were before: what the pass makes of them is dropped.

        Raises:
            PolicyError: No such ``loss_id`` or optimizer.

        **Cost**: one product; around the backward pass what ``amp.backward`` costs. No host sync.
        """
        core = self._core
        core.require_open("backward")
        wanted = None if optimizers is None else chosen(optimizers, core.optimizers)
        scaler = scaler_of(core, loss_id)
        product = scaler.scaled(loss)
        if product is loss:  # the hook is for this use of it alone
            product = loss.clone()
        if product.requires_grad:
            plain = loss.detach()
            told = plain if plain.numel() == 1 else plain.sum()  # what counts is whether it is finite
            root = Root(scaler, scaler.state.scale, loss_id, told.reshape(()), wanted)
            product.register_hook(partial(self._reached, root))  # type: ignore[no-untyped-call]
        return product

    def _reached(self, root: Root, _: Tensor) -> None:
        """Open the windows for a backward pass that is about to go through a scaled loss: a hook of that loss."""
        under_way = self._under_way()
        if under_way is None:
            self._core.require_open("backward")
            under_way = UnderWay(self._core, self.without_gradients)
            self._under_way = weakref.ref(under_way)
            # The engine alone holds it: should the pass fail, it is dropped with all that the pass was.
            Variable._execution_engine.queue_callback(under_way)
        try:
            under_way.join(root)
        except BaseException:
            under_way.fail()  # at once: the error's own traceback would hold it
            self._under_way = lambda: None
            raise

    # Steps --------------------------------------------------------------------------------------------------

    def take_over(self, optimizer: Optimizer, step: Callable[[Optimizer, Callable[[], Any] | None], Any]) -> None:
        """Have ``optimizer.step()`` do something else: on the instance, as a bound method, which schedulers wrap.

        Args:
            optimizer: One of the session's, once.
            step: Called with the optimizer and the closure, if there is one. What ``optimizer.step`` was until now is
                what the session steps with, and :meth:`plain_step`.
        """
        plain, taken, before = optimizer.step, self._taken, vars(optimizer).get("step")

        @functools.wraps(getattr(plain, "__func__", plain))
        def taken_over(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self not in taken:  # given back, and another wrapper around this one is still in use
                return plain() if closure is None else plain(closure)
            if hasattr(plain, "_wrapped_by_lr_sched"):  # by a scheduler, to which a skipped step is no forgotten one
                vars(self)["_opt_called"] = True
            return step(self, closure)

        ours = types.MethodType(taken_over, optimizer)
        at_once(
            partial(taken.__setitem__, optimizer, (before, ours)),
            partial(self._core.writes.plain_steps.__setitem__, optimizer, plain),
            partial(vars(optimizer).__setitem__, "step", ours),
        )

    def plain_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return what ``optimizer.step`` was before it was taken over."""
        return self._core.writes.step_of(optimizer)

    def give_back(self) -> None:
        """Undo :meth:`take_over`. Where others have wrapped it since, it stays inside theirs, and changes nothing."""
        for optimizer, (before, ours) in list(self._taken.items()):
            instance, calls = vars(optimizer), list[Call]()
            if instance.get("step") is ours:
                calls = [partial(instance.pop, "step") if before is None else partial(instance.update, step=before)]
            plain_steps = self._core.writes.plain_steps
            at_once(*calls, partial(plain_steps.pop, optimizer, None), partial(self._taken.pop, optimizer, None))
