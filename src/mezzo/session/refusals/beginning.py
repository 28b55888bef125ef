"""What stands against a session by its arguments, found before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, sgd

from mezzo.cast import Prepared
from mezzo.cast.model.hooks import is_ours, owner_of
from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, raise_together, some_of, unknown_word
from mezzo.optim.optimizer import as_one_pass
from mezzo.optim.state import held_state
from mezzo.policy import Policy
from mezzo.session.weights.phases import Handles

if TYPE_CHECKING:
    from mezzo.session.core import Core

__all__ = [
    "check_added", "check_session", "listed", "listed_optimizers", "models_and_optimizers", "owners", "wrong_options",
]  # fmt: skip

_ORDER: Final = "MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy): models first, then optimizers"
_OPTIMIZER: Final = "an optimizer must be a torch.optim.Optimizer"
_ON_OVERFLOW: Final = ("skip", "explain", "raise")


def listed(given: Any) -> list[Any]:
    """Return a list of what was given, be it one model or optimizer or several."""
    is_one = isinstance(given, (nn.Module, Optimizer, str)) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def models_and_optimizers(models: Any, optimizers: Any) -> tuple[list[nn.Module | Prepared], list[Optimizer]]:
    """Return both as lists; handles of prepared models stand among the models.

    Raises:
        PolicyError: Something else among them, or the one in the other's place.
    """
    all_models, all_optimizers = listed(models), listed(optimizers)
    problems = [
        *_of_another_kind(all_models, (nn.Module, Prepared), "a model must be an nn.Module", _ORDER),
        *_of_another_kind(all_optimizers, Optimizer, _OPTIMIZER, _ORDER),
    ]
    if len(problems) == 2 and (
        all(isinstance(each, Optimizer) for each in all_models)
        and all(isinstance(each, nn.Module) for each in all_optimizers)
    ):
        problems = [PolicyError("the model and the optimizer stand in each other's place", write=_ORDER)]
    raise_together(problems)
    return all_models, all_optimizers


def listed_optimizers(optimizers: Any, write: str) -> list[Optimizer]:
    """Return one optimizer or several as a list.

    Args:
        optimizers: What was given.
        write: The right call, for errors.

    Raises:
        PolicyError: Something else among them, or none.
    """
    given = listed(optimizers)
    raise_together(_of_another_kind(given, Optimizer, _OPTIMIZER, write))
    return given


def _of_another_kind(given: list[Any], kind: Any, what: str, write: str) -> Iterator[PolicyError]:
    if wrong := list(dict.fromkeys(_kind_of(each) for each in given if not isinstance(each, kind))):
        yield PolicyError(f"{what}, not {some_of(wrong)}", write=write)
    elif not given:
        yield PolicyError(f"{what}, and there is none", write=write)


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
    problems: list[MezzoError] = [*_listed_twice(optimizers), *_absent_device(device)]
    problems += wrong_options(max_grad_norm=max_grad_norm, on_overflow=on_overflow)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        why = "each loss has one scale, from 1 loss on"
        problems.append(PolicyError(f"num_losses is {num_losses!r}", why=why, write="num_losses=2"))
    if not problems:
        problems += [*_unfit(models, optimizers), *_unmoved(optimizers, policy)]
        if policy.master_weights:
            problems += _without_masters(optimizers, policy)
        elif policy.param_dtype != torch.float32:
            problems += _lost_state(models, optimizers, policy, handles)
    raise_together(problems)


def check_added(given: Any, core: Core) -> list[Optimizer]:
    """Return one more optimizer of a session or several as a list, or raise all that stands against them.

    Args:
        given: What was given.
        core: The session; nothing of it is changed.
    """
    optimizers = listed_optimizers(given, "amp.add(torch.optim.AdamW(model.head.parameters()))")
    if open_windows := [group.window for group in core.groups if group.window is not None]:
        raise StateError(
            "optimizers were added inside an accumulation window",
            where=f"after {open_windows[0].micro_batches} backward pass(es) since the last step",
            why="what their parameters got in these would be lost",
            write="amp.step() or amp.zero_grad() first",
        )
    problems: list[MezzoError] = [*_listed_twice(optimizers)]
    if known := [type(each).__name__ for each in optimizers if each in core.optimizers]:
        problems.append(PolicyError("the session has this optimizer already", where=some_of(known)))
    if not problems:
        problems += [*_unfit(core.models, optimizers), *_unmoved(optimizers, core.policy)]
        if core.policy.master_weights:
            updated = {id(leaf) for group in core.groups for _, leaf in group.with_leaves()}
            problems += _without_masters(optimizers, core.policy, updated, len(core.optimizers))
            if core.weights.shards:
                problems.append(
                    UnsupportedError(
                        "an optimizer cannot join a session with masters over models that fully_shard has sharded",
                        why="which parts are kept in low precision was decided for the optimizers that there were",
                        write="all optimizers in MixedPrecision(model, [optimizer, …], policy); or O1",
                    )
                )
    raise_together(problems)
    return optimizers


def _listed_twice(optimizers: list[Optimizer]) -> Iterator[PolicyError]:
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        yield PolicyError("an optimizer is listed twice", why="it would step twice", write="each one once")


def wrong_options(*, max_grad_norm: Any = None, on_overflow: Any = "skip") -> Iterator[PolicyError]:
    """Yield what is wrong with options that may be set between steps.

    Args:
        max_grad_norm: A norm to clip to; ``None`` clips nothing, and neither does infinity.
        on_overflow: A reaction to overflows.
    """
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and max_grad_norm > 0):
        yield PolicyError(
            f"max_grad_norm is {max_grad_norm!r}",
            why="a norm to clip to is positive",
            write="max_grad_norm=1.0; None does not clip",
        )
    if on_overflow not in _ON_OVERFLOW:
        yield unknown_word("on_overflow", on_overflow, _ON_OVERFLOW)


def _absent_device(device: Any) -> Iterator[UnsupportedError]:
    try:
        torch.zeros((), device="cpu" if device is None else device)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0]
        yield UnsupportedError(f"the device {device!r} cannot be used", why=why, write="the device of the model")


def _unfit(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[MezzoError]:
    """Yield an error for each optimizer that is empty, that another session holds, or that has others' parameters."""
    known = {id(param) for model in models for param in model.parameters()}
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is wrapped before it is imported
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for model in models for m in model.modules()):
        yield UnsupportedError(
            "the model is wrapped by FullyShardedDataParallel, which is FSDP1",
            why="it keeps parameters in flat pieces, in which rules, masters and norms find none of a model's",
            write="mezzo.fully_shard(model, policy), which is FSDP2; then the optimizer, then the session",
        )
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
        if any(getattr(owner, "guards", True) for owner in owners(optimizer)):  # a scaler by itself lets others have it
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


