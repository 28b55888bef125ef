"""Parameters that are stored in two halves, as a prepared model's are."""

import torch

from mezzo.weights.models import store


def halved(params, dtype):
    """Store FP32 parameters in halves of a dtype, in place; FP32 leaves them as they are."""
    if dtype != torch.float32:
        store(dict.fromkeys(params, dtype), dict.fromkeys(params, "weight"))
    return params


def values(params):
    """Return copies of what parameters are, in FP32."""
    return [param.detach().clone() for param in params]
