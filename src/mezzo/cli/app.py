"""The root command, to which every verb registers itself."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="mezzo",
    help="Train PyTorch models in mixed precision, and see why it is safe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Train PyTorch models in mixed precision, and see why it is safe."""
