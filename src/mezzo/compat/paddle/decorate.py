"""``decorate``: models stored in 16 bits, as Paddle's O2 has them, and optimizers that update FP32 values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.cast.model.keeping import keeping
from mezzo.cast.model.prepare import prepare
from mezzo.compat.paddle.regions import LOW, word_of, wrong_dtype, wrong_words
from mezzo.errors import PolicyError, not_switches, raise_together, some_of
from mezzo.hooks import OwnHook
from mezzo.policy import Policy
from mezzo.weights import Halves
from mezzo.weights.models import named_in
from mezzo.weights.views import adopt

__all__ = ["decorate"]

_SAVED: Final = {**LOW, "float32": torch.float32, "float64": torch.float64}
#: What Paddle keeps in FP32 besides batch norm, in float16 alone.
_NORMS: Final = (nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: str | torch.dtype = "float16",
    master_weight: bool | None = None,
    save_dtype: str | torch.dtype | None = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
) -> Any:
    """Store models in 16 bits, and let optimizers update the FP32 values of their weights; O1 changes nothing.

    The models compute as the :func:`auto_cast` around them says, and by themselves in ``dtype``, whatever the dtype of
    their inputs. Optimizers step by their own ``step()`` or by a :class:`GradScaler`. Batch norm stays FP32, and in
    float16 layer norm and instance norm.

    Args:
        models: A model, or a list of models.
        optimizers: An optimizer over their parameters, or a list of them; torch's, mezzo's or any other. Without, the
            models have no FP32 values, as in Paddle.
        level: ``"O1"`` or ``"O2"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        master_weight: False keeps no FP32 values; what such an optimizer adds to a weight may round away.
        save_dtype: What floating tensors of ``state_dict()`` are: ``"float16"``, ``"bfloat16"``, ``"float32"`` or
            ``"float64"``; FP32 when omitted, in which they load with every bit. Copies are plain FP32 models.
        master_grad: Whether gradients are FP32 from the first backward pass on: several are then summed in FP32.
        excluded_layers: Layers to store in FP32, with all inside them: a module, a class, or a list of both.

    Returns:
        The same models and optimizers, single or in lists as they were given; without optimizers the models alone.

    Raises:
        PolicyError: Every wrong argument, with what to write.
        MezzoError: A model that cannot be stored low, or an optimizer that cannot see FP32: see
            :class:`mezzo.weights.views.Views`. Whatever is raised, models and optimizers are as they were.

    **Cost**: as :func:`mezzo.prepare`; the models' own memory for a moment.

    Example:
        >>> import torch
        >>> from mezzo.compat import paddle
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = paddle.decorate(models=model, optimizers=optimizer, level="O2")
        >>> [param.dtype for param in model.parameters()][::2]
        [torch.float16, torch.float32, torch.float16]
    """
    given, made = _listed(models), _listed(optimizers)
    raise_together([
        *_unfit("models", "a torch.nn.Module", given or [None], nn.Module),
        *_unfit("optimizers", "a torch.optim.Optimizer", made, Optimizer),
        *_foreign(given, made),
        *wrong_words(level, dtype, ("O1", "O2")),
        *not_switches(master_grad=master_grad, master_weight=master_weight is None or master_weight),
        *([] if save_dtype is None else wrong_dtype("save_dtype", save_dtype, _SAVED)),
    ])  # fmt: skip
    if level.upper() == "O2":
        low = LOW[word_of(dtype)]
        kept = keeping(given, _listed(excluded_layers), _NORMS if low == torch.float16 else (), name="excluded_layers")
        policy = Policy.O2(low, output_dtype=None, loss_scale=None, rules=kept)
        owners = _stored(given, made, policy, keeps_fp32=bool(made) and master_weight is not False)
        for halves in owners if master_grad else ():
            for tensor in halves:
                if isinstance(tensor, nn.Parameter) and halves.has_rest(tensor):
                    tensor.grad_dtype = torch.float32
        saved = torch.float32 if save_dtype is None else _SAVED[word_of(save_dtype)]
        for module in {module for model in given for module in model.modules()} if saved != torch.float32 else ():
            module.register_state_dict_post_hook(OwnHook(partial(_save_in, saved)))
    return models if optimizers is None else (models, optimizers)


def _stored(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, *, keeps_fp32: bool) -> list[Halves]:
    """Store models low; return what owns the FP32 values of their weights."""
    with contextlib.ExitStack() as undo:
        owners: list[Halves] = []
        for model in models:
            handle = prepare(model, policy)
            undo.callback(handle.remove)
            owners.append(handle.halves)
            if not keeps_fp32:
                handle.halves.drop()
        for optimizer in optimizers:
            undo.callback(adopt(optimizer, owners))
        undo.pop_all()
    return owners


def _save_in(dtype: torch.dtype, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Write a module's own floating tensors in a dtype: a hook; ``keep_vars=True`` shows tensors."""
    for key, tensor in named_in(module, prefix):
        if tensor.is_floating_point() and state.get(key, tensor) is not tensor:
            state[key] = state[key].to(dtype)


def _foreign(models: list[Any], optimizers: list[Any]) -> Iterator[PolicyError]:
    known = {param for model in models if isinstance(model, nn.Module) for param in model.parameters()}
    for optimizer in (each for each in optimizers if isinstance(each, Optimizer)):
        if any(param not in known for group in optimizer.param_groups for param in group["params"]):
            yield PolicyError(
                "the optimizer updates parameters that are not the models'",
                where=f"decorate(…, optimizers={type(optimizer).__name__})",
                why="its own would stay as they are, or it was decorated already",
                write="decorate() once, with the models and the optimizers of their parameters",
            )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _unfit(name: str, what: str, given: list[Any], kind: type) -> Iterator[PolicyError]:
    if odd := [type(each).__name__ for each in given if not isinstance(each, kind)]:
        yield PolicyError(f"{name} has to be {what}, or a list of them, not {some_of(odd)}", write=f"{name}=[…]")
