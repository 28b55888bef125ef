"""Round trips low → FP32 → low, added up by what asks for them, each with the rule that would save it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from mezzo.explanation.rows import RoundTrip
from mezzo.policy.ops import OPS
from mezzo.trace.trips import Account, Cause, Trip

__all__ = ["round_trips"]


def round_trips(done: Iterable[Trip]) -> tuple[RoundTrip, ...]:
    """Add up the round trips of one pass, the dearest first; a cast on the way of several counts for the first."""
    together: defaultdict[tuple[Hashable, ...], list[Trip]] = defaultdict(list)
    for trip in done:
        # A rule on a whole module asks for it as one, whatever ops run there.
        together[(trip.causes[0].module, *_rules(trip)) if _rules(trip) else trip.causes or (trip.first,)].append(trip)
    counted: set[Account] = set()
    found = []
    for trips in together.values():
        casts = {account for trip in trips for account in trip.casts} - counted
        counted |= casts
        found.append(_round_trip(trips, sum(account.num_bytes for account in casts)))
    return tuple(sorted(found, key=lambda trip: -trip.num_bytes))


def _round_trip(trips: list[Trip], num_bytes: int) -> RoundTrip:
    trip = trips[0]
    cause = (trip.causes or (trip.first,))[0]
    write, risk = _cure(trip.causes, _rules(trip))
    return RoundTrip(
        module=cause.module,
        ops=tuple(dict.fromkeys(cause.op for cause in trip.causes)),
        low=trip.low,
        rules=_rules(trip),
        by=trip.casts[0].by,
        count=len(trips),
        num_bytes=num_bytes,
        write=write,
        risk=risk,
        line=cause.line,
    )


def _rules(trip: Trip) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cause.rule for cause in trip.causes if cause.rule))


def _cure(causes: tuple[Cause, ...], rules: tuple[str, ...]) -> tuple[str, str]:
    """Return what to write, and what it gives up."""
    if rules:
        return f"without {', '.join(rules)}", "what the rule is there for"
    entries = [OPS.get(op) for op in dict.fromkeys(cause.op for cause in causes)]
    known = [entry for entry in entries if entry is not None]
    if not known or len(known) < len(entries) or any("no low kernel" in (e.reason, e.source) for e in known):
        return "", ""
    risk = ", ".join(dict.fromkeys(entry.reason for entry in known if not entry.is_norm))
    return f"low={'+'.join(entry.name for entry in known)}", risk
