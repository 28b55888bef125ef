"""Parameters whose gradients are whatever a linear loss says, and sessions over them."""

import torch
from torch import nn

from mezzo import MixedPrecision

EPS = 2.0**-23

EVERY_STEP = "loss_scale=dynamic(init=256,interval=1)"


class Weights(nn.Module):
    """Parameters whose gradients are whatever a linear loss says: d(c·w)/dw = c."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def loss(self, *coefficients):
        return sum((w * c).sum() for w, c in zip(self.each, coefficients, strict=True))


def session(model, policy=f"O0,{EVERY_STEP}", *, optimizers=None, models=None, **options):
    built = [torch.optim.SGD(model.parameters(), lr=1.0)] if optimizers is None else optimizers
    return MixedPrecision(model if models is None else models, built, policy, **options)


def set_scales(amp, *scales):
    """Through a public door: the state of apex.amp has one scale for each loss."""
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": s, "unskipped": 0} for i, s in enumerate(scales)})


def gradients(amp):
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params()]


def values(count, seed, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
