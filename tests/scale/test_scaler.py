"""What counts for a loss scale, and how often: gradients of the same, the last and older scales, on host and device."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.scale import LossScale, scaler
from mezzo.scale.scaler import Scaler

YES, NO = torch.tensor(True), torch.tensor(False)
RULES = [
    LossScale.dynamic(init=16, interval=2, floor=2.0, ceiling=64.0, patience=2),
    LossScale.dynamic(init=16, interval=3, hysteresis=2, refill="clean", floor=2.0),
    LossScale.dynamic(init=4, interval=2, growth_offset=2, skip_rate_limit=0.5, hysteresis=2),
    LossScale.constant(8.0, patience=3),
    LossScale.none(),
]


def values(state):
    return {field.name: getattr(state, field.name).tolist() for field in dataclasses.fields(state)}


class OnDevice(Scaler):
    """As on an accelerator: nothing is read on the host."""

    def update(self, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scaler, "_on_host", lambda tensor: tensor)
            super().update(*args, **kwargs)


@pytest.mark.parametrize("kind", [Scaler, OnDevice])
@pytest.mark.parametrize("found", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("rules", RULES)
def test_gradients_of_one_scale_count_once_in_any_order(rules, found, kind):
    """Three parts are what one step would be that found all of it; the step after, too."""
    parts, whole = kind(rules, "cpu"), kind(rules, "cpu")
    for later in (False, True, False):
        made_with = parts.state.scale
        for each in found:
            parts.update(torch.tensor(each ^ later), made_with=made_with, hold=NO)
        whole.update(torch.tensor(any(each ^ later for each in found)))
        assert values(parts.state) == values(whole.state)


@pytest.mark.parametrize("kind", [Scaler, OnDevice])
def test_what_is_held_back_is_made_good_by_nothing_but_an_overflow(kind):
    """Parts with a loss that is not finite: with a clean one the state stays, with an overflow that counts."""
    for other, scale, clean in ((NO, 16.0, 0), (YES, 8.0, 0)):
        for order in (0, 1):
            one = kind(LossScale.dynamic(init=16, interval=5), "cpu")
            made_with = one.state.scale
            for found, hold in ((YES, YES), (other, NO))[:: 1 - 2 * order]:
                one.update(found, made_with=made_with, hold=hold)
            assert one.state.scale.item() == scale
            assert one.state.clean_steps.item() == clean


@pytest.mark.parametrize("kind", [Scaler, OnDevice])
def test_gradients_of_an_older_scale_count_only_where_it_has_not_fallen_below(kind):
    rules = LossScale.dynamic(init=16, interval=2)
    for moves, found, scale in (
        ((YES, YES), YES, 4.0),  # has fallen since
        ((YES, YES), NO, 4.0),
        ((NO, NO, NO, NO), YES, 32.0),  # grew to 64, although 16 was too large
        ((NO, NO, NO, NO), NO, 64.0),
        ((YES, NO, NO), YES, 8.0),  # back at 16
    ):
        one = kind(rules, "cpu")
        older = one.state.scale
        for move in moves:
            one.update(move)
        before = values(one.state)
        one.update(found, made_with=older)
        assert one.state.scale.item() == scale
        assert found or values(one.state) == before


@given(st.sampled_from(RULES), st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=25))
def test_host_and_device_agree(rules, pattern):
    """Each update is of gradients made up to three updates ago; some are held back."""
    host, device = Scaler(rules, "cpu"), OnDevice(rules, "cpu")
    known = [(host.state.scale, device.state.scale)]
    for found, hold, age in pattern:
        here, there = known[max(-1 - age, -len(known))]
        for one, made_with in ((host, here), (device, there)):
            one.update(torch.tensor(found), made_with=made_with, hold=torch.tensor(hold))
        assert values(host.state) == values(device.state)
        known.append((host.state.scale, device.state.scale))


@pytest.mark.parametrize("kind", [Scaler, OnDevice])
@pytest.mark.parametrize("rules", [rules for rules in RULES if rules.mode != "none"])
def test_an_update_writes_to_nothing_and_makes_a_scale_of_its_own(rules, kind):
    one = kind(rules, "cpu")
    for found, hold in itertools.product((YES, NO), repeat=2):
        before, kept = one.state, values(one.state)
        one.update(found, made_with=before.scale, hold=hold)
        assert values(before) == kept
        assert one.state.scale is not before.scale
        assert (YES.item(), NO.item()) == (True, False)


def test_loading_forgets_what_came_before():
    """Gradients of a scale from before are those of an older one, however the loaded one was reached."""
    one, other = Scaler(LossScale.dynamic(init=16), "cpu"), Scaler(LossScale.dynamic(init=64), "cpu")
    made_with = one.state.scale
    one.update(YES, made_with=made_with)
    one.load_state_dict(other.state_dict())
    one.update(YES, made_with=made_with)
    assert one.state.scale.item() == 32.0


@pytest.mark.parametrize(
    "rules, changes, apart",
    [
        ("none", False, False),
        ("constant(1)", False, False),
        ("constant(1,patience=2)", False, False),
        ("constant(8)", True, False),
        ("constant(8,patience=2)", True, True),
        ("dynamic", True, True),
    ],
)
def test_what_gradients_notice_of_a_scale(rules, changes, apart):
    one = Scaler(LossScale.parse(rules), "cpu")
    assert (one.changes_gradients, one.keeps_apart) == (changes, apart)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_scaled_loss_is_fp32_at_least(dtype):
    """60000 in FP16 has no room for a factor."""
    loss = torch.tensor(60000.0, dtype=dtype)
    for rules in ("constant(65536)", "dynamic"):
        scaled = Scaler(LossScale.parse(rules), "cpu").scaled(loss)
        assert scaled.dtype == torch.promote_types(dtype, torch.float32)
        assert scaled.item() == loss.item() * 65536
    assert Scaler(LossScale.none(), "cpu").scaled(loss) is loss


@pytest.mark.parametrize("rules", ["dynamic(interval=3)", "dynamic(interval=3,skip_rate_limit=0.4)", "constant(8)"])
def test_in_a_graphs_tensors_it_follows_the_same_rules(rules):
    """Each state is written back into the tensors that it was computed from, as a replayed graph does."""
    config = LossScale.parse(rules)
    plain, held = Scaler(config, "cpu"), Scaler(config, "cpu")
    tensors = held.tensors()
    held.enter(tensors)
    addresses = [getattr(tensors, field.name).data_ptr() for field in dataclasses.fields(tensors)]
    for number, overflow in enumerate((False, True, True, False, False, False, True, False, False, False)):
        for one in (plain, held):
            one.update(torch.tensor(overflow))
        if number == 6:  # a step outside the graph, and back
            held.leave()
            assert not held.in_graph
        held.enter(tensors)
        assert held.state is tensors
        assert held.state_dict() == plain.state_dict()
    assert [getattr(tensors, field.name).data_ptr() for field in dataclasses.fields(tensors)] == addresses


def test_what_leaves_a_graph_is_not_overwritten_there():
    one = Scaler(LossScale.dynamic(init=8.0, interval=1), "cpu")
    tensors = one.tensors()
    one.enter(tensors)
    one.leave()
    tensors.scale.fill_(2.0)
    assert one.state.scale.item() == 8.0
    assert one.state is not tensors


def test_a_loaded_window_of_another_length_fits_the_graphs():
    one = Scaler(LossScale.dynamic(interval=4, skip_rate_limit=0.5), "cpu")
    tensors = one.tensors()
    one.load_state_dict({**one.state_dict(), "window": ".XX"})
    one.enter(tensors)
    assert one.state_dict()["window"] == "..XX"
