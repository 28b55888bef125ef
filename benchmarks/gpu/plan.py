"""How large a part measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where to measure, and whether in earnest.

    Attributes:
        device: A CUDA device; in a dry run a CPU.
        dry: Everything as small as it can be, to see that it runs; its figures mean nothing.
    """

    device: torch.device
    dry: bool = False

    @property
    def repetitions(self) -> int:
        """Rounds that are timed."""
        return 1 if self.dry else 9
