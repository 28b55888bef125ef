"""Where casts go: which ops run low where either precision would do, found as a minimum cut.

The pure problem is in :mod:`mezzo.plan.cut`, what others do in :mod:`mezzo.plan.heuristics`. A captured graph is read,
its costs are counted, and a placement is carried out in it; nothing here casts in eager programs, which is
``mezzo.cast``'s.
"""

from mezzo.plan.backend import Backend, compile_backend
from mezzo.plan.balance import Balance
from mezzo.plan.costs import Totals
from mezzo.plan.planned import Plan, PlannedCast, PlannedOp
from mezzo.plan.planning import differences, plan

__all__ = [
    "Backend", "Balance", "Plan", "PlannedCast", "PlannedOp", "Totals", "compile_backend", "differences", "plan",
]  # fmt: skip
