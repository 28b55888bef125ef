"""What a run came to, in words: the answer first, then what is wrong, the gravest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezzo.explanation.words import byte_text
from mezzo.numerics import Alert, Diagnosis, diagnose
from mezzo.numerics.faults import Level
from mezzo.numerics.skips import MANY, skips
from mezzo.report.ranks import rank_alerts, rank_lines
from mezzo.report.run import Run

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer.

    Attributes:
        lines: What the run came to; the first line is the answer.
        alerts: What is wrong, the gravest first.
        policy: The policy to go on with; empty where there is none to suggest.
        why: What that changes.
    """

    lines: tuple[str, ...]
    alerts: tuple[Alert, ...] = ()
    policy: str = ""
    why: str = ""

    @property
    def write(self) -> str:
        """What to write, as text to paste."""
        return f'MixedPrecision(model, optimizer, "{self.policy}")' if self.policy else ""

    @property
    def level(self) -> Level:
        """The gravest alert's."""
        levels = {alert.level for alert in self.alerts}
        return "bad" if "bad" in levels else "warn" if "warn" in levels else "ok"


def judge(run: Run) -> Judgement:
    """Say what a run came to."""
    rows = run.summary["rows"]
    if run.killed or not rows:
        lines = [_progress(run)]
    elif len(rows) == 1:
        lines = [_single(run.summary, rows[0])]
    else:
        lines = [*_differences(run.summary, rows), *_savings(run.summary, rows)]
    lines += rank_lines(run)
    recipe = None if run.evidence is not None else run.summary["recipe"]
    told = run.evidence is not None and any(skips(run.evidence))  # with what to write
    alerts = [
        *(alert for row in rows for alert in _alerts(row, recipe, told, row["policy"] == run.summary["reference"])),
        *rank_alerts(run),
    ]
    found = diagnose(run.evidence) if run.evidence is not None else Diagnosis()
    alerts = sorted((*found.alerts, *alerts), key=lambda alert: alert.level != "bad")
    # What is wrong with the run itself says more than which formats would do for it.
    first = [alert.what for alert in alerts[:1]] if run.evidence is not None else []
    return Judgement(
        lines=(*first, *(each.line for each in found.formats), *found.lines, *lines),
        alerts=tuple(alerts),
        policy="" if found.policy is None else str(found.policy),
        why=found.why,
    )


def _alerts(row: Mapping[str, Any], recipe: str | None, has_skips: bool, is_reference: bool) -> Iterator[Alert]:
    policy, steps, skipped = row["policy"], row["steps"], row["skipped_steps"]
    if row["note"]:
        yield Alert(level="bad", what=f"Training stopped after {steps} steps.", where=policy, why=row["note"])
    if row["nonfinite_losses"]:
        what = f"{row['nonfinite_losses']} of {steps} losses were infinite or NaN."
        write = "" if recipe is None else f'mezzo inspect --policy "{policy}" {recipe}'
        yield Alert(level="bad", what=what, where=policy, why="The training diverged, or overflowed.", write=write)
    if row.get("low_share") == 0 and not is_reference:
        yield Alert(level="bad", what="Nothing ran in low precision.", where=policy, why="The difference says nothing.")
    if steps and not has_skips and skipped > max(1, MANY * steps):
        why = "Their gradients were not finite at the loss scale, and their batches were lost."
        if is_reference:
            why = "Their gradients were not finite. Plain FP32 takes such steps, and each loss after them is NaN."
        level: Level = "bad" if skipped > steps / 2 else "warn"
        yield Alert(level=level, what=f"{skipped} of {steps} steps were skipped.", where=policy, why=why)


def _progress(run: Run) -> str:
    of = f" of {steps}" if (steps := run.summary["steps"]) else ""  # a script may end when it likes
    taken = [f"{policy}: {len(series.step)}{of} steps" for policy, series in run.series.items()]
    return f"The run ended before it was summed up ({'; '.join(taken) or 'no step was taken'})."


def _single(summary: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    score = _score(row["final_metric"], summary)
    return f"{row['policy']}: {summary['metric']['name']} {score} after {row['steps']} steps."


def _score(value: Any, summary: Mapping[str, Any]) -> str:
    if value is None:
        return "not measured"
    metric, number = summary["metric"], float(value)
    return f"{number:.{metric['decimals']}f} {metric['unit']}".rstrip() if math.isfinite(number) else str(number)


def _differences(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    metric, reference = summary["metric"], summary["reference"]
    base = next((row for row in rows if row["policy"] == reference), None)
    others = {row["policy"]: float(row["difference"]) for row in rows if row["difference"] is not None}
    if base is None or not others:
        yield f"{len(rows)} of {len(summary['policies'])} policies were trained: none to compare with {reference}."
        return
    sign = 1.0 if metric["higher_is_better"] else -1.0
    worst = min(others, key=lambda policy: sign * others[policy] if math.isfinite(others[policy]) else -math.inf)
    unit = f" {metric['unit_of_difference']}".rstrip()
    least = f"{others[worst]:+z.{metric['decimals']}f}{unit} ({worst})"
    if all(map(math.isfinite, others.values())):
        better = sign * others[worst] >= 0
        words = "no policy is worse than it" if better else f"the worst difference is {least}"
        yield f"{reference} reaches {metric['name']} {_score(base['final_metric'], summary)}; {words}."
    else:
        bad = [policy for policy, difference in others.items() if not math.isfinite(difference)]
        yield f"{reference} reaches {_score(base['final_metric'], summary)}; not finite: {'; '.join(bad)}."
    yield "One run of each: two seeds of one policy differ as well."


def _savings(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    base = next((row for row in rows if row["policy"] == summary["reference"]), None)
    sized = [row for row in rows if row["state_bytes"] and row["saved_bytes"] is not None]
    if base is None or base not in sized or len(sized) < 2:
        return
    total = {row["policy"]: row["state_bytes"]["total"] + row["saved_bytes"] for row in sized}
    least = min((row["policy"] for row in sized if row is not base), key=lambda policy: total[policy])
    whole = total[base["policy"]]
    if whole:
        yield (
            f"Least memory: {least}, {byte_text(total[least])} of weights, gradients, optimizer state and what is "
            f"saved for the backward pass, {total[least] / whole:.2f}× that of {base['policy']}."
        )
