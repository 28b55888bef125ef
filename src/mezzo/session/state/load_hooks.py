"""Weights that a session's model loads, saves and copies, kept exact where it stores them in another precision."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.errors import UnsupportedError, message
from mezzo.tensors import dtype_name

if TYPE_CHECKING:
    from mezzo.session.weights.weights import Parts

__all__ = ["ExactLoading", "overflows"]

logger = logging.getLogger(__name__)


class ExactLoading:
    """Keep all bits when a model of a session loads weights in another precision than it stores.

    FP32 weights go to the masters whole, and low-precision ones leave every master, or FP32 weight that the session
    restored, that rounds to them. So the state dicts of model and session load in either order. Masters that were
    edited in place are rounded into the model before it is saved or loaded, as if the edit had been made there.
    Hooks before ``nn.Module.load_state_dict`` and ``state_dict`` of each module that has parameters, so that a part of
    the model, or a wrapper around it, does so as exactly; a copied or unpickled model has some that do nothing.

    Attributes:
        restored: FP32 parameters that the session's state wrote, until the next step.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self.restored: set[Tensor] = set()
        self._parts = None if parts is None else weakref.ref(parts)
        self._hooks: list[RemovableHandle] = []
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ExactLoading, ()

    def __deepcopy__(self, memo: Any) -> ExactLoading:
        parts = self._parts() if self._parts is not None else None
        if parts is not None and parts.policy.master_weights and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", _of_copies(dtype_name(parts.policy.dtype), bool(parts.masters)))
        return ExactLoading()

    def watch(self, models: list[nn.Module]) -> None:
        """Put the hooks on, once."""
        if not self._hooks:
            modules = {module: None for model in models for module in model.modules() if module._parameters}
            self._hooks = [m.register_load_state_dict_pre_hook(self) for m in modules]  # type: ignore[no-untyped-call]
            self._hooks += [m.register_state_dict_pre_hook(self.show) for m in modules]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def show(self, module: nn.Module, *_: Any) -> None:
        """Round masters that were edited in place into the parameters that are about to be saved."""
        parts = self._parts() if self._parts is not None else None
        for masters in parts.masters.values() if parts is not None else ():
            held = masters.masters()
            for param in module._parameters.values():
                if param is not None and param in held:
                    masters.agree(param)

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace what is about to be loaded."""
        parts = self._parts() if self._parts is not None else None
        if parts is None:
            return
        stored = parts.stored(in_fp32=True)
        held = {param: masters for masters in parts.masters.values() for param in masters.masters()}
        for name, param in module._parameters.items():
            incoming = state_dict.get(prefix + name)
            if param is None or not isinstance(incoming, Tensor) or incoming.shape != param.shape:
                continue
            owner = stored.get(param)
            master: Tensor | None = held[param].agree(param) if param in held else None
            if owner is not None:
                owner.take_edits([param])
                master = owner.master_of(param)
            exact = master if master is not None else param if param in self.restored else None
            if exact is None or not incoming.is_floating_point():
                continue
            incoming = incoming.to(exact.device)
            if owner is not None and incoming.dtype == param.dtype:
                owner.receive(param, incoming)
                continue
            if incoming.element_size() < exact.element_size():
                incoming = torch.where(exact.to(incoming.dtype) == incoming, exact, incoming.to(exact.dtype))
            if overflows(incoming, param.dtype):
                raise UnsupportedError(
                    f"values do not fit {dtype_name(param.dtype)}",
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


def _of_copies(dtype: str, has_masters: bool) -> str:
    """Say that a copied model lacks what the session keeps beside it."""
    averaged = "amp.master_params()" if has_masters else "optimizer.master_of(p) for p in amp.master_params()"
    return message(
        f"the weights of a copied model are {dtype}",
        where="copy.deepcopy(model), which AveragedModel(model) and other averages of weights begin with",
        why=f"their FP32 values are kept by the session; an average in {dtype} swallows what each step adds",
        write="AveragedModel(model) before MixedPrecision(model, …), and after each step\n"
        f"averaged.update_parameters(nn.ParameterList({averaged}))",
    )
