"""Whether mixed precision works on a machine: small real trainings in each format, held against FP32, with a verdict.

Here live the task, what is measured of a training, and what is asked of these measurements. It judges correctness:
which format pays is :mod:`mezzo.bench`'s to say, and nothing here looks at a clock to decide.
"""

from mezzo.selftest.run import SelfTest, TrialResult, chosen, selftest
from mezzo.selftest.trial import Measured, Trial

__all__ = ["Measured", "SelfTest", "Trial", "TrialResult", "chosen", "selftest"]
