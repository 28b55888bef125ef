"""``prepare``: module rules, O2/O3 conversion, and casting at a model's boundary."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from mezzo.cast.device import Kinds
from mezzo.cast.model.boundary import Boundary, WideNorm
from mezzo.cast.model.doors import Door, doors_of
from mezzo.cast.model.entrance import Entrance
from mezzo.cast.model.refusals import cannot_convert, require_module
from mezzo.cast.pins import PIN
from mezzo.cast.region import autocast
from mezzo.cast.weight_casts import WeightCasts
from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, nearest, printable, some_of
from mezzo.policy import Policy, Rule, Treatment
from mezzo.policy.ops import functions
from mezzo.tensors import CASTABLE, dtype_name

__all__ = ["Prepared", "prepare"]

logger = logging.getLogger(__name__)

#: Modules whose forward is one call into C++, and the ops that a rule would not find there.
_ATOMIC: Final[dict[type[nn.Module], frozenset[str]]] = {
    nn.RNNBase: frozenset({"linear", "addmm", "mm", "tanh", "sigmoid", "relu", "mul", "add"}),
    nn.RNNCellBase: frozenset({"linear", "addmm", "mm", "tanh", "sigmoid", "relu", "mul", "add"}),
    # With need_weights=False attention is one fused call; with weights its softmax is reached.
    nn.MultiheadAttention: frozenset({"softmax"}),
}
_NEVER_CALLED: Final = (nn.modules.linear.NonDynamicallyQuantizableLinear,)


def prepare(model: nn.Module, policy: Policy | str | os.PathLike[str]) -> Prepared:
    """Apply a policy's module rules to a model and, in O2 and O3, store it in low precision.

    Parameters keep their identity (an optimizer built before stays valid, tied ones stay tied) and change
    their dtype. Norms with running statistics keep FP32 weights while ``policy.keep_batchnorm_fp32``, and FP32
    statistics always. Other persistent floating buffers go low; non-persistent ones stay.

    A rule on a parameter speaks about the tensor that stands in its place when the model is called, so about those of
    ``torch.func.functional_call(model, …)`` too; not where only a submodule without a rule is called with others.

    Args:
        model: The model; changed in place, or not at all when this raises.
        policy: A policy, its text, or the path of a policy file.

    Returns:
        A handle, whose ``autocast()`` is the region to run the model in and whose ``remove()`` undoes it.

    Raises:
        PolicyError: A rule whose module or parameter glob matches nothing; two rules that store one tied parameter
            differently.
        UnsupportedError: Parameters in float64 or another low precision; a device without the format.
        StateError: The model is prepared already, wrapped by DDP before conversion, or holds gradients.

    **Cost**: none where nothing differs. Two hooks on each module with a rule. In O2/O3 two hooks on the model, and one
    on each submodule with weights (1 to 2 µs a call), so that the one that is called from outside casts.

    Example:
        >>> import mezzo
        >>> from torch import nn
        >>> model = nn.Linear(4, 2)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> model.weight.dtype
        torch.bfloat16
        >>> handle.remove()
        >>> model.weight.dtype
        torch.float32
    """
    require_module(model)
    handle = Prepared(model, Policy.of(policy))
    try:
        handle.release_originals()
    except BaseException:  # an interrupt: the caller gets no handle to undo this with
        handle.remove()
        raise
    return handle


class Prepared:
    """A model under a policy, as :func:`prepare` returns it.

    Attributes:
        model: The model.
        policy: The policy it was prepared with.
        converted: The tensors as they were before conversion, by the tensor that now stands in the model, until
            :meth:`release_originals`.
        kinds: The device types of its tensors, which its regions cover.
        casts: The casts of weights made in its regions. They end with the outermost one, but in a session, where those
            of training serve a whole window.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        require_module(model)
        policy = _with_pinned_classes(model, policy)
        self.model, self.policy = model, policy
        self.casts = WeightCasts()
        storage = _check(model, policy)
        self._before = {tensor: tensor.dtype for tensor in storage}
        for line in _out_of_reach(model, policy):
            logger.warning("%s", printable(line))
        self.converted: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._doors: list[Door] = []
        self.entrance = Entrance()
        # Planning the regions may find that the device cannot honour the policy: before anything is changed.
        self.kinds = Kinds((*model.parameters(), *model.buffers()))
        self._boundaries = _boundaries(model, policy, self.kinds, self.entrance)
        pins = any(boundary.pinned() for _, boundary in self._boundaries[:1])
        self._is_traceable = not pins and not any(rule.matches_module("") for rule in policy.rules)
        try:
            self._carry_out(storage)
        except BaseException:
            self.remove()
            raise

    def _carry_out(self, storage: Mapping[Tensor, torch.dtype]) -> None:
        for tensor, dtype in storage.items():
            if tensor.dtype != dtype:
                self.converted[tensor] = tensor.data
                _store(tensor, tensor.data.to(dtype))
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase) and self.converted:
                module.flatten_parameters()
        for module, boundary in self._boundaries:
            self._hooks.append(module.register_forward_pre_hook(boundary.enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(boundary.exit, always_call=True))
        self._open_doors()

    def _open_doors(self) -> None:
        """Let every submodule of a converted model that holds numbers be called from outside."""
        if self.policy.param_dtype == torch.float32:
            return
        for path, module, make in _doors(self.model, self.policy, self._boundaries[0][1].params, self.kinds):
            door = next(doors_of(module), None)
            is_new = door is None
            door = Door(self.entrance, make) if door is None else door
            self._doors.append(door)  # before it opens: whatever interrupts from here on, remove() knows of it
            if is_new:
                door.attach(module)
                if "." not in path:  # the likeliest, which compiled code cannot hook any more
                    door.install(module)
            else:
                door.entrances.append(self.entrance)

    def autocast(self, *others: Prepared) -> autocast:
        """Return a region for this model's policy: what to run the forward pass and the loss in.

        Args:
            *others: Models prepared with the same policy, whose parameter rules the region knows as well.
        """
        kinds = tuple(dict.fromkeys(kind for each in (self, *others) for kind in each.kinds()))
        if torch.compiler.is_compiling() and len(kinds) == 1 and all(each._is_traceable for each in (self, *others)):
            return autocast(self.policy, kinds[0])  # which knows how to be traced; a graph keeps no casts
        return autocast.inside(self.policy, "", self._pinned(*others), kinds, self.casts)

    def _pinned(self, *others: Prepared) -> dict[int, Treatment]:
        boundaries = (boundary for each in (self, *others) for _, boundary in each._boundaries[:1])
        return {param: treatment for boundary in boundaries for param, treatment in boundary.pinned().items()}

    def release_originals(self, of: Container[Tensor] | None = None) -> None:
        """Forget the tensors as they were before conversion.

        Args:
            of: Those of which tensors; of all when omitted.
        """
        self.converted = {t: data for t, data in self.converted.items() if of is not None and t not in of}

    def keep_originals(self, values: Mapping[Tensor, Tensor]) -> None:
        """Take tensors of the dtypes before conversion, which :meth:`remove` gives to the model's in one move each."""
        self.converted.update({t: value for t, value in values.items() if self._before.get(t) == value.dtype})

    def remove(self) -> None:
        """Take the hooks off and store every tensor in the dtype it had; what rounding took stays lost.

        Called again after an interrupt, it finishes what is left.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for door in self._doors:
            door.detach(self.entrance)
        self._doors.clear()
        self._boundaries = []
        for tensor, dtype in self._before.items():
            if tensor.dtype != dtype:
                gradient, tensor.grad = tensor.grad, None
                _store(tensor, self.converted[tensor] if tensor in self.converted else tensor.data.to(dtype))
                tensor.grad = None if gradient is None else gradient.to(dtype)
        self._before.clear()
        self.converted.clear()


def _store(tensor: Any, data: Tensor) -> None:
    """Give a tensor other data, and gradients of that dtype if they had the dtype of the tensor until now."""
    follows = isinstance(tensor, nn.Parameter) and tensor.grad_dtype == tensor.dtype
    tensor.data = data
    if follows and tensor.grad_dtype != data.dtype:  # torch keeps one that was ever set, whatever the tensor becomes
        tensor.grad_dtype = data.dtype


def _with_pinned_classes(model: nn.Module, policy: Policy) -> Policy:
    """Store modules of classes that ``@mezzo.fp32`` pins in FP32, unless a rule of the policy says otherwise."""
    if policy.param_dtype == torch.float32:
        return policy
    pinned = [path for path, module in model.named_modules() if path and getattr(type(module), PIN, None) == "fp32"]
    rules = (Rule("fp32", module=path, reason="its class is pinned by @mezzo.fp32") for path in pinned)
    said = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*policy.rules, *(rule for rule in rules if rule.selector not in said)))


# What is checked before anything changes ------------------------------------------------------------


def _check(model: nn.Module, policy: Policy) -> dict[Tensor, torch.dtype]:
    """Decide every tensor's storage, or raise all that stands against it.

    Returns:
        The dtype for each floating parameter and each buffer that a policy converts.
    """
    if any(isinstance(getattr(hook, "__self__", None), Boundary) for m in model.modules() for hook in _pre_hooks(m)):
        raise StateError(
            "the model is prepared already",
            where=type(model).__name__,
            write="handle.remove() (or session.close()) before preparing it again;\n"
            "of a copy, by copy.deepcopy or pickle: build the model anew and load_state_dict(copy.state_dict())",
        )
    problems: list[MezzoError] = [*_uninitialized(model), *_foreign_dtypes(model), *_idle_rules(model, policy)]
    if problems:
        raise type(problems[0]).together(problems)
    storage: dict[Tensor, torch.dtype] = {}
    deciding: dict[Tensor, tuple[Rule | None, str]] = {}
    for tensor, path, module in _tensors(model):
        is_norm = isinstance(module, _NormBase)
        if is_norm and not isinstance(tensor, nn.Parameter):
            continue  # running statistics stay FP32
        dtype, rule = policy.storage(path, path.rpartition(".")[0], is_norm=is_norm)
        before = deciding.get(tensor, (None, ""))
        if rule is not None and before[0] is not None and storage[tensor] != dtype:
            problems.append(
                PolicyError(
                    f"the tied parameter {path} is given two storage dtypes",
                    where=f"{before[1]} by {before[0]}, {path} by {rule}",
                    write="one rule that matches both paths",
                )
            )
        if tensor not in storage or rule is not None:
            storage[tensor], deciding[tensor] = dtype, (rule, path)
    # FP32 policies store nothing anew: a model that came in low precision keeps what it has.
    storage = {t: dtype for t, dtype in storage.items() if policy.param_dtype != torch.float32 or deciding[t][0]}
    converting = {tensor: dtype for tensor, dtype in storage.items() if tensor.dtype != dtype}
    if converting:
        problems += cannot_convert(model, policy, converting)
    if problems:
        raise type(problems[0]).together(problems)
    return storage


def _out_of_reach(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Say which rules cannot reach inside composites that torch runs as one kernel."""
    for rule in policy.rules:
        for kind, parts in _ATOMIC.items():
            inside = sorted(set(rule.ops) & parts)
            paths = [path for path, module in model.named_modules() if isinstance(module, kind)]
            if inside and paths:
                yield (
                    f"the rule {rule} does not reach {', '.join(inside)} inside {some_of(paths)}: torch runs "
                    f"{kind.__name__} as one function; mezzo explain shows what it does"
                )


def _tensors(model: nn.Module) -> Iterator[tuple[Tensor, str, nn.Module]]:
    """Yield each floating parameter and persistent buffer under every path it has, with its owner."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = (
            (name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        )
        for name, tensor in (*module._parameters.items(), *persistent):
            if tensor is not None and tensor.dtype in CASTABLE:
                yield tensor, f"{prefix}.{name}" if prefix else name, module


def _foreign_dtypes(model: nn.Module) -> Iterator[UnsupportedError]:
    wrong = [f"{name} ({dtype_name(p.dtype)})" for name, p in model.named_parameters() if p.dtype == torch.float64]
    if wrong:
        yield UnsupportedError(
            "float64 parameters cannot be trained in mixed precision",
            where=some_of(wrong),
            why="they are never cast, so every op that reads them would run in their own precision",
            write="model.float() first, or leave this model outside mezzo",
        )


def _uninitialized(model: nn.Module) -> Iterator[UnsupportedError]:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        yield UnsupportedError(
            "lazy parameters have no values yet",
            where=some_of(lazy),
            why="there is nothing to store in the policy's dtype, and no shape for a master",
            write="model(one_batch) first, then prepare it",
        )


def _idle_rules(model: nn.Module, policy: Policy) -> Iterator[PolicyError]:
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    modules = [name for name, _ in named]
    tensors = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    for rule in policy.rules:
        if rule.module is not None and not any(rule.matches_module(name) for name in modules):
            yield PolicyError(
                f"the module glob {rule.module!r} matches no module",
                where=f"rule {rule}",
                why=nearest(rule.module, modules[:20]),
            )
        # Attention reads this projection's weight, and never calls it: a rule on the module would do nothing.
        silent = [name for name, m in named if rule.matches_module(name) and isinstance(m, _NEVER_CALLED)]
        if silent and not any(rule.matches_module(name.rpartition(".")[0]) for name in silent):
            yield PolicyError(
                f"the module glob {rule.module!r} matches a module that is never called",
                where=some_of(silent),
                why="attention reads its weight directly, so nothing would enter its region",
                write=f"module={silent[0].rpartition('.')[0]!r}, or param={silent[0] + '.weight'!r}",
            )
        if rule.op is not None and not any("::" in op or functions(op) for op in (*rule.ops, rule.op)):
            yield PolicyError(
                f"the op glob {rule.op!r} matches no op that could be cast",
                where=f"rule {rule}",
                write="mezzo ops 'conv*' lists them",
            )
        if rule.param is not None and not any(rule.matches_param(name) for name in tensors):
            yield PolicyError(
                f"the parameter glob {rule.param!r} matches no parameter or buffer",
                where=f"rule {rule}",
                why=nearest(rule.param, tensors[:20]),
            )


# Hooks ----------------------------------------------------------------------------------------------


def _pre_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    return iter(module._forward_pre_hooks.values())


@dataclass(frozen=True)
class _Pins:
    """Parameters under a rule, by where they stand: whatever tensor stands there when a region begins is meant.

    ``torch.func.functional_call`` puts other tensors there for one call.
    """

    places: tuple[tuple[nn.Module, str, Treatment], ...]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[Tensor, Treatment]]:
        for owner, name, treatment in self.places:
            tensor = owner._parameters.get(name, owner._buffers.get(name))
            if tensor is not None:
                yield tensor, treatment


def _boundaries(model: nn.Module, policy: Policy, kinds: Kinds, entrance: Entrance) -> list[tuple[nn.Module, Boundary]]:
    """Find the modules at whose boundary something changes, the model itself first."""
    low = policy.param_dtype != torch.float32
    deciding = [
        (tensor, module, path.rpartition(".")[2], policy.storage(path, path.rpartition(".")[0])[1])
        for tensor, path, module in _tensors(model)
    ]
    ruled = {tensor: rule for tensor, *_, rule in deciding if rule is not None}
    # A module's rule covers what that module does with a tensor it shares; here is who else reads it.
    shared = {t for t, *_, rule in deciding if t in ruled and (rule is None or rule.param is not None)}
    params = _Pins(tuple((owner, name, ruled[t].treatment) for t, owner, name, _ in deciding if t in shared))
    found = []
    wide = WideNorm if low and not policy.keep_batchnorm_fp32 else Boundary
    root = (wide if isinstance(model, _NormBase) else Boundary)(
        policy, "", params, kinds,
        inputs=policy.dtype if low else None,
        outputs=policy.output_dtype,
        entrance=entrance if low else None,
    )  # fmt: skip
    if low or policy.output_dtype is not None or params:
        found.append((model, root))
    for path, module in model.named_modules():
        if not path or not _has_forward(module):
            continue
        # Containers are never called, so the region around a module is that of the nearest one that is.
        around = _nearest_called(model, path)
        whole, above = _module_rule(policy, path), _module_rule(policy, around)
        ops_differ = any(
            rule.op is not None and rule.matches_module(path) != rule.matches_module(around) for rule in policy.rules
        )
        if whole is not above or ops_differ:
            inputs, outputs = _casts(policy, whole.treatment if whole is not above and whole else None)
            found.append((module, Boundary(policy, path, params, kinds, inputs=inputs, outputs=outputs, rule=whole)))
        elif isinstance(module, _NormBase) and wide is WideNorm:
            found.append((module, WideNorm(policy, path, params, kinds)))
    return found


def _doors(
    model: nn.Module, policy: Policy, params: Iterable[tuple[Tensor, Treatment]], kinds: Kinds
) -> Iterator[tuple[str, nn.Module, Callable[[], Boundary]]]:
    """Find the submodules that can be called by themselves, with what makes the boundary of such a call."""
    holding: set[str] = set()
    for _, path, _ in _tensors(model):
        while path := path.rpartition(".")[0]:
            holding.add(path)
    for path, module in model.named_modules():
        # Parametrizations run where a weight is read, by whoever reads it.
        if path not in holding or not _has_forward(module) or "parametrizations" in path.split("."):
            continue
        rule = _module_rule(policy, path)
        wide = rule is not None and rule.treatment in ("fp32", "fp32_math")
        inputs = torch.float32 if wide else policy.dtype
        yield (
            path,
            module,
            functools.partial(Boundary, policy, path, params, kinds, inputs=inputs, outputs=policy.output_dtype),
        )


def _has_forward(module: nn.Module) -> bool:
    # Of a TorchScript module's class the method cannot be asked for, only looked up.
    return getattr(inspect.getattr_static(type(module), "forward"), "__name__", "") != "_forward_unimplemented"


def _nearest_called(model: nn.Module, path: str) -> str:
    """Return the path of the nearest module around this one that has a forward of its own."""
    path = path.rpartition(".")[0]
    while path and not _has_forward(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _module_rule(policy: Policy, path: str) -> Rule | None:
    """Return the rule that treats a module as a whole, if one does."""
    return next((rule for rule in policy.rules if rule.op is None and path and rule.matches_module(path)), None)


def _casts(policy: Policy, treatment: Treatment | None) -> tuple[torch.dtype | str | None, torch.dtype | str | None]:
    """Say what a module's inputs and outputs are cast to; a word where the inputs themselves decide."""
    match treatment:
        case "fp32":
            return torch.float32, None if policy.autocast else policy.dtype
        case "fp32_math":
            return torch.float32, "input"
        case "low":
            return policy.dtype, None
        case "promote":
            return "widest", None
        case _:
            return None, None
