"""Amp as it runs now: module-level, as in apex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mezzo.session.attached import Standing

__all__ = ["NOW"]


@dataclass(slots=True)
class _Amp:
    """What was initialised.

    Attributes:
        standing: The session; ``None`` where there is none.
        is_disabled: Whether it was initialised with ``enabled=False``: every call does nothing.
    """

    standing: Standing | None = None
    is_disabled: bool = False


NOW: Final = _Amp()
