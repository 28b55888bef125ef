"""A session whose backward passes and steps are made by the user's own calls, ``loss.backward()`` for one."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.scale import LossScale
from mezzo.scale.held import HeldScaler
from mezzo.session.attached.averages import ExactAverages
from mezzo.session.attached.saved_as import save_as
from mezzo.session.attached.under_way import Root, UnderWay
from mezzo.session.backward import scaler_of
from mezzo.session.refusals.calls import check_loss_id, chosen
from mezzo.session.scale import adapt_at_once
from mezzo.session.session import MixedPrecision
from mezzo.session.settings import core_of
from mezzo.session.state import saved
from mezzo.step.whole import Call, at_once
from mezzo.tensors import LOW, moved

__all__ = ["Attached"]


class Attached:
    """Let calls of the user's own do what those of a session do.

    What :meth:`scaled` returns may be differentiated by whatever call: ``scaled.backward()``, or
    ``torch.autograd.backward`` of several, or of something that is computed from it. As that pass begins, the session's
    windows open, and as it ends they take note of what it made, so that gradients are summed, told apart by their
    scales and counted as those of ``amp.backward`` are. A pass that reaches no scaled loss is left alone.

    :meth:`take_over` has ``optimizer.step()`` do what is said there, until :meth:`give_back`.

    Args:
        amp: The session.
        keeps_plain: Whether gradients that were there before, by a plain backward pass, are summed apart from those
            that carry a scale; otherwise they count as scaled, as in the session's own passes.

    Attributes:
        amp: The session.
        core: Its core.
        without_gradients: Optimizers whose parameters were reached by a pass that was not for them, since it was last
            for them: these gradients were dropped.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.session.attached import Attached
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true,loss_scale=8")
        >>> attached = Attached(amp)
        >>> attached.take_over(optimizer, lambda optimizer, closure: amp.step(optimizer, closure))
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> attached.scaled(loss).backward()
        >>> step = optimizer.step()
        >>> bool(step.skipped), amp.stats().steps
        (False, 1)
    """

    def __init__(self, amp: MixedPrecision, *, keeps_plain: bool = False) -> None:
        self.amp, self.core, self._keeps_plain = amp, core_of(amp), keeps_plain
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
        core = self.core
        core.require_open("backward")
        wanted = None if optimizers is None else chosen(optimizers, core.optimizers, core.weights.words.begin)
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
            self.core.require_open("backward")
            under_way = UnderWay(self.core, self.without_gradients, keeps_plain=self._keeps_plain)
            self._under_way = weakref.ref(under_way)
            # The engine alone holds it: should the pass fail, it is dropped with all that the pass was.
            Variable._execution_engine.queue_callback(under_way)
        try:
            under_way.join(root)
        except BaseException:
            under_way.fail()  # at once: the error's own traceback would hold it
            self._under_way = lambda: None
            raise

    def take_as_they_are(self, optimizer: Optimizer) -> None:
        """Take the gradients of an optimizer for unscaled ones, which the next step uses.

        Args:
            optimizer: One of the session's, whose gradients no pass of the session has made.
        """
        none = HeldScaler(LossScale.none(), self.core.device)
        for group in self.core.groups:
            if optimizer in group.optimizers:
                group.find(none, none.state.scale)

    def judge(self, optimizers: Optimizer | Iterable[Optimizer] | None = None, *, adapts: bool = True) -> Tensor | None:
        """Unscale the gradients now, and let the loss scale move now, by what the last passes have made.

        What a pass was for steps together or not at all: where gradients of one optimizer overflowed, the next step of
        each is skipped. Nothing happens where no pass has come. Ranks that step together judge in their step.

        Args:
            optimizers: Those that these passes were for; all when omitted.
            adapts: Whether the scale moves now, and not with the step.

        Returns:
            0-d bool: whether these gradients are not finite; ``None`` where there are none.

        **Cost**: that of ``unscale_``; no host sync.
        """
        core = self.core
        wanted = set(chosen(optimizers, core.optimizers))
        windows = {g: g.window for g in core.groups if g.window is not None and not wanted.isdisjoint(g.optimizers)}
        known = {group: len(window.settled) for group, window in windows.items()}
        if not windows:
            return None
        self.amp.unscale_([optimizer for group in windows for optimizer in group.optimizers])
        shares = [share for group, window in windows.items() for share in window.settled[known[group] :]]
        if not shares:
            return None
        device = shares[0].found_inf.device
        found = torch.stack([moved(share.found_inf, device) for share in shares]).any()
        if core.agreement is not None:
            return found
        first = next(iter(windows.values()))
        losses = first.losses[first.judged_losses :]  # passes tell all windows alike
        for window in windows.values():
            window.overflowed = found if window.overflowed is None else window.overflowed | found
            window.judged_losses = len(window.losses)
        if adapts:
            adapt_at_once(core.scalers, shares, losses)
        return found

    def set_scale(self, scale: float, loss_id: int = 0) -> None:
        """Set a loss scale, between two steps; the steps counted towards its next growth are forgotten.

        Args:
            scale: The new one.
            loss_id: Whose.

        Raises:
            StateError: Gradients that carry the scale of before wait for a step.
            PolicyError: No loss scale.
        """
        core = self.core
        if any(group.window for group in core.groups):
            raise StateError(
                "the loss scale cannot be set between a backward pass and its step",
                why="the gradients carry the scale they were made with",
                write="the new scale after optimizer.step()",
            )
        scaler = core.scalers[check_loss_id(loss_id, len(core.scalers))]
        if scaler.config.mode != "dynamic":
            scaler.config = LossScale.constant(scale)
        fresh = replace(scaler.config, init=float(scale)) if scaler.config.mode == "dynamic" else scaler.config
        scaler.hold(fresh.start(core.device), in_graph=False)

    def save_as(self, dtype: torch.dtype, models: list[nn.Module] | None = None) -> None:
        """Have state dicts hold values of a dtype, until the session is closed: :func:`save_as`.

        Averages that torch makes of the weights then read FP32 values, if that is the dtype: :class:`ExactAverages`.

        Args:
            dtype: The dtype.
            models: Whose; the session's when omitted.
        """
        core = self.core
        core.weights.load_hooks += save_as(core.models if models is None else models, dtype, core.weights)
        if dtype == torch.float32:
            core.weights.load_hooks.append(ExactAverages(core.weights))

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state without the masters, for programs that save FP32 weights besides: :meth:`save_as`.

        **Cost**: a host sync.
        """
        return saved.save(self.core, weights=False)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or that of the session, with its masters.

        Raises:
            StateError: As :meth:`MixedPrecision.load_state_dict`.
        """
        saved.load(self.core, state_dict, weights=bool(state_dict.get("masters")))
        self.core.writes.drop()

    def exact(self) -> Callable[[Tensor], Tensor | None]:
        """Return what gives the FP32 value of a parameter or buffer that is stored in low precision."""
        weights = self.core.weights
        keepers, value_of = weights.stored(in_fp32=True), weights.fp32_values()
        stores_low = self.core.policy.param_dtype in LOW

        def exact(tensor: Tensor) -> Tensor | None:
            if (keeper := keepers.get(tensor)) is not None:
                keeper.take_edits([tensor])
                return keeper.master_of(tensor)  # itself: an optimizer may be copied or pickled with the model
            if (value := value_of(tensor)) is not None:
                return value
            return tensor.float() if stores_low and tensor.dtype in LOW else None

        return exact

    def scales(self) -> list[dict[str, Any]]:
        """Return the state of each loss scale as plain values, by the names of :class:`mezzo.scale.ScaleState`.

        **Cost**: a host sync.
        """
        return [scaler.state_dict() for scaler in self.core.scalers]

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
            partial(self.core.writes.plain_steps.__setitem__, optimizer, plain),
            partial(vars(optimizer).__setitem__, "step", ours),
        )

    def plain_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return what ``optimizer.step`` was before it was taken over."""
        return self.core.writes.step_of(optimizer)

    def gradients_of(self, optimizer: Optimizer) -> Literal["scaled", "none", "dropped", "foreign"]:
        """Say what gradients a step of one optimizer would find.

        Returns:
            ``"scaled"`` for those that passes of the session have made, unscaled since or not; ``"none"``;
            ``"dropped"`` for none, since passes that reached its parameters were not for it; ``"foreign"`` for others.
        """
        (group,) = (group for group in self.core.groups if optimizer in group.optimizers)
        if not group.has_gradients() and (group.window is None or not group.window.unscaled_sums):
            return "dropped" if optimizer in self.without_gradients else "none"
        return "foreign" if group.window is None else "scaled"

    def give_back(self) -> None:
        """Undo :meth:`take_over`. Where others have wrapped it since, it stays inside theirs, and changes nothing."""
        for optimizer, (before, ours) in list(self._taken.items()):
            instance, calls = vars(optimizer), list[Call]()
            if instance.get("step") is ours:
                calls = [partial(instance.pop, "step") if before is None else partial(instance.update, step=before)]
            plain_steps = self.core.writes.plain_steps
            at_once(*calls, partial(plain_steps.pop, optimizer, None), partial(self._taken.pop, optimizer, None))
