"""Update rules as pure functions: what AdamW, Adam, SGD and Lion do to one element, and Muon to one matrix.

A rule knows neither storage formats nor loss scales nor devices; executors (:mod:`mezzo.step.executors`) know no
particular rule. Each rule is written once: executors run it block by block, or write kernels from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import PolicyError, nearest
from mezzo.step.matrix import muon

States: TypeAlias = tuple[Tensor, ...]
Scalars: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """One update rule. Two rules are equal if name and options are.

    Args:
        name: ``adamw``, ``adam``, ``sgd``, ``lion`` or ``muon``.
        options: Names of the options that are on; they change the mathematics, and so the compiled code. ``maximize``,
            which all rules of elements have, negates the gradient.
        hypers: Names of the hyper-parameters, all 0-d device tensors, so that a captured step follows schedules.
        states: Names of the tensors that the rule keeps for each weight, as torch's optimizers call them. All
            start at zero.
        numbers_of: From hyper-parameters and the count of this step (1 for the first), all 0-d float64, to the
            numbers. Once per step.
        apply: From gradient, weight and states (one shape, one dtype) and those numbers to the new weight and
            states. Pure, element-wise, without a branch on values. An FP32 state that it returns as it came is not
            written.
        numbers: Names of what ``numbers_of`` makes and ``apply`` reads.
        is_whole: Whether ``apply`` is about whole matrices. It takes a :class:`mezzo.step.matrix.Matrix` and the
            settings as well, and may write the weight and the states in place; torch's operations carry it out, and
            kernels of it are not written.
        settings: Names of the group's values that such a rule reads on the host, beside options and hyper-parameters.
    """

    name: str
    options: frozenset[str]
    hypers: tuple[str, ...]
    states: tuple[str, ...]
    numbers_of: Callable[[Scalars, Tensor], dict[str, Tensor]] = field(compare=False, repr=False)
    apply: Callable[..., tuple[Tensor, States]] = field(compare=False, repr=False)
    numbers: tuple[str, ...] = field(compare=False, repr=False, default=())
    is_whole: bool = field(compare=False, repr=False, default=False)
    settings: tuple[str, ...] = field(compare=False, repr=False, default=())

    def scalars(self, hypers: Scalars, step: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute what every element of this step shares, such as bias corrections.

        Args:
            hypers: The rule's hyper-parameters, 0-d on the weights' device; float64 keeps them as torch has them.
            step: 0-d, how many updates there are with this one.
            dtype: What the numbers are rounded to, once, after arithmetic in float64.

        Returns:
            A vector of ``dtype``: what ``apply`` reads, in the order of ``numbers``.

        **Cost**: no host sync; it can be captured in a CUDA graph. About 15 one-element kernels, or one where they are
        written together (:mod:`mezzo.step.executors.triton`).
        """
        if not self.numbers:
            return step.new_empty(0, dtype=dtype)
        wide = map(Tensor.double, map(hypers.__getitem__, self.hypers))
        numbers = self.numbers_of(dict(zip(self.hypers, wide, strict=True)), step.double())
        return torch.stack([*map(numbers.__getitem__, self.numbers)]).to(dtype)

    def update(self, gradient: Tensor, weight: Tensor, states: States, scalars: Tensor) -> tuple[Tensor, States]:
        """Return the new weight and states; :meth:`scalars` made the vector."""
        gradient = -gradient if "maximize" in self.options else gradient
        return self.apply(gradient, weight, states, dict(zip(self.numbers, scalars.unbind(), strict=True)))


def _numbers_of_adam(hypers: Scalars, step: Tensor, *, decoupled: bool) -> dict[str, Tensor]:
    lr, beta1, beta2 = hypers["lr"], hypers["beta1"], hypers["beta2"]
    return {
        "decay": 1 - lr * hypers["weight_decay"] if decoupled else hypers["weight_decay"],
        "beta1": beta1,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "step_size": lr / (1 - beta1**step),
        "correction2": (1 - beta2**step).rsqrt(),
        "eps": hypers["eps"],
    }


