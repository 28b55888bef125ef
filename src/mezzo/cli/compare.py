"""``mezzo compare RECIPE``: train a recipe in FP32 and under several policies, and show the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mezzo import recipes, report, script
from mezzo.cli.app import app
from mezzo.cli.output import console_for, leave, note, run_directory, show_json, show_judgement
from mezzo.cli.progress import watching
from mezzo.cli.script.words import IsModule, OnSubject, Words, program_of, refuse_for_script
from mezzo.policy import Policy
from mezzo.recipes.comparison import DEFAULT_POLICIES, Comparison
from mezzo.recipes.parallel import Parallel, World, joined
from mezzo.script import Program

__all__ = ["carry_out", "compare", "compared", "compared_scripts", "show"]

Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps per policy; the recipe's, or the script's, own number when omitted.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of initial weights and batches, the same for every policy.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The run directory; runs/NAME-DATE-TIME when omitted.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")]
InParallel = Annotated[
    Parallel | None,
    typer.Option("--parallel", help="How the processes that torchrun started share each batch.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")]


@app.command("compare", cls=OnSubject)
def compare(
    words: Words,
    is_module: IsModule = False,
    policies: Annotated[
        str, typer.Option(help="Texts or files of policies, with semicolons between; O0 is the one to compare with.")
    ] = "; ".join(DEFAULT_POLICIES),
    steps: Steps = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    parallel: InParallel = None,
    as_json: Json = False,
) -> None:
    """Train a recipe, or a script as it is, under several policies, and compare.

    [bold]mezzo compare digits-cnn[/bold]   FP32, O1 to O3 in FP16, O1 and O2 in BF16: a minute

    [bold]mezzo compare docs-lm --policies "O0; O2,dtype=bfloat16" --steps 300[/bold]

    [bold]mezzo compare digits-cnn --policies "O0; O1,dtype=float16,low=softmax" --json[/bold]

    [bold]torchrun --nproc-per-node 2 -m mezzo compare docs-lm --parallel ddp[/bold]

    [bold]mezzo compare --policies "O1,dtype=bfloat16" train.py[/bold]   your own script

    A recipe has the same weights and batches under every policy. A script runs in FP32 and under each policy, each time
    in a process of its own: seed its random numbers. It writes its files each time, and prints to stderr; its losses
    are those of its own backward passes.

    Ends with a verdict, a table, and a run directory with report.html, curves.png, summary.json and metrics.jsonl (one
    line a step). The exit code is 4 where training goes wrong under a policy. Ctrl-C sums up what there is, and the
    exit code is 130.
    """
    texts = [text.strip() for text in policies.split(";")]
    texts = [text for text in texts if text]
    if (program := program_of(words, is_module)) is not None:
        refuse_for_script(seed=seed, parallel=parallel)
        sum_up(*compared_scripts(program, texts, steps, out, overwrite), as_json)
        return
    carry_out(words[0], texts, steps, seed, out, overwrite, parallel, as_json)


def carry_out(
    recipe: str,
    policies: Sequence[str],
    steps: int | None,
    seed: int,
    out: Path | None,
    overwrite: bool,
    parallel: Parallel | None,
    as_json: bool,
) -> None:
    """Compare, draw, print; shared with ``mezzo train``, which compares one policy with nothing.

    Of several ranks the first one draws and prints.

    Raises:
        MezzoError: As :func:`mezzo.recipes.compare`, before any training.
        typer.Exit: With 130 after Ctrl-C; of the first rank with 4, where training went wrong under a policy.
    """
    with joined(parallel) as world:
        comparison, directory = compared(recipe, policies, steps, seed, out, overwrite, world)
    if world.is_first:
        sum_up(comparison, directory, as_json)
    leave(interrupted=comparison.interrupted, alarms=False)


def sum_up(comparison: Comparison, directory: Path, as_json: bool) -> None:
    """Print a comparison, and leave where training was interrupted, or went wrong under a policy."""
    run = report.read(directory)
    if as_json:
        show_json(comparison.to_dict())
    else:
        show(comparison, run)
    note(f"run directory: {directory}")
    leave(interrupted=comparison.interrupted, alarms=report.judge(run).level == "bad")


def compared_scripts(
    program: Program, policies: Sequence[str], steps: int | None, out: Path | None, overwrite: bool
) -> tuple[Comparison, Path]:
    """Compare the runs of a script, and draw; return the comparison and the run directory."""
    report.require_matplotlib()
    report.require_plotly()
    out = run_directory(Path(program.name).stem, out)

    def begins(policy: Policy) -> None:
        note(f"{program.name} under {policy}")

    comparison = script.compare(program, policies, steps=steps, out=out, overwrite=overwrite, begins=begins)
    report.curves(out)
    report.page(out)
    return comparison, out


def compared(
    recipe: str,
    policies: Sequence[str],
    steps: int | None,
    seed: int,
    out: Path | None,
    overwrite: bool,
    world: World,
) -> tuple[Comparison, Path]:
    """Compare, and draw; return the comparison and the run directory."""
    chosen = recipes.get(recipe)
    report.require_matplotlib()
    report.require_plotly()
    out = world.same(run_directory(recipe, out))
    with watching(Console(stderr=True), chosen.metric, len(policies)) if world.is_first else nullcontext() as watcher:
        comparison = recipes.compare(
            chosen,
            policies,
            steps=steps,
            seed=seed,
            out=out,
            overwrite=overwrite,
            parallel=world,
            watcher=watcher,
        )
    if world.is_first:
        report.curves(out)
        report.page(out)
    return comparison, out


def show(comparison: Comparison, run: report.Run) -> None:
    """Print a comparison: what it came to, and its table."""
    summary = comparison.to_dict()
    console = console_for(200)
    show_judgement(console, report.judge(run))
    console.print()
    for table in (*report.results_tables(summary, console.width), *report.rank_tables(run, console.width)):
        console.print(table)
        console.print()
    for line in report.facts(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
