"""What programs write in their call style: errors and warnings of a session say it in these words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The calls of a style; of mezzo's own where nothing else is said.

    Attributes:
        begin: What begins the session.
        updated: What yields the tensors that the optimizers update.
        backward: A backward pass.
    """

    begin: str = "MixedPrecision"
    updated: str = "amp.master_params()"
    backward: str = "amp.backward(loss)"
