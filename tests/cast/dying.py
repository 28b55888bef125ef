"""A processor that dies of products in BF16 unless oneDNN is limited to AVX2, as far as torch's dispatcher shows.

The death is simulated; whether the limit is in force is oneDNN's own answer, as under it BF16 is no more offered. It
needs a processor with AVX-512. That is so in the thread that sets the trap, and in the children of its probe.
"""

import os
import signal
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.cast.device import child, probing

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "attention")


class Dying(TorchDispatchMode):
    """Kill the process at the first product in BF16 that the limit does not keep from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_product = any(name in func.overloadpacket.__name__ for name in PRODUCTS)
        is_low = any(isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16 for each in args)
        if is_product and is_low and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            os.kill(os.getpid(), signal.SIGILL)
        return func(*args, **(kwargs or {}))


def set_trap():
    """Begin."""
    probing.ISA_LIMIT = "AVX2"
    probing.CHILD_COMMAND = [*probing.CHILD_COMMAND[:-1], __file__]
    Dying().__enter__()


if __name__ == "__main__":
    set_trap()
    child.WIDTHS = (128,)
    child._seconds = lambda work, device: work() and 1.0
    child.main(sys.argv[1])
