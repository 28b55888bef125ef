"""``MixedPrecision``: models, optimizers and a policy, tied into a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mezzo.cast import Prepared, region
from mezzo.errors import StateError
from mezzo.optim.masters import MasterWeights
from mezzo.policy import Policy
from mezzo.session.backward import backward, differentiate
from mezzo.session.begin import begun
from mezzo.session.core import current
from mezzo.session.refusals import calls
from mezzo.session.scale import Step
from mezzo.session.settings import Settings
from mezzo.session.state import saved
from mezzo.session.state.stateful import Stateful
from mezzo.session.stats import Stats
from mezzo.session.step import take, take_together
from mezzo.step.consensus import Consensus

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MixedPrecision"]


class MixedPrecision(Settings):
    """Train models under a policy: five lines in a training loop.

    Every step checks all gradients before anything is written: one that is not finite skips the step, whatever the
    policy. Gradients are unscaled before they are clipped, so that no hyper-parameter changes its meaning.

    Args:
        models: The model, or a list of models. Converted in place where the policy stores them in low precision. One
            that is wrapped first (DistributedDataParallel) is what :func:`mezzo.prepare` returned, or its wrapper.
        optimizers: The optimizer, or a list of them, over parameters of these models.
        policy: A :class:`Policy`, its text, or the path of a policy file; of prepared models theirs, else ``"O1"``.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this; ``None`` does not clip.
        num_losses: How many losses have a scale of their own, chosen with ``loss_id``.
        device: Where the loss scales live; the first parameter's device when omitted.
        on_overflow: What a skipped step does besides: nothing (``"skip"``), say where the overflow began
            (``"explain"``: the batch is run again with checks) or raise a :class:`NumericsError` (``"raise"``).
        restore_buffers: Put batch norm's running statistics back after a skipped step.
        process_group: The ranks that step together, as one; all of ``torch.distributed``'s when omitted.
            Steps and what they log number ranks within it.
        stage_group: Ranks of these whose models are parts of one, as pipeline stages are: one norm clips them all.
        check_ranks: Compare the ranks' loss scales in each step; when omitted, whether ``MEZZO_CHECK_RANKS=1`` is set.

    Raises:
        PolicyError: A wrong policy or option, or an optimizer over parameters that are not the models'.
        UnsupportedError: The device or the model cannot honour the policy.
        StateError: The optimizer's state cannot be carried over exactly, or a model is prepared already.
            Whatever is raised, models and optimizers are as they were.
        DistributedError: Another rank has refused its part of the session, or is gone.

    **Cost**: per step one pass that reads the gradients (their norm is also the overflow check). torch's fused
    optimizers then unscale, clip and skip in their own kernel; for others one pass multiplies the gradients by clip
    coefficient / scale, left out where that is 1, and one host sync learns whether to skip. ``"explain"`` keeps the
    inputs and the models' output gradients alive until the step; both it and ``"raise"`` cost one host sync. On several
    ranks one exchange of a few numbers, two where parameters are sharded; no host sync but with ``check_ranks``. Of
    weights that are stored low and that no optimizer updates, FP32 values lie in the host's memory where rounding
    changes them: 4 bytes each.

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

    _masters: type[MasterWeights] = MasterWeights

    def __init__(
        self,
        models: nn.Module | Prepared | Iterable[nn.Module | Prepared],
        optimizers: Optimizer | Iterable[Optimizer],
        policy: Policy | str | os.PathLike[str] | None = None,
        *,
        max_grad_norm: float | None = None,
        num_losses: int = 1,
        device: torch.device | str | None = None,
        on_overflow: Literal["skip", "explain", "raise"] = "skip",
        restore_buffers: bool = False,
        process_group: ProcessGroup | None = None,
        stage_group: ProcessGroup | None = None,
        check_ranks: bool | None = None,
    ) -> None:
        self._core = begun(
            models,
            optimizers,
            policy,
            consensus=Consensus.of(process_group, stage_group),
            checks_ranks=os.environ.get("MEZZO_CHECK_RANKS") == "1" if check_ranks is None else check_ranks,
            max_grad_norm=max_grad_norm,
            num_losses=num_losses,
            device=device,
            on_overflow=on_overflow,
            restore_buffers=restore_buffers,
            masters=self._masters,
        )

    def __repr__(self) -> str:
        if self._core.is_closed:
            return "MixedPrecision(closed)"
        subjects = ", ".join(type(each).__name__ for each in (*self._core.models, *self._core.optimizers))
        return f"MixedPrecision({subjects}, policy={str(self.policy)!r})"

    def __reduce__(self) -> Any:
        raise StateError(
            "a session cannot be copied or pickled",
            why="another optimizer would have no hooks, and would never update its model",
            write="MixedPrecision(copy.deepcopy(model), new_optimizer, policy); or torch.save(amp.state_dict(), path)",
        )

    # The loop -----------------------------------------------------------------------------------------

    def autocast(self) -> region.autocast:
        """Return the region to run the forward pass and the loss in."""
        self._core.require_open("autocast")
        core, found = self._core, self._core.weights.region()
        if core.buffers is not None:
            found = region.autocast.of(dataclasses.replace(found.region, on_entry=core.buffers.remember))
        if core.consensus is not None:
            found = region.autocast.of(dataclasses.replace(found.region, on_error=core.consensus.lost_in_forward))
        return found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forward passes in here, and their backward passes, exchange no gradients between ranks.

        What accumulates so is reduced with the first backward pass of a forward pass outside: the last micro-batch of
        a step. It is ``no_sync()`` of all ``DistributedDataParallel`` wrappers of the models, whenever they were made,
        and ``set_requires_gradient_sync(False)`` of modules that FSDP2 shards. On one rank it does nothing.
        """
        self._core.require_open("no_sync")
        wrappers = self._core.weights.wrappers
        with contextlib.nullcontext() if wrappers is None else wrappers.no_sync():
            yield

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
        self._core.require_open("backward")
        calls.check_loss(loss)
        backward(self._core, loss, calls.chosen(optimizers, self._core.optimizers), loss_id, kwargs)

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
        self._core.require_open("grad")
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return differentiate(self._core, outputs, given, loss_id, create_graph=create_graph, **kwargs)

    def unscale_(self, optimizers: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Unscale the gradients now, so that they can be looked at or edited before ``step``.

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
        core = self._core
        core.require_open("unscale_")
        involved = core.open_groups(calls.chosen(optimizers, core.optimizers), "unscale_")
        core.look_for_edits(involved)
        with torch.no_grad():
            for group in involved:
                group.settle()
                group.wide.show()

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
                the loss and calls ``amp.backward(loss)``. If any evaluation overflows, or raises, all is put back. One
                optimizer at a time; a host sync for each evaluation, and a copy of weights and state meanwhile.
            scheduler: A learning-rate scheduler, or a callable, or a list of them, to step only if the weights
                were. Needs one host sync.

        Returns:
            What happened, as device tensors.

        Raises:
            StateError: No ``backward`` since the last step, no parameter has a gradient, or an earlier update was
                interrupted half-way.
            PolicyError: A hyper-parameter that is not finite; tensors on an accelerator are not looked at.
            UnsupportedError: Weights were cast to low precision since, and would train without masters; or inside
                ``torch.cuda.graph``, instead of :func:`mezzo.capture`.
            NumericsError: An overflow, with ``on_overflow="raise"``; nothing was updated, the scale has adapted.
            ScaleCollapsed: The loss scale stood at its floor for ``patience`` overflows, at most two steps ago.
            DistributedError: Another rank has raised in its step, or is gone. No rank has updated.
        """
        core = self._core
        core.require_open("step")
        if core.agreement is not None:
            return take_together(core, core.agreement, optimizers, closure, scheduler)
        return take(core, optimizers, closure, scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of models and masters, and forget unfinished accumulation windows."""
        self._core.writes.require_whole()
        current().join(self._core)
        self._core.clear(set_to_none)

    def master_params(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the tensors that the optimizers update: FP32 masters, or the parameters themselves.

        Where these are FP32, averages of weights are averages of these: ``AveragedModel(model)`` made before the
        session, and ``averaged.update_parameters(nn.ParameterList(amp.master_params()))`` for an optimizer over
        ``model.parameters()``. A master that is edited in place is rounded into its parameter by the next step, and
        before the model's state is saved or loaded; forward passes until then read the weight as it was.

        Args:
            optimizer: One of the session's optimizers; all when omitted.
        """
        return self._core.weights.updated(optimizer)

    def stats(self, loss_id: int = 0) -> Stats:
        """Return how many steps there were, how many were skipped, and how the loss scale moved.

        Args:
            loss_id: Whose scale.

        **Cost**: waits for the device.
        """
        return self._core.stats.stats(calls.check_loss_id(loss_id, len(self._core.scalers)))

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the models' and optimizers' own state dicts lack.

        The loss scales with their counters, the account of the steps, the masters, and in the middle of an
        accumulation window the gradients. Plain containers and tensors: :func:`mezzo.load` reads it
        back, and :func:`mezzo.save` writes it so that no half-written file is ever left.

        Raises:
            StateError: Gradients that ``DistributedDataParallel`` is still to reduce; or parameters without a name.

        **Cost**: a host sync, and a copy of the masters.
        """
        self._core.require_open("state_dict")
        return saved.save(self._core)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the models' and optimizers' own may be loaded before or after.

        The session that saved it may have had another policy, as long as both stand for the same FP32 weights:
        FP32, O1 and O2 continue each other. The states of ``torch.amp.GradScaler``, ``apex.amp`` and
        ``paddle.amp.GradScaler`` load too.

        Raises:
            StateError: Another model, or a policy that cannot continue this one (all differences listed), an
                unfinished accumulation window, or no session's state. Nothing was loaded.
        """
        self._core.require_open("load_state_dict", whole=False)
        if self._core.writes.is_half_way:
            self._core.clear()
        saved.load(self._core, state_dict)
        self._core.writes.drop()

    def stateful(self) -> Stateful:
        """Return model, optimizers and session as one value for ``torch.distributed.checkpoint``: :class:`Stateful`."""
        return Stateful(self._core)

    def close(self) -> None:
        """Undo the preparation: FP32 weights with the masters' values, and the optimizers as they were built.

        Weights and buffers that no optimizer updates get the values that they had before the session, or that were
        loaded since, with every bit, in shards too.

        What :func:`mezzo.prepare` has prepared stays so until its handle's ``remove()``, which gives it these values.
        """
        core = self._core
        if core.is_closed:
            return
        core.weights.take_edits()
        core.clear()
        core.weights.undo()
        if core.replay is not None:
            core.replay.remove()
        core.is_closed = True
