"""The command line: one file per verb, each a thin call of a public function.

Results go to stdout, messages to stderr. Nothing here decides about numerics, and nothing outside this
folder prints.
"""

from __future__ import annotations

import sys
from inspect import getdoc

from typer.models import CommandInfo

from mezzo.cli import (  # noqa: F401  (each verb registers itself)
    compare,
    doctor,
    explain,
    inspect,
    plan,
    run,
    show,
    tune,
)
from mezzo.cli.app import app
from mezzo.errors import MezzoError, NumericsError, PolicyError, UnsupportedError

__all__ = ["app", "main"]

#: What a shell sees: 1 is a failed check or a call at the wrong moment.
EXIT_CODES: tuple[tuple[type[MezzoError], int], ...] = (
    (PolicyError, 2),
    (UnsupportedError, 3),
    (NumericsError, 4),
    (MezzoError, 1),
)


def _unfold_help(commands: list[CommandInfo]) -> None:
    """Make each paragraph of the help one line, to be folded where the terminal ends and not where the source does."""
    for command in commands:
        paragraphs = (getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


for _each in (app, *(group.typer_instance for group in app.registered_groups if group.typer_instance)):
    _unfold_help(_each.registered_commands)


def main(arguments: list[str] | None = None) -> None:
    """Run ``mezzo VERB`` and exit with the code that fits the outcome.

    Args:
        arguments: The words after ``mezzo``; ``sys.argv[1:]`` when omitted.
    """
    try:
        app(args=arguments, prog_name="mezzo")
    except MezzoError as error:
        print(f"mezzo: {error}", file=sys.stderr)
        sys.exit(next(code for error_class, code in EXIT_CODES if isinstance(error, error_class)))