def _adam(
    gradient: Tensor, weight: Tensor, states: States, numbers: Scalars, *, decoupled: bool, amsgrad: bool = False
) -> tuple[Tensor, States]:
    r"""Adam, and with ``decoupled`` weight decay :math:`\lambda` AdamW.

    .. math::
        w &\leftarrow (1 - \eta\lambda)\,w \quad\text{(decoupled)}, \qquad
        g \leftarrow g + \lambda w \quad\text{(otherwise)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \frac{\eta}{1 - \beta_1^t}\,
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \varepsilon}

    ``amsgrad`` puts the largest :math:`v` so far under the root.

    References:
        Kingma & Ba, *Adam*, ICLR 2015, algorithm 1; Loshchilov & Hutter, *Decoupled Weight Decay Regularization*,
        ICLR 2019, algorithm 2; Reddi et al., *On the Convergence of Adam and Beyond*, ICLR 2018.
    """
    if decoupled:
        weight = weight * numbers["decay"]
    else:
        gradient = gradient + weight * numbers["decay"]
    mean = states[0] * numbers["beta1"] + numbers["gain1"] * gradient
    square = states[1] * numbers["beta2"] + numbers["gain2"] * gradient * gradient
    largest = torch.maximum(states[2], square) if amsgrad else square
    denominator = largest.sqrt() * numbers["correction2"] + numbers["eps"]
    weight = weight - numbers["step_size"] * mean / denominator
    return weight, (mean, square, largest) if amsgrad else (mean, square)


def _numbers_of_sgd(hypers: Scalars, step: Tensor) -> dict[str, Tensor]:
    first = (step <= 1).double()  # torch's buffer starts as the gradient itself, without dampening: here it is zero
    return {
        "decay": hypers["weight_decay"],
        "momentum": hypers["momentum"],
        "gain": 1 - hypers["dampening"] * (1 - first),
        "lr": hypers["lr"],
    }


def _sgd(
    gradient: Tensor,
    weight: Tensor,
    states: States,
    numbers: Scalars,
    *,
    momentum: bool = False,
    nesterov: bool = False,
) -> tuple[Tensor, States]:
    r"""Stochastic gradient descent; with ``momentum`` :math:`\mu` and dampening :math:`\tau` from the second step on.

    .. math::
        g \leftarrow g + \lambda w, \qquad b \leftarrow \mu b + (1 - \tau) g, \qquad
        w \leftarrow w - \eta \begin{cases} g + \mu b & \text{nesterov} \\ b & \text{otherwise} \end{cases}

    References:
        Sutskever et al., *On the importance of initialization and momentum in deep learning*, ICML 2013.
    """
    gradient = gradient + weight * numbers["decay"]
    if not momentum:
        return weight - numbers["lr"] * gradient, ()
    buffer = states[0] * numbers["momentum"] + gradient * numbers["gain"]
    direction = gradient + buffer * numbers["momentum"] if nesterov else buffer
    return weight - numbers["lr"] * direction, (buffer,)


def _numbers_of_lion(hypers: Scalars, step: Tensor) -> dict[str, Tensor]:
    return {
        "decay": 1 - hypers["lr"] * hypers["weight_decay"],
        "beta1": hypers["beta1"],
        "gain1": 1 - hypers["beta1"],
        "beta2": hypers["beta2"],
        "gain2": 1 - hypers["beta2"],
        "lr": hypers["lr"],
    }


