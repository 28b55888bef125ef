"""``mezzo doctor``: what each device can do, and what mezzo will do about it."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cast import device
from mezzo.cast.device import ISA_LIMIT, ISA_VARIABLE, Action, DeviceReport, FormatSupport, cache, isa_setting
from mezzo.cli.app import app
from mezzo.cli.output import console_for
from mezzo.tensors import LOW, dtype_name

__all__ = ["doctor", "findings"]

WHAT_MEZZO_DOES: dict[Action | Literal["unused"], str] = {
    "native": "compute natively",
    "limit": f"set {ISA_VARIABLE}={ISA_LIMIT}, then compute natively",
    "emulate": "emulate in FP32",
    "unused": "not compute in it yet",
    "unsupported": "refuse",
}


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for a program.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever is known.")] = False,
) -> None:
    """Show which formats work on each device, which are fast, which crash, and what mezzo will do.

    [bold]mezzo doctor[/bold]             a table per device

    [bold]mezzo doctor --refresh[/bold]   after a driver, kernel or hypervisor changed

    [bold]mezzo doctor --json[/bold]      for a program to read

    A CPU is tried in child processes, so nothing that it does can harm this one.
    """
    with Console(stderr=True).status("measuring products in each format; the first time takes seconds"):
        reports = [device.probe(device_type, refresh=refresh) for device_type in device.devices()]
    if as_json:
        typer.echo(json.dumps(findings(reports), indent=2))
        return
    console = console_for(160)
    facts = findings([])
    for label in ("torch", "python", "cpu", "threads"):
        console.print(f"{label:<8} {facts[label]}", highlight=False, markup=False)
    if facts["isa_setting"]:
        console.print(f"{'limit':<8} {ISA_VARIABLE}={facts['isa_setting']}", highlight=False, markup=False)
    if facts["tf32"] is not None:
        states = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in facts["tf32"].items())
        console.print(f"{'TF32':<8} {states} (float32 is measured so)", highlight=False, markup=False)
    for report in reports:
        console.print()
        console.print(_table(report))


def findings(reports: list[DeviceReport]) -> dict[str, Any]:
    """Return what the verb shows, as JSON can hold it.

    Args:
        reports: One per device.

    Returns:
        The facts of the header, and under ``devices`` each report, whose formats have an ``intention``.

    Example:
        >>> findings([])["devices"]
        []
    """
    devices = []
    for report in reports:
        shown = report.to_dict()
        for entry, support in zip(shown["formats"], report.formats.values(), strict=True):
            entry["intention"] = _intention(report, support)
        devices.append(shown)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cache.processor().name,
        "threads": torch.get_num_threads(),
        "isa_setting": isa_setting(),
        "tf32": _tf32(),
        "devices": devices,
    }


def _intention(report: DeviceReport, support: FormatSupport) -> Action | Literal["unused"]:
    """Say what mezzo will do with a format; one that no policy can ask for is measured all the same."""
    return device.intended(report, support.dtype) if support.dtype in LOW else "unused"


def _tf32() -> dict[str, bool] | None:
    if "cuda" not in device.devices():
        return None
    return {
        "products": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "convolutions": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    }


def _table(report: DeviceReport) -> Table:
    title = Text(f"{report.device_type}: {report.name}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("format", "works", "speed vs FP32", "crashes", "mezzo will", "because"):
        table.add_column(column, justify="right" if column.startswith("speed") else "left")
    for support in report.formats.values():
        # As Text, for torch's messages hold brackets that rich would take for markup.
        table.add_row(*(Text(cell) for cell in _row(report, support)))
    return table


def _row(report: DeviceReport, support: FormatSupport) -> tuple[str, ...]:
    ratio = support.speed_ratio
    return (
        dtype_name(support.dtype),
        "yes" if support.status == "native" else "no",
        "–" if ratio is None else f"{ratio:.2g}× {'fast' if support.fast else 'slow'}",
        "yes" if support.status == "crashes" else "no",
        WHAT_MEZZO_DOES[_intention(report, support)],
        support.detail,
    )
