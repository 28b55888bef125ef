"""An unmodified training script under a policy: what it makes is found, taken into one session, and told of at the end.

Nothing here decides about numerics or carries a policy out: that is the session's that ``mezzo.attach`` begins.
"""

from mezzo.script.comparison import compare
from mezzo.script.dry import Rehearsed, rehearse
from mezzo.script.inspection import inspect
from mezzo.script.program import Program
from mezzo.script.report import ScriptReport
from mezzo.script.run import ScriptRun, run
from mezzo.script.tuning import tune

__all__ = ["Program", "Rehearsed", "ScriptReport", "ScriptRun", "compare", "inspect", "rehearse", "run", "tune"]
