"""The root command, to which every verb registers itself, and what the verbs share: output, options, a script's run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand

import mezzo
from mezzo.cast.device import default_device_types, fast_format
from mezzo.errors import MezzoError, PolicyError, message
from mezzo.explanation.explanation import WIDEST, plain
from mezzo.files import json_text
from mezzo.policy import Policy
from mezzo.script import Program
from mezzo.script.program import options_of, own_traceback
from mezzo.tensors import dtype_name

app = typer.Typer(
    name="mezzo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mezzo {mezzo.__version__}")
        raise typer.Exit


@app.callback(
    help="""Train PyTorch models in mixed precision, and see why it is safe.

    \b
    mezzo compare train.py          your script in FP32 and under policies
    mezzo run train.py              your script as it is, in mixed precision
    mezzo explain train.py          what runs low, what does not, and why
    mezzo inspect train.py          which formats are safe, at which loss scale
    mezzo tune train.py             which ops need FP32, found by running
    mezzo plan train.py             where casts are cheapest
    mezzo show ops softmax          what the lists say about an op
    mezzo show formats float16      the numbers of a format
    mezzo doctor                    what works and pays on this machine
    """,
    epilog="Pages, in mezzo's repository: docs/start.md to begin, docs/nan.md if a loss is NaN, docs/index.md for all.",
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Accept what all verbs share: the version."""


# Where results go: to a terminal as wide as it is, in lines wide enough for other programs, and into which files.

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
    """Return the low format to train in on this machine, and print which; of several ranks the first one prints.

    Args:
        option: The option that chooses the other format, with ``{}`` for its name.
    """
    fast = fast_format(default_device_types())
    other = "fp16" if fast == torch.bfloat16 else "bf16"
    if os.environ.get("RANK", "0") == "0":
        why = f"{dtype_name(fast)} is the format for this machine (mezzo doctor says why)"
        note(f"{why}; {option.format(other)}")
    return dtype_name(fast)


def usual_policy(text: Policy | str | None) -> Policy:
    """Return the policy that ``--policy`` names, and without it O1 in the format for this machine."""
    return Policy.O1(usual_format("--policy O1,{} for the other")) if text is None else Policy.of(text)


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


def exit_unless_well(*, interrupted: bool, alarms: bool) -> None:
    """Exit with 130 after Ctrl-C, else with 4 where the run's numbers went wrong.

    Args:
        interrupted: Whether the run ended with Ctrl-C.
        alarms: Whether its numbers went wrong.

    Raises:
        typer.Exit: With 130, or with 4.
    """
    if interrupted or alarms:
        raise typer.Exit(INTERRUPTED if interrupted else ALERT)


# Running a script in this process: where its output goes, and how an error of its own ends the verb.

_VERBS: Final = ("run", "compare", "explain", "inspect", "tune", "plan")
#: What argparse and its like exit with where they do not know an option.
_WRONG_USAGE: Final = 2


@contextmanager
def script_output_on_stderr(program: Program) -> Iterator[None]:
    """Print what a script prints to stderr, and exit with its own traceback and exit code where it fails.

    Args:
        program: The script.

    Raises:
        MezzoError: What mezzo refuses.
        typer.Exit: With the script's exit code.
    """
    try:
        with redirect_stdout(sys.stderr), closing_open_line():
            yield
    except MezzoError:
        raise
    except BaseException as error:
        raise typer.Exit(script_exit_code(program, error.with_traceback(own_traceback(error)))) from None


@contextmanager
def closing_open_line() -> Iterator[None]:
    """End the line that the block has left open, such as a progress bar's: a report would begin behind it."""
    last = {"": ""}
    with ExitStack() as undo:
        for stream in {id(output): output for output in (sys.stdout, sys.stderr)}.values():
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


def script_exit_code(program: Program, error: BaseException | None) -> int:
    """Return the exit code of a script, and show what Python would show, with a hint where options stand behind it.

    Args:
        program: The script.
        error: What it raised, if it did.
    """
    code = exit_code(error)
    verbs: Any = typer.main.get_command(app)
    options = [option for verb in _VERBS for option in verbs.commands[verb].params]
    words = [word for misplaced in _options_in(program.arguments, options).values() for word in misplaced]
    if code == _WRONG_USAGE and isinstance(error, SystemExit) and words:
        text = message(
            f"{words[0].partition('=')[0]} stands behind the script's name",
            why="what follows the script is the script's own, and it does not seem to know it",
            write=f"{shlex.join(words)} before {program.name}, if it is meant for mezzo",
        )
        note(f"mezzo: {text}")
    return code


def _options_in(arguments: Sequence[str], options: Iterable[Any]) -> dict[int, list[str]]:
    """Return the words that are options of a verb, each with its value, by where they stand; as far as ``--``."""
    is_flag = {
        name: getattr(option, "is_flag", False)
        for option in options
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--")
    }
    words_at, index = dict[int, list[str]](), 0
    while index < len(arguments) and arguments[index] != "--":
        name, _, value = arguments[index].partition("=")
        length = 1 if value or is_flag.get(name, True) else 2
        if name in is_flag and index + length <= len(arguments):
            words_at[index] = list(arguments[index : index + length])
        index += length
    return words_at


# What the verbs on a script share: its words, and the same options before them.

#: The last file that a verb writes into its folder: with it the folder is whole.
SUMMARY: Final = "summary.json"

Words = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script, and its own arguments.")]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")]
PolicyText = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="A policy's text, or the path of a policy file; O1 in the format for this machine when omitted.",
        show_default=False,
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="End the script after so many steps.", show_default=False)]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write what was found into a folder, too.", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results that are in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; what the script prints goes to stderr.")]
Full = Annotated[bool, typer.Option("--full", help="Show every row.")]
Dry = Annotated[
    bool, typer.Option("--dry", help="Run one step, in FP32, explain what the policy would make of it, and stop.")
]


class OnScript(TyperCommand):
    """A verb on a script: its options stand before the script, or behind, where the script has no such option."""

    allow_interspersed_args = False

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # a Context
        """Parse the words behind the verb, and print one line on stderr where options are moved before the script."""
        rest = super().parse_args(ctx, list(args))
        script, *arguments = ctx.params["words"]
        if ctx.params["is_module"] or not (options := _options_in(arguments, self.params)):
            return rest
        has_option = options_of(Path(script))
        moved = {index: words for index, words in options.items() if not has_option(arguments[index])}
        if not moved:
            return rest
        taken = [word for words in moved.values() for word in words]
        if os.environ.get("RANK", "0") == "0":
            note(f"{shlex.join(taken)} is taken as mezzo {self.name}'s: {script} has no such option")
        before = args[: len(args) - len(arguments) - 1]
        indices = {index + number for index, words in moved.items() for number in range(len(words))}
        own = [word for index, word in enumerate(arguments) if index not in indices]
        ctx.params.clear()
        return super().parse_args(ctx, [*before, *taken, script, *own])


def program_of(words: list[str], is_module: bool) -> Program:
    """Return the script that a verb's words name, with its own arguments."""
    return Program(name=words[0], arguments=tuple(words[1:]), is_module=is_module)


def free_folder(out: Path, overwrite: bool) -> Path:
    """Return a folder for results, which is made, before minutes of work.

    Args:
        out: The folder.
        overwrite: Whether results that are in it may be replaced.

    Raises:
        PolicyError: It cannot be made, or has results.
    """
    if (out / SUMMARY).exists() and not overwrite:
        raise PolicyError(f"{out} has results already", write="--overwrite, or --out with another name")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"the folder {out} cannot be made", why=error.strerror or str(error)) from error
    return out
