"""Optimizers that update everything in one pass: torch's signatures, parameter groups and state dicts.

What an update does to an element, how weights lie in memory and how kernels are launched is said in ``mezzo.step``;
what a weight in halves is to every other optimizer, in ``mezzo.weights``.
"""

from mezzo.optim.classes import SGD, Adam, AdamW, Lion
from mezzo.optim.muon import Muon, matrices_of
from mezzo.optim.optimizer import OnePassOptimizer

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon", "OnePassOptimizer", "matrices_of"]
