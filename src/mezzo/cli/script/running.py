"""Running a script in this process: where its output goes, and how an error of its own ends the verb."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer

from mezzo.cli.output import exit_code
from mezzo.errors import MezzoError
from mezzo.script.program import own_traceback

__all__ = ["scripts_own"]


@contextmanager
def scripts_own() -> Iterator[None]:
    """Print what a script prints to stderr, and leave with its own traceback and exit code where it fails.

    Raises:
        MezzoError: What mezzo refuses.
        typer.Exit: With the script's exit code.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except MezzoError:
        raise
    except BaseException as error:
        raise typer.Exit(exit_code(error.with_traceback(own_traceback(error)))) from None
