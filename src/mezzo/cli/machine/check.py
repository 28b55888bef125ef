"""``mezzo test``: whether mixed precision works on this machine."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from operator import itemgetter
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from mezzo.cli.app import app
from mezzo.cli.output import INTERRUPTED, console_for, format_named, note, show_json
from mezzo.cli.progress import bars
from mezzo.errors import printable
from mezzo.report.table import Column, fitted
from mezzo.selftest import Measured, SelfTest, TrialResult, chosen, selftest

__all__ = ["check"]

#: Exit codes, as all verbs have them.
FAILED = 1
UNSUPPORTED = 3
_NUMBERS: Final = ("ran low", "loss", "gradient")


@app.command("test")
def check(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or one of several: cuda:1; all when omitted.", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp16; both when omitted.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for a program.")] = False,
) -> None:
    """Say whether mixed precision works on this machine: small real trainings in each format, against FP32.

    [bold]mezzo test[/bold]                               all devices; half a minute each

    [bold]mezzo test --device cuda:1 --dtype bf16[/bold]  one GPU, one format

    [bold]mezzo test --json[/bold]                        the verdict, and all measured

    Under O1 and O2, with torch's fused optimizer and with mezzo's: kernels are counted by the precision that they
    really run in, gradients and losses compared with FP32's, a step that overflows must write nothing and lower the
    loss scale, and a run must go on from its checkpoint bit for bit. All of it in processes of its own, which may die.
    The exit code is 1 where something fails, 3 where the devices support none of it. Which format pays is
    [bold]mezzo doctor[/bold]'s to say.
    """
    dtype = None if dtype is None else format_named(dtype)
    console, number, found = Console(stderr=True), len(chosen(device, dtype)), None
    progress = bars(console)
    bar = progress.add_task(f"{number} trainings", total=number, news="")

    def told(result: TrialResult) -> None:
        progress.update(bar, advance=1, news=_word(result))
        if not console.is_terminal:
            note(f"{_name(result)}: {_word(result)}")

    with suppress(KeyboardInterrupt), progress if console.is_terminal else nullcontext():
        found = selftest(device, dtype, told=told)
    if found is None:
        raise typer.Exit(INTERRUPTED)
    if as_json:
        show_json(found.to_dict())
    else:
        _show(found)
    if not (found.works and found.is_supported):
        raise typer.Exit(UNSUPPORTED if found.works else FAILED)


def _show(found: SelfTest) -> None:
    console = console_for(120)
    for number, line in enumerate(found.verdict):
        text = Text(printable(line), style="" if number else "bold")
        console.print(text, soft_wrap=not console.is_terminal)
    faults = [f"{_name(result)}: {fault}" for result in found.results for fault in result.faults]
    for number, fault in enumerate(faults, start=1):
        console.print(Text(f"\n{number}. {printable(fault)}"), soft_wrap=not console.is_terminal)
    for device in dict.fromkeys(result.device for result in found.results):
        measured = [each.measured for each in found.results if each.device == device and each.measured is not None]
        if measured:
            console.print()
            title = f"{device}: {found.data}, FP32's loss {measured[0].fp32_loss:.4f}"
            console.print(Text(title, style="bold"), soft_wrap=not console.is_terminal)
            rows = _rows(measured)
            shown = [Column(head=(head,), right=head in _NUMBERS, cell=itemgetter(head)) for head in rows[0]]
            for table in fitted(shown, rows, console.width):
                console.print()
                console.print(table)
            console.print(Text("gradient: how far the first is from FP32's, over the norm of that", style="dim"))
        for said in dict.fromkeys(said for each in measured for said in each.notes):
            console.print(f"\n{device}: {printable(said, keep=chr(10))}", markup=False, highlight=False, soft_wrap=True)


def _rows(measured: list[Measured]) -> list[dict[str, str]]:
    """Return what each training came to, by the heads of the table's columns."""
    return [
        {
            "policy, AdamW": f"{each.trial.policy}, {each.trial.optimizer}'s",
            "arithmetic": each.arithmetic,
            "ran low": f"{100 * each.low_share:.3g} %",
            "loss": f"{each.loss:.4f}",
            "gradient": f"{100 * each.gradient_error:.2g} %",
            "overflow": "skipped" if each.skipped else "not skipped",
            "loss scale": "–" if each.backoff is None else f"{each.scale:.6g} → {each.next_scale:.6g}",
            "resumed": each.resumed,
        }
        for each in measured
    ]


def _name(result: TrialResult) -> str:
    return f"{result.device} {result.trial.policy}, {result.trial.optimizer}'s optimizer"


def _word(result: TrialResult) -> str:
    if result.faults:
        return f"fails: {printable(result.faults[0])}"
    return "works" if result.works else f"not supported: {printable(result.trouble)}"
