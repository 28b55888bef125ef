"""``mezzo tune SCRIPT``: find which ops of a script's model need FP32, and write the policy."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Annotated, Any

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
    free_folder,
    note,
    program_of,
    script_output_on_stderr,
    show_json,
    usual_policy,
)  # fmt: skip
from mezzo.cli.explain import explain_script
from mezzo.files import save_json
from mezzo.numerics.tuning.search import tunable
from mezzo.script import tune as tuned_script

FOUND = "found.policy"


@app.command("tune", cls=OnScript)
def tune(
    words: Words,
    is_module: IsModule = False,
    policy: PolicyText = None,
    steps: Steps = None,
    after: Annotated[int, typer.Option(min=0, help="FP32 steps that the weights train before.")] = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    full: Full = False,
    dry: Dry = False,
) -> None:
    """Find the fewest ops of a script's model that need FP32, and the loss scale, by running it.

    [bold]mezzo tune train.py --epochs 3[/bold]                    each rule with its reason

    [bold]mezzo tune --policy O1,fp16 --out tuned train.py[/bold]  writes tuned/found.policy

    [bold]mezzo tune --after 100 train.py[/bold]                   on weights trained a little

    The script runs in FP32 until its model was called --steps times (3 when omitted). Each trial repeats these calls,
    with the gradients of what they returned. Every op starts low that --policy has no rule for. What the script prints
    goes to stderr. The exit code is 4 where gradients stay far from FP32's and no rule helps.
    """
    program = program_of(words, is_module)
    chosen = tunable(usual_policy(policy))
    if dry:
        explain_script(program, chosen, out=out, overwrite=overwrite, full=full, as_json=as_json)
    folder = None if out is None else free_folder(out, overwrite)
    with script_output_on_stderr(program):
        tuned = tuned_script(program, chosen, steps=steps or 3, after=after)
    rules = {str(rule): rule.reason for rule in tuned.policy.rules}
    document: dict[str, Any] = {"verdict": tuned.verdict, "policy": str(tuned.policy), "rules": rules}
    document["evidence"] = dataclasses.asdict(tuned.evidence)
    if as_json:
        show_json(document)
    else:
        typer.echo("\n".join([str(tuned), *(tuned.rows if full else ())]))
    named = str(tuned.policy)
    if folder is not None:
        (folder / SUMMARY).unlink(missing_ok=True)
        tuned.save(folder / FOUND)
        save_json(document, folder / SUMMARY)
        named = str(folder / FOUND)
        note(f"policy file: {named}")
    note(f'next: mezzo compare --policies "O0; {named}" {"-m " * is_module}{shlex.join(words)}')
    if tuned.evidence.result.is_fault:
        raise typer.Exit(ALERT)
