"""What processors have kernels for."""

import torch
from torch import nn


def has_low_lstm() -> bool:
    """Whether torch's own autocast runs an LSTM here: oneDNN has none in BF16 for processors with AVX2 alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 8)(torch.zeros(5, 2, 8))
    except RuntimeError:  # "could not create a primitive descriptor for the LSTM forward propagation primitive"
        return False
    return True
