"""Watching numbers: where a training step first went beyond its formats, why, and what to write instead.

It watches and reports. Policies, scales and weights are other rooms' business, and the training loop is the session's,
which calls this room and is not known here.
"""

from mezzo.overflow.diagnose import Changed, Overflow
from mezzo.overflow.replay import Replay, locate
from mezzo.trace.measure import Range

__all__ = ["Changed", "Overflow", "Range", "Replay", "locate"]
