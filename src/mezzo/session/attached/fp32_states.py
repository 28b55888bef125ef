"""State dicts of models in FP32, whatever the session stores: what programs save themselves, and load anywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.session.weights.weights import Weights
from mezzo.tensors import LOW

__all__ = ["save_in_fp32"]


def save_in_fp32(weights: Weights) -> list[RemovableHandle]:
    """Have ``model.state_dict()`` return FP32 values of what the models store in low precision.

    A parameter's is the value that its keeper has, every bit of it; of other tensors the stored value, widened. With
    ``keep_vars=True`` the tensors themselves are returned, as ever. A copied model saves what it stores.

    Args:
        weights: The session's.

    Returns:
        What takes the hooks off again.
    """
    modules = {module: None for model in weights.models for module in model.modules()}
    hook = _Widen(weights)
    return [module.register_state_dict_post_hook(hook) for module in modules]  # type: ignore[no-untyped-call]


class _Widen:
    """A hook of modules; it keeps no session alive, and a copied one serves none.

    Args:
        weights: The session's.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights: Callable[[], Weights | None] = (lambda: None) if weights is None else weakref.ref(weights)

    def __reduce__(self) -> Any:
        return _Widen, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if (weights := self._weights()) is None:
            return
        keepers = weights.stored(in_fp32=True)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            saved = state.get(prefix + name)
            if tensor is None or saved is tensor or not isinstance(saved, Tensor) or saved.dtype not in LOW:
                continue
            keeper = keepers.get(tensor)
            state[prefix + name] = saved.float() if keeper is None else keeper.master_of(tensor).detach()
