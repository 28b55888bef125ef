"""Where the tensors of a model stand, which modules are called, and which rules speak about each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Final

import torch
from torch import Tensor, nn

from mezzo import sharded
from mezzo.cast.device import default_device_types, devices
from mezzo.cast.differences import ParamFacts
from mezzo.cast.pins import PIN
from mezzo.cast.products import Memory, recipe_of
from mezzo.compiling import constant_in_graphs
from mezzo.errors import MezzoError, UnsupportedError, some_of
from mezzo.hooks import with_gradient_hooks
from mezzo.policy import Policy, Rule, Treatment
from mezzo.policy.ops import QUANTISABLE, QUANTISED
from mezzo.policy.rules import exact
from mezzo.releases import private
from mezzo.sharded import Shard, is_distributed
from mezzo.tensors import CASTABLE, LOW, dtype_name

#: What normalises by statistics of its input: batch norm and instance norm.
NORM: Final = private("torch.nn.modules.batchnorm._NormBase")
_NUMBERED: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def stored_tensors(model: nn.Module) -> Iterator[tuple[Tensor, str, nn.Module]]:
    """Yield each floating parameter and buffer under every path it has, with its owner."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dtype in CASTABLE:
                yield tensor, f"{prefix}.{name}" if prefix else name, module


def ruled_fp32(model: nn.Module, policy: Policy) -> dict[nn.Module, set[str]]:
    """Return which parameters a policy's rules have in FP32, by module or parameter: their names, by their owner."""
    names = defaultdict[nn.Module, set[str]](set)
    for prefix, module in model.named_modules(remove_duplicate=False):
        rule = policy.module_rule(prefix) if prefix else None
        is_fp32 = getattr(type(module), PIN, None) == "fp32" if rule is None else rule.treatment == "fp32"
        for name in module._parameters:
            path = f"{prefix}.{name}" if prefix else name
            dtype, deciding = policy.storage(path, prefix, is_norm=isinstance(module, NORM))
            if dtype == torch.float32 and (is_fp32 if deciding is None else deciding.treatment == "fp32"):
                names[module].add(name)
    return names


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor has two or more dimensions that are longer than one: what products read, and tables of rows."""
    return sum(size > 1 for size in tensor.shape) > 1


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own; containers, which have none, are never called."""
    return getattr_static(type(module), "forward") is not nn.Module.forward  # that of TorchScript's cannot be got


def called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and its modules that have a forward."""
    yield from ((path, module) for path, module in model.named_modules() if not path or has_forward(module))


def own_params(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters, with those in containers of it that are never called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from own_params(child)


def entry_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what is called from outside: the model, or of one that is a container what is called in it."""
    if has_forward(model) or "forward" in vars(model):
        yield model
    else:
        for child in model.children():
            yield from entry_modules(child)


def region_paths(model: nn.Module, policy: Policy) -> dict[str, str]:
    """Return for each called module the path whose region it runs in: its own where a rule makes a difference there."""
    paths = {"": ""}
    for path, _ in called_modules(model):
        outer_path = path.rpartition(".")[0]
        while outer_path not in paths:  # containers are never called
            outer_path = outer_path.rpartition(".")[0]
        ops_differ = any(
            rule.op is not None and rule.matches_module(path) != rule.matches_module(outer_path)
            for rule in policy.rules
        )
        differs = policy.module_rule(path) is not policy.module_rule(outer_path) or ops_differ
        paths[path] = path if differs else paths[outer_path]
    return paths


