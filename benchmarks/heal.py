"""A run in NVFP4, healed: how much of its gap to BF16 closes where the last tenth of the steps is in BF16.

Each run is ``mezzo run`` of ``examples/families/docs_lm.py`` under a schedule of ``examples/heal_nvfp4.py``.

``OMP_NUM_THREADS=1 python benchmarks/heal.py`` takes some minutes, and writes one dated JSON file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import torch

import mezzo
from harness import write_dated
from mezzo.policy import Schedule
from stepping.facts import facts

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import heal_nvfp4  # noqa: E402 - once it is found


def row(name: str, schedule: str, losses: list[float], base: list[float]) -> dict[str, Any]:
    """Return what runs under a schedule come to, beside those in BF16 with the same seeds."""
    differences = [loss - other for loss, other in zip(losses, base, strict=True)]
    return {
        "name": name, "schedule": str(Schedule.of(schedule)), "bits_per_byte": losses,
        "mean": statistics.fmean(losses), "differences_to_bf16": differences,
        "difference_to_bf16": statistics.fmean(differences),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--script-steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, schedule in heal_nvfp4.schedules(args.script_steps).items():
        losses = [heal_nvfp4.bits_per_byte(schedule, args.script_steps, seed) for seed in range(args.seeds)]
        rows.append(row(name, schedule, losses, rows[0]["bits_per_byte"] if rows else losses))
        print(f"{name}: {losses}", flush=True)
    gap = {entry["name"]: entry["difference_to_bf16"] for entry in rows}
    result = {
        **facts(torch.device("cpu")), "mezzo": mezzo.__version__, "script": "examples/families/docs_lm.py",
        "steps": args.script_steps, "seeds": args.seeds, "rows": rows,
        "closed": 1 - gap["NVFP4, healed"] / gap["NVFP4"] if gap["NVFP4"] else None,
    }  # fmt: skip
    print(f"written to {write_dated(args.out, 'heal', result)}")


if __name__ == "__main__":
    main()
