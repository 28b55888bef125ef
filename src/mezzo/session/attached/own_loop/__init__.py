"""``mezzo.attach``: a training loop that stays as it is, and what of torch's does something else in it meanwhile.

Nothing that another call style means lives here.
"""

from mezzo.session.attached.own_loop.checkpoints import CARRIED
from mezzo.session.attached.own_loop.loop import AttachedPrecision, attach

__all__ = ["CARRIED", "AttachedPrecision", "attach"]
