"""Mixed precision for Accelerate: one call before ``accelerator.prepare``, and an attached session is its scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Final

from torch import nn
from torch.optim import Optimizer

from mezzo import sharded
from mezzo.cast import autocast
from mezzo.errors import PolicyError, UnsupportedError, require_extra, shown
from mezzo.policy import Policy, PolicyLike
from mezzo.session.attach import AttachedPrecision
from mezzo.session.grad_scaler import SessionScaler
from mezzo.session.refusals import Reaction, models_and_optimizers
from mezzo.session.session import engine_of, weights_of
from mezzo.session.state_tree import save

require_extra("accelerate", "mixed precision for Accelerate needs accelerate", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

__all__ = ["AcceleratedPrecision", "attach"]

_ORDER: Final = (
    "attach(accelerator, model, optimizer, policy), then model, optimizer = accelerator.prepare(model, optimizer)"
)
_DDP: Final = "Accelerator() under torchrun --nproc-per-node N, which is DistributedDataParallel"


def attach(
    accelerator: Accelerator,
    models: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer],
    policy: PolicyLike | None = None,
    *,
    on_overflow: Reaction = "skip",
) -> AcceleratedPrecision:
    """Train under a policy with Accelerate; the program stays as it is.

    Call it before ``accelerator.prepare``, with all models and optimizers that will be prepared. From then on:

    - calls of the models run in the policy's region, and return FP32, in training and in evaluation;
    - when ``accelerator.backward`` ends, gradients are FP32, unscaled and checked: ``accelerator.clip_grad_norm_``,
      ``clip_grad_value_`` and code of one's own see these;
    - the prepared optimizer's ``step()`` updates or skips; ``accelerator.optimizer_step_was_skipped`` tells which, and
      prepared schedulers wait as they do for Accelerate's own scaler;
    - ``accelerator.save_state`` and ``load_state`` go on bit for bit; state dicts, ``save_model`` and
      ``save_pretrained`` hold FP32 weights, in O3 those of 16 bits;
    - ``accelerator.log`` tells its trackers ``mezzo/scale``, the loss scale, and ``mezzo/skipped``, a count of steps;
    - ``accelerator.free_memory()`` ends the session, as ``amp.close()`` does: what ``find_executable_batch_size`` calls
      again begins with both.

    Args:
        accelerator: The accelerator, of ``mixed_precision="no"``.
        models: The model, or a list of models.
        optimizers: The optimizer, or a list of them.
        policy: A policy, its text, a dtype, or the path of a file; O1 in the machine's fast format when omitted.
        on_overflow: As for :class:`mezzo.MixedPrecision`.

    Returns:
        The session. ``amp.close()`` ends it: the weights are FP32, and the accelerator is as it was.

    Raises:
        PolicyError: A wrong policy or option; what Accelerate has prepared already; ``mixed_precision`` besides; or an
            accelerator that has a session.
        UnsupportedError: accelerate is not installed; DeepSpeed, FSDP, Megatron-LM or XLA; or a sharded model.
        MezzoError: As :class:`mezzo.MixedPrecision`. Whatever is raised, nothing was changed, but that models may be on
            the accelerator's device already.

    **Cost**: that of :func:`mezzo.attach`, and one host sync a step, by which Accelerate learns of a skip; one for
    ``accelerator.log``.

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
    if not isinstance(accelerator, Accelerator):
        raise PolicyError(f"the accelerator is {shown(accelerator)}", write=_ORDER)
    refuse(accelerator)
    given_policy = None if policy is None else Policy.of(policy)
    return AcceleratedPrecision(accelerator, models, optimizers, given_policy, on_overflow=on_overflow)


def refuse(accelerator: Accelerator, models: Iterable[nn.Module] = ()) -> None:
    """Raise what stands against an accelerator and its models.

    Args:
        accelerator: The accelerator.
        models: The models.

    Raises:
        PolicyError: It has another precision, or a session, already.
        UnsupportedError: What it runs with owns the steps, or a model is sharded.
    """
    distributed_type = accelerator.distributed_type
    if distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise UnsupportedError(
            f"Accelerate runs with {distributed_type.value}",
            why="it owns backward passes and steps, or shards what the session has converted",
            write=f"{_DDP}; or mezzo.fully_shard(model, policy) in a loop of your own",
        )
    if any(map(sharded.units, models)):
        raise UnsupportedError(
            "the model is sharded",
            why="Accelerate's checkpoints would hold the parts of one rank",
            write="a loop of your own with mezzo.MixedPrecision, whose checkpoint is amp.stateful(); or whole models: "
            + _DDP,
        )
    if accelerator.mixed_precision != "no":
        raise PolicyError(
            f'Accelerate has mixed_precision="{accelerator.mixed_precision}" besides',
            why="its casts and its loss scale would stand around the policy's",
            write='Accelerator() without mixed_precision, or mixed_precision="no" where a config file or '
            "ACCELERATE_MIXED_PRECISION sets another",
        )
    if accelerator.scaler is not None:
        raise PolicyError(
            "the accelerator has a session already" if isinstance(accelerator.scaler, SessionScaler) else
            f"the accelerator has a {type(accelerator.scaler).__name__} besides",
            why="it scales each loss by one session, which takes all models and optimizers",
            write="attach(accelerator, [model, other], [optimizer, another], policy); or amp.close() first",
        )  # fmt: skip


