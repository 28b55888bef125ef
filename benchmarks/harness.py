"""What every benchmark shares: paired timing, the table of ratios, the dated JSON file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import mezzo
from mezzo.cast.device import probe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison; a ratio below 1 means that mezzo is faster than what it is compared with."""

    name: str
    against: str
    ratio: float
    ratio_p10: float
    ratio_p90: float
    mezzo_ms: float
    rival_ms: float


def paired(mine: Callable[[], None], rival: Callable[[], None], repetitions: int) -> dict[str, float]:
    """Time two loops in turns, so that what disturbs the machine disturbs both; ratios are taken pair by pair."""
    for _ in range(3):
        mine()
        rival()
    pairs = [(_seconds(mine), _seconds(rival)) for _ in range(repetitions)]
    ratios = sorted(a / b for a, b in pairs)
    tenth = len(ratios) // 10
    return {
        "ratio": statistics.median(ratios),
        "ratio_p10": ratios[tenth],
        "ratio_p90": ratios[-1 - tenth],
        "mezzo_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "rival_ms": 1e3 * statistics.median(b for _, b in pairs),
    }


@dataclass(frozen=True)
class Case:
    """A step, what makes it ready, and the time to take off it: that of the bare step inside, where it is known."""

    ready: Callable[[], object]
    step: Callable[[], object]
    inside: Callable[[], float] | None = None


def overheads(bare: Case, mine: Case, rival: Case, repetitions: int) -> dict[str, float]:
    """Compare what two steps add to a bare one, all three in turns.

    What the bare optimizer step takes inside each is measured where its kernel does nothing else there; where it
    unscales as well, the median of a bare step of the same size is taken off.
    """
    rounds = []
    for number in range(repetitions + 3):
        seconds = []
        for case in (bare, mine, rival):
            case.ready()
            elapsed = _seconds(case.step)
            seconds.append(elapsed - case.inside() if case.inside else elapsed)
        if number >= 3:
            rounds.append(seconds)
    off = 0.0 if mine.inside else statistics.median(seconds[0] for seconds in rounds)
    added = [[seconds[place] - off for seconds in rounds] for place in (1, 2)]
    middle = statistics.median(added[1])
    ratios = sorted(each / middle for each in added[0])
    tenth = len(ratios) // 10
    return {
        "ratio": statistics.median(ratios),
        "ratio_p10": ratios[tenth],
        "ratio_p90": ratios[-1 - tenth],
        "mezzo_ms": 1e3 * statistics.median(added[0]),
        "rival_ms": 1e3 * middle,
    }


def _seconds(loop: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    loop()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def show(rows: list[Row], title: str) -> None:
    table = Table("case", "against", "ratio", "10–90 %", "mezzo ms", "rival ms", title=f"{title} ({DEVICE})")
    for row in rows:
        spread = f"{row.ratio_p10:.2f}–{row.ratio_p90:.2f}"
        times = f"{row.mezzo_ms:.3g}", f"{row.rival_ms:.3g}"
        table.add_row(row.name, row.against, f"{row.ratio:.3f}", spread, *times)
    Console(width=140).print(table)


def write(folder: Path, name: str, rows: list[Row], **facts: Any) -> None:
    """Write one dated result: beside, then renamed."""
    date = datetime.date.today().isoformat()
    result = {
        "date": date, "device": DEVICE,
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else probe("cpu").name,
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "mezzo": mezzo.__version__,
        "tf32": DEVICE == "cuda" and torch.backends.cuda.matmul.allow_tf32,
        **facts, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{DEVICE}-{date}.json"
    beside = target.with_suffix(".json.part")
    beside.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    beside.replace(target)
    print(f"written to {target}")
