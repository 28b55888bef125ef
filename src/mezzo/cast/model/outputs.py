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
    """Return a model's outputs, cast.

    An output that another one was computed from stays the same object: a copy would not be in the other's graph, so
    that ``autograd.grad(loss, features)`` would raise, and ``features.retain_grad()`` would have no effect. One of 16
    bits is read in FP32 all the same: see :class:`ReadInFP32`.

    Args:
        output: Tensors in nested containers.
        dtype: What floating ones are cast to.

    **Cost**: where several outputs have a graph, and one of them would be cast, less than 1 µs for each node that is
    younger than the oldest of these.
    """
    if isinstance(output, Tensor) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return cast_floating(output, dtype)
    with DisableTorchFunction():  # a region's mode is asked for each attribute that is read, too
        used = _made_use_of([tensor for tensor in tensors(output) if tensor.requires_grad], dtype)
        for tensor in used:
            if dtype == torch.float32 and tensor.dtype in LOW:
                tensor.__class__ = ReadInFP32
    return cast_floating(output, dtype, used)


def _made_use_of(outputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs that would be cast, and that another output was computed from."""
    cast = [
        output for output in outputs if type(output) is Tensor and output.dtype != dtype and output.dtype in CASTABLE
    ]
    if not cast or len({*map(id, outputs)}) < 2 or is_transformed():
        return []
    # A node is made after those that it leads to; leaves, which may be of any age, have the highest number.
    edges = {(edge.node, edge.output_nr): output for output in cast for edge in [get_gradient_edge(output)]}
    oldest = min(0 if output.is_leaf else number_of(output.grad_fn) for output in cast)
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, used = {*nodes}, list[Tensor]()
    while nodes and edges:
        for edge in nodes.pop().next_functions:
            if edge in edges:
                used.append(edges.pop(edge))
            if (node := edge[0]) is not None and node not in seen and number_of(node) >= oldest:
                seen.add(node)
                nodes.append(node)
    return used


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
    read = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, ReadInFP32)]
    for tensor in read:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    try:
        results = func(*args, **kwargs)
    finally:
        for tensor in read:
            tensor.__class__ = ReadInFP32
    if func is not torch.autograd.grad:
        return results
    by = kwargs["inputs"] if "inputs" in kwargs else args[1]
    pairs = zip(results, [by] if isinstance(by, Tensor) else by, strict=False)  # an edge may be alone, too
    return tuple([_in_fp32(tensor) if isinstance(one, ReadInFP32) else tensor for tensor, one in pairs])


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
    """Cast a model's outputs: a forward hook, and a pre-hook.

    An output that comes back as an input is low again: a cache of keys and values, which ``generate`` passes on.

    Args:
        dtype: What floating outputs are cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # The original of each output that was cast without gradients, and the output's version then.
        self._given: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> Any:
        return GivesOut, (self.dtype,)

    @compiled_inside_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Replace inputs that were outputs of an earlier call by the original tensors."""
        if torch.compiler.is_compiling() or not any(tensor in self._given for tensor in tensors((args, kwargs))):
            return None
        before: tuple[Any, Any] = mapped((args, kwargs), self._as_it_was)
        return before

    def _as_it_was(self, tensor: Tensor) -> Any:
        original, version = self._given.get(tensor, (tensor, _version(tensor)))
        return original if version == _version(tensor) else tensor

    @compiled_inside_alone
    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, cast."""
        return self.widen(output)

    def widen(self, output: Any) -> Any:
        """Return the output, cast; remember the originals."""
        widened = given_out(output, self.dtype)
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            for original, returned in zip(tensors(output), tensors(widened), strict=True):
                if returned is not original:
                    self._given[returned] = original, _version(returned)
        return widened


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
