"""``GradScaler`` with torch's signature, over mezzo's checks, steps and scales."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import PolicyError, StateError, shown
from mezzo.scale import LossScale
from mezzo.scale.words import TORCHS_RULES
from mezzo.session.attached.calls import CallScaler

__all__ = ["GradScaler"]

logger = logging.getLogger(__name__)


class GradScaler(CallScaler, torch.amp.GradScaler):
    """``torch.amp.GradScaler``, for which it also counts as an instance, without its faults.

    The scale follows torch's rules step by step, but for these: it stops at 2^-126 and never becomes 0; gradients that
    become infinite by unscaling count as an overflow, and so do those whose norm, scaled, is beyond FP32 (a value above
    1.8e19 is enough); where ``torch.distributed`` is initialised, its ranks take the
    same steps, so that all of them call ``step`` and ``update`` alike;
    ``step(optimizer, closure)`` evaluates with unscaled gradients, each evaluation checked, and puts everything back if
    one overflows; and :attr:`last_step` says whether the last step was skipped. Gradients are unscaled by the scale
    that ``scale`` multiplied by, also when ``update`` has moved it since.

    Args:
        device: The device type, as for torch: ``"cuda"`` on a machine without disables the scaler, and the log says so.
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` updates without an overflow.
        backoff_factor: What it is multiplied by after one with.
        growth_interval: See there.
        enabled: ``False`` for a scaler that scales nothing, and steps always.

    Raises:
        PolicyError: A number that is no scale's.

    **Cost**: that of :meth:`mezzo.MixedPrecision.step`: no host sync with torch's fused optimizers and mezzo's.

    Example:
        >>> import torch
        >>> from mezzo.compat.torch import GradScaler
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> bool(scaler.last_step.skipped), scaler.get_scale()
        (False, 65536.0)
    """

    _masters = (
        "model.float(), and autocast(device_type, torch.float16) around its forward pass;\n"
        'or mezzo.MixedPrecision(model, optimizer, "O2"), which keeps FP32 masters of a model given in FP32'
    )

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._device = _type_of(device)
        if enabled and self._device == "cuda" and not torch.cuda.is_available():
            logger.warning("GradScaler is disabled: CUDA is not available")
            enabled = False
        given = {"growth": growth_factor, "backoff": backoff_factor, "interval": growth_interval}
        with _in_torchs_words():  # a disabled scaler follows none
            rules = LossScale.like("torch", **({"init": init_scale, **given} if enabled else {}))
        super().__init__(rules, enabled=enabled)

    def get_scale(self) -> float:
        """Return the scale, 1.0 of a disabled scaler; waits for the device."""
        return float(self._held.state.scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return what the scale grows by."""
        return self._config.growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by another factor from now on."""
        with _in_torchs_words():
            self._follow(growth=new_factor)

    def get_backoff_factor(self) -> float:
        """Return what the scale backs off by."""
        return self._config.backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by another factor from now on."""
        with _in_torchs_words():
            self._follow(backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Return after how many updates without an overflow the scale grows."""
        return self._config.interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after another number of updates from now on."""
        with _in_torchs_words():
            self._follow(interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.amp.GradScaler.load_state_dict`` loads; empty for a disabled scaler. A host sync."""
        if not self._enabled:
            return {}
        state = self._held.state_dict()
        rules = {theirs: getattr(self._config, ours) for theirs, ours in TORCHS_RULES.items()}
        return {"scale": state["scale"], **rules, "_growth_tracker": state["clean_steps"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``GradScaler``'s state, mezzo's or torch's, rules included; a disabled scaler loads nothing.

        Raises:
            StateError: Not such a state, or a disabled scaler's. Nothing was loaded.
            PolicyError: Rules that no scale follows. Nothing was loaded.
        """
        if not self._enabled:
            return
        self._require(state_dict, "scale", *TORCHS_RULES, "_growth_tracker")
        before = self._config
        with _in_torchs_words():
            self._follow(**{ours: state_dict[theirs] for theirs, ours in TORCHS_RULES.items()})
        try:
            self._load(state_dict["scale"], state_dict["_growth_tracker"])
        except StateError:
            self._held.config = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with, between two iterations.

        Raises:
            StateError: Gradients were checked since the last ``update``, which a copy would not know of.
        """
        if self._known:
            raise StateError("a GradScaler is copied in the middle of an iteration", write="after scaler.update()")
        return {"device": self._device, "enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a copy."""
        CallScaler.__init__(self, LossScale.like("torch"), enabled=state["enabled"])
        self._device = state["device"]
        if state["state"]:
            self.load_state_dict(state["state"])

    # What libraries ask of torch's scaler besides -------------------------------------------------------------

    def _get_scale_async(self) -> Tensor | None:
        return self._held.state.scale if self._enabled else None

    def _get_growth_tracker(self) -> int:
        return int(self._held.state.clean_steps) if self._enabled else 0


def _type_of(device: Any) -> str:
    try:
        return torch.device(str(device)).type
    except RuntimeError:
        what, why = f"the device is {shown(device)}", "the first argument of GradScaler is a device type"
        raise PolicyError(what, why=why, write='GradScaler("cuda", init_scale=…)') from None


@contextmanager
def _in_torchs_words() -> Iterator[None]:
    """Let errors about rules name torch's arguments."""
    try:
        yield
    except PolicyError as problem:
        text = str(problem).replace("LossScale", "GradScaler")
        for theirs, ours in {**TORCHS_RULES, "init_scale": "init"}.items():
            text = re.sub(rf"\b{ours}(?==| is )", theirs, text)
        raise PolicyError(text) from None
