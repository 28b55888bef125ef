"""Evidence about numbers; so far the search for the first that is not finite, which lives in :mod:`mezzo.overflow`."""

from mezzo.overflow import Changed, Overflow, Range, Replay, locate

__all__ = ["Changed", "Overflow", "Range", "Replay", "locate"]
