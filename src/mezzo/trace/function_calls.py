"""One call of a torch function: what it is called, what the policy decides about it, and where in a pass it is.

Only here does anything look inside the active region: what it opens, and which parameter rule speaks about a call.
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
from mezzo.cast.differences import INPLACE, OPENED, asks_in_place
from mezzo.cast.mode import acting_differences, pinned_parameter
from mezzo.cast.notes import notes
from mezzo.cast.products import asked, recipe_of
from mezzo.compiling import inside, is_compiled
from mezzo.errors import PolicyError
from mezzo.policy import Decision, Policy, Rule, Treatment
from mezzo.policy.ops import OPS, QUANTISABLE, QUANTISED, is_in_place, out_of_place, resolve
from mezzo.tensors import CASTABLE, dtype_name, has_fraction, tensors
from mezzo.trace.table import CallRecord, Doing

# Who asked: the op behind a torch function or kernel, the line of the user's code, mezzo's own casts.


@functools.lru_cache(maxsize=4096)
def op_name(function: Any) -> str:
    """Return the base name of a torch function's op, as rules and the op table have it.

    Args:
        function: What a ``TorchFunctionMode`` is given: a function, a method, a property's getter, an op of
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
    return _known(name.removeprefix("aten::")) or name.strip("_") or name


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
    return next((known for stem in stems if (known := _known(stem)) is not None), bare)


@functools.lru_cache(maxsize=4096)
def _known(name: str) -> str | None:
    try:
        return resolve(name, in_place=True)
    except PolicyError:
        return None


