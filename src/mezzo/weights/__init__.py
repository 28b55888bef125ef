"""An FP32 number is stored in two halves: the model has the high one, 16 bits, and here is the other.

Here is the only owner of FP32 values (``halves``), what a converted model shows of them when it is saved, loaded and
copied (``models``), and how an optimizer sees them while it steps (``views``). What an update does with both halves in
one pass is said in ``mezzo.step``, where the pure pair of functions is as well.
"""

from mezzo.step.storage import decode, encode
from mezzo.weights.halves import Halves

__all__ = ["Halves", "decode", "encode"]
