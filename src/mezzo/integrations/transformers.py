"""Mixed precision for the Trainer of transformers: one line, and an attached session for each of its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mezzo.cast import prepare
from mezzo.cast.device import usual_policy
from mezzo.errors import PolicyError, UnsupportedError, raise_together, require_extra, shown
from mezzo.policy import Policy, Schedule, ScheduleLike
from mezzo.session.calls import Calls
from mezzo.session.refusals import Reaction, wrong_options

require_extra("transformers", "mixed precision for the Trainer needs transformers", "transformers", "accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Trainer  # noqa: E402

from mezzo.integrations.accelerate import AcceleratedPrecision, attach, refuse  # noqa: E402

T = TypeVar("T", bound=Trainer)  # Python 3.11 has no `def f[T]`
if TYPE_CHECKING:  # what it stands before
    _Trainer = Trainer
else:
    _Trainer = object

__all__ = ["plug"]


def plug(
    trainer: T,
    policy: ScheduleLike | None = None,
    *,
    on_overflow: Reaction = "skip",
) -> T:
    """Return a Trainer of transformers, or of a derived class, that trains and evaluates under a policy.

    Its accumulation, clipping, callbacks and checkpoints stay as they are, on one rank and on several:

    - ``train()`` has a session, and at its end the model is FP32; ``resume_from_checkpoint`` goes on bit for bit;
    - ``evaluate()`` and ``predict()`` run under the policy, inside ``train()`` and by themselves;
    - ``grad_norm`` in the log is that of the unscaled gradients, and ``max_grad_norm`` clips these;
    - its scheduler waits where a step was skipped; ``global_step`` counts that step, as with its own scaler;
    - ``log_history``, and what callbacks log, have ``mezzo/scale``, the loss scale, and ``mezzo/skipped``, a count of
      steps, beside ``loss``;
    - checkpoints and ``save_model()`` hold FP32 weights, in O3 those of 16 bits.

    Args:
        trainer: The Trainer, of whatever class; it becomes one of a class that derives from its own.
        policy: A policy, its text, a dtype, or the path of a file; O1 in the machine's fast format when omitted. Or a
            :class:`mezzo.Schedule` or its text, which counts steps as ``global_step`` does: ``train()`` begins with its
            first part, and what comes after it runs under its last.
        on_overflow: As for :class:`mezzo.MixedPrecision`.

    Returns:
        The same Trainer; ``trainer.session`` is its session while it trains, and ``None`` at other times.

    Raises:
        PolicyError: No Trainer, or a plugged one; a wrong policy; ``fp16``, ``bf16``, ``fp16_full_eval`` or
            ``bf16_full_eval`` besides.
        UnsupportedError: transformers or accelerate is not installed; or DeepSpeed, FSDP, a sharded model, or
            DataParallel.

    **Cost**: that of :func:`mezzo.integrations.accelerate.attach`; each log waits for the device.

    Example:
        ``trainer = plug(Trainer(model, args, train_dataset=data), "O2,dtype=bfloat16")``, then ``trainer.train()``.
    """
    if not isinstance(trainer, Trainer) or isinstance(trainer, _Plugged):
        problem = "has a policy already" if isinstance(trainer, _Plugged) else f"is {shown(trainer)}"
        raise PolicyError(f"the trainer {problem}", write="plug(Trainer(model, args, …), policy), once")
    plugged: Any = trainer
    args = plugged.args
    schedule = Schedule.of(usual_policy({args.device.type}) if policy is None else policy)
    raise_together(wrong_options(on_overflow=on_overflow))
    for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise PolicyError(
                f"the Trainer has {name}=True besides",
                why="its casts would stand around the policy's",
                write=f"TrainingArguments(…) without {name}",
            )
    refuse(plugged.accelerator, [plugged.model] if isinstance(plugged.model, torch.nn.Module) else [])
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"the Trainer runs on {args.n_gpu} GPUs in one process",
            why="torch.nn.DataParallel copies the model for each batch, without what the session has made of it",
            write="torchrun --nproc-per-node N script.py; or CUDA_VISIBLE_DEVICES=0",
        )
    trainer_class = type(trainer)
    plugged.__class__ = type(
        f"Mezzo{trainer_class.__name__}", (_Plugged, trainer_class), {"__module__": trainer_class.__module__}
    )
    plugged.policy, plugged._schedule, plugged._on_overflow = schedule.at(0), schedule, on_overflow
    return trainer


class _Plugged(_Trainer):
    """What a Trainer is once it is plugged in, before its own class in the order of methods.

    Attributes:
        policy: The policy now.
        session: The session while it trains; ``None`` at other times.
    """

    policy: Policy
    session: AcceleratedPrecision | None = None
    model: Any
    _schedule: Schedule
    _on_overflow: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and the session over it; before the model is wrapped."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.session is not None:  # a run that begins anew with smaller batches
            self.session.close()
        if isinstance(optimizer, AcceleratedOptimizer):  # of a run before
            optimizer = optimizer.optimizer
        self.policy = self._schedule.at(0)
        self.session = attach(self.accelerator, self.model, optimizer, self.policy, on_overflow=self._on_overflow)
        self.session.carry_out(self._schedule, self._change)
        self.optimizer = optimizer
        return optimizer

    def _change(self, policy: Policy) -> None:
        if self.session is not None:
            self.session.change(policy)
            self.policy = policy

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``Trainer.train``. Afterwards the model is FP32."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.session is not None:
                self.session.close()
                self.session, self.model_wrapped = None, self.model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict under the policy, with parts that are called without their model, as by ``generate``."""
        if self.session is not None:
            return super().evaluation_loop(*args, **kwargs)
        prepared = prepare(self.model, self.policy)
        calls = Calls([self.model], self.policy, prepared.autocast)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            calls.close()
            prepared.remove()

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log the session's values beside a training loss; see ``Trainer.log``."""
        if self.session is not None and not {"loss", "train_loss"}.isdisjoint(logs):
            logs |= self.session.metrics()
        super().log(logs, *args, **kwargs)
