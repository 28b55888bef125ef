"""The cache of weight casts: each weight is cast once, however often and in however many micro-batches it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mezzo.tensors import mark

__all__ = ["WeightCasts", "is_further_use"]


@dataclass(frozen=True, slots=True)
class _Cast:
    param: nn.Parameter  # while it and the alias are held, nothing else can be given this id and this address
    alias: Tensor
    mark: tuple[int, int]
    cast: Tensor
    region: int  # the number of the outermost region it was made in


class _FurtherUse(torch.autograd.Function):
    """A cast that exists already, connected to its parameter once more.

    The engine itself casts a gradient to the dtype of what it belongs to, and only then adds it to others. There is no
    ``setup_context``, which would cost more than all the rest: under ``torch.func`` nothing is cached.
    """

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, found: _Cast) -> Tensor:
        return found.cast.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def is_further_use(node: Any) -> bool:
    """Whether an autograd node connects a cast with its parameter once more: its gradient is the parameter's."""
    return getattr(node, "_forward_cls", None) is _FurtherUse


class WeightCasts:
    """Casts of parameters, until the outermost region that makes them ends, or a session's window does.

    An entry serves as long as the parameter has not been written: its version and its memory are compared at each use.
    Writes through ``.data`` leave no such trace, and programs that swap weights (averages of them, mostly) write so.
    Nothing is therefore kept from one outermost region to the next but what a session's window needs: with
    :attr:`spans_regions`, casts made with gradients on wait at the region's end for the backward pass. Once it has
    come (:meth:`keep`), they serve the other micro-batches until :meth:`clear`; a region that begins before it has
    come makes its own. Casts made without gradients end with the region in any case.

    Casts made without gradients never serve training, nor the other way round, and nothing is kept in inference mode,
    under ``torch.func`` or while torch.compile traces.

    Each use has an autograd node of its own: the gradients of a weight that is used several times meet in the
    parameter's dtype, bit for bit as those of several casts would. Eager, compiled and recomputed code therefore give
    the same bits, as long as torch adds in the same order. It does not where ``.grad`` is added to in the middle of a
    backward pass, by a reentrant checkpoint around some of three or more uses, or where only some of them stand in
    one compiled graph: each such part adds its own first, in plain FP32 training too.

    Attributes:
        spans_regions: Whether a session says when casts for training end, by :meth:`keep` and :meth:`clear`.

    **Cost**: 2 bytes for each weight of a low-precision op, from its first use on. Each further use is a
    Python autograd function: some 10 µs forward and backward together, beside torch's own node for the first.
    """

    def __init__(self) -> None:
        self.spans_regions = False
        self._casts: dict[tuple[int, torch.dtype, bool, bool], _Cast] = {}
        self._inside: list[None] = []  # one for each region that is entered, in whatever thread: appending is atomic
        self._regions = 0  # how many outermost ones there have been
        self._kept = False

    def __len__(self) -> int:
        return len(self._casts)

    @contextmanager
    def region(self, *, continues: bool = False) -> Iterator[None]:
        """Forget, at the end of the outermost region, what must not outlive it.

        Args:
            continues: Whether this is a backward pass or a recomputation, which goes on with the casts of the forward
                pass, and no new region.
        """
        if torch.compiler.is_compiling():  # which keeps no casts, and would guard what is counted here
            yield
            return
        if not self._inside and not continues:
            self._regions += 1
        self._inside.append(None)
        try:
            yield
        finally:
            self._inside.pop()
            if not self._inside:
                self._end()

    def _end(self) -> None:
        self._casts = {key: made for key, made in self._casts.items() if self.spans_regions and key[2]}

    def cast(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the parameter in another dtype, connected to it for gradients.

        Args:
            param: A floating parameter.
            dtype: The target; the parameter itself is returned where it is its own.
        """
        if param.dtype == dtype:
            return param
        if (
            torch.compiler.is_compiling()
            or torch.is_inference_mode_enabled()
            or param.is_inference()
            or torch._C._are_functorch_transforms_active()
        ):
            return param.to(dtype)
        with_gradients = torch.is_grad_enabled()
        trains = with_gradients and param.requires_grad
        key = (id(param), dtype, with_gradients, trains)
        found = self._casts.get(key)
        serves = found is not None and (self._kept or found.region == self._regions) and found.mark == mark(param)
        if found is None or not serves:
            alias, made = param.detach(), param.to(dtype)
            self._casts[key] = _Cast(param, alias, mark(param), made, self._regions)
            return made
        return cast(Tensor, _FurtherUse.apply(param, found)) if trains else found.cast  # type: ignore[no-untyped-call]

    def keep(self) -> None:
        """Let the casts of training serve other regions until :meth:`clear`: the window's first backward pass runs."""
        self._kept = self.spans_regions

    def clear(self) -> None:
        """Forget every cast: the window is over."""
        self._casts.clear()
        self._kept = False
