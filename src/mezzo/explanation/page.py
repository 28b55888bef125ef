"""An explanation as a page of HTML that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files as package_files

from mezzo import files
from mezzo.errors import printable, require_extra
from mezzo.explanation.answer import Answer
from mezzo.explanation.sections import NUMBERS, Section

__all__ = ["require_jinja2", "save"]


def require_jinja2() -> None:
    """Fail now rather than after a trace if no page can be written.

    Raises:
        UnsupportedError: jinja2 is not installed.
    """
    require_extra("report", "writing a page needs jinja2", "jinja2")


def save(
    path: str | os.PathLike[str], answer: Answer, terms: str, few: Iterable[Section], every: Iterable[Section]
) -> None:
    """Write a page: the answer, the few rows that matter, and every row where a reader opens them.

    Args:
        path: The file, which appears whole or not at all.
        answer: What the page is about, in words.
        terms: On what it was measured.
        few: The tables to show at once.
        every: Those behind them.

    Raises:
        UnsupportedError: jinja2 is not installed.
        OSError: The file cannot be written.
    """
    require_jinja2()
    from jinja2 import Environment, StrictUndefined

    # What strangers call their modules is text on the page, and never markup.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=lambda cell: _seen(cell)
    )
    template = environment.from_string(package_files(__package__).joinpath("page.html").read_text("utf-8"))
    text = template.render(
        title=answer.headline, answer=answer, terms=terms, few=list(few), all=list(every), numbers=NUMBERS
    )
    with files.whole(path) as file:
        file.write(text.encode())


def _seen(cell: object) -> object:
    return printable(cell) if type(cell) is str else cell
