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
    mezzo compare digits-cnn        FP32 and five policies, side by side
    mezzo compare docs-lm --policies "O0; O2,bf16"
    mezzo train digits-cnn --policy O1,bf16
    mezzo run train.py              your own script as it is, in mixed precision
    mezzo tune digits-cnn           which ops need FP32, found by running
    mezzo inspect digits-cnn        which formats are safe, at which loss scale
    mezzo report runs/demo          a run as one HTML file
    mezzo explain digits-cnn        what runs low, what does not, and why
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
