"""``attach``: mixed precision for a training loop that stays as it is; and the driver of all such loops.

When a backward pass ends, ``.grad`` is FP32, unscaled and checked. So clipping, noise, sums of squares and logs need
nothing of mezzo.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.backward import door, thread_owner
from mezzo.cast import Prepared
from mezzo.compiling import never_compiled
from mezzo.dispatch import is_transformed
from mezzo.errors import StateError, not_switches, raise_together, some_of
from mezzo.hooks import complete
from mezzo.interrupts import Members, uninterrupted
from mezzo.patches import patch
from mezzo.policy import Policy, PolicyLike, Schedule, ScheduleLike
from mezzo.session import state_tree
from mezzo.session.calls import Calls
from mezzo.session.change import require_now
from mezzo.session.closures import closure_of, evaluates_once, handing_on
from mezzo.session.grad_scaler import SessionScaler
from mezzo.session.passes import run_inside, run_pass, walk_of
from mezzo.session.refusals import Reaction, check_optimizers, chosen, listed, models_and_optimizers
from mezzo.session.session import MixedPrecision, engine_of, weights_of
from mezzo.session.stats import Step
from mezzo.session.writers import inner_optimizers
from mezzo.step.gradients import any_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: The key under which an optimizer's state dict has the session's state; plain torch ignores it.
CARRIED: Final = "mezzo"

_NOW: Final[Members[weakref.ref[AttachedPrecision]]] = Members()
_ATTACHING: Final = threading.RLock()


def attached_now() -> AttachedPrecision | None:
    """Return the session that is attached to the passes of this process, if there is one."""
    return next((session for reference in reversed(_NOW.now) if (session := reference()) is not None), None)


def attach(
    models: nn.Module | Prepared | Iterable[nn.Module | Prepared],
    optimizers: Optimizer | Iterable[Optimizer],
    policy: PolicyLike | None = None,
    *,
    max_grad_norm: float | None = None,
    hold_schedulers: bool = True,
    on_overflow: Reaction = "skip",
    process_group: ProcessGroup | None = None,
) -> AttachedPrecision:
    """Train in mixed precision with a loop that stays as it is, until ``amp.detach()``.

    - a call of a model, or of a part by itself, runs in the policy's region, and outputs are FP32. A method is a call
      where a tensor is given to it that is none of the model's own, and gradients are recorded: ``model.loss(x)``, not
      ``model.project()``, nor what an optimizer calls while it steps. ``predict(x)`` under ``no_grad`` runs as it is,
      and what it calls in turn is a call. An output that another one was made of is the model's own tensor of 16 bits,
      read in FP32;
    - a backward pass that reaches the optimizers' parameters is scaled. When it ends their gradients are FP32, unscaled
      and checked; other leaves, an input or a parameter that no attached optimizer has, get unscaled gradients, too;
    - ``optimizer.step()`` updates, or skips what was found, with closures too;
    - ``scheduler.step()`` waits where all steps since its last one were skipped;
    - ``model.state_dict()``, deep copies and pickles hold FP32 values, and ``AveragedModel`` reads these;
      ``optimizer.state_dict()`` has the session's state under ``"mezzo"``, which plain torch ignores: a program's own
      checkpoints go on bit for bit.

    Hooks of parameters and modules run inside the pass, and see gradients that carry the scale: one warning names them.
    Those that run once a gradient is accumulated see it without, and may step.

    Args:
        models: The model, or a list of models. Under O1 it may be wrapped by DistributedDataParallel or compiled
            already; under O2 and O3 it is attached first, and wrapped then.
        optimizers: The optimizer, or a list of them.
        policy: A :class:`Policy`, its text, a dtype, or the path of a file; O1 in the machine's format when omitted.
        max_grad_norm: As for :class:`MixedPrecision`, for loops that do not clip by themselves.
        hold_schedulers: Whether schedulers wait.
        on_overflow: As for :class:`MixedPrecision`.
        process_group: As for :class:`MixedPrecision`.

    Returns:
        The session, whose own calls work as well: ``amp.stats()``, ``amp.add(optimizer)``, ``amp.detach()``.

    Raises:
        StateError: A session is attached already.
        MezzoError: As :class:`MixedPrecision`. Whatever is raised, nothing was changed.

    **Cost**: that of the session; gradients are FP32, under O2 2 bytes a parameter more (16 with mezzo's AdamW), and
    read once more. Under a loss scale Python for each node of the graph that a backward pass goes through, less than
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
    with _ATTACHING:
        if attached_now() is not None:
            raise StateError(
                "a session is attached already",
                why="a backward pass is scaled by one session, which takes all models and optimizers of the process",
                write="amp.add(optimizer), for another one over the same models; mezzo.attach([model, other], "
                "[optimizer, another], policy); or amp.detach() first",
            )
        return AttachedPrecision(
            models,
            optimizers,
            policy,
            max_grad_norm=max_grad_norm,
            hold_schedulers=hold_schedulers,
            on_overflow=on_overflow,
            process_group=process_group,
        )


class AttachedPrecision(MixedPrecision):
    """A :class:`MixedPrecision` that a program's own calls drive; :func:`attach` returns one.

    A call style that has hooks of its own derives from it, and says what it leaves to those.

    Args:
        models: See :func:`attach`.
        optimizers: See there.
        policy: See there.
        hold_schedulers: See there.
        **options: Of :class:`MixedPrecision`.

    Attributes:
        last_step: What the last step found and did; ``None`` before the first.
    """

    _plain = True

    #: What is bound: every backward pass of the process, methods of the models, schedulers. Where backward passes are
    #: not, they go through ``engine.scale(loss)``, as those of a ``GradScaler``.
    _binds: ClassVar[tuple[str, ...]] = ("backward", "calls", "schedulers")

    def __init__(
        self, models: Any, optimizers: Any, policy: Any = None, *, hold_schedulers: bool = True, **options: Any
    ) -> None:
        subjects, optimizer_list = models_and_optimizers(models, optimizers)
        self.last_step: Step | None = None
        self._schedules: _Schedules | None = None
        self._known_by: weakref.ref[AttachedPrecision] | None = None
        self._autograd_engine: Any = None  # autograd's entry as the session has bound it
        self._calls: Calls | None = None
        self._schedule: _Parts | None = None
        super().__init__(subjects, optimizer_list, policy, **options)
        try:
            self._take_over(optimizer_list)
            self._bind_torchs(GradScaler, "unscale_", _refuse_scaler)
            self._bind_torchs(GradScaler, "step", _refuse_scaler)
            if "calls" in self._binds:
                self._calls = Calls(
                    self._weights.models, self.policy, self.autocast, is_apart=lambda: self._engine.writes.is_stepping
                )
                self._undo.callback(self._calls.close)
            if "backward" in self._binds:
                owner, name = door()
                self._bind_torchs(owner, name, _run)
                self._autograd_engine, self._engine.has_door = vars(owner)[name], True
            if "schedulers" in self._binds and hold_schedulers:
                self._schedules = _Schedules()
                for cls in dict.fromkeys(_kinds(LRScheduler)):
                    self._bind_torchs(cls, "step", _hold)
        except BaseException:
            self.close()
            raise
        if "backward" in self._binds:
            self._known_by = weakref.ref(self, _NOW.remove)
            _NOW.add(self._known_by)

    # What is bound ----------------------------------------------------------------------------------------

    def _bind_own(self, owner: nn.Module | Optimizer, name: str, value: Any) -> None:
        """Bind a name on a module or an optimizer."""
        self._undo.callback(patch(owner, name, value))

    # Optimizers -------------------------------------------------------------------------------------------

    def add(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """Add optimizers that were made later, over parameters of the models.

        Raises:
            StateError: Inside an accumulation window of theirs.
            MezzoError: As :class:`MixedPrecision`. Nothing was changed.
        """
        self._require_open("add")
        weights, engine = self._weights, self._engine
        _, new_optimizers = models_and_optimizers(weights.models, listed(optimizers))
        check_optimizers(weights.models, new_optimizers, self.policy)
        new_params = {id(param) for optimizer in new_optimizers for param in weights.leaves(optimizer)}
        engine.replan()
        overlapping = [window for window in engine.windows if not window.plan.ids.isdisjoint(new_params)]
        if any(window.now.passes and window.has_gradients() for window in overlapping):
            raise StateError(
                "optimizers were added inside an accumulation window",
                where=some_of([type(optimizer).__name__ for optimizer in new_optimizers]),
                write="amp.step() or amp.zero_grad() first",
            )
        weights.optimizers += new_optimizers
        try:
            engine.plan_anew()
        except BaseException:
            weights.optimizers[:] = [optimizer for optimizer in weights.optimizers if optimizer not in new_optimizers]
            raise
        weights.prepare_optimizers(new_optimizers)
        for undo in engine.watch(new_optimizers):
            self._undo.callback(undo)
        self._take_over(new_optimizers)

    def _take_over(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            self._engine.writes.steps_by[optimizer] = optimizer.step
            self._bind_step(optimizer, optimizer)
            for inner in inner_optimizers(optimizer):  # SAM's, which programs step by its second_step()
                if inner not in self._weights.optimizers and inner not in self._engine.writes.steps_by:
                    self._engine.writes.steps_by[inner] = inner.step
                    self._bind_step(inner, optimizer)
            self._carry_with(optimizer)
        self._engine.plan_anew()  # told of the steps that were bound

    def _carry_with(self, optimizer: Optimizer) -> None:
        """Register hooks by which an optimizer's state dict carries the session's state.

        The inner optimizers of a wrapper get them too: its state dict may be made of theirs alone.
        """
        inner = (
            inner_optimizer
            for inner_optimizer in inner_optimizers(optimizer)
            if inner_optimizer not in self._weights.optimizers
        )
        for wrapped in (optimizer, *inner):
            complete(wrapped)
            loaded: list[Any] = []

            def take_out(_: Optimizer, state_dict: dict[str, Any], loaded: list[Any] = loaded) -> None:
                loaded.append(state_dict.pop(CARRIED, None))

            def load(_: Optimizer, loaded: list[Any] = loaded) -> None:
                self.resume(loaded.pop())

            for handle in (
                wrapped.register_state_dict_post_hook(self._carry),
                wrapped.register_load_state_dict_pre_hook(take_out),
                wrapped.register_load_state_dict_post_hook(load),
            ):
                self._undo.callback(handle.remove)

    def _bind_step(self, optimizer: Optimizer, session_optimizer: Optimizer) -> None:
        plain = optimizer.step

        @functools.wraps(getattr(plain, "__func__", plain))
        def step(bound: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_closed:  # a scheduler made during the session has wrapped this function
                return plain(*args, **kwargs)
            result = self._own_step(bound, session_optimizer, *args, **kwargs)
            self.keep_to_schedule()
            return result

        self._bind_own(optimizer, "step", types.MethodType(step, optimizer))

    def _own_step(self, optimizer: Optimizer, session_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step with an optimizer, or skip: what ``optimizer.step()`` is while the session lives.

        Args:
            optimizer: The optimizer whose ``step`` was called.
            session_optimizer: The session's optimizer: this one, or the wrapper that this one is inside of.
            *args: Arguments of its ``step``, with a closure as torch's optimizers take it.
            **kwargs: The same, by name.

        Returns:
            The first result of the closure; without a closure that of the step, ``None`` if it was skipped.
        """
        engine, closure = self._engine, closure_of(args, kwargs)
        plain = engine.writes.steps_by[optimizer]
        if engine.writes.is_stepping or self._is_closed:  # in another optimizer's step; or a wrapper still calls this
            return plain(*args, **kwargs)
        if closure is not None and not evaluates_once(optimizer):
            losses: list[Any] = []

            def evaluate() -> Any:
                losses.append(closure())
                return losses[-1]

            with engine.writes.stepping_by(session_optimizer, handing_on(plain, args, kwargs)):
                self.step(session_optimizer, evaluate)
            return losses[0] if losses else None
        loss, step_call = None, handing_on(plain, args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            step_call = functools.partial(step_call, None)
        has_gradients = any_gradient(self._weights.leaves(session_optimizer))
        with engine.writes.stepping_by(optimizer, step_call) as returned:
            if not has_gradients and engine.ranks.size == 1:
                engine.writes.steps_by[optimizer]()
            else:
                self._require_engine([session_optimizer])
                self._note(
                    [session_optimizer],
                    engine.step(
                        [session_optimizer],
                        step_call=None if optimizer is session_optimizer else engine.writes.steps_by[optimizer],
                    ),
                )
        return loss if closure is not None else returned[0] if returned else None

    def step(
        self,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Step:
        """Check the gradients, update or skip: what ``optimizer.step()`` comes to; see :meth:`MixedPrecision.step`."""
        stepping = chosen(optimizers, self._weights.optimizers)
        if closure is None:
            self._require_engine(stepping)
        step = self._note(stepping, super().step(optimizers, closure))
        self.keep_to_schedule()
        return step

    def _require_engine(self, optimizers: list[Optimizer]) -> None:
        """Refuse gradients of passes that the session cannot have scaled.

        Raises:
            StateError: Another engine of autograd's stands where the session had put its own.
        """
        owner, name = door()
        if self._autograd_engine in (None, vars(owner)[name]) or self._engine.scale_now is None:
            return
        self._engine.replan()
        stepping_windows = [
            window for window in self._engine.windows if not set(window.plan.optimizers).isdisjoint(optimizers)
        ]
        if any(window.has_gradients() and not window.now.passes for window in stepping_windows):
            raise StateError(
                "backward passes do not go through the session any more",
                where=f"{door()[0].__qualname__}.{door()[1]} of torch.autograd",
                why="another engine was put there since attach(), and gradients without the loss scale flush to zero",
                write="amp.detach(), and mezzo.attach(model, optimizer, policy) once it stands",
            )

    def _note(self, optimizers: list[Optimizer], step: Step) -> Step:
        self.last_step = step
        if self._schedules is not None:
            self._schedules.note(optimizers, step.skipped)
        return step

    # Another policy -----------------------------------------------------------------------------------------

    @never_compiled
    def change(self, policy: PolicyLike) -> None:
        """Change the policy from the next forward pass on: see :meth:`MixedPrecision.change`.

        Gradients that are there stay: they are plain.
        """
        with uninterrupted():
            try:
                super().change(policy)
            finally:
                if self._calls is not None:  # hooks were put on the models anew, if it has raised too
                    self._calls.change(self.policy)

    def carry_out(self, schedule: ScheduleLike, change: Callable[[Policy], None] | None = None) -> None:
        """Change the policy as a schedule says, from now on: after the steps of its optimizers, and as states load.

        The steps that it counts are those of :meth:`stats`, which checkpoints have. While another optimizer's window is
        open a change waits for a later step. A state is loaded under the part that it was saved in, so that its loss
        scale goes on.

        Args:
            schedule: A :class:`mezzo.Schedule`, or its text. Its part for the next step is taken for begun.
            change: Called in place of :meth:`change`, by programs that answer what it raises.

        Raises:
            PolicyError: No schedule.

        Example:
            >>> import mezzo, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> schedule = mezzo.Schedule.of("bf16,nvfp4_module=0@0; bf16@2")
            >>> amp = mezzo.attach(model, optimizer, schedule.at(0))
            >>> amp.carry_out(schedule)
            >>> for _ in range(3):
            ...     print(amp.policy)
            ...     model(torch.ones(16, 16)).square().mean().backward()
            ...     optimizer.step()
            O1,dtype=bfloat16,nvfp4_module=0
            O1,dtype=bfloat16,nvfp4_module=0
            O1,dtype=bfloat16
            >>> amp.detach()
        """
        self._require_open("carry_out")
        parts = Schedule.of(schedule)
        self._schedule = _Parts(schedule=parts, change=change, now=parts.at(self._engine.account.begun))

    def keep_to_schedule(self) -> None:
        """Change to the part of the schedule that the next step has, unless something is under way."""
        parts = self._schedule
        if parts is not None and (policy := parts.schedule.at(self._engine.account.begun)) is not parts.now:
            try:
                require_now(self._engine)
            except StateError:
                return
            self._begin_part(policy)

    def _begin_part(self, policy: Policy) -> None:
        if self._schedule is not None:
            self._schedule.now = policy
            (self._schedule.change or self.change)(policy)

    # State ------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a session's state: see :meth:`MixedPrecision.load_state_dict`; under its own part of a schedule."""
        self._require_open("load_state_dict")
        parts, steps = self._schedule, state_tree.steps_of(state_dict)
        if parts is None or steps is None or self._engine.writes.broken:
            super().load_state_dict(state_dict)
            return
        state_tree.require_between_steps(self._engine, "load_state_dict()")
        earlier, policy = parts.now, parts.schedule.at(steps)
        if policy is not earlier:
            self._begin_part(policy)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            if policy is not earlier:
                self._begin_part(earlier)
            raise

    def _carry(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[CARRIED] = state_tree.save(self._engine, in_window=True)

    def resume(self, carried: Mapping[str, Any] | None) -> None:
        """Load the ``"mezzo"`` of an optimizer's state dict; ``None`` where it had none.

        Raises:
            StateError: It is another model's. Nothing was loaded.
        """
        if carried is not None:
            self.load_state_dict(carried)

    def clean_steps(self) -> int:
        """Return how many steps the scale has not moved for, as a ``GradScaler`` saves them; a host sync."""
        return int(self._engine.scaler.state.clean_steps)

    def close(self) -> None:
        """End the session: FP32 weights, optimizers as they were built, and every name bound to what it was before."""
        if self._known_by is not None:
            _NOW.remove(self._known_by)
        super().close()

    def detach(self) -> None:
        """End the session, as :meth:`close` does."""
        self.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Parts:
    """A schedule that a session carries out.

    Attributes:
        schedule: The schedule.
        change: What changes the policy, where that is not the session's own.
        now: The policy of the part that has begun, carried out or refused.
    """

    schedule: Schedule
    change: Callable[[Policy], None] | None
    now: Policy


# In place of functions of torch's -----------------------------------------------------------------------------


def _run(amp: AttachedPrecision, plain: Callable[..., Any], roots: Any, gradients: Any, *engine_arguments: Any) -> Any:
    """Run a backward pass: as the session's, if it reaches the session's parameters, or may by passes inside."""
    engine, (_, creates_graph, inputs, _, accumulates) = engine_of(amp), engine_arguments
    if (outer := thread_owner()) is not None:
        return run_inside(outer, engine, plain, roots, gradients, *engine_arguments)
    if not accumulates:
        return _differentiate(amp, plain, roots, gradients, *engine_arguments)
    walk = walk_of(roots, inputs)
    windows = engine.reached(walk)
    if not windows and (walk.is_anothers or not walk.runs_others):
        return plain(roots, gradients, *engine_arguments)

    def run(scaled: tuple[Any, ...]) -> Any:
        # Checkpoints are recomputed under the policy.
        return weights_of(amp).region().differentiate(plain, plain, scaled, gradients, *engine_arguments)

    return run_pass(engine, roots, run, windows, walk, inputs=inputs, creates_graph=creates_graph)


def _differentiate(
    amp: AttachedPrecision, plain: Callable[..., Any], roots: Any, gradients: Any, *engine_arguments: Any
) -> Any:
    """Return gradients as ``torch.autograd.grad`` does: with a scale on the way, where parameters' are asked for."""
    engine, inputs = engine_of(amp), walk_of((), engine_arguments[2]).leaves
    if engine.scale_now is None or is_transformed() or len(engine.foreign_leaves(inputs)) == len(inputs):
        return plain(roots, gradients, *engine_arguments)

    def run(scaled: Callable[[Tensor], Tensor]) -> Any:
        def inside() -> Any:
            return plain(
                roots,
                tuple(gradient if gradient is None else scaled(gradient) for gradient in gradients),
                *engine_arguments,
            )

        return weights_of(amp).region().differentiate(inside, inside)

    return tuple(engine.differentiated(roots, run))


def _refuse_scaler(
    amp: AttachedPrecision, plain: Callable[..., Any], scaler: GradScaler, /, *args: Any, **kwargs: Any
) -> Any:
    """Refuse that a GradScaler unscales or steps where the session does."""
    optimizer = args[0] if args else kwargs["optimizer"]
    is_known = optimizer in weights_of(amp).optimizers
    if is_known and scaler.is_enabled() and not isinstance(scaler, SessionScaler):
        raise StateError(
            "a GradScaler scales the loss besides the session",
            where=f"{type(scaler).__name__}, {type(optimizer).__name__}",
            why="each would unscale and check the gradients, and count the overflows of the other",
            write="GradScaler(enabled=False), with which the loop stays as it is: the policy has the scale",
        )
    return plain(scaler, *args, **kwargs)


# Schedulers -----------------------------------------------------------------------------------------------------


class _Here(threading.local):
    """What is under way in a thread.

    Attributes:
        runs: Whether a scheduler steps.
    """

    runs = False


class _Schedules:
    """Hold ``scheduler.step()`` where each step of its optimizer since the scheduler's last one was skipped.

    One that steps once an epoch waits so for an epoch of which every step was skipped, and for no other.
    """

    def __init__(self) -> None:
        self._total: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._taken: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._pending: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.here = _Here()

    def note(self, optimizers: Iterable[Optimizer], skipped: Tensor) -> None:
        """Record whether a step was skipped; a host sync in 64 steps of an optimizer without a scheduler, else none.

        Args:
            optimizers: Those that have stepped, or skipped.
            skipped: 0-d bool: which of both.
        """
        for optimizer in optimizers:
            self._total[optimizer] = self._total.get(optimizer, 0) + 1
            pending = self._pending.setdefault(optimizer, [])
            pending.append(skipped.detach())
            if len(pending) == 64:
                self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> int:
        pending = self._pending.pop(optimizer, [])
        taken = int((~torch.stack(pending)).sum()) if pending else 0
        self._taken[optimizer] = self._taken.get(optimizer, 0) + taken
        return self._taken[optimizer]

    def waits(self, scheduler: Any) -> bool:
        """Whether a scheduler that is about to step waits; its next call looks at the steps since this one alone."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer) or optimizer not in self._total:
            return False
        total, taken = self._seen.get(scheduler, (0, 0))
        now = self._seen[scheduler] = self._total[optimizer], self._count(optimizer)
        begins = getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) < 0
        return not begins and now[0] > total and now[1] == taken


def _kinds(cls: type) -> Iterator[type]:
    below: type
    for below in cls.__subclasses__():
        yield from _kinds(below)
    yield cls


def _hold(amp: AttachedPrecision, plain: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Step a scheduler unless it waits; a scheduler inside of another one steps whenever that one does."""
    schedules = amp._schedules
    if schedules is None or schedules.here.runs:
        return plain(scheduler, *args, **kwargs)
    if schedules.waits(scheduler):
        return None
    schedules.here.runs = True
    try:
        return plain(scheduler, *args, **kwargs)
    finally:
        schedules.here.runs = False
