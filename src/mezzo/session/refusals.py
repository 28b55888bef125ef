"""What stands against a session, or a call of it, by its arguments, found before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast import Prepared
from mezzo.errors import MezzoError, NumericsError, PolicyError, StateError, UnsupportedError, nearest, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.optim.state import held_state
from mezzo.policy import Policy
from mezzo.session.verdict import Judged
from mezzo.session.weights.phases import Handles

__all__ = [
    "check_loss", "check_loss_id", "check_numbers", "check_session", "checked_schedulers", "chosen",
    "models_and_optimizers", "not_finite", "unknown_reaction", "wrong_norm",
]  # fmt: skip

_ORDER: Final = "MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy): models first, then optimizers"
_ON_OVERFLOW: Final = ("skip", "explain", "raise")
#: Hyper-parameters that torch's optimizers have, and that no one means to be infinite.
_FINITE: Final = frozenset(
    ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lambd", "lr_decay", "etas")
)


# A session ----------------------------------------------------------------------------------------------


def models_and_optimizers(models: Any, optimizers: Any) -> tuple[list[nn.Module | Prepared], list[Optimizer]]:
    """Return both as lists; handles of prepared models stand among the models.

    Raises:
        PolicyError: Something else among them, or the one in the other's place.
    """
    pairs: tuple[tuple[list[Any], Any, str], ...] = (
        (_listed(models), (nn.Module, Prepared), "a model must be an nn.Module"),
        (_listed(optimizers), Optimizer, "an optimizer must be a torch.optim.Optimizer"),
    )
    problems = []
    for given, kind, what in pairs:
        if wrong := list(dict.fromkeys(_kind_of(each) for each in given if not isinstance(each, kind))):
            problems.append(PolicyError(f"{what}, not {some_of(wrong)}", write=_ORDER))
        elif not given:
            problems.append(PolicyError(f"{what}, and there is none", write=_ORDER))
    (all_models, _, _), (all_optimizers, _, _) = pairs
    if len(problems) == 2 and (
        all(isinstance(each, Optimizer) for each in all_models)
        and all(isinstance(each, nn.Module) for each in all_optimizers)
    ):
        problems = [PolicyError("the model and the optimizer stand in each other's place", write=_ORDER)]
    if problems:
        raise PolicyError.together(problems)
    return all_models, all_optimizers


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_session(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    device: Any,
    *,
    handles: Handles,
    max_grad_norm: Any,
    num_losses: Any,
    on_overflow: Any,
) -> None:
    """Raise all that stands against a session, before anything is changed."""
    problems: list[MezzoError] = []
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        problems.append(PolicyError("an optimizer is listed twice", why="it would step twice", write="each one once"))
    problems += [*_absent_device(device), *wrong_norm(max_grad_norm)]
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        why = "each loss has one scale, from 1 loss on"
        problems.append(PolicyError(f"num_losses is {num_losses!r}", why=why, write="num_losses=2"))
    problems += unknown_reaction(on_overflow)
    if not problems:
        problems += _unfit(models, optimizers)
        if policy.master_weights:
            problems += _without_masters(optimizers, policy)
        elif policy.param_dtype != torch.float32:
            problems += _lost_state(models, optimizers, policy, handles)
    if problems:
        raise type(problems[0]).together(problems)


def wrong_norm(value: Any) -> Iterator[PolicyError]:
    """Yield what is wrong with a norm to clip to; ``None`` clips nothing, and neither does infinity."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        yield PolicyError(
            f"max_grad_norm is {value!r}",
            why="a norm to clip to is positive",
            write="max_grad_norm=1.0; None does not clip",
        )


def unknown_reaction(value: Any) -> Iterator[PolicyError]:
    """Yield what is wrong with a reaction to overflows."""
    if value not in _ON_OVERFLOW:
        yield PolicyError(f"unknown on_overflow {value!r}", why=nearest(str(value), _ON_OVERFLOW))


def _absent_device(device: Any) -> Iterator[UnsupportedError]:
    try:
        torch.zeros((), device="cpu" if device is None else device)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0]
        yield UnsupportedError(f"the device {device!r} cannot be used", why=why, write="the device of the model")


