"""Random sequences of calls, against an oracle in float64.

What stands here knows the contract and no room: it calls what users call, over policies × optimizers × windows × orders
of calls, and is told by :mod:`.oracle` what must come out. So it lives by itself, and not in ``tests/session``.
CONTRIBUTING says how to run it long, and how to repeat what it found.
"""

import logging
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from mezzo.compat import apex
from mezzo.session.attach import attached_now

from . import scalers  # noqa: F401 - two more drivers
from .checkpoints import Checkpoints
from .edits import Edits
from .faults import Faults
from .loop import configs

#: Scaled gradients are edited on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*carry the loss scale")


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Overflows are meant here: neither NumPy nor mezzo's log has to tell of each."""
    caplog.set_level(logging.ERROR, "mezzo")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def ended():
    """The last sequence of a style leaves its session, of which a process has one at a time."""
    yield
    apex.deinitialize()
    if (session := attached_now()) is not None:
        session.detach()


class Sessions(Edits, Checkpoints, Faults):
    """All rules together."""


STEPS = 30
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
PHASES = (Phase.generate, Phase.shrink)  # to explain costs minutes
#: How many sequences of each style every run takes.
SEQUENCES = {
    "five lines": 24,
    "attach": 24,
    "SessionScaler": 12,
    "apex": 12,
    "torch": 12,
    "Paddle": 12,
    "Accelerate": 6,
    "Lightning": 6,
}
FRAMEWORKS = ("Accelerate", "Lightning")


def run(style, **options):
    """Run sequences in one style."""
    if style in FRAMEWORKS:
        pytest.importorskip(style.lower())
        from . import frameworks  # noqa: F401

    class Driven(Sessions):
        @initialize(config=configs([style]), seed=st.integers(0, 3))
        def begin(self, config, seed):
            super().begin(config, seed)

    Driven.__name__ = style
    options = {"stateful_step_count": STEPS, "deadline": None, "suppress_health_check": QUIET, **options}
    run_state_machine_as_test(Driven, settings=settings(**options))


@pytest.mark.parametrize("style", SEQUENCES)
def test_sequences(style):
    """The same ones in each run."""
    run(style, max_examples=SEQUENCES[style], derandomize=True, phases=PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("style", SEQUENCES)
def test_many_sequences(style):
    """As many as MEZZO_SEQUENCES says, other ones each time, or those of ``--hypothesis-seed``."""
    number = int(os.environ.get("MEZZO_SEQUENCES", "500"))
    run(style, max_examples=number, derandomize=False, database=None, print_blob=True, phases=PHASES)
