"""What the verbs on a script share: its words, and the same options before them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mezzo.errors import PolicyError
from mezzo.script import Program

__all__ = [
    "BEFORE_SCRIPT", "SUMMARY", "Dry", "Full", "IsModule", "Json", "Out", "Overwrite", "PolicyText", "Steps", "Words",
    "free_folder", "program_of",
]  # fmt: skip

#: Settings of a command whose options stand before the script: what follows it is the script's own.
BEFORE_SCRIPT: Final[dict[str, Any]] = {"allow_interspersed_args": False}
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
