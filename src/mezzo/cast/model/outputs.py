"""What a model gives out: floating tensors in FP32, and those that another output was made of as they are."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.backward import number_of, runs_backward
from mezzo.cast.casts import cast_floating
from mezzo.compiling import compiled_inside_alone
from mezzo.dispatch import DisableTorchFunction, is_transformed
from mezzo.tensors import CASTABLE, LOW, mapped, tensors


def given_out(output: Any, dtype: torch.dtype) -> Any:
    """Cast what a model gives out.

    A tensor that another output was made of stays the tensor that it is: of a copy the other's graph would know
    nothing, so that ``autograd.grad(loss, features)`` would raise, and ``features.retain_grad()`` would find nothing.
    One of 16 bits is read in FP32 all the same: see :class:`ReadInFP32`.

    Args:
        output: Tensors in nested containers.
        dtype: What floating ones are cast to.

    **Cost**: where several outputs have a graph, and one of them would be cast, less than 1 µs for each node that is
    younger than the oldest of these.
    """
    if isinstance(output, Tensor) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return cast_floating(output, dtype)
    with DisableTorchFunction():  # a region's mode is asked for each attribute that is read, too
        kept = _made_use_of([each for each in tensors(output) if each.requires_grad], dtype)
        for each in kept:
            if dtype == torch.float32 and each.dtype in LOW:
                each.__class__ = ReadInFP32
    return cast_floating(output, dtype, kept)


def _made_use_of(outputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs that would be cast, and stand in the graph of another one."""
    cast = [each for each in outputs if type(each) is Tensor and each.dtype != dtype and each.dtype in CASTABLE]
    if not cast or len({*map(id, outputs)}) < 2 or is_transformed():
        return []
    # A node is made after those that it leads to; leaves, which may be of any age, have the highest number.
    edges = {(edge.node, edge.output_nr): each for each in cast for edge in [get_gradient_edge(each)]}
    oldest = min(0 if each.is_leaf else number_of(each.grad_fn) for each in cast)
    nodes = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen, kept = {*nodes}, list[Tensor]()
    while nodes and edges:
        for edge in nodes.pop().next_functions:
            if edge in edges:
                kept.append(edges.pop(edge))
            if (node := edge[0]) is not None and node not in seen and number_of(node) >= oldest:
                seen.add(node)
                nodes.append(node)
    return kept


class ReadInFP32(Tensor):
    """A 16-bit tensor of a graph that says ``float32``: each operation that reads it is given an FP32 copy.

    So the features and the logits that a model gives out, beside what it has made of them, are FP32 to every reader,
    and lie in memory once, as they are. Gradients of it are read in FP32, too. What asks about the graph, writes in
    place or runs inside of a backward pass meets the tensor itself.
    """

    _lent: Tensor  # the copy whose address was asked for

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the tensor itself, or on FP32 copies."""
        kwargs = kwargs or {}
        if func in _PASSES:  # in which functions are called that are to be seen
            return _differentiated(func, args, kwargs)
        with DisableTorchFunction():
            if runs_backward() or func.__name__ in _OF_GRAPH:
                return func(*args, **kwargs)
            if func.__name__ in ("__get__", "__set__", "__delete__"):
                return torch.float32 if func == _DTYPE else _in_fp32(func(*args, **kwargs))
            read, named = mapped((args, kwargs), Tensor.float, ReadInFP32)
            if _WRITES(func.__name__):
                return func(args[0], *read[1:], **named)
        if func.__name__ == "data_ptr":
            args[0]._lent = read[0]
        return func(*read, **named)


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a backward pass, in which a tensor is itself; gradients that are returned for it are in FP32."""
    here = [each for each in tensors((args, kwargs)) if isinstance(each, ReadInFP32)]
    for each in here:
        each.__class__ = Tensor  # type: ignore[assignment]
    try:
        found = func(*args, **kwargs)
    finally:
        for each in here:
            each.__class__ = ReadInFP32
    if func is not torch.autograd.grad:
        return found
    by = kwargs["inputs"] if "inputs" in kwargs else args[1]
    pairs = zip(found, [by] if isinstance(by, Tensor) else by, strict=False)  # an edge may be alone, too
    return tuple([_in_fp32(each) if isinstance(one, ReadInFP32) else each for each, one in pairs])


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


_PASSES: Final = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_DTYPE: Final = Tensor.dtype.__get__  # type: ignore[attr-defined]
#: What asks about a tensor's graph or its form, and reads no number.
_OF_GRAPH: Final = frozenset(
    "register_hook requires_grad_ retain_grad dim size stride numel nelement is_contiguous is_floating_point "
    "__len__ __hash__".split()
)
#: Whether a function writes into its first argument, by its name.
_WRITES: Final = re.compile(
    r"(?!__).*_|__(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
).fullmatch


class GivesOut:
    """Cast what comes out of a model: a forward hook, and one before.

    What was low and comes back is low again: a cache of keys and values that ``generate`` hands from call to call.

    Args:
        dtype: What floating outputs are cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # By what was given out without gradients: what it was, and its version then.
        self._given: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> Any:
        return GivesOut, (self.dtype,)

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Put what was given out back to what it was."""
        if torch.compiler.is_compiling() or not any(each in self._given for each in tensors((args, kwargs))):
            return None
        before: tuple[Any, Any] = mapped((args, kwargs), self._as_it_was)
        return before

    def _as_it_was(self, each: Tensor) -> Any:
        low, version = self._given.get(each, (each, _version(each)))
        return low if version == _version(each) else each

    @compiled_inside_alone
    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return what came out, cast."""
        return self.widen(output)

    def widen(self, output: Any) -> Any:
        """Cast what is given out, and remember what it was."""
        wide = given_out(output, self.dtype)
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            for low, given in zip(tensors(output), tensors(wide), strict=True):
                if given is not low:
                    self._given[given] = low, _version(given)
        return wide


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
