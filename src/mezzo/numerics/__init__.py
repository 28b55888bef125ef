"""Watching numbers: where a training step first went beyond its formats, why, and what to write instead.

It watches and reports. Policies, scales and weights are other rooms' business, and the training loop is the session's,
which calls this room and is not known here.
"""

from mezzo.numerics.overflow import Changed, Overflow, Range
from mezzo.numerics.replay import Replay
from mezzo.numerics.search import locate

__all__ = ["Changed", "Overflow", "Range", "Replay", "locate"]
