"""The session: a model, an optimizer and a policy, tied into a training loop.

The order of the calls, the accumulation window and the state live here. How ops are cast, how a scale moves and how
masters are kept is other rooms' business.
"""

from mezzo.session.accounts import Stats
from mezzo.session.checkpoint import load, save
from mezzo.session.loop import MixedPrecision
from mezzo.session.result import Step

__all__ = ["MixedPrecision", "Stats", "Step", "load", "save"]
