"""Activation checkpoints: a region's differences once more, when torch recomputes a piece of the forward pass.

``torch.utils.checkpoint`` restores torch's autocast around a recomputation and knows nothing of function modes. A
region therefore leaves a note where torch will look: on the checkpoint's own record of what to run again. No function
of torch's is replaced. ``tests/cast/test_recompute.py`` notices when torch keeps its records elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mezzo.cast.differences import Differences
from mezzo.cast.weight_casts import WeightCasts
from mezzo.errors import message

__all__ = ["SWITCHES_GRADIENTS", "Again", "RecomputedMode", "saved_tensor_hooks", "shadowed"]

logger = logging.getLogger(__name__)

#: The hooks that pack and unpack what autograd saves, the innermost pair; called with False, none while torch traces.
saved_tensor_hooks: Final[Callable[[bool], tuple[Any, Any] | None]] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
#: What a reentrant checkpoint calls before it runs its function: the last of its own steps that a mode sees.
SWITCHES_GRADIENTS: Final = torch._C._set_grad_enabled

_MODULE: Final = "torch.utils.checkpoint"
_PACK: Final = "_checkpoint_hook.__init__.<locals>.pack_hook"
_REENTRANT: Final = "CheckpointFunction.forward"


class RecomputedMode(TorchFunctionMode):
    """A function mode that acts again where torch recomputes what has run under it.

    Attributes:
        per_device: What it does on each device.
        casts: Where its weight casts are kept.
        shadows: How many regions inside this one are active.
        holds_inside: Whether the region holds inside prepared models too.
    """

    per_device: dict[str, Differences]
    casts: WeightCasts
    shadows: int
    holds_inside: bool = False

    def __init__(self) -> None:
        super().__init__()
        hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks(False)
        self._entered_under = None if hooks is None else hooks[0]  # a checkpoint's, if the region begins inside one

    def outlive(self) -> None:
        """Have the checkpoints without reentry that run inside the region recomputed under its differences.

        To be called for each op that the region treats differently while autograd's hooks are not the default. All
        checkpoints that the op lies in and that began inside the region are met: each recomputes those within.
        """
        inner: list[tuple[Any, Any]] = []
        try:
            while (hooks := saved_tensor_hooks(False)) is not None and hooks[0] is not self._entered_under:
                record = _record_of(hooks[0])
                if record is not None:
                    if getattr(record.recompute_fn, "func", None) is _run:
                        break  # noted already, and so are those around it
                    record.recompute_fn = functools.partial(_run, Again(self), record.recompute_fn)
                torch._C._autograd._pop_saved_tensors_default_hooks()
                inner.append(hooks)
        finally:
            for hooks in reversed(inner):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    def outlive_reentrant(self) -> None:
        """Do the same for a checkpoint with reentry, if it is one that is about to switch gradients off."""
        frame = sys._getframe(1)
        while frame.f_code.co_qualname != _REENTRANT or frame.f_globals.get("__name__") != _MODULE:
            is_mode_s = frame.f_code.co_name == "__torch_function__" or _is_ours(frame)
            if frame.f_back is None or not (is_mode_s or frame.f_code.co_name in ("__init__", "__enter__")):
                return  # the torch.no_grad() of other code
            frame = frame.f_back
        record: Any = frame.f_locals.get("ctx")
        if not callable(getattr(record, "run_function", None)):
            _report_unknown_torch()
        else:
            record.run_function = functools.partial(_run, Again(self), record.run_function)


def _is_ours(frame: FrameType) -> bool:
    """Whether this package's code runs in a frame: between torch.no_grad and a mode that is the modes' own."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == __name__.partition(".")[0]


class Again(contextlib.AbstractContextManager[None]):
    """The differences of a region, in the place of those that are active; may be entered often."""

    def __init__(self, mode: RecomputedMode) -> None:
        # The mode itself belongs to the region, and must not live longer.
        kind: Callable[..., RecomputedMode] = type(mode)
        per_device = list(mode.per_device.values())
        self._make = functools.partial(kind, per_device, mode.casts, holds_inside=mode.holds_inside)
        self._casts = mode.casts
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(shadowed())
            stack.enter_context(self._casts.region(continues=True))
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


@contextlib.contextmanager
def shadowed() -> Iterator[list[RecomputedMode]]:
    """Silence the regions around this one, and give their modes."""
    active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    outer = [mode for mode in active if isinstance(mode, RecomputedMode)]
    for mode in outer:
        mode.shadows += 1
    try:
        yield outer
    finally:
        for mode in outer:
            mode.shadows -= 1


def _run(again: Again, function: Callable[..., Any], *args: Any) -> Any:
    with again:
        return function(*args)


def _record_of(pack: Any) -> Any:
    """Return torch's record of the checkpoint whose hook packs saved tensors; ``None`` for other hooks."""
    if getattr(pack, "__module__", "") != _MODULE or getattr(pack, "__qualname__", "") != _PACK:
        return None
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    record = held["frame"].cell_contents if "frame" in held else None
    if callable(getattr(record, "recompute_fn", None)):
        return record
    _report_unknown_torch()
    return None


@functools.cache
def _report_unknown_torch() -> None:
    """Say once that this torch keeps what to recompute in a place that is not known here."""
    text = message(
        "activation checkpoints will not see the policy in a bare loss.backward()",
        where=f"torch.utils.checkpoint of torch {torch.__version__}",
        why="it does not keep what to run again where the versions known here do",
        write="amp.backward(loss); or\ncheckpoint(fn, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)",
    )
    logger.warning("%s", text)
