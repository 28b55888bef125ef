"""All faults: ``make faults`` plants each."""

from . import lower, scalers, scripts, sessions, upper
from .fault import Fault

FAULTS: tuple[Fault, ...] = (*lower.FAULTS, *upper.FAULTS, *sessions.FAULTS, *scalers.FAULTS, *scripts.FAULTS)
