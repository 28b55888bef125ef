"""An unmodified training script under a policy: its models train in one session, and a report ends the run.

Nothing here decides about numerics or carries a policy out: the session of ``mezzo.attach`` does.
"""

from mezzo.script.comparison import Comparison, compare
from mezzo.script.inspection import Called, Inspection, Rehearsed, explained, inspect, rehearse
from mezzo.script.metric import TRAINING_LOSS, Metric
from mezzo.script.program import Program
from mezzo.script.report import ScriptReport
from mezzo.script.runner import ScriptRun, run
from mezzo.script.tuning import tune

__all__ = [
    "TRAINING_LOSS", "Called", "Comparison", "Inspection", "Metric", "Program", "Rehearsed", "ScriptReport",
    "ScriptRun", "compare", "explained", "inspect", "rehearse", "run", "tune",
]  # fmt: skip
