"""What differs between releases of torch and of Triton where tests meet it: tables whose rows say since when."""

import pytest
import torch


def since(table, release=torch.__version__):
    """Return the last row of a table whose release is not newer than this one.

    Args:
        table: Release, as a tuple of numbers -> what holds from it on, in order.
        release: Such as ``"2.14.1+cu130"``.
    """
    numbers = tuple(int(part) for part in release.split("+")[0].split(".")[:2])
    return [row for first, row in table.items() if first <= numbers][-1]


#: The category of what ``torch.jit.script`` and ``torch.jit.trace`` warn with.
JIT_WARNING = since({(2, 11): DeprecationWarning, (2, 14): FutureWarning})
#: For tests that need TorchScript.
torchscript = pytest.mark.filterwarnings(rf"ignore:.?torch\.jit\.\w+. is deprecated:{JIT_WARNING.__name__}")

#: Registers of a thread of pass 1 over FP32 gradients on capability 8.0, by the release of Triton: with up to 64 four
#: programs fit a multiprocessor.
FP32_NORM_REGISTERS = {(3, 6): 56, (3, 8): 60}

#: Whether ``torch.func.vmap`` knows ``Tensor.view(dtype)``.
BITS_UNDER_VMAP = since({(2, 11): False, (2, 13): True})
#: Whether a CPU has ``torch.nn.functional.scaled_mm``.
SCALED_MM_ON_CPU = since({(2, 11): False, (2, 13): True})
#: Whether Dynamo captures a module with hooks that a graph break has left to Python; else it runs uncompiled.
CAPTURES_BEHIND_BREAKS = since({(2, 11): False, (2, 13): True})
#: Whether a checkpoint in a graph is one where the graph is run by the backend ``eager``; else all of it is kept.
EAGER_GRAPHS_CHECKPOINT = since({(2, 11): False, (2, 13): True})
