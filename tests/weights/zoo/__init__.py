"""Programs that O1 and O2 must train alike: small models in the styles of well-known repositories, one builder each.

``architectures`` holds what models are made of, ``losses`` what a program does with what they compute, ``uses`` what
else it does with their weights, and ``tensors`` what it asks of one as of any tensor. A builder returns a model and a
function, which computes the loss of one pass, or the loss and what else must be the same.
"""

from .architectures import ARCHITECTURES
from .losses import LOSSES
from .tensors import TENSORS
from .uses import USES

ZOO = {**ARCHITECTURES, **LOSSES, **USES, **TENSORS}
