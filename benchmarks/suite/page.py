"""What ``docs/families.md`` shows of the suite: a table a family, what FP16 makes of numbers, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mezzo.explanation.rows import byte_text, counted, scale_text
from mezzo.report.verdict import number, short
from mezzo.script.comparison import parse_policies
from suite.families import FAMILIES, POLICIES, ROOT, SEEDS, Family
from suite.numbers import GRADIENTS, SCALES

RESULTS: Final = ROOT / "benchmarks" / "results" / "suite-cpu"
#: Policies that do without something.
WITHOUT: Final = {
    "O2,dtype=float16,loss_scale=none": "no loss scale",
    "O2,dtype=float16,loss_scale=constant(8)": "loss scale 8",
    "O3,dtype=float16,keep_batchnorm_fp32=true": "no FP32 weights, loss scale 1",
}


def compared(name: str) -> dict[str, Any] | None:
    """The summary of a family's comparison; ``None`` while there is none."""
    return _read(RESULTS / name / "summary.json")


def summary(name: str) -> dict[str, Any]:
    """The summary of a family's comparison, which there is."""
    found = compared(name)
    if found is None:
        raise SystemExit(f"there is no comparison of {name} yet: make suite")
    return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def family(name: str) -> str:
    """A family's table, its picture, where it was measured, and what the paper says."""
    (this,) = (each for each in FAMILIES if each.name == name)
    lines = [f"The paper: {this.paper}", ""]
    found = compared(name)
    if found is None:
        return "\n".join([*lines, "Not run yet: `make suite`."])
    metric, unit = found["metric"], f", {found['metric']['unit']}".rstrip(", ")
    heads = [
        f"{metric['name']}{unit}",
        "difference to FP32, 95 %",
        "",
        "loss",
        "ms",
        "held",
        "saved",
        "skipped",
        "scale",
    ]
    lines += [f"| policy | {' | '.join(heads)} |", "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|"]
    lines += [_row(row) for row in found["rows"]]
    curves = f"../benchmarks/results/suite-cpu/{name}/curves.png"
    return "\n".join([*lines, "", _said(this, found), "", f"![Curves: {this.title.lower()}]({curves})"])


def _row(row: dict[str, Any]) -> str:
    difference = "" if row["difference"] is None else _signed(row["difference"])
    if row["interval"] is not None:
        difference += " ({} to {})".format(*map(_signed, row["interval"]))
    sizes = ["–" if row[name] is None else byte_text(row[name]) for name in ("held_bytes", "saved_bytes")]
    time = "–" if row["step_ms"] is None else f"{row['step_ms']:.3g}"
    verdict = "" if row["verdict"] == "reference" else row["verdict"]
    cells = [_named(row["policy"]), _number(row["metric"]), difference, verdict, _number(row["loss"]), time, *sizes]
    if any("stored in FP32" in what for what in row["left_alone"]):
        cells[0] += " (its weights stayed FP32)"
    return f"| {' | '.join(cells)} | {row['skipped']} | {scale_text(row['scale'])} |"


def _named(policy: str) -> str:
    return f"`{short(policy)}`" + (f": {WITHOUT[policy]}" if policy in WITHOUT else "")


def _number(value: float | str | None) -> str:
    return number(None if value is None else float(value))  # JSON has texts for what is not finite


def _signed(value: float | str) -> str:
    return number(float(value), sign=True, digits=3)


def _said(this: Family, summary: dict[str, Any]) -> str:
    """Where it was measured, what equal means, and what is missing."""
    machine = summary["machine"]
    command = " ".join(["python", str(this.path), *this.arguments])
    where = (
        f"{machine['cpu']}, {counted(machine['threads'], 'thread')}, torch {machine['torch']}, {summary['date'][:10]}"
    )
    text = f"`{command}`, {summary['seeds']} seeds; equal is within {summary['margin']:g}; {where}."
    runs = {(run["policy"], run["seed"]) for run in summary["runs"]}
    wanted = [(policy, seed) for policy in _wanted() for seed in range(SEEDS)]
    missing = [f"{_named(policy)} seed {seed}" for policy, seed in wanted if (policy, seed) not in runs]
    return text + (f" Missing: {', '.join(missing)}." if missing else "")


def _wanted() -> list[str]:
    return [*map(str, parse_policies(POLICIES.split(";"))), *WITHOUT]


def numbers() -> str:
    """What FP16 makes of each family's activation gradients and updates."""
    scales = " | ".join("unscaled" if scale == 1 else f"× {scale:,.0f}" for scale in SCALES)
    lines = [f"| gradients flushed | {scales} | largest scale | updates swallowed |", "|---|---:|---:|---:|---:|---:|"]
    for each in FAMILIES:
        found = _read(RESULTS / each.name / "numbers.json")
        if found is None:
            lines.append(f"| {each.title} | not run yet | | | | |")
            continue
        gradients = found["kinds"][GRADIENTS]
        alive = gradients["total"] - gradients["zeros"]
        shares = [f"{100 * row['underflow'] / alive:.2g} %" for row in gradients["float16"]]
        swallowed = f"{100 * found['kinds']['updates']['swallowed']['float16']:.2g} %"
        lines.append(f"| {each.title} | {' | '.join(shares)} | {scale_text(gradients['best_scale'])} | {swallowed} |")
    return "\n".join(lines)


def without() -> str:
    """What came of doing without each technique."""
    lines = [f"| | {' | '.join(WITHOUT.values())} |", "|---|---|---|---|"]
    for each in FAMILIES:
        rows = {row["policy"]: row for row in (compared(each.name) or {"rows": []})["rows"]}
        lines.append(f"| {each.title} | {' | '.join(_came_to(rows.get(policy)) for policy in WITHOUT)} |")
    return "\n".join(lines)


def _came_to(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run yet"
    if any("stored in FP32" in what for what in row["left_alone"]):
        return "not possible with its optimizer, whose ε is zero in FP16: FP32 weights"
    is_known = row["difference"] is not None and row["verdict"] != "diverged"
    return row["verdict"] + (f", {_signed(row['difference'])}" if is_known else "")


def coverage() -> str:
    """How much of the suite there is."""
    policies = 1 + len(POLICIES.split(";")) + len(WITHOUT)
    done = sum(len(summary["runs"]) for each in FAMILIES if (summary := compared(each.name)) is not None)
    return f"{done} of {len(FAMILIES) * policies * SEEDS} runs are here."
