"""``mezzo bench``: timings on this machine, against what else a user could pick."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from mezzo.bench import bench_step
from mezzo.bench.shapes import SHAPES
from mezzo.cli.app import app
from mezzo.cli.output import console_for, format_named, show_json
from mezzo.machine import default_device

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, help="Time mezzo against what else you could pick, on this machine.")
app.add_typer(bench, name="bench")


@bench.callback()
def _verbs() -> None:
    """Hold the benchmarks."""


@bench.command("step")
def step(
    shapes: Annotated[str, typer.Option(help=f"Parameters to step on: {', '.join(SHAPES)}.")] = "gpt2-mini",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the accelerator when there is one.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Time one optimizer step, with bytes moved and kept, and the share of this machine's copy bandwidth.

    [bold]mezzo bench step[/bold]  14 M parameters in GPT-2's shapes

    [bold]mezzo bench step --shapes gpt2-small --dtype fp16[/bold]

    All contenders take turns in one process; ratios are against torch.amp with fused AdamW, casts of the next forward
    pass included, pair by pair. The first rounds compile and do not count.
    """
    with Console(stderr=True).status("stepping"):
        result = bench_step(
            shapes, dtype=format_named(dtype), device=device or default_device(), repetitions=repetitions
        )
    if as_json:
        show_json(result.to_json())
    else:
        console_for(160).print(result.table())
