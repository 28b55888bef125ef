"""The engine: GradScaler's four verbs over one loss scale. Every call style is an adapter over them.

``scale`` a loss, whose backward pass opens windows; ``unscale_`` their gradients; ``step``: judge them once, then
update or skip; ``update`` the scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo import sharded
from mezzo.dispatch import DisableTorchFunctionSubclass, is_batch_of_gradients
from mezzo.distributed.exchange import Ranks, Wrappers
from mezzo.errors import StateError, UnsupportedError, message, some_of
from mezzo.hooks import with_accumulation_hooks, with_backward_hooks, with_tensor_hooks
from mezzo.interrupts import uninterrupted
from mezzo.optim.groups import changes_nothing
from mezzo.scale.device_state import Scaler
from mezzo.scale.state import inverse
from mezzo.session.inner import InnerScales
from mezzo.session.observers import StepObserver, context_observers
from mezzo.session.passes import SessionPass, Walk, entered, times
from mezzo.session.stats import Step, StepAccount, StepOutcome
from mezzo.session.step_plan import StepPlan, planned
from mezzo.session.weights import Weights
from mezzo.session.window import Window, carry_over
from mezzo.session.writers import OnePass, Writer, Writes, check_numbers
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import alike, any_gradient, clear_to_zeros, dense, norms
from mezzo.step.verdict import JudgedGradients, Verdict, judge_step_numbers, not_finite
from mezzo.tensors import foreach_norm, moved

#: How a loop with a ``GradScaler`` calls it.
_DEVICE: Final = attrgetter("device")
_DIVIDES: Final = attrgetter("divides")
_IS_OWN: Final = attrgetter("is_own")
SCALERS_ORDER: Final = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"


class Engine:
    """Scale, unscale, step, update.

    Args:
        weights: The models and optimizers.
        scaler: The loss scale.
        ranks: The ranks that step together.
        max_grad_norm: What the 2-norm of a step's gradients is clipped to; ``None`` clips nothing.
        plain: See below.

    Attributes:
        weights: The models and optimizers.
        writes: What updates the optimizers' parameters.
        ranks: The ranks that step together.
        scaler: The loss scale.
        account: The steps so far.
        windows: Gradients between a backward pass and a step, one window for optimizers that share parameters.
        observers: The observers of each pass and step.
        max_grad_norm: The norm that gradients are clipped to; it may be set between steps.
        plain: Whether gradients are FP32, unscaled and checked as soon as a backward pass ends: for loops of the user's
            own, which look at them by calls of their own.
        waits: Whether the scale moves in :meth:`update` alone, as a ``GradScaler``'s does; else a step moves it, once
            no other window waits with gradients of the same scale.
        is_captured: Whether calls are part of a step that is captured, or will be: see :mod:`mezzo.session.capture`.
        has_door: Whether all backward passes of the process go through the session, which sees those inside of others.
        inner_scales: The loss scales of gradients that losses are computed from.
        changes: How often the session's policy has changed.
        under_way: The backward passes that run now, weakly: autograd alone may hold one.
    """

    def __init__(
        self,
        weights: Weights,
        scaler: Scaler,
        ranks: Ranks,
        max_grad_norm: float | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.weights, self.writes = weights, Writes(weights)
        self.scaler, self.ranks, self.max_grad_norm, self.plain = scaler, ranks, max_grad_norm, plain
        self.device = weights.device = scaler.state.scale.device
        self.account = StepAccount(scaler.config, scaler.state.scale, weights.name_of, ranks)
        self.windows: list[Window] = []
        self.observers: list[StepObserver] = []
        self.waits = self.is_captured = self.has_door = False
        self.under_way: list[ref[SessionPass]] = []
        self._inner: Tensor | None = None  # whether gradients that a loss was computed from had overflowed
        self.inner_scales = InnerScales(shared, scaler.config.interval)
        self._is_told = self._has_warned = self._has_warned_of_modules = False
        self.changes = 0
        self.wrappers = Wrappers(ranks)
        self.plan_anew()

    # Grouping optimizers into windows -----------------------------------------------------------------

    def planned(self) -> StepPlan:
        """Return what the session is made of now, planned anew; nothing is changed."""
        return planned(
            self.weights,
            self.ranks,
            is_plain=self.plain,
            is_driven=self.plain or self.waits,
            is_wrapped=self.wrappers.are_there,
            num_hooks=self.writes.num_hooks,
        )

    def plan_anew(self) -> None:
        """Replace the plan and its windows, after something that the session is made of has changed.

        Optimizers that have come to share parameters have one window from then on; open ones of theirs are closed. The
        gradient of a parameter that goes into an open window is rescaled to the window's scale; of one that leaves a
        window to none.

        Raises:
            MezzoError: The session cannot train like this; the earlier plan stays.
        """
        plan, windows = self.planned(), list[Window]()
        old_leaves = [old.plan.leaves for old in self.windows]
        for part in plan.windows:
            overlapping = [old for old in self.windows if not set(old.plan.optimizers).isdisjoint(part.optimizers)]
            old_optimizers = {optimizer for old in overlapping for optimizer in old.plan.optimizers}
            has_joined = len(overlapping) > 1 or not old_optimizers.issuperset(part.optimizers)
            for old in overlapping if has_joined else ():
                if old.now.passes:  # its gradients carry another scale than those that join
                    old.close(old.now.found_inf)
            window = overlapping[0] if overlapping and overlapping[0] not in windows else Window(self.weights, part)
            if overlapping:
                window.now = overlapping[0].now
                window.adopt_plan(part)
            windows.append(window)
        if any(window.carried is not None for window in (*self.windows, *windows)):
            pairs = zip(self.windows, old_leaves, strict=True)
            old_carried = {leaf: old.carried for old, leaves in pairs for leaf in leaves}
            new_carried = {leaf: window.carried for window in windows for leaf in window.plan.leaves}
            for leaf in old_carried | new_carried:
                carry_over(leaf, old_carried.get(leaf), new_carried.get(leaf))
            for window in windows:
                window.now = window.now._replace(marks=window.marks())
        self.plan, self.windows, self.ranks.shards = plan, windows, plan.shards

    def replan(self, *, writes: bool = False) -> None:
        """Plan anew if something that the session is made of has changed; called once for each pass and each step.

        Args:
            writes: Whether a step is about to write, and not a pass to begin.
        """
        if not self.plan.is_current(self.weights.optimizers, is_wrapped=self.wrappers.are_there, writes=writes):
            self.plan_anew()

    def reached(self, walk: Walk) -> list[Window]:
        """Return the windows whose gradients a backward pass makes; all, where the graph does not show which.

        Hooks of modules there are warned of, once, if they see gradients that carry the scale.
        """
        self.replan()
        windows, reached_ids = list[Window](), set(map(id, walk.leaves))
        if self.plan.is_wrapped:
            reached_ids = self.wrappers.reduced_with(reached_ids)
        for window in self.windows:
            # Of what is gathered a graph shows no parameter.
            if self.plan.units or not window.plan.ids.isdisjoint(reached_ids):
                windows.append(window)
        if windows and walk.runs_hooks and self.scale_now is not None:
            self.warn_of_modules()
        return windows

    def foreign_leaves(self, leaves: Iterable[Any]) -> list[Any]:
        """Return the leaves of a graph that no optimizer of the session updates, nor a part of them."""
        ids, foreign = self.plan.ids, list[Any]()
        parts = sharded.parts_of(self.plan.units) if self.plan.units else {}
        for leaf in leaves:
            if id(leaf) not in ids and not (leaf in parts and id(parts[leaf]) in ids):
                foreign.append(leaf)
        return foreign

    def watch(self, optimizers: Collection[Optimizer]) -> Iterator[Callable[[], None]]:
        """Refuse steps of optimizers that bypass the engine; yield what ends that."""
        self.writes.num_hooks = 1
        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(self._before_step).remove

    def watch_models(self) -> Iterator[Callable[[], None]]:
        """Watch which wrappers reduce gradients over ranks; yield what ends that."""
        return self.wrappers.watch(self.weights.models)

    def no_sync(self) -> AbstractContextManager[None]:
        """Exchange no gradients between ranks in passes of forward passes in here."""
        return self.wrappers.no_sync(self.weights.models, self.plan.units)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.writes.is_stepping or optimizer not in self.weights.optimizers:  # whose hooks a wrapper may share
            return
        gradients = [leaf.grad for leaf in self.weights.leaves(optimizer) if leaf.grad is not None]
        # torch.distributed.checkpoint lets an optimizer make its state by a step that changes nothing.
        if gradients and not changes_nothing(optimizer.param_groups, gradients):
            raise StateError(
                "optimizer.step() behind the session's back",
                where=type(optimizer).__name__,
                why="its gradients may carry the loss scale, and were neither checked nor clipped",
                write="amp.step()",
            )

    # scale ------------------------------------------------------------------------------------------------

    @property
    def scale_now(self) -> Tensor | None:
        """What a loss is multiplied by now, 0-d float32; ``None`` where gradients carry no scale."""
        return self.scaler.state.scale if self.scaler.changes_gradients else None

    def next_scale(self) -> Tensor | None:
        """Return what the next loss is multiplied by, once the scale has moved on where a step has left that open."""
        if self.scaler.in_graph and not self.is_captured:
            self.scaler.leave()  # gradients keep their scale, whatever a replay of a captured step makes of its own
        if self._is_told and not self.waits:
            self.update()
        return self.scale_now

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; any pass that differentiates it is the session's."""
        entry = entered(self, loss, self.next_scale())
        scaled = self.scaler.scaled(entry)
        return scaled * 1 if scaled is entry else scaled

    def begin(
        self, windows: list[Window], scale: Tensor | None, foreign: Iterable[Tensor], *, is_first: bool
    ) -> list[Tensor]:
        """Make ready for gradients of a backward pass.

        Args:
            windows: Those whose parameters it reaches.
            scale: What its gradients carry, until :meth:`end` or :meth:`fail`.
            foreign: Further leaves that it reaches.
            is_first: Whether nothing of the pass has begun before.

        Returns:
            The leaves whose gradients are to lose the scale before they are accumulated: in a loop of the user's own
            hooks run then, which may step.
        """
        if is_first:
            if self.writes.broken:
                self.writes.require_whole()
            for observer in (*self.observers, *context_observers()):
                observer.begins(self, scale)
        seen, is_own, is_users = list[Window](), self.plain and scale is not None, self.plan.is_driven
        for window in windows:
            if is_own and with_accumulation_hooks(window.plan.leaves):
                seen.append(window)
            if not is_users:
                window.refuse_left()
                window.refuse_copies()
        if scale is not None and not self._has_warned:
            self._warn_of_hooks(windows if self.plain else [], foreign)
        memories = self.plan.memories if is_first else ()
        with uninterrupted():
            if memories and not any(window.has_gradients() for window in self.windows):
                for memory in memories:  # of passes whose gradients were cleared since
                    memory.forget()
            for window in windows:
                if is_users and window.now.passes:
                    window.forget_cleared()
                window.begin(None if window in seen else scale)
            for memory in self.plan.memories:
                memory.counts = True
        return [leaf for window in seen for leaf in window.plan.leaves if leaf.requires_grad] if seen else []

    def end(self, losses: Mapping[Window, list[Tensor]], *, has_failed: bool) -> None:
        """End a backward pass: its gradients get what the loop expects of them, or a failed pass is undone.

        Args:
            losses: What was differentiated, 0-d and detached, by the windows of :meth:`begin`.
            has_failed: Whether the pass has raised.
        """
        for memory in self.plan.memories:
            memory.counts = False
        if has_failed:
            for window in losses if self.plain else ():  # the gradients of earlier passes were rescaled for this one
                window.rescale(None, checks=True)
            return
        for window in losses:
            window.end(losses[window], unscales=self.plain)
        if self.plan.is_wrapped:
            self.wrappers.end_pass()
        self.inner_scales.num_calls = 0

    def _warn_of_hooks(self, windows: list[Window], foreign: Iterable[Tensor]) -> None:
        # A scalar may be a loss that is a leaf, whose hook runs a further pass from the scaled gradient: no warning.
        hooked = with_tensor_hooks([leaf for leaf in foreign if leaf.numel() > 1]) if foreign else []
        for window in windows:
            hooked += with_tensor_hooks(window.plan.leaves)
        if hooked:
            names = list(map(self.weights.name_of, hooked))
            self._has_warned = True
            text = message(
                "hooks of parameters see gradients that carry the loss scale",
                where=some_of(names),
                why="they run inside the backward pass, at whose end gradients are unscaled",
                write="the same after backward(); or a policy without a scale, dtype=bfloat16: "
                'Policy.O1("bfloat16"), or the text O1,dtype=bfloat16',
            )
            warnings.warn(text, stacklevel=4)

    def warn_of_modules(self) -> None:
        """Warn, once, of hooks of modules that run in a backward pass and see gradients with the scale."""
        if not self._has_warned_of_modules:
            self._has_warned_of_modules = True
            text = message(
                "hooks of modules see gradients that carry the loss scale",
                where=some_of([name for model in self.weights.models for name in with_backward_hooks(model)]),
                why="they run inside the backward pass; what is summed up of them moves with the scale",
                write="gradient / amp.loss_scale in the hook; or a policy without a scale, dtype=bfloat16: "
                'Policy.O1("bfloat16"), or the text O1,dtype=bfloat16',
            )
            warnings.warn(text, stacklevel=4)

    # unscale_ ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def unscale_(self, optimizers: Collection[Optimizer]) -> None:
        """Make the gradients of some optimizers FP32 and plain; whether they were finite is remembered.

        Raises:
            StateError: There are none.

        **Cost**: two passes over the gradients, no host sync.
        """
        windows = self._open(optimizers, "unscale_")
        self.warn_of_edits(windows)
        with uninterrupted():
            for window in windows:
                window.rescale(None, checks=True)

    def warn_of_edits(self, windows: list[Window]) -> None:
        """Warn, once, of gradients that were written in place while they carry the scale."""
        for window in windows:
            if self._has_warned or window.now.scale is None or not window.was_edited:
                continue
            self._has_warned = True
            clip = "MixedPrecision(…, max_grad_norm=…); or " if self.max_grad_norm is None else ""
            five_lines = "between amp.backward() and amp.step()", f"{clip}amp.unscale_()"
            scalers = "between scaler.scale(loss).backward() and scaler.step()", "scaler.unscale_(optimizer)"
            where, call = scalers if self.waits else five_lines
            text = message(
                "gradients were edited in place while they carry the loss scale",
                where=where,
                why="a norm to clip to, for instance, was compared with gradients that are that much larger",
                write=f"{call} before the edit",
            )
            warnings.warn(text, stacklevel=5)

    # step -------------------------------------------------------------------------------------------------

    def _open(self, optimizers: Collection[Optimizer], call: str) -> list[Window]:
        """Return the windows of these optimizers that hold gradients.

        Raises:
            StateError: None does; or they hold gradients of which nothing says whether they carry the scale.
        """
        self.replan(writes=call == "step")
        opened, has_begun = list[Window](), False
        for window in self.windows:
            if set(window.plan.optimizers).isdisjoint(optimizers):
                continue
            has_begun = has_begun or window.now.passes > 0
            is_open = window.now.passes or self.plain or self._takes_written(window, optimizers, call)
            if is_open and (call != "step" or any_gradient(window.plan.leaves)):
                opened.append(window)
        if not opened:
            cure = "amp.zero_grad() only after amp.step()" if has_begun else f"amp.backward(loss), then amp.{call}()"
            raise StateError(
                "no parameter has a gradient" if has_begun else f"{call}() before backward()",
                where=some_of([type(optimizer).__name__ for optimizer in optimizers]),
                why="every gradient is None: frozen, detached, or cleared since backward()" if has_begun else "",
                write=SCALERS_ORDER if self.waits else cure,
            )
        return opened

    def _takes_written(self, window: Window, optimizers: Collection[Optimizer], call: str) -> bool:
        """Whether a step takes gradients that the program itself has written, in a window that no pass has opened.

        Raises:
            StateError: Nothing says whether they carry the scale; or some are the last step's.
        """
        names = [] if self.waits else window.names_of_written(optimizers)
        if names and self.scale_now is not None and not window.now.has_made:
            raise window.unknown(f"{call}() before backward()", names)
        if names:
            window.refuse_left(optimizers)
        return bool(names)

    @torch.no_grad()
    def step(
        self,
        optimizers: Collection[Optimizer],
        step_call: Callable[..., Any] | None = None,
    ) -> Step:
        """Judge the gradients of some optimizers once; then update, or skip, all of them together.

        A signal that comes meanwhile waits until the writes are done.

        Args:
            optimizers: Those that step, as far as they have gradients.
            step_call: Called in place of the one optimizer's ``step``, and only if that is not skipped, so that a
                framework learns of it. One host sync.

        Raises:
            StateError: No gradient, or an earlier update that was ended half-way.
            MezzoError: A hyper-parameter that is not finite. Whatever is raised here, nothing was written.
            DistributedError: Another rank ended this step.
        """
        if self.device.type == "cuda":
            self.refuse_capture()
        self.account.check()
        with uninterrupted():
            if self.ranks.size == 1:
                step = self._step(optimizers, step_call)
            else:
                with self.errors_sent_to_ranks():
                    step = self._step(optimizers, step_call)
        return self.accounted(step)

    def accounted(self, step: Step) -> Step:
        """Warn if the account says so, show the step to observers, and return it."""
        if self.account.warning:
            self.account.warn()
        # Last of all: they may run passes of their own, and raise.
        for observer in (*self.observers, *context_observers()):
            observer.stepped(self, step)
        return step

    def _step(self, optimizers: Collection[Optimizer], step_call: Callable[..., Any] | None) -> Step:
        if self.writes.broken:
            self.writes.require_whole()
        windows, writers = self._open(optimizers, "step"), list[Writer]()
        if not self._has_warned:
            self.warn_of_edits(windows)
        for window in windows:
            writers += window.plan.writers_of(optimizers, host_decides=step_call is not None)
        for writer in writers:
            check_numbers(writer.optimizer)
        # An attribute of a parameter in halves costs thrice that of others unless no class is asked for its functions.
        with DisableTorchFunctionSubclass() if step_call is None and all(map(_IS_OWN, writers)) else nullcontext():
            judged, absent = self.judge(windows, writers)
            try:
                self.writes.write(writers, windows, judged, step_call)
            except BaseException as error:
                if not self.writes.broken:
                    self.ranks.fall_behind(error)
                raise
            return self.finish(windows, judged, absent)

    def refuse_capture(self) -> None:
        """Refuse a step that is captured in a graph of the user's own."""
        if self.device.type != "cuda" or self.is_captured:
            return
        with torch.cuda.device(self.device):  # torch asks the current device's stream
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise UnsupportedError(
                "amp.step() cannot be captured by torch.cuda.graph",
                where=f"the current stream of {self.device}",
                why="loss scales, hyper-parameters and the account of skipped steps live on between replays",
                write="mezzo.capture(train_step, amp), which makes the graph",
            )

    @contextmanager
    def errors_sent_to_ranks(self) -> Iterator[None]:
        """End the step of all ranks with an error that this rank has raised before they have agreed."""
        number = self.account.begun
        try:
            yield
        except Exception as error:
            if self.account.begun == number and not self.writes.broken:
                largest = [memory.window for memory in self.plan.memories]
                self.ranks.absent(error, self.device, step=number + 1, largest=largest)
            raise

    def judge(self, windows: list[Window], writers: Sequence[Writer]) -> tuple[JudgedGradients, Tensor | None]:
        """Judge the gradients that some writers are for, with all ranks that step together.

        Returns:
            The gradients with the verdict, and of several ranks whether one is absent.

        **Cost**: one pass that reads them, and one launch. No host sync.
        """
        if self.plan.units and sharded.has_unreduced(self.plan.units):
            raise StateError(
                "gradients wait for a backward pass that reduces them over ranks",
                why="this step would not see them, and the next would take them for its own",
                write="the last micro-batch of a step outside of amp.no_sync()",
            )
        # Gradients that stay for another optimizer of a window are unscaled, so that one window has one scale; and so
        # are those that a program looks at while its optimizer steps.
        is_plain, scale, optimizers = False, windows[0].now.scale, set[Optimizer]()
        leaves, losses, flags = list[Tensor](), list[Tensor](), list[Tensor]()
        for writer in writers:
            optimizers.add(writer.optimizer)
            is_plain = is_plain or (writer.exposes_gradients and not writer.waits)
        for window in windows:
            if not window.now.passes and not self.plain:
                self._takes_written(window, optimizers, "step")
            are_all = optimizers.issuperset(window.plan.optimizers)
            leaves += window.plan.leaves if are_all else window.plan.leaves_of(optimizers)
            is_plain = is_plain or window.now.scale is not scale or not are_all
        if is_plain:
            for window in windows:
                window.rescale(None)
            scale = windows[0].now.scale
        params, gradients = dense(leaves)
        if not params:
            raise StateError("no parameter has a gradient", write="amp.zero_grad() only after amp.step()")
        for window in windows:
            losses += window.now.losses
            flags += [] if window.now.found_inf is None else [window.now.found_inf]
            flags += [] if window.now.passes else window.skip_flags()
        if {*map(_DEVICE, (*losses, *flags))} - {self.device}:
            losses, flags = ([moved(value, self.device) for value in values] for values in (losses, flags))
        positions, is_own = alike(gradients), set(map(type, writers)) == {OnePass}
        sizes = norms(gradients, self.device, one_pass=is_own, groups=positions)
        if self.ranks.size > 1:
            sizes = self.ranks.norms(params, sizes)
        numbers: list[Tensor | float] = [] if scale is None else [scale]
        numbers += [] if self.max_grad_norm is None else [float(self.max_grad_norm)]
        inner, self._inner = [] if self._inner is None else [self._inner], None
        divides = any(map(_DIVIDES, writers))
        static = scale is not None, self.max_grad_norm is not None, divides, len(inner), len(losses)
        results = shared(judge_step_numbers, static, [sizes, *numbers, *inner, *losses, *flags])
        grad_norm, found_inf, multiplier, failed, *fused = results
        absent = None
        if self.ranks.size > 1:
            largest = [memory.window for memory in self.plan.memories]
            number = self.account.begun + 1
            found_inf, failed, absent = self.ranks.agree(found_inf, failed, step=number, largest=largest)
            fused = []
        verdict = Verdict(
            norms=sizes,
            grad_norm=grad_norm,
            found_inf=found_inf,
            multiplier=multiplier,
            is_one=not numbers,
            as_fused=tuple(fused),
        )
        judged = JudgedGradients(
            params=params,
            gradients=gradients,
            scale=scale,
            verdict=verdict,
            is_clipped=self.max_grad_norm is not None,
            is_alike=len(positions) == 1,
            losses=losses,
            failed=failed,
        )
        for observer in (*self.observers, *context_observers()):
            observer.judged(self, judged)
        return judged, absent

    def finish(self, windows: list[Window], judged: JudgedGradients, absent: Tensor | None) -> Step:
        """End a step whose writes are done: adapt the scale, and account for it."""
        verdict, now = judged.verdict, self.scaler.state.scale
        self.inner_scales.num_calls = 0
        made_with = windows[0].now.made_with
        for window in windows:
            window.close(verdict.found_inf if self.plan.is_driven else None)
        for memory in self.plan.memories:
            memory.move(verdict.found_inf)
        self.scaler.update(verdict.found_inf, hold=judged.failed)
        self._is_told, waits = True, self.waits
        for window in self.windows:
            waits = waits or (window.now.passes > 0 and window.now.made_with is now)
        if not waits:
            self._is_told = False
            self.scaler.advance()
        state = self.scaler.state
        outcome = StepOutcome(
            skipped=verdict.found_inf,
            failed=judged.failed,
            scale=state.scale,
            floor_overflows=state.floor_overflows,
            absent=absent,
            norms=verdict.norms,
            params=judged.params,
        )
        self.account.note(outcome)
        if self.plan.units:
            sharded.reshard(self.plan.units)
        return Step(
            skipped=verdict.found_inf,
            scale=now if made_with is None else made_with,
            next_scale=state.scale,
            grad_norm=verdict.grad_norm,
        )

    # update -----------------------------------------------------------------------------------------------

    def count_found_inf(self, found_inf: Tensor) -> None:
        """Count gradients that were unscaled for a step, which none has taken: see :meth:`Scaler.update`."""
        self.scaler.update(found_inf)
        self._is_told = True

    def update(self) -> None:
        """Move the scale on, once for all that was found since the last time. No host sync."""
        if self._is_told:
            with uninterrupted():
                self._is_told = False
                self.scaler.advance()

    # Besides ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clear(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and forget unfinished windows."""
        with uninterrupted():
            for optimizer in self.weights.optimizers:
                optimizer.zero_grad(set_to_none)
            params = [param for model in self.weights.models for param in model.parameters()]
            if set_to_none:
                for param in params:
                    param.grad = None
            else:
                clear_to_zeros(params)
            for window in self.windows:
                window.clear(to_zeros=not set_to_none)
            for memory in self.plan.memories:
                memory.forget()
            self._inner = None
            self.inner_scales.num_calls = 0
            sharded.forget_gradients(self.plan.units)

    def grad(self, outputs: Tensor, inputs: list[Tensor], **options: Any) -> tuple[Any, ...]:
        """Differentiate scaled outputs, and return unscaled gradients, at least in FP32."""

        def run(scaled: Callable[[Tensor], Tensor]) -> Iterable[Any]:
            return self.weights.region().run_grad(scaled(outputs), inputs, **options)

        gradients = self.differentiated([outputs], run)
        input_ids = set(map(id, inputs))
        for window in self.windows:
            if not window.plan.ids.isdisjoint(input_ids):
                window.now = window.now._replace(has_made=True)
        return tuple(g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients)

    def differentiated(
        self, outputs: Iterable[Any], run: Callable[[Callable[[Tensor], Tensor]], Iterable[Any]]
    ) -> list[Any]:
        """Return the gradients of a pass that returns them, without the pass's own scale.

        An overflow on the way skips the next step, of which the loss is made of these gradients: the scale of this
        call falls, and the loss's stays.

        Args:
            outputs: What is differentiated, as far as that is tensors.
            run: Runs the pass; it is given what multiplies by the scale.
        """
        scale = self.next_scale()
        adapts = scale is not None and self.scaler.config.mode == "dynamic"
        if scale is not None and adapts:
            scale = self.inner_scales.next(scale)
        for observer in (*self.observers, *context_observers()):
            observer.begins(self, scale)
        with SessionPass(self, scale):
            gradients = list(run(partial(times, scale)))
        if scale is None:
            return gradients
        back = inverse(scale)
        gradients = [g if g is None else times(back, g).to(g.dtype) for g in gradients]
        dense_gradients = [
            sharded.local(g.detach()) for g in gradients if g is not None and not is_batch_of_gradients(g)
        ]
        if dense_gradients:
            here = [sharded.local(output.detach()) for output in outputs if isinstance(output, Tensor)]
            self._note_inner(here, dense_gradients, adapts=adapts)
        return gradients

    def _note_inner(self, outputs: list[Tensor], gradients: list[Tensor], *, adapts: bool) -> None:
        """Record whether a loss is computed from gradients that are not finite, by their largest values.

        A norm of finite ones may be infinite.
        """
        largest = foreach_norm([*gradients, *outputs], float("inf"))
        sizes = torch.stack([moved(size, self.device, torch.float32) for size in largest])
        results = sizes[: len(gradients)].sum()
        if adapts:
            self.inner_scales.record(sizes[len(gradients) :].sum(), results)
        flag = not_finite(results)
        self._inner = flag if self._inner is None else self._inner | flag
