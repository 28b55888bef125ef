"""``MixedPrecision``: models, optimizers and a policy, tied into a training loop."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mezzo.cast import region
from mezzo.errors import PolicyError, StateError, some_of
from mezzo.optim.hypers import changes_nothing
from mezzo.policy import Policy
from mezzo.scale.scaler import Scaler
from mezzo.session.buffers import NormBuffers
from mezzo.session.capture.recording import current
from mezzo.session.capture.refusals import refuse_host_arguments, refuse_raw_capture
from mezzo.session.closures import Before, Overflowed
from mezzo.session.refusals import (
    check_loss,
    check_loss_id,
    check_numbers,
    check_session,
    checked_schedulers,
    chosen,
    models_and_optimizers,
    only,
    overflowed,
    unknown_reaction,
    wrong_norm,
)
from mezzo.session.result import Step
from mezzo.session.state import saved as state
from mezzo.session.stats import Accounts, Stats
from mezzo.session.step import Finishing
from mezzo.session.update import Found, Update, update
from mezzo.session.verdict import Judged, check, together
from mezzo.session.weights.weights import Parts
from mezzo.session.window.edits import EditWatch
from mezzo.session.window.group import Cluster, clusters, regrouped
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import multiplications, norms
from mezzo.step.passes import judge
from mezzo.step.whole import Call, Piece, at_once

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow, Replay

__all__ = ["MixedPrecision"]

logger = logging.getLogger(__name__)


class MixedPrecision:
    """Train models under a policy: five lines in a training loop.

    Every step checks all gradients before anything is written: one that is not finite skips the step, whatever the
    policy. Gradients are unscaled before they are clipped, so that no hyper-parameter changes its meaning.

    Args:
        models: The model, or a list of models. Converted in place where the policy stores them in low precision.
        optimizers: The optimizer, or a list of them, over parameters of these models.
        policy: A :class:`Policy`, its text, or the path of a policy file.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this; ``None`` does not clip.
        num_losses: How many losses have a scale of their own, chosen with ``loss_id``.
        device: Where the loss scales live; the first parameter's device when omitted.
        on_overflow: What a skipped step does besides: nothing (``"skip"``), say where the overflow began
            (``"explain"``: the batch is run again with checks) or raise a :class:`NumericsError` (``"raise"``).
        restore_buffers: Put batch norm's running statistics back after a skipped step.

    Raises:
        PolicyError: A wrong policy or option, or an optimizer over parameters that are not the models'.
        UnsupportedError: The device or the model cannot honour the policy.
        StateError: The optimizer's state cannot be carried over exactly, or a model is prepared already.
            Whatever is raised, models and optimizers are as they were.

    **Cost**: per step one pass that reads the gradients (their norm is also the overflow check). torch's fused
    optimizers then unscale, clip and skip in their own kernel; for others one pass multiplies the gradients by clip
    coefficient / scale, left out where that is 1, and one host sync learns whether to skip. ``"explain"`` keeps the
    inputs and the models' output gradients alive until the step; ``"explain"`` and ``"raise"`` cost one host sync.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> amp.backward(loss)
        >>> step = amp.step()
        >>> amp.zero_grad()
        >>> bool(step.skipped)
        False

    References:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018.
    """

    def __init__(
        self,
        models: nn.Module | Iterable[nn.Module],
        optimizers: Optimizer | Iterable[Optimizer],
        policy: Policy | str | os.PathLike[str] = "O1",
        *,
        max_grad_norm: float | None = None,
        num_losses: int = 1,
        device: torch.device | str | None = None,
        on_overflow: Literal["skip", "explain", "raise"] = "skip",
        restore_buffers: bool = False,
    ) -> None:
        given = models_and_optimizers(models, optimizers)
        self._policy = Policy.of(policy)
        self._parts = Parts(*given, self.policy)
        self._models, self._optimizers = self._parts.models, self._parts.optimizers
        check_session(
            self._models,
            self._optimizers,
            self.policy,
            device,
            max_grad_norm=max_grad_norm,
            num_losses=num_losses,
            on_overflow=on_overflow,
        )
        self._max_grad_norm, self._on_overflow = max_grad_norm, on_overflow
        self._closed = False
        self._update = Update()
        self._evaluating: Optimizer | None = None  # with a closure
        self._undo: list[Callable[[], None]] = []  # of an evaluation, until its step counts
        first = next(self.master_params())
        self._scalers = [Scaler(self.policy.loss_scale, device or first.device, shared) for _ in range(num_losses)]
        self._buffers = NormBuffers(self._models) if restore_buffers else None
        self._edits = EditWatch()
        self._on_the_way: dict[int, Tensor] = {}  # whether grad() overflowed since the last step, by loss
        self._accounts = Accounts(
            self.policy.loss_scale, self._scale_tensors(), self._parts.name_of, self._parts.named_params
        )
        with self._parts.converted(self._before_step, self._update.leaving):
            self._clusters = clusters(self._optimizers, self._parts.masters)
            if self.policy.dtype != torch.float32:
                kind = "emulated in float32" if self.emulated else "native"
                logger.info("%s arithmetic on %s is %s", self.policy.dtype, first.device.type, kind)
            self._replay = self._watched() if on_overflow == "explain" else None

    def _watched(self) -> Replay:
        from mezzo.overflow import Replay

        return Replay(self._models, region=self._parts.region)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._update.is_done and self._evaluating is not optimizer:
            self._refuse_foreign_step(optimizer)
        self._update.entering()  # the last line: what follows is the optimizer's own code

    def _refuse_foreign_step(self, optimizer: Optimizer) -> None:
        cluster = next(c for c in self._clusters if optimizer in c.optimizers)
        if cluster.window is None and not cluster.has_gradients():
            return
        involved = (*cluster.params([optimizer]), *cluster.leaves([optimizer]))
        if changes_nothing(optimizer.param_groups, (p.grad for p in involved if p.grad is not None)):
            return  # torch.distributed.checkpoint lets an optimizer make its state so
        calls = 0 if cluster.window is None else cluster.window.micro_batches
        raise StateError(
            "optimizer.step() behind the session's back",
            where=f"{type(optimizer).__name__}, {calls or 'no'} amp.backward() call(s) since the last step",
            why="the gradients still carry the loss scale, and were neither checked nor clipped"
            if calls
            else "amp.step() took these gradients already, or loss.backward() made them without the session",
            write="amp.step()" if calls else "amp.backward(loss), then amp.step()",
        )

    def __deepcopy__(self, memo: Any) -> MixedPrecision:
        raise StateError(
            "a session cannot be copied",
            why="the copied optimizer would have no hooks, and would never update the copied model",
            write="copy.deepcopy(model), then MixedPrecision(copied_model, new_optimizer, policy)",
        )

    def __reduce__(self) -> Any:
        raise StateError("a session cannot be pickled", write="torch.save(amp.state_dict(), path)")

    # The loop -----------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy, for as long as the session is open."""
        return self._policy

    @property
    def max_grad_norm(self) -> float | None:
        """What the 2-norm of a step's gradients is clipped to; ``None`` does not clip. It may be set between steps."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        for problem in wrong_norm(value):
            raise problem
        self._max_grad_norm = value

    @property
    def on_overflow(self) -> Literal["skip", "explain", "raise"]:
        """What a skipped step does besides; ``"skip"`` and ``"raise"`` may be exchanged between steps."""
        return self._on_overflow

    @on_overflow.setter
    def on_overflow(self, value: Literal["skip", "explain", "raise"]) -> None:
        for problem in unknown_reaction(value):
            raise problem
        if "explain" in (value, self._on_overflow) and value != self._on_overflow:
            raise PolicyError(
                f'on_overflow is "{self._on_overflow}", and cannot become "{value}"',
                why="what explains an overflow watches the models from the start",
                write=f'MixedPrecision(…, on_overflow="{value}")',
            )
        self._on_overflow = value

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on this device."""
        return self._parts.region().emulated

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, 0-d float32 on the device; one for each loss where there are several."""
        states = ((scaler.state.scale, scaler.in_graph) for scaler in self._scalers)
        scales = [scale.clone() if in_graph else scale for scale, in_graph in states]
        return scales[0] if len(scales) == 1 else torch.stack(scales)

    def _scale_tensors(self) -> list[Tensor]:
        return [scaler.state.scale for scaler in self._scalers]

    def autocast(self) -> region.autocast:
        """Return the region to run the forward pass and the loss in."""
        self._require_open("autocast")
        plain = self._parts.region()
        if self._buffers is None:
            return plain
        return region.autocast.of(dataclasses.replace(plain.region, on_entry=self._buffers.remember))

    def backward(
        self,
        loss: Tensor,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        loss_id: int = 0,
        **kwargs: Any,
    ) -> None:
        """Scale a loss and run its backward pass; call it again to accumulate, or for another loss.

        Gradients of low-precision parameters that have masters are summed in FP32 from the second call on. Where
        gradients with another scale are there already, those are set aside, and ``step`` sums g₁/S₁ + g₂/S₂ in FP32.

        Args:
            loss: A floating scalar.
            optimizers: Whose parameters get gradients; all when omitted. The gradients of other parameters are
                not computed, as with ``inputs=`` of ``Tensor.backward``.
            loss_id: Which of the session's ``num_losses`` losses this is, and so which scale it gets.
            **kwargs: As ``Tensor.backward`` takes them: ``retain_graph``, ``create_graph``, ``inputs``.

        Raises:
            PolicyError: The loss is not a floating scalar, or no such ``loss_id`` or optimizer.
            StateError: The loss depends on no parameter, or the scale was written to since the last ``backward``.
            UnsupportedError: Low-precision parameters that were added or thawed since would train without masters.

        **Cost**: no host sync. A window with several scales holds 4 more bytes a parameter.
        """
        self._require_open("backward")
        check_loss(loss)
        scaler = self._moving_scaler(loss_id)
        wanted = chosen(optimizers, self._optimizers)
        self._parts.refuse_lost_bits()
        self._clusters = regrouped(self._clusters, self._optimizers, self._parts.masters)
        involved = [c for c in self._clusters if not set(c.optimizers).isdisjoint(wanted)]
        if len(wanted) < len(self._optimizers):
            kwargs.setdefault("inputs", _differentiable(involved, wanted))
        for cluster in involved:
            cluster.forget_cleared(self._parts.name_of)
        for cluster in involved:
            cluster.begin(scaler, loss_id, loss)
        self._parts.keep_casts()
        self._parts.region().run_backward(scaler.scaled(loss), **kwargs)
        for cluster in involved:
            cluster.end()
        if scaler.changes_gradients:
            self._edits.remember(leaf for cluster in involved for leaf in cluster.leaves())

    def grad(
        self,
        outputs: Tensor,
        inputs: Tensor | Iterable[Tensor],
        *,
        create_graph: bool = False,
        loss_id: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Differentiate as ``torch.autograd.grad`` does, scaled on the way and unscaled in FP32: for penalties.

        An overflow on this way counts as one of the next step's, so that the scale falls although the penalty made
        the loss itself infinite.

        Args:
            outputs: A floating scalar, or any tensor with ``grad_outputs=``.
            inputs: What to differentiate by.
            create_graph: Make the results differentiable.
            loss_id: Whose scale to use.
            **kwargs: As ``torch.autograd.grad`` takes them: ``grad_outputs``, ``retain_graph``, ``allow_unused``.

        Returns:
            One gradient for each input, at least in FP32 and without the scale.

        Example:
            >>> import mezzo, torch
            >>> model = torch.nn.Linear(3, 1)
            >>> amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,emulate=true")
            >>> x = torch.randn(5, 3, requires_grad=True)
            >>> with amp.autocast():
            ...     out = model(x)
            >>> (slope,) = amp.grad(out.float().sum(), x, create_graph=True)
            >>> with amp.autocast():
            ...     loss = out.float().mean() + (slope.norm(dim=1) - 1).square().mean()
            >>> amp.backward(loss)

        References:
            Gulrajani et al., *Improved Training of Wasserstein GANs*, NeurIPS 2017.
        """
        self._require_open("grad")
        scaler = self._moving_scaler(loss_id)
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        found = self._parts.region().run_grad(scaler.scaled(outputs), given, create_graph=create_graph, **kwargs)
        # Inputs that were not used have none, with allow_unused=True.
        wide = [g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in found]
        if not scaler.changes_gradients:
            return tuple(wide)
        inverse = scaler.state.inverse()
        unscaled = [g if g is None else g * inverse.to(g.device) for g in wide]
        if there := [g.detach() for g in unscaled if g is not None]:
            found_inf = judge(norms(there, inverse.device), None).found_inf
            before = self._on_the_way.get(loss_id)
            self._on_the_way[loss_id] = found_inf if before is None else before | found_inf
        return tuple(unscaled)

    def unscale_(self, optimizers: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Unscale the gradients now, for whoever wants to look at them or edit them before ``step``.

        They are FP32 then, also those of low-precision parameters: the ``.grad`` of a parameter and of its master is
        one tensor. Any edit on either side, in place or assigned, is honoured by ``step``, which checks and clips what
        it finds. After ``step`` and ``zero_grad``, low-precision parameters hold gradients of their own dtype again.

        Args:
            optimizers: Whose gradients; all when omitted.

        Raises:
            StateError: No ``backward`` since the last step; or a parameter and its master were given different
                gradients since an earlier ``unscale_``.

        **Cost**: two passes over the gradients, no host sync.
        """
        self._require_open("unscale_")
        involved = self._open_clusters(chosen(optimizers, self._optimizers), "unscale_")
        self._look_for_edits(involved)
        with torch.no_grad():
            for cluster in involved:
                cluster.settle()
                cluster.show(self._parts.name_of)

    @_disable_dynamo  # the check and the update decide on the host: torch.compile breaks the graph here
    @torch.no_grad()
    def step(
        self,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        closure: Callable[[], Any] | None = None,
        scheduler: Any = None,
    ) -> Step:
        """Check the gradients, unscale and clip them, update or skip, and adapt the loss scale.

        All optimizers of one call step together or not at all, and their gradients are clipped together. What can be
        refused is refused before anything is written. An interrupt (Ctrl-C) that comes once an update has begun goes on
        when it is finished. Only an optimizer of another library that is interrupted inside its own step, or that
        raises after others have stepped, leaves an update half-way: nothing can undo that, and every later call but
        ``load_state_dict`` and ``close`` says so. What an optimizer that raises first has written by then stays.

        Args:
            optimizers: Which optimizers step; all that have gradients when omitted.
            closure: For optimizers that evaluate the loss themselves (LBFGS, SAM): clears the gradients, computes
                the loss and calls ``amp.backward(loss)``. If any evaluation overflows, or raises, weights and the
                optimizer's state and options are put back. One optimizer at a time; one host sync for each
                evaluation, and a copy of weights and state while the step runs.
            scheduler: A learning-rate scheduler, or a callable, or a list of them, to step only if the weights
                were. Needs one host sync.

        Returns:
            What happened, as device tensors.

        Raises:
            StateError: No ``backward`` since the last step, no parameter has a gradient, or an earlier update was
                interrupted half-way.
            PolicyError: A hyper-parameter that is not finite. Tensors on an accelerator are not looked at, since the
                host would have to wait for them.
            UnsupportedError: Weights were cast to low precision since, and would train without masters; or inside
                ``torch.cuda.graph``, instead of :func:`mezzo.capture`.
            NumericsError: An overflow, with ``on_overflow="raise"``; nothing was updated, the scale has adapted.
            ScaleCollapsed: The loss scale stood at its floor for ``patience`` overflows, at most two steps ago.
        """
        self._require_open("step")
        if current() is not None:
            refuse_host_arguments(closure, scheduler)
        else:
            refuse_raw_capture(self._device)
        self._accounts.check()
        schedulers = checked_schedulers(scheduler)
        wanted = chosen(optimizers, self._optimizers)
        try:
            return self._evaluated(closure, wanted, schedulers) if closure else self._stepped(wanted, schedulers)
        except BaseException as error:
            self._evaluating = None
            while self._undo:
                at_once(self._undo[0], self._undo.clear)
            self._update.complete(error)  # what has begun is finished before an interrupt goes on
            self._give_back()
            raise

    @torch.no_grad()
    def _give_back(self) -> None:
        """Let users see, and clear, the gradients of windows that a step has left open."""
        for cluster in self._clusters:
            if cluster.window is not None:
                cluster.give_back()

    def _stepped(self, optimizers: list[Optimizer], schedulers: list[Callable[[], Any]]) -> Step:
        """Check, and then update or skip, as one piece of work that is done whole."""
        involved = self._open_clusters(optimizers, "step")
        stepping = [o for cluster in involved for o in cluster.optimizers if o in optimizers]
        alone = {o for cluster in involved if len(cluster.optimizers) == 1 for o in cluster.optimizers}
        check_numbers(stepping)
        self._look_for_edits(involved)
        judged = check(involved, optimizers, self._device, self.max_grad_norm)
        self._parts.refuse_low_gradients(judged.dtypes)
        judged = judged if (run := current()) is None else run.seen(judged)
        found = Found(judged.verdict.found_inf)
        pieces = update(self._update, judged, stepping, alone, found, self._parts.masters)
        return self._finished(judged, involved, found, schedulers, pieces)

    def _look_for_edits(self, involved: list[Cluster]) -> None:
        """Take note of cleared gradients, and say it where code that writes to scaled ones may have meant to clip."""
        for cluster in involved:
            cluster.forget_cleared(self._parts.name_of)
        carried = (cluster.window.carried for cluster in involved if cluster.window is not None)
        carrying = any(each is not None and not each.is_one for each in carried)
        self._edits.look(carrying=carrying and self.max_grad_norm is None)

    def _located(self, replay: Replay, judged: Judged) -> Overflow | Changed | None:
        """Run the step's batches again, and say where the overflow began."""
        with torch.enable_grad():
            return replay.locate(judged.shares[-1].scale)

    def _evaluated(
        self, closure: Callable[[], Any], optimizers: list[Optimizer], schedulers: list[Callable[[], Any]]
    ) -> Step:
        """Let one optimizer evaluate the loss itself, each evaluation checked, unscaled and clipped."""
        optimizer = only(optimizers)
        (cluster,) = (c for c in self._clusters if optimizer in c.optimizers)
        check_numbers([optimizer])
        masters = self._parts.masters.get(id(optimizer))
        evaluations: list[Judged] = []
        found: list[Found] = []

        @torch.no_grad()
        def unscale() -> None:
            if cluster.window is None:
                raise StateError("the closure computed no gradient", write="amp.backward(loss) in the closure")
            self._look_for_edits([cluster])
            judged = check([cluster], [optimizer], self._device, self.max_grad_norm)
            evaluations.append(judged)
            self._parts.refuse_low_gradients(judged.dtypes)
            if not judged.verdict.is_one:
                at_once(*multiplications(judged.gradients, judged.verdict.multiplier))
            cluster.close()
            self._parts.forget_casts()  # the optimizer is about to move the weights, through .data it may be
            found.append(Found(judged.verdict.found_inf))
            if found[-1]:
                raise Overflowed

        def evaluate() -> Any:
            if masters is not None:
                masters.round_to_params()  # the optimizer may have moved them since the last evaluation
                cluster.give_back()  # for closures that clear the model's gradients, and not the optimizer's
            with torch.enable_grad():  # as torch's own optimizers do, and others may not
                loss = closure()
            unscale()
            return loss

        if masters is not None:
            masters.take_edits()
        before = Before(optimizer, cluster.params([optimizer]))

        def rounded(*, back: bool = False) -> list[Call]:
            if back:
                before.restore()
            if masters is not None:
                masters.round_to_params()
            return []

        def undo() -> None:
            rounded(back=True)
            _abandon([cluster])

        self._undo.append(undo)  # for whatever is raised before the step counts
        self._evaluating = optimizer
        try:
            if cluster.window is not None:
                unscale()
            optimizer.step(evaluate)
        except Overflowed:
            pass
        if not evaluations:
            what = f"{type(optimizer).__name__}.step() did not evaluate the closure"
            raise StateError(what, write="amp.backward(loss), then amp.step() without closure=")
        self._evaluating = None
        end = partial(rounded, back=bool(found[-1]))
        return self._finished(together(evaluations), [cluster], found[-1], schedulers, [end])

    def _finished(
        self,
        judged: Judged,
        involved: list[Cluster],
        found: Found,
        schedulers: list[Callable[[], Any]],
        pieces: list[Piece],
    ) -> Step:
        """Do some pieces of work and all that ends a step, as one piece of work that is done whole."""
        # The host asks about the overflow only where it has to act on the answer.
        overflow = self._located(self._replay, judged) if self._replay is not None and found else None
        finishing = Finishing(self, judged, involved)
        all_of_it = [*pieces, *finishing.pieces(found, schedulers)]
        self._update.begin(all_of_it, partial(_abandon, involved), self._undo.clear)
        self._update.run()
        step = finishing.step(overflow)
        if self.on_overflow == "raise" and found:
            raise overflowed(judged, self._parts.name_of)
        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of models and masters, and forget unfinished accumulation windows."""
        self._update.require_whole()
        if (run := current()) is not None:
            run.join(self)
        self._clear(set_to_none)

    def _clear(self, set_to_none: bool = True) -> None:
        self._parts.zero_grad(set_to_none)
        if self._buffers is not None and any(cluster.window for cluster in self._clusters):
            self._buffers.forget()
        self._forget_passes()
        for cluster in self._clusters:
            cluster.forget()
        self._on_the_way.clear()

    def _forget_passes(self) -> None:
        """Let go of what forward passes left behind: casts of weights, and what a replay would need."""
        self._parts.forget_casts()
        if self._replay is not None:
            self._replay.clear()

    def master_params(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the tensors that the optimizers update: FP32 masters, or the parameters themselves.

        Where these are FP32, averages of weights are averages of these: ``AveragedModel(model)`` made before the
        session, and ``averaged.update_parameters(nn.ParameterList(amp.master_params()))`` for an optimizer over
        ``model.parameters()``. A master that is edited in place is rounded into its parameter by the next step, and
        before the model's state is saved or loaded; forward passes until then read the weight as it was.

        Args:
            optimizer: One of the session's optimizers; all when omitted.
        """
        return self._parts.master_params(optimizer)

    def stats(self, loss_id: int = 0) -> Stats:
        """Return how many steps there were, how many were skipped, and how the loss scale moved.

        Args:
            loss_id: Whose scale.

        **Cost**: waits for the device.
        """
        self._scaler(loss_id)
        return self._accounts.stats(loss_id)

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the models' and optimizers' own state dicts lack.

        The loss scales with their counters, the account of the steps, the masters, and in the middle of an
        accumulation window the gradients. Plain containers and tensors: :func:`mezzo.load` reads it
        back, and :func:`mezzo.save` writes it so that no half-written file is ever left.

        **Cost**: a host sync, and a copy of the masters.
        """
        self._require_open("state_dict")
        return state.saved(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the models' and optimizers' own may be loaded before or after.

        The session that saved it may have had another policy, as long as both stand for the same FP32 weights:
        FP32, O1 and O2 continue each other. The state of a ``torch.amp.GradScaler`` and that of ``apex.amp`` load too.

        Raises:
            StateError: Another model, or a policy that cannot continue this one (all differences listed), an
                unfinished accumulation window, or no session's state. Nothing was loaded.
        """
        self._require_open("load_state_dict", whole=False)
        if self._update.is_half_way:
            self._clear()
        state.load(self, state_dict)
        self._update.drop()

    def _named_masters(self) -> dict[str, nn.Parameter]:
        return self._parts.named_masters()

    # Which optimizers, which loss ----------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._scalers[0].state.scale.device

    def _scaler(self, loss_id: int) -> Scaler:
        check_loss_id(loss_id, len(self._scalers))
        return self._scalers[loss_id]

    def _moving_scaler(self, loss_id: int) -> Scaler:
        """Return the scaler whose scale gradients are about to carry, in memory that stays as it is."""
        scaler = self._scaler(loss_id)
        if current() is None:
            scaler.leave()
        return scaler

    def _open_clusters(self, optimizers: list[Optimizer], call: str) -> list[Cluster]:
        """Return the clusters of some optimizers that have gradients to step with."""
        wanted = set(optimizers)
        found = [c for c in self._clusters if c.window is not None and not wanted.isdisjoint(c.optimizers)]
        if not found:
            near = [o for c in self._clusters if not wanted.isdisjoint(c.optimizers) for o in c.optimizers]
            others = some_of([type(o).__name__ for o in near if o not in wanted])
            raise StateError(
                f"{call}() before backward()",
                why=f"it shares parameters with {others}: step both in one call, or each after its own backward()"
                if others
                else "",
                write=f"amp.backward(loss), then amp.{call}()",
            )
        return found

    def close(self) -> None:
        """Undo the preparation: FP32 weights with the masters' values, and the optimizers as they were built."""
        if self._closed:
            return
        self._parts.take_edits()
        self._clear()
        self._parts.undo()
        if self._replay is not None:
            self._replay.remove()
        self._closed = True

    def _require_open(self, call: str, *, whole: bool = True) -> None:
        if whole:
            self._update.require_whole()
        if self._closed:
            raise StateError(f"{call}() after close()", write="a new MixedPrecision(model, optimizer, policy)")
        if (run := current()) is not None:
            run.join(self)


def _abandon(involved: list[Cluster]) -> None:
    """End windows whose gradients are not the scaled ones any more."""
    for cluster in involved:
        cluster.gather()  # what a closure left behind is then known as left over, masters or not
        cluster.close()
        cluster.give_back()  # where users see it, and clear it


def _differentiable(involved: list[Cluster], optimizers: list[Optimizer]) -> list[Tensor]:
    """Return the parameters that some optimizers' backward pass is for."""
    leaves = [leaf for cluster in involved for leaf in cluster.leaves(optimizers)]
    if not leaves:
        raise StateError(
            "these optimizers update no parameter that requires a gradient",
            where=some_of([type(optimizer).__name__ for optimizer in optimizers]),
            write="requires_grad_(True) on what they train, or amp.backward(loss) for all optimizers",
        )
    return leaves
