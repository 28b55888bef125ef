"""What precision each thing gets: policies, their rules, and the op table.

Values only. Nothing here holds a tensor, a module or a device; carrying a policy out is ``mezzo.cast``'s
business.
"""

from mezzo.policy.fields import LEVELS
from mezzo.policy.ops import OPS, Op, Treatment
from mezzo.policy.policy import Policy, PolicyLike
from mezzo.policy.rules import Decision, Rule
from mezzo.policy.schedule import Schedule, ScheduleLike

__all__ = [
    "LEVELS", "OPS", "Decision", "Op", "Policy", "PolicyLike", "Rule", "Schedule", "ScheduleLike", "Treatment",
]  # fmt: skip
