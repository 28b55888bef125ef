"""The session: a model, an optimizer and a policy, tied into a training loop.

The order of the calls, the accumulation window and the state live here. How ops are cast, how a scale moves and how
masters are kept is other rooms' business.
"""

from mezzo.session.scale import Step
from mezzo.session.session import MixedPrecision
from mezzo.session.state.checkpoint import load, save
from mezzo.session.stats import Stats

__all__ = ["MixedPrecision", "Stats", "Step", "load", "save"]
