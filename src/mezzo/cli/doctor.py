"""``mezzo doctor``: what works and pays on each device, and what mezzo will do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cast import device
from mezzo.cast.device import (
    ISA_LIMIT,
    ISA_VARIABLE,
    Action,
    DeviceReport,
    Family,
    FamilySupport,
    FormatSupport,
    intended,
)
from mezzo.cast.products import recipe_support
from mezzo.checkup import WIDTHS, Checkup, checked
from mezzo.cli.app import ALERT, app, console_for, show_json
from mezzo.errors import printable
from mezzo.explanation.explanation import table
from mezzo.machine import describe, environment, tf32
from mezzo.releases import NEWEST_TESTED, is_newer_than_tested, lacking
from mezzo.tensors import dtype_name

WHAT_MEZZO_DOES: dict[Action, str] = {
    "native": "compute natively",
    "limit": f"set {ISA_VARIABLE}={ISA_LIMIT}, then compute natively",
    "emulate": "emulate in FP32",
}
#: What a shell sees where a training died or was refused: the format that a user would train in is not there.
UNSUPPORTED = 3

#: A device type's report, a format, and the checkup of each device of that type; none where they were left out.
Row = tuple[DeviceReport, torch.dtype, Checkup | None]


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the facts of a bug report.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show the numbers of each training, too.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Probe products again, whatever is known.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Train and time nothing: products only.")] = False,
) -> None:
    """Show for each device and format whether it trains as FP32 does, whether it pays, and what mezzo will do.

    [bold]mezzo doctor[/bold]            half a minute a device: a verdict, then a table

    [bold]mezzo doctor --quick[/bold]    in a second: products only

    [bold]mezzo doctor --refresh[/bold]  after a driver, kernel or hypervisor changed

    [bold]mezzo doctor --json[/bold]     for a bug report, with all that was found

    Products are compared with FP32's and timed, each family by itself: linear layers and matrix products, convolutions,
    attention, recurrent layers. Those that are not right are emulated, and those in a format that the device does not
    have by its own word (instructions, compute capability). A measured speed overrules that only far from the bound: a
    format that takes eight times FP32's time is emulated, one of twice its speed is not. Then twenty training
    steps in each format, under O1 and O2, are held against FP32's, and whole steps of layers 128 and 2048 wide are
    timed: casts can make the step of a small model slower where products are faster. Each format has a process of its
    own, which may die. The exit code is 4 where a format trains wrongly, 3 where a training died or was refused.
    """
    with Console(stderr=True).status("measuring products in each format; the first time takes seconds"):
        reports = [device.probe(device_type, refresh=refresh) for device_type in device.devices()]
    with Console(stderr=True).status("training in each format; some twenty seconds each"):
        rows: list[Row] = [
            (report, dtype, None if quick else checked(name, dtype_name(dtype)))
            for report in reports
            for name in _devices(report.device_type)
            for dtype in report.formats
        ]
    if as_json:
        show_json(_document(reports, rows))
    else:
        _show(reports, rows, full)
    statuses = {checkup.status for _, _, checkup in rows if checkup is not None}
    if statuses & {"wrong", "failed"}:
        raise typer.Exit(ALERT if "wrong" in statuses else UNSUPPORTED)


def _devices(device_type: str) -> list[str]:
    return (
        [device_type]
        if device_type == "cpu"
        else [f"{device_type}:{index}" for index in range(torch.accelerator.device_count())]
    )


def _document(reports: list[DeviceReport], rows: list[Row]) -> dict[str, Any]:
    """Return the facts, and under ``devices`` each report, whose formats say what mezzo will do and their trainings."""
    devices = []
    for report in reports:
        document = report.to_dict()
        for entry, dtype in zip(document["formats"], report.formats, strict=True):
            mine = [
                of_device
                for owner, format_, of_device in rows
                if owner is report and format_ is dtype and of_device is not None
            ]
            for of_family, action in zip(entry["families"], intended(report, dtype).values(), strict=True):
                of_family["intention"] = action
            entry["checkups"] = [run.to_dict() for run in mine]
        document["below_sixteen_bits"] = [
            {
                "products": name,
                "dtype": dtype_name(dtype),
                "native": not recipe.lacks,
                "output": dtype_name(recipe.output),
                "detail": recipe.lacks,
            }
            for dtype in report.formats
            for name, recipe in recipe_support(report.device_type, dtype).items()
        ]
        devices.append(document)
    return {"verdict": [_verdict(row) for row in rows], **environment(), "devices": devices}


def _verdict(row: Row) -> str:
    report, dtype, checkup = row
    result = _measured(report.formats[dtype]) if checkup is None else checkup.verdict
    where = report.device_type if checkup is None else checkup.device
    return f"{where}: {dtype_name(dtype)} {result}; mezzo will {_intention(intended(report, dtype))}"


def _measured(support: FormatSupport) -> str:
    """Return how fast each family is, or why that is not known."""
    if (
        len({(family.speed_ratio, family.detail) for family in support.families.values()}) == 1
        and support.worst.speed_ratio is None
    ):
        return support.worst.detail
    timed = [f"{family} {speed.speed_ratio:.2g}×" for family, speed in support.families.items() if speed.speed_ratio]
    untimed = [
        f"{name} {family.status}: {family.detail}"
        for name, family in support.families.items()
        if not family.speed_ratio
    ]
    return "; ".join([", ".join(timed) + " as fast as in FP32"] * bool(timed) + untimed)


def _intention(actions: Mapping[Family, Action]) -> str:
    """Return what mezzo does about the families, those that it emulates named."""
    emulated = [family for family, action in actions.items() if action == "emulate"]
    remaining = [WHAT_MEZZO_DOES[action] for action in actions.values() if action != "emulate"]
    if not emulated or not remaining:
        return remaining[0] if remaining else WHAT_MEZZO_DOES["emulate"]
    return f"{remaining[0]}, but emulate {' and '.join(emulated)} in FP32"


def _show(reports: list[DeviceReport], rows: list[Row], full: bool) -> None:
    console = console_for(120)
    for row in rows:
        console.print(Text(printable(_verdict(row)), style="bold"))
    faults = [f"{run.device} {fault}" for _, _, run in rows if run is not None for fault in run.faults]
    for number, fault in enumerate(faults, start=1):
        console.print(f"\n{number}. {printable(fault)}", markup=False, highlight=False)
    here, limit = describe(torch.device("cpu")), device.isa_setting()
    console.print(f"\ntorch {here['torch']}, python {here['python']}, {here['threads']} threads", highlight=False)
    for line in _of_release():
        console.print(printable(line), markup=False, highlight=False)
    for report in reports:
        console.print(f"{report.device_type}: {report.name}", markup=False, highlight=False)
    if limit:
        console.print(f"{ISA_VARIABLE}={limit}", markup=False, highlight=False)
    if any(report.device_type == "cuda" for report in reports):
        states = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in tf32().items())
        console.print(f"TF32: {states} (float32 is measured so)", highlight=False)
    console.print()
    console.print(_table(rows))
    console.print()
    console.print(_below_sixteen(reports))
    if full:
        console.print()
        console.print(_trainings([run for _, _, run in rows if run is not None]))


def _of_release() -> Iterator[str]:
    """Yield a warning and the missing private names, if torch is newer than every tested release."""
    if is_newer_than_tested():
        gone = lacking()
        has = "it lacks what these need" if gone else "it has every private name that mezzo takes"
        yield f"this torch is newer than what was tested, {NEWEST_TESTED}: {has}"
        yield from (f"  {name}, to {use}" for name, use in gone.items())


def _below_sixteen(reports: list[DeviceReport]) -> Table:
    """Return a table of the products of weights below sixteen bits that each device has."""
    cells = (
        (
            report.device_type,
            name,
            WHAT_MEZZO_DOES["emulate" if recipe.lacks else "native"],
            recipe.lacks or "tried here",
        )
        for report in reports
        for name, recipe in recipe_support(report.device_type, torch.bfloat16).items()
    )
    caption = Text("of weights, where a rule of the policy asks for them", style="dim")
    heads = ("device", "products in", "mezzo will", "because")
    return table(heads, cells, caption=caption, caption_justify="left")


def _table(rows: list[Row]) -> Table:
    timed = any(checkup is not None for _, _, checkup in rows)
    numbers = ("speed", *(f"steps, {width}" for width in (WIDTHS if timed else ())))
    heads = ("device", "format", "family", "is", *numbers, *(["training"] if timed else []), "mezzo will", "because")
    caption = Text("speed, steps: times as fast as in FP32; the slowest product of a family counts", style="dim")
    cells = (cells for row in rows for cells in _cells(row, WIDTHS if timed else ()))
    return table(heads, cells, right=numbers, caption=caption, caption_justify="left")


def _cells(row: Row, widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each family; cells of the whole format stand in the first row alone."""
    report, dtype, checkup = row
    speeds = [None if checkup is None else checkup.speeds.get(width) for width in widths]
    of_format = [
        *("–" if speed is None else f"{speed.median:.2g}× ({speed.p10:.2g}–{speed.p90:.2g})" for speed in speeds),
        *([] if checkup is None else [checkup.status]),
    ]
    names = (report.device_type if checkup is None else checkup.device, dtype_name(dtype))
    actions = intended(report, dtype)
    for number, (family, support) in enumerate(report.formats[dtype].families.items()):
        yield (
            *(name if number == 0 else "" for name in names),
            family,
            support.status,
            "–" if support.speed_ratio is None else f"{support.speed_ratio:.2g}×",
            *(cell if number == 0 else "" for cell in of_format),
            WHAT_MEZZO_DOES[actions[family]],
            _because(support),
        )


def _because(support: FamilySupport) -> str:
    """Return what decided: wrong products, else what the device reports of itself, or the speed that overrules it."""
    if support.status != "right":
        return support.detail
    why = support.why if support.fast else f"slow; {support.why}"
    return why if support.detail in why else f"{why}; {support.detail}"


def _trainings(checkups: list[Checkup]) -> Table:
    numbers = ("loss", "FP32's", "ran low", "weights off", "rounding explains")
    rows = (
        (
            checkup.device,
            training.policy,
            "emulated" if training.is_emulated else "native",
            f"{training.loss:.4f}",
            f"{training.fp32_loss:.4f}",
            f"{100 * training.low_share:.3g} %",
            f"{100 * training.weights_error:.2g} %",
            f"{100 * training.tolerance:.2g} %",
        )
        for checkup in checkups
        for training in checkup.trainings
    )
    return table(("device", "policy", "arithmetic", *numbers), rows, right=numbers)
