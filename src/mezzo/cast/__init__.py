"""Carrying a policy out: regions, conversion, emulated arithmetic, and what the device can do.

Decides nothing: every question "which precision?" is answered by :class:`mezzo.Policy`.
"""

from mezzo.cast.modules import Prepared, prepare
from mezzo.cast.region import autocast

__all__ = ["Prepared", "autocast", "prepare"]
