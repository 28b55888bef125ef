"""``mezzo explain SCRIPT``: what a policy would make of a script's first step; and ``--dry`` of the other verbs."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import NoReturn

import typer

from mezzo.cli.app import app
from mezzo.cli.options import (
    BEFORE_SCRIPT,
    SUMMARY,
    Dry,
    Full,
    IsModule,
    Json,
    Out,
    Overwrite,
    PolicyText,
    Words,
    free_folder,
)  # fmt: skip
from mezzo.cli.output import ALERT, note, show_explanation, show_json, usual_policy
from mezzo.cli.running import ended_lines, ended_with
from mezzo.documents import jsonable
from mezzo.explanation.table import renderables
from mezzo.files import whole
from mezzo.policy import Policy
from mezzo.script import Program, rehearse
from mezzo.tensors import LOW, dtype_name

__all__ = ["explain", "explain_script"]


@app.command("explain", context_settings=BEFORE_SCRIPT)
def explain(
    words: Words,
    is_module: IsModule = False,
    policy: PolicyText = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Say what of a script runs in low precision, what does not and why, what casts cost, and what to write.

    [bold]mezzo explain train.py --epochs 3[/bold]                   --epochs is the script's

    [bold]mezzo explain --policy O1,bf16,fp32=softmax train.py[/bold]

    [bold]mezzo explain --full train.py[/bold]                       every op, every cast

    The script runs in FP32 until an optimizer has stepped; each model that it has called is explained, by one forward
    and backward pass of a copy of it. The answer comes first, then the rows that matter, alike modules folded: products
    left in FP32, the dearest casts, products whose dimensions should be padded, findings, and the precision of each op
    with who decided; (!) marks ops where what was measured is not what was decided.
    """
    program = Program(name=words[0], arguments=tuple(words[1:]), is_module=is_module)
    folder = None if out is None else free_folder(out, overwrite)
    explain_script(program, usual_policy(policy), full=full, as_json=as_json, out=folder)


def explain_script(
    program: Program, policy: Policy, *, full: bool = False, as_json: bool = False, out: Path | None = None
) -> NoReturn:
    """Run a script in FP32 until its first step is done, explain each model that it has called, and leave.

    Args:
        program: The script.
        policy: The policy.
        full: Whether to show every row.
        as_json: Whether to print JSON; what the script prints goes to stderr then.
        out: A folder that is there: it gets the JSON as ``summary.json``.

    Raises:
        typer.Exit: With the script's exit code if it has ended before its first step; with 4 if nothing would run low.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), ended_lines():
        found = rehearse(program, policy)
    models = [json.loads(each.to_json()) for each in found.explanations]
    summary = {"program": program.name, "models": models, "left_alone": found.left_alone}
    if out is not None:
        with whole(out / SUMMARY) as file:
            file.write(json.dumps(jsonable(summary), indent=2, allow_nan=False).encode())
    if as_json:
        show_json(summary)
    else:
        for each in found.explanations:
            show_explanation(list(renderables(each, full=full)), full)
    for what, why in found.left_alone.items():
        note(f"{what} cannot be explained: {why}")
    ran_low = any(product.dtype in map(dtype_name, LOW) for each in found.explanations for product in each.products)
    if not found.explanations and found.error is None:
        note(f"{program.name} called no model to train before its first step")
    raise typer.Exit(ended_with(program, found.error) or (0 if ran_low else ALERT))
