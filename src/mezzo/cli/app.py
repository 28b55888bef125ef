"""The root command, to which every verb registers itself."""

from __future__ import annotations

from typing import Annotated

import typer

import mezzo

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
    """Hold what all verbs share: the version."""
