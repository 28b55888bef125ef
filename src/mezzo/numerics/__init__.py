"""Evidence about numbers: where they lie, what a format would lose, which updates vanish, which ops need FP32."""

from mezzo.numerics.diagnosis import Alert, Diagnosis, FormatAnswer, diagnose
from mezzo.numerics.distances import Distance, LogProbs
from mezzo.numerics.evidence import (
    KINDS,
    Evidence,
    OperandLosses,
    RecordedOperand,
    RecordedStep,
    RecordedTensor,
    SwallowedUpdates,
)
from mezzo.numerics.evidence import read as read_evidence
from mezzo.numerics.histogram import ExponentHistogram, exponent_histogram
from mezzo.numerics.parity import ModuleParity, Parity, parity
from mezzo.numerics.recorder import Recorder
from mezzo.numerics.tuning import Candidate, Tuned, TuningEvidence, tune
from mezzo.numerics.watches import swallowed

__all__ = [
    "KINDS",
    "Alert",
    "Candidate",
    "Diagnosis",
    "Distance",
    "Evidence",
    "ExponentHistogram",
    "FormatAnswer",
    "LogProbs",
    "ModuleParity",
    "OperandLosses",
    "Parity",
    "RecordedOperand",
    "RecordedStep",
    "RecordedTensor",
    "Recorder",
    "SwallowedUpdates",
    "Tuned",
    "TuningEvidence",
    "diagnose",
    "exponent_histogram",
    "parity",
    "read_evidence",
    "swallowed",
    "tune",
]
