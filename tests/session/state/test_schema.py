"""Damaged states: everything wrong is listed, and nothing is changed."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo import MezzoError, MixedPrecision, StateError


def build(policy="O2,emulate=true"):
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.BatchNorm1d(2)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    amp = MixedPrecision(models, optimizer, policy, num_losses=2, restore_buffers=True)
    return models, amp


def in_a_window(models, amp):
    """Every part of a state is there: set aside, settled, left on the way."""
    for loss_id in (0, 1):
        with amp.autocast():
            loss = models[1](models[0](torch.arange(12.0).reshape(4, 3))).float().square().mean()
        amp.backward(loss, loss_id=loss_id)
    amp.grad(models[0](torch.ones(1, 3)).float().sum(), models[0].bias)
    return amp.state_dict()


#: What stands in the way of it, by the path of the value that is put there. ... removes it.
WRONG = [
    ("version", None, "version is None, not 2"),
    ("policy", "O7", "policy is 'O7', not a policy's text"),
    ("policy", 5, "policy is 5, not a policy's text"),
    ("parameters", [], "parameters is a list, not a mapping"),
    ("parameters/0.weight", "float33 [2, 3]", "parameters.0.weight is 'float33 [2, 3]', not a dtype and a shape"),
    ("parameters/0.weight", 3, "parameters.0.weight is 3, not a dtype and a shape"),
    ("loss_scales", ..., "loss_scales is missing"),
    ("loss_scales", {}, "loss_scales is a dict, not a list"),
    ("loss_scales/0/scale", "65536", "loss_scales[0].scale is '65536', not a positive float32 number"),
    ("loss_scales/1/scale", -1.0, "loss_scales[1].scale is -1.0, not a positive float32 number"),
    ("loss_scales/1/scale", 1e39, "loss_scales[1].scale is 1e+39, not a positive float32 number"),
    ("loss_scales/0/clean_steps", 1.5, "loss_scales[0].clean_steps is 1.5, not a whole number"),
    ("loss_scales/0/budget", True, "loss_scales[0].budget is True, not a whole number from 0"),
    ("loss_scales/0/floor_overflows", ..., "loss_scales[0].floor_overflows is missing"),
    ("loss_scales/0/window", "x", "loss_scales[0].window is 'x', not text of '.' and 'X'"),
    ("stats/steps", ..., "stats.steps is missing"),
    ("stats/skipped", -1, "stats.skipped is -1, not a whole number from 0"),
    ("stats/recent", [], "stats.recent is a list, not text of '.' and 'X'"),
    ("stats/forward_failures", ..., "stats.forward_failures is missing"),
    ("stats/scales/0/lowest", ..., "stats.scales[0].lowest is missing"),
    ("stats/scales/0", ..., "stats.scales are 1, and loss_scales 2"),
    ("masters/0.weight", 1.0, "masters.0.weight is 1.0, not a float32 tensor"),
    ("masters/0.weight", torch.ones(2, 3).half(), "masters.0.weight is a tensor, float16 [2, 3], not a float32 tensor"),
    ("masters/0.weight", torch.ones(3, 2), "masters.0.weight is float32 [3, 2], and the parameter float16 [2, 3]"),
    ("masters/0.weight", torch.ones(2, 3, device="meta"), "masters.0.weight is a tensor, float32 [2, 3] on meta"),
    ("masters/0.weight", torch.ones(2, 3).to_sparse(), "masters.0.weight is a sparse_coo tensor, float32 [2, 3]"),
    ("masters/strange", torch.ones(1), "masters: strange is no parameter"),
    ("windows/0", 3, "windows[0] is 3, not a mapping"),
    ("windows/0/micro_batches", -2, "windows[0].micro_batches is -2, not a whole number from 0"),
    ("windows/0/carried", 4.0, "windows[0].carried is 4.0, not a mapping"),
    ("windows/0/carried/scale", 9, "windows[0].carried.scale is 9, of 2"),
    ("windows/0/carried/is_one", 0, "windows[0].carried.is_one is 0, not True or False"),
    ("windows/0/carried/is_common", ..., "windows[0].carried.is_common is missing"),
    ("windows/0/carried/ranks", 0, "windows[0].carried.ranks is 0, not a whole number from 1"),
    ("windows/0/settled/0/loss_id", 2, "windows[0].settled.loss_id is 2, of 2"),
    ("windows/0/settled/0/found_inf", None, "windows[0].settled[0].found_inf is None, not True or False"),
    ("windows/0/aside/strange", torch.ones(1), "windows[0].aside: strange is no parameter"),
    ("windows/0/aside/0.weight", torch.ones(1), "windows[0].aside.0.weight is float32 [1], and the parameter float16"),
    ("windows/0/aside/0.weight", None, "windows[0].aside.0.weight is None, not a gradient"),
    ("windows/0/beside", ["strange"], "windows[0].beside: strange is no parameter"),
    ("windows/0/losses/0/loss_id", 5, "windows[0].losses.loss_id is 5, of 2"),
    ("windows/0/losses/0/value", "0", "windows[0].losses[0].value is '0', not a number"),
    ("carried_scales", [], "carried_scales are 0, and loss_scales 2"),
    ("carried_scales/0", 0, "carried_scales[0] is 0, not a positive float32 number"),
    ("on_the_way/0/loss_id", 2, "on_the_way.loss_id is 2, of 2"),
    ("on_the_way/0/found_inf", "no", "on_the_way[0].found_inf is 'no', not True or False"),
    ("gradients", None, "gradients is None, not a mapping"),
    ("gradients/0.bias", torch.ones(3).half(), "gradients.0.bias is float16 [3], and the parameter float16 [2]"),
    ("gradients/0.bias", torch.ones(2, device="meta").half(), "gradients.0.bias is a tensor, float16 [2] on meta"),
    ("master_gradients/0.bias", torch.ones(2, device="meta"), "master_gradients.0.bias is a tensor, float32 [2]"),
    ("master_gradients/0.bias", 0, "master_gradients.0.bias is 0, not a float32 gradient"),
    ("master_gradients/strange", torch.ones(1), "master_gradients: strange is no parameter"),
    ("left", ["strange"], "left: strange is no parameter"),
    ("left/0", 7, "left[0] is 7, not text"),
    ("buffers/1.running_mean", 0.0, "buffers.1.running_mean is 0.0, not a tensor"),
    ("buffers/1.running_mean", torch.ones(2, device="meta"), "buffers.1.running_mean is a tensor, float32 [2] on meta"),
]  # fmt: skip


def damaged(state, path, value):
    *way, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    for step in way:
        state = state[step]
    if value is ...:
        del state[last]
    elif isinstance(state, list) and last == len(state):
        state.append(value)
    else:
        state[last] = value


def test_a_wrong_value_is_named_and_nothing_is_loaded(bits):
    state = in_a_window(*build())
    models, amp = build()
    before = bits([amp.state_dict(), [m.state_dict() for m in models]])
    for path, value, says in WRONG:
        wrong = copy.deepcopy(state)
        damaged(wrong, path, value)
        with pytest.raises(StateError, match="this is not the state of a MixedPrecision session") as caught:
            amp.load_state_dict(wrong)
        assert says in str(caught.value)
        assert bits([amp.state_dict(), [m.state_dict() for m in models]]) == before, path
        assert all(p.grad is None for p in amp.master_params())
    amp.load_state_dict(copy.deepcopy(state))
    assert bits(amp.state_dict()) == bits(state)


def test_all_that_is_wrong_is_told_at_once():
    state = in_a_window(*build())
    chosen = [case for case in WRONG if case[0] in ("policy", "loss_scales/0/scale", "stats/steps", "left/0")]
    for path, value, _ in chosen:
        damaged(state, path, value)
    with pytest.raises(StateError) as caught:
        build()[1].load_state_dict(state)
    for _, _, says in chosen[1:]:
        assert says in str(caught.value)
    assert "amp.state_dict()" in str(caught.value)


@pytest.mark.parametrize(
    "value, says", [(7, "it is 7"), (None, "it is None"), ([], "it is a list"), ("O1", "it is 'O1'")]
)
def test_what_is_no_mapping_at_all(value, says):
    with pytest.raises(StateError, match=rf"not the state of a MixedPrecision session\n  where  {says}, not a mapping"):
        build()[1].load_state_dict(value)


@pytest.mark.parametrize("version", [1, 3, 99])
def test_other_versions_say_which(version):
    _, amp = build()
    with pytest.raises(StateError, match=rf"the state has version {version}\n  why    this mezzo reads version 2"):
        amp.load_state_dict(amp.state_dict() | {"version": version})


def test_gradients_and_buffers_that_do_not_fit_this_session(bits):
    """Values that a state may have, and that this model's tensors cannot take."""
    for path, value, says in (
        ("gradients/0.bias", torch.ones(2).double(), r"gradient of 0.bias: float64 \[2\] → float16 or float32"),
        ("buffers/1.running_mean", torch.ones(3), r"buffer 1.running_mean: float32 \[3\] → float32 \[2\]"),
        ("buffers/strange", torch.ones(3), r"buffer strange: float32 \[3\] → missing"),
    ):
        state = in_a_window(*build())
        damaged(state, path, value)
        _, amp = build()
        before = bits(amp.state_dict())
        with pytest.raises(StateError, match=rf"the state belongs to another session(.|\n)*{says}"):
            amp.load_state_dict(state)
        assert bits(amp.state_dict()) == before


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4),
        st.just(0).map(lambda _: 10**5000), st.sampled_from([10**400, 2**53, 2**63, 1j, ..., "x\x1b[31m", "\ud800"]),
        st.sampled_from([np.float32(2), np.int64(3), np.array([1, 2]), torch.ones(2), torch.ones(()).half()]),
        st.sampled_from([torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2).to(torch.complex64)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3),
        st.dictionaries(st.sampled_from(["version", "scale", "_growth_tracker", "loss_scaler0"]), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def session_and_state():
    models, amp = build()
    state = in_a_window(models, amp)
    amp.zero_grad()
    return amp, state, list(places(state))


@settings(max_examples=100, deadline=None)
@given(st.data(), ODD)
def test_whatever_stands_in_a_state_is_loaded_or_refused(session_and_state, data, odd):
    """In any place of a real state, and alone; an error fits a terminal, and leaves the session as it was."""
    amp, state, everywhere = session_and_state
    *path, last = data.draw(st.sampled_from(everywhere[1:]))
    damaged = place = copy.deepcopy(state)
    for key in path:
        place = place[key]
    place[last] = odd
    torch_scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    other = {**torch_scaler, "_growth_tracker": 0, data.draw(st.sampled_from(sorted(torch_scaler))): odd}
    for each in (damaged, odd, other):
        try:
            amp.load_state_dict(each)
        except MezzoError as error:
            text = str(error)
            assert len(text) < 30_000
            assert all(line.isprintable() for line in text.replace("\xa0", " ").split("\n"))
        amp.zero_grad()
    amp.load_state_dict(state)
    amp.zero_grad()
