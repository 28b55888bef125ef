"""``torch.autocast`` and ``GradScaler`` of a script's own: what they mean where a session casts and scales."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.script.gathering import Gathering
from mezzo.script.program import Seams, is_script
from mezzo.script.report import ScriptReport

__all__ = ["replace_amp"]


def replace_amp(gathering: Gathering, report: ScriptReport, seams: Seams) -> None:
    """Let a script's regions be the session's, and its scalers scale nothing, since the session does.

    What is switched off by ``enabled=False``, or asked for by torch and mezzo, is torch's own.

    Args:
        gathering: Has the session.
        report: What is written down.
        seams: Replaces names of torch.
    """
    for place in (torch, torch.amp, torch.cuda.amp, torch.cpu.amp):
        for name, made in (("autocast", _autocast), ("GradScaler", _grad_scaler)):
            if name in vars(place):
                seams.replace(place, name, made(vars(place)[name], gathering, report))


def _autocast(plain: type[torch.autocast], gathering: Gathering, report: ScriptReport) -> type:
    signature = inspect.signature(plain)

    class ScriptAutocast(contextlib.ContextDecorator):
        """The session's region, wherever a script enters its own."""

        __doc__ = plain.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if is_script() and given.get("enabled", True):
                return super().__new__(cls)
            return plain(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._entered: list[Any] = []

        def __enter__(self) -> None:
            report.intercepted["torch.autocast"] += 1
            region = gathering.region()
            region.__enter__()
            self._entered.append(region)

        def __exit__(self, *error: Any) -> None:
            self._entered.pop().__exit__(*error)

    return ScriptAutocast


def _grad_scaler(plain: type[torch.amp.GradScaler], gathering: Gathering, report: ScriptReport) -> type:
    class ScriptScaler(plain):  # type: ignore[misc, valid-type]
        """A scaler that scales nothing: the session's backward passes and steps do."""

        __doc__ = plain.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls) if is_script() else plain(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings(record=True) as caught:
                super().__init__(*args, **kwargs)
            for each in caught:  # of the script's line, and not of this one
                warnings.warn(each.message, each.category, stacklevel=2)
            if self.is_enabled():
                report.intercepted["GradScaler"] += 1

        def scale(self, outputs: Any) -> Any:
            return outputs

        def unscale_(self, optimizer: Optimizer) -> None:
            """Do nothing: gradients are FP32 and unscaled when a backward pass has ended."""

        def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        def update(self, new_scale: float | Tensor | None = None) -> None:
            pass

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if self.is_enabled():
                gathering.resume(state_dict)

        # What torch's own methods ask for; of its own it has what it begins with.
        def _get_scale_async(self) -> Tensor | None:
            return None if gathering.amp is None else gathering.amp.loss_scale

        def _get_growth_tracker(self) -> int:
            counted: int = super()._get_growth_tracker()
            return counted if gathering.amp is None else gathering.amp.clean_steps()

    return ScriptScaler
