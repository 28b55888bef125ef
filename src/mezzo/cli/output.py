"""Where results go: to a terminal as wide as it is, in lines wide enough for other programs, and into which files."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console, RenderableType

from mezzo.cast.device import default_kinds, fast_format
from mezzo.documents import jsonable
from mezzo.errors import PolicyError, message, printable
from mezzo.explanation.table import WIDEST, plain
from mezzo.policy import Policy
from mezzo.policy.fields import text_of
from mezzo.report import Judgement
from mezzo.tensors import dtype_name, dtype_of

__all__ = [
    "ALERT", "INTERRUPTED", "UsualPolicy", "console_for", "exit_code", "format_named", "leave", "note", "require_free",
    "run_directory", "show_explanation", "show_json", "show_judgement", "usual_format", "usual_policy",
]  # fmt: skip

UsualPolicy = Annotated[
    str | None,
    typer.Option(
        help="A policy's text, or the path of a policy file; O1 in the format for this machine when omitted.",
        show_default=False,
    ),
]
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
    typer.echo(json.dumps(jsonable(value), indent=2, allow_nan=False, ensure_ascii=False))


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


def format_named(word: str) -> str:
    """Return a dtype's name for any word for it, such as ``bf16``; what is none is left to be refused."""
    return text_of(dtype_of(word))


def usual_policy(given: Policy | str | None) -> Policy:
    """Return the policy that ``--policy`` names, and without it O1 in the format for this machine."""
    return Policy.O1(usual_format("--policy O1,{} for the other")) if given is None else Policy.of(given)


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


def require_free(path: Path, option: str, overwrite: bool) -> None:
    """Refuse, before minutes of work, a file that cannot be written, or that is there and may not be replaced.

    Args:
        path: The file.
        option: What names it on the command line.
        overwrite: Whether one that is there may be replaced.

    Raises:
        PolicyError: There can be no such file, or there is one.
    """
    if path.is_dir():
        raise PolicyError(f"there is a folder {path}", write=f"{option} with the name of a file")
    if path.exists() and not overwrite:
        raise PolicyError(f"there is a file {path} already", write=f"--overwrite, or {option} with another name")
    if not path.absolute().parent.is_dir():
        raise PolicyError(f"there is no folder {path.parent} to save in", write=f"mkdir -p {path.parent}")


def run_directory(recipe: str, out: Path | None) -> Path:
    """Return where a run is written: where the user says, or in a folder named after recipe and time."""
    return out or Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
