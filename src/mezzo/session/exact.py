"""Weights that a session's model loads, kept exact where it stores them in another precision."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.errors import UnsupportedError

if TYPE_CHECKING:
    from mezzo.session.parts import Parts

__all__ = ["ExactLoading", "overflows"]


class ExactLoading:
    """Keep all bits when a model of a session loads weights in another precision than it stores.

    FP32 weights go to the masters whole, and low-precision ones leave every master, or FP32 weight that the session
    restored, that rounds to them. So the state dicts of model and session load in either order.
    A hook before ``nn.Module.load_state_dict`` of each module that has parameters, so that a part of the model, or a
    wrapper around it, loads as exactly; a copied or unpickled model has one that does nothing.

    Attributes:
        restored: FP32 parameters that the session's state wrote, until the next step.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self.restored: set[Tensor] = set()
        self._parts = None if parts is None else weakref.ref(parts)
        self._hooks: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ExactLoading, ()

    def watch(self, models: list[nn.Module]) -> None:
        """Put the hooks on, once."""
        if not self._hooks:
            modules = {module: None for model in models for module in model.modules() if module._parameters}
            self._hooks = [m.register_load_state_dict_pre_hook(self) for m in modules]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace what is about to be loaded."""
        parts = self._parts() if self._parts is not None else None
        if parts is None:
            return
        stored = parts.stored()
        held = [masters.masters() for masters in parts.masters.values()]
        for name, param in module._parameters.items():
            incoming = state_dict.get(prefix + name)
            if param is None or not isinstance(incoming, Tensor) or incoming.shape != param.shape:
                continue
            owner = stored.get(param)
            master: Tensor | None = next((masters[param] for masters in held if param in masters), None)
            if owner is not None:
                master = owner.master_of(param)
            exact = master if master is not None else param if param in self.restored else None
            if exact is None or not incoming.is_floating_point():
                continue
            incoming = incoming.to(exact.device)
            if incoming.element_size() < exact.element_size():
                rounded = param if incoming.dtype == param.dtype and owner is not None else exact.to(incoming.dtype)
                incoming = torch.where(rounded == incoming, exact, incoming.to(exact.dtype))
            if overflows(incoming, param.dtype):
                raise UnsupportedError(
                    f"values do not fit {str(param.dtype).removeprefix('torch.')}",
                    where=prefix + name,
                    why=f"they are beyond {torch.finfo(param.dtype).max:g} and would become infinite",
                    write=f"policy.keep_fp32(params=[{prefix + name!r}]), or dtype=bfloat16",
                )
            if owner is not None:
                owner.write(param, incoming)
                incoming = param.detach().clone()  # as split storage rounds, which at ties is not torch's way
            else:
                exact.copy_(incoming)
            state_dict[prefix + name] = incoming


def overflows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values become infinite in another dtype; a host sync where they could."""
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return False
    return bool((tensor.isfinite() & ~tensor.to(dtype).isfinite()).any())
