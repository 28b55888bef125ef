"""Carrying a policy out: regions, conversion, emulated arithmetic, and what the device can do.

Decides nothing: every question "which precision?" is answered by :class:`mezzo.Policy`.
"""

from mezzo.cast.chunked import linear_cross_entropy
from mezzo.cast.model.prepare import Prepared, prepare
from mezzo.cast.pins import fp32, low
from mezzo.cast.region import autocast, checkpoint_contexts

__all__ = ["Prepared", "autocast", "checkpoint_contexts", "fp32", "linear_cross_entropy", "low", "prepare"]
