"""What stands against a session, a loss or a saved state, found before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, some_of
from mezzo.policy import Policy
from mezzo.step.master import held_state

__all__ = [
    "STATE_VERSION",
    "check_loss",
    "check_session",
    "check_state",
    "checked_schedulers",
    "listed",
    "refuse_fp16_unscaling",
]

#: Of the form of a session's state dict.
STATE_VERSION: Final = 1
_STATE_KEYS: Final[dict[str, type]] = {
    "version": int, "policy": str, "parameters": Mapping, "loss_scale": Mapping, "masters": Mapping,
    "micro_batches": int, "gradients": Mapping, "master_gradients": Mapping,
}  # fmt: skip


def listed(optimizers: Any) -> list[Any]:
    """Return a list of what was given, be it one optimizer or several."""
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def check_session(
    models: list[nn.Module], optimizers: list[Any], policy: Policy, max_grad_norm: Any, device: Any
) -> None:
    """Raise all that stands against a session, before anything is changed."""
    problems: list[MezzoError] = []
    if not models or not all(isinstance(model, nn.Module) for model in models):
        problems.append(PolicyError("models must be one nn.Module or more", write="MixedPrecision(model, optimizer)"))
    for optimizer in optimizers or [None]:
        if not isinstance(optimizer, Optimizer):
            problems.append(
                PolicyError(
                    f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}",
                    write="MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy)",
                )
            )
        elif needs_closure(optimizer):
            problems.append(
                UnsupportedError(
                    f"{type(optimizer).__name__} evaluates the loss inside its step, which a session does not do yet",
                    why="its step() needs a closure, and each evaluation would need its own check and unscaling",
                    write="mezzo.MasterWeights(optimizer).step(closure), which needs no loss scale in bfloat16",
                )
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        problems.append(PolicyError("an optimizer is listed twice", why="it would step twice", write="each one once"))
    if device is not None:
        problems += _absent_device(device)
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        problems.append(
            PolicyError(
                f"max_grad_norm is {max_grad_norm!r}",
                why="a norm to clip to is positive",
                write="max_grad_norm=1.0",
            )
        )
    if not problems:
        problems += _foreign_params(models, optimizers)
        problems += _taken(optimizers)
        if policy.master_weights:
            problems += _shared_params(optimizers)
        elif policy.param_dtype != torch.float32:
            problems += _lost_state(models, optimizers, policy)
    if problems:
        raise type(problems[0]).together(problems)


def _foreign_params(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[PolicyError]:
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        foreign = [
            f"group {i}, parameter {j} {tuple(param.shape)}"
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
            if id(param) not in known
        ]
        if foreign:
            yield PolicyError(
                "the optimizer updates parameters that are not the models'",
                where=f"{type(optimizer).__name__}: {some_of(foreign)}",
                why="casting and masters would not reach them; was the model copied or rebuilt after the optimizer?",
                write=f"{type(optimizer).__name__}(model.parameters(), …) after the model is final",
            )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step cannot be called without a closure, as with LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _absent_device(device: Any) -> Iterator[UnsupportedError]:
    try:
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0]
        yield UnsupportedError(f"the device {device!r} cannot be used", why=why, write="the device of the model")


def _taken(optimizers: list[Optimizer]) -> Iterator[MezzoError]:
    """Yield an error for each optimizer that is empty, or that another session holds."""
    for optimizer in optimizers:
        if not any(group["params"] for group in optimizer.param_groups):
            yield PolicyError(
                "the optimizer updates no parameter",
                where=type(optimizer).__name__,
                write=f"{type(optimizer).__name__}(model.parameters(), …)",
            )
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
        if any(type(owner).__module__.startswith("mezzo.") for owner in owners):
            yield StateError(
                "the optimizer belongs to a session or to MasterWeights already",
                where=type(optimizer).__name__,
                write="session.close() (or masters.remove()) first",
            )


def checked_schedulers(scheduler: Any) -> list[Any]:
    """Return the schedulers to step, or refuse what cannot be stepped without more."""
    schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PolicyError(
                "ReduceLROnPlateau needs a metric",
                where="amp.step(scheduler=…)",
                write="if not step.skipped: scheduler.step(metric)",
            )
        if not callable(getattr(each, "step", None)):
            raise PolicyError(
                f"a scheduler has a step(), and {type(each).__name__} has none",
                where="amp.step(scheduler=…)",
                write="amp.step(scheduler=torch.optim.lr_scheduler.…)",
            )
    return schedulers


def _shared_params(optimizers: list[Optimizer]) -> Iterator[PolicyError]:
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        own = set(params)
        if len(own) < len(params):
            yield PolicyError(
                "a parameter stands twice in one optimizer, and can have only one master",
                where=f"optimizer {number} ({type(optimizer).__name__})",
                write="each parameter once",
            )
        if shared := own & seen:
            yield PolicyError(
                "two optimizers update the same parameters, which can have only one master each",
                where=f"optimizer {number} ({type(optimizer).__name__}): {len(shared)} parameter(s)",
                write="one optimizer for each parameter, or O1, which needs no masters",
            )
        seen |= own


def _lost_state(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> Iterator[StateError]:
    names = {p: n for model in models for n, p in model.named_parameters() if p.dtype == torch.float32}
    for optimizer in optimizers:
        if held := held_state(optimizer, names):
            yield StateError(
                "the optimizer holds FP32 state for parameters that are about to be low precision",
                where=f"{type(optimizer).__name__}: {some_of(held)}",
                why=f"{policy.level} keeps no masters, so the state would have to be rounded to {policy.dtype}",
                write="a policy with masters (O2), or a new optimizer",
            )


def refuse_fp16_unscaling(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
    """Refuse to unscale gradients in the FP16 of parameters that have no master, which would flush small ones."""
    scale = policy.loss_scale
    if policy.master_weights or scale.mode == "none" or (scale.mode == "constant" and scale.init == 1.0):
        return
    names = {param: name for model in models for name, param in model.named_parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        half = [f"{names[p]} (float16, {'×'.join(map(str, p.shape))})" for p in params if p.dtype == torch.float16]
        if half:
            raise UnsupportedError(
                "fp16 gradients cannot be unscaled in fp16",
                where=f"{some_of(half, 1)}, optimizer {type(optimizer).__name__}",
                why="dividing them by the loss scale in float16 flushes small ones to zero",
                write='MixedPrecision(model, optimizer, policy="O2")   # keeps FP32 masters; or model.float() first',
            )


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


def check_state(state: Any, policy: Policy, parameters: Mapping[str, str], masters: Mapping[str, Tensor]) -> None:
    """Refuse a state that is not this session's, with every difference.

    Args:
        state: What was given to ``load_state_dict``.
        policy: The session's policy.
        parameters: Dtype and shape of each of its parameters, as text.
        masters: Its masters.
    """
    if isinstance(state, Mapping):
        wrong = [
            f"{key} is missing" if key not in state else f"{key} is a {type(state[key]).__name__}"
            for key, kind in _STATE_KEYS.items()
            if not isinstance(state.get(key), kind)
        ]
    else:
        wrong = [f"it is a {type(state).__name__}"]
    if wrong:
        raise StateError(
            "this is not the state of a MixedPrecision session", why=some_of(wrong), write="amp.state_dict()"
        )
    if state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']}", why=f"this mezzo reads version {STATE_VERSION}")
    shapes, saved_shapes = ({n: str(list(m.shape)) for n, m in each.items()} for each in (masters, state["masters"]))
    differences = [f"policy {line}" for line in Policy.parse(state["policy"]).differences(policy)]
    for kind, saved, mine in (("parameter", state["parameters"], parameters), ("master of", saved_shapes, shapes)):
        differences += [
            f"{kind} {name}: {saved.get(name, 'missing')} → {mine.get(name, 'missing')}"
            for name in dict.fromkeys((*saved, *mine))
            if saved.get(name) != mine.get(name)
        ]
    if differences:
        raise StateError(
            "the state belongs to another session",
            where="\n".join(differences),
            why="saved → this session; continuing would not be the same run",
            write="MixedPrecision(model, optimizer, policy) with the saved policy and model",
        )
