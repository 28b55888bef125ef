"""A script's first step, explained: ``mezzo explain SCRIPT`` and ``mezzo run --dry SCRIPT``."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import NoReturn

import typer

from mezzo.cli.output import ALERT, note, show_explanation, show_json
from mezzo.cli.running import ended_lines, ended_with
from mezzo.explanation.table import renderables
from mezzo.policy import Policy
from mezzo.script import Program, rehearse
from mezzo.tensors import LOW, dtype_name

__all__ = ["explain_script"]


def explain_script(program: Program, policy: Policy, *, full: bool = False, as_json: bool = False) -> NoReturn:
    """Run a script in FP32 until its first step is done, explain each model that it has called, and leave.

    Args:
        program: The script.
        policy: The policy.
        full: Whether to show every row.
        as_json: Whether to print JSON; what the script prints goes to stderr then.

    Raises:
        typer.Exit: With the script's exit code if it has ended before its first step; with 4 if nothing would run low.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), ended_lines():
        found = rehearse(program, policy)
    if as_json:
        models = [json.loads(each.to_json()) for each in found.explanations]
        show_json({"program": program.name, "models": models, "left_alone": found.left_alone})
    else:
        for each in found.explanations:
            show_explanation(list(renderables(each, full=full)), full)
    for what, why in found.left_alone.items():
        note(f"{what} cannot be explained: {why}")
    ran_low = any(product.dtype in map(dtype_name, LOW) for each in found.explanations for product in each.products)
    if not found.explanations and found.error is None:
        note(f"{program.name} called no model to train before its first step")
    raise typer.Exit(ended_with(program, found.error) or (0 if ran_low else ALERT))
