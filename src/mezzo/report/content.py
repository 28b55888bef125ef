"""Everything that a report says, as plain values: what the page's template prints, and what its switches draw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mezzo.errors import MezzoError, StateError, printable
from mezzo.explanation import Explanation
from mezzo.explanation.sections import NUMBERS, few_rows
from mezzo.explanation.words import share_text
from mezzo.files import opened
from mezzo.numerics import Evidence
from mezzo.numerics.faults import lost_updates, stored_low
from mezzo.policy import Policy
from mezzo.recipes.run_directory import EXPLANATION
from mezzo.report.heat import heat, thinned
from mezzo.report.judgement import Judgement, judge
from mezzo.report.picture import smooth
from mezzo.report.ranks import rank_columns, rank_rows
from mezzo.report.run import Run, Series
from mezzo.report.table import Column, columns, facts, seed_text

__all__ = ["content"]

#: Points of a curve: more than a screen has columns.
_MOST_POINTS: Final = 2000
#: Marks of a curve that can be told apart.
_MOST_MARKS: Final = 500
#: What can be chosen on the page, in use or not.
_FORMATS: Final = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def content(run: Run) -> dict[str, Any]:
    """Return what the template asks for, all text as it is: escaping is the template's."""
    summary = run.summary
    judgement = judge(run)
    policies = summary["policies"]
    what = f"under {policies[0]}" if len(policies) == 1 else f"under {len(policies)} policies"
    machine = summary["machine"]
    device = machine.get("gpu", machine["cpu"])
    return {
        "title": printable(f"{summary['recipe']} {what}"),
        "subtitle": printable(
            f"{summary['summary']} · {summary['steps']} steps{seed_text(summary)} · {device}, torch "
            f"{machine['torch']} · {summary['date'][:16].replace('T', ' ')}"
        ),
        "partial": _partial(run),
        **_judged(judgement),
        "results": _results(run),
        "ranks": _ranks(run),
        "timeline": _timeline(run),
        "environment": [[name.replace("_", " "), printable(str(value))] for name, value in _environment(summary)],
        **_recorded(run),
        "explained": _explained(run),
        "suggested": _suggested(run, judgement),
    }


