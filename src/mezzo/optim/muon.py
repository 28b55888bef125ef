"""Muon with torch's signature, and AdamW beside it for what is no matrix of a hidden layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.cast.device import is_right
from mezzo.errors import PolicyError, nearest, raise_together, some_of
from mezzo.optim.classes import AdamW, StateDtype
from mezzo.optim.groups import Group, require_ordered
from mezzo.optim.optimizer import OnePassOptimizer, Params
from mezzo.step.matrix import EMULATED, NATIVE, Products

#: AdamW's options, with its defaults: what a group with ``adamw=True`` has where it says nothing.
_ADAMW: Final[Mapping[str, Any]] = {
    name: parameter.default
    for name, parameter in inspect.signature(AdamW).parameters.items()
    if name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
}
_OPTIONS: Final = (*_ADAMW, "state_dtype")


class Muon(OnePassOptimizer):
    """Momentum, made orthogonal: for the matrices of hidden layers.

    On a CPU, with FP32 momentum, bit for bit what ``torch.optim.Muon`` computes. Embeddings, heads and whatever is no
    matrix are AdamW's, in groups of their own: :func:`matrices_of` makes both groups of a model. An overflow skips the
    step as with every optimizer here, and touches neither weights nor momentum.

    Args:
        params: Matrices, or groups of them. A group with ``adamw=True`` is updated by AdamW: its options are those of
            :class:`AdamW`, with the defaults there.
        lr: Learning rate; schedulers change ``group["lr"]`` as ever.
        weight_decay: Decoupled: weights shrink by ``lr · weight_decay``, whatever the gradient.
        momentum: Share of the last direction that is kept.
        nesterov: Look ahead along the momentum.
        ns_coefficients: The three of the Newton–Schulz polynomial.
        eps: The least norm that a direction is divided by.
        ns_steps: How often the polynomial is applied, 0 to 99.
        adjust_lr_fn: How the learning rate follows a shape (A, B): ``"original"``, also for None, √max(1, A/B);
            ``"match_rms_adamw"``, 0.2 √max(A, B), for learning rates of AdamW; ``"spectral_unclamped"``, √(A/B).
        adamw: Options of AdamW for those of ``params`` that are no matrices, such as ``{"lr": 3e-4}``; without it they
            are refused.
        state_dtype: Of the momentum, and of AdamW's moments, as in :class:`AdamW`.

    Raises:
        PolicyError: As :class:`AdamW`; and parameters that are no matrices, in a group of Muon's.

    **Cost**: bytes kept a parameter that is stored in halves: 10, 4 of them the two halves, which the model keeps, 2
    the gradient, and 4 the momentum (2 in BF16, 1.06 in int8). While it steps, some FP32 and BF16 copies of the largest
    matrix; of a sharded one each rank gathers the whole in BF16, once, and computes all of it. No host sync on a GPU,
    where products and sums are torch's, too, but the last bit of a weight may differ from ``torch.optim.Muon``.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> optimizer = mezzo.optim.Muon(mezzo.optim.matrices_of(model, lr=1e-3), lr=0.02)
        >>> [(len(group["params"]), group["adamw"], group["lr"]) for group in optimizer.param_groups]
        [(1, False, 0.02), (3, True, 0.001)]

    References:
        Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024; Liu et al., *Muon is Scalable
        for LLM Training*, 2025: ``"match_rms_adamw"``.
    """

    _rule = "muon"
    _has_one_rule = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        state_dtype: StateDtype = "float32",
        **torch_only: Any,
    ) -> None:
        super().__init__(
            _grouped(params, adamw), torch_only, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, adamw=False,
            state_dtype=state_dtype,
        )  # fmt: skip

    def rule_name(self, group: Mapping[str, Any]) -> str:
        """Return the name of a group's update rule."""
        return "adamw" if group.get("adamw") else self._rule

    def add_param_group(self, param_group: Group) -> None:
        """Add matrices, or with ``adamw=True`` whatever AdamW updates; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            PolicyError: A hyper-parameter that no update can work with, or a parameter that is no matrix; nothing was
                added.
            TypeError: A set of parameters, as torch says it.
        """
        (group,) = _grouped([param_group], None)
        super().add_param_group(group)

    def products_on(self, device: torch.device) -> Products:
        """Return how matrices are multiplied on a device: as torch does, unless that ends the process, or is wrong."""
        return NATIVE if device.type != "cpu" or is_right(torch.bfloat16, "cpu", "products") else EMULATED


