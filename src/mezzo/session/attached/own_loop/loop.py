"""``attach``: mixed precision for a training loop that stays as it is."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler  # itself: under `mezzo run` torch.amp has a script's, which scales nothing
from torch.optim import LBFGS, Optimizer

from mezzo.cast import Prepared
from mezzo.errors import StateError, not_switches, raise_together, some_of
from mezzo.optim.data_writes import ShownMasters
from mezzo.optim.optimizer import as_one_pass
from mezzo.policy import Policy
from mezzo.session.attached.own_loop.bound import Bound
from mezzo.session.attached.own_loop.checkpoints import carry, resume
from mezzo.session.attached.own_loop.clipping import Clipping
from mezzo.session.attached.own_loop.forward import CalledIn
from mezzo.session.attached.own_loop.passes import Passes
from mezzo.session.attached.own_loop.schedules import Schedules
from mezzo.session.attached.standing import Standing
from mezzo.session.refusals import beginning, calls
from mezzo.session.scale import Step
from mezzo.session.session import MixedPrecision
from mezzo.session.weights.phases import with_handles
from mezzo.session.weights.words import Words
from mezzo.session.window.window import NoGradient
from mezzo.tensors import LOW

__all__ = ["AttachedPrecision", "attach"]

_WORDS: Final = Words(begin="mezzo.attach", backward="loss.backward()")
#: The session that is attached now, if there is one.
_NOW: Final[list[weakref.ref[AttachedPrecision]]] = []


def attach(
    models: nn.Module | Prepared | Iterable[nn.Module | Prepared],
    optimizers: Optimizer | Iterable[Optimizer],
    policy: Policy | str | os.PathLike[str] | None = None,
    *,
    max_grad_norm: float | None = None,
    hold_schedulers: bool = True,
    on_overflow: Literal["skip", "explain", "raise"] = "skip",
    restore_buffers: bool = False,
) -> AttachedPrecision:
    """Train in mixed precision with a loop that stays as it is.

    Until ``amp.detach()``:

    - calls of the models run in the policy's region, and return FP32;
    - ``loss.backward()`` and ``torch.autograd.backward`` scale what reaches the optimizers' parameters. Passes that
      reach none are untouched, and other leaves get their gradients without the scale;
    - ``clip_grad_norm_``, ``clip_grad_value_``, ``get_total_norm`` and ``clip_grads_with_norm_`` see unscaled
      gradients, and those of masters where there are any;
    - ``optimizer.step()`` checks, unscales, and updates or skips, with closures too;
    - ``scheduler.step()`` waits where all steps since its last one were skipped;
    - ``model.state_dict()`` holds FP32 values, and ``optimizer.state_dict()`` the session's state under ``"mezzo"``,
      which plain torch ignores: a program's own checkpoints go on bit for bit;
    - ``AveragedModel.update_parameters(model)`` averages FP32 values;
    - ``copy.deepcopy(model)`` and what ``torch.save(model)`` writes are plain FP32 models, and optimizers
      that are copied or saved with them update these.

    Code of the program's own that reads or writes ``.grad`` between ``backward`` and ``step`` sees it with the scale;
    ``amp.unscale_()`` before it. So do hooks of parameters and of tensors between them and the loss.

    Args:
        models: The model, or a list of models. Under O1 it may be wrapped by DistributedDataParallel or compiled
            already; under O2 and O3 it is attached first, and wrapped then.
        optimizers: The optimizer, or a list of them.
        policy: A :class:`Policy`, its text, or the path of a policy file; ``"O1"`` when omitted.
        max_grad_norm: As for :class:`MixedPrecision`, for loops that do not clip by themselves.
        hold_schedulers: Whether schedulers wait.
        on_overflow: As for :class:`MixedPrecision`.
        restore_buffers: As for :class:`MixedPrecision`.

    Returns:
        The session, whose own calls work as well: ``amp.stats()``, ``amp.unscale_()``, ``amp.add(optimizer)``.

    Raises:
        StateError: A session is attached already.
        MezzoError: As :class:`MixedPrecision`. Whatever is raised, nothing was changed.

    **Cost**: that of the session, and Python for each node of the graph that a backward pass goes through, less than
    0.5 µs. ``hold_schedulers`` costs one host sync in ``scheduler.step()``; ``optimizer.state_dict()`` one as well.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.attach(model, optimizer, "O2,dtype=bfloat16")
        >>> loss = model(torch.ones(4, 8)).square().mean()
        >>> loss.backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> amp.detach()
    """
    raise_together(not_switches(hold_schedulers=hold_schedulers))
    if attached_now() is not None:
        raise StateError(
            "a session is attached already",
            why="a backward pass is scaled by one session, which takes all models and optimizers of the process",
            write="amp.add(optimizer), for another one over the same models; mezzo.attach([model, other], "
            "[optimizer, another], policy); or amp.detach() first",
        )
    return AttachedPrecision(
        models, optimizers, policy, max_grad_norm=max_grad_norm, on_overflow=on_overflow,
        restore_buffers=restore_buffers, hold_schedulers=hold_schedulers,
    )  # fmt: skip


def attached_now() -> AttachedPrecision | None:
    """Return the session that is attached, if there is one."""
    return _NOW[0]() if _NOW else None


class AttachedPrecision(MixedPrecision):
    """The session that :func:`attach` returns: a :class:`MixedPrecision` which the program's own calls drive.

    Args:
        models: See :func:`attach`.
        optimizers: See :func:`attach`.
        policy: See :func:`attach`.
        hold_schedulers: See :func:`attach`.
        **options: Of :class:`MixedPrecision`.

    Attributes:
        last_step: What the last step found and did; ``None`` before the first.
    """

    _masters = ShownMasters

    def __init__(self, models: Any, optimizers: Any, policy: Any, *, hold_schedulers: bool, **options: Any) -> None:
        self.last_step: Step | None = None
        self._schedules = Schedules() if hold_schedulers else None
        subjects, given = beginning.models_and_optimizers(models, optimizers)
        trained, _, policy = with_handles(subjects, policy)

        def begin(strays: list[nn.Module]) -> MixedPrecision:
            own = {id(param) for model in trained for param in model.parameters()}
            if any(own.isdisjoint(id(p) for group in each.param_groups for p in group["params"]) for each in given):
                strays = []  # an optimizer over other models is refused
            MixedPrecision.__init__(self, [*subjects, *strays], given, policy, **options)
            return self

        self._loop = _OwnLoop(trained, given, policy, begin, self._schedules)
        weakref.finalize(self, self._loop.bound.give_back)
        _NOW[:] = [weakref.ref(self)]

    def add(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """Take in optimizers that are made later, see :meth:`MixedPrecision.add`, and take their calls over as well."""
        known = list(self._core.optimizers)
        super().add(optimizers)
        self._loop.take([each for each in self._core.optimizers if each not in known])

    def step(
        self,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        closure: Callable[[], Any] | None = None,
        scheduler: Any = None,
    ) -> Step:
        """Check the gradients, update or skip: what ``optimizer.step()`` comes to; see :meth:`MixedPrecision.step`."""
        taken = super().step(optimizers, closure, scheduler)
        self.last_step = taken
        if self._schedules is not None:
            self._schedules.note(calls.chosen(optimizers, self._core.optimizers), taken.skipped)
        return taken

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the ``"mezzo"`` of an optimizer's state dict that was loaded before the session began.

        Only its counts of steps begin anew.

        Args:
            state: What that holds.

        Raises:
            StateError: It is another session's. Nothing was loaded.
        """
        resume(self._core, {**state, "stats": self._core.stats.state_dict()})

    def clean_steps(self, loss_id: int = 0) -> int:
        """Return how many steps the scale of a loss has not moved for, as a ``GradScaler`` saves them.

        **Cost**: a host sync.
        """
        return int(self._core.scalers[loss_id].state.clean_steps)

    @property
    def is_evaluating(self) -> bool:
        """Whether a step evaluates its closure now, and perhaps again: the session cannot end inside."""
        return self._core.evaluating is not None

    def close(self) -> None:
        """End the session: FP32 weights, optimizers as they were built, and every name bound to what it was before."""
        if attached_now() is self:
            _NOW.clear()
        self._loop.end()

    def detach(self) -> None:
        """End the session, as :meth:`close` does; whatever was bound meanwhile is the original object again."""
        self.close()


