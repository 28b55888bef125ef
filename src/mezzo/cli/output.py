"""Where results are printed: a terminal as wide as it is, or lines wide enough for other programs."""

from __future__ import annotations

from rich.console import Console

from mezzo.errors import message, printable
from mezzo.report import Judgement

__all__ = ["console_for", "show_judgement"]


def console_for(plain_width: int) -> Console:
    """Return a console on stdout.

    Args:
        plain_width: The width where no terminal sets it, and the most of one that is wider.
    """
    console = Console()
    return Console(width=min(console.width, plain_width) if console.is_terminal else plain_width)


def show_judgement(console: Console, judgement: Judgement) -> None:
    """Print what a run came to: the answer, what to write, and what is wrong, the gravest first."""
    folds = not console.is_terminal
    for line in judgement.lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=folds)
    if judgement.write:
        console.print(f"\n{printable(judgement.write, keep=chr(10))}", highlight=False, markup=False, soft_wrap=folds)
    for number, alert in enumerate(judgement.alerts, start=1):
        text = message(alert.what, where=alert.where, why=alert.why, write=alert.write)
        console.print(f"\n{number}. {text}", highlight=False, markup=False, soft_wrap=folds)
