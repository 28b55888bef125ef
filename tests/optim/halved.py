"""Parameters that are stored in two halves, as a prepared model's are."""

import torch

from mezzo.weights import Halves


def halved(params, dtype, *optimizers):
    """Store FP32 parameters in a dtype, and let optimizers find the low halves; what owns them is returned."""
    halves = Halves()
    if dtype != torch.float32:
        halves.store(dict.fromkeys(params, dtype))
    for optimizer in optimizers:
        optimizer.adopt([halves])
    return halves