class AcceleratedPrecision(AttachedPrecision):
    """The session that :func:`attach` returns: of the process it takes nothing, for Accelerate's calls drive it.

    Args:
        accelerator: See :func:`attach`.
        models: See there.
        optimizers: See there.
        policy: See there.
        **options: Of :class:`mezzo.MixedPrecision`.
    """

    _binds: ClassVar[tuple[str, ...]] = ("calls",)

    def __init__(
        self, accelerator: Accelerator, models: Any, optimizers: Any, policy: Policy | None, **options: Any
    ) -> None:
        subjects, optimizer_list = models_and_optimizers(models, optimizers)
        modules = [model for model in subjects if isinstance(model, nn.Module)]
        if len(modules) < len(subjects):
            raise PolicyError("a prepared model cannot be attached", write="attach(accelerator, model, …), itself")
        if any(isinstance(optimizer, AcceleratedOptimizer) for optimizer in optimizer_list):
            raise PolicyError(
                "an optimizer was prepared before it was attached",
                why="Accelerate has noted already that its steps need no loss scale",
                write=_ORDER,
            )
        refuse(accelerator, modules)
        for model in modules:
            if accelerator.device_placement and not accelerator.verify_device_map(model):
                model.to(accelerator.device)  # as prepare() would: the scale lives where the parameters are
        self._is_telling = False
        super().__init__(modules, optimizer_list, policy, **options)
        self._bind_own(accelerator, "scaler", _AcceleratorsScaler(self))
        self._bind_own(accelerator, "autocast", partial(_region, self))
        self._bind_own(accelerator, "log", partial(_log, self, accelerator.log))
        self._bind_own(accelerator, "free_memory", partial(_free, self, accelerator.free_memory))

    def metrics(self) -> dict[str, float]:
        """Return what belongs into a log: the loss scale, and the count of skipped steps.

        **Cost**: waits for the device.
        """
        return {"mezzo/scale": float(self.loss_scale), "mezzo/skipped": self.stats().skipped}

    def _own_step(self, optimizer: Optimizer, session_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_closed:  # prepared optimizers still call this method
            return self._engine.writes.steps_by[optimizer](*args, **kwargs)
        return None if self._is_telling else super()._own_step(optimizer, session_optimizer, *args, **kwargs)

    def step_and_tell(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Update or skip, and call ``optimizer.step`` after an update: from this call Accelerate learns of the update.

        A kernel that skips by itself is called in any case.
        """
        before = self.last_step
        self._own_step(optimizer, optimizer, *args, **kwargs)
        if self.last_step is before or not bool(self.last_step.skipped):  # type: ignore[union-attr]
            self._is_telling = True
            try:
                optimizer.step()
            finally:
                self._is_telling = False
        self.keep_to_schedule()


class _AcceleratorsScaler(SessionScaler):
    """The accelerator's scaler, which prepared optimizers call even after the session has ended."""

    amp: AcceleratedPrecision

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Step or skip, and let Accelerate know which."""
        if self.amp.is_closed or optimizer not in weights_of(self.amp).optimizers:
            optimizer.step(*args, **kwargs)
        else:
            self.amp.step_and_tell(optimizer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state, also while gradients wait for a step."""
        return {} if self.amp.is_closed else save(engine_of(self.amp), in_window=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a session's state, or another scaler's."""
        if state_dict and not self.amp.is_closed:
            super().load_state_dict(state_dict)


def _region(amp: AcceleratedPrecision, /, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """Return what ``accelerator.autocast()`` does: the policy's region, or FP32 where a handler switches it off."""
    is_on = all(getattr(argument, "enabled", True) for argument in (*args, *kwargs.values()))
    return amp.autocast() if is_on else autocast("O0")


def _log(amp: AcceleratedPrecision, log: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Log a session's values besides a program's: what ``accelerator.log`` does."""
    metrics = amp.metrics()
    if args:
        return log({**metrics, **args[0]}, *args[1:], **kwargs)
    return log(**kwargs | {"values": {**metrics, **kwargs["values"]}})


def _free(amp: AcceleratedPrecision, free: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """End the session, and let go of what was prepared: what ``accelerator.free_memory`` does."""
    amp.close()
    return free(*args, **kwargs)
