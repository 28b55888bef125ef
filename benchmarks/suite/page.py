"""What ``docs/families.md`` shows of the suite: verdicts, what the paper found, and what FP16 makes of numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

from mezzo.explanation.rows import counted, scale_text
from mezzo.report.verdict import number, short
from mezzo.script.comparison import parse_policies
from suite.families import FAMILIES, POLICIES, ROOT, SEEDS
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


def verdicts() -> str:
    """The one table: what each family came to in FP32 and under each policy, with the verdict, and what was saved."""
    _, *policies = map(str, parse_policies(POLICIES.split(";")))
    heads = ["held out", "FP32", *(f"`{short(policy)}`" for policy in policies), "equal within", "saved at O2"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    places, days = set(), set()
    for each in FAMILIES:
        found = compared(each.name)
        if found is None:
            lines.append(f"| {each.title} | not run yet: `make suite` |" + " |" * (len(heads) - 2))
            continue
        rows = {row["policy"]: row for row in found["rows"]}
        fp32, low = rows["O0"], rows.get("O2,dtype=float16")
        share = None if low is None or not fp32["saved_bytes"] else low["saved_bytes"] / fp32["saved_bytes"]
        cells = [_number(fp32["metric"]), *(_verdict(rows.get(policy)) for policy in policies)]
        cells += [f"{found['margin']:g}", "–" if share is None else f"{share:.2f}×"]
        unit = f", {found['metric']['unit']}".rstrip(", ")
        lines.append(f"| {each.title}: {found['metric']['name']}{unit} | {' | '.join(cells)} |")
        machine = found["machine"]
        places.add(f"{machine['cpu']}, {counted(machine['threads'], 'thread')}, torch {machine['torch']}")
        days.add(found["date"][:10])
    where = "; ".join([*sorted(places), ", ".join(sorted(days))])
    return "\n".join([*lines, "", f"Means of {SEEDS} seeds; {where}; {coverage()}"])


def _verdict(row: dict[str, Any] | None) -> str:
    return "not run yet" if row is None else f"{_number(row['metric'])}, {row['verdict']}"


def papers() -> str:
    """A line a family: its curves, and what the paper found."""
    return "\n".join(
        f"- [{each.title}](../benchmarks/results/suite-cpu/{each.name}/curves.png): {each.paper}" for each in FAMILIES
    )


def _number(value: float | str | None) -> str:
    return number(None if value is None else float(value))  # JSON has texts for what is not finite


def numbers() -> str:
    """What FP16 makes of each family's activation gradients and updates."""
    scales = " | ".join("unscaled" if scale == 1 else f"× {scale:,.0f}" for scale in SCALES)
    lines = [f"| gradients flushed, % | {scales} | largest scale | updates swallowed, % |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for each in FAMILIES:
        found = _read(RESULTS / each.name / "numbers.json")
        if found is None:
            lines.append(f"| {each.title} | not run yet | | | | |")
            continue
        gradients = found["kinds"][GRADIENTS]
        alive = gradients["total"] - gradients["zeros"]
        shares = [f"{100 * row['underflow'] / alive:.2g}" for row in gradients["float16"]]
        swallowed = f"{100 * found['kinds']['updates']['swallowed']['float16']:.2g}"
        lines.append(f"| {each.title} | {' | '.join(shares)} | {scale_text(gradients['best_scale'])} | {swallowed} |")
    return "\n".join(lines)


def without() -> str:
    """What came of doing without each technique: how many families had which verdict."""
    lines = []
    for policy, what in WITHOUT.items():
        rows = [row for each in FAMILIES for row in (compared(each.name) or {"rows": []})["rows"]]
        found = Counter(map(_came_to, (row for row in rows if row["policy"] == policy)))
        lines.append(f"- {what}: {', '.join(f'{count} {verdict}' for verdict, count in found.most_common())}")
    return "\n".join(lines)


def _came_to(row: dict[str, Any]) -> str:
    if any("stored in FP32" in what for what in row["left_alone"]):
        return "not possible with Adam, whose ε is zero in FP16"
    return str(row["verdict"])


def coverage() -> str:
    """How much of the suite there is."""
    policies = 1 + len(POLICIES.split(";")) + len(WITHOUT)
    done = sum(len(summary["runs"]) for each in FAMILIES if (summary := compared(each.name)) is not None)
    return f"{done} of {len(FAMILIES) * policies * SEEDS} runs are here."
