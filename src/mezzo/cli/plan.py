"""``mezzo plan SCRIPT``: which ops to run low where either precision would do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

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
from mezzo.cli.explain import explain_script
from mezzo.errors import PolicyError, require_extra
from mezzo.files import atomic_file, save_json
from mezzo.plan import Plan
from mezzo.plan import plan as plan_of
from mezzo.plan.planned import headline, picture
from mezzo.plan.planning import objective_number
from mezzo.policy import Policy
from mezzo.script.inspection import Called, Rehearsed, rehearse
from mezzo.script.program import Program, require_one_process


@app.command("plan", cls=OnScript)
def plan(
    words: Words,
    is_module: IsModule = False,
    policy: PolicyText = None,
    objective: Annotated[
        str, typer.Option(metavar="time|memory|NUMBER", help="What to save, or a number from 0 (time) to 1 (memory).")
    ] = "time",
    fused: Annotated[bool, typer.Option("--fused", help="Count as where torch.compile fuses kernels.")] = False,
    steps: Steps = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Place the casts of a script's models: the cheapest way to hold a policy's rules, found as a minimum cut.

    [bold]mezzo plan train.py --epochs 3[/bold]             --epochs is the script's

    [bold]mezzo plan --objective memory train.py[/bold]

    [bold]mezzo plan --full --out why train.py[/bold]       every op and cast, a picture

    The script runs in FP32 until an optimizer has stepped. Each model that it calls there is captured as torch.compile
    captures it; what must be low or FP32 by the policy's rules and lists is, and the rest is chosen.

    The answer comes first: casts and bytes beside torch.autocast's; then what Paddle's and TensorFlow's rules would
    give, what was chosen, and the policy to write. --out has plan.json, plan.dot and a picture: plan.svg where Graphviz
    is installed, otherwise plan.txt. The exit code is the script's where it ends before its step, and 4 where
    nothing could be planned.
    """
    program, chosen = program_of(words, is_module), usual_policy(policy)
    wanted = _objective(objective)
    if dry:
        explain_script(program, chosen, steps=steps, out=out, overwrite=overwrite, full=full, as_json=as_json)
    require_extra("plan", "a plan needs scipy", "scipy.sparse.csgraph")
    require_one_process("plan")
    folder = None if out is None else free_folder(out, overwrite)

    def ask(call: Called, policy: Policy) -> Plan:
        return plan_of(call.model, call.inputs, policy=policy, objective=wanted, fused=fused)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), closing_open_line():
        rehearsed = rehearse(program, chosen, ask, steps=steps or 1)
    code = script_exit_code(program, rehearsed.error) or (0 if rehearsed.results else ALERT)
    if folder is not None:
        _write(folder, program, rehearsed, code)
    if as_json:
        models = [planned.to_dict() for planned in rehearsed.results]
        show_json({"program": program.name, "models": models, "left_alone": rehearsed.left_alone})
    else:
        for planned in rehearsed.results:
            show_explanation(planned.parts(full=full), full)
    for model, why in rehearsed.left_alone.items():
        note(f"{model} cannot be planned: {why}")
    if not rehearsed.results and not rehearsed.left_alone and rehearsed.error is None:
        note(f"{program.name} called no model to train before its step {steps or 1} was done")
    raise typer.Exit(code)


def _objective(text: str) -> float:
    try:
        return objective_number(text if text in ("time", "memory") else float(text))  # type: ignore[arg-type]
    except ValueError as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(
            f"the objective is {text!r}", write="--objective time, memory, or a number between"
        ) from error


def _write(folder: Path, program: Program, rehearsed: Rehearsed[Plan], code: int) -> None:
    """Write each plan, its graph and a picture of that, then the summary; files of earlier results are gone."""
    for old in folder.glob("plan*"):
        old.unlink()
    models = []
    for number, planned in enumerate(rehearsed.results, 1):
        name = f"plan-{number}" if len(rehearsed.results) > 1 else "plan"
        save_json(planned.to_dict(), folder / f"{name}.json")
        with atomic_file(folder / f"{name}.dot") as file:
            file.write(planned.dot().encode())
        if (draw := shutil.which("dot")) is not None:
            subprocess.run([draw, "-Tsvg", "-o", folder / f"{name}.svg", folder / f"{name}.dot"], check=False)
        else:
            with atomic_file(folder / f"{name}.txt") as file:
                file.write(picture(planned).encode())
        models.append({"file": f"{name}.json", "model": planned.model, "headline": headline(planned)})
    summary = {"program": program.name, "models": models, "left_alone": rehearsed.left_alone, "exit_code": code}
    save_json(summary, folder / SUMMARY)
