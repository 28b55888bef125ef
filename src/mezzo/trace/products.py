"""Which share of the work of matrix products ran low: counted at the kernels, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mezzo.tensors import LOW, dtype_name
from mezzo.trace.frames import doing
from mezzo.trace.kernels import flops
from mezzo.trace.modes import KernelWatch


class Products(KernelWatch):  # type: ignore[no-untyped-call]
    """Count the operations of products by the precision that their kernels read, inside its block.

    Args:
        *low: The formats that count as low; float16 and bfloat16 when omitted.

    Attributes:
        flops: The operations by the name of the format, and under ``"emulated"`` those that were computed in FP32 from
            rounded operands.
    """

    def __init__(self, *low: torch.dtype) -> None:
        super().__init__()
        self._low = low or LOW
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (counted := flops(func, args, kwargs, out)) is not None:
            self.flops["emulated" if doing() == "emulation" else dtype_name(counted[1])] += counted[0]
        return out

    @property
    def low_share(self) -> float:
        """The share of the low formats, emulation in it included; 0 where there was no product."""
        low = sum(self.flops[dtype_name(dtype)] for dtype in self._low) + self.flops["emulated"]
        return low / max(1, self.flops.total())
