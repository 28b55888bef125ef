"""Evidence about numbers: where they lie, what a format would lose of them, which updates vanish, which ops need FP32.

The search for the first that is not finite lives in :mod:`mezzo.overflow`, and can be asked here too.
"""

from mezzo.numerics.diagnosis import Diagnosis, FormatAnswer, diagnose
from mezzo.numerics.evidence import KINDS, Evidence, RecordedStep, RecordedTensor, SwallowedUpdates
from mezzo.numerics.evidence_file import read as read_evidence
from mezzo.numerics.faults import Alert
from mezzo.numerics.histogram import ExponentHistogram, exponent_histogram
from mezzo.numerics.recording.recorder import Recorder
from mezzo.numerics.swallowing import swallowed
from mezzo.numerics.tuning import Candidate, Tuned, TuningEvidence, tune
from mezzo.overflow import Changed, Overflow, Range, Replay, locate

__all__ = [
    "KINDS",
    "Alert",
    "Candidate",
    "Changed",
    "Diagnosis",
    "Evidence",
    "ExponentHistogram",
    "FormatAnswer",
    "Overflow",
    "Range",
    "RecordedStep",
    "RecordedTensor",
    "Recorder",
    "Replay",
    "SwallowedUpdates",
    "Tuned",
    "TuningEvidence",
    "diagnose",
    "exponent_histogram",
    "locate",
    "read_evidence",
    "swallowed",
    "tune",
]