def _unmoved(optimizers: list[Optimizer], policy: Policy) -> Iterator[UnsupportedError]:
    """Yield an error for each optimizer whose kernels for CPUs would leave low-precision weights as they are."""
    if policy.master_weights or policy.param_dtype == torch.float32:
        return
    for optimizer in optimizers:
        fused = [p for g in optimizer.param_groups if g.get("fused") for p in g["params"] if p.device.type == "cpu"]
        largest = max((param.numel() for param in fused), default=0)
        if isinstance(optimizer, torch.optim.SGD) and _stands_still(policy.param_dtype, min(largest, 64)):
            yield UnsupportedError(
                f"fused SGD of torch {torch.__version__} leaves most {policy.param_dtype} weights on CPUs as they are",
                where="SGD(…, fused=True)",
                why="its kernel does not write whole vectors: github.com/pytorch/pytorch/issues/191763",
                write="torch.optim.SGD(…, fused=False)",
            )


@cache
def _stands_still(dtype: torch.dtype, count: int) -> bool:
    """Whether this torch's fused SGD for CPUs has the fault, found by a step; fewer than a vector holds move.

    The step is that of torch's function: optimizers have hooks, of a program's own for all of them for instance.
    """
    param, gradient = torch.ones(count, dtype=dtype), torch.ones(count, dtype=dtype)
    options = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    sgd.sgd([param], [gradient], [None], fused=True, lr=0.5, **options)  # type: ignore[arg-type]
    return bool((param != 0.5).any())


def owners(optimizer: Optimizer) -> list[Any]:
    """Return the sessions and ``MasterWeights`` that hold an optimizer, by their hooks before its steps."""
    return [owner_of(hook) for hook in optimizer._optimizer_step_pre_hooks.values() if is_ours(hook)]


def _without_masters(
    optimizers: list[Optimizer], policy: Policy, updated: Iterable[int] = (), first: int = 0
) -> Iterator[PolicyError]:
    """Yield an error for each optimizer whose parameters cannot have one master each.

    Args:
        optimizers: The optimizers.
        policy: One with masters.
        updated: The ``id`` of parameters that other optimizers update.
        first: The number of the first of these optimizers.
    """
    seen = set(updated)
    for number, optimizer in enumerate(optimizers, first):
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
