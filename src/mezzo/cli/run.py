"""``mezzo run SCRIPT``: an unmodified training script in mixed precision."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from mezzo import script
from mezzo.cli.app import app
from mezzo.cli.explain import explain_script
from mezzo.cli.output import ALERT, UsualPolicy, note, require_free, usual_policy
from mezzo.cli.running import ended_lines, ended_with
from mezzo.errors import printable
from mezzo.files import whole
from mezzo.recipes import StepRecord
from mezzo.recipes.run_directory import record_text

__all__ = ["run"]


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    words: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script, and its arguments.")],
    policy: UsualPolicy = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    save_policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy to a file, too.", show_default=False)
    ] = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(metavar="NORM", help="Clip the gradients of a step together.", show_default=False)
    ] = None,
    hold_schedulers: Annotated[
        bool, typer.Option(help="Let learning-rate schedulers wait where a step was skipped; one host sync a step.")
    ] = True,
    dry: Annotated[
        bool, typer.Option("--dry", help="Run one step, in FP32, and explain what the policy would make of it.")
    ] = False,
    to_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON, too.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the script after so many steps.", show_default=False)
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write loss, scale, norm and time of each step as JSON.", show_default=False),
    ] = None,
) -> None:
    """Run a training script as it is, in mixed precision.

    [bold]mezzo run train.py --epochs 3[/bold]                      --epochs is the script's

    [bold]mezzo run --policy O2,bf16 train.py[/bold]

    [bold]mezzo run -m package.train --epochs 3[/bold]              a module, as python -m

    [bold]mezzo run --dry train.py[/bold]                           what would run low, and why

    [bold]torchrun --nproc-per-node 2 -m mezzo run train.py[/bold]  in two processes

    One session over all optimizers begins with the first training step: backward passes are scaled, gradients are FP32
    and unscaled behind them, steps checked; torch.autocast and GradScaler become the session's. State dicts hold FP32.

    Ends with a report on stderr: how much of the work of matrix products ran low, measured in the first steps; steps,
    skipped ones, loss scale; what was intercepted, what was left alone and why. The exit code is the script's; where
    that is 0, 4 if the policy asks for low precision and nothing ran low, or more than half of the steps were skipped.
    """
    program = script.Program(name=words[0], arguments=tuple(words[1:]), is_module=is_module)
    for path, option in ((save_policy, "--save-policy"), (to_json, "--json"), (metrics, "--metrics")):
        if path is not None:
            require_free(path, option, overwrite=True)
    chosen = usual_policy(policy)
    if save_policy is not None:
        chosen.save(save_policy)
    if dry:
        explain_script(program, chosen)
    is_first = os.environ.get("RANK", "0") == "0"
    with whole(metrics) if metrics is not None and is_first else nullcontext() as lines:

        def write(record: StepRecord) -> None:
            assert lines is not None
            lines.write(record_text(record).encode())

        with ended_lines():
            ended = script.run(
                program,
                chosen,
                max_grad_norm=max_grad_norm,
                hold_schedulers=hold_schedulers,
                steps=steps,
                told=None if lines is None else write,
            )
    code = ended_with(program, ended.error)
    if is_first:
        for line in ended.report.lines:
            note(printable(line))
        if to_json is not None:
            with whole(to_json) as file:
                file.write(ended.report.to_json().encode())
    raise typer.Exit(code or (ALERT if ended.report.alarm else 0))
