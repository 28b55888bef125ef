"""What happens at a module's boundary: the pair of hooks around it; and where a model is entered from outside."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from mezzo.cast.device import Kinds
from mezzo.cast.mode import compiled_inside_alone
from mezzo.cast.nested import cast_floating, widest
from mezzo.cast.region import Region, acting_keys, autocast
from mezzo.errors import UnsupportedError, message
from mezzo.policy import Policy, Rule, Treatment
from mezzo.tensors import CASTABLE, dtype_name

__all__ = ["Boundary", "Entrance", "runs_backward"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`

#: How torch's kernels say that their operands differ in dtype.
_TWO_DTYPES: Final = ("same dtype", "should be the same", "mixed dtype", "expected scalar type", "match weight dtype")


class Entrance:
    """The call by which each thread has come into a model, as long as it lasts.

    A copy of the model, or of a part of it, is a model of its own, in which no call lasts.
    """

    def __init__(self) -> None:
        # By thread, and 0 for what torch.compile traces, which knows no threads. With the call, how often the same
        # module has been called again inside it.
        self._at: dict[int, tuple[Any, int]] = {}

    def __reduce__(self) -> Any:
        return Entrance, ()

    def is_open(self) -> bool:
        """Whether this thread is inside the model."""
        if torch.compiler.is_compiling():
            return len(self._at) > 0  # a graph depends on it, and is traced for both; torch 2.11 traces no bool(dict)
        return threading.get_ident() in self._at or 0 in self._at

    def enter(self, by: Any) -> bool:
        """Note a call, and return whether it came from outside.

        Args:
            by: Whose call it is; :meth:`leave` gets the same.
        """
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        if self.is_open():
            held = self._at.get(thread)
            if held is not None and held[0] is by:
                self._at[thread] = (by, held[1] + 1)
            return False
        self._at[thread] = (by, 0)
        return True

    def leave(self, by: Any) -> bool:
        """Note the end of a call, and return whether it was the one that came from outside."""
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        held = self._at.get(thread)
        if held is None or held[0] is not by:
            return False
        if held[1]:
            self._at[thread] = (by, held[1] - 1)
            return False
        del self._at[thread]
        return True

    def forget(self) -> None:
        """Forget the call of this thread. Between steps no call lasts, but one that was interrupted is noted still."""
        self._at.pop(threading.get_ident(), None)


def runs_backward() -> bool:
    """Whether autograd runs in this thread: a module that is called then is recomputed, inside its model."""
    return torch._C._current_graph_task_id() != -1


# What torch._dynamo.assume_constant_result sets, without a second of imports. While it traces, torch.compile asks once:
# a module that is compiled by itself and recomputed is traced for its forward pass before.
runs_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(eq=False, kw_only=True)
class Boundary:
    """The pair of hooks around one module: cast, enter its region; leave it, cast back.

    Between calls it holds no region, so that a prepared model can be copied and pickled.

    Attributes:
        policy: The model's policy.
        path: The module's path in the model.
        params: The parameters that rules speak about, with their treatments.
        kinds: The devices that its regions cover.
        inputs: What floating inputs are cast to: a dtype, or ``"widest"`` among them; as they are when omitted.
        outputs: What floating outputs are cast to: a dtype, or ``"input"`` for that of the first floating input.
        rule: The rule that treats the module as a whole, if one does.
        entrance: Where the model's own calls are noted, if this is the model.
        widens_norm: Whether batch norm has low-precision weights here: kernels want FP32, as the statistics are.
    """

    policy: Policy
    path: str
    params: Iterable[tuple[Tensor, Treatment]]
    kinds: Kinds
    inputs: torch.dtype | str | None = None
    outputs: torch.dtype | str | None = None
    rule: Rule | None = None
    entrance: Entrance | None = None
    widens_norm: bool = False

    def __post_init__(self) -> None:
        # One stack for each thread, since threads may run one model at the same time.
        self._entered: defaultdict[int, list[tuple[autocast | None, torch.dtype | None]]] = defaultdict(list)
        self._needs: dict[tuple[str, ...], tuple[bool, tuple[str, ...]]] = {}
        self._needs_on(self.kinds())

    def _needs_on(self, kinds: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
        """Return whether the region is always needed on some devices, and which region acts like it, if one can."""
        if kinds not in self._needs:
            region = self.region()
            # Where the region would only switch torch's autocast off, it is needed only while that is on.
            always = region.has_differences or self.policy.autocast or self.outputs == "input"
            # Another region does the same as this one only where neither autocasts nor speaks about parameters.
            alike = not (self.policy.autocast or self.pinned() or self.outputs == "input")
            self._needs[kinds] = always, region.keys if alike else ()
        return self._needs[kinds]

    def pinned(self) -> dict[int, Treatment]:
        """Return the treatment of ops that read a ruled parameter, by the parameter's ``id``."""
        return {id(tensor): treatment for tensor, treatment in self.params}

    def region(self) -> Region:
        """Return the region of this module."""
        region = Region.inside(self.policy, self.path, self.pinned(), self.kinds())
        return region.with_wide_norm() if self.widens_norm else region

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Enter the region and cast the inputs: a forward pre-hook."""
        if self.rule is not None and self.rule.treatment == "ban":
            raise UnsupportedError(
                f"the module {self.path} is banned under this policy",
                where=type(module).__name__,
                why=self.rule.reason or f"the rule {self.rule} bans it",
                write="another module, or a policy without that rule",
            )
        if self.entrance is not None:
            self.entrance.enter(self)
        if self._is_idle():
            if not torch.compiler.is_compiling():
                self._entered[threading.get_ident()].append((None, None))
            return _cast((args, kwargs), self.inputs)
        entered: tuple[Any, Any] = self._enter_region(args, kwargs)
        return entered

    def _is_idle(self) -> bool:
        """Whether the region would change nothing here: torch's autocast is off, or a region like it acts already."""
        kinds = self.kinds()
        always, keys = self._needs_on(kinds)
        if not always:
            return not any(torch.is_autocast_enabled(kind) for kind in kinds)
        return bool(keys) and acting_keys() == keys

    # A region cannot be entered in one compiled frame and left in another: the two calls below stay in Python.
    # (torch.compiler.disable is the public name, and costs a second of imports where it is only mentioned.)
    @_disable_dynamo
    def _enter_region(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        floats = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in CASTABLE]
        region = autocast.of(self.region())
        region.__enter__()
        self._entered[threading.get_ident()].append((region, floats[0].dtype if floats else None))
        return _cast((args, kwargs), widest(floats) if self.inputs == "widest" else self.inputs)

    @compiled_inside_alone
    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Leave the region, after an exception too, and cast the outputs: a forward hook."""
        if self.entrance is not None:
            self.entrance.leave(self)
        if output is None and isinstance(self.inputs, torch.dtype) and not torch.compiler.is_compiling():
            _explain(sys.exception(), self.policy)
        # None was entered in a graph, or where an earlier pre-hook raised.
        target = self._leave_region() if self._entered else self.outputs
        return _cast(output, target)

    @_disable_dynamo
    def _leave_region(self) -> torch.dtype | str | None:
        thread = threading.get_ident()
        if not (stack := self._entered.get(thread)):
            return self.outputs
        region, first = stack.pop()
        if not stack:
            del self._entered[thread]
        if region is not None:
            region.__exit__(None, None, None)
        return first if self.outputs == "input" else self.outputs


def _cast(value: T, target: torch.dtype | str | None) -> T:
    return cast_floating(value, target) if isinstance(target, torch.dtype) else value


def _explain(error: BaseException | None, policy: Policy) -> None:
    """Add to torch's error about two dtypes where, under a policy that stores weights low, the second comes from."""
    if not isinstance(error, RuntimeError | ValueError) or not any(words in str(error) for words in _TWO_DTYPES):
        return
    dtype = dtype_name(policy.param_dtype)
    note = message(
        f"mezzo: {policy.level} stores this model's weights in {dtype}, and torch computes nothing from two dtypes",
        why="a float32 tensor made inside the model, as by x.float(), meets them as they are; "
        "torch.autocast(enabled=False) widens no weight",
        write="policy.keep_fp32(modules=[…]) for the modules that are to compute in float32; or x.to(weight.dtype)",
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
