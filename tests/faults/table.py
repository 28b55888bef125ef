"""All faults: ``make faults`` plants each."""

from . import lower, probe, scalers, scripts, sessions, upper, weights
from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    *lower.FAULTS,
    *upper.FAULTS,
    *probe.FAULTS,
    *weights.FAULTS,
    *sessions.FAULTS,
    *scalers.FAULTS,
    *scripts.FAULTS,
)
