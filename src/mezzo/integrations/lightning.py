"""Mixed precision for Lightning's Trainer: one plugin, and behind it a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from mezzo.cast import Prepared, prepare
from mezzo.errors import PolicyError, require_extra
from mezzo.integrations.logs import check_options, explain_to
from mezzo.integrations.trainer_and_fabric import check_gathers, parts_of
from mezzo.policy import Policy
from mezzo.session import MixedPrecision, Step
from mezzo.session.attached import Attached
from mezzo.session.attached.averages import in_fp32
from mezzo.session.attached.own_loop.copies import Copies
from mezzo.tensors import LOW

require_extra("lightning", "the precision plugin for Lightning needs lightning", "lightning.pytorch")

import lightning.pytorch.callbacks  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities import GradClipAlgorithmType  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402

from mezzo.integrations.fabric import MezzoFabric  # noqa: E402

__all__ = ["MezzoFabric", "MezzoPrecision"]

_AVERAGING: Any = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())  # of Lightning 2.6


class MezzoPrecision(Precision):
    """Train under a policy in Lightning's Trainer: ``Trainer(plugins=[MezzoPrecision("O2,dtype=bfloat16")])``.

    The Trainer's accumulation, clipping, hooks, validation and checkpoints stay as they are, with automatic and manual
    optimization, and with ``strategy="ddp"``. The module is converted in place for each of the Trainer's runs, and FP32
    again after it. Gradients are unscaled before ``on_before_optimizer_step`` and ``configure_gradient_clipping`` where
    these are overridden; else ``gradient_clip_val`` is folded into the step. A checkpoint of the Trainer's holds FP32
    weights, and goes on bit for bit. Its logger gets ``mezzo/scale``, the next loss scale, and ``mezzo/skipped``, a
    count of steps.
    In manual optimization a step clears its optimizer's gradients, as ``optimizer.zero_grad()`` before the next would.
    Modules that ``training_step`` calls are entered from outside each: under O2 and O3 a network is best one attribute.

    Args:
        policy: A policy, its text, or the path of a policy file.
        on_overflow: As for :class:`mezzo.MixedPrecision`: ``"raise"`` ends the run with a :class:`mezzo.NumericsError`;
            what ``"explain"`` finds is told to the Trainer's loggers, too, as ``mezzo/overflow``.
        restore_buffers: As for :class:`mezzo.MixedPrecision`.
        hold_schedulers: Whether a scheduler that steps with the optimizer (``interval="step"``) waits where the step
            was skipped; those that a module steps by itself, in manual optimization, do not.

    Attributes:
        session: The session, from the Trainer's ``on_fit_start`` to its ``on_fit_end``, or to ``on_train_end`` beside
            a ``WeightAveraging``; ``None`` at other times.
        last_step: What the last step of the optimizer found out, as device tensors.

    Raises:
        PolicyError: A wrong policy or option; when fitting begins, a module that overrides ``backward``.
        UnsupportedError: lightning is not installed, or too old.

    **Cost**: that of the session. ``hold_schedulers`` costs one host sync a step where there are such schedulers, and
    each checkpoint one. When fitting ends, the session's state is copied, for checkpoints that are saved after.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str] = "O1",
        *,
        on_overflow: Literal["skip", "explain", "raise"] = "skip",
        restore_buffers: bool = False,
        hold_schedulers: bool = True,
    ) -> None:
        super().__init__()
        check_options(on_overflow, restore_buffers=restore_buffers, hold_schedulers=hold_schedulers)
        self.policy = Policy.of(policy)
        self.session: MixedPrecision | None = None
        self.last_step: Step | None = None
        self._options: dict[str, Any] = {"on_overflow": on_overflow, "restore_buffers": restore_buffers}
        self._hold_schedulers, self._has_gradients = hold_schedulers, False
        self._prepared: Prepared | None = None
        self._module: LightningModule | None = None
        self._attached: Attached | None = None
        self._undo = ExitStack()
        self._observer = _Observer(self)
        self._saved: dict[str, Any] = {}

    # A run begins and ends ----------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare a module, before it is moved, wrapped, and given optimizers."""
        self.end()
        if not isinstance(module, LightningModule) or module._fabric is not None:
            raise PolicyError(
                "MezzoPrecision is a plugin of the Trainer's",
                why="Fabric tells a plugin of no optimizers, which a session is made of",
                write="fabric = MezzoFabric(policy, …)   # from mezzo.integrations.lightning, in place of Fabric(…)",
            )
        self._prepared, self._module = prepare(parts_of(module), self.policy), module
        self._undo.callback(self._prepared.remove)
        self._undo.callback(self._observer.leave, module)
        return module

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Make the session, if the Trainer is about to fit."""
        module = self._module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING and optimizers:
            if is_overridden("backward", module):
                raise PolicyError(
                    "the module has a backward pass of its own",
                    where=f"{type(module).__name__}.backward",
                    why="what it calls would know nothing of the loss scale",
                    write="on_before_backward, on_after_backward; or automatic_optimization = False, and "
                    "self.manual_backward(loss)",
                )
            wrapped = model if isinstance(model, DistributedDataParallel) else self._prepared
            assert wrapped is not None
            self.session = MixedPrecision(wrapped, [_bare(each) for each in optimizers], **self._options)
            self._undo.callback(self.session.close)
            self._attached, self._saved = Attached(self.session), {}
            check_gathers(module.trainer.strategy, map(_bare, optimizers))
            if self.policy.param_dtype in LOW:
                self._attached.save_as(torch.float32, [module])
            self._observer.join(_callbacks(module))
            copies = Copies([module], self._attached.exact)
            self._undo.callback(copies.leave)
            if self._hold_schedulers:
                step = partial(self._step_scheduler, module.lr_scheduler_step)
                copies.bind(module, "lr_scheduler_step", step)
        return model, optimizers, lr_schedulers

    def end(self) -> None:
        """Close the session, and give the module its FP32 weights back; the Trainer asks for it after each run."""
        self._saved = self.state_dict()
        self._undo.close()
        self._module = self.session = self._attached = self._prepared = None

    def teardown(self) -> None:
        """End what has not ended by itself."""
        self.end()

    # A step -------------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter the policy's region."""
        owner = self.session or self._prepared
        assert owner is not None
        with owner.autocast():
            yield

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass of the scaled loss."""
        if args:
            raise PolicyError(
                "a backward pass takes one loss here",
                why="it is scaled as a whole",
                write="self.manual_backward(loss, retain_graph=True)",
            )
        self._open().backward(tensor, **kwargs)
        self._has_gradients = True

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Evaluate the closure, then check, unscale, clip, and update or skip."""
        session, bare = self._open(), _bare(optimizer)
        if kwargs:
            raise PolicyError(
                f"optimizer.step got {', '.join(kwargs)}",
                why="a checked step takes a closure alone",
                write="opt.step()",
            )
        if isinstance(bare, LBFGS):
            results: list[Any] = []

            def evaluated() -> Any:
                results.append(self._wrap_closure(model, optimizer, closure))
                return results[-1]

            step, result = session.step(bare, closure=evaluated), results[0]
        else:
            result = closure()
            if model.automatic_optimization and not self._has_gradients:
                return result  # no loss was returned, or a callback has only forward passes run
            self._after_closure(model, optimizer)
            step = session.step(bare)
        session.max_grad_norm, self._has_gradients = None, False
        if not model.automatic_optimization:
            bare.zero_grad()  # else they would be in the way of another optimizer's loss, which they are no part of
        self.last_step = step
        self._observer.stepped(step)
        if step.overflow is not None:
            explain_to(model.trainer.loggers, str(step.overflow), model.trainer.global_step)
        return result

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        if _looks_at_gradients(model):
            self._open().unscale_(_bare(optimizer))
        super()._after_closure(model, optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Have the next step clip the norm of its gradients; or clip their values now."""
        session, bare = self._open(), _bare(optimizer)
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            session.unscale_(bare)
            nn.utils.clip_grad_value_(session.master_params(bare), clip_val)
        else:
            session.max_grad_norm = float(clip_val)

    def main_params(self, optimizer: Optimizer) -> Iterator[Any]:
        """Yield what an optimizer updates: FP32 masters, or the parameters themselves."""
        return self._open().master_params(_bare(optimizer))

    def _step_scheduler(self, step: Callable[[Any, Any], None], scheduler: Any, metric: Any) -> None:
        """Step a scheduler, unless it steps with the optimizer, and that has just skipped."""
        module = self._module
        configs = [] if module is None else module.trainer.strategy.lr_scheduler_configs
        waits = any(each.scheduler is scheduler and each.interval == "step" and each.frequency == 1 for each in configs)
        if not (waits and self.last_step is not None and bool(self.last_step.skipped)):
            step(scheduler, metric)

    # Checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state, for a checkpoint whose weights are FP32; after a run that of its end."""
        return self._saved if self._attached is None else self._attached.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the state in a checkpoint of the Trainer's."""
        if self._attached is not None and state_dict:
            self._attached.load_state_dict(state_dict)

    def _open(self) -> MixedPrecision:
        if self.session is None:
            raise PolicyError(
                "there is no session yet",
                why="it is made when the Trainer begins to fit",
                write="trainer.fit(module), with MezzoPrecision among its plugins",
            )
        return self.session


class _Observer(Callback):
    """What the Trainer tells the plugin of: the end of each batch, and of the run."""

    def __init__(self, plugin: MezzoPrecision) -> None:
        self._plugin = plugin
        self._skipped: Tensor | None = None
        self._averaging: list[Any] = []  # callbacks that write their averages of the weights when training ends
        self._swa: list[Callback] = []  # and those that read and write weights in functions of their own
        self._averages: dict[Tensor, Tensor] = {}  # while a validation has swapped them for the weights

    def join(self, others: list[Callback]) -> None:
        """Come last among the callbacks; or first, where one writes its average of the weights when training ends."""
        self._averaging = [each for each in others if isinstance(each, _AVERAGING)]
        self._swa = [each for each in others if isinstance(each, StochasticWeightAveraging)]
        for each in self._swa:
            vars(each).update(update_parameters=partial(_update_in_fp32, each), transfer_weights=_transfer_in_fp32)
        others.insert(0 if self._averaging else len(others), self)

    def leave(self, module: LightningModule) -> None:
        """Be no callback any more, and let others read and write weights as they are again."""
        for each in self._swa:
            for name in ("update_parameters", "transfer_weights"):
                vars(each).pop(name, None)
        self._swa = []
        trainer: Any = module._trainer
        if trainer is not None:  # it gets a new list, for it goes through the old one
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]

    def stepped(self, step: Step) -> None:
        """Count a skipped step, on the device."""
        if self._skipped is not None:
            self._skipped = self._skipped + step.skipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with what a checkpoint has counted."""
        session = self._plugin.session
        assert session is not None
        self._skipped = torch.tensor(float(session.stats().skipped), device=session.loss_scale.device)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the loss scale and the count."""
        step = self._plugin.last_step
        if step is not None and self._skipped is not None:
            values = {"mezzo/scale": step.next_scale.float(), "mezzo/skipped": self._skipped}
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run before an average is written, through ``.data``: into FP32 weights, which keep it whole."""
        if self._averaging:
            self._plugin.end()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep averages that are about to be swapped for weights in low precision, and would come back rounded."""
        if any(param.dtype in LOW for param in pl_module.parameters()):
            models = (each._average_model.module for each in self._averaging)
            tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
            self._averages = {tensor: tensor.detach().clone() for tensor in tensors}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give averages their values back, before others see them."""
        for tensor, value in self._averages.items():
            tensor.data.copy_(value)
        self._averages = {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run while everything is still on its device."""
        self._plugin.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End a run that has failed."""
        self._plugin.end()


def _bare(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper."""
    found: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found


def _update_in_fp32(callback: Any, average: nn.Module, model: nn.Module, *args: Any) -> None:
    """Let ``StochasticWeightAveraging`` average FP32 values."""
    type(callback).update_parameters(average, in_fp32(model), *args)


def _transfer_in_fp32(average: nn.Module, model: nn.Module) -> None:
    """Have a model's keepers take an average whole, as what it loads."""
    model.load_state_dict({name: param.detach() for name, param in average.named_parameters()}, strict=False)


def _callbacks(module: LightningModule) -> list[Callback]:
    """Return the list that the Trainer keeps of its callbacks; one that is gone has none."""
    trainer: Any = module._trainer
    found: list[Callback] = [] if trainer is None else trainer.callbacks
    return found


def _looks_at_gradients(module: LightningModule) -> bool:
    """Whether a hook of the module's, or of a callback, sees the gradients before the step."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden(hooks[0], callback, Callback) for callback in _callbacks(module)
    )
