"""Random sequences of calls, against an oracle in float64.

What stands here knows the contract and no room: it calls what users call, over policies × optimizers × windows × orders
of calls, and is told by :mod:`.oracle` what must come out. So it lives by itself, and not in ``tests/session``.
CONTRIBUTING says how to run it long, and how to repeat what it found.
"""

import contextlib
import logging
import os
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from mezzo.compat import apex
from mezzo.session.attach import attached_now

from ..distributed.ranks import on_ranks
from . import captured, planned, ranks, scalers  # noqa: F401 - more drivers
from .changes import Changes
from .edits import Edits
from .faults import Faults
from .loop import configs
from .made import Made
from .methods import Methods
from .nested import Nested
from .states import States
from .structure import Structure
from .subject import Config
from .threads import Threads

#: Scaled gradients are edited on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*carry the loss scale"),
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    # torch's own, of one that Dynamo began to make and did not end
    pytest.mark.filterwarnings("ignore:Exception ignored in. <function StorageWeakRef.__del__"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo of torch 2.11 asks inputs for it
]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Overflows are meant here: neither mezzo's log has to tell of each, nor numpy."""
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


class Sessions(Edits, Faults, Nested, Made, States, Methods, Threads, Structure, Changes):
    """All rules together."""


class OnRanks(Edits, Faults, Nested, States, Methods, Threads):
    """Without gradients made by hand: after one that is refused hypothesis draws another way on each rank."""


#: Of styles that have rules of their own.
MACHINES = {"two ranks": OnRanks, "planned": planned.Compiles, "planned attach": planned.Compiles}
#: What holds while sequences of a style run.
AROUND = {"captured step": captured.predicated, **dict.fromkeys(("planned", "planned attach"), planned.many_variants)}

STEPS = 30
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
#: To explain costs minutes; to shrink what a planted fault breaks would as well, and tells nobody anything.
PHASES = (Phase.generate,) if "MEZZO_PLANTED" in os.environ else (Phase.generate, Phase.shrink)
#: How many sequences of each style every run takes.
SEQUENCES = {
    "five lines": 16,
    "attach": 16,
    "SessionScaler": 8,
    "apex": 8,
    "torch": 8,
    "Paddle": 8,
    "Accelerate": 6,
    "Lightning": 6,
    "captured step": 8,
    "one rank": 6,
    "planned": 3,
    "planned attach": 2,
}
ON_RANKS = 6
#: How many ``slow`` ones.
MANY = int(os.environ.get("MEZZO_SEQUENCES", "100"))
FRAMEWORKS = ("Accelerate", "Lightning")


def run(style, **options):
    """Run sequences in one style."""
    if style in FRAMEWORKS:
        pytest.importorskip(style.lower())
        from . import frameworks  # noqa: F401

    class Driven(MACHINES.get(style, Sessions)):
        @initialize(config=configs([style]), seed=st.integers(0, 3))
        def begin(self, config, seed):
            super().begin(config, seed)

    Driven.__name__ = style
    options = {"stateful_step_count": STEPS, "deadline": None, "suppress_health_check": QUIET, **options}
    with AROUND.get(style, contextlib.nullcontext)():
        run_state_machine_as_test(Driven, settings=settings(**options))


def run_on_rank(style, **options):
    """Run the same sequences on each rank, which draws what the others draw: without a database, or a look at time."""
    logging.getLogger("mezzo").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    run(style, phases=(Phase.generate,), database=None, **options)


@pytest.mark.parametrize("style", SEQUENCES)
def test_sequences(style, request):
    """The same ones in each run."""
    if style == "one rank":
        request.getfixturevalue("alone")
    run(style, max_examples=SEQUENCES[style], derandomize=True, phases=PHASES)


def test_sequences_on_two_ranks():
    on_ranks(2, run_sequences_on_rank, ON_RANKS)


def run_sequences_on_rank(number):
    run_on_rank("two ranks", max_examples=number, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("style", SEQUENCES)
def test_many_sequences(style, request):
    """As many as MEZZO_SEQUENCES says, other ones each time, or those of ``--hypothesis-seed``."""
    if style == "one rank":
        request.getfixturevalue("alone")
    run(style, max_examples=MANY, derandomize=False, database=None, print_blob=True, phases=PHASES)


@pytest.mark.slow
def test_many_sequences_on_two_ranks():
    """The same ones in each run, as both ranks must draw them."""
    on_ranks(2, run_sequences_on_rank, MANY, timeout=60 + MANY)


@pytest.mark.parametrize("style", ["five lines", "attach"])
def test_the_pass_after_one_that_a_signal_has_ended_is_noticed(style):
    machine, batch = Sessions(), {"values": 3, "widths": (1.0, 1.0), "kind": "plain", "elsewhere": "plain"}
    machine.begin(Config(dtype="float16", scale="64", style=style), seed=0)
    for line in range(0, 500, 40):
        machine.interrupted_pass(batch=batch, line=line, unscales=False)
        machine.train(batches=[{**batch, "kind": "inf loss"}, batch])
        machine.agrees()


def test_a_group_that_comes_before_a_step_is_recorded_has_a_step_without_the_graph():
    """Moments that were made inside of it would be zeros again in each replay."""
    with captured.predicated():
        machine, batch = Sessions(), {"values": 0, "widths": (1.0, 1.0), "kind": "plain", "elsewhere": "plain"}
        machine.begin(Config(dtype="float16", style="captured step"), seed=0)
        machine.train(batches=[batch])
        machine.add_group(number=0)
        machine.train(batches=[batch])
        machine.agrees()


def test_the_scale_moves_in_replays_where_an_optimizer_has_nothing_to_train():
    """Elsewhere it moves with the next loss then, of which a graph would know nothing."""
    with captured.predicated():
        machine, batch = Sessions(), {"values": 0, "widths": (1.0, 1.0), "kind": "plain", "elsewhere": "plain"}
        machine.begin(Config(dtype="float16", rule="AdamW", apart=True, style="captured step"), seed=0)
        machine.freeze(name="first.weight", trains=False)
        machine.train(batches=[batch, batch, {**batch, "kind": "second.weight"}])
        machine.train(batches=[batch])
        machine.agrees()


def test_moments_of_mezzos_optimizers_keep_their_dtype_after_a_session():
    machine, batch = Sessions(), {"values": 0, "widths": (1.0, 1.0), "kind": "plain", "elsewhere": "plain"}
    machine.begin(Config(level="O3", dtype="bfloat16", state_dtype="bfloat16"), seed=0)
    machine.train(batches=[batch])
    machine.close(level="O0", same=False)
    machine.train(batches=[batch, batch, {**batch, "values": 1}])
    machine.save()
    machine.load_into_the_same(order=[0, 1, 2, 3], line=None)
    machine.agrees()


def test_after_lightning_a_low_weights_moments_are_fp32_with_it():
    pytest.importorskip("lightning")
    from . import frameworks  # noqa: F401

    machine, batch = Sessions(), {"values": 0, "widths": (1.0, 1.0), "kind": "plain", "elsewhere": "plain"}
    machine.begin(Config(level="O3", dtype="bfloat16", library="fused", rule="AdamW", style="Lightning"), 0)
    machine.train(batches=[batch])
    machine.close(level="O0", same=False)
    machine.train(batches=[batch])
    machine.agrees()
