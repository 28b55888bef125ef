"""Where two explanations differ, op by op and cast by cast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from mezzo.explanation.rows import Difference, Explained
from mezzo.trace.where import MODEL, place_text

__all__ = ["differences"]

_ABOUT: Final = ("op", "casts", "alignment", "finding")


def differences(first: Explained, second: Explained) -> tuple[Difference, ...]:
    """List what differs between two explanations; see :meth:`~mezzo.explanation.Explanation.differences`."""
    found: list[Difference] = []
    for name in ("policy", "model", "torch", "devices", "emulated"):
        mine, theirs = (_show(getattr(each, name)) for each in (first, second))
        if mine != theirs:
            about = "policy" if name == "policy" else "run"
            found.append(Difference(about=about, where=name, this=mine, other=theirs))
    sides = _said(first), _said(second)
    for about, where in sorted({**sides[0], **sides[1]}, key=lambda key: _ABOUT.index(key[0])):
        mine, theirs = ("; ".join(side.get((about, where), ())) or "–" for side in sides)
        if mine != theirs:
            found.append(Difference(about=about, where=where, this=mine, other=theirs))
    return tuple(found)


def _show(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _said(explained: Explained) -> Mapping[tuple[str, str], list[str]]:
    """Return what an explanation says, by what it is about and where that is."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in explained.rows:
        dtypes = " → ".join(_show(dtypes) or "–" for dtypes in (row.given, row.computes_in, row.returns))
        text = (
            f"{row.count} × {dtypes}{' emulated' if row.emulated else ''}, {row.treatment} by {row.rule or row.source}"
        )
        found["op", place_text(row.module, row.op, row.line)].append(text)
    for cast in sorted(explained.casts, key=lambda cast: (cast.before, cast.after, cast.by)):
        text = f"{cast.count} × {cast.before}→{cast.after} by {cast.by}, {cast.num_bytes} bytes"
        found["casts", f"{cast.module or MODEL} {cast.phase} {cast.what}"].append(text)
    for entry in explained.misaligned:
        found["alignment", place_text(entry.module, entry.op)].append(f"{entry.count} × {entry.dtype} {entry.pads}")
    for finding in explained.findings:
        found["finding", f"{finding.kind}, {finding.where}"].append(finding.text)
    return found
