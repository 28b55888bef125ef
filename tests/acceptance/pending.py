"""Events whose contract does not hold yet; this list is to be empty."""

import os

from hypothesis.stateful import precondition

PENDING = frozenset(os.environ.get("MEZZO_PENDING", "").split(","))


def precondition_of(event):
    """A rule that is drawn unless it is pending."""
    return precondition(lambda self: event not in PENDING)
