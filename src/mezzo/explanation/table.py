"""An explanation as text: the answer first, then tables that fit the terminal and are never cut."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.answer import Answer, answer_to
from mezzo.explanation.rows import Explained
from mezzo.explanation.sections import NUMBERS, WORDS, Section, all_rows, few_rows

#: The columns that the answer and its few rows take at most.
WIDEST: Final = 120
#: What a column of words is left at least, if paths are not to be folded.
_NARROWEST: Final = 10


def plain(parts: Iterable[RenderableType], width: int | None = WIDEST) -> str:
    """Write text without colours.

    Args:
        parts: What to write.
        width: In which lines are folded; ``None`` puts each row in one line, however long, so that ``grep`` works.
    """
    parts, file = list(parts), io.StringIO()
    console = Console(file=file, no_color=True, force_terminal=False, width=width or WIDEST)
    if width is None:
        wide = console.options.update(width=100_000)
        console.width = max(WIDEST, *(Measurement.get(console, wide, part).maximum for part in parts))
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def table(
    heads: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Container[str] = (),
    stiff: Container[str] = (),
    **options: Any,
) -> Table:
    """Return a table of texts, none of which is cut, or taken for markup: rules and messages may hold brackets.

    Args:
        heads: Of its columns.
        rows: The cells.
        right: Heads of columns of numbers.
        stiff: Heads of columns that are folded last.
        **options: Of rich's table.
    """
    made = Table(box=box.SIMPLE_HEAD, **options)
    for head in heads:
        justify: Literal["left", "right"] = "right" if head in right else "left"
        made.add_column(Text(printable(head)), justify=justify, overflow="fold", no_wrap=head in stiff)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def renderables(explanation: Explained, *, full: bool = False) -> Iterator[RenderableType]:
    """Yield the answer, then the few rows that matter, or all of them.

    Args:
        explanation: The explanation.
        full: Whether to show every row.
    """
    yield from _answer(answer_to(explanation))
    yield Text(f"{printable(terms(explanation))}\n", style="dim")
    yield from map(_section, all_rows(explanation) if full else few_rows(explanation))


def terms(explanation: Explained) -> str:
    """Say on what an explanation was measured."""
    arithmetic = "products emulated in FP32" if explanation.emulated else "native arithmetic"
    devices = "+".join(explanation.devices) or "no device"
    return f"measured in one step on {devices}, {arithmetic}, torch {explanation.torch}"


def _answer(answer: Answer) -> Iterator[RenderableType]:
    yield Text(printable(answer.headline), style="bold", overflow="fold")
    lines = Table.grid(padding=(0, 2))
    for point in answer.points:
        lines.add_row(Text("·"), Text(printable(point), overflow="fold"))
    yield Padding(lines, (0, 0, 0, 2))
    if answer.write:
        advice = Table.grid(padding=(0, 2))
        for label, text in (("write", answer.write), ("", answer.why)):
            advice.add_row(Text(label), Text(printable(text), overflow="fold"))
        yield Padding(advice, (0, 0, 0, 2))


def _section(section: Section) -> RenderableType:
    # The title is no part of the table, within whose width it would be folded. A table ends with an empty line.
    parts: Sequence[RenderableType] = (
        Text(section.title, style="bold"),
        _Fitted(section) if section.rows else Text(),
        *([Text(f"  {section.rest}\n")] if section.rest else ()),
    )
    return Group(*parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitted:
    """A table in which words are folded before paths are, wherever the width allows it; nothing is cut."""

    section: Section

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(stiff=False))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = zip(self.section.heads, *self.section.rows, strict=True)
        stiff = sum(max(map(cell_len, column)) for column in columns if column[0] not in WORDS)
        num_words = sum(head in WORDS for head in self.section.heads)
        # Three columns lie between the columns, and at the ends together.
        room = options.max_width - 3 * len(self.section.heads) - _NARROWEST * num_words
        yield self._table(stiff=stiff <= room)

    def _table(self, *, stiff: bool) -> Table:
        paths = {*self.section.heads} - WORDS if stiff else ()
        return table(self.section.heads, self.section.rows, right=NUMBERS, stiff=paths)
