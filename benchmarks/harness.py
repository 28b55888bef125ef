"""What every benchmark shares: paired timing, the table of ratios, the dated JSON file."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import mezzo
from mezzo import files
from stepping.facts import facts
from stepping.timing import Spread, against, rounds, seconds, spread

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 3


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


def in_turns(
    calls: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    device: torch.device,
    repetitions: int,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Time calls in turns by the host's clock: what a user waits for.

    Args:
        calls: By name: what makes one ready, which is not timed, and the call.
        device: Whose work to wait for.
        repetitions: Rounds that count.
        warm_up: Rounds before, which compile what is to be compiled.
    """
    return rounds(calls, functools.partial(seconds, device=device), repetitions, warm_up)


def paired(mine: Callable[[], None], rival: Callable[[], None], repetitions: int) -> dict[str, float]:
    """Time two loops in turns, so that what disturbs the machine disturbs both; ratios are taken pair by pair."""
    loops = {"mine": (_nothing, mine), "rival": (_nothing, rival)}
    taken = in_turns(loops, torch.device(DEVICE), repetitions, WARM_UP)
    middles = [statistics.median(taken[name]) for name in loops]
    return _figures(against(taken["mine"], taken["rival"]), *middles)


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
    cases = {"bare": bare, "mine": mine, "rival": rival}
    inside: dict[str, list[float]] = {name: [] for name in cases}
    steps = {name: (case.ready, _noting(case, inside[name])) for name, case in cases.items()}
    taken = in_turns(steps, torch.device(DEVICE), repetitions, WARM_UP)
    off = 0.0 if mine.inside else statistics.median(taken["bare"])
    added = {
        name: [whole - part - off for whole, part in zip(taken[name], inside[name][WARM_UP:], strict=True)]
        for name in ("mine", "rival")
    }
    middle = statistics.median(added["rival"])
    return _figures(spread([extra / middle for extra in added["mine"]]), statistics.median(added["mine"]), middle)


def _noting(case: Case, inside: list[float]) -> Callable[[], None]:
    """Return the step, which also notes how long the bare step inside it took."""

    def step() -> None:
        case.step()
        inside.append(case.inside() if case.inside else 0.0)

    return step


def _figures(ratio: Spread, mine: float, rival: float) -> dict[str, float]:
    return {
        "ratio": ratio.median,
        "ratio_p10": ratio.p10,
        "ratio_p90": ratio.p90,
        "mezzo_ms": 1e3 * mine,
        "rival_ms": 1e3 * rival,
    }


def _nothing() -> None:
    """A loop has nothing to be made ready."""


def show(rows: list[Row], title: str) -> None:
    table = Table("case", "against", "ratio", "10–90 %", "mezzo ms", "rival ms", title=f"{title} ({DEVICE})")
    for row in rows:
        tenths = f"{row.ratio_p10:.2f}–{row.ratio_p90:.2f}"
        times = f"{row.mezzo_ms:.3g}", f"{row.rival_ms:.3g}"
        table.add_row(row.name, row.against, f"{row.ratio:.3f}", tenths, *times)
    Console(width=140).print(table)


def write(folder: Path, name: str, rows: list[Row], **more: Any) -> None:
    """Write one dated result with the facts of this machine."""
    result = {
        **facts(torch.device(DEVICE)), "mezzo": mezzo.__version__,
        "tf32": DEVICE == "cuda" and torch.backends.cuda.matmul.allow_tf32,
        **more, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    print(f"written to {write_dated(folder, name, result)}")


def write_dated(folder: Path, name: str, result: dict[str, Any] | list[dict[str, Any]]) -> Path:
    """Write a result to ``NAME-DEVICE-DATE.json``: beside, then renamed.

    Args:
        folder: Where; made if it is not there.
        name: Of the benchmark.
        result: What :func:`facts` says and what was measured; of several results the first one's facts count.

    Returns:
        The file.
    """
    first = result[0] if isinstance(result, list) else result
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{first['device']}-{first['date']}.json"
    with files.atomic_file(target) as file:
        file.write((json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return target
