"""Matrix products, counted by the dtype of what they compute with: equal losses prove nothing."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.tensors import dtype_name

_PRODUCTS = (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class Products(TorchDispatchMode):
    """Count matrix products by the dtype of their last factor."""

    def __init__(self):
        super().__init__()
        self.dtypes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _PRODUCTS:
            self.dtypes[dtype_name(args[-1].dtype)] += 1
        return func(*args, **kwargs or {})