def _suggested(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """The policy to go on with, beside that of the run."""
    before = None if run.evidence is None else run.evidence.header.policy
    if not judgement.policy or before is None:
        return None
    current, suggested = Policy.parse(before), Policy.parse(judgement.policy)
    changes = [f"  {line}" for line in current.differences(suggested)]
    lines = [f"- {current}", f"+ {suggested}", *changes]
    return {"why": printable(judgement.why), "difference": [printable(line) for line in lines]}


def _recorded(run: Run) -> dict[str, Any]:
    """What the page draws: curves, and the heat map where there is evidence."""
    curves = _curves(run)
    evidence = run.evidence
    if evidence is None:
        return {"data": curves, "left_out": [], "swallowed": None}
    formats = list(dict.fromkeys((*_FORMATS, *evidence.header.formats)))
    drawn, left_out = heat(evidence, formats)
    computed = evidence.header.compute_dtype
    shown = formats.index(computed) if computed in formats else 0
    return {"data": curves | drawn | {"format": shown}, "left_out": left_out, "swallowed": _swallowed(evidence)}


def _swallowed(evidence: Evidence) -> dict[str, Any] | None:
    """The updates that would round away in each storage format, by weight, over all recorded steps."""
    lost, formats = lost_updates(evidence), evidence.header.formats
    if not lost or not formats:
        return None
    is_low = not stored_low(evidence).keys().isdisjoint(lost)
    rows = sorted(
        lost.items(),
        key=lambda row: (-row[1].unmoved if is_low else 0, -sum(row[1].share(e) for e in formats if row[1].updated)),
    )
    heads = ["weight", *(["did not move"] if is_low else []), "updates"]
    return {
        "is_low": is_low,
        "heads": [*heads, *(f"swallowed by {each}" for each in formats), "weight ≥ 2048 × update"],
        "rows": [
            [printable(path), *([share_text(each.unmoved, each.with_gradient)] if is_low else []), f"{each.updated:,}"]
            + [
                share_text(count, each.updated) if each.updated else "–"
                for count in (*(each.swallowed[name] for name in formats), each.beyond)
            ]
            for path, each in rows
        ],
        "numbers": list(range(1, len(formats) + len(heads) + 1)),
    }


def _explained(run: Run) -> dict[str, Any] | None:
    """Which precision each op gets and why, and casts by place: the tables of ``mezzo explain``."""
    place = run.file(EXPLANATION)
    if place is None:
        return None
    try:
        with opened(place) as file:
            explanation = Explanation.from_json(file.read().decode())
        answer, rows = explanation.answer, list(few_rows(explanation))
    except (OSError, UnicodeDecodeError, MezzoError) as error:
        raise StateError("the run's explanation cannot be read", where=str(place), why=str(error)) from error
    sections = [
        {
            "title": section.title,
            "heads": section.heads,
            "rows": [[printable(cell) for cell in row] for row in section.rows],
            "numbers": [place for place, head in enumerate(section.heads) if head in NUMBERS],
            "rest": section.rest,
        }
        for section in rows
    ]
    return {"lines": [printable(line) for line in (answer.headline, *answer.points)], "sections": sections}


def _judged(judgement: Judgement) -> dict[str, Any]:
    alerts = [
        {name: printable(getattr(alert, name), keep="\n") for name in ("level", "what", "where", "why", "write")}
        for alert in judgement.alerts
    ]
    lines = [printable(line) for line in judgement.lines]
    return {"level": judgement.level, "verdict": lines, "alerts": alerts, "write": judgement.write}


def _partial(run: Run) -> str:
    if run.killed:
        return "The process ended before the run was summed up: what follows was written until then."
    if run.summary["interrupted"]:
        return "The run was interrupted: what follows is what there was until then."
    return ""


def _results(run: Run) -> dict[str, Any] | None:
    """The table that ``mezzo compare`` prints."""
    rows = run.summary["rows"]
    if not rows:
        return None
    reference = run.summary["reference"]
    return {
        "title": f"{reference} against each policy" if len(rows) > 1 else "Result",
        **_table(columns(run.summary), rows),
        "facts": facts(run.summary)[2:],
    }


def _ranks(run: Run) -> dict[str, Any] | None:
    """The table of the ranks, of a parallel training."""
    rows = rank_rows(run)
    return _table(rank_columns(rows), rows) if rows else None


def _table(shown: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "heads": [" ".join(column.head) for column in shown],
        "rows": [[printable(column.cell(row), keep="\n") for column in shown] for row in rows],
        "numbers": [place for place, column in enumerate(shown) if column.right],
    }


def _timeline(run: Run) -> str:
    marks = ["a cross is a skipped step"]
    if any(not math.isfinite(loss) for series in run.series.values() for loss in series.loss):
        marks.append("a red cross on the loss a loss that is not finite")
    unscaled = [policy for policy, series in run.series.items() if all(scale == 1.0 for scale in series.scale)]
    text = f"In the loss scale {', '.join(marks)}."
    return text + (f" Not scaled: {'; '.join(map(printable, unscaled))}." if unscaled else "")


def _environment(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from summary["machine"].items()
    for name in ("recipe", "steps", "seed", "date", "data_sha256"):
        if name in summary:
            yield name, summary[name]


# Curves -----------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> dict[str, Any]:
    series = [_series(policy, each) for policy, each in run.series.items() if each.step]
    losses = [loss for each in series for loss in (*each["loss"], *each["smooth"]) if loss is not None]
    lowest, highest = (min(losses), max(losses)) if losses else (0.0, 1.0)
    metric = run.summary["metric"]
    return {
        "series": series,
        "reference": run.summary["reference"],
        "metric": {"name": metric["name"], "unit": metric["unit"]},
        "references": {name: _finite(float(value)) for name, value in run.summary["references"].items()},
        "logarithmic": 0.0 < 10.0 * lowest <= highest,
        "lowest": lowest,
        "steps": [],
        "kinds": [],
    }


def _series(policy: str, series: Series) -> dict[str, Any]:
    count = len(series.step)
    kept = _kept(series.loss)
    line = smooth(series.loss, count // 60)
    skipped = thinned([place for place in range(count) if series.skipped[place]], _MOST_MARKS)
    bad = thinned([place for place in range(count) if not math.isfinite(series.loss[place])], _MOST_MARKS)
    return {
        "policy": printable(policy),
        "step": [series.step[place] for place in kept],
        "loss": [_finite(series.loss[place]) for place in kept],
        "smooth": [_finite(line[place]) for place in kept],
        "scale": [_positive(series.scale[place]) for place in kept],
        "skipped": [series.step[place] for place in skipped],
        "skipped_scale": [_positive(series.scale[place]) for place in skipped],
        "bad": [series.step[place] for place in bad],
        "evaluated": list(series.evaluated),
        "metric": [_finite(value) for value in series.metric],
    }


def _kept(losses: Sequence[float]) -> list[int]:
    """Choose the places of a long curve to draw: lowest and highest of each stretch, so that no spike is lost."""
    if len(losses) <= _MOST_POINTS:
        return list(range(len(losses)))
    span = math.ceil(2 * len(losses) / _MOST_POINTS)
    chosen: set[int] = {0, len(losses) - 1}
    for begin in range(0, len(losses), span):
        finite = [place for place in range(begin, min(begin + span, len(losses))) if math.isfinite(losses[place])]
        if finite:
            chosen |= {min(finite, key=lambda place: losses[place]), max(finite, key=lambda place: losses[place])}
        else:
            chosen.add(begin)
    return sorted(chosen)


def _finite(value: float) -> float | None:
    """JSON has no infinity and no NaN: such a point is none."""
    return value if math.isfinite(value) else None


def _positive(value: float) -> float | None:
    return value if 0.0 < value < math.inf else None
