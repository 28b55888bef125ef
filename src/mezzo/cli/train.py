"""``mezzo train RECIPE``: train a recipe under one policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mezzo import recipes
from mezzo.cli.app import app
from mezzo.cli.compare import InParallel, Json, Out, Overwrite, Seed, Steps, carry_out

__all__ = ["train"]


@app.command("train")
def train(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(recipes.RECIPES)}.")],
    policy: Annotated[str, typer.Option(help="A policy's text, or the path of a policy file.")] = "O1,dtype=float16",
    steps: Steps = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    parallel: InParallel = None,
    as_json: Json = False,
) -> None:
    """Train a recipe under one policy.

    [bold]mezzo train digits-cnn[/bold]  in FP16, level O1

    [bold]mezzo train docs-lm --policy O2,dtype=bfloat16 --steps 300[/bold]

    [bold]mezzo train digits-cnn --policy O0 --seed 1 --out runs/fp32-seed1 --json[/bold]

    [bold]torchrun --nproc-per-node 2 -m mezzo train docs-lm --policy O2 --parallel ddp[/bold]

    Ends with one row of the table that [bold]mezzo compare[/bold] prints, and the same run directory. The exit code
    is 4 where training goes wrong under the policy. Ctrl-C sums up what there is, and the exit code is 130.
    """
    options: Any = {"steps": steps, "seed": seed, "out": out, "overwrite": overwrite}
    carry_out(recipe, [policy], parallel=parallel, as_json=as_json, **options)
