"""Which device types are here, and which of them a region covers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.errors import PolicyError, UnsupportedError, nearest

__all__ = ["Kinds", "default_kinds", "devices", "require_device"]

#: Device types that torch knows and that may be absent, for telling a typing error from an absence.
KNOWN_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


def devices() -> list[str]:
    """List the device types that are present: the CPU and the current accelerator.

    Returns:
        Names as in ``torch.device``, the CPU first.

    Cost:
        None; no device is initialised.

    Example:
        >>> devices()[0]
        'cpu'
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def default_kinds() -> tuple[str, ...]:
    """Return the device types of a region that belongs to no model: the accelerator, or where there is none the CPU."""
    return (devices()[-1],)


class Kinds:
    """The device types that the regions of a model cover: those of its tensors, wherever these are by now.

    A model without tensors is taken to be where new ones would be: on the accelerator, if there is one.

    Args:
        tensors: The model's, parameters before buffers: parameters stay the same objects when they move.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        examples: dict[str, Tensor] = {}
        for tensor in tensors:
            examples.setdefault(tensor.device.type, tensor)
        self._examples = list(examples.values())
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self) -> tuple[str, ...]:
        """Return them, the CPU first."""
        now = tuple([example.device.type for example in self._examples])
        if now not in self._known:
            self._known[now] = tuple(kind for kind in devices() if kind in now) or default_kinds()
        return self._known[now]


def require_device(device_type: str) -> None:
    """Refuse a device type that is absent, or that there is none of."""
    present = devices()
    if device_type in present:
        return
    if device_type in KNOWN_DEVICE_TYPES:
        raise UnsupportedError(
            f"there is no {device_type} device here",
            why=f"torch {torch.__version__} finds {', '.join(present)}",
            write=f'device_type="{present[-1]}"',
        )
    vocabulary = dict.fromkeys((*KNOWN_DEVICE_TYPES, *present))
    raise PolicyError(f"unknown device type {device_type!r}", why=nearest(device_type, vocabulary))
