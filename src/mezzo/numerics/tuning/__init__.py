"""Which precision each op should have, found by running it: a policy, and the trials that led to it.

Policies are tried on a copy of the model and measured against its own FP32 gradients. Nothing here casts: a policy's
rules do, carried out as in training.
"""

from mezzo.numerics.tuning.search import tune
from mezzo.numerics.tuning.tuned import Candidate, Tuned, TuningEvidence

__all__ = ["Candidate", "Tuned", "TuningEvidence", "tune"]
