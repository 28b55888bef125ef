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
        PolicyError(f"{name} has {shown(each)}", why=why, write=write)
        for each in layers
        if not isinstance(each, nn.Module) and not (isinstance(each, type) and issubclass(each, nn.Module))
    )
    kinds = tuple(each for each in layers if isinstance(each, type))
    given = {id(each): each for each in layers if not isinstance(each, type)}
    named = [dict(model.named_modules(remove_duplicate=False)) for model in models]
    kept = [{path for path, each in of.items() if isinstance(each, kinds) or id(each) in given} for of in named]
    known = {id(each) for of in named for each in of.values()}
    problems = [
        PolicyError(f"{name} has a {type(each).__name__} that is in none of the models", write=f"{name}=[model.head]")
        for key, each in given.items()
        if key not in known
    ]
    problems += [
        PolicyError(
            f"{name} would keep {path or 'the whole model'} of one model in FP32, and not of another",
            where=f"models[{number}] has a {type(of[path]).__name__} at the same path",
            why="models that are prepared together have one policy, which goes by paths",
            write="each model with an optimizer and a policy of its own; or both layers",
        )
        for path in sorted(set().union(*kept))
        for number, (of, mine) in enumerate(zip(named, kept, strict=True))
        if path in of and path not in mine
    ]
    raise_together(problems)
    paths = dict.fromkeys(path for mine in named for path in mine if any(path in each for each in kept))
    if "" in paths:
        return (Rule("fp32", param="*", reason=name),)
    return tuple(Rule("fp32", module=exact(path), reason=name) for path in paths)
