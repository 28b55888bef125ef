"""One call of a torch function: its name, what the policy decides about it, and its location in a pass.

This file alone looks inside the active region: what the region opens, and which parameter rule applies to a call.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.backward import current_node, next_number, number_of
from mezzo.cast.differences import INPLACE, OPENED, is_called_in_place
from mezzo.cast.mode import acting_differences, pinned_parameter
from mezzo.cast.notes import notes
from mezzo.cast.products import operands_or_reason, recipe_of
from mezzo.compiling import inside, is_compiled
from mezzo.errors import PolicyError
from mezzo.policy import Decision, Policy, Rule, Treatment
from mezzo.policy.ops import OPS, QUANTISABLE, QUANTISED, is_in_place, out_of_place, resolve
from mezzo.tensors import CASTABLE, dtype_name, has_fraction, tensors
from mezzo.trace.table import CallRecord, Doing

# The caller: the op behind a torch function or kernel, the line of the user's code, mezzo's own casts.


@functools.lru_cache(maxsize=4096)
def op_name(function: Any) -> str:
    """Return the base name of a torch function's op, as rules and the op table have it.

    Args:
        function: What a ``TorchFunctionMode`` receives: a function, a method, a property's getter, an op of
            ``torch.ops``.

    Example:
        >>> import torch
        >>> op_name(torch.nn.functional.linear), op_name(torch.Tensor.__matmul__), op_name(torch.Tensor.add_)
        ('linear', 'matmul', 'add_')
        >>> op_name(torch.linalg.inv), op_name(torch.ops.aten.convolution)
        ('linalg_inv', 'convolution')
    """
    qualified = getattr(function, "_qualified_op_name", None) or getattr(getattr(function, "_schema", None), "name", "")
    name = str(qualified or getattr(function, "__name__", type(function).__name__))
    return _resolved(name.removeprefix("aten::")) or name.strip("_") or name


@functools.lru_cache(maxsize=4096)
def kernel_name(kernel: Any) -> str:
    """Return the base name that fits an aten kernel best: ``softmax`` for ``aten::_softmax``.

    Example:
        >>> import torch
        >>> kernel_name(torch.ops.aten._softmax.default), kernel_name(torch.ops.aten.addmm.default)
        ('softmax', 'addmm')
    """
    name = str(kernel._schema.name)
    if not name.startswith("aten::"):
        return name
    bare = name.removeprefix("aten::").removesuffix("_")
    stems = (bare, *(bare.removeprefix(prefix) for prefix in ("_", "_safe_", "native_")), bare.removesuffix("_forward"))
    return next((resolved for stem in stems if (resolved := _resolved(stem)) is not None), bare)


@functools.lru_cache(maxsize=4096)
def _resolved(name: str) -> str | None:
    try:
        return resolve(name, in_place=True)
    except PolicyError:
        return None


def user_line(until: int = 0) -> str | None:
    """Return ``file:line`` of the innermost code that is neither torch's nor mezzo's.

    ``None`` where there is none: ``nn.Sequential`` of torch's layers runs no line of the user's.

    Args:
        until: The frame that runs the model, as :func:`frame_id` names it. What called it is no line of the model's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != until:
        name = str(frame.f_globals.get("__name__", ""))
        if not is_from(name, "torch") and not is_from(name, "mezzo"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def frame_id() -> int:
    """Return the id of the caller's frame. It is valid while the frame runs, and does not keep it alive."""
    return id(sys._getframe(1))


def doing_now() -> tuple[Doing, tuple[str, ...]]:
    """Return what mezzo does around the running kernel, and the formats of the quantised operands of its product.

    ``cast``: mezzo casts, or rotates an operand before it is quantised. ``quantised``: mezzo computes a product below
    sixteen bits. ``buffer``: mezzo widens a low buffer. ``region``: a region decides about an op, and nothing more.
    """
    open_notes = notes()
    if not open_notes:
        return "other", ()
    inner = next((note for note in reversed(open_notes) if note.event not in ("op", "widened")), None)
    formats = next((note.about.formats for note in reversed(open_notes) if note.event == "quantised"), ())
    if inner is None or inner.event == "op":
        return "region", formats
    return ("emulation" if inner.event == "quantised" and inner.about.emulated else inner.event), formats


def is_from(name: str, package: str) -> bool:
    """Whether a module belongs to a package."""
    return name == package or name.startswith(f"{package}.")


_CASTABLE: Final = frozenset(map(dtype_name, CASTABLE))


class Decider:
    """Records calls, each with what the policy decides about it.

    Args:
        policy: The policy.
        ruled: Rule and path of each parameter and buffer that a rule names, by ``id``.
    """

    def __init__(self, policy: Policy, ruled: Mapping[int, tuple[Rule, str]]) -> None:
        self.policy, self.ruled = policy, ruled
        self._decisions: dict[tuple[str, str | None, str], Decision] = {}

    def call(self, function: Any, args: Any, kwargs: Any, module: str | None) -> CallRecord:
        """Return the record of a call that is about to run: its op, the decision, and its arguments' dtypes."""
        arguments = list(tensors((args, kwargs)))
        device_type = arguments[0].device.type if arguments else "cpu"
        op = op_name(function)
        param, differences = self._param_decision(op, args, kwargs), acting_differences(args, kwargs)
        into, named = _write_target(function, op, args, kwargs)
        decision = param or self._decision(named, module, device_type)
        base = op if into is None else out_of_place(op) or op
        instead = None if param or differences is None else differences.instead(base, args, kwargs)
        if instead is not None:
            decision = replace(decision, treatment=instead.treatment, reason=instead.reason)
        if decision.treatment in QUANTISED and op in QUANTISABLE:
            recipe = recipe_of(self.policy, decision.treatment)
            read = operands_or_reason(op, args, kwargs, recipe.multiple)
            why = read if isinstance(read, str) else "low_products=forward" if recipe.low == "forward" else ""
            if why:
                decision = replace(decision, treatment="low", reason=f"{decision.reason}; it stays low: {why}")
            elif why := recipe.output_note(device_type, self.policy):
                decision = replace(decision, reason=f"{decision.reason}; {why}")
        return CallRecord(
            op=op,
            decision=decision,
            goes_back=param is not None and differences is not None and differences.returns_compute_dtype,
            low_dtype=dtype_name(self.policy.dtype),
            argument_dtypes=_names(arguments),
            cause=_cause(kwargs, is_off=self.policy.casts and not _autocasts(device_type)),
            written=None if into is None else _names(list(tensors(into))),
        )

    def _param_decision(self, op: str, args: Any, kwargs: Any) -> Decision | None:
        pinned = _pinned(args, kwargs)
        if pinned is None:
            return None
        param, treatment = pinned
        if treatment in QUANTISED and op not in QUANTISABLE:
            return None  # such a rule applies to products alone
        rule, path = self.ruled.get(id(param), (None, "a parameter"))
        reason = (rule.reason if rule else "") or f"it reads {path}, which the rule {rule} pins"
        return Decision(treatment=treatment, rule=rule, reason=reason, source="policy")

    def _decision(self, op: str, module: str | None, device_type: str) -> Decision:
        key = (op, module, device_type)
        if key not in self._decisions:
            # No list has a name of torch's internals, and the suggestion of the error would cost milliseconds.
            decision = None
            if _resolved(op) is not None:
                with suppress(PolicyError):
                    decision = self.policy.explain(op, module, device_type=device_type)
            native = Decision(treatment="native", rule=None, reason="no list names this op", source="op table")
            self._decisions[key] = decision or native
        return self._decisions[key]


def _write_target(function: Any, op: str, args: Any, kwargs: Any) -> tuple[Any, str]:
    """Return what a call writes to, ``None`` where it returns new tensors, and the op's name for the policy."""
    if kwargs.get("out") is not None:
        return kwargs["out"], op if "::" in op else f"aten::{op}.out"
    is_in_place_call = function in INPLACE and is_called_in_place(INPLACE[function], args, kwargs)
    return args[0] if args and (is_in_place_call or is_in_place(op) or op == "__setitem__") else None, op


def _names(values: list[Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in values if has_fraction(tensor.dtype)))


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _cause(kwargs: Any, *, is_off: bool) -> str:
    if kwargs.get("dtype") is not None:
        return "the call's own dtype= wins"
    if is_off:
        return "the model's code switches autocast off here"
    return ""


# The active region -----------------------------------------------------------------------------------


def opened_by_region(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the copy of a Python function to run in its place, so that the ops inside it are seen one by one.

    A function that the region would open is opened already here, above the region, with the same result. Another
    Python function is opened where the op table has no decision about it as a whole. That changes no result either,
    unless an argument's class overrides torch functions.
    """
    differences = acting_differences(args, kwargs)
    if differences is not None:
        pinned = _pinned(args, kwargs)
        if pinned is not None and pinned[1] not in QUANTISED:
            return None
        instead = differences.instead(op_name(function), args, kwargs)
        if instead is not None and instead.parts is not None:
            return lambda *_, **__: instead.parts()
        if (opened := differences.opened.get(function)) is not None:
            return opened
        if differences.handler(function) is not None:
            return None
    if any(cls not in (Tensor, torch.nn.Parameter) for cls in types):
        return None
    entry = OPS.get(op_name(function))
    return None if entry is not None and not entry.parts else OPENED.get(function)


def _pinned(args: Any, kwargs: Any) -> tuple[Tensor, Treatment] | None:
    """Return the parameter among the arguments that a parameter rule names, and its treatment."""
    differences = acting_differences(args, kwargs)
    if differences is None or not differences.pinned:
        return None
    param = pinned_parameter(differences, args, kwargs)
    return None if param is None else (param, differences.pinned[id(param)])


# Locations in a watched pass: the module and the call that run, forward or backward, and the user's line.
#
# In the backward pass the sequence number of the running autograd node gives the location: the locator records which
# numbers nodes got while a module or a call ran.

#: The model itself in printed text, for its path is empty.
MODEL: Final = "(model)"
#: The module path of the loss function.
LOSS: Final = "(loss)"


def location_text(module: str, op: str, line: str | None = None) -> str:
    """Return the location of an op as printed text.

    Example:
        >>> location_text("", "linear", "model.py:7")
        '(model) linear (model.py:7)'
    """
    return f"{module or MODEL} {op}{f' ({line})' if line else ''}"


@dataclass(slots=True)
class Location:
    """A module, and a call of a torch function inside; ``None`` between calls."""

    module: str
    call: CallRecord | None = None

    @property
    def path(self) -> str | None:
        """The module's path as rules have it; ``None`` outside of the model."""
        return None if self.module == LOSS else self.module


class Locator:
    """Tracks the location of a pass, and in which location of the forward pass each autograd node was made.

    Args:
        until: The frame beyond which no line belongs to the model; see :func:`~mezzo.trace.function_calls.user_line`.
        instead: The line to return where no frame has one.

    Attributes:
        is_backward: Whether the backward pass has begun: calls are recomputation.
        is_inner: Whether ``torch.autograd.grad`` runs inside the forward pass.
        modules_run: Paths of the modules that have been called.
    """

    def __init__(self, until: int = 0, instead: str | None = None) -> None:
        self.is_backward = False
        self.modules_run: set[str] = set()
        self._until, self._instead = until, instead
        self._locations = [Location(LOSS)]
        self._level = 1  # how many locations were open when the backward pass began
        self.is_inner = False
        self._timeline: list[tuple[int, Location]] = []
        self._owners: dict[int, str] = {}

    def learn_owners(self, model: nn.Module) -> None:
        """Record to which module each parameter belongs: its gradient may be cast where it is accumulated."""
        self._owners.update((id(p), n.rpartition(".")[0]) for n, p in model.named_parameters())

    @property
    def now(self) -> Location:
        """The innermost open location of the forward pass."""
        return self._locations[-1]

    def line(self) -> str | None:
        """Return the user's line that runs."""
        return user_line(self._until) or self._instead

    def enter(self, location: Location) -> None:
        """Open a location: a module or a call begins."""
        self._locations.append(location)
        self._mark()

    def leave(self, location: Location) -> None:
        """Close a location, and all that were opened inside and not closed because of an exception."""
        if any(entered is location for entered in self._locations):
            while self._locations.pop() is not location:
                pass
            self._mark()

    def _mark(self) -> None:
        """Record that autograd nodes from the next one on are made in the innermost location."""
        number = next_number()
        if self._timeline and self._timeline[-1][0] == number:
            self._timeline.pop()
        self._timeline.append((number, self._locations[-1]))

    @contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Count kernels inside the block as backward: ``torch.autograd.grad`` of a gradient penalty, for example."""
        before = self.is_backward, self._level, self.is_inner
        self.is_backward, self._level, self.is_inner = True, len(self._locations), True
        try:
            yield
        finally:
            self.is_backward, self._level, self.is_inner = before

    @property
    def is_gradient(self) -> bool:
        """Whether gradients are computed: in the backward pass, but not where a checkpoint recomputes inside it."""
        # With create_graph an inner backward pass runs with gradients on, and yet recomputes nothing.
        recomputes = len(self._locations) > self._level or (torch.is_grad_enabled() and not self.is_inner)
        return self.is_backward and not recomputes

    def of_kernel(self) -> Location:
        """Return the location of a kernel: the running module, or the one whose backward pass runs."""
        if not self.is_backward or len(self._locations) > self._level:
            return self.now
        node = current_node()
        if node is None:
            return self.now
        if (variable := getattr(node, "variable", None)) is not None:
            return Location(self._owners.get(id(variable), ""))
        return self.of_node(node)

    def of_node(self, node: Any) -> Location:
        """Return the location in which an autograd node was made."""
        index = bisect_right(self._timeline, number_of(node), key=lambda mark: mark[0])
        return self._timeline[index - 1][1] if index else self.now


#: Methods in which torch calls a module that is compiled.
_CALLS: Final = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})


def compiled_model() -> nn.Module | None:
    """Return the model that the program had compiled and is calling now, while torch.compile is at work.

    Returns:
        The outermost such model; None where what was compiled is a function.
    """
    frame: FrameType | None = sys._getframe()
    model: nn.Module | None = None
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name in _CALLS else None
        if isinstance(module, nn.Module) and is_compiled(module):
            model = inside(module)
        frame = frame.f_back
    return model
