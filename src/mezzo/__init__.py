"""mezzo trains PyTorch models in automatic mixed precision."""

from mezzo import formats
from mezzo.cast import Prepared, autocast, checkpoint_contexts, fp32, low, prepare, promote
from mezzo.errors import MezzoError, NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.policy import Decision, Policy, Rule
from mezzo.scale import LossScale
from mezzo.session import MixedPrecision, Step
from mezzo.step import MasterWeights

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "LossScale",
    "MasterWeights",
    "MezzoError",
    "MixedPrecision",
    "NumericsError",
    "Policy",
    "PolicyError",
    "Prepared",
    "Rule",
    "StateError",
    "Step",
    "UnsupportedError",
    "__version__",
    "autocast",
    "checkpoint_contexts",
    "formats",
    "fp32",
    "low",
    "prepare",
    "promote",
]
