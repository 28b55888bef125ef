"""Running a script in this process: where its output goes, and how an error of its own ends the verb."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any, Final

import typer

from mezzo.cli.app import app
from mezzo.cli.output import exit_code, note
from mezzo.errors import MezzoError, message
from mezzo.script import Program
from mezzo.script.program import own_traceback

__all__ = ["ended_lines", "ended_with", "scripts_own"]

_VERBS: Final = ("run", "compare", "explain", "inspect", "tune")
#: What argparse and its like exit with where they do not know an option.
_WRONG_USAGE: Final = 2


@contextmanager
def scripts_own(program: Program) -> Iterator[None]:
    """Print what a script prints to stderr, and leave with its own traceback and exit code where it fails.

    Args:
        program: The script.

    Raises:
        MezzoError: What mezzo refuses.
        typer.Exit: With the script's exit code.
    """
    try:
        with redirect_stdout(sys.stderr), ended_lines():
            yield
    except MezzoError:
        raise
    except BaseException as error:
        raise typer.Exit(ended_with(program, error.with_traceback(own_traceback(error)))) from None


@contextmanager
def ended_lines() -> Iterator[None]:
    """Run a script, and end the line that it has left open: what follows would stand behind its progress bar."""
    last = {"": ""}
    with ExitStack() as undo:
        for stream in {id(each): each for each in (sys.stdout, sys.stderr)}.values():
            with suppress(AttributeError):  # a stream of the caller's that takes no attributes
                _remember(stream, last, undo)
        yield
    sys.stdout.flush()
    if not all(text.endswith("\n") for text in last.values() if text):
        print(file=sys.stderr)


def _remember(stream: Any, last: dict[str, str], undo: ExitStack) -> None:
    plain, name = stream.write, str(id(stream))

    def write(text: str) -> Any:
        last[name] = text or last.get(name, "")
        return plain(text)

    stream.write = write
    undo.callback(vars(stream).pop, "write", None)


def ended_with(program: Program, error: BaseException | None) -> int:
    """Return the exit code of a script, and show what Python would show, with a hint where options stand behind it.

    Args:
        program: The script.
        error: What it raised, if it did.
    """
    code = exit_code(error)
    if code == _WRONG_USAGE and isinstance(error, SystemExit) and (words := _misplaced(program.arguments)):
        text = message(
            f"{words[0].partition('=')[0]} stands behind the script's name",
            why="what follows the script is the script's own, and it does not seem to know it",
            write=f"{shlex.join(words)} before {program.name}, if it is meant for mezzo",
        )
        note(f"mezzo: {text}")
    return code


def _misplaced(arguments: tuple[str, ...]) -> list[str]:
    """Return those words that are options of a verb's, each with its value."""
    verbs: Any = typer.main.get_command(app)
    options = (option for verb in _VERBS for option in verbs.commands[verb].params)
    flags = {name: getattr(each, "is_flag", False) for each in options for name in each.opts if name.startswith("--")}
    found, following = list[str](), iter(arguments)
    for word in following:
        if word.partition("=")[0] in flags:
            found.append(word)
            if "=" not in word and not flags[word]:
                found += [value for value in [next(following, None)] if value is not None]
    return found
