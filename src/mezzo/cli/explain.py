"""``mezzo explain SCRIPT``: which precision each op in each module gets, and why."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mezzo.cli.app import (
    ALERT,
    SUMMARY,
    Full,
    IsModule,
    Json,
    OnScript,
    Out,
    Overwrite,
    PolicyText,
    Steps,
    Words,
    app,
    closing_open_line,
    free_folder,
    note,
    program_of,
    script_exit_code,
    show_explanation,
    show_json,
    usual_policy,
)  # fmt: skip
from mezzo.errors import PolicyError
from mezzo.explanation.explanation import Explanation, renderables
from mezzo.files import save_json
from mezzo.policy import Policy
from mezzo.script.inspection import Rehearsed, explained, rehearse
from mezzo.script.program import Program, require_one_process
from mezzo.tensors import LOW, dtype_name


def _refuse_dry(is_typed: bool) -> None:
    if is_typed:
        raise PolicyError(
            "mezzo explain has no --dry", why="it trains nothing without it either", write="the same without --dry"
        )


NoDry = Annotated[bool, typer.Option("--dry", hidden=True, callback=_refuse_dry)]


@app.command("explain", cls=OnScript)
def explain(
    words: Words,
    is_module: IsModule = False,
    policy: PolicyText = None,
    steps: Steps = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    _dry: NoDry = False,
) -> None:
    """Show what a script would run in low precision, what not and why, what casts cost, and what to write.

    [bold]mezzo explain train.py --epochs 3[/bold]          --epochs is the script's

    [bold]mezzo explain --policy O2,bf16 train.py[/bold]

    [bold]mezzo explain --full train.py[/bold]              every op, every cast

    [bold]mezzo explain --steps 100 train.py[/bold]         the step after 99 others

    [bold]mezzo explain --json --out why train.py[/bold]    for a program, and in a folder

    The script runs in FP32 until an optimizer has stepped, or has taken the step that --steps names. Each model that it
    calls there is explained by one watched forward and backward pass of a copy, cross-entropy on its output included.

    The answer comes first, then the rows that matter, alike modules folded: products left in FP32, the dearest casts,
    products whose dimensions should be padded, findings, and the precision of each op with who decided; (!) marks ops
    where what was measured is not what was decided. --out has explanation.json, numbered where there are several
    models, and summary.json. The exit code is the script's where it ends before its step, and 4 where nothing would run
    low.
    """
    program = program_of(words, is_module)
    chosen = usual_policy(policy)
    explain_script(program, [chosen], steps=steps, out=out, overwrite=overwrite, full=full, as_json=as_json)


def explain_script(
    program: Program,
    policies: Policy | Sequence[Policy],
    *,
    steps: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    full: bool = False,
    as_json: bool = False,
) -> NoReturn:
    """Run a script in FP32 until a step is done, explain each model that it has called under each policy, and exit.

    Args:
        program: The script, which runs once.
        policies: The policy, or several.
        steps: The step to explain; the first when omitted.
        out: A folder for what was found.
        overwrite: Whether results that are in it may be replaced.
        full: Whether to show every row.
        as_json: Whether to print JSON; what the script prints goes to stderr then.

    Raises:
        PolicyError: There are several processes, or results in the folder.
        typer.Exit: With the script's exit code if it has ended before the step; with 4 if nothing would run low.
    """
    require_one_process("explain")
    folder = None if out is None else free_folder(out, overwrite)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), closing_open_line():
        rehearsed = rehearse(program, policies, explained, steps=steps or 1)
    ran_low = any(
        product.dtype in map(dtype_name, LOW) for explanation in rehearsed.results for product in explanation.products
    )
    code = script_exit_code(program, rehearsed.error) or (0 if ran_low else ALERT)
    if folder is not None:
        _write(folder, program, rehearsed, code)
    if as_json:
        models = [explanation.to_dict() for explanation in rehearsed.results]
        show_json({"program": program.name, "models": models, "left_alone": rehearsed.left_alone})
    else:
        for explanation in rehearsed.results:
            show_explanation(list(renderables(explanation, full=full)), full)
    for what, why in rehearsed.left_alone.items():
        note(f"{what} cannot be explained: {why}")
    if not rehearsed.results and rehearsed.error is None:
        note(f"{program.name} called no model to train before its step {steps or 1} was done")
    raise typer.Exit(code)


def _write(folder: Path, program: Program, rehearsed: Rehearsed[Explanation], code: int) -> None:
    """Write each explanation, then the summary; files of earlier results are gone."""
    for old in folder.glob("explanation*.json"):
        old.unlink()
    names = [
        f"explanation-{number}.json" if len(rehearsed.results) > 1 else "explanation.json"
        for number in range(1, len(rehearsed.results) + 1)
    ]
    for name, explanation in zip(names, rehearsed.results, strict=True):
        save_json(explanation.to_dict(), folder / name)
    models = [
        {
            "file": name,
            "model": explanation.model,
            "policy": explanation.policy,
            "headline": explanation.answer.headline,
        }
        for name, explanation in zip(names, rehearsed.results, strict=True)
    ]
    summary = {"program": program.name, "models": models, "left_alone": rehearsed.left_alone, "exit_code": code}
    save_json(summary, folder / SUMMARY)
