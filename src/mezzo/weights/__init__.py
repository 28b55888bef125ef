"""A weight is FP32 to everybody, and stored in two halves: the tensor that is one, and the models that have such."""

from mezzo.step.storage import decode, encode
from mezzo.weights.exports import export
from mezzo.weights.halves import Halves
from mezzo.weights.models import halves

__all__ = ["Halves", "decode", "encode", "export", "halves"]
