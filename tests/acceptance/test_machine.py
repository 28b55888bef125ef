"""Sequences of calls that nobody wrote down, against an oracle in float64.

What stands here knows the contract and no room: it calls what users call, over policies × optimizers × windows × orders
of calls, and is told by :mod:`.oracle` what must come out. So it lives by itself, and not in ``tests/session``.
CONTRIBUTING says how to run it long, and how to repeat what it found.
"""

import logging
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .checkpoints import Checkpoints
from .edits import Edits
from .faults import Faults


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Overflows are meant here: neither NumPy nor mezzo's log has to tell of each."""
    caplog.set_level(logging.ERROR, "mezzo")
    with np.errstate(all="ignore"):
        yield


class Sessions(Edits, Checkpoints, Faults):
    """All rules together."""


STEPS = 30
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=60, stateful_step_count=STEPS, derandomize=True, deadline=None, suppress_health_check=QUIET
)


@pytest.mark.slow
def test_many_sequences():
    """As many as MEZZO_SEQUENCES says, other ones each time, or those of ``--hypothesis-seed``."""
    number = int(os.environ.get("MEZZO_SEQUENCES", "2000"))
    many = settings(
        max_examples=number, stateful_step_count=STEPS, derandomize=False, deadline=None, database=None,
        print_blob=True, suppress_health_check=QUIET, phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    run_state_machine_as_test(Sessions, settings=many)
