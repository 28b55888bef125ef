"""Casts: of what a program passes around, in containers, and of weights, once in a region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from mezzo.backward import node_of
from mezzo.cast.notes import WATCHERS, during
from mezzo.compiling import is_scripted
from mezzo.dispatch import is_transformed, num_dispatch_modes, unseen_by_checkpoints
from mezzo.tensors import CASTABLE, HOLDS_NONE, mapped, mark
from mezzo.weights.halves import Halves

# Casting what a user passes around: tensors in nested containers.

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


def widest(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype that holds what all of these tensors do; ``None`` for none."""
    dtypes = {tensor.dtype for tensor in tensors}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def any_off(values: Iterable[Any], dtypes: Container[torch.dtype]) -> bool:
    """Whether there is a tensor in one of some dtypes, or what may hold tensors: of that it is not known."""
    for value in values:
        if value.dtype in dtypes if isinstance(value, Tensor) else type(value) not in HOLDS_NONE:
            return True
    return False


def cast_floating(value: T, dtype: torch.dtype, uncast: Sequence[Tensor] = ()) -> T:
    """Cast every floating tensor in nested containers, but float64; other leaves stay the same objects.

    Args:
        value: Tensors in nested containers, as for :func:`mezzo.tensors.tensors`.
        dtype: The target.
        uncast: Tensors that stay the same objects, too.

    Returns:
        The same structure, of the same types.
    """
    only: Any = value
    if type(only) is Tensor:
        is_off = only.dtype != dtype and only.dtype in CASTABLE and not any(tensor is only for tensor in uncast)
        return cast("T", _to(only, dtype)) if is_off else value
    # One cast for a tensor that stands in several places, as in attention(x, x, x). Found by `is`: on an id() compiled
    # code would depend, and be compiled again for every new tensor.
    pairs: list[tuple[Any, Any]] = [(tensor, tensor) for tensor in uncast]

    def changed(tensor: Any) -> Any:
        if tensor.dtype == dtype or tensor.dtype not in CASTABLE:
            return tensor
        for original, casted in pairs:
            if original is tensor:
                return casted
        pairs.append((tensor, _to(tensor, dtype)))
        return pairs[-1][1]

    out: T = mapped(value, changed)
    return out


def _to(value: Tensor, dtype: torch.dtype) -> Tensor:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)


# The cache of weight casts: in one region a weight is cast once, however often it is used.


class _Cast(NamedTuple):
    param: nn.Parameter  # while it and the alias are held, nothing else can be given this id and this address
    alias: Tensor
    mark: tuple[int, int]
    cast: Tensor


class _FurtherUse(torch.autograd.Function):
    """A cast that exists already, connected to its parameter once more.

    The engine itself casts a gradient to the dtype of what it belongs to, and only then adds it to others. There is no
    ``setup_context``, which would cost more than all the rest: under ``torch.func`` nothing is cached.
    """

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, cached: _Cast) -> Tensor:
        return cached.cast.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def is_further_use(node: Any) -> bool:
    """Whether an autograd node connects a cast with its parameter once more: its gradient is the parameter's."""
    return isinstance(node, node_of(_FurtherUse))


class WeightCasts:
    """Casts of parameters, as long as the outermost region lasts: each makes its own, for those inside it as well.

    An entry serves as long as the parameter has not been written: its version and its memory are compared at each use.
    Writes through ``.data`` leave no such trace; they are seen by the next region, as with torch's own cache, which is
    as long and compares nothing.

    Casts made without gradients never serve training, nor the other way round, and nothing is kept of weights that are
    frozen, in inference mode, under ``torch.func``, in forward-mode AD, or while torch.compile or torch.jit traces.

    No cast is an operation inside of a selective checkpoint (``create_selective_checkpoint_contexts``), which compares
    those of its body with those of the recomputation: a weight that was cast before has none in the one of both.

    Each use has an autograd node of its own: the gradients of a weight that is used several times meet in the
    parameter's dtype, bit for bit as those of several casts would. Eager, compiled and recomputed code therefore give
    the same bits, as long as torch adds in the same order. It does not where ``.grad`` is added to in the middle of a
    backward pass, by a reentrant checkpoint around some of three or more uses, or where only some of them stand in
    one compiled graph: each such part adds its own first, in plain FP32 training too.

    **Cost**: 2 bytes for each weight of a low-precision op, from its first use in a region to the region's end. Each
    further use is a Python autograd function: some 10 µs forward and backward together, beside torch's own node for
    the first.

    Args:
        keeps: Whether casts are kept: not for what a backward pass recomputes, which may be long.

    Attributes:
        keeps: The same.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._casts: dict[tuple[int, torch.dtype, bool], _Cast] = {}

    def cast(self, param: nn.Parameter, dtype: torch.dtype, *, is_plain: bool = False) -> Tensor:
        """Return the parameter in another dtype, connected to it for gradients.

        Args:
            param: A floating parameter.
            dtype: The target; the parameter itself is returned where it is its own.
            is_plain: Whether it is known that nothing traces, transforms or dispatches this call.
        """
        if param.dtype == dtype:
            return param
        if not is_plain and torch.compiler.is_compiling():
            return param.to(dtype)
        # Asking whether a plain Parameter is one of halves is a Python call.
        if type(param) is not nn.Parameter and isinstance(param, Halves):  # the cast is there already
            return _unseen(param.low, dtype)
        is_kept = self.keeps and param.requires_grad
        if not is_kept or param.is_inference() or torch.is_inference_mode_enabled():
            return _unseen(param.to, dtype)
        if not is_plain and (is_transformed() or is_scripted()):
            return _unseen(param.to, dtype)
        trains = torch.is_grad_enabled()
        key = id(param), dtype, trains
        cached, now = self._casts.get(key), mark(param)
        if cached is None or cached.mark != now:
            casted = param.to(dtype) if is_plain else _unseen(param.to, dtype)
            self._casts[key] = _Cast(param, param.detach(), now, casted)
            return casted
        return cast(Tensor, _FurtherUse.apply(param, cached)) if trains else cached.cast  # type: ignore[no-untyped-call]


def _unseen(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    """Make a cast of a weight where no selective checkpoint counts it."""
    if not num_dispatch_modes():
        return make(dtype)
    with unseen_by_checkpoints():
        return make(dtype)