def _lion(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    r"""Lion: the sign of an interpolation between momentum and gradient.

    .. math::
        w \leftarrow (1 - \eta\lambda)\,w - \eta\,\mathrm{sign}(\beta_1 m + (1 - \beta_1) g), \qquad
        m \leftarrow \beta_2 m + (1 - \beta_2) g

    References:
        Chen et al., *Symbolic Discovery of Optimization Algorithms*, NeurIPS 2023, algorithm 2.
    """
    (momentum,) = states
    mixed = momentum * numbers["beta1"] + numbers["gain1"] * gradient
    direction = torch.where(mixed != mixed, mixed, mixed.sign())  # sign(NaN) is 0, which would hide it
    weight = weight * numbers["decay"] - numbers["lr"] * direction
    return weight, (momentum * numbers["beta2"] + numbers["gain2"] * gradient,)


def _numbers_of_muon(hypers: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """From tensors, or on the host from numbers."""
    lr, momentum = hypers["lr"], hypers["momentum"]
    return {"decay": 1 - lr * hypers["weight_decay"], "momentum": momentum, "gain": 1 - momentum}


_ADAM: Final[dict[str, Any]] = {
    "options": frozenset({"amsgrad", "maximize"}),
    "hypers": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "states": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
#: States that are never negative, since they are means of squares.
SQUARES: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
#: States that are kept only with an option.
_STATES_OF_OPTIONS: Final = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum"}

#: Every rule by name, with all the options that it can have, and all the states.
RULES: Final[Mapping[str, UpdateRule]] = MappingProxyType(
    {
        "adamw": UpdateRule(
            name="adamw",
            **_ADAM,
            numbers_of=partial(_numbers_of_adam, decoupled=True),
            apply=partial(_adam, decoupled=True),
        ),
        "adam": UpdateRule(
            name="adam",
            **_ADAM,
            numbers_of=partial(_numbers_of_adam, decoupled=False),
            apply=partial(_adam, decoupled=False),
        ),
        "sgd": UpdateRule(
            name="sgd",
            options=frozenset({"momentum", "nesterov", "maximize"}),
            hypers=("lr", "momentum", "dampening", "weight_decay"),
            states=("momentum_buffer",),
            numbers_of=_numbers_of_sgd,
            apply=_sgd,
        ),
        "lion": UpdateRule(
            name="lion",
            options=frozenset({"maximize"}),
            hypers=("lr", "beta1", "beta2", "weight_decay"),
            states=("exp_avg",),
            numbers_of=_numbers_of_lion,
            apply=_lion,
        ),
        "muon": UpdateRule(
            name="muon",
            options=frozenset({"nesterov"}),
            hypers=("lr", "weight_decay", "momentum"),
            states=("momentum_buffer",),
            numbers_of=_numbers_of_muon,
            apply=muon,
            is_whole=True,
            settings=("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn"),
        ),
    }
)


@cache
def rule(name: str, *options: str) -> UpdateRule:
    """Return an update rule; the same call returns the same object, so that compiled code is found again.

    Args:
        name: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"lion"`` or ``"muon"``.
        *options: Of Adam and AdamW ``"amsgrad"``, ``"maximize"``; of SGD ``"momentum"``, ``"nesterov"``,
            ``"maximize"``; of Lion ``"maximize"``; of Muon ``"nesterov"``.

    Raises:
        PolicyError: An unknown name or option, or ``nesterov`` without ``momentum``.

    Example:
        >>> import torch
        >>> lion = rule("lion")
        >>> hypers = {"lr": 0.25, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
        >>> scalars = lion.scalars({k: torch.tensor(v) for k, v in hypers.items()}, torch.tensor(1))
        >>> weight, (momentum,) = lion.update(torch.tensor([8.0, -1.0]), torch.ones(2), (torch.zeros(2),), scalars)
        >>> weight
        tensor([0.7500, 1.2500])
    """
    if name not in RULES:
        raise PolicyError(f"unknown update rule {name!r}", why=nearest(name, RULES))
    base_rule = RULES[name]
    if unknown := [option for option in options if option not in base_rule.options]:
        raise PolicyError(
            f"unknown option {unknown[0]!r} of {name}", why=nearest(unknown[0], sorted(base_rule.options))
        )
    left_out = base_rule.options.difference(options)
    if "nesterov" in options and "momentum" in left_out:
        raise PolicyError("nesterov without momentum", why="it looks ahead along it", write="momentum=0.9")
    flags = {option: True for option in options if option != "maximize"}
    return replace(
        base_rule,
        options=frozenset(options),
        states=tuple(state for state in base_rule.states if _STATES_OF_OPTIONS.get(state) not in left_out),
        apply=partial(base_rule.apply, **flags),
        numbers=tuple(base_rule.numbers_of(dict.fromkeys(base_rule.hypers, torch.zeros(())), torch.ones(()))),
    )