class _OwnLoop(Standing):
    """What stands while a program's own loop runs.

    Args:
        models: The models.
        optimizers: The optimizers.
        policy: The policy.
        begin: Begins the session, and is given what holds parameters of no model.
        schedules: What schedulers ask.

    Attributes:
        bound: What is bound in torch.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        policy: Policy,
        begin: Callable[[list[nn.Module]], MixedPrecision],
        schedules: Schedules | None,
    ) -> None:
        super().__init__(models, optimizers, policy, words=_WORDS, begin=begin)
        self.bound = Bound()
        amp = self.attached.amp
        self._passes, self._clipping = Passes(self.attached), Clipping(amp)
        try:
            wide = torch.float32 if policy.output_dtype is None else None
            self._called = CalledIn(models, amp.autocast, wide, self.attached.exact)
            self._undo.callback(self._called.leave)
            self._undo.callback(self.bound.give_back)
            self.bound.replace(torch.autograd, "_engine_run_backward", self._passes.run)
            self._clipping.bind(self.bound)
            if schedules is not None:
                schedules.bind(self.bound)
            self._carry(optimizers)
            self.bound.before_steps(self.check)
            for name in ("unscale_", "step"):
                self.bound.replace(GradScaler, name, self._call_scaler)
        except BaseException:
            self.end()
            raise

    def take(self, optimizers: list[Optimizer]) -> None:
        """Take over the calls of optimizers that have come later."""
        for optimizer in optimizers:
            self.attached.take_over(optimizer, self.step)
        self._carry(optimizers)

    def _carry(self, optimizers: list[Optimizer]) -> None:
        self._called.copies.share(optimizers)
        for optimizer in optimizers:
            for handle in carry(self.attached.core, optimizer):
                self._undo.callback(handle.remove)

    def _call_scaler(
        self, plain: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)`` where the session scales as well."""
        core = self.attached.core
        if self.unscales and not core.is_closed and optimizer in core.optimizers and scaler.is_enabled():
            raise StateError(
                "a GradScaler scales the loss besides the session",
                where=f"{type(scaler).__name__}.{plain.__name__}({type(optimizer).__name__})",
                why="the gradients carry both scales, and each would count the overflows of the other",
                write="GradScaler(enabled=False), with which the loop stays as it is: the policy has the scale",
            )
        return plain(scaler, optimizer, *args, **kwargs)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that is not attached, with gradients of parameters that are.

        It may be around one that is attached, whose step it calls, or inside of one, as SAM has it, in whose step.

        Args:
            optimizer: The one that is about to step.

        Raises:
            StateError: Its gradients carry the loss scale, or its weights are stored low.
        """
        core = self.attached.core
        if core.is_closed or core.evaluating is not None or not core.writes.is_done:
            return
        if any(each in core.optimizers for each in (optimizer, *_inside(optimizer))):
            return
        windows = [(group, group.window) for group in core.groups if group.window is not None]
        if windows and any(optimizer in _inside(each) for each in core.optimizers):
            raise StateError(
                "an optimizer inside of another one steps by itself",
                where=type(optimizer).__name__,
                why="no call that is taken over has led there: its gradients carry the loss scale, and are not checked",
                write="optimizer.step(closure), the closure with loss.backward()",
            )
        its = {id(param) for group in optimizer.param_groups for param in group["params"]}
        held = [
            core.weights.name_of(leaf)
            for group, window in windows
            for leaf in group.leaves()
            if id(leaf) in its and (window.carries_scale or leaf.dtype in LOW)
        ]
        if held:
            raise StateError(
                "an optimizer that is not attached updates parameters that are",
                where=f"{type(optimizer).__name__}.step(): {some_of(held)}",
                why="their gradients carry the loss scale, or the weights are stored low and have their masters",
                write="amp.add(optimizer), where it is made; or in the place of the one before it, amp.detach(), then "
                "the new\noptimizer and mezzo.attach(model, optimizer, policy)",
            )

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step with one optimizer, or skip: what ``optimizer.step()`` is meanwhile.

        Gradients that no scaled pass has made are taken as they are.

        Args:
            optimizer: The optimizer.
            closure: Evaluates the loss; where the optimizer evaluates it once, that is done before the step.

        Returns:
            What the closure returned first.
        """
        if closure is not None and not _evaluates_once(optimizer):
            return super().step(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self.attached.core.is_closed:  # inside of the closure, where another session may have begun
                optimizer.step()
                return loss
        kind = self.attached.gradients_of(optimizer)
        if kind == "foreign":
            self.attached.take_as_they_are(optimizer)
        if kind == "none" and self.attached.core.agreement is None:
            self.attached.plain_step(optimizer)()
            return loss
        with contextlib.suppress(NoGradient):  # on no rank
            self.attached.amp.step(optimizer)
        return loss


def _evaluates_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate a closure once, before it updates anything."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torch or as_one_pass(optimizer) is not None


def _inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one has as its attributes."""
    return [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
