"""``mezzo doctor``: what each device can do, and what mezzo will do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.bench.layers import WIDTHS, LayerSteps, layer_steps
from mezzo.cast import device
from mezzo.cast.device import ISA_LIMIT, ISA_VARIABLE, Action, DeviceReport, intended, isa_setting
from mezzo.cli.app import app
from mezzo.cli.output import console_for, show_json
from mezzo.errors import printable
from mezzo.explanation.table import table
from mezzo.machine import describe, tf32
from mezzo.tensors import dtype_name

__all__ = ["doctor", "findings"]

#: Timed training steps, by device type and format.
Steps = Mapping[str, Mapping[torch.dtype, LayerSteps]]

WHAT_MEZZO_DOES: dict[Action, str] = {
    "native": "compute natively",
    "limit": f"set {ISA_VARIABLE}={ISA_LIMIT}, then compute natively",
    "emulate": "emulate in FP32",
}


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for a program.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever is known.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Time no training steps: products only.")] = False,
) -> None:
    """Say which formats pay on each device, which work, which crash, and what mezzo will do.

    [bold]mezzo doctor[/bold]             the answer in words, then a table per device

    [bold]mezzo doctor --quick[/bold]     in a second, without timing training steps

    [bold]mezzo doctor --refresh[/bold]   after a driver, kernel or hypervisor changed

    [bold]mezzo doctor --json[/bold]      for a program to read

    Products are timed alone, and in whole training steps of layers 128 and 2048 wide: casts can make the step of a
    small model slower where products are faster. On a CPU one thread is timed, in child processes, so nothing that it
    does can harm this one.
    """
    with Console(stderr=True).status("measuring products in each format; the first time takes seconds"):
        reports = [device.probe(device_type, refresh=refresh) for device_type in device.devices()]
    steps: Steps = {}
    if not quick:
        with Console(stderr=True).status("timing training steps of layers 128 and 2048 wide; some ten seconds"):
            steps = {report.device_type: layer_steps(report.device_type, [*report.formats]) for report in reports}
    if as_json:
        show_json(findings(reports, steps))
        return
    console = console_for(120)
    for report in reports:
        for line in _answer(report, steps.get(report.device_type, {})):
            console.print(Text(printable(line), style="bold"))
    console.print()
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
        console.print(_table(report, steps.get(report.device_type, {})))


def _answer(report: DeviceReport, steps: Mapping[torch.dtype, LayerSteps]) -> list[str]:
    """Say of each format whether it pays, or at least whether it works."""
    found = []
    for dtype, support in report.formats.items():
        name = f"{report.device_type}: {dtype_name(dtype)}"
        if dtype in steps:
            text = steps[dtype].verdict(name)
        elif support.speed_ratio is not None:
            text = f"{name}: products {support.speed_ratio:.2g}× as fast as in FP32, {support.detail}"
        else:
            text = f"{name}: {support.detail}"
        found.append(f"{text}; mezzo will {WHAT_MEZZO_DOES[intended(report, dtype)]}")
    return found


def findings(reports: list[DeviceReport], steps: Steps | None = None) -> dict[str, Any]:
    """Return what the verb shows, as JSON can hold it.

    Args:
        reports: One per device.
        steps: Timed training steps, by device type and format.

    Returns:
        The facts of the header, and under ``devices`` each report, whose formats have an ``intention`` and, where they
        were timed, ``steps``.

    Example:
        >>> findings([])["devices"]
        []
    """
    devices = []
    for report in reports:
        shown = report.to_dict()
        for entry, dtype in zip(shown["formats"], report.formats, strict=True):
            entry["intention"] = intended(report, dtype)
            timed = (steps or {}).get(report.device_type, {}).get(dtype)
            entry |= {} if timed is None else {"steps": timed.to_dict()}
        devices.append(shown)
    here = describe(torch.device("cpu"))
    return {
        **{name: here[name] for name in ("torch", "python", "cpu", "threads")},
        "isa_setting": isa_setting(),
        "tf32": tf32() if "cuda" in device.devices() else None,
        "devices": devices,
    }


def _table(report: DeviceReport, steps: Mapping[torch.dtype, LayerSteps]) -> Table:
    title = Text(f"{report.device_type}: {report.name}", style="bold")
    caption = Text("speed and steps: times as fast as in FP32, the slowest product counts", style="dim")
    widths = WIDTHS if steps else ()
    numbers = ("speed", *(f"steps, {width}" for width in widths))
    heads = ("format", "products are", *numbers, "mezzo will", "because")
    rows = (_row(report, dtype, steps.get(dtype), widths) for dtype in report.formats)
    left: Any = {"title_justify": "left", "caption_justify": "left"}
    return table(heads, rows, right=numbers, title=title, caption=caption, **left)


def _row(report: DeviceReport, dtype: torch.dtype, steps: LayerSteps | None, widths: Sequence[int]) -> tuple[str, ...]:
    support, ratio = report.formats[dtype], report.formats[dtype].speed_ratio
    speeds = [None if steps is None else steps.speeds.get(width) for width in widths]
    return (
        dtype_name(dtype),
        support.status,
        "–" if ratio is None else f"{ratio:.2g}×",
        *("–" if speed is None else f"{speed.median:.2g}× ({speed.p10:.2g}–{speed.p90:.2g})" for speed in speeds),
        WHAT_MEZZO_DOES[intended(report, dtype)],
        support.detail,
    )
