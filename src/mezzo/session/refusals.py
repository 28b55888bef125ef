"""What stands against a session by its arguments, found before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, sgd

from mezzo.cast import Prepared
from mezzo.cast.model.checks import unfit
from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, raise_together, some_of, unknown_word
from mezzo.hooks import is_ours, owner_of, step_hooks
from mezzo.optim.muon import embeddings
from mezzo.optim.optimizer import as_one_pass
from mezzo.policy import Policy
from mezzo.tensors import LOW, dtype_name

#: The handles of each model that was prepared before.
Handles = Mapping[nn.Module, list[Prepared]]
#: The words for ``on_overflow``; ``"explain"`` is the old one for ``"locate"``.
Reaction: TypeAlias = Literal["skip", "locate", "raise", "explain"]
_REACTIONS: Final = ("skip", "locate", "raise")
_ORDER: Final = "MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy): models first, then optimizers"


# Arguments ------------------------------------------------------------------------------------------------


def listed(value: Any) -> list[Any]:
    """Return a list of one value, or of several."""
    alone = isinstance(value, (nn.Module, Optimizer, Prepared, str)) or not isinstance(value, Iterable)
    return [value] if alone else list(value)


def models_and_optimizers(models: Any, optimizers: Any) -> tuple[list[nn.Module | Prepared], list[Optimizer]]:
    """Return both as lists; handles of prepared models stand among the models.

    Raises:
        PolicyError: Something else among them, or none.
    """
    all_models, all_optimizers = listed(models), listed(optimizers)
    raise_together(
        [
            *_of_another_kind(all_models, (nn.Module, Prepared), "a model must be an nn.Module"),
            *_of_another_kind(all_optimizers, (Optimizer,), "an optimizer must be a torch.optim.Optimizer"),
        ]
    )
    return _outermost(all_models), all_optimizers


def _outermost(models: list[Any]) -> list[Any]:
    """Return models without those that are listed twice, or are part of another one in the list."""
    inside = {
        part
        for model in models
        for part in (model.model if isinstance(model, Prepared) else model).modules()
        if part is not model
    }
    return [model for model in dict.fromkeys(models) if model not in inside]


def _of_another_kind(values: list[Any], kinds: tuple[type, ...], what: str) -> Iterator[PolicyError]:
    wrong = list(dict.fromkeys(_kind_of(value) for value in values if not isinstance(value, kinds)))
    if wrong or not values:
        yield PolicyError(f"{what}, not {some_of(wrong)}" if wrong else f"{what}, and there is none", write=_ORDER)


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def chosen(optimizers: Any, of_session: list[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that a call names; all of the session's when omitted.

    Raises:
        PolicyError: One that is not the session's; or none is named.
    """
    if optimizers is None:
        return of_session
    chosen_optimizers = listed(optimizers)
    foreign = [_kind_of(optimizer) for optimizer in chosen_optimizers if optimizer not in of_session]
    if foreign or not chosen_optimizers:
        raise PolicyError(
            "the optimizer is not the session's" if foreign else "optimizers are named, and there is none",
            where=some_of(foreign),
            write="one that MixedPrecision(models, optimizers, policy) was given; all of them when omitted",
        )
    return chosen_optimizers