class Devices:
    """The devices of a model's tensors, wherever these are by now: one tensor is asked for each type of device.

    Args:
        model: The model. One without tensors is taken to be where new ones would be: on the accelerator, if there is
            one.
    """

    def __init__(self, model: nn.Module) -> None:
        examples: dict[str, tuple[nn.Module, str, str]] = {}
        for table in ("_parameters", "_buffers"):  # parameters first: they stay the same objects when they move
            for module in model.modules():
                for name, tensor in vars(module).get(table, {}).items():  # torch.jit's have none: they are refused
                    if tensor is not None:
                        examples.setdefault(tensor.device.type, (module, table, name))
        self._examples = list(examples.values())

    def now(self) -> list[torch.device]:
        """Return the devices of these tensors; where one was taken away it counts no more."""
        return [
            tensor.device
            for module, table, name in self._examples
            if (tensor := vars(module)[table].get(name)) is not None
        ]

    @constant_in_graphs
    def kinds(self) -> tuple[str, ...]:
        """Return the types of devices that regions of the model cover, the CPU first."""
        now = {device.type for device in self.now()}
        return tuple(device_type for device_type in devices() if device_type in now) or default_device_types()


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
    #: What the model's products below sixteen bits remember.
    memory: Memory | None = None

    @classmethod
    def of(cls, model: nn.Module, policy: Policy, *, gathers: bool = True) -> RuledParams:
        """Find the tensors of a model whose rule no module's rule covers.

        Args:
            model: The model.
            policy: The policy.
            gathers: Whether :meth:`find_gathered` is called, in which every rank takes part.
        """
        deciding = [
            (tensor, module, path.rpartition(".")[2], policy.storage(path, path.rpartition(".")[0])[1])
            for tensor, path, module in stored_tensors(model)
        ]
        # Where ops are cast, "low" says how a parameter is stored, which is FP32 to all that reads it.
        ruled = {t: rule for t, *_, rule in deciding if rule and not (policy.casts and rule.treatment == "low")}
        # A module's rule covers what that module does with a tensor it shares; here is who else reads it.
        shared = {t for t, *_, rule in deciding if t in ruled and (rule is None or rule.param is not None)}
        ruled_places = [(owner, name, _treatment(t, ruled[t])) for t, owner, name, _ in deciding if t in shared]
        # Of a vector that is a buffer, such as a position's frequencies, there is no product.
        factors = [
            (path, owner) for t, path, owner in stored_tensors(model) if t.dim() > 1 or isinstance(t, nn.Parameter)
        ]
        named = [(owner, path, product_rule(path, policy)) for path, owner in factors]
        ruled_places += [(owner, path.rpartition(".")[2], rule.treatment) for owner, path, rule in named if rule]
        params = cls(tuple(ruled_places), memory=_memory(model, policy))
        if gathers:
            params.find_gathered(model)
        return params

    def __len__(self) -> int:
        return len(self.places)

    def find_gathered(self, model: nn.Module) -> None:
        """Find out what stands there while parameters are gathered; every rank takes part."""
        read = model.parameters() if self.memory is not None else (tensor for tensor, _ in self)
        if any(map(is_distributed, read)):
            self.gathered.update(sharded.gathered(model))

    def __iter__(self) -> Iterator[tuple[Tensor, Treatment]]:
        for owner, name, treatment in self.places:
            tensor = owner._parameters.get(name, owner._buffers.get(name))
            if tensor is not None:
                yield tensor, treatment
                if tensor in self.gathered:
                    yield self.gathered[tensor], treatment

    @property
    def has_any(self) -> bool:
        """Whether there is a tensor that regions know of."""
        return len(self.places) > 0 or self.memory is not None

    def standing(self) -> list[Tensor | None]:
        """Return the tensors by which what regions know was found: what changes it puts another one in a place."""
        tensors = [owner._parameters.get(name, owner._buffers.get(name)) for owner, name, _ in self.places]
        if self.memory is not None:
            tensors += self.memory.standing()
        return [*tensors, *self.gathered.values()] if self.gathered else tensors

    @classmethod
    def facts_of(cls, models: Iterable[RuledParams]) -> ParamFacts:
        """Return what regions are to know of the parameters of some models."""
        every_model = [*models]
        memories = [params.memory for params in every_model if params.memory is not None]
        for params in every_model:
            if params.memory is not None:
                params.memory.rebind(params.gathered)
        ruled = [pair for params in every_model for pair in params]
        pins_buffers = not all(isinstance(tensor, nn.Parameter) for tensor, _ in ruled)
        return ParamFacts({id(tensor): treatment for tensor, treatment in ruled}, tuple(memories), pins_buffers)


def product_rule(path: str, policy: Policy) -> Rule | None:
    """Return the rule on the products of a parameter, if there is one; ``*`` means none of those that stay low."""
    rule, module = policy.product_rule(path), path.rpartition(".")[0]
    if rule is None or rule.param != "*" or not module:
        return rule
    by_module = policy.explain(QUANTISABLE[0], module).rule
    stays = by_module is not None and by_module.treatment == "low" and by_module.module == exact(module)
    return None if stays else rule


