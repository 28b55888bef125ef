"""Below sixteen bits: what a small GPT reaches with FP8, MXFP8 and NVFP4 products, and what each trick of NVFP4 is for.

``mezzo compare`` of ``examples/families/docs_lm.py`` with three seeds, in FP32, in BF16, and with the products of its
blocks quantised; of each policy the differences to BF16 with the same seed, and what was lost of each operand by layer.

``OMP_NUM_THREADS=1 python benchmarks/below_sixteen.py`` takes an hour or two, and writes one dated JSON file. The same
command goes on in ``runs/below_sixteen`` where it was interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

import mezzo
from harness import write_dated
from mezzo.policy import Policy
from mezzo.report.verdict import operand_rows, rows
from mezzo.script.comparison import Comparison, Run, compare
from mezzo.script.program import Program
from stepping.facts import facts

ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = "examples/families/docs_lm.py"
MARGIN: Final = 0.03  # bits per byte: the family's own
BF16: Final = "O1,dtype=bfloat16"
NVFP4: Final = f"{BF16},nvfp4_module=blocks.*"
#: What each policy is called in the pages.
POLICIES: Final[Mapping[str, str]] = MappingProxyType({
    "BF16": BF16,
    "FP8, tensorwise": f"{BF16},fp8_module=blocks.*",
    "FP8, rowwise": f"{BF16},fp8_recipe=rowwise,fp8_module=blocks.*",
    "FP8, delayed": f"{BF16},fp8_recipe=delayed,fp8_module=blocks.*",
    "MXFP8": f"{BF16},mxfp8_module=blocks.*",
    "NVFP4": NVFP4,
    "NVFP4, gradients to nearest": f"{NVFP4},nvfp4_tricks=rht+2d",
    "NVFP4, no rotation": f"{NVFP4},nvfp4_tricks=stochastic+2d",
    "NVFP4, weights in rows": f"{NVFP4},nvfp4_tricks=rht+stochastic",
    "NVFP4, none of the three": f"{NVFP4},nvfp4_tricks=none",
    "NVFP4, forward in BF16": f"{NVFP4},low_products=forward",
    "NVFP4, weight gradients in BF16": f"{NVFP4},low_products=wgrad",
    "NVFP4, last block in BF16": f"{BF16},low=linear@blocks.2.*,nvfp4_module=blocks.*",
})  # fmt: skip


def beside(comparison: Comparison, policy: str) -> dict[str, Any]:
    """Return a policy's row beside BF16's: ``mezzo compare`` has those beside FP32."""
    told = [str(Policy.of(BF16)), policy]
    runs = [
        dataclasses.replace(run, policy="O0" if run.policy == told[0] else run.policy) for run in _of(comparison, told)
    ]
    (_, row) = rows(dataclasses.replace(comparison, policies=("O0", policy), runs=tuple(runs)))
    return {"difference": row.difference, "interval": row.interval}


def _of(comparison: Comparison, policies: Sequence[str]) -> list[Run]:
    return [run for run in comparison.runs if run.policy in policies]


def table(comparison: Comparison, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each policy that has run, FP32 first."""
    called = {"O0": "FP32", **{str(Policy.of(text)): name for name, text in names.items()}}
    made = []
    for row in rows(comparison):
        runs = comparison.of(row.policy)
        is_beside = row.policy not in ("O0", str(Policy.of(BF16)))
        made.append({
            "name": called[row.policy], "policy": row.policy, "seeds": len(runs),
            "bits_per_byte": [run.metric for run in runs], "mean": row.metric,
            "difference_to_fp32": row.difference, "interval_to_fp32": row.interval,
            **({f"{key}_to_bf16": value for key, value in beside(comparison, row.policy).items()} if is_beside else {}),
            "saved_bytes": row.saved_bytes, "low_share": row.low_share,
        })  # fmt: skip
    return made


def operands(comparison: Comparison, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what was lost of each operand by policy and layer, and the mean over layers as layer ``all``."""
    called = {str(Policy.of(text)): name for name, text in names.items()}
    made = [{"name": called[each.policy], **each.to_dict()} for each in operand_rows(comparison)]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in made:
        groups.setdefault((each["name"], each["role"]), []).append(each)
    for found in groups.values():
        known = [each["below_noise"] for each in found if each["below_noise"] is not None]
        made.append(found[0] | {
            "layer": "all", "saturated": statistics.fmean(each["saturated"] for each in found),
            "flushed": statistics.fmean(each["flushed"] for each in found),
            "below_noise": statistics.fmean(known) if known else None,
        })  # fmt: skip
    return made


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[*POLICIES], help="policies besides BF16; all when omitted")
    parser.add_argument("--script-steps", type=int, help="steps of each run; those of the script when omitted")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "below_sixteen", help="where runs are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    names = {name: text for name, text in POLICIES.items() if args.only is None or name in ("BF16", *args.only)}

    def ended(run: Run, number: int, count: int) -> None:
        print(f"{number} of {count}: {run.policy}, seed {run.seed}: {run.metric}", flush=True)

    comparison = compare(
        Program(name=SCRIPT), [*names.values()], out=args.runs, seeds=args.seeds, steps=args.script_steps,
        margin=MARGIN, ended=ended,
    )  # fmt: skip
    result = {
        **facts(torch.device("cpu")), "mezzo": mezzo.__version__, "script": SCRIPT, "seeds": args.seeds,
        "margin": MARGIN, "rows": table(comparison, names), "operands": operands(comparison, names),
    }  # fmt: skip
    print(f"written to {write_dated(args.out, 'below-sixteen', result)}")


if __name__ == "__main__":
    main()
