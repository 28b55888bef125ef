"""What a recorder watches: the modules of a model that match, the parameters they hold, and where each is recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mezzo.errors import PolicyError, UnsupportedError, nearest, shown, some_of
from mezzo.numerics.evidence import RecordedModule
from mezzo.tensors import dtype_name

__all__ = ["WHY_UNSEEN", "Subject", "unseen"]

#: What torch.compile calls the module that it wraps.
_INSIDE: Final = "_orig_mod"
WHY_UNSEEN: Final = "compiled code does not call the modules, and keeps few of the tensors between them"


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model, as a recorder watches it.

    Attributes:
        model: The model.
        paths: The path that each watched module is recorded at.
        params: The module's path and the parameter's name that each watched parameter is recorded at.
        modules: What is said of the modules.
        is_compiled: Whether the model was given as what ``torch.compile`` returns; it is the one inside here.
    """

    model: nn.Module
    paths: Mapping[nn.Module, str]
    params: Mapping[Tensor, tuple[str, str]]
    modules: tuple[RecordedModule, ...] = field(repr=False)
    is_compiled: bool

    @property
    def is_whole(self) -> bool:
        """Whether all modules are watched, so that a call of one would be seen."""
        return all(module in self.paths for module in self.model.modules())

    @classmethod
    def of(cls, model: nn.Module, globs: Sequence[str] | None) -> Subject:
        """Find what matches.

        Args:
            model: The model.
            globs: Paths of modules, as policies name them: each stands for what is inside as well. ``None`` for all.

        Raises:
            PolicyError: No model, one without parameters, or a glob that matches no module.
        """
        if not isinstance(model, nn.Module):
            raise PolicyError(
                f"a recorder watches a torch.nn.Module, not {type(model).__name__}",
                write="Recorder(model, optimizer)",
            )
        is_compiled = hasattr(model, _INSIDE)
        model = getattr(model, _INSIDE, model)
        if next(model.parameters(), None) is None:
            raise PolicyError(
                "there is nothing to record of a model without parameters",
                where=type(model).__name__,
                write="mezzo.numerics.exponent_histogram(tensor), for single tensors",
            )
        if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
            raise PolicyError(
                "parameters without a shape cannot be recorded",
                where=some_of(lazy),
                why="lazy modules make them in their first forward pass",
                write="model(example_batch), then Recorder(model, optimizer)",
            )
        everything = [
            (path.replace(f"{_INSIDE}.", "").removesuffix(f".{_INSIDE}"), module)
            for path, module in model.named_modules(remove_duplicate=False)
            if not hasattr(module, _INSIDE)
        ]
        wanted = {path for path, _ in everything if globs is None or any(_matches(path, glob) for glob in globs)}
        unmatched = [glob for glob in globs or () if not any(_matches(path, glob) for path, _ in everything)]
        if unmatched or not wanted:
            known = [path for path, _ in everything if path]
            raise PolicyError(
                f"no module matches {some_of([shown(glob) for glob in unmatched]) or 'modules=()'}",
                where=type(model).__name__,
                why=nearest(str(next(iter(unmatched), "")), known),
                write='modules=["blocks.*"], or nothing for all modules',
            )
        paths: dict[nn.Module, str] = {}
        params: dict[Tensor, tuple[str, str]] = {}
        modules = []
        for path, module in everything:
            if path not in wanted:
                continue
            tied = {}
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                owner = params.setdefault(param, (path, name))
                if owner != (path, name) and module not in paths:
                    tied[name] = ".".join(filter(None, owner))
            own = {name: dtype_name(p.dtype) for name, p in module.named_parameters(recurse=False)}
            first = paths.setdefault(module, path)
            modules.append(
                RecordedModule(
                    path=path,
                    type=type(module).__name__,
                    parameters=own,
                    same_as=None if first == path else first,
                    tied=tied,
                )
            )
        return cls(model, paths, params, tuple(modules), is_compiled)

    def hidden(self) -> tuple[str, str] | None:
        """Return which modules are compiled, so that their hooks may not run, and by what; ``None`` for none."""
        compiled = [
            path or type(module).__name__
            for path, module in self.model.named_modules()
            if module._compiled_call_impl is not None or hasattr(module, _INSIDE)
        ]
        if compiled or self.is_compiled:
            return some_of(compiled) or type(self.model).__name__, "torch.compile"
        scripted = [path or type(m).__name__ for m, path in self.paths.items() if isinstance(m, torch.jit.ScriptModule)]
        return (some_of(scripted), "torch.jit") if scripted else None

    def ordered(self, called: Iterable[str]) -> tuple[RecordedModule, ...]:
        """Return the modules in the order of their first calls; those without come last."""
        order = {path: place for place, path in enumerate(dict.fromkeys(called))}
        return tuple(sorted(self.modules, key=lambda each: order.get(each.same_as or each.path, len(order))))


def unseen(where: str, compiler: str) -> UnsupportedError:
    """Build the error of a recorder of activations alone, where all of them are inside compiled code."""
    return UnsupportedError(
        f"activations inside {compiler} cannot be recorded",
        where=where,
        why=WHY_UNSEEN,
        write='the uncompiled model; or Recorder(…, kinds=("weights", "weight_gradients", "updates"))',
    )


def _matches(path: str, glob: str) -> bool:
    """Whether a glob matches a path, or that of a module around it."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), glob) for end in range(1, len(parts) + 1))
