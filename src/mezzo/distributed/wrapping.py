"""Which modules of a model are sharded by themselves, and in which dtype their parameters are gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mezzo.cast.model.boundaries import has_forward
from mezzo.cast.model.sharding import units
from mezzo.errors import MezzoError, PolicyError, UnsupportedError, nearest, raise_together, shown, some_of
from mezzo.tensors import dtype_name

__all__ = ["Unit", "Wrap", "planned", "wrapped"]

Choice: TypeAlias = type[nn.Module] | str | Callable[[nn.Module], bool]
Wrap: TypeAlias = Choice | Iterable[Choice] | None


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose parameters are gathered together, but for those of the units inside it.

    Attributes:
        path: Its path in the model, empty for the model itself.
        module: The module.
        dtype: What its parameters are gathered in.
    """

    path: str
    module: nn.Module
    dtype: torch.dtype


# What the user asks for ---------------------------------------------------------------------------------


def wrapped(model: nn.Module, wrap: Wrap) -> set[nn.Module]:
    """Return the modules that a user wants to be units.

    Args:
        model: The model.
        wrap: Classes, globs on paths, whose ``*`` stays between two dots, or predicates of a module; one or several.
            ``None`` means the children of the :class:`~torch.nn.ModuleList` with the most elements of parameters.

    Raises:
        PolicyError: A choice of another kind, one that matches nothing, or one that matches what is never called.
    """
    if wrap is None:
        return _blocks(model)
    choices: list[Any] = [wrap] if isinstance(wrap, type | str) or not isinstance(wrap, Iterable) else list(wrap)
    named = dict(model.named_modules())
    chosen: dict[nn.Module, str] = {}
    problems: list[MezzoError] = []
    for choice in choices:
        if not (isinstance(choice, str) or callable(choice)):
            problems.append(
                PolicyError(
                    f"wrap is {shown(choice)}, neither a class, a glob nor a function",
                    write='wrap=[Block], wrap=["blocks.*"] or wrap=lambda module: isinstance(module, Block)',
                )
            )
            continue
        found = {module: path for path, module in named.items() if _is_meant(choice, path, module)}
        if not found:
            classes = list(dict.fromkeys(type(module).__name__ for module in named.values()))
            known = [path for path in named if path] if isinstance(choice, str) else classes
            what = choice if isinstance(choice, str) else getattr(choice, "__name__", shown(choice))
            why = nearest(what, known) if known else "the model has no modules inside it: it is one unit without wrap"
            problems.append(PolicyError(f"wrap={what!r} matches no module", why=why))
        chosen |= found
    if never := [path for module, path in chosen.items() if not has_forward(module)]:
        problems.append(
            PolicyError(
                "wrap names modules that have no forward of their own",
                where=some_of(never),
                why="parameters are gathered when their module is called, and these are only containers",
                write="the modules inside them: " + some_of([f"{path}.*" for path in never], 1),
            )
        )
    raise_together(problems)
    return {module for module in chosen if next(module.parameters(), None) is not None}


