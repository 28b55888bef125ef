"""Which modules of a model have boundaries where something is cast.

In a converted model that is the first of its modules that is called from outside, whichever it is: each has a door.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from mezzo.cast.device import Kinds
from mezzo.cast.model.boundary import Boundary, Entrance, runs_backward
from mezzo.cast.mode import compiled_inside_alone
from mezzo.cast.model.sharding import gathered
from mezzo.policy import Policy, Treatment
from mezzo.tensors import CASTABLE, is_distributed

__all__ = ["Door", "RuledParams", "boundaries", "callable_alone", "doors_of", "has_forward", "order_hooks",
           "stored_tensors"]  # fmt: skip


def stored_tensors(model: nn.Module) -> Iterator[tuple[Tensor, str, nn.Module]]:
    """Yield each floating parameter and persistent buffer under every path it has, with its owner."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = (
            (name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        )
        for name, tensor in (*module._parameters.items(), *persistent):
            if tensor is not None and tensor.dtype in CASTABLE:
                yield tensor, f"{prefix}.{name}" if prefix else name, module


@dataclass(frozen=True)
class RuledParams:
    """Parameters under a rule, by where they stand: whatever tensor stands there when a region begins is meant.

    ``torch.func.functional_call`` puts other tensors there for one call.
    """

    places: tuple[tuple[nn.Module, str, Treatment], ...]
    #: What stands there while parameters that are sharded are gathered, by their part.
    gathered: dict[Tensor, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    def find_gathered(self, model: nn.Module) -> None:
        """Find out what stands there while parameters are gathered; every rank takes part."""
        if any(is_distributed(tensor) for tensor, _ in self):
            self.gathered.update(gathered(model))

    def __iter__(self) -> Iterator[tuple[Tensor, Treatment]]:
        for owner, name, treatment in self.places:
            tensor = owner._parameters.get(name, owner._buffers.get(name))
            if tensor is not None:
                yield tensor, treatment
                if tensor in self.gathered:
                    yield self.gathered[tensor], treatment


def boundaries(model: nn.Module, policy: Policy, kinds: Kinds, entrance: Entrance) -> list[tuple[nn.Module, Boundary]]:
    """Find the modules at whose boundary something changes, the model itself first."""
    low = policy.param_dtype != torch.float32
    deciding = [
        (tensor, module, path.rpartition(".")[2], policy.storage(path, path.rpartition(".")[0])[1])
        for tensor, path, module in stored_tensors(model)
    ]
    ruled = {tensor: rule for tensor, *_, rule in deciding if rule is not None}
    # A module's rule covers what that module does with a tensor it shares; here is who else reads it.
    shared = {t for t, *_, rule in deciding if t in ruled and (rule is None or rule.param is not None)}
    places = tuple((owner, name, ruled[t].treatment) for t, owner, name, _ in deciding if t in shared)
    params = RuledParams(places)
    params.find_gathered(model)
    found = []
    widens = low and not policy.keep_batchnorm_fp32
    at = functools.partial(Boundary, policy=policy, params=params, kinds=kinds)
    root = at(
        path="", inputs=policy.dtype if low else None, outputs=policy.output_dtype, entrance=entrance if low else None,
        widens_norm=widens and isinstance(model, _NormBase),
    )  # fmt: skip
    if low or policy.output_dtype is not None or params:
        found.append((model, root))
    for path, module in model.named_modules():
        if not path or not has_forward(module):
            continue
        # Containers are never called, so the region around a module is that of the nearest one that is.
        around = _nearest_called(model, path)
        whole, above = policy.module_rule(path), policy.module_rule(around)
        ops_differ = any(
            rule.op is not None and rule.matches_module(path) != rule.matches_module(around) for rule in policy.rules
        )
        if whole is not above or ops_differ:
            inputs, outputs = _casts(policy, whole.treatment if whole is not above and whole else None)
            found.append((module, at(path=path, inputs=inputs, outputs=outputs, rule=whole)))
        elif isinstance(module, _NormBase) and widens:
            found.append((module, at(path=path, widens_norm=True)))
    return found


def callable_alone(
    model: nn.Module, policy: Policy, params: Iterable[tuple[Tensor, Treatment]], kinds: Kinds
) -> Iterator[tuple[str, nn.Module, Callable[[], Boundary]]]:
    """Find the submodules that can be called by themselves, with what makes the boundary of such a call."""
    holding: set[str] = set()
    for _, path, _ in stored_tensors(model):
        while path := path.rpartition(".")[0]:
            holding.add(path)
    for path, module in model.named_modules():
        # Parametrizations run wherever a weight is read.
        if path not in holding or not has_forward(module) or "parametrizations" in path.split("."):
            continue
        rule = policy.module_rule(path)
        wide = rule is not None and rule.treatment in ("fp32", "fp32_math")
        inputs = torch.float32 if wide else policy.dtype
        make = functools.partial(
            Boundary, policy=policy, path=path, params=params, kinds=kinds, inputs=inputs, outputs=policy.output_dtype
        )
        yield path, module, make


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own; containers, which have none, are never called."""
    # Of a TorchScript module's class the method cannot be asked for, only looked up.
    return getattr(inspect.getattr_static(type(module), "forward"), "__name__", "") != "_forward_unimplemented"


def _nearest_called(model: nn.Module, path: str) -> str:
    """Return the path of the nearest module around this one that has a forward of its own."""
    path = path.rpartition(".")[0]
    while path and not has_forward(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _casts(policy: Policy, treatment: Treatment | None) -> tuple[torch.dtype | str | None, torch.dtype | str | None]:
    """Say what a module's inputs and outputs are cast to; a word where the inputs themselves decide."""
    known: dict[Treatment | None, tuple[torch.dtype | str | None, torch.dtype | str | None]] = {
        "fp32": (torch.float32, None if policy.autocast else policy.dtype),
        "fp32_math": (torch.float32, "input"),
        "low": (policy.dtype, None),
        "promote": ("widest", None),
    }
    return known.get(treatment, (None, None))


# Doors ------------------------------------------------------------------------------------------------


def order_hooks(module: nn.Module) -> None:
    """Let a module's pre-hooks lie in memory in the order in which they run.

    ``torch.compile`` of torch 2.11 counts them so, and finds another one where a hook was put before those that the
    module had. Done in C, as a whole: an interrupt in between would lose a hook.
    """
    hooks: Any = module._forward_pre_hooks
    keys = list(hooks)
    deque(map(hooks.__setitem__, keys, map(hooks.pop, keys)), maxlen=0)


class Door:
    """The hooks of a submodule: where a call comes from outside the model they are what the model's own are.

    ``model.generate(…)`` or ``model.encoder(x)`` casts inputs and outputs then as ``model(x)`` does; a call from inside
    passes. The second hook is added when it is first needed.

    **Cost**: for each call of the submodule one Python function, 1 to 2 µs.
    """

    def __init__(self, entrance: Entrance, make: Callable[[], Boundary]) -> None:
        self.entrances = [entrance]  # several where models share the module
        self._make = make
        self._boundary: Boundary | None = None
        self._hooks: list[RemovableHandle] = []
        self._was_outside = False  # the last call, which a checkpoint may repeat when no call of the model lasts

    def attach(self, module: nn.Module) -> None:
        """Hook the module, outside all hooks that it has."""
        self._hooks.append(module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True))
        order_hooks(module)

    def detach(self, entrance: Entrance) -> None:
        """Close the door for one model, closed already or not; take the hooks off with the last."""
        if entrance in self.entrances:
            self.entrances.remove(entrance)
        if not self.entrances:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Cast what comes from outside: a forward pre-hook."""
        inside = False
        for entrance in self.entrances:
            inside = inside or entrance.is_open()
        if inside:
            self._was_outside = False
            if self._boundary is not None:  # it may be this module that calls itself
                self.entrances[0].enter(self)
            return None
        if runs_backward() and not (self._was_outside and _is_wide((args, kwargs))):  # recomputed inside its model
            return None
        self._was_outside = True
        if self._boundary is None:
            self.install(module)
        assert self._boundary is not None
        self.entrances[0].enter(self)
        return self._boundary.enter(module, args, kwargs)

    @_disable_dynamo
    def install(self, module: nn.Module) -> None:
        """Plan the region that is entered here, and add the hook that leaves it."""
        self._boundary = self._make()
        self._hooks.append(module.register_forward_hook(self.exit, always_call=True))

    @compiled_inside_alone
    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what goes outside: a forward hook."""
        if self._boundary is None or not self.entrances[0].leave(self):
            return None
        return self._boundary.exit(module, args, output)


def _is_wide(given: Any) -> bool:
    """Whether anything in a call's arguments is FP32, as what comes from outside is, and nothing inside a model."""
    return any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in pytree.tree_leaves(given))


def doors_of(module: nn.Module) -> Iterator[Door]:
    """Yield the door of a module that another model, which shares it, has put there."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(owner := getattr(hook, "__self__", None), Door):
            yield owner
