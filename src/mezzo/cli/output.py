"""Where results go: to a terminal as wide as it is, in lines wide enough for other programs, and into which files."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import torch
import typer
from rich.console import Console, RenderableType

from mezzo.cast.device import default_kinds, fast_format
from mezzo.documents import json_text
from mezzo.explanation.table import WIDEST, plain
from mezzo.policy import Policy
from mezzo.tensors import dtype_name

__all__ = [
    "ALERT", "INTERRUPTED", "console_for", "exit_code", "leave", "note", "show_explanation", "show_json",
    "usual_format", "usual_policy",
]  # fmt: skip

#: Exit codes besides those of errors: numbers that alarm; and Ctrl-C, as shells have it, 128 and the signal's number.
ALERT: Final = 4
INTERRUPTED: Final = 130


def console_for(plain_width: int) -> Console:
    """Return a console on stdout.

    Args:
        plain_width: The width where no terminal sets it, and the most of one that is wider.
    """
    console = Console()
    return Console(width=min(console.width, plain_width) if console.is_terminal else plain_width)


def show_json(value: Any) -> None:
    """Print a value for a program: JSON that any reader takes, with texts for the numbers that JSON lacks."""
    typer.echo(json_text(value))


def note(text: str) -> None:
    """Print a message in one line on stderr, as it is."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def usual_format(option: str) -> str:
    """Return the low format to train in on this machine, and say so; of several ranks the first one does.

    Args:
        option: How to have the other one, with ``{}`` for its name.
    """
    fast = fast_format(default_kinds())
    other = "fp16" if fast == torch.bfloat16 else "bf16"
    if os.environ.get("RANK", "0") == "0":
        why = f"{dtype_name(fast)} is the format for this machine (mezzo doctor says why)"
        note(f"{why}; {option.format(other)}")
    return dtype_name(fast)


def usual_policy(given: Policy | str | None) -> Policy:
    """Return the policy that ``--policy`` names, and without it O1 in the format for this machine."""
    return Policy.O1(usual_format("--policy O1,{} for the other")) if given is None else Policy.of(given)


def show_explanation(parts: list[RenderableType], full: bool) -> None:
    """Print an explanation, as wide as the terminal is, or as is good for a file."""
    console = Console()
    if console.is_terminal:
        console.width = console.width if full else min(console.width, WIDEST)
        console.print(*parts, sep="\n")
    else:
        typer.echo(plain(parts, None if full else WIDEST))


def exit_code(error: BaseException | None) -> int:
    """Return the exit code that Python gives for what a script has raised, and show what Python would show."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    sys.excepthook(type(error), error, error.__traceback__)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def leave(*, interrupted: bool, alarms: bool) -> None:
    """Leave a run with the exit code that says how it went, where it did not go well.

    Args:
        interrupted: Whether it ended with Ctrl-C, whatever it came to until then.
        alarms: Whether its numbers went wrong.

    Raises:
        typer.Exit: With 130, or with 4.
    """
    if interrupted or alarms:
        raise typer.Exit(INTERRUPTED if interrupted else ALERT)
