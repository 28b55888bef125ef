"""Where results are printed: a terminal as wide as it is, or lines wide enough for other programs."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console_for"]


def console_for(plain_width: int) -> Console:
    """Return a console on stdout.

    Args:
        plain_width: The width where no terminal sets it: wide enough for each row in one line, so that ``grep`` works.
    """
    console = Console()
    return console if console.is_terminal else Console(width=plain_width)
