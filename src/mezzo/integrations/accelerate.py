"""Mixed precision for Accelerate: one call before ``accelerator.prepare``, and behind it a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast import autocast
from mezzo.cast.model import sharding
from mezzo.errors import PolicyError, StateError, UnsupportedError, not_switches, raise_together, require_extra, shown
from mezzo.integrations.logs import ToldPrecision
from mezzo.policy import Policy
from mezzo.session import MixedPrecision
from mezzo.session.attached import Standing, Words
from mezzo.session.attached.own_loop.forward import CalledIn
from mezzo.session.refusals.beginning import models_and_optimizers
from mezzo.tensors import LOW

require_extra("accelerate", "mixed precision for Accelerate needs accelerate", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils.constants import SCALER_NAME  # noqa: E402

__all__ = ["AcceleratedPrecision", "attach"]

_WORDS: Final = Words(begin="attach", backward="accelerator.backward(loss)")
_ORDER: Final = (
    "attach(accelerator, model, optimizer, policy), then model, optimizer = accelerator.prepare(model, optimizer)"
)


def attach(
    accelerator: Accelerator,
    models: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer],
    policy: Policy | str | os.PathLike[str] = "O1",
    *,
    on_overflow: Literal["skip", "explain", "raise"] = "skip",
    restore_buffers: bool = False,
    hold_schedulers: bool = True,
) -> AcceleratedPrecision:
    """Train under a policy with Accelerate; the program stays as it is.

    Call it before ``accelerator.prepare``, with all models and optimizers that will be prepared. From then on:

    - calls of the models run in the policy's region, and return FP32, in training and in evaluation;
    - ``accelerator.backward`` scales the loss; ``accelerator.accumulate`` and several ranks are as ever;
    - ``accelerator.clip_grad_norm_``, ``clip_grad_value_`` and ``unscale_gradients`` see unscaled gradients, and those
      of masters where there are any;
    - the prepared optimizer's ``step()`` checks, unscales, and updates or skips; prepared schedulers wait where the
      step was skipped, which ``accelerator.optimizer_step_was_skipped`` tells;
    - ``accelerator.save_state`` and ``load_state`` go on bit for bit; state dicts, ``save_model`` and
      ``save_pretrained`` hold FP32 weights;
    - a model that :func:`mezzo.fully_shard` has sharded before its optimizer was built is prepared as it is, and
      ``amp.stateful()`` is its checkpoint;
    - ``accelerator.log`` tells its trackers ``mezzo/scale``, the loss scale, and ``mezzo/skipped``, a count of steps.

    Args:
        accelerator: The accelerator, of ``mixed_precision="no"``.
        models: The model, or a list of models.
        optimizers: The optimizer, or a list of them.
        policy: A policy, its text, or the path of a policy file.
        on_overflow: As for :class:`mezzo.MixedPrecision`; what ``"explain"`` finds is told to the trackers, too, as
            ``mezzo/overflow``.
        restore_buffers: As for :class:`mezzo.MixedPrecision`.
        hold_schedulers: Whether schedulers wait.

    Returns:
        The session. ``amp.close()`` ends it: the weights are FP32, and the accelerator is as it was.

    Raises:
        PolicyError: A wrong policy or option; what Accelerate has prepared already; ``mixed_precision`` besides; or an
            accelerator that has a session.
        UnsupportedError: accelerate is not installed; or DeepSpeed, FSDP of Accelerate's own, Megatron-LM or XLA.
        MezzoError: As :class:`mezzo.MixedPrecision`. Whatever is raised, nothing was changed, but that models may be on
            the accelerator's device already.

    **Cost**: that of the session. ``hold_schedulers`` costs one host sync a step, ``accelerator.log`` one as well.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from mezzo.integrations.accelerate import attach
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = attach(accelerator, model, optimizer, "O2,dtype=bfloat16")
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(4, 8)).square().mean())
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> amp.metrics()
        {'mezzo/scale': 1.0, 'mezzo/skipped': 0}
        >>> amp.close()
    """
    raise_together(not_switches(hold_schedulers=hold_schedulers))
    if not isinstance(accelerator, Accelerator):
        raise PolicyError(f"the accelerator is {shown(accelerator)}", write=_ORDER)
    refuse(accelerator)
    options: dict[str, Any] = {"on_overflow": on_overflow, "restore_buffers": restore_buffers}
    return AcceleratedPrecision(
        accelerator, models, optimizers, Policy.of(policy), hold_schedulers=hold_schedulers, **options
    )


def refuse(accelerator: Accelerator) -> None:
    """Raise what stands against an accelerator.

    Args:
        accelerator: The accelerator.

    Raises:
        PolicyError: It has another precision, or a session, already.
        UnsupportedError: What it runs with owns the steps.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP:
        version = 2 if accelerator.is_fsdp2 else 1
        raise UnsupportedError(
            f"Accelerate shards with FSDP{version}", where=f"fsdp_version={version}", why=_FSDP[version], write=_SHARDED
        )
    if kind in _OWNERS:
        reason, write = _OWNERS[kind]
        raise UnsupportedError(f"Accelerate runs with {kind.value}", why=reason, write=write)
    if accelerator.mixed_precision != "no":
        raise PolicyError(
            f'Accelerate has mixed_precision="{accelerator.mixed_precision}" besides',
            why="its casts and its loss scale would stand around the policy's",
            write='Accelerator() without mixed_precision, or mixed_precision="no" where a config file or '
            "ACCELERATE_MIXED_PRECISION sets another",
        )
    if accelerator.scaler is not None:
        raise PolicyError(
            "the accelerator has a session already",
            why="it scales each loss by one session, which takes all models and optimizers",
            write="attach(accelerator, [model, other], [optimizer, another], policy); or amp.close() first",
        )


