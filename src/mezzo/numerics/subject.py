"""What a recorder watches, and what it was asked for, checked: modules, kinds, formats, optimizers, the loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mezzo.compiling import INSIDE, inside, is_compiled
from mezzo.errors import MezzoError, PolicyError, UnsupportedError, nearest, raise_together, shown, some_of
from mezzo.formats import Format
from mezzo.numerics.evidence import RecordedModule, kind_of
from mezzo.numerics.histogram import standing_alone
from mezzo.policy.rules import as_named, lies_in
from mezzo.scale.state import inverse
from mezzo.sharded import is_distributed
from mezzo.tensors import dtype_name

WHY_UNSEEN: Final = "compiled code does not call the modules, and keeps few of the tensors between them"


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model, as a recorder watches it.

    Attributes:
        model: The model.
        paths: The path that each watched module is recorded at.
        params: The module's path and the parameter's name that each watched parameter is recorded at.
        modules: What is said of the modules.
        is_compiled: Whether the model, or a part of it, is compiled; of what ``torch.compile`` returns this is the one
            inside.
    """

    model: nn.Module
    paths: Mapping[nn.Module, str]
    params: Mapping[Tensor, tuple[str, str]]
    modules: tuple[RecordedModule, ...] = field(repr=False)
    is_compiled: bool

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
        was_compiled = hasattr(model, INSIDE)
        model = inside(model)
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
            (path.replace(f"{INSIDE}.", "").removesuffix(f".{INSIDE}"), module)
            for path, module in model.named_modules(remove_duplicate=False)
            if not hasattr(module, INSIDE)
        ]
        globs = None if globs is None else [as_named(glob, [path for path, _ in everything]) for glob in globs]
        wanted = {path for path, _ in everything if globs is None or any(lies_in(path, glob) for glob in globs)}
        unmatched = [glob for glob in globs or () if not any(lies_in(path, glob) for path, _ in everything)]
        if unmatched or not wanted:
            module_paths = [path for path, _ in everything if path]
            raise PolicyError(
                f"no module matches {some_of([shown(glob) for glob in unmatched]) or 'modules=()'}",
                where=type(model).__name__,
                why=nearest(str(next(iter(unmatched), "")), module_paths),
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
        was_compiled |= any(is_compiled(module) for module in model.modules())
        return cls(model, paths, params, tuple(modules), was_compiled)

    def scripted(self) -> str | None:
        """Return which modules ``torch.jit`` has compiled, which no hook looks into; ``None`` for none."""
        scripted = [path or type(m).__name__ for m, path in self.paths.items() if isinstance(m, torch.jit.ScriptModule)]
        return some_of(scripted) if scripted else None

    def inner_first(self) -> list[str]:
        """Return the paths of modules, inner modules before the module that holds them."""

        def walk(module: nn.Module) -> Iterator[nn.Module]:
            for child in module.children():
                yield from walk(child)
            yield module

        return list(dict.fromkeys(self.paths[module] for module in walk(self.model) if module in self.paths))

    def group(self) -> Any:
        """Return the ranks that a wrapped or sharded model is trained on; ``None`` for any other model."""
        if isinstance(self.model, DistributedDataParallel) or any(map(is_distributed, self.model.parameters())):
            # No Ranks are made, which sessions are numbered by: ranks may differ in how often they ask.
            is_begun = dist.is_available() and dist.is_initialized()
            return dist.group.WORLD if is_begun and dist.get_world_size() > 1 else None
        return None

    def ordered(self, called: Iterable[str]) -> tuple[RecordedModule, ...]:
        """Return the modules in the order of their first calls; modules that were not called come last."""
        order = {path: index for index, path in enumerate(dict.fromkeys(called))}
        return tuple(sorted(self.modules, key=lambda module: order.get(module.same_as or module.path, len(order))))


def unseen(where: str) -> UnsupportedError:
    """Build the error of a recorder of activations alone, where all of them are inside scripted code."""
    return UnsupportedError(
        "activations inside torch.jit cannot be recorded",
        where=where,
        why=WHY_UNSEEN,
        write='the uncompiled model; or Recorder(…, kinds=("weights", "weight_gradients", "updates"))',
    )


# Optimizers ---------------------------------------------------------------------------------------------------


def given_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that a recorder was given.

    Args:
        optimizer: An optimizer, several, or ``None``.

    Raises:
        PolicyError: Anything else.
    """
    if optimizer is None:
        return []
    optimizers = (
        [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable) else [*optimizer]
    )
    wrong = [type(value).__name__ for value in optimizers if not isinstance(value, Optimizer)]
    if wrong or not optimizers:
        raise PolicyError(
            f"a recorder takes a torch.optim.Optimizer, not {wrong[0] if wrong else 'an empty list'}",
            write="Recorder(model, optimizer), and of a torch.amp.GradScaler loss_scale=scaler",
        )
    return optimizers


def updated_by(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters that an optimizer updates."""
    return {param for group in optimizer.param_groups for param in group["params"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The arguments of a recorder, as it works with them.

    Attributes:
        subject: What is watched.
        optimizers: The optimizers.
        every: Steps from one recorded step to the next.
        formats: The storage formats that updates are rounded to.
        kinds: What is recorded.
    """

    subject: Subject
    optimizers: Sequence[Optimizer]
    every: int
    formats: Sequence[Format]
    kinds: Sequence[str]

    @classmethod
    def of(cls, model: Any, optimizer: Any, every: Any, formats: Any, kinds: Any, modules: Any, keep: Any) -> Choices:
        """Check arguments, and report all that is wrong with them.

        Raises:
            PolicyError: Something is.
        """
        problems: list[MezzoError] = []

        def tried(make: Any, *arguments: Any) -> Any:
            try:
                return make(*arguments)
            except PolicyError as error:
                problems.append(error)
                return None

        globs = [modules] if isinstance(modules, str) else modules
        subject = tried(Subject.of, model, globs)
        optimizers = tried(given_optimizers, optimizer) or []
        for name, number in (("every", every), ("keep", 1 if keep is None else keep)):
            tried(_require_positive, name, number)
        targets = [tried(standing_alone, name) for name in ([formats] if isinstance(formats, str) else formats)]
        words = [tried(kind_of, name) for name in ([kinds] if isinstance(kinds, str) else kinds)]
        if not words:
            problems.append(PolicyError("there is nothing to record", why="kinds is empty", write='kinds=("weights",)'))
        if subject is not None:
            own = set(subject.model.parameters())
            problems += (
                _foreign(optimizer, subject) for optimizer in optimizers if own.isdisjoint(updated_by(optimizer))
            )
        raise_together(problems)
        return cls(
            subject=subject,
            optimizers=optimizers,
            every=every,
            formats=tuple(dict.fromkeys(targets)),
            kinds=tuple(dict.fromkeys(words)),
        )


def _require_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PolicyError(f"{name} is {shown(number)}, not a number of steps", write=f"{name}=50")


def _foreign(optimizer: Optimizer, subject: Subject) -> PolicyError:
    return PolicyError(
        "the optimizer updates none of the model's parameters",
        where=f"{type(optimizer).__name__}, {type(subject.model).__name__}",
        why="there would be no updates to record",
        write="Recorder(model, optimizer), with an optimizer over model.parameters()",
    )


class LossScaleNow:
    """The loss scale of the gradients that arrive now.

    Args:
        loss_scale: That of a loop without a session: its scaler, a number, a tensor, or ``None``.
        device: The device of the gradients.

    Raises:
        PolicyError: The loss scale is none of these.
    """

    def __init__(self, loss_scale: Any, device: torch.device) -> None:
        if loss_scale is not None and not callable(getattr(loss_scale, "scale", None)):
            is_number = (
                isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool) and 0.0 < loss_scale < math.inf
            )
            if not is_number and not (isinstance(loss_scale, Tensor) and loss_scale.numel() == 1):
                raise PolicyError(
                    f"the loss scale is {shown(loss_scale)}, not a positive finite number",
                    write="loss_scale=scaler, a torch.amp.GradScaler; or loss_scale=1024.0",
                )
        self.is_given = loss_scale is not None
        self._given, self._device = loss_scale, device
        self._scale: Tensor | None = None
        self._factor: Tensor | None = None

    def reset(self, scale: Tensor | None) -> None:
        """Set the scale of the gradients that a session makes next; ``None`` for none, or to read the user's again."""
        self._scale, self._factor = scale, None

    def factor(self) -> Tensor | None:
        """Return what to multiply gradients by; ``None`` for 1."""
        if self._factor is None and (scale := self.scale()) is not None:
            self._factor = inverse(scale)
        return self._factor

    def scale(self) -> Tensor | None:
        """Return the scale, 0-d float32; ``None`` where losses are not scaled."""
        if self._scale is None and self._given is not None:
            one = torch.ones((), device=self._device)
            # torch's scaler gives its scale without a host sync only by scaling a tensor.
            scaled = self._given.scale(one) if callable(getattr(self._given, "scale", None)) else one * self._given
            self._scale = scaled.detach().reshape(()).float().clone()
        return self._scale