def _is_meant(choice: Any, path: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        globs, names = choice.split("."), path.split(".")
        return len(globs) == len(names) and all(map(fnmatchcase, names, globs))
    return isinstance(module, choice) if isinstance(choice, type) else bool(choice(module))


def _blocks(model: nn.Module) -> set[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(map(has_forward, module))
    ]
    sizes = [sum(param.numel() for child in children for param in child.parameters()) for children in lists]
    largest = max(zip(sizes, lists, strict=True), key=lambda pair: pair[0], default=(0, []))[1]
    return {child for child in largest if next(child.parameters(), None) is not None}


# What follows from dtypes -------------------------------------------------------------------------------


def planned(
    model: nn.Module, storage: Mapping[Tensor, torch.dtype], usual: torch.dtype, chosen: set[nn.Module], path: str = ""
) -> list[Unit]:
    """Return all units, innermost first: those chosen, the model, and what needs another dtype than what is around it.

    What is inside of modules that are sharded already is done.

    Args:
        model: The model, or a part of one.
        storage: The dtype in which a policy wants parameters to be; the others stay as they are.
        usual: The dtype of parameters that no rule speaks about.
        chosen: The modules to be units in any case.
        path: The path of a part.

    Raises:
        UnsupportedError: Parameters of one module that need two dtypes, or are tied across units.
    """
    plan = _Plan(storage, {model, *chosen})
    plan.leave_out(unit for unit in units(model) if unit is not model)
    plan.visit(model, path, usual)
    plan.look_for_tied(model)
    if plan.problems:
        raise type(plan.problems[0]).together(plan.problems)
    return plan.units


class _Plan:
    """The units found so far, and what stands against them."""

    def __init__(self, storage: Mapping[Tensor, torch.dtype], chosen: set[nn.Module]) -> None:
        self.units: list[Unit] = []
        self.problems: list[MezzoError] = []
        self._storage, self._chosen = storage, chosen
        self._seen: set[nn.Module] = set()

    def leave_out(self, modules: Iterable[nn.Module]) -> None:
        """Plan nothing for some modules, nor for what is inside of them."""
        self._seen.update(inside for module in modules for inside in module.modules())

    def visit(self, module: nn.Module, path: str, around: torch.dtype) -> None:
        """Plan a module and all inside it.

        Args:
            module: The module.
            path: Its path.
            around: What the unit around it is gathered in.
        """
        if module in self._seen:
            return
        self._seen.add(module)
        dtype = around
        if has_forward(module):
            own = dict(_own(module, path))
            possible = self._common(own.values() or module.parameters())
            if own and not possible:
                self._refuse_two_dtypes(own, path)
            if possible and around not in possible:
                dtype = possible[0]
        for name, child in module.named_children():
            self.visit(child, f"{path}.{name}" if path else name, dtype)
        if module in self._chosen or dtype != around:
            self.units.append(Unit(path, module, dtype))

    def _common(self, params: Iterable[Tensor]) -> list[torch.dtype]:
        """Return the dtypes in which some parameters may be gathered together, the policy's first."""
        first, *others = [self._possible(param) for param in params] or [[]]
        return [dtype for dtype in first if all(dtype in other for other in others)]

    def _possible(self, param: Tensor) -> list[torch.dtype]:
        dtype = self._storage.get(param, param.dtype)
        # Where nothing is cast, a frozen parameter travels as it is, whatever the others are.
        is_as_it_is = not param.requires_grad and dtype == param.dtype
        return [dtype, torch.float32] if is_as_it_is else [dtype]

    def _refuse_two_dtypes(self, own: Mapping[str, Tensor], path: str) -> None:
        names: defaultdict[torch.dtype, list[str]] = defaultdict(list)
        for name, param in own.items():
            names[self._possible(param)[0]].append(name)
        self.problems.append(
            UnsupportedError(
                "parameters of one module would be gathered in two dtypes",
                where="; ".join(f"{some_of(few, 3)} in {dtype_name(dtype)}" for dtype, few in names.items()),
                why="fully_shard gathers the parameters of a module together, in one dtype",
                write=f"policy.keep_fp32(modules=[{path!r}]), for all of them"
                if path
                else "a module of its own for those in float32, and policy.keep_fp32(modules=[its path])",
            )
        )

    def look_for_tied(self, model: nn.Module) -> None:
        """Look for parameters that stand in two units, which torch notices only in the first forward pass."""
        units = {unit.module for unit in self.units}
        found: dict[Tensor, dict[nn.Module, str]] = {}

        def look(module: nn.Module, path: str, unit: nn.Module) -> None:
            unit = module if module in units else unit
            for name, param in module.named_parameters(path, recurse=False, remove_duplicate=False):
                found.setdefault(param, {}).setdefault(unit, name)
            for name, child in module.named_children():
                look(child, f"{path}.{name}" if path else name, unit)

        look(model, "", model)
        tied = [" and ".join(places.values()) for places in found.values() if len(places) > 1]
        if tied:
            self.problems.append(
                UnsupportedError(
                    "a tied parameter would be sharded twice",
                    where=some_of(tied),
                    why="modules that are sharded apart gather their own parameters, and its shards would drift apart",
                    write="a wrap that leaves both places to one module, such as the model itself",
                )
            )


def _own(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters, with those of containers in it, which are never called themselves."""
    yield from module.named_parameters(path, recurse=False, remove_duplicate=False)
    for name, child in module.named_children():
        if not has_forward(child):
            yield from _own(child, f"{path}.{name}" if path else name)
