"""Loss scaling: the rules as values and pure functions, and the tensors that hold their state.

Here belong the arithmetic of the scale and its counters. What a skipped step does to weights, and whether a collapsed
scale raises, is decided by ``mezzo.session``. Only ``state_dict`` reads from an accelerator; a state on the CPU
moves in Python's numbers.
"""

from mezzo.scale.config import LossScale
from mezzo.scale.state import ScaleState
from mezzo.scale.transition import next_scale

__all__ = ["LossScale", "ScaleState", "next_scale"]
