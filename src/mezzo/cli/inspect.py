"""``mezzo inspect RECIPE``: record what a training run does to numbers, and say in which formats it is safe."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from mezzo import recipes, report, script
from mezzo.cli.app import app
from mezzo.cli.compare import Out, Overwrite, Seed
from mezzo.cli.output import console_for, leave, note, run_directory, show_json, show_judgement
from mezzo.cli.progress import watching
from mezzo.cli.running import scripts_own
from mezzo.cli.script.words import IsModule, OnSubject, Words, refuse_for_script, stem_of, subject_of
from mezzo.recipes.inspection import DEFAULT_POLICY
from mezzo.script import Program

__all__ = ["inspect"]


@app.command("inspect", cls=OnSubject)
def inspect(
    words: Words,
    is_module: IsModule = False,
    policy: Annotated[
        str, typer.Option(help="A policy's text, or the path of a file; FP32 shows what every format would lose.")
    ] = DEFAULT_POLICY,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many; the recipe's, or the script's, own number when omitted.", show_default=False
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one recorded step to the next.")] = 50,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the verdict.")] = False,
) -> None:
    """Train a recipe or a script, record where its numbers lie, and say which formats are safe, at which scale, why.

    [bold]mezzo inspect digits-cnn[/bold]                          in FP32: would FP16 do?

    [bold]mezzo inspect docs-lm --policy O3,bf16[/bold]            what goes wrong under it?

    [bold]mezzo inspect docs-lm --steps 200 --every 20 --out runs/look[/bold]

    [bold]mezzo inspect --steps 200 train.py --epochs 3[/bold]     your own script, 200 steps

    Of a script the largest model is recorded; what it prints goes to stderr. An error of its own leaves a partial run.

    The verdict comes first; then what is wrong, the gravest first, with what to write. The run directory holds
    report.html, with the histograms behind the verdict, found.policy to go on with, evidence.jsonl, explanation.json,
    summary.json and metrics.jsonl. The exit code is 4 where the run itself goes wrong under its policy. Ctrl-C sums up
    what there is, and the exit code is 130.
    """
    report.require_plotly()
    subject = subject_of(words, is_module)
    options: Any = {"steps": steps, "every": every, "overwrite": overwrite}
    if isinstance(subject, Program):
        refuse_for_script(seed=seed)
        out = run_directory(stem_of(subject), out)
        try:
            with scripts_own(subject):
                inspection = script.inspect(subject, policy, out=out, **options)
        except typer.Exit:
            note(f"{subject.name} failed; what was recorded until then is in {out}: mezzo report {out}")
            raise
    else:
        recipe = recipes.get(subject)
        out = run_directory(subject, out)
        with watching(Console(stderr=True), recipe.metric, 1) as watcher:
            inspection = recipes.inspect(recipe, policy, seed=seed, out=out, watcher=watcher, **options)
    report.page(out)
    judgement = report.judge(report.read(out))
    if as_json:
        show_json(inspection.to_dict())
    else:
        show_judgement(console_for(200), judgement)
    note(f"run directory: {out}")
    leave(interrupted=inspection.run.interrupted, alarms=judgement.level == "bad")
