"""torch.amp's names and signatures: ``from mezzo.compat.torch import autocast, GradScaler``."""

from torch.amp import custom_bwd, custom_fwd

from mezzo.compat.torch.grad_scaler import GradScaler
from mezzo.compat.torch.region import autocast

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]
