"""``mezzo compare SCRIPT``: a script in FP32 and under policies, and whether they reach the same."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mezzo import report, script
from mezzo.cli.app import (
    SUMMARY,
    Dry,
    Full,
    IsModule,
    Json,
    OnScript,
    Out,
    Overwrite,
    Steps,
    Words,
    app,
    console_for,
    exit_unless_well,
    note,
    program_of,
    show_json,
    usual_format,
)
from mezzo.cli.explain import explain_script
from mezzo.errors import PolicyError, printable
from mezzo.files import save_json
from mezzo.policy import Policy
from mezzo.policy.fields import is_schedule
from mezzo.policy.rules import separated
from mezzo.report.verdict import number, short
from mezzo.script.comparison import (
    Run,
    ablations,
    default_policies,
    last_printed,
    parse_policies,
    summary_of,
)

#: Columns of the table where no terminal folds it.
_WIDEST = 200


@app.command("compare", cls=OnScript)
def compare(
    words: Words,
    is_module: IsModule = False,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            "--policy",
            help="Texts or files of policies, with semicolons between; FP32 comes first in any case. O1 and O2 in both "
            "formats when omitted.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each policy, with --seed 0, 1, … behind the script.", show_default=False),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The words before the number that counts; those of the last line when omitted.", show_default=False
        ),
    ] = None,
    better: Annotated[str | None, typer.Option(help="higher or lower, where its words do not say.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=0, help="What counts as equal, in its unit; 1 % when omitted.", show_default=False),
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="O2 in FP16 without scale and at scale 8, and O3, too.")
    ] = False,
    steps: Steps = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Run a training script as it is in FP32 and under policies, and say whether they reach the same.

    [bold]mezzo compare train.py --epochs 3[/bold]                  --epochs is the script's

    [bold]mezzo compare --seeds 3 --policies "O1,bf16; O2,fp16" train.py[/bold]

    [bold]mezzo compare --metric "test accuracy" --margin 0.5 train.py[/bold]

    [bold]mezzo compare --seeds 3 --ablate --out runs/mine train.py[/bold]

    Each run is a process of its own. It is judged by the last number behind the words of --metric that it prints; by
    itself by a last line such as "test accuracy 99.33 %"; without one by its training loss.

    A policy is equal only where the 95 % interval of its difference to FP32, over seeds, lies inside the margin. With
    --out what has finished is not run again, and the folder holds summary.json, curves.png, report.html, and for each
    run its metrics.jsonl and what it printed. Of products below sixteen bits, summary.json and report.html have what
    was lost of their operands, by layer. The exit code is 4 where a policy is worse, diverged, failed or did nothing in
    low precision; Ctrl-C sums up what there is, and the exit code is 130.
    """
    report.require_report()
    program = program_of(words, is_module)
    texts = _texts(policies, ablate)
    if better not in (None, "higher", "lower"):
        raise PolicyError(f"--better is higher or lower, not {better!r}", write="--better higher, or --better lower")
    if dry:
        explain_script(
            program, parse_policies(texts)[1:], steps=steps, out=out, overwrite=overwrite, full=full, as_json=as_json
        )
    name = words[0] if is_module else Path(words[0]).resolve().stem
    folder = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = progress.add_task("runs", total=None)

    def ended(run: Run, index: int, count: int) -> None:
        seed = "" if run.seed is None else f", seed {run.seed}"
        value = number(run.metric) if run.went_well else f"exit code {run.code}"
        note(f"{index} of {count}: {short(run.policy)}{seed}: {value} after {run.steps} steps")
        progress.update(task, completed=index, total=count)

    options: Any = {"seeds": seeds, "steps": steps, "metric": metric, "better": better, "margin": margin}
    with progress:
        comparison = script.compare(program, texts, out=folder, overwrite=overwrite, ended=ended, **options)
    rows, verdict = report.rows(comparison), report.verdict(comparison)
    operands = (row.to_dict() for row in report.operand_rows(comparison))
    summary = summary_of(comparison, (row.to_dict() for row in rows), operands, verdict)
    report.draw_curves(comparison, folder / "curves.png")
    report.write_page(comparison, folder / "report.html")
    save_json(summary, folder / SUMMARY)
    if as_json:
        show_json(summary)
    else:
        is_wide = full or not Console().is_terminal  # a file has all columns, however wide they are
        shown = console_for(_WIDEST if is_wide else 120)
        for line in verdict:
            shown.print(printable(line), highlight=False, markup=False, soft_wrap=not shown.is_terminal)
        shown.print()
        shown.print(report.table(comparison, full=full, width=None if is_wide else shown.width))
    if metric is None and comparison.runs and comparison.metric is script.TRAINING_LOSS:
        last = last_printed(comparison.runs[0])
        why = f"its last line, {last!r}, has no metric in words, number and unit" if last else "it prints nothing"
        note(f'{why}, so runs are judged by the training loss; --metric "test accuracy" names another')
    note(f"results: {folder}" + ("; the same command with --out goes on there" if comparison.interrupted else ""))
    alarms = any(row.verdict in ("worse", "diverged", "failed") or row.low_share == 0 for row in rows[1:])
    exit_unless_well(interrupted=comparison.interrupted, alarms=alarms)


def _texts(policies: str | None, ablate: bool) -> list[str]:
    if policies is None:
        usual_format('--policies "O1,{}" for the other alone')
        texts = list(default_policies())
    else:
        texts = [text for entry in separated(policies, ";") if (text := entry.strip())]
    listed = set[str]()
    for text in texts:
        try:
            listed.add(str(Policy.of(text)))
        except PolicyError:  # which is refused later, with all others
            if policies is not None and is_schedule(policies):
                raise PolicyError(
                    f"mezzo compare takes no schedule: {policies!r}",
                    why="each of its runs has one policy, for all steps",
                    write="policies without steps; or mezzo run, which takes the schedule",
                ) from None
    return texts + [text for text in ablations() if ablate and str(Policy.of(text)) not in listed]
