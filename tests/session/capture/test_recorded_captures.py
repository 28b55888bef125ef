"""A recorder around a captured step: the same evidence as of the same steps without a graph."""

import pytest

from mezzo import StateError
from mezzo.numerics import KINDS, Recorder

from ...support.refusals import bits
from .loops import OPTIMIZERS, Loop, batch, batches

STEPS = 10


def recorded(loop, call, every=3, **options):
    with Recorder(loop.model, loop.optimizer, every=every, **options) as recorder:
        for data in batches(range(STEPS), bad=(6,)):
            call(*data)
    return recorder.evidence


def numbers(evidence, tensor_kind, step):
    return {
        tensor.path: (tensor.dtype, tensor.histogram.numbers) for tensor in evidence.tensors(tensor_kind, step=step)
    }


@pytest.mark.parametrize("policy", ["O2,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("make", ["adamw", "torch"])
def test_replays_are_recorded_as_the_same_steps_without_a_graph(policy, make):
    plain, loop = (Loop(policy, OPTIMIZERS[make]) for _ in range(2))
    captured = loop.captured()
    expected, evidence = recorded(plain, plain.train_step), recorded(loop, captured)
    assert loop.graph.replays == STEPS - 3
    assert bits(loop.state()) == bits(plain.state())  # recording changes nothing
    assert [(s.step, s.skipped, s.loss_scales) for s in evidence.steps] == [
        (s.step, s.skipped, s.loss_scales) for s in expected.steps
    ]
    assert [step.step for step in evidence.steps] == [1, 4, 7, 10]
    for tensor_kind in KINDS:
        for step in (1, 4, 7, 10):
            if (tensor_kind, step) != ("updates", 7):  # which is skipped
                assert numbers(evidence, tensor_kind, step) == numbers(expected, tensor_kind, step), (tensor_kind, step)
    assert evidence.swallowed(step=10).swallowed == expected.swallowed(step=10).swallowed


def test_a_step_that_is_not_recorded_counts_nothing_and_late_recorders_are_refused():
    loop = Loop()
    captured = loop.captured()
    for number in range(4):
        captured(*batch(number))
    with Recorder(loop.model, loop.optimizer), pytest.raises(StateError, match="after the graph was captured") as late:
        captured(*batch(4))
    assert "around all calls" in str(late.value)
    captured(*batch(4))  # without it all is as before
    assert loop.amp.stats().steps == 5


def test_weights_alone():
    plain, loop = Loop(), Loop()
    expected = recorded(plain, plain.train_step, kinds=("weights", "weight gradients"))
    evidence = recorded(loop, loop.captured(), kinds=("weights", "weight gradients"))
    for tensor_kind in ("weights", "weight_gradients"):
        assert numbers(evidence, tensor_kind, 10) == numbers(expected, tensor_kind, 10)
