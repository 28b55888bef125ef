"""``mezzo compare RECIPE``: train a recipe in FP32 and under several policies, and show the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mezzo import recipes, report, script
from mezzo.cli.app import app
from mezzo.cli.output import console_for, leave, note, run_directory, show_json, show_judgement, usual_format
from mezzo.cli.progress import watching
from mezzo.cli.script.words import IsModule, OnSubject, Subject, Words, refuse_for_script, stem_of, subject_of
from mezzo.recipes.comparison import Comparison, default_policies
from mezzo.recipes.parallel import Parallel, World, joined
from mezzo.script import Program

__all__ = ["carry_out", "compare", "compared", "show"]

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
        str | None,
        typer.Option(
            help="Texts or files of policies, with semicolons between; O0 is the one to compare with. When omitted "
            "FP32, O1 to O3 in the format for this machine, O1 and O2 in the other.",
            show_default=False,
        ),
    ] = None,
    steps: Steps = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    parallel: InParallel = None,
    as_json: Json = False,
) -> None:
    """Train a recipe, or a script as it is, under several policies, and compare.

    [bold]mezzo compare digits-cnn[/bold]   FP32 and five policies: a minute

    [bold]mezzo compare docs-lm --policies "O0; O2,bf16" --steps 300[/bold]

    [bold]mezzo compare digits-cnn --policies "O0; O1,bf16; O1,fp16,low=softmax" --json[/bold]

    [bold]torchrun --nproc-per-node 2 -m mezzo compare docs-lm --parallel ddp[/bold]

    [bold]mezzo compare --policies O1,bf16 train.py[/bold]   your own script

    A recipe has the same weights and batches under every policy. A script runs in FP32 and under each policy, each time
    in a process of its own: seed its random numbers. It writes its files each time, and prints to stderr; its losses
    are those of its own backward passes.

    Ends with a verdict, a table, and a run directory with report.html, curves.png, summary.json and metrics.jsonl (one
    line a step). The exit code is 4 where training goes wrong under a policy. Ctrl-C sums up what there is, and the
    exit code is 130.
    """
    subject = subject_of(words, is_module)
    options: Any = {"steps": steps, "seed": seed, "out": out, "overwrite": overwrite}
    if isinstance(subject, Program):
        refuse_for_script(seed=seed, parallel=parallel)
    else:
        recipes.get(subject)  # before anything is said of formats
    if policies is None:
        usual_format('--policies "O0; O1,{}" for the other alone')
        texts = default_policies()
    else:
        texts = tuple(text for each in policies.split(";") if (text := each.strip()))
    carry_out(subject, texts, parallel=parallel, as_json=as_json, **options)


def carry_out(
    subject: Subject, policies: Sequence[str], *, parallel: Parallel | None, as_json: bool, **options: Any
) -> None:
    """Compare, draw, print; shared with ``mezzo train``, which compares one policy with nothing.

    Of several ranks the first one draws and prints.

    Args:
        subject: A recipe, or a script.
        policies: Texts or files of policies.
        parallel: How ranks share the batches of a recipe.
        as_json: Whether to print JSON.
        **options: Of :func:`compared`.

    Raises:
        MezzoError: As :func:`mezzo.recipes.compare`, before any training.
        typer.Exit: With 130 after Ctrl-C; of the first rank with 4, where training went wrong under a policy.
    """
    with joined(World() if isinstance(subject, Program) else parallel) as world:
        comparison, directory = compared(subject, policies, world=world, **options)
    alarms = False
    if world.is_first:
        run = report.read(directory)
        if as_json:
            show_json(comparison.to_dict())
        else:
            show(comparison, run)
        note(f"run directory: {directory}")
        alarms = report.judge(run).level == "bad"
    leave(interrupted=comparison.interrupted, alarms=alarms)


def compared(
    subject: Subject,
    policies: Sequence[str],
    *,
    steps: int | None,
    seed: int,
    out: Path | None = None,
    overwrite: bool = False,
    world: World,
) -> tuple[Comparison, Path]:
    """Compare trainings of a recipe or runs of a script, and draw; return the comparison and the run directory."""
    report.require_matplotlib()
    report.require_plotly()
    out = world.same(run_directory(stem_of(subject), out))
    options: Any = {"steps": steps, "out": out, "overwrite": overwrite}
    if isinstance(subject, Program):
        name = subject.name
        comparison = script.compare(subject, policies, begins=lambda policy: note(f"{name} under {policy}"), **options)
    else:
        recipe, console = recipes.get(subject), Console(stderr=True)
        with watching(console, recipe.metric, len(policies)) if world.is_first else nullcontext() as watcher:
            comparison = recipes.compare(recipe, policies, seed=seed, parallel=world, watcher=watcher, **options)
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
