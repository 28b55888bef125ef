"""``parity``: one batch through two models of one structure, and the modules in which their numbers part."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mezzo.cast.model.checks import preparations_in
from mezzo.cast.model.prepare import Prepared, handle_of
from mezzo.compiling import INSIDE, inside
from mezzo.errors import PolicyError, StateError, UnsupportedError, nearest, printable, shown, some_of
from mezzo.formats import Format, by_name
from mezzo.numerics.distances import Distance, LogProbs, log_probs
from mezzo.numerics.side_by_side import (
    ByItselfPass,
    FirstPass,
    Key,
    ModuleCall,
    Parted,
    RowKey,
    SecondPass,
    comparable,
)
from mezzo.policy import Policy, PolicyLike
from mezzo.policy.rules import as_named, lies_in
from mezzo.tensors import dtype_name
from mezzo.trace.sandbox import copied, devices_of, require_python, untouched
from mezzo.weights.exports import unwrapped

#: Rows of the table that :meth:`Parity.__str__` writes.
_MOST_ROWS: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParity:
    """One tensor that a module returned in both models.

    Attributes:
        path: The module; ``""`` is the model.
        call: Which call of the module it was, from 0.
        output: The way to the tensor in what the module returned; ``""`` where it returned a tensor.
        type: The module's class; both, where they have two.
        by_itself: How far the module parts from the first model's where it, and all in it, reads and hands on what the
            first model's did.
        in_all: How far its output is from the first model's in the second model as it runs.
        dtypes: The dtypes of the tensor in the two models.
        before: The module in it before which its own code parts; ``None`` where that is its output.
    """

    path: str
    call: int
    output: str
    type: str
    by_itself: Distance
    in_all: Distance
    dtypes: tuple[str, str]
    before: str | None = None

    @property
    def name(self) -> str:
        """The path with the call and the output, where there are several."""
        name = (self.path or "the model") + self.output
        return f"{name} (call {self.call + 1})" if self.call else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Where two models part.

    Attributes:
        models: The classes of the two.
        spacing: The format whose spacings are the unit.
        rows: A row for each tensor that a watched module returned, in the order in which modules were called.
        first: The row whose module was the first to part by itself; ``None`` where none does.
        log_probs: How far the log-probabilities of the tokens are apart, if there were any.
        unmatched: What the models did not do alike: calls of modules, and arguments that one of them was given.
    """

    models: tuple[str, str]
    spacing: str
    rows: tuple[ModuleParity, ...]
    first: ModuleParity | None
    log_probs: LogProbs | None = None
    unmatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self._headline()}{self._of_tokens()}"]
        shown_rows = [row for row in self.rows if row.by_itself.differs]
        widest = sorted(shown_rows, key=lambda row: (row != self.first, -row.by_itself.beyond))[
            : _MOST_ROWS - len(self.unmatched[:1])
        ]
        table: list[tuple[str, ...]] = [("module", "class", "by itself", "beyond 1", "in all", "beyond 1", "dtypes")]
        for row in self.rows:
            if row in widest:
                cells = [
                    cell for one in (row.by_itself, row.in_all) for cell in (f"{one.largest:.3g}", f"{one.beyond:.2%}")
                ]
                name = row.name if row.before is None else f"{row.name}, before {row.before}"
                dtypes = row.dtypes[0] if len({*row.dtypes}) == 1 else " | ".join(row.dtypes)
                table.append((printable(name), row.type, *cells, dtypes))
        if len(table) > 1:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if more := len(shown_rows) - len(widest):
            lines.append(f"and {more} more that part by themselves")
        if self.unmatched:
            lines.append(f"not alike: {some_of(self.unmatched, 3)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)

    def _headline(self) -> str:
        if self.first is not None:
            where = f" before {self.first.before}" if self.first.before is not None else ""
            largest = f"{self.first.by_itself.largest:.3g} spacings of {self.spacing}"
            return f"they part in {printable(self.first.name)}{where}: {largest} by itself, none before it"
        if apart := [row for row in self.rows if row.in_all.differs]:
            return (
                f"no watched module parts by itself, and yet {printable(apart[0].name)} differs: what parts is outside"
            )
        return f"they agree in all that {len({row.path for row in self.rows})} modules returned"

    def _of_tokens(self) -> str:
        probs = self.log_probs
        return "" if probs is None else f"; log-probabilities {probs.mean:.2g} apart, {probs.largest:.2g} at most"


def parity(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    policy_a: PolicyLike | None = None,
    policy_b: PolicyLike | None = None,
    spacing: str | torch.dtype | Format = "bfloat16",
    modules: Sequence[str] | str | None = None,
    tokens: Tensor | None = None,
) -> Parity:
    """Run one batch through two models of one structure, and return where their numbers part, by module.

    Of each module there are two distances: how far its output is from the other model's *in all*, and how far it is *by
    itself*: ``model_b`` runs a second time, and every module reads and hands on what ``model_a``'s did, rounded to the
    dtype in which it had it. A module with a distance by itself is where to look; one that only inherits is none.

    Both run in evaluation mode without gradients, from the same random states and buffers, uncompiled; modes,
    buffers, gradients and random states are put back.

    Args:
        model_a: The model that is the measure.
        model_b: The other one: its modules have the same paths. Wrappers of torch.compile and DDP are looked through.
        batch: What both are called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        policy_a: A policy to run a copy of ``model_a`` under. Without one, a model that is prepared, or a session's,
            runs in its own region, and any other one as it is.
        policy_b: The same of ``model_b``, which may be the same model.
        spacing: The format whose spacing at the first model's value is the unit: 1 means neighbours.
        modules: Globs of the modules to watch, with what is inside; all by default.
        tokens: int64, of the shape of the logits without the last dimension: the log-probabilities of these tokens are
            compared, too; negative ones are left out. The logits are the first output of such a shape.

    Raises:
        PolicyError: The modules have other paths, tensors have other shapes, nothing matches ``modules``, no logits go
            with the tokens, or the batch is none.
        UnsupportedError: A model is scripted, lazy or on the meta device, or cannot be copied.
        StateError: A policy for a model that is under one already.

    **Cost**: three forward passes in Python, a copy of all that modules read and return in one of them, and of a model
    that a policy is given for. One host sync at the end. With hooks torch runs its transformer layers module by module.

    Example:
        >>> import torch
        >>> from mezzo.numerics import parity
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> _ = other.load_state_dict(model.state_dict())
        >>> print(parity(model, other, torch.ones(3, 4)))
        they agree in all that 4 modules returned
        >>> other[2].bias.data += 1.0
        >>> parity(model, other, torch.ones(3, 4)).first.path
        '2'
    """
    batch = _arguments(batch)
    unit = by_name(spacing)
    if not unit.signed:
        raise PolicyError(f"{unit} has no spacings of numbers", why="it is a format of scales", write='"bfloat16"')
    sides = [_Side(model, modules) for model in (model_a, model_b)]
    _require_alike(sides)
    with ExitStack() as stack:
        regions = [
            stack.enter_context(side.under(policy)) for side, policy in zip(sides, (policy_a, policy_b), strict=True)
        ]
        stack.enter_context(_evaluating([side.model for side in sides]))
        calls: dict[Key, ModuleCall] = {}
        in_all, apart = SecondPass(calls, unit), ByItselfPass(calls, unit)
        passes = (FirstPass(calls), sides[0], regions[0]), (in_all, sides[1], regions[1]), (apart, sides[1], regions[1])
        outputs = []
        for watch, side, region in passes:  # each from the same random states and buffers
            with untouched([side.model]), torch.no_grad():
                outputs.append(watch.run(side.model, side.paths, region, batch))
        of_tokens = None if tokens is None else _of_tokens(outputs[0], outputs[1], tokens)
        return _result(sides, calls, in_all, apart, of_tokens)


# What is compared -------------------------------------------------------------------------------------------


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if type(batch) is tuple:
        return batch, {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    raise PolicyError(
        f"the batch is a {type(batch).__name__}",
        why="a tensor is the models' one argument, a tuple their positional ones, a mapping their keyword arguments",
        write="parity(model_a, model_b, (batch,))   # one argument, whatever it is",
    )


class _Side:
    """One of the two models.

    Args:
        model: The model.
        modules: Globs of the modules to watch.

    Attributes:
        model: As it is called: a copy, while a policy is carried out on it.
        paths: The path of each watched module, without wrappers.
        names: All such paths, also of modules that have several.
    """

    def __init__(self, model: Any, modules: Sequence[str] | str | None) -> None:
        if not isinstance(model, nn.Module):
            raise PolicyError(
                f"parity compares two torch.nn.Modules, and not a {type(model).__name__}",
                write="parity(model_a, model_b, batch)",
            )
        require_python(model, "compared")
        lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
        if lazy or any(device.type == "meta" for device in devices_of([model])):
            raise UnsupportedError(
                "a model without values cannot be compared",
                where=some_of(lazy) or type(model).__name__,
                why="its parameters are lazy, or on the meta device",
                write="model(batch) once, or model.to_empty(device=…) and load_state_dict, before parity",
            )
        self.model: nn.Module = model
        self._globs = [modules] if isinstance(modules, str) else modules
        self._watch()

    def _watch(self) -> None:
        every = [
            (path.replace(f"{INSIDE}.", "").removesuffix(f".{INSIDE}"), module)
            for path, module in unwrapped(self.model).named_modules(remove_duplicate=False)
            if not hasattr(module, INSIDE)
        ]
        all_paths = dict.fromkeys(path for path, _ in every)
        globs = None if self._globs is None else [as_named(glob, all_paths) for glob in self._globs]
        self.names = [path for path in all_paths if globs is None or any(lies_in(path, glob) for glob in globs)]
        unmatched = [glob for glob in globs or () if not any(lies_in(path, glob) for path in self.names)]
        if unmatched or not self.names:
            raise PolicyError(
                f"no module matches {some_of([shown(glob) for glob in unmatched]) or 'modules=()'}",
                where=type(self.model).__name__,
                why=nearest(str(next(iter(unmatched), "")), filter(None, all_paths)),
                write='modules=["blocks.*"], or nothing for all modules',
            )
        watched, self.paths = {*self.names}, dict[nn.Module, str]()
        for path, module in every:
            if path in watched:
                self.paths.setdefault(module, path)

    @contextmanager
    def under(self, policy: PolicyLike | None) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        """Yield what makes the region of the model; with a policy a copy is the model until the block ends."""
        wrapped = dict.fromkeys((self.model, inside(self.model), unwrapped(self.model)))
        handles = [handle for model in wrapped if (handle := handle_of(model)) is not None]
        handles = handles[:1] or preparations_in(self.model)
        if policy is None:
            yield partial(handles[0].autocast, *handles[1:]) if handles else nullcontext
            return
        if handles:
            raise StateError(
                "the model is under a policy already",
                where=f"{type(self.model).__name__}, {handles[0].given_policy}",
                write="parity without a policy for it; or a model of its own, with the other's state_dict()",
            )
        original = self.model
        self.model = copied(original, "parity(build_model(), other, batch, policy_a=…)")
        try:
            handle = Prepared(self.model, Policy.of(policy), logs_unreached_rules=False)
            self._watch()
            yield handle.autocast
        finally:
            self.model = original


def _require_alike(sides: Sequence[_Side]) -> None:
    first, second = (dict.fromkeys(side.names) for side in sides)
    if first.keys() != second.keys():
        only_a, only_b = (some_of([x or "the model" for x in one if x not in other]) for one, other in
                          ((first, second), (second, first)))  # fmt: skip
        raise PolicyError(
            "the two models have other modules",
            where=f"only the first: {only_a or 'none'}; only the second: {only_b or 'none'}",
            why="they are compared module by module, by their paths",
            write="modules=[…], of what both have",
        )


# What comes out ---------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _result(
    sides: Sequence[_Side],
    calls: dict[Key, ModuleCall],
    in_all: SecondPass,
    apart: ByItselfPass,
    log_probs: LogProbs | None,
) -> Parity:
    parts, distances = apart.parted(), in_all.distances()
    largest: dict[RowKey, Parted] = {}
    for part in parts:
        # What a module's code hands to the modules in it is told with the first tensor that it returns.
        output = part.output if part.before is None else next(iter(calls[part.key].outputs), "")
        row = (*part.key, output)
        if row not in largest or part.distance.largest > largest[row].distance.largest:
            largest[row] = part
    types = [{path: type(module).__name__ for module, path in side.paths.items()} for side in sides]
    rows = [
        ModuleParity(
            path=row[0],
            call=row[1],
            output=row[2],
            type="/".join(dict.fromkeys(names.get(row[0], "") for names in types)),
            by_itself=largest[row].distance,
            in_all=distances[row],
            dtypes=in_all.dtypes[row],
            before=largest[row].before,
        )
        for row in sorted(filter(largest.__contains__, distances), key=lambda row: calls[row[0], row[1]].number)
    ]
    of_first = next((part.key for part in parts if part.distance.differs), None)
    counts = [Counter(path for path, _ in keys) for keys in (calls, in_all.called)]
    unmatched = {
        f"{path or 'the model'} was called {counts[0][path]} and {counts[1][path]} times": None
        for path in dict.fromkeys((*counts[0], *counts[1]))
        if counts[0][path] != counts[1][path]
    }
    return Parity(
        models=(type(sides[0].model).__name__, type(sides[1].model).__name__),
        spacing=in_all.spacing.name,
        rows=tuple(rows),
        first=next((row for row in rows if (row.path, row.call) == of_first and row.by_itself.differs), None),
        log_probs=log_probs,
        unmatched=(*unmatched, *{**in_all.unmatched, **apart.unmatched}),
    )


def _of_tokens(first: Any, second: Any, tokens: Tensor) -> LogProbs:
    logits = [next((x for x in comparable(output).values() if x.is_floating_point() and x.dim()
                    and x.shape[:-1] == tokens.shape), None) for output in (first, second)]  # fmt: skip
    if tokens.dtype != torch.int64 or logits[0] is None or logits[1] is None or logits[0].shape != logits[1].shape:
        shapes = [list(x.shape) for x in comparable(first).values()]
        raise PolicyError(
            "no logits go with the tokens",
            where=f"tokens {dtype_name(tokens.dtype)} {list(tokens.shape)}; outputs {some_of(list(map(str, shapes)))}",
            why="tokens are int64, one for each row of logits",
            write="tokens of the shape of the logits without their last dimension",
        )
    return LogProbs.of(log_probs(logits[0], tokens), log_probs(logits[1], tokens))
