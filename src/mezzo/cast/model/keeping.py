"""Layers to keep in FP32 that are given as modules, or by their classes: as rules, which go by paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mezzo.errors import PolicyError, raise_together, shown
from mezzo.policy import Rule
from mezzo.policy.rules import exact


def keeping(models: list[nn.Module], layers: Iterable[Any], *, name: str) -> tuple[Rule, ...]:
    """Return the rules that keep layers in FP32, with all inside them.

    Args:
        models: Models that get one policy.
        layers: Modules of theirs, or classes of modules, as a user gave them.
        name: What the user calls the layers, for errors and as the rules' reason.

    Raises:
        PolicyError: Neither a module nor a class of modules; a module that is in none of the models; or a path that
            would keep another layer of another model.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        >>> [str(rule) for rule in keeping([model], [nn.LayerNorm, model[2]], name="layers")]
        ['fp32_module=1', 'fp32_module=2']
    """
    layers = list(layers)
    why, write = "a layer is a module of the model, or a class of modules", f"{name}=[model.head, torch.nn.LayerNorm]"
    raise_together(
        PolicyError(f"{name} has {shown(layer)}", why=why, write=write)
        for layer in layers
        if not isinstance(layer, nn.Module) and not (isinstance(layer, type) and issubclass(layer, nn.Module))
    )
    classes = tuple(layer for layer in layers if isinstance(layer, type))
    modules = {id(layer): layer for layer in layers if not isinstance(layer, type)}
    named = [dict(model.named_modules(remove_duplicate=False)) for model in models]
    chosen = [
        {path for path, module in of.items() if isinstance(module, classes) or id(module) in modules} for of in named
    ]
    in_models = {id(module) for of in named for module in of.values()}
    problems = [
        PolicyError(f"{name} has a {type(module).__name__} that is in none of the models", write=f"{name}=[model.head]")
        for key, module in modules.items()
        if key not in in_models
    ]
    problems += [
        PolicyError(
            f"{name} would keep {path or 'the whole model'} of one model in FP32, and not of another",
            where=f"models[{number}] has a {type(of[path]).__name__} at the same path",
            why="models that are prepared together have one policy, which goes by paths",
            write="each model with an optimizer and a policy of its own; or both layers",
        )
        for path in sorted(set().union(*chosen))
        for number, (of, mine) in enumerate(zip(named, chosen, strict=True))
        if path in of and path not in mine
    ]
    raise_together(problems)
    paths = dict.fromkeys(path for mine in named for path in mine if any(path in paths for paths in chosen))
    if "" in paths:
        return (Rule("fp32", param="*", reason=name),)
    return tuple(Rule("fp32", module=exact(path), reason=name) for path in paths)
