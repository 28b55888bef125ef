"""Mixed precision for Lightning: one plugin, for its Trainer and for Fabric."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from mezzo.cast import Prepared, autocast, prepare
from mezzo.cast.device import default_device_types, usual_policy
from mezzo.cast.model.outputs import given_out
from mezzo.errors import PolicyError, StateError, UnsupportedError, raise_together, require_extra
from mezzo.interrupts import uninterrupted
from mezzo.patches import Binding
from mezzo.policy import Policy, PolicyLike, Schedule, ScheduleLike
from mezzo.session.attach import AttachedPrecision
from mezzo.session.calls import Calls
from mezzo.session.refusals import Reaction, wrong_options
from mezzo.session.session import engine_of, weights_of
from mezzo.session.state_tree import save
from mezzo.session.weights import widen_states
from mezzo.tensors import LOW
from mezzo.weights.models import hide_storage

require_extra("lightning", "the precision plugin for Lightning needs lightning", "lightning.pytorch")

from lightning.fabric.strategies.dp import DataParallelStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import Strategy  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

__all__ = ["ChangePolicy", "MezzoPrecision"]


class _TrainersSession(AttachedPrecision):
    """An attached session whose losses and regions the plugin brings: of the process it takes the schedulers alone."""

    _binds: ClassVar[tuple[str, ...]] = ("schedulers",)


class _FabricsSession(AttachedPrecision):
    """The same for Fabric, which asks the plugin for a region around ``forward`` alone: other methods have theirs."""

    _binds: ClassVar[tuple[str, ...]] = ("calls", "schedulers")


class MezzoPrecision(Precision):
    """Train under a policy with Lightning: ``Trainer(plugins=[MezzoPrecision("O2,dtype=bfloat16")])``, or Fabric's own.

    Accumulation, clipping, hooks, closures, manual optimization, validation and ``strategy="ddp"`` stay as they are:
    when a backward pass ends, gradients are FP32, unscaled and checked, and ``optimizer.step()`` updates or skips. In
    the Trainer the module is converted for each run, and FP32 again after it; in Fabric from its setup until
    ``plugin.teardown()``. Checkpoints of either hold FP32 weights, in O3 those of 16 bits, and beside the optimizers'
    state the session's: they go on bit for bit. The Trainer logs ``mezzo/scale``, the loss scale, and
    ``mezzo/skipped``, a count of steps; for Fabric :meth:`metrics` has both.

    Args:
        policy: A policy, its text, a dtype, or the path of a file; O1 in the machine's fast format when omitted.
        on_overflow: As for :class:`mezzo.MixedPrecision`.
        hold_schedulers: Whether schedulers wait where the steps since their last one were skipped.

    Attributes:
        policy: The policy.
        session: The session, while there are models and optimizers; ``None`` at other times.

    Raises:
        PolicyError: A wrong policy or option.
        UnsupportedError: lightning is not installed, or too old.

    **Cost**: that of :func:`mezzo.attach`. ``hold_schedulers`` costs one host sync a scheduler's step.

    Example:
        >>> import torch
        >>> from lightning.fabric import Fabric
        >>> from mezzo.integrations.lightning import MezzoPrecision
        >>> plugin = MezzoPrecision("O2,dtype=bfloat16")
        >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
        >>> model = torch.nn.Linear(8, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> fabric.backward(model(torch.ones(4, 8)).square().mean())
        >>> _ = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        >>> optimizer.step()
        >>> plugin.metrics()
        {'mezzo/scale': 1.0, 'mezzo/skipped': 0}
        >>> plugin.teardown()
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        on_overflow: Reaction = "skip",
        hold_schedulers: bool = True,
    ) -> None:
        raise_together(wrong_options(on_overflow=on_overflow))
        self.policy = usual_policy(default_device_types()) if policy is None else Policy.of(policy)
        self.session: AttachedPrecision | None = None
        self._options: dict[str, Any] = {"on_overflow": on_overflow, "hold_schedulers": hold_schedulers}
        self._converted: dict[nn.Module, Prepared] = {}
        self._calls: Calls | None = None  # of the Trainer's module
        self._undo = ExitStack()
        self._saved: dict[str, Any] = {}
        self._num_skipped: Tensor | None = None
        self._schedule: Schedule | None = None

    # Models and optimizers ------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store a model as the policy says, before it is moved, wrapped and given optimizers."""
        if module not in self._converted:
            if not self._converted:  # no hook of a plugin's is told of the optimizers that Fabric sets up
                end = Binding.join(Strategy, "setup_optimizer", weakref.ref(self), _set_up)
                self._undo.callback(weakref.finalize(self, end))
            self._converted[module] = prepared = prepare(_parts_of(module), self.policy)
            if prepared.model is not module:  # which is what is saved, copied, and trained by the session
                vars(module)["_mezzo_prepared"] = [prepared]
                self._undo.callback(vars(module).pop, "_mezzo_prepared", None)
                self._undo.callback(hide_storage(module))
                if _is_the_trainers(module):
                    self._calls = Calls([module], self.policy, self._region, methods=False)
                    self._undo.callback(self._calls.close)
        return module

    @property
    def is_closed(self) -> bool:
        """Whether no model is stored as the policy says."""
        return not self._converted

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Begin the session, if the Trainer is about to fit."""
        module: Any = next(iter(self._converted))
        if module.trainer.state.fn == TrainerFn.FITTING and optimizers:  # after a run it has the optimizers still
            self._begin(_TrainersSession, optimizers)
        return model, optimizers, lr_schedulers

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Begin the session, or have it take an optimizer: what Fabric sets up."""
        if self.session is None:
            self._begin(_FabricsSession, [optimizer])
        elif len(weights_of(self.session).models) == len(self._converted):
            self.session.add(optimizer)
        elif self.session.last_step is None:
            before = weights_of(self.session).optimizers
            self.session.close()
            self._begin(_FabricsSession, [*before, optimizer])
        else:
            raise StateError(
                "a model is set up for training after the first step",
                why="each loss is scaled by one session, which has begun with the models that there were",
                write="fabric.setup(…) of all models and optimizers, then the first step",
            )

    def _begin(self, session_class: type[AttachedPrecision], optimizers: list[Optimizer]) -> None:
        self.session = session_class(list(self._converted), optimizers, self.policy, **self._options)
        if self._schedule is not None:
            self.session.carry_out(self._schedule, self.change)
        self._num_skipped = None

    def begin_schedule(self, schedule: Schedule) -> None:
        """Set the policies of the next run by its steps, before models are converted: for :class:`ChangePolicy`."""
        self._schedule = schedule
        if self.is_closed:
            self.policy = schedule.at(0)

    def change(self, policy: PolicyLike) -> None:
        """Change the policy, between two steps: see :meth:`mezzo.MixedPrecision.change`.

        Raises:
            StateError: There is no session; or as there.
            MezzoError: As there. Whatever is raised, the former policy is in force.
        """
        session = self._require_session()
        with uninterrupted():
            try:
                session.change(policy)
            finally:
                self.policy = session.policy
                if self._calls is not None:
                    self._calls.change(self.policy)

    def teardown(self) -> None:
        """End the session, and give models their FP32 weights back; the Trainer asks for it after each run."""
        self._saved = self.state_dict()
        stepped = [] if self.session is None else weights_of(self.session).optimizers
        if self.session is not None:
            self.session.close()
        self._undo.close()
        for prepared in self._converted.values():
            prepared.remove()
        widen_states(stepped)
        self.session, self._converted, self._schedule = None, {}, None

    # A step ---------------------------------------------------------------------------------------------

    def _region(self) -> autocast:
        first, *others = self._converted.values() or [None]
        return self.session.autocast() if self.session else first.autocast(*others) if first else autocast(self.policy)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter the policy's region."""
        with self._region():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Run ``training_step`` in the region, with its loss."""
        with self._region(), self._calls.inside() if self._calls else nullcontext():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Run the step in FP32, and what it calls of the module, as ``self(x)``, in the region: these give out FP32."""
        yield

    test_step_context = predict_step_context = val_step_context

    def convert_output(self, data: Any) -> Any:
        """Return what a model of Fabric's returns in FP32, unless the policy says otherwise."""
        is_plain = not self._converted or self.policy.dtype not in LOW or self.policy.output_dtype is not None
        return data if is_plain else given_out(data, torch.float32)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks before a backward pass."""
        return super().pre_backward(tensor, module) if _is_the_trainers(module) else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a scaled loss, whose gradients are plain in the end."""
        scaled = engine_of(self._require_session()).scale(tensor) if self._converted else tensor
        if _is_the_trainers(model):
            super().backward(scaled, model, *args, **kwargs)
        else:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks after a backward pass."""
        return super().post_backward(tensor, module) if _is_the_trainers(module) else tensor

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Check the gradients, and update or skip; evaluate the Trainer's closure before, if once is enough."""
        if model is None:
            return optimizer.step(**({} if closure is None else {"closure": closure}), **kwargs)
        closure = functools.partial(self._wrap_closure, model, optimizer, closure)
        if isinstance(optimizer, LBFGS):
            result = optimizer.step(closure, **kwargs)  # type: ignore[no-untyped-call]
        else:
            result = closure()
            optimizer.step(**kwargs)
        model.log_dict(self._logged_metrics())
        return result

    def _logged_metrics(self) -> dict[str, Any]:
        """Return what the Trainer logs after each step; only the first call of a session waits for the device."""
        session = self._require_session()
        if self._num_skipped is None:  # the session's first step: those before a checkpoint count too
            self._num_skipped = session.loss_scale.new_tensor(session.stats().skipped)
        elif session.last_step is not None:
            self._num_skipped = self._num_skipped + session.last_step.skipped
        return {"mezzo/scale": session.loss_scale, "mezzo/skipped": self._num_skipped}

    def metrics(self) -> dict[str, float]:
        """Return what belongs into a log: the loss scale, and the count of skipped steps.

        Raises:
            StateError: There is no session.

        **Cost**: waits for the device.
        """
        session = self._require_session()
        return {"mezzo/scale": float(session.loss_scale), "mezzo/skipped": session.stats().skipped}

    def _require_session(self) -> AttachedPrecision:
        if self.session is None:
            raise StateError(
                "there is no session",
                why="it is over the optimizers that Lightning has set up",
                write="model, optimizer = fabric.setup(model, optimizer); or trainer.fit(module)",
            )
        return self.session

    # Checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state, for a checkpoint of the Trainer's; after a run that of its end."""
        # Also while gradients wait for a step.
        return self._saved if self.session is None else save(engine_of(self.session), in_window=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the session's state of a checkpoint of the Trainer's."""
        if self.session is not None and state_dict:
            self.session.load_state_dict(state_dict)


class ChangePolicy(Callback):
    """Change the policy in a run of the Trainer: ``Trainer(plugins=[MezzoPrecision()], callbacks=[ChangePolicy(…)])``.

    The plugin begins with the schedule's first part, whatever policy it was given. A part begins between two steps of
    the optimizers; while gradients accumulate for another optimizer it waits. A run that resumes goes on in the part of
    its checkpoint, bit for bit.

    Args:
        schedule: A :class:`mezzo.Schedule`, or its text. It counts steps as ``trainer.global_step`` does, skipped ones
            included.

    Raises:
        PolicyError: No schedule; or, where a run begins, a Trainer without :class:`MezzoPrecision`.
        MezzoError: As :meth:`mezzo.MixedPrecision.change`, from the step before. The part before is in force.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from mezzo.integrations.lightning import ChangePolicy, MezzoPrecision
        >>> heal = ChangePolicy("bf16,nvfp4_module=*@0; bf16@900")
        >>> trainer = Trainer(plugins=[MezzoPrecision()], callbacks=[heal], accelerator="cpu", logger=False)
    """

    def __init__(self, schedule: ScheduleLike) -> None:
        self.schedule = Schedule.of(schedule)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin with the first part, before the module is converted."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, MezzoPrecision):
            raise PolicyError(
                f"the Trainer's precision is {type(plugin).__name__}",
                why="ChangePolicy changes the policy of MezzoPrecision",
                write="Trainer(plugins=[MezzoPrecision()], callbacks=[ChangePolicy(schedule)])",
            )
        if stage == TrainerFn.FITTING:
            plugin.begin_schedule(self.schedule)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a part for which the last step was no time, as inside ``training_step`` with manual optimization."""
        session = trainer.precision_plugin.session  # type: ignore[attr-defined]
        if session is not None:
            session.keep_to_schedule()


def _is_the_trainers(module: Any) -> bool:
    """Whether the Trainer asks, and not Fabric, which has other arguments and no hooks."""
    return isinstance(module, LightningModule) and module.fabric is None


def _parts_of(module: nn.Module) -> nn.Module:
    """Return what has the same parts under the same names, and is never called itself.

    A module's ``training_step`` is called as if it were its ``forward`` by the wrapper of ``strategy="ddp"``: casts at
    its door would give it batches in low precision.
    """
    if not isinstance(module, LightningModule):
        return module
    parts = nn.Module()
    parts._modules, parts._parameters, parts._buffers = module._modules, module._parameters, module._buffers
    parts._non_persistent_buffers_set = module._non_persistent_buffers_set
    return parts


def _set_up(plugin: MezzoPrecision, plain: Callable[..., Any], strategy: Strategy, /, *args: Any, **kwargs: Any) -> Any:
    """Set an optimizer up, and tell the plugin whose strategy does."""
    optimizer = plain(strategy, *args, **kwargs)
    if strategy.precision is plugin:
        if isinstance(strategy, DataParallelStrategy):
            raise UnsupportedError(
                'Fabric runs with strategy="dp"',
                why="it copies the model for each batch, without what the session has made of it",
                write='Fabric(strategy="ddp", plugins=…)',
            )
        plugin.add_optimizer(optimizer)
    return optimizer