_DDP: Final = "Accelerator() under torchrun --nproc-per-node N, which is DistributedDataParallel"
#: Why Accelerate's own sharding is refused, by its version.
_FSDP: Final = {
    1: "it keeps parameters in flat pieces, in which rules, masters and norms find none of a model's",
    2: "accelerator.prepare shards the parameters after the optimizer was built, and its session with it",
}
_SHARDED: Final = (
    "mezzo.fully_shard(model, policy), the optimizer, attach(accelerator, model, optimizer, policy), and then\n"
    "accelerator.prepare(model, optimizer), which leaves the model as it is; Accelerator() without fsdp_plugin,\n"
    "and no ACCELERATE_USE_FSDP"
)
_IN_PARTS: Final = 'torch.distributed.checkpoint.{}({{"app": amp.stateful()}}, checkpoint_id=path)'
#: What else owns precision, or the steps.
_OWNERS: Final = {
    DistributedType.DEEPSPEED: (
        "its engine runs backward passes and steps, and has masters and a loss scale of its own",
        f'"bf16": {{"enabled": true}} in its own configuration, without mezzo; or {_DDP}',
    ),
    DistributedType.MEGATRON_LM: ("its engine runs backward passes and steps", _DDP),
    DistributedType.XLA: ("gradients are reduced inside the optimizer's step there", _DDP),
}


class AcceleratedPrecision(ToldPrecision):
    """The session that :func:`attach` returns: a :class:`mezzo.MixedPrecision` which Accelerate's calls drive.

    Args:
        accelerator: See :func:`attach`, and so on.
        models: See there.
        optimizers: See there.
        policy: See there.
        hold_schedulers: See there.
        **options: Of :class:`mezzo.MixedPrecision`.

    Attributes:
        last_step: What the last step found and did; ``None`` before the first.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        models: Any,
        optimizers: Any,
        policy: Policy,
        *,
        hold_schedulers: bool,
        **options: Any,
    ) -> None:
        subjects, given = models_and_optimizers(models, optimizers)
        modules = [each for each in subjects if isinstance(each, nn.Module)]
        if len(modules) < len(subjects):
            raise PolicyError("a prepared model cannot be attached", write="attach(accelerator, model, …), itself")
        if any(isinstance(each, AcceleratedOptimizer) for each in given):
            raise PolicyError(
                "an optimizer was prepared before it was attached",
                why="Accelerate has noted already that its steps need no loss scale",
                write=_ORDER,
            )
        for model in modules:
            if accelerator.device_placement and not accelerator.verify_device_map(model):
                model.to(accelerator.device)  # as prepare() would: masters are made where the parameters are

        def begin(strays: list[nn.Module]) -> MixedPrecision:
            ToldPrecision.__init__(self, [*modules, *strays], given, policy, **options)
            return self

        self._standing = _Calls(modules, given, policy, words=_WORDS, begin=begin)
        self._standing.bind(accelerator, self, modules, holds=hold_schedulers)

    def close(self) -> None:
        """End the session: FP32 weights, optimizers as they were built, and an accelerator without it."""
        self._standing.end()


class _Calls(Standing):
    """What Accelerate's calls do while the session stands, and models' calls."""

    _is_telling = False

    def bind(
        self, accelerator: Accelerator, amp: AcceleratedPrecision, models: list[nn.Module], *, holds: bool
    ) -> None:
        """Have an accelerator, and the models, ask for it.

        Args:
            accelerator: The accelerator.
            amp: The session.
            models: Its models.
            holds: Whether Accelerate is told of skipped steps.
        """
        wide = torch.float32 if self.policy.output_dtype is None else None
        called = CalledIn(models, amp.autocast, wide, self.attached.exact)
        self._undo.callback(called.leave)
        for model in models if self.policy.param_dtype in LOW else ():
            if hasattr(type(model), "config_class"):  # as transformers' own models have
                called.copies.bind(model, "save_pretrained", MethodType(_save_fp32, model))
        self.replace(accelerator, "unscale_gradients", lambda _: self.unscale_prepared)
        self.replace(accelerator, "autocast", lambda _: partial(_region, amp))
        self.replace(accelerator, "log", lambda log: partial(_log, amp, log))
        if any(map(sharding.units, models)):
            self.replace(accelerator, "prepare_model", lambda plain: partial(_prepare_model, plain))
            self.replace(accelerator, "save_state", lambda _: partial(_refuse_state, "save"))
            self.replace(accelerator, "load_state", lambda _: partial(_refuse_state, "load"))
        else:
            self.replace(accelerator, "load_state", lambda plain: partial(_load_state, accelerator, plain))
        self._undo.callback(setattr, accelerator, "scaler", None)
        accelerator.scaler = _SessionScaler(amp, self, holds=holds)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step with one optimizer, or skip, unless Accelerate is only told that it has stepped."""
        return None if self._is_telling else super().step(optimizer, closure)

    def tell(self, optimizer: Optimizer) -> None:
        """Let Accelerate see a call of ``optimizer.step``, by which it knows that a step was taken."""
        self._is_telling = True
        try:
            optimizer.step()
        finally:
            self._is_telling = False

    def unscale_prepared(self, optimizer: Any = None) -> None:
        """Unscale gradients: what ``accelerator.unscale_gradients`` is, and clipping asks for."""
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.unscale(self.optimizers if given is None else [getattr(each, "optimizer", each) for each in given])


