"""Weights that a session's model loads, saves and copies, kept exact where it stores them in another precision."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.cast.model.originals import do_not_fit
from mezzo.cast.model.sharding import flags_of_all
from mezzo.errors import StateError, message, some_of
from mezzo.session.weights.weights import Weights
from mezzo.shards import placed
from mezzo.tensors import dtype_name, is_distributed, local, overflows

__all__ = ["watch"]

logger = logging.getLogger(__name__)


def watch(weights: Weights) -> None:
    """Keep all bits when a model of a session loads weights in another precision than it stores.

    FP32 weights go to their keepers whole, and low-precision ones leave every FP32 value, or FP32 weight that the
    session restored, that rounds to them. So the state dicts of model and session load in either order. Masters that
    were edited in place are rounded into the model before it is saved or loaded, as if the edit had been made there.
    Hooks before ``nn.Module.load_state_dict`` and ``state_dict`` of each module that has parameters, or buffers whose
    FP32 values are kept, so that a part of the model, or a wrapper around it, does so as exactly; a copied or unpickled
    model has some that do nothing.
    """
    if not weights.load_hooks:
        hook = LoadHook(weights)
        every = {module: None for model in weights.models for module in model.modules()}
        for module in (each for each in every if each._parameters or (each._buffers and weights.untrained)):
            weights.load_hooks.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
            weights.load_hooks.append(module.register_state_dict_pre_hook(hook.show))  # type: ignore[no-untyped-call]
            # What torch has copied by then is no edit, and does not count more than one of a master that follows.
            weights.load_hooks.append(module.register_load_state_dict_post_hook(hook.show))  # type: ignore[no-untyped-call]


class LoadHook:
    """What :func:`watch` puts on modules; it keeps no session alive, and a copied one serves none."""

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights: Callable[[], Weights | None] = (lambda: None) if weights is None else weakref.ref(weights)
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadHook, ()

    def __deepcopy__(self, memo: Any) -> LoadHook:
        weights = self._weights()
        if weights is not None and weights.policy.master_weights and not self._has_warned:
            self._has_warned = True
            dtype, words = dtype_name(weights.policy.dtype), weights.words
            masters = words.updated if weights.masters else f"optimizer.master_of(p) for p in {words.updated}"
            text = message(
                f"the weights of a copied model are {dtype}",
                where="copy.deepcopy(model), which AveragedModel(model) and other averages of weights begin with",
                why=f"their FP32 values are kept by the session; an average in {dtype} swallows what each step adds",
                write=f"AveragedModel(model) before {words.begin}(model, …), and after each step\n"
                f"averaged.update_parameters(nn.ParameterList({masters}))",
            )
            logger.warning("%s", text)
        return LoadHook()

    def show(self, module: nn.Module, *_: Any) -> None:
        """Round masters that were edited in place into the parameters that are about to be saved."""
        weights = self._weights()
        params = [param for param in module._parameters.values() if param is not None]
        for masters in weights.masters.values() if weights is not None else ():
            masters.take_edits(params)

    @torch.no_grad()
    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Replace what is about to be loaded."""
        if (weights := self._weights()) is None:
            return
        named = [prefix + name for name in module._parameters if prefix + name in state_dict]
        if local_metadata.get("assign_to_params_buffers") and weights.policy.master_weights and named:
            raise StateError(
                "load_state_dict(…, assign=True) puts other parameters in the place of a session's",
                where=some_of(named),
                why="the optimizer has those that are there, and would train the new ones no more",
                write=f"load_state_dict(…) without assign; or with it before {weights.words.begin}(model, …)",
            )
        weights.take_thawed()
        stored = weights.stored(in_fp32=True)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor not in stored and prefix + name in state_dict:
                weights.untrained.take_loaded(tensor, state_dict[prefix + name], prefix + name)
        for name, param in module._parameters.items():
            incoming = state_dict.get(prefix + name)
            if param is None or not isinstance(incoming, Tensor) or incoming.shape != param.shape:
                continue
            if (keeper := stored.get(param)) is not None:
                keeper.take_edits([param])
            if (keeper is None and param not in weights.restored) or not incoming.is_floating_point():
                continue
            incoming = placed(incoming.to(param.device), param)
            if keeper is not None and incoming.dtype == param.dtype:
                keeper.write(param, incoming)
                continue
            incoming = _whole(param if keeper is None else keeper.master_of(param), incoming)
            if _overflows_anywhere(incoming, param.dtype):
                raise do_not_fit([prefix + name], param.dtype)
            if keeper is None:
                param.copy_(incoming)
            else:
                keeper.write(param, incoming)
            state_dict[prefix + name] = param.detach().clone()  # as its keeper rounds, which may not be torch's way


def _overflows_anywhere(incoming: Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values become infinite in another dtype; of shards on any rank, so that all refuse them."""
    found = overflows(local(incoming), dtype)
    if not is_distributed(incoming):
        return found
    return bool(flags_of_all(torch.tensor([found], device=incoming.device), [incoming]).any())


def _whole(exact: Tensor, incoming: Tensor) -> Tensor:
    """Return what is loaded; where it is the present value in a narrower dtype, with the bits that this has lost."""
    if incoming.element_size() >= exact.element_size():
        return incoming
    return torch.where(exact.to(incoming.dtype) == incoming, exact, incoming.to(exact.dtype))
