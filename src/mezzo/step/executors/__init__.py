"""Executors of the two passes: plain torch operations in blocks, torch.compile's, C++ (``cpp``), Triton (``triton``).

Here belongs how tensors are cut, fused and launched. What happens to an element is said in ``mezzo.step.update``,
``mezzo.step.storage`` and ``mezzo.step.passes``; executors agree with those, and with each other.
"""

from mezzo.step.executors.blocked import Blocked
from mezzo.step.executors.compiled import Compiled

__all__ = ["Blocked", "Compiled"]
