"""``mezzo report DIR``: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli.app import app
from mezzo.cli.output import console_for, note, show_judgement
from mezzo.report import judge, page, rank_tables, read

__all__ = ["report"]


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; report.html in the run directory when omitted.")
    ] = None,
) -> None:
    """Write a run as one HTML file that opens without a network, and say what the run came to.

    [bold]mezzo report runs/digits-cnn-20261122-101500[/bold]

    [bold]mezzo report runs/mine --out mine.html[/bold]      to send to a colleague

    Takes what [bold]mezzo compare[/bold], [bold]train[/bold] and [bold]inspect[/bold] wrote. Of a run that was
    killed it shows what there was until then, and says that it is partial.
    """
    path = page(directory, out)
    run, console = read(directory, killed=True), console_for(200)
    show_judgement(console, judge(run))
    for table in rank_tables(run, console.width):
        console.print()
        console.print(table)
    note(f"report: {path}")
