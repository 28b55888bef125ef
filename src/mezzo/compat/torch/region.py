"""``autocast`` with torch's signature: mezzo's region with torch's own lists."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Final

import torch

from mezzo import cast
from mezzo.errors import PolicyError, nearest, shown

__all__ = ["autocast"]

logger = logging.getLogger(__name__)

_DTYPES: Final = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DEVICES: Final = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia", "xla")


def autocast(
    device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> cast.autocast | torch.autocast:
    """Return the region that ``torch.autocast`` of these arguments is, for ``with`` and as a decorator.

    torch's lists on this device, and nothing else: no mode and no Python for each op where the device computes in the
    format. Where it does not, products are computed in FP32 from rounded operands, as a tensor core does.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device that has an autocast in this torch.
        dtype: float16 or bfloat16; torch's default for the device when omitted. Any other one disables the region, as
            in torch, and so does ``"cuda"`` on a machine without; the log says so.
        enabled: Whether ops are cast inside; ``False`` is for regions within others.
        cache_enabled: Whether torch keeps casts of weights; as it is set outside when omitted.

    Raises:
        PolicyError: Not a device type, or one without autocast.

    **Cost**: as :class:`mezzo.autocast`.

    Example:
        >>> import torch
        >>> from mezzo.compat.torch import autocast
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = torch.ones(4, 4) @ torch.ones(4, 4)
        >>> y.dtype
        torch.bfloat16
    """
    _require_type(device_type)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise PolicyError(
            f"dtype is {shown(dtype)}, not a torch.dtype", write=f'autocast("{device_type}", torch.float16)'
        )
    dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
    reason = "" if dtype in _DTYPES else f"{dtype} is not a format that it casts to; float16 and bfloat16 are"
    if device_type == "cuda" and not torch.cuda.is_available():
        reason = "CUDA is not available"
    if enabled and reason and not torch.compiler.is_compiling():
        _say(f"autocast is disabled: {reason}")
    enabled = enabled and not reason
    if not enabled:  # where it is off, mezzo's regions around it do nothing either
        return torch.autocast(device_type, dtype, enabled=False, cache_enabled=cache_enabled)
    region = cast.autocast(f"O1,dtype={_DTYPES[dtype]},lists=device,accumulate=native", device_type)
    if cache_enabled is None:
        return region
    return cast.autocast.of(dataclasses.replace(region.region, caches=cache_enabled))


@functools.cache  # once: loops enter a region in each step
def _say(what: str) -> None:
    logger.warning("%s", what)


def _require_type(device_type: Any) -> None:
    name = shown(device_type)
    kind = device_type.partition(":")[0] if isinstance(device_type, str) else ""
    try:
        is_known = bool(kind) and torch.amp.is_autocast_available(kind)
    except RuntimeError:  # no device of that name
        is_known = False
    if not is_known:
        what = f"torch has no autocast for device_type {name}"
        why, write = nearest(kind, _DEVICES), 'autocast("cuda", …)'
        if isinstance(device_type, bool):  # the first argument of torch.cuda.amp.autocast
            why, write = "", f'autocast("cuda", enabled={name}); or from mezzo.compat.torch.cuda.amp import autocast'
        elif callable(device_type):
            why, write = "a decorator that is not called takes the function for its argument", '@autocast("cuda")'
        raise PolicyError(what, why=why, write=write)
    if kind != device_type:
        raise PolicyError(
            f"device_type {name} is one device, not a type",
            write=f'autocast("{kind}", …), which covers all devices of that type',
        )
