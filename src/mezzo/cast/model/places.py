"""Where the tensors of a model stand, which modules are called, and which rules speak about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mezzo.cast.model.sharding import gathered
from mezzo.policy import Policy, Rule, Treatment
from mezzo.tensors import CASTABLE, is_distributed

__all__ = [
    "RuledParams", "called", "has_forward", "made_weights", "makes_weight", "outermost", "owned", "region_paths",
    "stored_tensors",
]  # fmt: skip


def stored_tensors(model: nn.Module) -> Iterator[tuple[Tensor, str, nn.Module]]:
    """Yield each floating parameter and persistent buffer under every path it has, with its owner."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = (
            (name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        )
        for name, tensor in (*module._parameters.items(), *persistent):
            if tensor is not None and tensor.dtype in CASTABLE:
                yield tensor, f"{prefix}.{name}" if prefix else name, module


def made_weights(module: nn.Module) -> tuple[str, ...]:
    """Name the weights of a module that old hooks make of others before each call, plain attributes."""
    hooks = module._forward_pre_hooks.values()
    return tuple(hook.name for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm))


def makes_weight(path: str, module: nn.Module) -> bool:
    """Whether a weight is made of a tensor, by a parametrization or by an old hook: in FP32, as its map needs.

    Args:
        path: The tensor's path in the model.
        module: Its owner.
    """
    name = path.rpartition(".")[2]
    return "parametrizations" in path.split(".") or any(name.startswith(f"{made}_") for made in made_weights(module))


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own; containers, which have none, are never called."""
    return type(module).forward is not nn.Module.forward


def called(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and its modules that have a forward."""
    yield from ((path, module) for path, module in model.named_modules() if not path or has_forward(module))


def owned(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters, with those in containers of it that are never called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from owned(child)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what is called from outside: the model, or of one that is a container what is called in it."""
    if has_forward(model) or "forward" in vars(model):
        yield model
    else:
        for child in model.children():
            yield from outermost(child)


def region_paths(model: nn.Module, policy: Policy) -> dict[str, str]:
    """Return for each called module the path whose region it runs in: its own where a rule makes a difference there."""
    paths = {"": ""}
    for path, _ in called(model):
        around = path.rpartition(".")[0]
        while around not in paths:  # containers are never called
            around = around.rpartition(".")[0]
        ops_differ = any(
            rule.op is not None and rule.matches_module(path) != rule.matches_module(around) for rule in policy.rules
        )
        differs = policy.module_rule(path) is not policy.module_rule(around) or ops_differ
        paths[path] = path if differs else paths[around]
    return paths


def _treatment(tensor: Tensor, rule: Rule) -> Treatment:
    """Return the treatment of ops that read a tensor; an FP32 buffer's is told from that of a parameter's."""
    is_buffer = not isinstance(tensor, nn.Parameter)
    return "promote" if is_buffer and rule.treatment == "fp32" else rule.treatment


@dataclass(frozen=True)
class RuledParams:
    """Parameters under a rule, by where they stand: whatever tensor stands there when a region begins is meant.

    ``torch.func.functional_call`` puts other tensors there for one call.
    """

    places: tuple[tuple[nn.Module, str, Treatment], ...]
    #: What stands there while parameters that are sharded are gathered, by their part.
    gathered: dict[Tensor, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, policy: Policy) -> RuledParams:
        """Find the tensors of a model whose rule no module's rule covers."""
        deciding = [
            (tensor, module, path.rpartition(".")[2], policy.storage(path, path.rpartition(".")[0])[1])
            for tensor, path, module in stored_tensors(model)
        ]
        ruled = {tensor: rule for tensor, *_, rule in deciding if rule is not None}
        # A module's rule covers what that module does with a tensor it shares; here is who else reads it.
        shared = {t for t, *_, rule in deciding if t in ruled and (rule is None or rule.param is not None)}
        found = cls(tuple((owner, name, _treatment(t, ruled[t])) for t, owner, name, _ in deciding if t in shared))
        found.find_gathered(model)
        return found

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

    def pinned(self) -> dict[int, Treatment]:
        """Return the treatment of ops that read a ruled parameter, by the parameter's ``id``."""
        return {id(tensor): treatment for tensor, treatment in self}