def _by_module(path: str, policy: Policy) -> set[Treatment]:
    """Return the treatments of the products in a module."""
    return {policy.explain(op, path or None).treatment for op in QUANTISABLE}


def _quantised(path: str, by_module: set[Treatment], policy: Policy) -> set[Treatment]:
    """Return in what below sixteen bits the products of a parameter are, if its rule or its module's says so."""
    rule = product_rule(path, policy)
    return ({rule.treatment} if rule else by_module) & {*QUANTISED}


def _memory(model: nn.Module, policy: Policy) -> Memory | None:
    """Return what the products of a model remember, if a rule gives one a recipe that does."""
    weights, remembers = dict[str, tuple[nn.Module, str]](), False
    for path, module in model.named_modules():
        by_module = _by_module(path, policy)
        for name, param in module._parameters.items():
            if param is None or param.dim() < 2:
                continue
            full_path = f"{path}.{name}" if path else name
            recipes = [recipe_of(policy, treatment) for treatment in _quantised(full_path, by_module, policy)]
            remembers |= any(recipe.remembers for recipe in recipes)
            if any(recipe.delayed for recipe in recipes):
                weights[full_path] = module, name
    return Memory(weights, policy) if remembers else None


# What stands against a policy in the way in which ``fully_shard`` has sharded a model.


def sharded_otherwise(model: nn.Module, policy: Policy) -> Iterator[MezzoError]:
    """Yield what ``fully_shard`` or tensor parallelism did to a model that does not go with a policy."""
    yield from _cut_below_sixteen(model, policy)
    parts: dict[Tensor, Shard] = {part.param: part for part in sharded.shards(model)}
    if not parts:
        return
    paths = {unit: path for path, unit in model.named_modules()}
    other: dict[tuple[str, torch.dtype, torch.dtype], list[str]] = {}
    for param, name, module in stored_tensors(model):
        part = parts.get(param)
        if part is not None and part.cast is not None and part.cast in LOW and param.dtype not in LOW:
            wanted, _ = policy.storage(name, name.rpartition(".")[0], is_norm=isinstance(module, NORM))
            if part.cast != wanted:
                other.setdefault((paths[part.unit], part.cast, wanted), []).append(name)
    for (path, cast, wanted), few in other.items():
        unit = f"model.{path}" if path else "model"
        yield UnsupportedError(
            f"fully_shard gathers parameters in {dtype_name(cast)}, and {policy.level} wants {dtype_name(wanted)}",
            where=f"{some_of(few, 3)}, of fully_shard({unit})",
            write=f"mezzo.fully_shard(model, {str(policy)!r}), which does it all;\n"
            f"or torch's: fully_shard({unit}) without param_dtype",
        )
    hooked = {*with_gradient_hooks(model.parameters())}  # a user's hook may average a gradient by hand
    alone = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param not in parts and not is_distributed(param) and param not in hooked
    ]
    if alone:
        yield UnsupportedError(
            "gradients of some parameters would not be averaged over ranks",
            where=some_of(alone),
            why="no module that was given to fully_shard holds them, so that ranks would drift apart",
            write="fully_shard(model) last, after that of the modules inside it: it takes all that are left",
        )


def _cut_below_sixteen(model: nn.Module, policy: Policy) -> Iterator[MezzoError]:
    """Refuse products below sixteen bits of weights that tensor parallelism has cut, or copied as DTensors."""
    if not any(rule.treatment in QUANTISED for rule in policy.rules) or not (cut := sharded.cut_by_others(model)):
        return
    names = [
        path
        for param, path, _ in stored_tensors(model)
        if param in cut and param.dim() > 1 and _quantised(path, _by_module(path.rpartition(".")[0], policy), policy)
    ]
    if names:
        # One glob for the same layer of every block.
        globs = dict.fromkeys(_NUMBERED.sub("*", exact(name.rpartition(".")[0])) for name in names)
        stays_low = "+".join(f"{op}@{glob}" for glob in globs for op in QUANTISABLE)
        yield UnsupportedError(
            "products below sixteen bits of weights that tensor parallelism has cut",
            where=some_of(names),
            why="each rank would scale its own part by that part's largest value",
            write=f"rules for other modules; or low={stays_low} before them",
        )
