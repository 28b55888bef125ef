"""Sessions whose backward passes and steps are made by the user's own calls: what call styles are built on.

``own_loop`` is that of plain torch, ``mezzo.attach``. What calls of other systems mean is said in ``compat/``.
"""

from mezzo.session.attached.attached import Attached
from mezzo.session.attached.lent import adopt, lend, store_low
from mezzo.session.attached.standing import Standing
from mezzo.session.weights.words import Words

__all__ = ["Attached", "Standing", "Words", "adopt", "lend", "store_low"]
