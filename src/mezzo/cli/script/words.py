"""The words behind a verb: a recipe's name, or a script and its own arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mezzo.errors import PolicyError
from mezzo.recipes import RECIPES
from mezzo.script import Program

__all__ = ["IsModule", "OnSubject", "Subject", "Words", "refuse_for_script", "stem_of", "subject_of"]

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE | SCRIPT [ARGUMENTS]...",
        help=f"One of {', '.join(RECIPES)}; or a training script as it is, and its arguments.",
    ),
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")]


#: What a verb works on: a script, or the name of a recipe, or what else the verb takes in one word.
Subject = str | Program


class OnSubject(TyperCommand):
    """A verb on a recipe, with options on either side of its name, or on a script, whose own words are behind it.

    The verb has the parameters ``words`` and ``is_module``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Find out what the subject is, and leave what follows a script to it."""
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        words = given.get("words")
        ctx.allow_interspersed_args = not (words and (given.get("is_module") or _is_script(words[0])))
        return super().parse_args(ctx, args)


def subject_of(words: list[str], is_module: bool) -> Subject:
    """Return what words name; a script's name ends with ``.py``, has a folder in it, or is that of a file.

    Raises:
        PolicyError: There is no such script; or the name is a recipe's as well, or has words behind it.
    """
    name, *rest = words
    if not is_module and name in RECIPES and Path(name).is_file():
        raise PolicyError(
            f"{name} is a recipe, and there is a file of that name",
            write=f".{os.sep}{name} for the file as a script, or another working directory for the recipe",
        )
    if is_module or _is_script(name):
        return Program(name=name, arguments=tuple(rest), is_module=is_module)
    if rest:
        raise PolicyError(
            f"{name} takes no arguments: {' '.join(rest)}",
            why="only a script has words behind its name, and its name is a path, or ends with .py",
            write="-m before it, for a module",
        )
    return name


def stem_of(subject: Subject) -> str:
    """Return what files about a subject are called after."""
    return Path(subject.name).stem if isinstance(subject, Program) else subject


def refuse_for_script(**options: object) -> None:
    """Refuse options that only a recipe has.

    Raises:
        PolicyError: Some of them have values.
    """
    if given := [f"--{name}" for name, value in options.items() if value]:
        raise PolicyError(
            f"{', '.join(given)}: not for a script",
            why="its data, its random numbers and its processes are its own",
            write="the script's own options, behind its name",
        )


def _is_script(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or Path(name).is_file()
