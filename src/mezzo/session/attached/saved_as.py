"""State dicts of models in one dtype, whatever the session stores: what programs save themselves, and load anywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.session.weights.weights import Weights
from mezzo.tensors import CASTABLE

__all__ = ["save_as"]


def save_as(models: list[nn.Module], dtype: torch.dtype, weights: Weights | None = None) -> list[RemovableHandle]:
    """Have ``state_dict()`` of models, and of their parts, return floating tensors in one dtype.

    A low-precision parameter's is the FP32 value that its keeper has, of which FP32 has every bit; of other tensors the
    stored value. With ``keep_vars=True`` the tensors themselves are returned, as ever, and float64 ones always. A
    copied model saves what it stores.

    Args:
        models: The models.
        dtype: The dtype.
        weights: Those of their session, if there is one.

    Returns:
        What takes the hooks off again.
    """
    hook = _SavedAs(dtype, weights)
    modules = {module: None for model in models for module in model.modules()}
    return [module.register_state_dict_post_hook(hook) for module in modules]  # type: ignore[no-untyped-call]


class _SavedAs:
    """A hook of modules; it keeps no session alive, and a copied one does nothing.

    Args:
        dtype: What to save in; ``None`` for the dtype that each tensor has.
        weights: The session's.
    """

    def __init__(self, dtype: torch.dtype | None = None, weights: Weights | None = None) -> None:
        self._dtype = dtype
        self._weights: Callable[[], Weights | None] = (lambda: None) if weights is None else weakref.ref(weights)

    def __reduce__(self) -> Any:
        return _SavedAs, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self._dtype is None:
            return
        weights = self._weights()
        value_of = (lambda _: None) if weights is None else weights.fp32_values()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            saved = state.get(prefix + name)
            if tensor is None or saved is tensor or not isinstance(saved, Tensor) or saved.dtype not in CASTABLE:
                continue
            exact = value_of(tensor)
            state[prefix + name] = (saved if exact is None else exact).to(self._dtype)
