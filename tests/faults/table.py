"""All faults: ``make faults`` plants each."""

from . import lower, scalers, scripts, sessions, upper, weights
from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    *lower.FAULTS,
    *upper.FAULTS,
    *weights.FAULTS,
    *sessions.FAULTS,
    *scalers.FAULTS,
    *scripts.FAULTS,
)
