"""Sessions whose optimizers step by their own calls, with gradients that are there; their scale comes from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.cast import prepare
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.held import HeldScaler
from mezzo.session.attached.attached import Attached
from mezzo.session.attached.saved_as import save_as
from mezzo.session.attached.scaling import ScaledOptimizer
from mezzo.session.session import MixedPrecision
from mezzo.session.weights.words import Words
from mezzo.session.window.window import NoGradient

__all__ = ["lend", "store_low"]


def store_low(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    words: Words,
    *,
    sums_wide: bool = False,
    saved_as: torch.dtype | None = None,
) -> None:
    """Store models as a policy says, with a session that is lent where there are optimizers; all of it or nothing.

    Args:
        models: The models.
        optimizers: The optimizers over their parameters, if there are any yet.
        policy: The policy, without a loss scale.
        words: What a program writes, for warnings.
        sums_wide: As of :func:`lend`.
        saved_as: What floating tensors of the models' state dicts are; as they are stored when omitted.

    Raises:
        MezzoError: As :class:`MixedPrecision`, or :func:`mezzo.prepare`. Nothing was changed.
    """
    if optimizers:
        attached = lend(MixedPrecision(models, optimizers, policy), sums_wide=sums_wide)
        attached.amp._core.weights.words = words
        if saved_as is not None:
            attached.save_as(saved_as)
        return
    with contextlib.ExitStack() as undo:
        for model in models:
            undo.callback(prepare(model, policy).remove)
        undo.pop_all()
    if saved_as is not None:
        save_as(models, saved_as)


def lend(amp: MixedPrecision, *, sums_wide: bool = False) -> Attached:
    """Let a session's optimizers step by themselves, and scalers have the session: until it is closed.

    ``optimizer.step()`` takes the gradients that are there for unscaled ones; a scaler for those that carry its scale.

    Args:
        amp: A session without a loss scale of its own.
        sums_wide: Whether gradients of low-precision parameters are FP32 from the first backward pass on.

    Returns:
        The session, attached.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.session.attached import lend
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> attached = lend(mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16"), sums_wide=True)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> model.weight.dtype, model.weight.grad.dtype
        (torch.bfloat16, torch.float32)
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["params"][0].dtype
        torch.float32
    """
    attached, core = Attached(amp), amp._core
    core.is_lent, core.sums_wide, core.num_param_groups = True, sums_wide, 0
    core.group_optimizers()
    unscaled = HeldScaler(LossScale.none(), core.device)

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        if core.is_closed:
            plain = attached.plain_step(optimizer)
            return plain() if closure is None else plain(closure)
        stepping = ScaledOptimizer(optimizer, unscaled)

        def evaluate() -> Any:
            assert closure is not None, "evaluated where there is one"
            with torch.enable_grad():
                loss = closure()
            stepping.find(unscaled.state.scale)
            return loss

        if closure is None:
            stepping.find(unscaled.state.scale)
        try:
            return stepping.step(None if closure is None else evaluate, (), {})[1]
        except NoGradient:
            return None  # as of any optimizer

    for optimizer in core.optimizers:
        attached.take_over(optimizer, step)
    return attached
