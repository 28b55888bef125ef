"""Mixed precision for the Trainer of transformers: one line, and behind it a session for each of its runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from mezzo.cast import prepare
from mezzo.cast.model import sharding
from mezzo.errors import PolicyError, UnsupportedError, require_extra, shown
from mezzo.policy import Policy
from mezzo.session.attached.own_loop.forward import CalledIn

require_extra("transformers", "mixed precision for the Trainer needs transformers", "transformers", "accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Trainer  # noqa: E402

from mezzo.integrations.accelerate import AcceleratedPrecision, attach, refuse  # noqa: E402

__all__ = ["MezzoMixin", "MezzoTrainer", "plug"]

T = TypeVar("T", bound=Trainer)  # Python 3.11 has no `def f[T]`
if TYPE_CHECKING:  # what the mixin stands before
    _Trainer = Trainer
else:
    _Trainer = object


def plug(
    trainer: T,
    policy: Policy | str | os.PathLike[str] = "O1",
    *,
    on_overflow: Literal["skip", "explain", "raise"] = "skip",
    restore_buffers: bool = False,
    hold_schedulers: bool = True,
) -> T:
    """Let a Trainer of transformers, or of a class that derives from it, train and evaluate under a policy.

    Its accumulation, clipping, callbacks and checkpoints stay as they are, on one rank and on several:

    - ``train()`` has a session, and at its end the model is FP32; ``resume_from_checkpoint`` goes on bit for bit;
    - ``evaluate()`` and ``predict()`` run under the policy, inside ``train()`` and by themselves;
    - ``grad_norm`` in the log is that of the unscaled gradients, and ``max_grad_norm`` clips these;
    - its scheduler waits where a step was skipped; ``global_step`` counts that step, as with its own scaler;
    - ``log_history``, and what callbacks log, have ``mezzo/scale``, the loss scale, and ``mezzo/skipped``, a count of
      steps, beside ``loss``;
    - checkpoints and ``save_model()`` hold FP32 weights at every level.

    Args:
        trainer: The Trainer. Its class becomes one that derives from :class:`MezzoMixin` and its own.
        policy: A policy, its text, or the path of a policy file.
        on_overflow: As for :class:`mezzo.MixedPrecision`; what ``"explain"`` finds is logged as ``mezzo/overflow``.
        restore_buffers: As for :class:`mezzo.MixedPrecision`.
        hold_schedulers: Whether the scheduler waits.

    Returns:
        The same Trainer; ``trainer.session`` is its session while it trains, and ``None`` at other times.

    Raises:
        PolicyError: No Trainer, or a plugged one; a wrong policy; ``fp16``, ``bf16``, ``fp16_full_eval`` or
            ``bf16_full_eval`` besides.
        UnsupportedError: transformers or accelerate is not installed; or DeepSpeed, FSDP, a sharded model, or
            DataParallel.

    **Cost**: that of the session. ``hold_schedulers`` costs one host sync a step, each log one.

    Example:
        ``trainer = plug(Trainer(model, args, train_dataset=data), "O2,dtype=bfloat16")``, then ``trainer.train()``.
    """
    if not isinstance(trainer, Trainer):
        raise PolicyError(f"the trainer is {shown(trainer)}", write="plug(Trainer(model, args, …), policy)")
    if isinstance(trainer, MezzoMixin):
        raise PolicyError("the trainer has a policy already", write="plug(trainer, policy) once, or MezzoTrainer alone")
    options: dict[str, Any] = {
        "on_overflow": on_overflow,
        "restore_buffers": restore_buffers,
        "hold_schedulers": hold_schedulers,
    }
    _refuse(trainer)
    trainer.__dict__ |= {"policy": Policy.of(policy), "session": None, "_mezzo": options}
    kind = type(trainer)
    trainer.__class__ = type(f"Mezzo{kind.__name__}", (MezzoMixin, kind), {"__module__": kind.__module__})
    return trainer


def _refuse(trainer: Trainer) -> None:
    """Raise what stands against a Trainer."""
    args = trainer.args
    for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise PolicyError(
                f"the Trainer has {name}=True besides",
                why="its casts would stand around the policy's",
                write=f"TrainingArguments(…) without {name}",
            )
    refuse(trainer.accelerator)
    if isinstance(trainer.model, torch.nn.Module) and sharding.units(trainer.model):
        raise UnsupportedError(
            "the Trainer's model is sharded",
            why="its checkpoints would hold the parts of one rank",
            write="the whole model on each rank of torchrun --nproc-per-node N script.py; or a loop of your own with "
            "mezzo.integrations.accelerate.attach",
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"the Trainer runs on {args.n_gpu} GPUs in one process",
            why="torch.nn.DataParallel copies the model for each batch, without what the session has made of it",
            write="torchrun --nproc-per-node N script.py; or CUDA_VISIBLE_DEVICES=0",
        )


class MezzoMixin(_Trainer):
    """Stand before a Trainer in the bases of a class: ``class Mine(MezzoMixin, Seq2SeqTrainer)``; see :func:`plug`.

    Args:
        *args: The Trainer's.
        policy: See :func:`plug`, and so on.
        on_overflow: See there.
        restore_buffers: See there.
        hold_schedulers: See there.
        **kwargs: The Trainer's.

    Attributes:
        policy: The policy.
        session: The session while it trains; ``None`` at other times.
    """

    policy: Policy
    session: AcceleratedPrecision | None = None
    model: Any
    _region: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def __init__(
        self,
        *args: Any,
        policy: Policy | str | os.PathLike[str] = "O1",
        on_overflow: Literal["skip", "explain", "raise"] = "skip",
        restore_buffers: bool = False,
        hold_schedulers: bool = True,
        **kwargs: Any,
    ) -> None:
        self.policy = Policy.of(policy)
        self._mezzo: dict[str, Any] = {
            "on_overflow": on_overflow, "restore_buffers": restore_buffers, "hold_schedulers": hold_schedulers,
        }  # fmt: skip
        super().__init__(*args, **kwargs)
        _refuse(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and the session over it; before the model is wrapped."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.session is not None:  # a run that begins anew with smaller batches
            self.session.zero_grad()
            return optimizer
        if isinstance(optimizer, AcceleratedOptimizer):  # of a run before, whose session has ended
            optimizer = optimizer.optimizer
        self.session = attach(self.accelerator, self.model, optimizer, self.policy, **self._mezzo)
        self.optimizer = optimizer
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``Trainer.train``. Afterwards the model is FP32."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.session is not None:
                self.session.close()
                self.session, self.model_wrapped = None, self.model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict under the policy; see ``Trainer.evaluation_loop``."""
        with ExitStack() as undo:
            undo.callback(setattr, self, "_region", self._region)
            if self.session is not None:
                self._region = self.session.autocast
            else:
                prepared = prepare(self.model, self.policy)
                undo.callback(prepared.remove)
                self._region = prepared.autocast
                wide = torch.float32 if self.policy.output_dtype is None else None
                undo.callback(CalledIn([self.model], prepared.autocast, wide, lambda: lambda _: None).leave)
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch, with parts that are called without their model too, as ``generate`` calls an encoder."""
        with self._region():
            return super().prediction_step(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log the session's values beside a training loss; see ``Trainer.log``."""
        if self.session is not None and not {"loss", "train_loss"}.isdisjoint(logs):
            logs |= self.session.metrics()
        super().log(logs, *args, **kwargs)


class MezzoTrainer(MezzoMixin, Trainer):
    """A Trainer under a policy: ``MezzoTrainer(model, args, train_dataset=data, policy="O2,dtype=bfloat16")``.

    Args:
        *args: The Trainer's.
        policy: See :func:`plug`, and so on.
        on_overflow: See there.
        restore_buffers: See there.
        hold_schedulers: See there.
        **kwargs: The Trainer's.
    """
