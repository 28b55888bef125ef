"""What happens at a module's boundary: the pair of hooks around it, and casting through nested containers."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from mezzo.cast.device import Kinds
from mezzo.cast.model.entrance import Entrance
from mezzo.cast.notes import WATCHERS, during
from mezzo.cast.region import acting_keys, autocast
from mezzo.errors import UnsupportedError, message
from mezzo.policy import Policy, Rule, Treatment
from mezzo.tensors import CASTABLE, dtype_name

__all__ = ["Boundary", "WideNorm", "cast_floating"]


#: How torch's kernels say that their operands differ in dtype.
_TWO_DTYPES: Final = ("same dtype", "should be the same", "mixed dtype", "expected scalar type", "match weight dtype")


class Boundary:
    """The pair of hooks around one module: cast, enter its region; leave it, cast back.

    Between calls it holds no region, so that a prepared model can be copied and pickled.
    """

    def __init__(
        self,
        policy: Policy,
        path: str,
        params: Iterable[tuple[Tensor, Treatment]],
        kinds: Kinds,
        *,
        inputs: torch.dtype | str | None = None,
        outputs: torch.dtype | str | None = None,
        rule: Rule | None = None,
        entrance: Entrance | None = None,
    ) -> None:
        self.policy, self.path, self.params, self.kinds = policy, path, params, kinds
        self.inputs, self.outputs, self.rule, self.entrance = inputs, outputs, rule, entrance
        # One stack for each thread, since threads may run one model at the same time.
        self._entered: defaultdict[int, list[tuple[autocast | None, torch.dtype | None]]] = defaultdict(list)
        self._needs: dict[tuple[str, ...], tuple[bool, tuple[str, ...]]] = {}
        self._needs_on(kinds())

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

    def region(self) -> autocast:
        """Return a new region for this module."""
        return autocast.inside(self.policy, self.path, self.pinned(), self.kinds())

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
            return (
                cast_floating((args, kwargs), self.inputs) if isinstance(self.inputs, torch.dtype) else (args, kwargs)
            )
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
        dtypes = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in CASTABLE]
        region = self.region()
        region.__enter__()
        self._entered[threading.get_ident()].append((region, dtypes[0] if dtypes else None))
        target = self.inputs
        if target == "widest" and dtypes:
            target = torch.float32 if len(set(dtypes)) > 1 else dtypes[0]
        return (args, kwargs) if not isinstance(target, torch.dtype) else cast_floating((args, kwargs), target)

    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Leave the region, after an exception too, and cast the outputs: a forward hook."""
        if self.entrance is not None:
            self.entrance.leave(self)
        if output is None and isinstance(self.inputs, torch.dtype) and not torch.compiler.is_compiling():
            _explain(sys.exception(), self.policy)
        # None was entered in a graph, or where an earlier pre-hook raised.
        target = self._leave_region() if self._entered else self.outputs
        return cast_floating(output, target) if isinstance(target, torch.dtype) else output

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


class WideNorm(Boundary):
    """Batch norm with low-precision weights: kernels want weights in the dtype of the FP32 statistics."""

    def region(self) -> autocast:
        """Return a new region, in which batch norm gets wide weights."""
        return super().region().with_wide_norm()


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in nested containers; other leaves stay the same objects.

    Args:
        value: Tensors in tuples, lists, dicts, named tuples, dataclasses, mappings and packed sequences, nested.
        dtype: The target. float64, complex, integer and bool tensors are never cast.

    Returns:
        The same structure, of the same types.
    """
    # One cast for a tensor that stands in several places, as in attention(x, x, x). Found by `is`: on an id() compiled
    # code would depend, and be compiled again for every new tensor.
    made: list[tuple[Tensor, Tensor]] = []

    def cast_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in CASTABLE or leaf.dtype == dtype:
            return _cast_leaf(leaf, dtype)
        for seen, cast in made:
            if seen is leaf:
                return cast
        made.append((leaf, _to(leaf, dtype)))
        return made[-1][1]

    return pytree.tree_map(cast_leaf, value)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, PackedSequence):
        return _to(leaf, dtype) if leaf.data.dtype in CASTABLE else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        cast = {name: cast_floating(getattr(leaf, name), dtype) for name in names if hasattr(leaf, name)}
        changed = {name: new for name, new in cast.items() if new is not getattr(leaf, name)}
        if not changed:
            return leaf
        out = copy.copy(leaf)
        for name, new in changed.items():
            # Frozen dataclasses of the user's own cannot be assigned to, nor always be constructed anew.
            object.__setattr__(out, name, new)
        return out
    if isinstance(leaf, MutableMapping):
        mapping = copy.copy(leaf)
        for key, item in leaf.items():
            mapping[key] = cast_floating(item, dtype)
        return mapping
    return leaf
