"""AdamW, Adam, SGD and Lion with torch's signatures."""

from __future__ import annotations

from typing import Literal, Never, TypedDict, Unpack

import torch
from torch import Tensor

from mezzo.optim.optimizer import OnePassOptimizer, Params

StateDtype = Literal["float32", "bfloat16", "int8", "fp32", "bf16"] | torch.dtype


class _TorchOnly(TypedDict, total=False):
    """Arguments of torch's optimizers that have no meaning here: named for type checkers, and refused with a reason."""

    foreach: Never
    fused: Never
    capturable: Never
    differentiable: Never
    decoupled_weight_decay: Never


class AdamW(OnePassOptimizer):
    """Adam with decoupled weight decay.

    Args:
        params: Parameters, or groups of them, as torch's optimizers take them.
        lr: Learning rate; schedulers change ``group["lr"]`` as ever.
        betas: Decay of the running means of gradient and squared gradient.
        eps: Added to the root of the second.
        weight_decay: Decoupled: weights shrink by ``lr · weight_decay``, whatever the gradient.
        amsgrad: Divide by the largest second moment so far.
        maximize: Climb instead of descend.
        state_dtype: Of the running means: ``"fp32"``; or rounded stochastically: ``"bf16"``, or ``"int8"``, codes with
            a BF16 scale for every 32 neighbours, ``exp_avg_codes`` and ``exp_avg_scale`` in the state. By long names,
            too.

    Raises:
        PolicyError: A value that no update can work with, or an argument of torch's that chooses among its
            implementations (``fused``, ``foreach``, ``capturable``, ``differentiable``): there is one here.

    **Cost**: bytes moved a parameter that is stored in halves: 28, norm included (20 with BF16 means, 16.25 with int8).
    Bytes kept: 14, 4 of them the two halves, which the model keeps, 2 the gradient, and 8 the means (4 in BF16, 2.125
    in int8). An FP32 parameter takes 16. ``amsgrad`` keeps one mean more. No host sync on a GPU.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> amp.backward(loss)
        >>> bool(amp.step().skipped)
        False
        >>> model.weight.dtype, optimizer.state[model.weight]["exp_avg"].dtype
        (torch.float32, torch.float32)

    References:
        Loshchilov & Hutter, *Decoupled Weight Decay Regularization*, ICLR 2019.
    """

    _rule = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: StateDtype = "float32",
        **torch_only: Unpack[_TorchOnly],
    ) -> None:
        super().__init__(
            params, torch_only, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            maximize=maximize, state_dtype=state_dtype,
        )  # fmt: skip


class Adam(AdamW):
    """Adam; ``weight_decay`` is added to the gradient, times the weight.

    Arguments, errors and costs are those of :class:`AdamW`.

    References:
        Kingma & Ba, *Adam*, ICLR 2015.
    """

    _rule = "adam"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: StateDtype = "float32",
        **torch_only: Unpack[_TorchOnly],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize,
            state_dtype=state_dtype, **torch_only,
        )  # fmt: skip


class SGD(OnePassOptimizer):
    """Stochastic gradient descent, with torch's momentum, dampening and Nesterov's look ahead.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Share of the last direction that is kept; 0 keeps no state.
        dampening: Share of the gradient left out of the momentum, from the second step on.
        weight_decay: Added to the gradient, times the weight.
        nesterov: Look ahead along the momentum.
        maximize: Climb instead of descend.
        state_dtype: Of the momentum, as in :class:`AdamW`.

    Raises:
        PolicyError: As :class:`AdamW`, and ``nesterov`` without momentum or with dampening.

    **Cost**: bytes moved a parameter that is stored in halves: 20 with momentum, 12 without. Bytes kept: 10, 4 of them
    the two halves, which the model keeps, 2 the gradient, and 4 the momentum (2 in BF16, 1.06 in int8). No host sync on
    a GPU.

    References:
        Sutskever et al., *On the importance of initialization and momentum in deep learning*, ICML 2013.
    """

    _rule = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: StateDtype = "float32",
        **torch_only: Unpack[_TorchOnly],
    ) -> None:
        super().__init__(
            params, torch_only, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov, maximize=maximize, state_dtype=state_dtype,
        )  # fmt: skip


class Lion(OnePassOptimizer):
    """The sign of an interpolated momentum; one state a parameter.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, three to ten times smaller than AdamW's.
        betas: Interpolation for the direction, and decay of the momentum.
        weight_decay: Decoupled, as in :class:`AdamW`.
        maximize: Climb instead of descend.
        state_dtype: Of the momentum, as in :class:`AdamW`.

    Raises:
        PolicyError: As :class:`AdamW`.

    **Cost**: that of :class:`SGD` with momentum.

    References:
        Chen et al., *Symbolic Discovery of Optimization Algorithms*, NeurIPS 2023.
    """

    _rule = "lion"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: StateDtype = "float32",
        **torch_only: Unpack[_TorchOnly],
    ) -> None:
        super().__init__(
            params, torch_only, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize,
            state_dtype=state_dtype,
        )  # fmt: skip
