"""``mezzo run SCRIPT``: an unmodified training script in mixed precision."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated

import typer

from mezzo import script
from mezzo.cli.app import (
    ALERT,
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
    closing_open_line,
    free_folder,
    note,
    program_of,
    script_exit_code,
    show_json,
    usual_policy,
)  # fmt: skip
from mezzo.cli.explain import explain_script
from mezzo.errors import printable
from mezzo.files import save_json
from mezzo.policy import Schedule
from mezzo.script.operand_records import OperandLog
from mezzo.script.program import METRICS, StepRecord


@app.command("run", cls=OnScript)
def run(
    words: Words,
    is_module: IsModule = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="A policy's text, or the path of a policy file; or several, each with the step that it begins at; "
            "O1 in the format for this machine when omitted.",
            show_default=False,
        ),
    ] = None,
    steps: Steps = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(metavar="NORM", help="Clip the gradients of a step together.", show_default=False)
    ] = None,
    hold_schedulers: Annotated[
        bool, typer.Option(help="Let learning-rate schedulers wait where a step was skipped; one host sync a step.")
    ] = True,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Run a training script as it is, in mixed precision.

    [bold]mezzo run train.py --epochs 3[/bold]                      --epochs is the script's

    [bold]mezzo run --policy O2,bf16 train.py[/bold]

    [bold]mezzo run --policy "fp8_module=*@0; O1,bf16@900" train.py[/bold]  FP8, then BF16

    [bold]mezzo run -m package.train --epochs 3[/bold]              a module, as python -m

    [bold]mezzo run --dry train.py[/bold]                           what would run low, and why

    [bold]torchrun --nproc-per-node 2 -m mezzo run train.py[/bold]  in two processes

    One session over all optimizers begins with the first training step: backward passes are scaled, gradients are FP32
    and unscaled behind them, steps checked; torch.autocast and GradScaler become the session's. State dicts hold FP32.

    Ends with a report on stderr: how much of the work of matrix products ran low, measured in the first steps; steps,
    skipped ones, loss scale; what was intercepted, what was left alone and why. --out holds it as summary.json, and
    loss, scale, norm and time of each step as metrics.jsonl. The exit code is the script's; where that is 0, 4 if the
    policy asks for low precision and nothing ran low, more than half of the steps were skipped, or a part of a schedule
    was refused.
    """
    program = program_of(words, is_module)
    chosen = Schedule.of(usual_policy(None) if policy is None else policy)
    if dry:
        explain_script(program, chosen.policies, steps=steps, out=out, overwrite=overwrite, full=full, as_json=as_json)
    is_first = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        metrics_file = None
        if out is not None and is_first:
            free_folder(out, overwrite)
            (out / SUMMARY).unlink(missing_ok=True)
            metrics_file = stack.enter_context((out / METRICS).open("w", buffering=1, encoding="utf-8"))

        def write(record: StepRecord) -> None:
            assert metrics_file is not None
            metrics_file.write(record.line)

        stack.enter_context(contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext())
        stack.enter_context(closing_open_line())
        operands = OperandLog(*chosen.policies)
        result = script.run(
            program,
            chosen,
            max_grad_norm=max_grad_norm,
            hold_schedulers=hold_schedulers,
            steps=steps,
            on_step=None if metrics_file is None else write,
            around=None if metrics_file is None else operands.around,
        )
    code = script_exit_code(program, result.error)
    if is_first:
        # The exit code of the script, also where the report's alarm makes this command's own another one.
        document = result.report.to_dict() | {"operands": operands.losses, "exit_code": code}
        if as_json:
            show_json(document)
        else:
            for line in result.report.lines:
                note(printable(line))
        if out is not None:
            save_json(document, out / SUMMARY)
    raise typer.Exit(code or (ALERT if result.report.alarm else 0))