def user_line(until: int = 0) -> str | None:
    """Return ``file:line`` of the innermost code that is neither torch's nor mezzo's.

    ``None`` where there is none: ``nn.Sequential`` of torch's layers runs
    no line of the user's.

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
    """Name the frame that calls, for as long as it runs; it is not kept alive by its name."""
    return id(sys._getframe(1))


def around() -> tuple[Doing, tuple[str, ...]]:
    """Say what mezzo does around a function or kernel, and name the formats of the quantised operands of its product.

    ``cast``: the rotation before an operand is quantised belongs to it. ``quantised``: a product below sixteen bits is
    computed. ``buffer``: a low buffer is widened. ``region``: it only decides.
    """
    taken = notes()
    if not taken:
        return "other", ()
    inner = next((note for note in reversed(taken) if note.kind not in ("op", "widened")), None)
    formats = next((note.about.formats for note in reversed(taken) if note.kind == "quantised"), ())
    if inner is None or inner.kind == "op":
        return "region", formats
    return ("emulation" if inner.kind == "quantised" and inner.about.emulated else inner.kind), formats


def is_from(name: str, package: str) -> bool:
    """Whether a module belongs to a package."""
    return name == package or name.startswith(f"{package}.")


_CASTABLE: Final = frozenset(map(dtype_name, CASTABLE))


class Decider:
    """Ask the policy about calls.

    Args:
        policy: The policy.
        ruled: Rule and path of each parameter and buffer that a rule speaks about, by ``id``.
    """

    def __init__(self, policy: Policy, ruled: Mapping[int, tuple[Rule, str]]) -> None:
        self.policy, self.ruled = policy, ruled
        self._decisions: dict[tuple[str, str | None, str], Decision] = {}

    def call(self, function: Any, args: Any, kwargs: Any, module: str | None) -> CallRecord:
        """Begin a call: name it, decide about it, note the dtypes that it is given."""
        given = list(tensors((args, kwargs)))
        device_type = given[0].device.type if given else "cpu"
        op = op_name(function)
        param, differences = self._param_decision(op, args, kwargs), acting_differences(args, kwargs)
        into, named = _written(function, op, args, kwargs)
        decision = param or self._decision(named, module, device_type)
        base = op if into is None else out_of_place(op) or op
        instead = None if param or differences is None else differences.instead(base, args, kwargs)
        if instead is not None:
            decision = replace(decision, treatment=instead.treatment, reason=instead.reason)
        if decision.treatment in QUANTISED and op in QUANTISABLE:
            recipe = recipe_of(self.policy, decision.treatment)
            read = asked(op, args, kwargs, recipe.multiple)
            why = read if isinstance(read, str) else "low_products=forward" if recipe.low == "forward" else ""
            if why:
                decision = replace(decision, treatment="low", reason=f"{decision.reason}; it stays low: {why}")
            elif why := recipe.output_note(device_type, self.policy):
                decision = replace(decision, reason=f"{decision.reason}; {why}")
        return CallRecord(
            op=op,
            decision=decision,
            goes_back=param is not None and differences is not None and differences.gives_back,
            low_dtype=dtype_name(self.policy.dtype),
            argument_dtypes=_names(given),
            cause=_cause(kwargs, is_off=self.policy.casts and not _autocasts(device_type)),
            written=None if into is None else _names(list(tensors(into))),
        )

    def _param_decision(self, op: str, args: Any, kwargs: Any) -> Decision | None:
        found = _pinned(args, kwargs)
        if found is None:
            return None
        param, treatment = found
        if treatment in QUANTISED and op not in QUANTISABLE:
            return None  # the rule is of products
        rule, path = self.ruled.get(id(param), (None, "a parameter"))
        reason = (rule.reason if rule else "") or f"it reads {path}, which the rule {rule} pins"
        return Decision(treatment=treatment, rule=rule, reason=reason, source="policy")

    def _decision(self, op: str, module: str | None, device_type: str) -> Decision:
        key = (op, module, device_type)
        if key not in self._decisions:
            # A name that only torch's internals use has none, and what the error would suggest costs milliseconds.
            found = None
            if _known(op) is not None:
                with suppress(PolicyError):
                    found = self.policy.explain(op, module, device_type=device_type)
            native = Decision(treatment="native", rule=None, reason="no list names this op", source="op table")
            self._decisions[key] = found or native
        return self._decisions[key]


def _written(function: Any, op: str, args: Any, kwargs: Any) -> tuple[Any, str]:
    """Return what a call writes to, ``None`` where it returns new tensors, and what to ask a policy about."""
    if kwargs.get("out") is not None:
        return kwargs["out"], op if "::" in op else f"aten::{op}.out"
    told = function in INPLACE and asks_in_place(INPLACE[function], args, kwargs)
    return args[0] if args and (told or is_in_place(op) or op == "__setitem__") else None, op


def _names(each: list[Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in each if has_fraction(tensor.dtype)))


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

    What the region itself would open is opened here first, with the region below, which changes nothing. Other
    Python functions are opened where the op table has no decision about the function as a whole; to them too it is
    all the same, unless an argument's class overrides torch functions.
    """
    differences = acting_differences(args, kwargs)
    if differences is not None:
        pinned = _pinned(args, kwargs)
        if pinned is not None and pinned[1] not in QUANTISED:
            return None
        instead = differences.instead(op_name(function), args, kwargs)
        if instead is not None and instead.parts is not None:
            return lambda *_, **__: instead.parts()
        if differences.handler(function) is not None:
            return None
        if (opened := differences.opened.get(function)) is not None:
            return opened
    if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
        return None
    entry = OPS.get(op_name(function))
    return None if entry is not None and not entry.parts else OPENED.get(function)


def _pinned(args: Any, kwargs: Any) -> tuple[Tensor, Treatment] | None:
    """Return the parameter among the arguments that a parameter rule speaks about, and its treatment."""
    differences = acting_differences(args, kwargs)
    if differences is None or not differences.pinned:
        return None
    param = pinned_parameter(differences, args, kwargs)
    return None if param is None else (param, differences.pinned[id(param)])


# Where a watched pass is: in which module and call, forward or backward, and on which of the user's lines.
#
# In the backward pass the running autograd node says where, by its sequence number: the numbers that nodes got while a
# module or a call ran are noted here.

#: How the model itself is called where people read, for its path is empty.
MODEL: Final = "(model)"
#: The module path of what the loss function does.
LOSS: Final = "(loss)"


