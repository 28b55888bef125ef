"""``mezzo tune RECIPE``: find which ops need FP32, write the policy, and train with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mezzo import recipes, report, script
from mezzo.cli.app import app
from mezzo.cli.compare import Seed, compared, show
from mezzo.cli.output import format_named, leave, note, require_free, show_json, usual_format
from mezzo.cli.running import scripts_own
from mezzo.cli.script.words import IsModule, OnSubject, Words, refuse_for_script, stem_of, subject_of
from mezzo.numerics import Tuned
from mezzo.policy.text import SUFFIX
from mezzo.recipes.parallel import World
from mezzo.script import Program

__all__ = ["tune"]


@app.command("tune", cls=OnSubject)
def tune(
    words: Words,
    is_module: IsModule = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Low precision: bf16 or fp16; the format for this machine when omitted.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each trial.")] = 3,
    objective: Annotated[
        str, typer.Option(help="What is preferred where ops lose alike: speed (bytes moved) or memory (bytes kept).")
    ] = "speed",
    after: Annotated[int, typer.Option(min=0, help="FP32 steps that the weights train before.")] = 0,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="The policy file; NAME-DTYPE.policy when omitted.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the policy file.")] = False,
    compare: Annotated[bool, typer.Option(help="Train under FP32, O1 and the policy that was found.")] = True,
    compare_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of these trainings; their own number when omitted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Find the fewest ops of a recipe, or of a script's model, that need FP32, and the loss scale, by running it.

    [bold]mezzo tune digits-cnn[/bold]                              and compares

    [bold]mezzo tune docs-lm --dtype bf16 --after 100[/bold]        on weights trained a little

    [bold]mezzo tune docs-lm --no-compare --json[/bold]             evidence for a program

    [bold]mezzo train docs-lm --policy docs-lm-bfloat16.policy[/bold]  what was found, used

    [bold]mezzo tune --no-compare train.py --epochs 3[/bold]        your own script

    A script runs in FP32 until its model was called --steps times. Trials work on what it was called with, and on the
    gradients of what it returned. What the script prints goes to stderr.

    Every op starts low, those too that are FP32 in O1. The file says of each rule why it is there. The exit code is 4
    where gradients stay far from FP32's and no rule helps, or where training goes wrong under one of the policies.
    """
    subject = subject_of(words, is_module)
    dtype = usual_format("--dtype {} for the other") if dtype is None else format_named(dtype)
    path = out or Path(f"{stem_of(subject)}-{dtype}{SUFFIX}")
    options: Any = {"dtype": dtype, "steps": steps, "objective": objective, "after": after}
    if isinstance(subject, Program):
        require_free(path, "--out", overwrite)
        refuse_for_script(seed=seed)
        with scripts_own(subject):
            tuned = script.tune(subject, **options)
    else:
        recipe = recipes.get(subject)
        require_free(path, "--out", overwrite)
        with Console(stderr=True).status("running policies beside FP32"):
            tuned = recipes.tune(recipe, seed=seed, **options)
    tuned.save(path)
    document = {"verdict": tuned.verdict, "policy": str(tuned.policy), "file": str(path), **_evidence(tuned)}
    if not as_json:
        typer.echo(str(tuned))
    note(f"policy file: {path}")
    interrupted, alarms = False, tuned.evidence.result.is_fault
    if compare:
        policies = ["O0", f"O1,dtype={dtype}", str(tuned.policy)]
        comparison, directory = compared(subject, policies, steps=compare_steps, seed=seed, world=World())
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
