"""``decorate``: models stored in 16 bits, as Paddle's O2 has them, and optimizers that update FP32 masters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.cast.model.keeping import keeping
from mezzo.compat.paddle.regions import LOW, word_of, wrong_dtype, wrong_words
from mezzo.errors import PolicyError, not_switches, raise_together, some_of
from mezzo.policy import Policy
from mezzo.session.attached import Words, store_low
from mezzo.session.refusals.beginning import owners

__all__ = ["decorate"]

_WORDS: Final = Words(begin="decorate", updated='[p for group in optimizer.param_groups for p in group["params"]]')
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
    """Store models in 16 bits, and let optimizers update FP32 masters of their weights; O1 changes nothing.

    The models compute as the :func:`auto_cast` around them says, and by themselves in ``dtype``, whatever the dtype of
    their inputs. Optimizers step by their own ``step()`` or by a :class:`GradScaler`. Batch norm stays FP32, and in
    float16 layer norm and instance norm.

    Args:
        models: A model, or a list of models.
        optimizers: An optimizer over their parameters, or a list of them; torch's, mezzo's or any other. Without, the
            models get masters with the first optimizer that a :class:`GradScaler` unscales for or steps with; one that
            steps by itself, as in bfloat16, has none.
        level: ``"O1"`` or ``"O2"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        master_weight: False keeps no FP32 masters; what such an optimizer adds to a weight may round away.
        save_dtype: What floating tensors of ``state_dict()`` are: ``"float16"``, ``"bfloat16"``, ``"float32"`` or
            ``"float64"``; the models' own dtypes when omitted. In FP32 they are the masters, which load with every bit.
        master_grad: Whether gradients are FP32 from the first backward pass on: several are then summed in FP32.
        excluded_layers: Layers to store in FP32, with all inside them: a module, a class, or a list of both.

    Returns:
        The same models and optimizers, single or in lists as they were given; without optimizers the models alone.

    Raises:
        PolicyError: Every wrong argument, with what to write.
        UnsupportedError: A model that is wrapped by ``DistributedDataParallel`` already, or stored low.
            Whatever is raised, models and optimizers are as they were.

    **Cost**: as a session of O2; the models' own memory for a moment.

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
    problems = [
        *_unfit("models", "a torch.nn.Module", given or [None], nn.Module),
        *_unfit("optimizers", "a torch.optim.Optimizer", made, Optimizer),
        *wrong_words(level, dtype, ("O1", "O2")),
        *not_switches(master_grad=master_grad, master_weight=master_weight is None or master_weight),
        *([] if save_dtype is None else wrong_dtype("save_dtype", save_dtype, _SAVED)),
    ]
    raise_together(problems)
    if level.upper() == "O2":
        low, masters = LOW[word_of(dtype)], master_weight is not False
        saved = None if save_dtype is None else _SAVED[word_of(save_dtype)]
        kept = keeping(given, _listed(excluded_layers), _NORMS if low == torch.float16 else (), name="excluded_layers")
        policy = Policy.O2(low, output_dtype=None, loss_scale=None, master_weights=masters, rules=kept)
        store_low(given, made, policy, _WORDS, sums_wide=master_grad, saved_as=saved)
    return models if optimizers is None else (models, optimizers)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _unfit(name: str, what: str, given: list[Any], kind: type) -> Iterator[PolicyError]:
    if odd := [type(each).__name__ for each in given if not isinstance(each, kind)]:
        yield PolicyError(f"{name} has to be {what}, or a list of them, not {some_of(odd)}", write=f"{name}=[…]")
    if held := [type(each).__name__ for each in given if isinstance(each, Optimizer) and owners(each)]:
        what = "is decorated already, or belongs to a session or to MasterWeights"
        yield PolicyError(f"the optimizer {some_of(held)} {what}", write="decorate() once for each optimizer")
