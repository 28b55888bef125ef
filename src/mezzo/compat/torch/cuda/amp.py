"""``torch.cuda.amp``'s names, whose arguments begin after the device: for programs that still import these."""

from __future__ import annotations

from functools import partial, partialmethod

import torch

from mezzo import cast
from mezzo.compat.torch import grad_scaler
from mezzo.compat.torch.region import autocast as _autocast

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
) -> cast.autocast | torch.autocast:
    """Return :func:`mezzo.compat.torch.autocast` for CUDA."""
    return _autocast("cuda", dtype, enabled, cache_enabled)


class CudaGradScaler(grad_scaler.GradScaler):
    """:class:`mezzo.compat.torch.GradScaler` for CUDA, with the arguments of ``torch.cuda.amp.GradScaler``."""

    __init__ = partialmethod(grad_scaler.GradScaler.__init__, "cuda")  # type: ignore[assignment]


GradScaler = CudaGradScaler
