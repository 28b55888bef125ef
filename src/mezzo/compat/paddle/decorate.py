"""``decorate``: models stored in 16 bits, as Paddle's O2 has them, and optimizers that update FP32 masters."""

from __future__ import annotations
from typing import Any

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.model.keeping import keeping
from mezzo.cast.model.prepare import prepare
from mezzo.compat.paddle.regions import LOW, word_of, wrong_dtype, wrong_words
from mezzo.errors import PolicyError, not_switches, raise_together, some_of
Keeper: Any = ()
MasterWeights: Any = ()
from mezzo.optim.optimizer import as_one_pass
from mezzo.policy import Policy

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
    """Store models in 16 bits, and let optimizers update FP32 masters of their weights; O1 changes nothing.

    The models compute as the :func:`auto_cast` around them says, and by themselves in ``dtype``, whatever the dtype of
    their inputs. Optimizers step by their own ``step()`` or by a :class:`GradScaler`. Batch norm stays FP32, and in
    float16 layer norm and instance norm.

    Args:
        models: A model, or a list of models.
        optimizers: An optimizer over their parameters, or a list of them; torch's, mezzo's or any other. Without, the
            models have no masters, as in Paddle.
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
        MezzoError: A model that cannot be stored low, or an optimizer that has masters. Whatever is raised, models and
            optimizers are as they were.

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
        keepers = _stored(given, made if master_weight is not False else [], policy, sums_wide=master_grad)
        for model in given if save_dtype is not None else ():
            hook = _Saved(keepers, _SAVED[word_of(save_dtype)])
            for module in model.modules():
                module.register_state_dict_post_hook(hook)
                module.register_load_state_dict_pre_hook(hook.load)
    return models if optimizers is None else (models, optimizers)


def _stored(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, *, sums_wide: bool) -> list[Keeper]:
    """Store models low; return what keeps the FP32 values of their weights."""
    keepers: list[Keeper] = []
    with contextlib.ExitStack() as undo:
        handles = []
        for model in models:
            handles.append(prepare(model, policy))
            undo.callback(handles[-1].remove)
        originals = {tensor: value for handle in handles for tensor, value in handle.originals().items()}
        for optimizer in optimizers:
            if (own := as_one_pass(optimizer)) is not None:
                own.adopt(originals, lambda param: f"a parameter of shape {tuple(param.shape)}")
                undo.callback(own.leave)
                keepers.append(own)
            else:
                masters = MasterWeights(optimizer, grad_dtype="float32" if sums_wide else "param", originals=originals)
                undo.callback(masters.remove)
                keepers.append(masters)
        for handle in handles:
            handle.release_originals()
        undo.pop_all()
    for param in (param for keeper in keepers if sums_wide for param in keeper.stored()):
        param.grad_dtype = torch.float32
    return keepers


class _Saved:
    """Saves and loads a model in a dtype of the user's: in FP32 the values that are kept, with every bit.

    Args:
        keepers: Of the models' weights.
        dtype: What floating tensors of a state dict are.
    """

    def __init__(self, keepers: list[Keeper], dtype: torch.dtype) -> None:
        self._keepers, self._dtype = keepers, dtype

    def __reduce__(self) -> Any:
        return type(self), ([], self._dtype)  # a copied model has no optimizer that would keep its values

    def _kept(self) -> dict[Tensor, Keeper]:
        return {param: keeper for keeper in self._keepers for param in keeper.stored(in_fp32=True)}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Write a module's own tensors in the dtype: a hook."""
        kept = self._kept()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point() or (key := prefix + name) not in state:
                continue
            if (keeper := kept.get(tensor)) is not None:
                keeper.take_edits([tensor])
                state[key] = keeper.master_of(tensor).detach()
            state[key] = state[key].to(self._dtype)

    @torch.no_grad()
    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        """Give FP32 values to what keeps them: a hook."""
        kept = self._kept()
        for name, tensor in module._parameters.items():
            value = state.get(prefix + name)
            if tensor in kept and isinstance(value, Tensor) and value.shape == tensor.shape:
                kept[tensor].write(tensor, value if value.dtype == tensor.dtype else value.float())
                state[prefix + name] = tensor.detach().clone()


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
