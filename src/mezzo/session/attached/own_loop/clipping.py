"""Clipping functions of torch's, which see gradients unscaled, and masters' where there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from mezzo.session.attached.own_loop.bound import Bound
from mezzo.session.session import MixedPrecision
from mezzo.session.settings import core_of

__all__ = ["Clipping"]


class Clipping:
    """Unscale gradients of a session before torch clips them or takes their norm.

    ``clip_grad_norm_``, ``clip_grad_value_``, ``get_total_norm`` and ``clip_grads_with_norm_`` of ``torch.nn.utils``,
    by whatever name a program has imported them, and whenever. Parameters and their masters have one gradient then.

    Args:
        amp: The session.
    """

    def __init__(self, amp: MixedPrecision) -> None:
        self._amp, self._core = amp, core_of(amp)
        self._runs = False

    def bind(self, bound: Bound) -> None:
        """Have torch's functions ask for it.

        Args:
            bound: What binds them.
        """
        for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
            bound.inside(clip_grad, name, self._clip)
        bound.inside(clip_grad, "_get_total_norm", self._total_norm)

    def _clip(self, plain: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rests():
            return plain(parameters, *args, **kwargs)
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._unscale(params)
        self._runs = True
        try:
            return plain(params or parameters, *args, **kwargs)  # torch warns of an empty generator
        finally:
            self._runs = False

    def _total_norm(self, plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rests():
            return plain(tensors, *args, **kwargs)
        return plain(self._unscaled([tensors] if isinstance(tensors, Tensor) else list(tensors)), *args, **kwargs)

    def _rests(self) -> bool:
        """Whether nothing is left to unscale: the session is closed, or it is about what was unscaled just now."""
        return self._runs or self._core.is_closed or not any(group.window for group in self._core.groups)

    def _unscale(self, params: list[Tensor]) -> None:
        """Unscale the gradients of parameters, or of masters, and of all that belongs to the same optimizer.

        Args:
            params: Those that are about to be clipped; others than the session's are left alone.
        """
        wanted = set(map(id, params))
        for group in self._core.groups:
            if group.window is not None and any(not wanted.isdisjoint(map(id, pair)) for pair in group.with_leaves()):
                self._amp.unscale_(group.optimizers)
                group.window.is_found = True  # an infinity that is clipped to a number has overflowed all the same

    def _unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return gradients as they are once they are unscaled.

        Args:
            gradients: What parameters have as ``.grad``, and any other tensors, which are returned as they are.
        """
        pairs = ((leaf, p) for group in self._core.groups if group.window for p, leaf in group.with_leaves())
        of = {id(leaf.grad): leaf for leaf, _ in pairs if leaf.grad is not None}
        found = [of.get(id(gradient)) for gradient in gradients]
        self._unscale([leaf for leaf in found if leaf is not None])
        return [
            gradient if leaf is None or leaf.grad is None else leaf.grad
            for gradient, leaf in zip(gradients, found, strict=True)
        ]
