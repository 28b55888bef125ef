"""Where casts go, as ``benchmarks/plan.py`` measures it, on one model at full size."""

from __future__ import annotations

from typing import Any

from mezzo.policy import Policy
from plan import POLICY, counted, planned_gpt2, timed

from .plan import Plan


def measure(plan: Plan, model: str) -> dict[str, Any]:
    """Count and time the placements of a model; in a dry run nothing is compiled or timed."""
    policy = Policy.parse(POLICY)
    size = "small" if plan.dry else "full"
    found = {} if plan.dry else {"gpt2_small": planned_gpt2(policy)}  # first, with what is done once in a process
    counts = counted(model, size, policy)
    rows = [] if plan.dry else timed(model, size, policy, counts, plan.repetitions)
    return {**found, "counts": counts, "rows": rows}