def _unfit(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[MezzoError]:
    """Yield an error for each optimizer that is empty, that another session holds, or that has others' parameters."""
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not any(group["params"] for group in optimizer.param_groups):
            write = f"{kind}(model.parameters(), …)"
            yield PolicyError("the optimizer updates no parameter", where=kind, write=write)
        if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
            yield StateError(
                "parameters on the meta device have no values yet",
                where=kind,
                write="model.to_empty(device=…), then initialise or load them; then the optimizer, then the session",
            )
        if _is_held(optimizer):
            yield StateError(
                "the optimizer belongs to a session or to MasterWeights already",
                where=kind,
                write="session.close() (or masters.remove()) first",
            )
        elif foreign := [
            f"group {i}, parameter {j} {tuple(param.shape)}"
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
            if id(param) not in known
        ]:
            yield PolicyError(
                "the optimizer updates parameters that are not the models'",
                where=f"{kind}: {some_of(foreign)}",
                why="casting and masters would not reach them; was the model copied, rebuilt or given to fully_shard "
                "after the optimizer?",
                write=f"{kind}(model.parameters(), …) after the model is final",
            )


def _is_held(optimizer: Optimizer) -> bool:
    """Whether a session or ``MasterWeights`` holds the optimizer, which may have masters in its parameters' places."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return any(type(owner).__module__.startswith("mezzo.") for owner in owners)


def _without_masters(optimizers: list[Optimizer], policy: Policy) -> Iterator[PolicyError]:
    """Yield an error for each optimizer whose parameters cannot have one master each."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        where = f"optimizer {number} ({kind})"
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        own, one_pass = set(params), as_one_pass(optimizer)
        if len(own) < len(params):
            what = "a parameter stands twice in one optimizer, and can have only one master"
            yield PolicyError(what, where=where, write="each parameter once")
        if shared := own & seen:
            yield PolicyError(
                "two optimizers update the same parameters, which can have only one master each",
                where=f"{where}: {len(shared)} parameter(s)",
                write="one optimizer for each parameter, or O1, which needs no masters",
            )
        if one_pass is not None and not one_pass.keeps_masters:
            yield PolicyError(
                f"{policy.level} keeps FP32 masters, and the optimizer is told to keep none",
                where=f"{kind}(…, master=None)",
                write=f'{kind}(…, master="split"); or policy="O3", which has no masters',
            )
        seen |= own


def _lost_state(
    models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, handles: Handles
) -> Iterator[StateError]:
    every: dict[Tensor, str] = {p: n for model in models for n, p in model.named_parameters()}
    wide = {param for found in handles.values() for handle in found for param in handle.originals()}
    names = {param: name for param, name in every.items() if param.dtype == torch.float32 or param in wide}
    for optimizer in optimizers:
        if (own := as_one_pass(optimizer)) is not None:  # whose moments keep their own dtype
            if halves := [every[param] for param in own.stored(in_fp32=True) if param in every]:
                yield StateError(
                    "the optimizer holds the other half of weights, for which this policy has no place",
                    where=f"{type(optimizer).__name__}: {some_of(halves)}",
                    why=f"{policy.level} keeps no masters, so {policy.dtype} would be all that is left of them",
                    write="a policy with masters (O2); or optimizer.release() first, which gives them up",
                )
        elif held := held_state(optimizer, names):
            yield StateError(
                "the optimizer holds FP32 state for parameters that are about to be low precision",
                where=f"{type(optimizer).__name__}: {some_of(held)}",
                why=f"{policy.level} keeps no masters, so the state would have to be rounded to {policy.dtype}",
                write="a policy with masters (O2), or a new optimizer",
            )


# Its calls --------------------------------------------------------------------------------------------------


def _listed(given: Any) -> list[Any]:
    """Return a list of what was given, be it one model or optimizer or several."""
    is_one = isinstance(given, (nn.Module, Optimizer, str)) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def chosen(optimizers: Any, known: list[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that a call is for: all of the session's, or those given.

    Raises:
        PolicyError: One that is not the session's.
    """
    if optimizers is None:
        return known
    given = _listed(optimizers)
    foreign = [type(o).__name__ for o in given if not any(o is mine for mine in known)]
    if foreign or not given:
        functions = [o for o in given if callable(o) and not isinstance(o, Optimizer)]
        raise PolicyError(
            "not an optimizer of this session",
            where=some_of(foreign) or "an empty list",
            why=f"the session has {some_of([type(o).__name__ for o in known])}",
            write="amp.step(closure=closure), by its name"
            if functions
            else "the optimizers that were given to MixedPrecision(models, optimizers, policy)",
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


def check_loss_id(loss_id: Any, num_losses: int) -> int:
    """Return the number of a loss, or refuse one that the session has no scale for."""
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < num_losses:
        raise PolicyError(
            f"there is no loss {loss_id!r}",
            why=f"the session has num_losses={num_losses}, so loss_id is from 0 to {num_losses - 1}",
            write=f"MixedPrecision(…, num_losses={loss_id + 1})"
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


def check_numbers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse a hyper-parameter that is not finite, which would spoil all weights, before a step writes anything.

    mezzo's optimizers look at theirs by themselves. A tensor is read where that is free, in host memory; one on an
    accelerator is not, since the host would have to wait for it.

    Raises:
        PolicyError: With the optimizer, the group and the key; one message lists everything.
    """
    problems = [
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
    ]
    if problems:
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
