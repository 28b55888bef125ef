"""Sessions whose optimizers step by their own calls, with gradients that are there; their scale comes from outside."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.cast import Prepared, prepare
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.held import HeldScaler
from mezzo.session.attached.attached import Attached
from mezzo.session.attached.saved_as import save_as
from mezzo.session.attached.scaling import ScaledOptimizer
from mezzo.session.refusals.beginning import owners
from mezzo.session.session import MixedPrecision
from mezzo.session.weights.words import Words
from mezzo.session.window.window import NoGradient

__all__ = ["adopt", "lend", "store_low"]


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

    Without any the first one that :func:`adopt` is told of gets the models, and FP32 masters with them.

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
    lends = partial(lend, words=words, sums_wide=sums_wide, saved_as=saved_as)
    if optimizers:
        lends(MixedPrecision(models, optimizers, policy))
        return
    with contextlib.ExitStack() as undo:
        for model in models:
            prepared = prepare(model, policy)
            undo.callback(prepared.remove)
            waiting = _Waiting(weakref.ref(prepared), lends)
            _WAITING.update({param: waiting for param in model.parameters() if policy.master_weights})
        undo.pop_all()
    if saved_as is not None:
        save_as(models, saved_as)


class _Waiting(NamedTuple):
    """A model that was stored low, and what lends its session."""

    prepared: Callable[[], Prepared | None]  # which its model alone holds
    lends: Callable[[MixedPrecision], Attached]


_WAITING: Final[MutableMapping[Any, _Waiting]] = WeakIdKeyDictionary()


def adopt(optimizer: Optimizer) -> None:
    """Lend a session to an optimizer of models that :func:`store_low` has stored without one, if it is such.

    Their gradients stay; they may carry a loss scale already.

    Args:
        optimizer: Any that no session has yet.

    Raises:
        MezzoError: As :class:`MixedPrecision`. Nothing was changed.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = {id(each): each for param in params if (each := _WAITING.get(param)) is not None}
    alive = (waiting.prepared() for waiting in found.values())
    prepared = [each for each in alive if each is not None and not each.in_session]
    if not prepared or owners(optimizer):
        return
    gradients = {param: param.grad for each in prepared for param in each.model.parameters()}
    try:
        for param in gradients:
            param.grad = None
        next(iter(found.values())).lends(MixedPrecision(prepared, optimizer))
    finally:
        for param, gradient in gradients.items():
            param.grad = None if gradient is None else gradient.to(param.grad_dtype or gradient.dtype)


def lend(
    amp: MixedPrecision,
    words: Words | None = None,
    *,
    sums_wide: bool = False,
    saved_as: torch.dtype | None = None,
) -> Attached:
    """Let a session's optimizers step by themselves, and scalers have the session: until it is closed.

    ``optimizer.step()`` takes the gradients that are there for unscaled ones; a scaler for those that carry its scale.

    Args:
        amp: A session without a loss scale of its own.
        words: What a program writes, for warnings.
        sums_wide: Whether gradients of low-precision parameters are FP32 from the first backward pass on.
        saved_as: What floating tensors of the models' state dicts are; as they are stored when omitted.

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
    attached = Attached(amp)
    core = attached.core
    core.weights.words = words or core.weights.words
    core.is_lent, core.sums_wide, core.grouped_params = True, sums_wide, []
    core.group_optimizers()
    if saved_as is not None:
        attached.save_as(saved_as)
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