class _SessionScaler:
    """What Accelerate calls its scaler: it is given each loss and each step, and its state is saved.

    Args:
        amp: The session.
        calls: What its calls do.
        holds: Whether Accelerate is told of skipped steps.
    """

    def __init__(self, amp: AcceleratedPrecision, calls: _Calls, *, holds: bool) -> None:
        self._amp, self._calls, self._holds = amp, calls, holds

    @property
    def _has_ended(self) -> bool:  # optimizers that are prepared go on asking, and step by themselves
        return self._calls.attached.core.is_closed

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward pass is the session's."""
        return self._calls.scaled(loss, 0, self._calls.optimizers)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step or skip, and let Accelerate know which."""
        if self._has_ended:
            optimizer.step(closure)
            return
        if optimizer not in self._calls.optimizers:
            raise StateError(
                "an optimizer was prepared that is not attached",
                where=type(optimizer).__name__,
                why="accelerator.backward has scaled its gradients, which it would update with",
                write="attach(accelerator, [model, other], [optimizer, another], policy), then accelerator.prepare",
            )
        before = self._amp.last_step
        self._calls.step(optimizer, closure)
        taken = self._amp.last_step
        if not (self._holds and taken is not before and taken is not None and bool(taken.skipped)):
            self._calls.tell(optimizer)

    def update(self) -> None:
        """Do nothing: the loss scale has moved with the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return {} if self._has_ended else self._amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a session's state."""
        if state_dict and not self._has_ended:
            self._amp.load_state_dict(state_dict)


def _prepare_model(plain: Callable[..., nn.Module], model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Leave a model as it is that is sharded, and reduces its gradients by itself: what ``prepare_model`` is."""
    return model if sharding.units(model) else plain(model, *args, **kwargs)


def _load_state(
    accelerator: Accelerator, plain: Callable[..., None], input_dir: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Load a checkpoint, of a program without a session too: what ``accelerator.load_state`` is."""
    scaler = accelerator.scaler
    if input_dir is not None and not os.path.isfile(os.path.join(os.path.expanduser(input_dir), SCALER_NAME)):
        accelerator.scaler = None  # whose file Accelerate would ask for
    try:
        plain(input_dir, *args, **kwargs)
    finally:
        accelerator.scaler = scaler


def _refuse_state(name: Literal["save", "load"], *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        f"accelerator.{name}_state knows nothing of a model that mezzo.fully_shard has sharded",
        why="each rank has a part of the weights and of the optimizer's state, and it saves those of rank 0 for all",
        write=_IN_PARTS.format(name),
    )


def _region(amp: AcceleratedPrecision, autocast_handler: Any = None) -> AbstractContextManager[Any]:
    """Return what ``accelerator.autocast()`` does: the policy's region, or FP32 where the handler switches it off."""
    return amp.autocast() if autocast_handler is None or autocast_handler.enabled else autocast("O0")


def _log(
    amp: AcceleratedPrecision, log: Callable[..., None], values: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Log a session's values besides a program's: what ``accelerator.log`` does."""
    log({**amp.metrics(), **values}, *args, **kwargs)


def _save_fp32(model: Any, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
    """Save a model of transformers: what ``save_pretrained`` is, whose weights are FP32, as its state dict is."""
    type(model).save_pretrained(model, save_directory, is_main_process, *args, **kwargs)
    if is_main_process:
        model.config.dtype = "float32"  # not that of the parameters, in which from_pretrained() would load
        model.config.save_pretrained(save_directory)
