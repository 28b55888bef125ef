"""Optimizers that update everything in one pass: torch's signatures, parameter groups and state dicts.

What an update does to an element, how weights lie in memory and how kernels are launched is said in ``mezzo.step``; who
owns FP32 values of low parameters, and how torch's optimizers see them, in ``mezzo.weights``.
"""

from mezzo.optim.classes import SGD, Adam, AdamW, Lion
from mezzo.optim.optimizer import OnePassOptimizer

__all__ = ["SGD", "Adam", "AdamW", "Lion", "OnePassOptimizer"]
