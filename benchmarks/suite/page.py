"""What ``docs/families.md`` shows of the suite: a table a family, what FP16 makes of its numbers, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mezzo.explanation.words import byte_text, scale_text
from mezzo.report.verdict import number
from suite.families import FAMILIES, POLICIES, ROOT, SEEDS, Family
from suite.numbers import GRADIENTS

RESULTS: Final = ROOT / "benchmarks" / "results" / "suite-cpu"
#: What the first line of an ablation's policy does without.
WITHOUT: Final = {
    "O2,dtype=float16,loss_scale=none": "no loss scale",
    "O2,dtype=float16,loss_scale=8": "loss scale 8",
    "O3,dtype=float16,keep_batchnorm_fp32=true": "no FP32 weights",
}


def compared(name: str) -> dict[str, Any] | None:
    """The summary of a family's comparison; ``None`` while there is none."""
    return _read(RESULTS / name / "summary.json")


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def family(name: str) -> str:
    """A family's table, its verdict in numbers, its picture, and what the paper says."""
    (this,) = (each for each in FAMILIES if each.name == name)
    lines = [f"The paper: {this.paper}", ""]
    summary = compared(name)
    if summary is None:
        return "\n".join([*lines, "Not run yet: `make suite`."])
    metric, unit = summary["metric"], f", {summary['metric']['unit']}".rstrip(", ")
    lines += [
        f"| policy | {metric['name']}{unit} | difference to FP32, 95 % | | loss | ms | held | saved | skipped | scale |"
    ]
    lines += ["|---|---:|---:|---|---:|---:|---:|---:|---:|---:|"]
    lines += [_row(row) for row in summary["rows"]]
    lines += [
        "",
        _said(this, summary),
        "",
        f"![Curves of {this.title.lower()}](../benchmarks/results/suite-cpu/{name}/curves.png)",
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    policy = f"`{row['policy']}`" + (f": {WITHOUT[row['policy']]}" if row["policy"] in WITHOUT else "")
    difference = "" if row["difference"] is None else number(row["difference"], sign=True)
    if row["interval"] is not None:
        difference += " ({} to {})".format(*(number(float(each), sign=True) for each in row["interval"]))
    sizes = ["–" if row[name] is None else byte_text(row[name]) for name in ("held_bytes", "saved_bytes")]
    time = "–" if row["step_ms"] is None else f"{row['step_ms']:.3g}"
    verdict = "" if row["verdict"] == "reference" else row["verdict"]
    cells = [policy, _number(row["metric"]), difference, verdict, _number(row["loss"]), time, *sizes]
    return f"| {' | '.join(cells)} | {row['skipped']} | {scale_text(row['scale'])} |"


def _number(value: float | str | None) -> str:
    return "–" if value is None else number(float(value))


def _said(this: Family, summary: dict[str, Any]) -> str:
    """Where it was measured, what equal means, and what is missing."""
    machine = summary["machine"]
    command = " ".join(["python", str(this.path), *this.arguments])
    text = f"`{command}`, {summary['seeds']} seeds; equal is within {summary['margin']:g}; {machine['name']}, torch {machine['torch']}, {summary['date'][:10]}."
    runs = {(run["policy"], run["seed"]) for run in summary["runs"]}
    missing = [
        f"`{policy}` seed {seed}"
        for policy in summary["policies"]
        for seed in range(SEEDS)
        if (policy, seed) not in runs
    ]
    return text + (f" Missing: {', '.join(missing)}." if missing else "")


def numbers() -> str:
    """What FP16 makes of each family's activation gradients and updates, and what came of doing without."""
    lines = [
        "| | activation gradients flushed, unscaled | at 8 | at 32,768 | idle above | updates swallowed | no loss scale | scale 8 | no FP32 weights |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---|---|---|"]
    for each in FAMILIES:
        found, summary = _read(RESULTS / each.name / "numbers.json"), compared(each.name)
        if found is None:
            lines.append(f"| {each.title} | not run yet | | | | | | | |")
            continue
        gradients = found["kinds"][GRADIENTS]
        alive = gradients["total"] - gradients["zeros"]
        shares = [f"{100 * row['underflow'] / alive:.2g} %" for row in gradients["float16"]]
        idle = f"{gradients['best_scale']:,.0f}×"
        swallowed = f"{100 * found['kinds']['updates']['swallowed']['float16']:.2g} %"
        rows = {row["policy"]: row for row in summary["rows"]} if summary else {}
        verdicts = [_ablated(rows.get(policy)) for policy in WITHOUT]
        lines.append(f"| {each.title} | {' | '.join([*shares, idle, swallowed, *verdicts])} |")
    return "\n".join(lines)


def _ablated(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run yet"
    away = (
        ""
        if row["difference"] is None or row["verdict"] == "diverged"
        else f", {number(float(row['difference']), sign=True)}"
    )
    return f"{row['verdict']}{away}"


def coverage() -> str:
    """How much of the suite there is."""
    policies = 1 + len(POLICIES.split(";")) + len(WITHOUT)
    done = sum(len(summary["runs"]) for each in FAMILIES if (summary := compared(each.name)) is not None)
    return f"{done} of {len(FAMILIES) * policies * SEEDS} runs are here."