def location_text(module: str, op: str, line: str | None = None) -> str:
    """Write where an op is, for people.

    Example:
        >>> location_text("", "linear", "model.py:7")
        '(model) linear (model.py:7)'
    """
    return f"{module or MODEL} {op}{f' ({line})' if line else ''}"


@dataclass(slots=True)
class Location:
    """In a module, and in one call of a torch function or between calls."""

    module: str
    call: CallRecord | None = None

    @property
    def path(self) -> str | None:
        """The module as rules have it: outside of the model there is none."""
        return None if self.module == LOSS else self.module


class Locator:
    """The place of a pass, and of the forward pass that its backward nodes come from.

    Args:
        until: The frame beyond which no line is the model's; see :func:`~mezzo.trace.function_calls.user_line`.
        instead: The line to name where there is none.

    Attributes:
        is_backward: Whether the backward pass has begun: calls are recomputation.
        is_inner: Whether ``torch.autograd.grad`` runs inside the forward pass.
        modules_run: Paths of the modules that have been called.
    """

    def __init__(self, until: int = 0, instead: str | None = None) -> None:
        self.is_backward = False
        self.modules_run: set[str] = set()
        self._until, self._instead = until, instead
        self._places = [Location(LOSS)]
        self._level = 1  # how many places there were when the backward pass began
        self.is_inner = False
        self._timeline: list[tuple[int, Location]] = []
        self._owners: dict[int, str] = {}

    def learn_owners(self, model: nn.Module) -> None:
        """Learn to which module each parameter belongs, whose gradient may be cast where it is accumulated."""
        self._owners.update((id(p), n.rpartition(".")[0]) for n, p in model.named_parameters())

    @property
    def now(self) -> Location:
        """Where the program is, forward."""
        return self._places[-1]

    def line(self) -> str | None:
        """Return the user's line."""
        return user_line(self._until) or self._instead

    def enter(self, place: Location) -> None:
        """Be in a module, or in a call."""
        self._places.append(place)
        self._mark()

    def leave(self, place: Location) -> None:
        """Be where the program was before, whatever lies between."""
        if any(each is place for each in self._places):
            while self._places.pop() is not place:
                pass
            self._mark()

    def _mark(self) -> None:
        """Note from which autograd node on the program is in this place."""
        number = next_number()
        if self._timeline and self._timeline[-1][0] == number:
            self._timeline.pop()
        self._timeline.append((number, self._places[-1]))

    @contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Watch ``torch.autograd.grad`` inside the forward pass, a gradient penalty's for example."""
        before = self.is_backward, self._level, self.is_inner
        self.is_backward, self._level, self.is_inner = True, len(self._places), True
        try:
            yield
        finally:
            self.is_backward, self._level, self.is_inner = before

    @property
    def is_gradient(self) -> bool:
        """Whether gradients are computed: in the backward pass, but not where a checkpoint recomputes inside it."""
        # A graph made of an inner backward pass needs gradients too, and is none.
        recomputes = len(self._places) > self._level or (torch.is_grad_enabled() and not self.is_inner)
        return self.is_backward and not recomputes

    def of_kernel(self) -> Location:
        """Return where a kernel belongs: to the running module, or to the one whose backward pass runs."""
        if not self.is_backward or len(self._places) > self._level:
            return self.now
        node = current_node()
        if node is None:
            return self.now
        if (variable := getattr(node, "variable", None)) is not None:
            return Location(self._owners.get(id(variable), ""))
        return self.of_node(node)

    def of_node(self, node: Any) -> Location:
        """Return where an autograd node was made."""
        found = bisect_right(self._timeline, number_of(node), key=lambda mark: mark[0])
        return self._timeline[found - 1][1] if found else self.now


#: Methods in which torch calls a module that is compiled.
_CALLS: Final = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})


def compiled_model() -> nn.Module | None:
    """Return the model that the program had compiled and is calling now, while torch.compile is at work.

    Returns:
        The outermost such model; None where what was compiled is a function.
    """
    frame: FrameType | None = sys._getframe()
    found: nn.Module | None = None
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name in _CALLS else None
        if isinstance(module, nn.Module) and is_compiled(module):
            found = inside(module)
        frame = frame.f_back
    return found
