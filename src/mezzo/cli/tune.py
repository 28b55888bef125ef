"""``mezzo tune RECIPE``: find which ops need FP32, write the policy, and train with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mezzo import recipes, report
from mezzo.cli.app import app
from mezzo.cli.compare import Seed, compared, show
from mezzo.cli.output import leave, note, require_free, show_json
from mezzo.numerics import Tuned
from mezzo.recipes.parallel import World

__all__ = ["tune"]


@app.command("tune")
def tune(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(recipes.RECIPES)}.")],
    dtype: Annotated[str, typer.Option(help="What low precision is: float16 or bfloat16.")] = "float16",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each trial.")] = 3,
    objective: Annotated[
        str, typer.Option(help="What is preferred where ops lose alike: speed (bytes moved) or memory (bytes kept).")
    ] = "speed",
    after: Annotated[int, typer.Option(min=0, help="FP32 steps that the weights train before.")] = 0,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="The policy file; RECIPE-DTYPE.toml when omitted.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the policy file.")] = False,
    compare: Annotated[bool, typer.Option(help="Train under FP32, O1 and the policy that was found.")] = True,
    compare_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of these trainings; the recipe's own number when omitted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Find the fewest ops of a recipe that need FP32, and the loss scale, by running it.

    [bold]mezzo tune digits-cnn[/bold]                          in FP16; writes digits-cnn-float16.toml, and compares

    [bold]mezzo tune docs-lm --dtype bfloat16 --after 100[/bold]     on weights that have trained a little

    [bold]mezzo tune docs-lm --no-compare --json[/bold]         the evidence, for a program to read

    [bold]mezzo train docs-lm --policy docs-lm-float16.toml[/bold]   what was found, used

    Every op starts low, those too that are FP32 in O1. The file says of each rule why it is there. The exit code is 4
    where gradients stay far from FP32's and no rule helps, or where training goes wrong under one of the policies.
    """
    chosen = recipes.get(recipe)
    path = out or Path(f"{recipe}-{dtype}.toml")
    require_free(path, "--out", overwrite)
    messages = Console(stderr=True)
    with messages.status("running policies beside FP32"):
        tuned = recipes.tune(
            chosen,
            dtype=dtype,
            steps=steps,
            objective=objective,  # type: ignore[arg-type]
            after=after,
            seed=seed,
        )
    tuned.save(path)
    document = {"verdict": tuned.verdict, "policy": str(tuned.policy), "file": str(path), **_evidence(tuned)}
    if not as_json:
        typer.echo(str(tuned))
    note(f"policy file: {path}")
    interrupted, alarms = False, tuned.evidence.result.is_fault
    if compare:
        policies = ["O0", f"O1,dtype={dtype}", str(tuned.policy)]
        comparison, directory = compared(recipe, policies, compare_steps, seed, None, False, World())
        run = report.read(directory)
        interrupted, alarms = comparison.interrupted, alarms or report.judge(run).level == "bad"
        document["comparison"] = comparison.to_dict()
        if not as_json:
            typer.echo()
            show(comparison, run)
        note(f"run directory: {directory}")
    if as_json:
        show_json(document)
    leave(interrupted=interrupted, alarms=alarms)


def _evidence(tuned: Tuned) -> dict[str, Any]:
    return {"rules": {str(rule): rule.reason for rule in tuned.policy.rules}, "evidence": tuned.evidence.to_dict()}
