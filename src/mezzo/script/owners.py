"""Which modules hold the parameters of optimizers: found among all objects that are alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.model import sharding

__all__ = ["models_of", "name_of", "outermost", "updated"]


def updated(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield each tensor that optimizers update."""
    return (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])


def name_of(model: nn.Module) -> str:
    """Return a model's class, without what was wrapped around it."""
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None)) is not None:
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return type(model).__name__


def models_of(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of optimizers, in the order in which these have them.

    A module that is inside of another one is part of that: a model that ``torch.compile`` or a wrapper has, for one.

    **Cost**: a look at all objects, some hundredths of a second for a million.
    """
    modules = _alive()
    parents = _parents(modules)
    for module in modules:
        if id(module) not in parents:  # an outermost one, in which an evaluation may have left whole parameters
            sharding.reshard(sharding.units(module))
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for param in (vars(module).get("_parameters") or {}).values():
            if param is not None:
                owners.setdefault(id(param), []).append(module)
    found: dict[int, nn.Module] = {}
    for owner in [owner for param in updated(optimizers) for owner in owners.get(id(param), ())]:
        for outermost in _outermost(owner, parents):
            found.setdefault(id(outermost), outermost)
    return list(found.values())


def outermost(module: nn.Module) -> nn.Module:
    """Return the outermost module that a module is inside of; the first where there are several.

    **Cost**: as :func:`models_of`.
    """
    return next(_outermost(module, _parents(_alive())), module)


def _alive() -> list[nn.Module]:
    kinds = set(_kinds(nn.Module))  # by type(): what isinstance asks of an object may run code of its own
    return [each for each in gc.get_objects() if type(each) in kinds]


def _parents(modules: Iterable[nn.Module]) -> dict[int, list[nn.Module]]:
    """Return the modules that each one is a child of, by its ``id``."""
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in (vars(module).get("_modules") or {}).values():
            parents.setdefault(id(child), []).append(module)
    return parents


def _kinds(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _outermost(module: nn.Module, parents: dict[int, list[nn.Module]]) -> Iterator[nn.Module]:
    seen, waiting = set[int](), [module]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        around = parents.get(id(each), [])
        waiting += around
        if not around:
            yield each
