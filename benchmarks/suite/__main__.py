"""Run what is missing of the suite, at most so many minutes: ``make suite``, again until nothing is missing.

Finished runs are kept in ``runs/suite``, and are not repeated; what there is of each family, whole or not, is written
to ``benchmarks/results/suite-cpu`` (or ``suite-cuda``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from suite import numbers
from suite.families import EVERY, FAMILIES, POLICIES, ROOT, SEEDS, Family

WORK = ROOT / "runs" / "suite"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = ROOT / "benchmarks" / "results" / f"suite-{DEVICE}"
#: What ``mezzo`` ends with where all is well, and where its numbers give alarm, as those of ablations may.
WELL = (0, 4)
INTERRUPTED = 130
#: Of a comparison, and of one whose figures mean nothing; of the recorded run the same.
WHOLE = (["--policies", POLICIES, "--ablate", "--seeds", str(SEEDS)], [])
DRY = (["--policies", "O2,bf16", "--seeds", "1", "--steps", "1"], ["--steps", "1"])


def main(
    minutes: Annotated[float, typer.Option(help="After how many to stop; the run in progress is repeated later.")] = 60,
    only: Annotated[list[str] | None, typer.Option(help="A family; several by several --only.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A step each; figures mean nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = WORK,
    out: Annotated[Path, typer.Option(help="Where results are written.")] = RESULTS,
) -> None:
    """Run what is missing of the suite."""
    compared, inspected = DRY if dry_run else WHOLE
    ends = time.monotonic() + 60 * minutes
    for family in FAMILIES:
        if only and family.name not in only:
            continue
        place = out / family.name
        code = _inspect(family, place, runs / f"{family.name}-numbers", inspected, ends)
        if code in WELL:
            code = _compare(family, place, runs / family.name, compared, ends)
        if code == INTERRUPTED:
            raise SystemExit(f"stopped in {family.name}; the same command goes on there")
        if code not in WELL:
            raise SystemExit(f"{family.name} ended with exit code {code}")


def _compare(family: Family, place: Path, out: Path, options: list[str], ends: float) -> int:
    options = [*options, "--margin", family.margin, "--out", str(out)]
    code = _mezzo(["compare", *options, str(family.path), *family.arguments], ends)
    if (out / "summary.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "curves.png"):
            shutil.copy(out / name, place / name)
    return code


def _inspect(family: Family, place: Path, out: Path, options: list[str], ends: float) -> int:
    """Record one run in FP32, and write what FP16 makes of its numbers."""
    code = 0
    summary = out / "summary.json"
    changed = (ROOT / family.path).stat().st_mtime
    is_done = (
        summary.exists() and summary.stat().st_mtime > changed and not json.loads(summary.read_text())["interrupted"]
    )
    if not is_done:
        options = [*options, "--every", str(EVERY), "--out", str(out), "--overwrite"]
        code = _mezzo(["inspect", *options, str(family.path), *family.arguments, "--seed", "0"], ends)
    if code in WELL:
        numbers.publish(out, place / "numbers.json", place / "gradients.png")
    return code


def _mezzo(words: list[str], ends: float) -> int:
    """Run a verb until the time is over; it sums up what there is then."""
    print("mezzo", *words, flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mezzo", *words]
    # A session of its own: Ctrl-C is passed on once, to the verb and to what it has started.
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(timeout=max(1.0, ends - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            return INTERRUPTED


if __name__ == "__main__":
    typer.run(main)
