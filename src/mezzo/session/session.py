"""``MixedPrecision``: models, optimizers and a policy, tied into a training loop by five lines."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast import Prepared, region
from mezzo.compiling import compiled_inside_alone, never_compiled
from mezzo.distributed.exchange import Ranks
from mezzo.errors import PolicyError, StateError, raise_together
from mezzo.patches import Binding
from mezzo.policy import Policy, PolicyLike
from mezzo.scale.device_state import Scaler
from mezzo.session import state_tree
from mezzo.session.change import change
from mezzo.session.closures import evaluated
from mezzo.session.engine import Engine
from mezzo.session.observers import reaction
from mezzo.session.passes import retaining, run_pass, walk_of
from mezzo.session.refusals import (
    Reaction,
    check_loss,
    check_session,
    chosen,
    models_and_optimizers,
    reaction_of,
    wrong_options,
)
from mezzo.session.state_tree import Stateful
from mezzo.session.stats import Stats, Step
from mezzo.session.weights import Weights, handles_of
from mezzo.session.writers import refuse_unknown_steps
from mezzo.step.executors.choose import shared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MixedPrecision:
    """Train models under a policy: five lines in a training loop.

    Every step checks all gradients before anything is written: one that is not finite, or a loss that is not, skips
    the step, whatever the policy. Gradients are unscaled before they are clipped, so that no hyper-parameter changes
    its meaning. A scale is visible in ``.grad`` between ``backward`` and ``step``, and nowhere else.

    Args:
        models: The model, or a list of models. Converted in place where the policy stores them in low precision. One
            that is wrapped first (DistributedDataParallel) is what :func:`mezzo.prepare` returned, or its wrapper.
        optimizers: The optimizer, or a list of them, over parameters of these models.
        policy: A :class:`Policy`, its text, a dtype, or the path of a file; that of prepared models, else O1 in the
            machine's fast format, when omitted.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this; ``None`` does not clip.
        on_overflow: What a skipped step does besides: nothing (``"skip"``), say where the overflow began
            (``"locate"``: the batch is run again with checks) or raise a :class:`NumericsError` (``"raise"``).
        process_group: The ranks that step together, as one; all of ``torch.distributed``'s when omitted.

    Raises:
        PolicyError: A wrong policy or option, or an optimizer over parameters that are not the models'.
        UnsupportedError: The device or the model cannot honour the policy.
        StateError: The optimizer's state cannot be carried over exactly, or a model is prepared already.
            Whatever is raised, models and optimizers are as they were.

    **Cost**: per step one pass that reads the gradients (their norm is also the overflow check). mezzo's and torch's
    fused optimizers then unscale, clip and skip in their own kernel; for others one pass multiplies the gradients by
    clip coefficient / scale, left out where that is 1, and one host sync learns whether to skip. ``"locate"`` keeps
    the inputs and the models' output gradients alive until the step; both it and ``"raise"`` cost one host sync. On
    several ranks one exchange of three numbers, and one of norms where parameters are sharded; no host sync.

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

    #: Whether gradients are plain when a backward pass ends, for loops of the user's own calls.
    _plain: ClassVar[bool] = False

    def __init__(
        self,
        models: nn.Module | Prepared | Iterable[nn.Module | Prepared],
        optimizers: Optimizer | Iterable[Optimizer],
        policy: PolicyLike | None = None,
        *,
        max_grad_norm: float | None = None,
        on_overflow: Reaction = "skip",
        process_group: ProcessGroup | None = None,
    ) -> None:
        raise_together(wrong_options(max_grad_norm=max_grad_norm, on_overflow=on_overflow))
        subjects, optimizer_list = models_and_optimizers(models, optimizers)
        trained, handles, chosen_policy = handles_of(subjects, policy)
        check_session(trained, optimizer_list, chosen_policy)
        ranks = Ranks.of(process_group)
        self._is_closed = self._retains = False
        self._undo = contextlib.ExitStack()
        self._weights = Weights(trained, optimizer_list, chosen_policy, handles)
        self._weights.convert()
        self._undo.callback(self._weights.undo)
        try:
            scaler = Scaler(chosen_policy.loss_scale, next(self._weights.updated()).device, shared)
            self._engine = Engine(self._weights, scaler, ranks, max_grad_norm, plain=self._plain)
            for undo in (
                *self._engine.watch(optimizer_list),
                *self._engine.watch_models(),
                refuse_unknown_steps(self._engine.writes),
            ):
                self._undo.callback(undo)
            self._engine.plan_anew()  # told of its own hooks
            self._on_overflow: str = reaction_of(on_overflow)
            looks, end = reaction(self._on_overflow, self._weights, self.no_sync)
            self._undo.callback(end)
            if looks is not None:
                self._engine.observers.append(looks)
            # A stack apart: a finalizer closes it after the session is dropped, so that it must not hold the session.
            self._names = contextlib.ExitStack()
            weakref.finalize(self, self._names.close)
            self._undo.callback(self._names.close)
            self._bind_retaining()
        except BaseException:
            self._undo.close()
            raise

    def __repr__(self) -> str:
        if self._is_closed:
            return f"{type(self).__name__}(closed)"
        names = ", ".join(type(part).__name__ for part in (*self._weights.models, *self._weights.optimizers))
        return f"{type(self).__name__}({names}, policy={str(self.policy)!r})"

    def __reduce__(self) -> Any:
        raise StateError(
            "a session cannot be copied or pickled",
            why="another optimizer would have no hooks, and would never update its model",
            write="MixedPrecision(copy.deepcopy(model), new_optimizer, policy); or torch.save(amp.state_dict(), path)",
        )

    def _bind_torchs(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Bind a function of torch's to one here, which gets the session as long as the session lives."""
        if name in vars(owner):
            self._names.callback(Binding.join(owner, name, weakref.ref(self), call))

    def _bind_retaining(self) -> None:
        """Bind ``retain_grad``, which returns gradients without the scale, where they carry one."""
        if self._engine.scaler.changes_gradients and not self._retains:
            self._retains = True
            self._names.callback(Binding.join(Tensor, "retain_grad", weakref.ref(self), retaining))

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise StateError(
                f"{call}() after close()",
                why="the model is plain FP32 again",
                write="a new MixedPrecision(model, optimizer, policy)",
            )

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self._is_closed

    # What can be asked and set --------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._weights.policy

    @property
    def max_grad_norm(self) -> float | None:
        """What the 2-norm of a step's gradients is clipped to; it may be set between steps."""
        return self._engine.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        raise_together(wrong_options(max_grad_norm=value))
        self._engine.max_grad_norm = value

    @property
    def on_overflow(self) -> str:
        """What a skipped step does besides."""
        return self._on_overflow

    @property
    def emulated(self) -> bool:
        """Whether any family of products is computed in FP32 from rounded operands on this device."""
        return self._weights.region().emulated

    @property
    def loss_scale(self) -> Tensor:
        """The loss scale now, 0-d float32."""
        return self._engine.scaler.state.scale

    def stats(self) -> Stats:
        """Return how many steps there were, how many were skipped, and how the loss scale moved; a host sync."""
        return self._engine.account.stats()

    def master_params(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the parameters that one optimizer, or all, update: they are FP32. apex calls them so."""
        return self._weights.updated(optimizer)

    # The loop -------------------------------------------------------------------------------------------

    @compiled_inside_alone
    def autocast(self) -> region.autocast:
        """Return the region to run the forward pass and the loss in."""
        self._require_open("autocast")
        return self._weights.region()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Exchange no gradients between ranks in forward passes in here, and in their backward passes.

        What accumulates so is reduced with the first backward pass of a forward pass outside: the last micro-batch of
        a step. On one rank it does nothing.
        """
        self._require_open("no_sync")
        return self._engine.no_sync()

    def backward(self, loss: Tensor, optimizers: Optimizer | Iterable[Optimizer] | None = None, **kwargs: Any) -> None:
        """Scale a loss and run its backward pass; call it again to accumulate, or for another loss.

        Gradients of low-precision parameters are summed in FP32 from the second call on. All losses share one scale.
        Leaves that no optimizer of the session has, an input or another model's parameter, get unscaled gradients.

        Args:
            loss: A floating scalar.
            optimizers: Whose parameters get gradients; all when omitted. The gradients of other parameters are
                not computed, as with ``inputs=`` of ``Tensor.backward``.
            **kwargs: As ``Tensor.backward`` takes them: ``retain_graph``, ``create_graph``, ``inputs``.

        Raises:
            PolicyError: The loss is not a floating scalar, or no such optimizer.
            StateError: The loss depends on no parameter, or the last step's gradients were not cleared. Under a loss
                scale ``create_graph``, and ``inputs`` that are no leaves: :meth:`grad` returns those without it.

        **Cost**: no host sync. Under a scale Python for each node of the graph, less than 0.5 µs.
        """
        self._require_open("backward")
        check_loss(loss)
        engine, wanted = self._engine, chosen(optimizers, self._weights.optimizers)
        engine.replan()
        windows = engine.windows
        if len(wanted) < len(self._weights.optimizers):
            windows = [window for window in windows if not set(window.plan.optimizers).isdisjoint(wanted)]
            leaves = [leaf for window in windows for leaf in window.plan.leaves_of(wanted) if leaf.requires_grad]
            if not leaves:
                raise StateError(
                    "these optimizers update no parameter that requires a gradient",
                    write="requires_grad_(True) on what they train, or amp.backward(loss) for all optimizers",
                )
            kwargs.setdefault("inputs", leaves)
        if (inputs := kwargs.get("inputs", ())) is not None and not isinstance(inputs, tuple):
            inputs = kwargs["inputs"] = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)

        def run(scaled: tuple[Any, ...]) -> None:
            self._weights.region().run_backward(*scaled, **kwargs)

        creates_graph, walk = bool(kwargs.get("create_graph")), None
        if engine.scale_now is not None:
            walk = walk_of((loss,), inputs or ())
            if walk.runs_hooks:
                engine.warn_of_modules()
        run_pass(engine, (loss,), run, windows, walk, inputs=inputs or (), creates_graph=creates_graph)

    def grad(
        self, outputs: Tensor, inputs: Tensor | Iterable[Tensor], *, create_graph: bool = False, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Differentiate as ``torch.autograd.grad`` does, scaled on the way and unscaled in FP32: for penalties.

        Each call of a step has a scale of its own, which begins with the loss's: a second derivative may need a far
        smaller one. An overflow skips the next step and moves that scale alone.

        Args:
            outputs: A floating scalar, or any tensor with ``grad_outputs=``.
            inputs: What to differentiate by.
            create_graph: Make the results differentiable.
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
        input_list = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return self._engine.grad(outputs, input_list, create_graph=create_graph, **kwargs)

    def unscale_(self, optimizers: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Make the gradients FP32 and unscaled now, so that they can be looked at or edited before ``step``.

        Any edit, in place or assigned, is honoured by ``step``. An overflow that is found here skips the step, whatever
        is done to the gradients after.

        Args:
            optimizers: Whose gradients; all when omitted.

        Raises:
            StateError: No ``backward`` since the last step.

        **Cost**: two passes over the gradients, no host sync.
        """
        self._require_open("unscale_")
        self._engine.unscale_(chosen(optimizers, self._weights.optimizers))

    @never_compiled  # the check and the update decide on the host: torch.compile breaks the graph here
    def step(
        self,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Step:
        """Check the gradients, unscale and clip them, update or skip, and adapt the loss scale.

        All optimizers of one call step together or not at all, and their gradients are clipped together. What can be
        refused is refused before anything is written. A signal (Ctrl-C) that comes while the step writes waits until it
        has written. An optimizer that raises after it, or another one, has written leaves an update half-way, which
        every later call but ``load_state_dict`` and ``close`` says.

        Args:
            optimizers: Which optimizers step; all that have gradients when omitted.
            closure: For optimizers that evaluate the loss themselves (LBFGS, SAM): clears the gradients, computes
                the loss and calls ``amp.backward(loss)``. If any evaluation overflows, or raises, all is put back. One
                optimizer at a time; a host sync for each evaluation, and a copy of weights and state meanwhile.

        Returns:
            What happened, as device tensors. A scheduler: ``if not step.skipped: scheduler.step()``.

        Raises:
            StateError: No ``backward`` since the last step, no parameter has a gradient, or an earlier update was
                ended half-way. Under a loss scale gradients that the program has made itself, unless :meth:`unscale_`
                or :meth:`grad` has given out what they are made of.
            PolicyError: A hyper-parameter of torch's or mezzo's that is not finite; tensors on an accelerator are not
                looked at.
            ScaleCollapsed: The scale stood at its floor for ``patience`` overflows in a row; at most two steps late.
            NumericsError: With ``on_overflow="raise"``, at an overflow; nothing was updated.
            DistributedError: Another rank has ended this step with an error, or had no gradient left.
        """
        self._require_open("step")
        if (
            closure is None
            and optimizers is not None
            and not isinstance(optimizers, Optimizer)
            and callable(optimizers)
        ):
            raise PolicyError("a closure stands in the place of the optimizers", write="amp.step(closure=closure)")
        stepping = chosen(optimizers, self._weights.optimizers)
        return self._engine.step(stepping) if closure is None else evaluated(self._engine, stepping, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and forget unfinished accumulation windows.

        Args:
            set_to_none: Let go of them; otherwise they become zeros.
        """
        self._require_open("zero_grad")
        self._engine.writes.require_whole()
        self._engine.clear(set_to_none)

    # Another policy -------------------------------------------------------------------------------------

    @never_compiled
    def change(self, policy: PolicyLike) -> None:
        """Change the policy from the next forward pass on: level, dtype, rules, recipes, loss scale.

        Weights keep their FP32 values, bit for bit (halves in FP16: within 2⁻⁴⁰ below 2⁻¹⁶; O3 rounds). Models,
        parameters, optimizers and schedulers stay the same objects; moments, counts and random generators stay as they
        are, and gradients that the last step has left are cleared, unless the loop is the program's own. A dynamic loss
        scale goes on within the bounds of the new one; any other begins anew. What torch.compile or :func:`capture` has
        made is made once more. On several ranks all call it, between the same two steps.

        Beside DistributedDataParallel the weights of O1 and O2 stay stored as they were, which a warning says.

        Args:
            policy: A policy, its text, a dtype (O1 in it), or the path of a policy file.

        Raises:
            StateError: Inside an accumulation window, a region, a pass or a step; torch's optimizer has FP32 state, and
                weights would be low; O3 beside DistributedDataParallel; the session is closed.
            PolicyError: A wrong policy, or a rule that matches nothing.
            UnsupportedError: The device, the model or an optimizer cannot carry it out.
            DistributedError: Another rank cannot, has another policy, or has not called it within 300 seconds. Whatever
                is raised, the former policy is in force.

        **Cost**: a pass over the weights that are stored otherwise, 4 bytes for each that loses bits meanwhile; one
        host sync, and on several ranks some round trips to their store; and what is compiled again.

        Example:
            >>> import mezzo, torch
            >>> model = torch.nn.Linear(16, 16)
            >>> amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,bf16,emulate=true")
            >>> amp.change("O1,bf16,emulate=true")
            >>> type(model.weight).__name__, str(amp.policy)
            ('Parameter', 'O1,dtype=bfloat16,emulate=true')
        """
        self._require_open("change")
        change(self._engine, Policy.of(policy))
        self._bind_retaining()

    # State ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers and tensors, to be saved beside those of model and optimizer.

        Raises:
            StateError: Inside an accumulation window.

        **Cost**: a host sync.
        """
        self._require_open("state_dict")
        return state_tree.save(self._engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or another system's scaler; those of model and optimizer in any order.

        Raises:
            StateError: The state of another model, or none at all; nothing was loaded. Or inside a window.
        """
        self._require_open("load_state_dict")
        state_tree.load(self._engine, state_dict)

    def stateful(self) -> Stateful:
        """Return model, optimizers and session as one value for ``torch.distributed.checkpoint``: see there."""
        self._require_open("stateful")
        return Stateful(self._engine)

    def close(self) -> None:
        """Undo the preparation: FP32 weights, no bit of which is lost, and the optimizers as they were built."""
        if not self._is_closed:
            self._engine.clear()
            self._undo.close()
            self._is_closed = True


# For the rooms of mezzo that drive a session; users have no need of them ------------------------------------


def engine_of(session: MixedPrecision) -> Engine:
    """Return the engine of a session: the four verbs over which all call styles stand."""
    return session._engine


def weights_of(session: MixedPrecision) -> Weights:
    """Return the models and optimizers of a session, with the policy that was carried out on them."""
    return session._weights
