"""``mezzo bench``: timings on this machine, against what else a user could pick."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from mezzo.bench import StepResult, TrainResult, bench_step, bench_train
from mezzo.bench.facts import checked_device
from mezzo.bench.nets import NETS
from mezzo.bench.shapes import SHAPES
from mezzo.bench.ways import WAYS
from mezzo.cli.app import app
from mezzo.recipes.machine import default_device

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, help="Time mezzo against what else you could pick, on this machine.")
app.add_typer(bench, name="bench")


@bench.callback()
def _verbs() -> None:
    """Hold the benchmarks."""


@bench.command("step")
def step(
    shapes: Annotated[str, typer.Option(help=f"Parameters to step on: {', '.join(SHAPES)}.")] = "gpt2-mini",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the accelerator when there is one.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Time one optimizer step, with bytes moved and kept, and the share of this machine's copy bandwidth.

    [bold]mezzo bench step[/bold]                                   14 M parameters in GPT-2's shapes

    [bold]mezzo bench step --shapes gpt2-small --dtype float16[/bold]

    All contenders take turns in one process; ratios are against torch.amp with fused AdamW, casts of the next forward
    pass included, pair by pair. The first rounds compile and do not count.
    """
    with Console(stderr=True).status("stepping"):
        result = bench_step(shapes, dtype=dtype, device=device or default_device(), repetitions=repetitions)
    _show(result, as_json)


@bench.command("train")
def train(
    net: Annotated[str, typer.Option(help=f"What to train: {', '.join(NETS)}.")] = "64-tiny",
    size: Annotated[
        str | None, typer.Option(help="full, small or least; small on a CPU, full on a GPU.", show_default=False)
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(WAYS)}; fp32 and torch.amp always run.", show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the accelerator when there is one.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds in which two take turns.")] = 15,
    compiled: Annotated[bool, typer.Option(help="Time torch.compile(model) too; takes minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Time whole training steps, with throughput, peak memory, kernels and host syncs.

    [bold]mezzo bench train[/bold]                                  64 layers too small to keep a device busy

    [bold]mezzo bench train --net gpt2-small --ways "mezzo O1, mezzo O2"[/bold]

    All ways start from the same weights and train on the same batch, each in turns with torch.amp; a way whose loss
    does not follow that of FP32 is an error.
    """
    where = checked_device(device or default_device())
    with Console(stderr=True).status("training"):
        result = bench_train(
            net,
            size=size or ("small" if where.type == "cpu" else "full"),
            dtype=dtype,
            device=where,
            repetitions=repetitions,
            ways=None if ways is None else [way.strip() for way in ways.split(",")],
            compiled=compiled,
        )
    _show(result, as_json)


def _show(result: StepResult | TrainResult, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1, ensure_ascii=False))
    else:
        Console(width=None if Console().is_terminal else 160).print(result.table())