def matrices_of(model: nn.Module, **adamw: Any) -> list[Group]:
    """Return the groups of a model for :class:`Muon`: the matrices of hidden layers, and with AdamW all the rest.

    Of no hidden layer are parameters of ``nn.Embedding`` and ``nn.EmbeddingBag``, with the heads that are tied to them,
    and the weight of the last ``nn.Linear``.

    Args:
        model: Any module; of a sharded one the parameters as they are now.
        **adamw: Options of :class:`AdamW` for the rest, such as ``lr=3e-4``.

    Raises:
        PolicyError: An option that AdamW has not.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9, bias=False))
        >>> [[tuple(param.shape) for param in group["params"]] for group in matrices_of(model, lr=3e-4)]
        [[(4, 4)], [(9, 4), (9, 4)]]
    """
    raise_together(list(_unknown(adamw)))
    linear_layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outer_params = {id(param) for param in embeddings(model)} | {id(layer.weight) for layer in linear_layers[-1:]}
    hidden, rest = list[Tensor](), list[Tensor]()
    for param in model.parameters():
        (hidden if param.dim() == 2 and id(param) not in outer_params else rest).append(param)
    groups = [{"params": hidden}, {"params": rest, "adamw": True, **adamw}]
    return [group for group in groups if group["params"]]


def embeddings(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a model's embeddings."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield from module.parameters(recurse=False)


def _grouped(params: Any, adamw: Mapping[str, Any] | None) -> list[Group]:
    """Return the groups of an optimizer: what is no matrix is moved to one of AdamW's, or refused.

    Raises:
        PolicyError: Parameters that are no matrices and have no group, or an option that AdamW has not.
        TypeError: A set of parameters, as torch says it.
    """
    raise_together(list(_unknown(adamw or {})))
    entries = [params] if isinstance(params, Tensor) else list(require_ordered(params))
    if not entries:
        return []
    groups = [dict(entry) for entry in entries] if isinstance(entries[0], dict) else [{"params": entries}]
    sorted_groups, rest, refused = list[Group](), list[Any](), list[str]()
    for number, group in enumerate(groups):
        members = group.get("params", ())
        group["params"] = [members] if isinstance(members, Tensor) else list(require_ordered(members))
        if group.get("adamw"):
            sorted_groups.append({**_ADAMW, **group})
            continue
        matrices = [entry for entry in group["params"] if _is_matrix(entry)]
        vectors = [entry for entry in group["params"] if not _is_matrix(entry)]
        if vectors and adamw is None:
            refused.append(f"group {number}: {some_of(list(map(_in_words, vectors)))}")
        if matrices or not vectors:
            sorted_groups.append({**group, "params": matrices})
        rest += vectors
    if refused:
        raise PolicyError(
            "Muon updates matrices",
            where="\n".join(refused),
            why="Newton–Schulz makes the rows of a two-dimensional weight orthogonal, and the others have none",
            write="Muon(mezzo.optim.matrices_of(model, lr=3e-4)), or Muon(params, adamw={'lr': 3e-4}): AdamW for them",
        )
    if rest:
        sorted_groups.append({**_ADAMW, **(adamw or {}), "params": rest, "adamw": True})
    return sorted_groups


def _is_matrix(entry: Any) -> bool:
    """Whether an entry of a group is one; of what is no parameter torch says it."""
    param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
    return not isinstance(param, Tensor) or param.dim() == 2


def _in_words(entry: Any) -> str:
    name, param = entry if isinstance(entry, tuple) else ("a parameter", entry)
    return f"{name} {tuple(param.shape)}"


def _unknown(adamw: Mapping[str, Any]) -> Iterator[PolicyError]:
    for name in adamw:
        if name not in _OPTIONS:
            yield PolicyError(f"AdamW has no option {name!r}", where="adamw", why=nearest(name, _OPTIONS))
