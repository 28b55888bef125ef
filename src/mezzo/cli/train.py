"""``mezzo train RECIPE``: train a recipe under one policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mezzo import recipes
from mezzo.cli.app import app
from mezzo.cli.compare import InParallel, Json, Out, Overwrite, Seed, Steps, carry_out
from mezzo.cli.output import UsualPolicy, usual_policy

__all__ = ["train"]


@app.command("train")
def train(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(recipes.RECIPES)}.")],
    policy: UsualPolicy = None,
    steps: Steps = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    parallel: InParallel = None,
    as_json: Json = False,
) -> None:
    """Train a recipe under one policy.

    [bold]mezzo train digits-cnn[/bold]  level O1, in the format for this machine

    [bold]mezzo train docs-lm --policy O2,bf16 --steps 300[/bold]

    [bold]mezzo train digits-cnn --policy O0 --seed 1 --out runs/fp32-seed1 --json[/bold]

    [bold]torchrun --nproc-per-node 2 -m mezzo train docs-lm --parallel ddp[/bold]

    Ends with one row of the table that [bold]mezzo compare[/bold] prints, and the same run directory. The exit code
    is 4 where training goes wrong under the policy. Ctrl-C sums up what there is, and the exit code is 130.
    """
    recipes.get(recipe)  # before anything is said of formats
    options: Any = {"steps": steps, "seed": seed, "out": out, "overwrite": overwrite}
    chosen = str(usual_policy(None)) if policy is None else policy
    carry_out(recipe, [chosen], parallel=parallel, as_json=as_json, **options)
