"""An explanation as a whole: what :func:`mezzo.explain` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mezzo.documents import jsonable
from mezzo.explanation.answer import Answer, answer_to
from mezzo.explanation.rows import Explained
from mezzo.explanation.table import WIDEST, plain, renderables


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Explained):
    """Which precision each op in each module gets, and why: what :func:`mezzo.explain` returns.

    It prints the answer in words and the few rows that matter, and compares by value.

    Attributes:
        model: Class of the model.
        policy: The policy's text.
        devices: Types of the devices that held tensors.
        torch: The torch version.
        emulated: Whether products were computed in FP32 from rounded operands.
        rows: Every op that read or made floating numbers in the forward pass, in the order of first use.
        casts: Every conversion between floating dtypes, forward and backward, largest first.
        misaligned: Products and convolutions in a low format whose dimensions should be padded.
        findings: What else there is to know.
        products: The matrix products and convolutions of the forward pass, those with the most operations first.
        moved_bytes: What all kernels of both passes read and write, casts included.
    """

    @property
    def answer(self) -> Answer:
        """What it comes to, in words: a headline, a sentence for each thing to know, and what to write."""
        return answer_to(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them; the answer is among them."""
        found: dict[str, Any] = jsonable({"answer": dataclasses.asdict(self.answer), **dataclasses.asdict(self)})
        return found

    def text(self, *, full: bool = False, width: int | None = WIDEST) -> str:
        """Return the answer and its tables as plain text.

        Args:
            full: Whether to show every row, as ``mezzo explain --full``; else alike modules are folded into one row.
            width: In which lines are folded; ``None`` puts each row in one line, so that ``grep`` works.
        """
        return plain(renderables(self, full=full), width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        answer = self.answer
        return f"<Explanation: {'; '.join((answer.headline, *answer.points))}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        yield from renderables(self)
