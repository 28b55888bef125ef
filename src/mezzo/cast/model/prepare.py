"""``prepare``: module rules, O2/O3 conversion, and casting at a model's boundary."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.cast.device import Kinds
from mezzo.cast.model.boundaries import Door, boundaries, callable_alone, doors_of
from mezzo.cast.model.boundary import Entrance
from mezzo.cast.model.refusals import decided_storage, out_of_reach, require_module
from mezzo.cast.pins import PIN
from mezzo.cast.region import Region, autocast
from mezzo.cast.weight_casts import WeightCasts
from mezzo.errors import printable
from mezzo.policy import Policy, Rule, Treatment

__all__ = ["Prepared", "prepare"]

logger = logging.getLogger(__name__)


def prepare(model: nn.Module, policy: Policy | str | os.PathLike[str]) -> Prepared:
    """Apply a policy's module rules to a model and, in O2 and O3, store it in low precision.

    Parameters keep their identity (an optimizer built before stays valid, tied ones stay tied) and change
    their dtype. Norms with running statistics keep FP32 weights while ``policy.keep_batchnorm_fp32``, and FP32
    statistics always. Other persistent floating buffers go low; non-persistent ones stay.

    A rule on a parameter speaks about the tensor that stands in its place when the model is called, so about those of
    ``torch.func.functional_call(model, …)`` too; not where only a submodule without a rule is called with others.

    Args:
        model: The model; changed in place, or not at all when this raises.
        policy: A policy, its text, or the path of a policy file.

    Returns:
        A handle, whose ``autocast()`` is the region to run the model in and whose ``remove()`` undoes it.

    Raises:
        PolicyError: A rule whose module or parameter glob matches nothing; two rules that store one tied parameter
            differently.
        UnsupportedError: Parameters in float64 or another low precision; a device without the format.
        StateError: The model is prepared already, wrapped by DDP before conversion, or holds gradients.

    **Cost**: none where nothing differs. Two hooks on each module with a rule. In O2/O3 two hooks on the model, and one
    on each submodule with weights (1 to 2 µs a call), so that the one that is called from outside casts.

    Example:
        >>> import mezzo
        >>> from torch import nn
        >>> model = nn.Linear(4, 2)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> model.weight.dtype
        torch.bfloat16
        >>> handle.remove()
        >>> model.weight.dtype
        torch.float32
    """
    require_module(model)
    handle, originals = None, dict[Tensor, Tensor]()
    try:
        handle = Prepared(model, Policy.of(policy))
        originals = handle.converted
        handle.release_originals()
        return handle
    except BaseException:  # an interrupt: the caller gets no handle to undo this with
        if handle is not None:
            handle.keep_originals(originals)
            handle.remove()
        raise


class Prepared:
    """A model under a policy, as :func:`prepare` returns it.

    Args:
        model: The model.
        policy: The policy to prepare it with.
        tells: Whether rules that do not reach inside what they mean are logged.

    Attributes:
        model: The model.
        policy: The policy it was prepared with.
        converted: The tensors as they were before conversion, by the tensor that now stands in the model, until
            :meth:`release_originals`.
        kinds: The device types of its tensors, which its regions cover.
        casts: The casts of weights made in its regions. They end with the outermost one, but in a session, where those
            of training serve a whole window.
    """

    def __init__(self, model: nn.Module, policy: Policy, *, tells: bool = True) -> None:
        require_module(model)
        policy = _with_pinned_classes(model, policy)
        self.model, self.policy = model, policy
        self.casts = WeightCasts()
        storage = decided_storage(model, policy)
        self._before = {tensor: tensor.dtype for tensor in storage}
        for line in out_of_reach(model, policy) if tells else ():
            logger.warning("%s", printable(line))
        self.converted: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._doors: list[Door] = []
        self.entrance = Entrance()
        # Planning the regions may find that the device cannot honour the policy: before anything is changed.
        self.kinds = Kinds((*model.parameters(), *model.buffers()))
        self._boundaries = boundaries(model, policy, self.kinds, self.entrance)
        pins = any(boundary.pinned() for _, boundary in self._boundaries[:1])
        self._is_traceable = not pins and not any(rule.matches_module("") for rule in policy.rules)
        try:
            self._carry_out(storage)
        except BaseException:
            self.remove()
            raise

    def _carry_out(self, storage: Mapping[Tensor, torch.dtype]) -> None:
        for tensor, dtype in storage.items():
            if tensor.dtype != dtype:
                self.converted[tensor] = tensor.data
                _store(tensor, tensor.data.to(dtype))
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase) and self.converted:
                module.flatten_parameters()
        for module, boundary in self._boundaries:
            self._hooks.append(module.register_forward_pre_hook(boundary.enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(boundary.exit, always_call=True))
        self._open_doors()

    def _open_doors(self) -> None:
        """Let every submodule of a converted model that holds numbers be called from outside."""
        if self.policy.param_dtype == torch.float32:
            return
        for path, module, make in callable_alone(self.model, self.policy, self._boundaries[0][1].params, self.kinds):
            door = next(doors_of(module), None)
            is_new = door is None
            door = Door(self.entrance, make) if door is None else door
            self._doors.append(door)  # before it opens: whatever interrupts from here on, remove() knows of it
            if is_new:
                door.attach(module)
                if "." not in path:  # the likeliest, which compiled code cannot hook any more
                    door.install(module)
            else:
                door.entrances.append(self.entrance)

    def autocast(self, *others: Prepared) -> autocast:
        """Return a region for this model's policy: what to run the forward pass and the loss in.

        Args:
            *others: Models prepared with the same policy, whose parameter rules the region knows as well.
        """
        kinds = tuple(dict.fromkeys(kind for each in (self, *others) for kind in each.kinds()))
        if torch.compiler.is_compiling() and len(kinds) == 1 and all(each._is_traceable for each in (self, *others)):
            return autocast(self.policy, kinds[0])  # which knows how to be traced; a graph keeps no casts
        return autocast.of(Region.inside(self.policy, "", self._pinned(*others), kinds, self.casts))

    def _pinned(self, *others: Prepared) -> dict[int, Treatment]:
        boundaries = (boundary for each in (self, *others) for _, boundary in each._boundaries[:1])
        return {param: treatment for boundary in boundaries for param, treatment in boundary.pinned().items()}

    def release_originals(self, of: Container[Tensor] | None = None) -> None:
        """Forget the tensors as they were before conversion.

        Args:
            of: Those of which tensors; of all when omitted.
        """
        self.converted = {t: data for t, data in self.converted.items() if of is not None and t not in of}

    def keep_originals(self, values: Mapping[Tensor, Tensor]) -> None:
        """Take tensors of the dtypes before conversion, which :meth:`remove` gives to the model's in one move each."""
        self.converted.update({t: value for t, value in values.items() if self._before.get(t) == value.dtype})

    def remove(self) -> None:
        """Take the hooks off and store every tensor in the dtype it had; what rounding took stays lost.

        Called again after an interrupt, it finishes what is left.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for door in self._doors:
            door.detach(self.entrance)
        self._doors.clear()
        self._boundaries = []
        for tensor, dtype in self._before.items():
            if tensor.dtype != dtype:
                gradient, tensor.grad = tensor.grad, None
                _store(tensor, self.converted[tensor] if tensor in self.converted else tensor.data.to(dtype))
                tensor.grad = None if gradient is None else gradient.to(dtype)
        self._before.clear()
        self.converted.clear()


def _store(tensor: Any, data: Tensor) -> None:
    """Give a tensor other data, and gradients of that dtype if they had the dtype of the tensor until now."""
    follows = isinstance(tensor, nn.Parameter) and tensor.grad_dtype == tensor.dtype
    tensor.data = data
    if follows and tensor.grad_dtype != data.dtype:  # torch keeps one that was ever set, whatever the tensor becomes
        tensor.grad_dtype = data.dtype


def _with_pinned_classes(model: nn.Module, policy: Policy) -> Policy:
    """Store modules of classes that ``@mezzo.fp32`` pins in FP32, unless a rule of the policy says otherwise."""
    if policy.param_dtype == torch.float32:
        return policy
    pinned = [path for path, module in model.named_modules() if path and getattr(type(module), PIN, None) == "fp32"]
    rules = (Rule("fp32", module=path, reason="its class is pinned by @mezzo.fp32") for path in pinned)
    said = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*policy.rules, *(rule for rule in rules if rule.selector not in said)))
