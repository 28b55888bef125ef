"""``mezzo inspect SCRIPT``: record what a training run does to numbers, and say in which formats it is safe."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

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
    free_folder,
    note,
    program_of,
    script_output_on_stderr,
    show_json,
)  # fmt: skip
from mezzo.cli.explain import explain_script
from mezzo.errors import message, printable
from mezzo.explanation.rows import format_text, share_text
from mezzo.files import save_json
from mezzo.numerics.evidence import STATISTICS, write_statistics
from mezzo.policy import Policy
from mezzo.report.page import draw, draw_statistics, require_matplotlib
from mezzo.script.inspection import Inspection, Lost
from mezzo.script.inspection import inspect as inspected


@app.command("inspect", cls=OnScript)
def inspect(
    words: Words,
    is_module: IsModule = False,
    policy: Annotated[
        str, typer.Option(help="A policy's text, or the path of a file; FP32 shows what every format would lose.")
    ] = "O0",
    steps: Steps = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one recorded step to the next.")] = 50,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model, as its torch.compile does.")] = False,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Run a script, record where the numbers of its largest model lie, and say which formats are safe, at which scale.

    [bold]mezzo inspect train.py[/bold]                            in FP32: would FP16 do?

    [bold]mezzo inspect --policy O3,bf16 train.py --epochs 1[/bold]  what goes wrong under it?

    [bold]mezzo inspect --steps 200 --every 20 --out look train.py[/bold]

    The verdict comes first; then what is wrong, the gravest first, with what to write; then what formats would lose.
    What the script prints goes to stderr. --out holds evidence.jsonl, statistics.jsonl (a line a step, module and
    kind), metrics.jsonl, found.policy to go on with, pictures and summary.json. The exit code is 4 where the run goes
    wrong under its policy. Ctrl-C sums up what there is, and the exit code is 130.
    """
    program = program_of(words, is_module)
    chosen = Policy.of(policy)
    if dry:
        explain_script(program, chosen, steps=steps, out=out, overwrite=overwrite, full=full, as_json=as_json)
    if out is not None:
        require_matplotlib()
        free_folder(out, overwrite)
        (out / SUMMARY).unlink(missing_ok=True)
    try:
        with script_output_on_stderr(program):
            inspection = inspected(program, chosen, steps=steps, every=every, out=out, compiled=compiled)
    except typer.Exit:
        if out is not None:
            note(f"{program.name} failed; what was recorded until then is in {out}")
        raise
    if as_json:
        show_json(inspection.to_dict())
    else:
        _show(inspection, full)
    if out is not None:
        draw(inspection.evidence, out / "histograms.png")
        write_statistics(inspection.evidence, out / STATISTICS)
        draw_statistics(out / "statistics.png", inspection.evidence.statistics())
        (inspection.diagnosis.policy or chosen).save(out / "found.policy")
        save_json(inspection.to_dict(), out / SUMMARY)
        note(f"results: {out}")
    exit_unless_well(interrupted=inspection.is_interrupted, alarms=inspection.is_wrong)


def _show(inspection: Inspection, full: bool) -> None:
    """Print the verdict, what is wrong, and what each format would lose."""
    console, diagnosis = console_for(120), inspection.diagnosis
    lines = [verdict.line for verdict in diagnosis.formats] or [
        "Nothing is known of formats: " + ("the run itself goes wrong." if diagnosis.alerts else "see below.")
    ]
    lines += diagnosis.lines
    if diagnosis.policy is not None:
        lines += ["", f'amp = mezzo.MixedPrecision(model, optimizer, policy="{diagnosis.policy}")']
    for number, alert in enumerate(diagnosis.alerts, start=1):
        lines += ["", f"{number}. {message(alert.what, where=alert.where, why=alert.why, write=alert.write)}"]
    recorded = len(inspection.evidence.steps)
    lines += [
        "",
        f"{recorded} of {len(inspection.records)} steps under {inspection.policy} were recorded; unscaled values:",
    ]
    for line in lines:
        console.print(printable(line, keep="\n"), highlight=False, markup=False, soft_wrap=not console.is_terminal)
    table = Table(box=None, pad_edge=False)
    for name in ("tensors", "format", "flushed", "subnormal", "overflow", "swallowed"):
        table.add_column(name, justify="left" if name in ("tensors", "format") else "right", overflow="fold")
    before = ""
    for lost in inspection.lost(by_tensor=full):
        name = " ".join(filter(None, (lost.kind.replace("_", " "), lost.tensor)))
        table.add_row("" if name == before else name, format_text([lost.format]), *_shares(lost))
        before = name
    console.print(table)


def _shares(lost: Lost) -> list[str]:
    numbers = (lost.flushed, lost.subnormal, lost.overflow, lost.swallowed)
    return ["–" if share is None else share_text(share, 1) for share in numbers]
