"""What O1 and O2 are compared by on ranks: bit for bit, once no weight lies in the middle of two 16-bit numbers."""

import torch

from mezzo.sharded import local
from mezzo.weights import encode


def without_ties(model, dtype):
    """Take weights off the middle between two numbers of a dtype, which halves round up and a cast to even."""
    with torch.no_grad():
        for param in model.parameters():
            here = local(param)
            value = here.detach().clone()
            tied = encode(value, dtype)[0] != value.to(dtype)
            here.copy_(torch.where(tied, torch.nextafter(value, torch.tensor(torch.inf)), value))
