"""What stands against a call of a session by its arguments, found before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import NumericsError, PolicyError, StateError, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.refusals.beginning import listed
from mezzo.session.verdict import Judged

__all__ = [
    "check_closure",
    "check_loss",
    "check_loss_id",
    "check_numbers",
    "checked_schedulers",
    "chosen",
    "not_finite",
]

#: Hyper-parameters that torch's optimizers have, and that no one means to be infinite.
_FINITE: Final = frozenset(
    ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lambd", "lr_decay", "etas")
)


def chosen(optimizers: Any, known: list[Optimizer], begin: str = "MixedPrecision") -> list[Optimizer]:
    """Return the optimizers that a call is for: all of the session's, or those given.

    Args:
        optimizers: One or several; ``None`` for all.
        known: Those of the session.
        begin: What began the session, for errors.

    Raises:
        PolicyError: One that is not the session's.
    """
    if optimizers is None:
        return known
    given = listed(optimizers)
    foreign = [type(o).__name__ for o in given if not any(o is mine for mine in known)]
    if foreign or not given:
        functions = [o for o in given if callable(o) and not isinstance(o, Optimizer)]
        raise PolicyError(
            "not an optimizer of this session",
            where=some_of(foreign) or "an empty list",
            why=f"the session has {some_of([type(o).__name__ for o in known])}",
            write="amp.step(closure=closure), by its name"
            if functions
            else f"the optimizers that were given to {begin}(models, optimizers, …)",
        )
    return [mine for mine in known if any(mine is o for o in given)]


def check_loss(loss: Any) -> None:
    """Refuse a loss that has no gradient, before anything is scaled."""
    if not isinstance(loss, Tensor):
        raise PolicyError(f"the loss is a {type(loss).__name__}, not a tensor", write="amp.backward(loss)")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise PolicyError(
            "the loss must be one floating number",
            where=f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}",
            why="a gradient is defined for a real scalar",
            write="amp.backward(loss.mean())" if loss.is_floating_point() else "a loss computed from floating outputs",
        )
    if not loss.requires_grad:
        raise StateError(
            "the loss depends on no parameter",
            why="it does not require a gradient: detached, computed under no_grad, or all parameters are frozen",
            write="compute it from the model's outputs, outside torch.no_grad()",
        )


def check_loss_id(loss_id: Any, num_losses: int, begin: str = "MixedPrecision") -> int:
    """Return the number of a loss, or refuse one that the session has no scale for.

    Args:
        loss_id: The number.
        num_losses: How many there are.
        begin: What began the session, for errors.
    """
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < num_losses:
        raise PolicyError(
            f"there is no loss {loss_id!r}",
            why=f"the session has num_losses={num_losses}, so loss_id is from 0 to {num_losses - 1}",
            write=f"{begin}(…, num_losses={loss_id + 1})"
            if isinstance(loss_id, int) and loss_id >= num_losses
            else "loss_id=0",
        )
    return loss_id


def checked_schedulers(scheduler: Any) -> list[Callable[[], Any]]:
    """Return what to call after a step that was taken, or refuse what cannot be called without more."""
    schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    calls: list[Callable[[], Any]] = []
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PolicyError(
                "ReduceLROnPlateau needs a metric",
                where="amp.step(scheduler=…)",
                write="amp.step(scheduler=lambda: plateau.step(metric))",
            )
        call = getattr(each, "step", each)
        if not callable(call):
            raise PolicyError(
                f"a scheduler has a step(), and {type(each).__name__} has none",
                where="amp.step(scheduler=…)",
                write="amp.step(scheduler=torch.optim.lr_scheduler.…)",
            )
        calls.append(call)
    return calls


def check_closure(closure: Any) -> None:
    """Refuse a closure that cannot be called, before a step has taken anything."""
    if not callable(closure):
        raise PolicyError(
            f"a closure is a function, and {type(closure).__name__} is none",
            where="amp.step(closure=…)",
            write="def closure(): amp.zero_grad(); loss = …; amp.backward(loss); return loss",
        )


def check_numbers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse a hyper-parameter that is not finite, which would spoil all weights, before a step writes anything.

    mezzo's optimizers look at theirs by themselves. A tensor is read where that is free, in host memory; one on an
    accelerator is not, since the host would have to wait for it.

    Raises:
        PolicyError: With the optimizer, the group and the key; one message lists everything.
    """
    if problems := [
        PolicyError(
            f"{name} is {value!r}",
            where=f"{type(optimizer).__name__}, group {number}",
            why="no weight would be finite after the step; nothing was updated",
            write=f'optimizer.param_groups[{number}]["{name}"] = a finite number',
        )
        for optimizer in optimizers
        if as_one_pass(optimizer) is None
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and not _is_usable(name, value)
    ]:
        raise PolicyError.together(problems)


def _is_usable(name: str, value: Any) -> bool:
    kind = type(value)
    if kind is bool or kind is int or value is None:
        return True
    if kind is tuple or kind is list:
        return all(_is_usable(name, each) for each in value)
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1 or not value.is_floating_point():
            return True
        value = float(value.detach().double().reshape(()).numpy())
    # Some optimizers of others mean "no limit" by an infinity.
    return not isinstance(value, float) or math.isfinite(value) or (name not in _FINITE and not math.isnan(value))


def not_finite(judged: Judged, name_of: Callable[[Tensor], str], loss_failed: Tensor) -> NumericsError:
    """Build the error of ``on_overflow="raise"``; the host waits for the device."""
    bad = [name_of(p) for p, ok in zip(judged.params, judged.verdict.norms.isfinite().tolist(), strict=True) if not ok]
    scales = sorted({float(share.scale) for share in judged.shares})
    under = " and ".join(f"{scale:.6g}" for scale in scales if scale != 1.0)
    unseen = "their norm, once unscaled" if judged.heard is None else "none that this rank holds, as they stand"
    first = "" if judged.heard is None else f", first on rank {int(judged.heard.rank_found)}"
    return NumericsError(
        "the gradients are not finite",
        where=(f"{len(bad)} of {len(judged.params)}: {some_of(bad)}" if bad else unseen) + first,
        why="the loss itself is not finite, which no loss scale cures; nothing was updated"
        if loss_failed
        else f"an overflow{' under the loss scale ' + under if under else ''}; nothing was updated",
        write='on_overflow="explain", which says where it began; or on_overflow="skip" to go on',
    )
