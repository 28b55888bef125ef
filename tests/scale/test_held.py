"""A loss scale that moves when it is told to: as torch's own rules, once for all that was found since."""

import itertools

import pytest
import torch

from mezzo.scale import LossScale
from mezzo.scale.held import HeldScaler

RULES = {
    "torch": LossScale.like("torch", init=8.0, interval=2),
    "paddle": LossScale.like("paddle", init=8.0, interval=2, hysteresis=2),
    "constant": LossScale.constant(8.0),
    "none": LossScale.none(),
}
YES, NO = torch.tensor(True), torch.tensor(False)


def moved(scaler, steps):
    """States after each move; a step is the flags that optimizers found."""
    found = []
    for flags in steps:
        for flag in flags:
            before = scaler.state
            scaler.update(flag)
            assert scaler.state is before
        scaler.advance()
        found.append(scaler.state_dict())
    return found


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("on_device", [False, True])
def test_several_steps_between_two_moves_are_one(rules, on_device):
    """On a device that is not the host all is computed in tensors: here with those of a graph."""
    flags = [(NO,), (NO, YES), (YES, YES), (NO, NO), (), (NO,), (YES, NO, NO), (NO,), (NO,), (NO,)]
    scaler, plain = HeldScaler(RULES[rules], "cpu"), HeldScaler(RULES[rules], "cpu")
    scaler.in_graph = on_device
    found = moved(scaler, flags)
    once = moved(plain, [(torch.stack(each).any(),) if each else () for each in flags])
    assert found == once


def test_what_is_held_does_not_count_and_what_nothing_stepped_with_does():
    scaler = HeldScaler(RULES["torch"], "cpu")
    scaler.update(YES, hold=YES)
    scaler.advance()
    assert (scaler.state.scale, scaler.state.clean_steps) == (8.0, 0)
    scaler.update(NO, hold=YES)
    scaler.update(NO, hold=NO)
    scaler.advance()
    assert (scaler.state.scale, scaler.state.clean_steps) == (8.0, 1)
    scaler.update(NO)
    scaler.advance([YES])
    assert (scaler.state.scale, scaler.state.clean_steps) == (4.0, 0)
    scaler.advance([YES])
    assert scaler.state.scale == 2.0
    scaler.advance()
    assert scaler.state.scale == 2.0


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0), torch.tensor([3.0], dtype=torch.float64)])
def test_another_scale_forgets_what_was_found_and_keeps_the_count(scale):
    scaler = HeldScaler(RULES["torch"], "cpu")
    moved(scaler, [(NO,)])
    scaler.update(YES)
    scaler.set(scale)
    assert (scaler.state.scale, scaler.state.scale.dtype, scaler.state.clean_steps) == (3.0, torch.float32, 1)
    scaler.advance()
    assert scaler.state.scale == 3.0
    if isinstance(scale, torch.Tensor):
        scale.zero_()
        assert scaler.state.scale == 3.0


def test_an_interrupted_end_of_a_step_begins_again():
    scaler = HeldScaler(RULES["torch"], "cpu")
    scaler.update(NO)
    restore = scaler.remembering()
    for _ in range(3):
        restore()
        scaler.update(YES)
    scaler.advance()
    restore()
    scaler.advance()
    assert (scaler.state.scale, scaler.state.clean_steps) == (8.0, 1)


def test_states_go_on():
    first, second = HeldScaler(RULES["torch"], "cpu"), HeldScaler(RULES["torch"], "cpu")
    patterns = [[(YES if bad else NO,)] for bad in (0, 1, 0, 0, 0, 1)]
    for pattern in patterns:
        moved(first, pattern)
        second.update(YES)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
    for pattern in itertools.chain(patterns, patterns):
        assert moved(first, pattern) == moved(second, pattern)
    second.place(torch.device("meta"))
    assert second.state.scale.device.type == "meta"
