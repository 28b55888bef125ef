"""Dropout that drops the same elements in every dtype."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mezzo.cast.differences import OPENED
from mezzo.cast.mode import OPENED_BACKWARD, compiled_inside_alone

__all__ = ["SameDropout"]


#: The arguments of ``torch.dropout``.
_NAMES: Final = {"input": "x", "p": "p", "train": "training"}


#: Functions that hand themselves over whole; opened, they let this stay active meanwhile.
_WHOLE: Final = {
    torch.autograd.backward: OPENED_BACKWARD,
    functional.multi_head_attention_forward: OPENED[functional.multi_head_attention_forward],
}


class SameDropout(TorchFunctionMode):
    """Draw dropout's masks in FP32, in recomputation too, and let none be drawn inside fused attention.

    A CPU's kernels hand out random numbers alike in every dtype. A GPU's may not, as their threads take more elements
    of a smaller dtype, and fused attention has its own way in each: two trials would drop other elements.
    """

    @compiled_inside_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WHOLE:
            with self:
                return _WHOLE[func](*args, **kwargs)
        if func is functional.dropout:
            given = inspect.signature(functional.dropout).bind(*args, **kwargs)
            given.apply_defaults()
            return _dropped(*(given.arguments[name] for name in ("input", "p", "training", "inplace")))
        if func is torch.dropout:
            return _dropped(*args, **{_NAMES[key]: value for key, value in kwargs.items()})
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _dropped(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return x
    kept = torch.empty(x.shape, device=x.device).bernoulli_(1.0 - p)
    factors = (kept / (1.0 - p) if p < 1.0 else kept).to(x.dtype)
    return x.mul_(factors) if inplace else x * factors
