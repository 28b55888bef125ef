"""Where two explanations differ, op by op and cast by cast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mezzo.explanation.rows import Difference, Explained
from mezzo.trace.where import MODEL, place_text

__all__ = ["differences"]


def differences(first: Explained, second: Explained) -> tuple[Difference, ...]:
    """List what differs between two explanations; see :meth:`~mezzo.explanation.Explanation.differences`."""
    found: list[Difference] = []
    for name in ("policy", "model", "torch", "devices", "emulated"):
        mine, theirs = (_show(getattr(each, name)) for each in (first, second))
        if mine != theirs:
            about = "policy" if name == "policy" else "run"
            found.append(Difference(about=about, where=name, this=mine, other=theirs))
    for about, read in (("op", _ops), ("casts", _casts), ("alignment", _alignment), ("finding", _findings)):
        sides = _by_place(read(first)), _by_place(read(second))
        for where in dict.fromkeys((*sides[0], *sides[1])):
            mine, theirs = ("; ".join(side.get(where, ())) or "–" for side in sides)
            if mine != theirs:
                found.append(Difference(about=about, where=where, this=mine, other=theirs))
    return tuple(found)


def _show(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _by_place(said: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for where, text in said:
        found[where].append(text)
    return found


def _ops(explanation: Explained) -> Iterator[tuple[str, str]]:
    for row in explanation.rows:
        where = place_text(row.module, row.op, row.line)
        dtypes = " → ".join(_show(dtypes) or "–" for dtypes in (row.given, row.computes_in, row.returns))
        emulated = " emulated" if row.emulated else ""
        yield where, f"{row.count} × {dtypes}{emulated}, {row.treatment} by {row.rule or row.source}"


def _casts(explanation: Explained) -> Iterator[tuple[str, str]]:
    for cast in sorted(explanation.casts, key=lambda cast: (cast.before, cast.after, cast.by)):
        where = f"{cast.module or MODEL} {cast.phase} {cast.what}"
        yield where, f"{cast.count} × {cast.before}→{cast.after} by {cast.by}, {cast.num_bytes} bytes"


def _alignment(explanation: Explained) -> Iterator[tuple[str, str]]:
    for entry in explanation.misaligned:
        yield place_text(entry.module, entry.op), f"{entry.count} × {entry.dtype} {entry.pads}"


def _findings(explanation: Explained) -> Iterator[tuple[str, str]]:
    for finding in explanation.findings:
        yield f"{finding.kind}, {finding.where}", finding.text
