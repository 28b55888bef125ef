"""``mezzo env``: the facts that a bug report needs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from mezzo.cli.app import app
from mezzo.cli.output import show_json
from mezzo.machine import environment

__all__ = ["env"]


@app.command("env")
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for a program.")] = False,
) -> None:
    """Print what a bug report needs: versions, devices, what works on them, variables that matter.

    [bold]mezzo env[/bold]          text to paste into an issue

    [bold]mezzo env --json[/bold]   the same for a program

    These are facts. What follows from them is [bold]mezzo doctor[/bold]'s to say, and whether training works,
    [bold]mezzo test[/bold]'s. Of the environment only variables by known names are printed, and the home folder
    as ~.
    """
    with Console(stderr=True).status("trying products in each format; the first time takes seconds"):
        found = environment()
    if as_json:
        show_json(found.to_dict())
    else:
        typer.echo(str(found))
