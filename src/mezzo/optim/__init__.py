"""Optimizers that store each weight once and update everything in one pass, and FP32 masters around any others.

Here belong what both have in common (``keeper``), torch's signatures, parameter groups and state dicts. What an update
does to an element, how weights lie in memory and how kernels are launched is said in ``mezzo.step``.
"""

from mezzo.optim.classes import SGD, Adam, AdamW, Lion
from mezzo.optim.optimizer import OnePassOptimizer

__all__ = ["SGD", "Adam", "AdamW", "Lion", "OnePassOptimizer"]