def check_loss(loss: Any) -> None:
    """Raise for a value that is no loss.

    Raises:
        PolicyError: Not a floating scalar.
        StateError: It depends on no parameter.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        what = f"{dtype_name(loss.dtype)} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else _kind_of(loss)
        raise PolicyError(f"a loss is a floating scalar, not {what}", write="amp.backward(loss.mean())")
    if not loss.requires_grad:
        raise StateError(
            "the loss depends on no parameter",
            why="it has no graph: computed under no_grad, detached, or of frozen parameters alone",
            write="the loss of a forward pass outside torch.no_grad()",
        )


def wrong_options(*, max_grad_norm: Any = None, on_overflow: Any = "skip") -> Iterator[PolicyError]:
    """Yield what is wrong with options that may be set between steps."""
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and max_grad_norm > 0):
        yield PolicyError(
            f"max_grad_norm is {max_grad_norm!r}",
            why="a norm to clip to is positive",
            write="max_grad_norm=1.0; None does not clip",
        )
    if reaction_of(on_overflow) not in _REACTIONS:
        yield unknown_word("on_overflow", on_overflow, _REACTIONS)


def reaction_of(word: Any) -> Any:
    """Return the leading word for a word of ``on_overflow``; a wrong word as it is."""
    return "locate" if word == "explain" else word


# Models and optimizers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CheckedOptimizer:
    """An optimizer that is checked for a session, with the session's policy and parameter names.

    Attributes:
        optimizer: The optimizer.
        policy: The session's policy.
        names: The names of the models' parameters.
        embeddings: The parameters of the models' embeddings.
        dtypes: The dtypes that these are going to have, where the session has the optimizer already; else ``None``.
    """

    optimizer: Optimizer
    policy: Policy
    names: dict[Tensor, str]
    embeddings: set[Tensor]
    dtypes: Mapping[Tensor, torch.dtype] | None = None

    @property
    def class_name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def check_session(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
    """Raise all that stands against a session, together.

    Args:
        models: The models.
        optimizers: The optimizers.
        policy: The policy.
    """
    raise_together([*_of_models(models), *_of_optimizers(models, optimizers, policy)])
    for model in models:  # before any is converted: weights that TorchScript shares could not be put back
        raise_together(unfit(model))


def check_optimizers(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    dtypes: Mapping[Tensor, torch.dtype] | None = None,
) -> None:
    """Raise all that stands against optimizers that join a session, or go on under another policy.

    Args:
        models: The session's.
        optimizers: The new ones; or the session's own.
        policy: The policy.
        dtypes: Where they are the session's own: the dtypes that parameters are going to have under the policy.
    """
    raise_together(_of_optimizers(models, optimizers, policy, dtypes))


def _names(models: list[nn.Module]) -> dict[Tensor, str]:
    return {param: name for model in models for name, param in model.named_parameters()}


def _of_models(models: list[nn.Module]) -> Iterator[MezzoError]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is wrapped before it is imported
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for model in models for m in model.modules()):
        yield UnsupportedError(
            "the model is wrapped by FullyShardedDataParallel, which is FSDP1",
            why="it keeps parameters in flat pieces, in which rules, halves and norms find none of a model's",
            write="mezzo.fully_shard(model, policy), which is FSDP2; then the optimizer, then the session",
        )
    if any(isinstance(m, nn.DataParallel) for model in models for m in model.modules()):
        yield UnsupportedError(
            "the model is wrapped by DataParallel",
            why="its replicas are threads, which regions and hooks of the model do not reach",
            write="torch.nn.parallel.DistributedDataParallel under torchrun; or the model itself, on one device",
        )


def _of_optimizers(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    dtypes: Mapping[Tensor, torch.dtype] | None = None,
) -> Iterator[MezzoError]:
    if len(set(optimizers)) < len(optimizers):
        yield PolicyError("an optimizer is listed twice", why="it would step twice", write="each one once")
    names, of_embeddings = _names(models), {param for model in models for param in embeddings(model)}
    for optimizer in optimizers:
        checked = _CheckedOptimizer(optimizer, policy, names, of_embeddings, dtypes)
        for error_of in _REFUSALS:
            if (error := error_of(checked)) is not None:
                yield error
                break  # what stands further down assumes what stands above


def _no_params_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if checked.params:
        return None
    return PolicyError(
        "the optimizer updates no parameter",
        where=checked.class_name,
        write=f"{checked.class_name}(model.parameters(), …)",
    )


def _meta_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if not any(param.is_meta for param in checked.params):
        return None
    return StateError(
        "parameters on the meta device have no values yet",
        where=checked.class_name,
        write="model.to_empty(device=…), then initialise or load them; then the optimizer, then the session",
    )


def _taken_error(checked: _CheckedOptimizer) -> MezzoError | None:
    hooks = step_hooks(checked.optimizer)
    if checked.dtypes is not None or not any(
        is_ours(hook) and getattr(owner_of(hook), "guards", True) for hook in hooks
    ):
        return None
    return StateError(
        "the optimizer belongs to a session already",
        where=checked.class_name,
        write="amp.close() of that one first",
    )


def _foreign_params_error(checked: _CheckedOptimizer) -> MezzoError | None:
    foreign = [f"{tuple(param.shape)}" for param in checked.params if param not in checked.names]
    if not foreign:
        return None
    return PolicyError(
        "the optimizer updates parameters that are not the models'",
        where=f"{checked.class_name}: {some_of(foreign)}",
        why="casts and halves would not reach them; was the model copied, rebuilt or given to fully_shard "
        "after the optimizer?",
        write=f"{checked.class_name}(model.parameters(), …) after the model is final",
    )


def _embedding_error(checked: _CheckedOptimizer) -> MezzoError | None:
    one_pass_optimizer = as_one_pass(checked.optimizer)
    if one_pass_optimizer is None:
        return None
    tables = [checked.names[param] for param in one_pass_optimizer.matrices() if param in checked.embeddings]
    if not tables:
        return None
    return UnsupportedError(
        f"{checked.class_name} updates an embedding",
        where=some_of(tables),
        why="an orthogonal step moves every row, also those of tokens that no batch has had",
        write="mezzo.optim.Muon(mezzo.optim.matrices_of(model, lr=3e-4)): AdamW for embeddings and heads tied to them",
    )


def _fused_sgd_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if checked.policy.param_dtype == torch.float32:  # only O3 makes weights low
        return None
    fused = [p for g in checked.optimizer.param_groups if g.get("fused") for p in g["params"] if p.device.type == "cpu"]
    largest = max((param.numel() for param in fused), default=0)
    if not isinstance(checked.optimizer, torch.optim.SGD) or not _fused_sgd_skips_vectors(
        checked.policy.param_dtype, min(largest, 64)
    ):
        return None
    return UnsupportedError(
        f"fused SGD of torch {torch.__version__} leaves most {checked.policy.param_dtype} weights on CPUs as they are",
        where="SGD(…, fused=True)",
        why="its kernel does not write whole vectors: github.com/pytorch/pytorch/issues/191763",
        write="torch.optim.SGD(…, fused=False)",
    )


@cache
def _fused_sgd_skips_vectors(dtype: torch.dtype, count: int) -> bool:
    """Whether this torch's fused SGD for CPUs has the fault, found by a step; fewer than a vector holds move.

    The step is that of torch's function: optimizers have hooks, of a program's own for all of them for instance.
    """
    param, gradient = torch.ones(count, dtype=dtype), torch.ones(count, dtype=dtype)
    options = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    sgd.sgd([param], [gradient], [None], fused=True, lr=0.5, **options)  # type: ignore[arg-type]
    return bool((param != 0.5).any())


def _low_alone_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if checked.policy.param_dtype != torch.float32 or checked.policy.halves:
        return None
    low_params = [
        param
        for param in checked.params
        if (checked.dtypes or {}).get(param, param.dtype) in LOW
        and param.requires_grad
        and not _is_ruled(checked.names[param], checked.policy)
    ]
    if not low_params:
        return None
    dtype = dtype_name(low_params[0].dtype)
    return UnsupportedError(
        f"{dtype} weights would be trained without FP32 values",
        where=some_of([checked.names[param] for param in low_params]),
        why=f"an update below half a unit in the last place of {dtype} is lost",
        write=f'model.float(); or Policy.O2("{dtype}"), the text O2,dtype={dtype}, which keeps FP32 values',
    )


def _is_ruled(name: str, policy: Policy) -> bool:
    """Whether a rule says how a parameter is stored."""
    return policy.storage(name, name.rpartition(".")[0])[1] is not None


def _held_state_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if checked.policy.param_dtype == torch.float32:  # only O3 makes weights low
        return None
    if as_one_pass(checked.optimizer) is not None:  # whose moments keep their own dtype
        return None
    held_state = _held_state(checked.optimizer, checked.names, checked.dtypes)
    if not held_state:
        return None
    dtype = dtype_name(checked.policy.dtype)
    cure = f'a policy that keeps FP32 values: Policy.O2("{dtype}"), the text O2,dtype={dtype}'
    return StateError(
        "the optimizer holds FP32 state for parameters that are about to be low",
        where=f"{checked.class_name}: {some_of(held_state)}",
        why=f"{checked.policy.level} keeps no FP32 values, and torch's optimizers keep state in the parameters' dtype",
        write=f"{cure}; or an optimizer that has not stepped yet",
    )


def _held_state(
    optimizer: Optimizer, params: Mapping[Tensor, str], dtypes: Mapping[Tensor, torch.dtype] | None
) -> list[str]:
    """Name the parameters for which an optimizer holds floating state of the parameter's shape, and at least its dtype.

    Args:
        optimizer: The optimizer.
        params: The names of the parameters in question.
        dtypes: Where only state of another dtype than a parameter is going to have counts: these dtypes.
    """

    def counts(param: Tensor, dtype: torch.dtype) -> bool:
        if dtypes is not None:
            return dtypes.get(param) in LOW and dtype != dtypes[param]
        return param.dtype not in LOW or dtype == torch.float32

    return [
        name
        for param, name in params.items()
        if any(
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and value.dim() > 0
            and counts(param, value.dtype)
            for value in optimizer.state.get(param, {}).values()
        )
    ]


def _eps_error(checked: _CheckedOptimizer) -> MezzoError | None:
    if checked.policy.param_dtype != torch.float16 or as_one_pass(checked.optimizer) is not None:
        return None
    groups = [group for group in checked.optimizer.param_groups if isinstance(group.get("eps"), float)]
    lost = [group["eps"] for group in groups if group["eps"] and not float(torch.tensor(group["eps"]).half())]
    if not lost:
        return None
    return UnsupportedError(
        f"eps={lost[0]:g} is zero in float16",
        where=f"{checked.class_name}, whose state is float16 at {checked.policy.level}",
        why="where a second moment rounds to zero, the update divides by it: NaN",
        write=f"{checked.class_name}(…, eps=1e-4); or mezzo.optim, whose moments are FP32; or Policy.O2(), the text O2",
    )


#: In the order in which they are looked at; the first that holds is said of an optimizer.
_REFUSALS: Final[tuple[Callable[[_CheckedOptimizer], MezzoError | None], ...]] = (
    _no_params_error, _meta_error, _taken_error, _foreign_params_error, _embedding_error, _fused_sgd_error,
    _low_alone_error, _held_state_error, _eps_error,
)  # fmt: skip
