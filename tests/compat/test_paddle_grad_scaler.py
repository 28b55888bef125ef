"""``paddle.GradScaler``: Paddle's rule, parameters and state, step by step, and what is refused."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mezzo import PolicyError, StateError
from mezzo.compat import paddle


class Reference:
    """``AmpScaler._update`` of python/paddle/amp/grad_scaler.py."""

    def __init__(self, scale, incr_ratio, decr_ratio, incr_every, decr_every):
        self.scale, self.good, self.bad = scale, 0, 0
        self.rule = incr_ratio, decr_ratio, incr_every, decr_every

    def update(self, found_inf):
        incr_ratio, decr_ratio, incr_every, decr_every = self.rule
        if found_inf:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == decr_every:
                self.scale, self.bad = self.scale * decr_ratio, 0
        else:
            self.bad, self.good = 0, self.good + 1
            if self.good == incr_every:
                self.scale, self.good = self.scale * incr_ratio, 0

    def state(self):
        return self.scale, self.good, self.bad


def counted(scaler):
    state = scaler.state_dict()
    return float(state["scale"][0]), state["incr_count"], state["decr_count"]


def net(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, overflows=False):
    return model(torch.ones(2, 3)).square().mean() * (torch.inf if overflows else 1.0)


def step(scaler, model, optimizer, overflows=False, minimizes=True):
    scaled = scaler.scale(loss_of(model, overflows))
    scaled.backward()
    if minimizes:
        assert scaler.minimize(optimizer, scaled) == (None, None)
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


# The scale -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minimizes", [True, False])
@pytest.mark.parametrize("decr_every", [1, 2, 3])
@pytest.mark.parametrize(
    "pattern", ["..X..X..X..X..X", "XXX.........", "X.X.X.......", "............", "XX.XXXX.XX.X...."]
)
def test_the_scale_and_its_counts_are_paddles_after_each_step(pattern, decr_every, minimizes):
    rule = {"incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 4, "decr_every_n_nan_or_inf": decr_every}
    scaler, reference = paddle.GradScaler(init_loss_scaling=1024.0, **rule), Reference(1024.0, *rule.values())
    model, optimizer = net()
    for each in pattern:
        before = model.weight.detach().clone()
        step(scaler, model, optimizer, each == "X", minimizes)
        reference.update(each == "X")
        assert counted(scaler) == reference.state()
        assert torch.equal(before, model.weight) == (each == "X") == bool(scaler.last_step.skipped)


def test_other_factors():
    scaler, reference = paddle.GradScaler(True, 1000.0, 3.0, 0.8, 2, 2), Reference(1000.0, 3.0, 0.8, 2, 2)
    model, optimizer = net()
    for each in "..XX.X.XX....":
        step(scaler, model, optimizer, each == "X")
        reference.update(each == "X")
        assert counted(scaler) == pytest.approx(reference.state())


def test_a_constant_scale_stays_skips_and_needs_no_update():
    scaler = paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    assert not scaler.is_use_dynamic_loss_scaling()
    model, optimizer = net()
    for overflows, updates in itertools.product([False, True, False], [False, True]):
        before = model.weight.detach().clone()
        scaler.scale(loss_of(model, overflows)).backward()
        scaler.step(optimizer)
        if updates:
            scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == overflows
    assert counted(scaler) == (8.0, 0, 0)
    assert not scaler.state_dict()["use_dynamic_loss_scaling"]


def test_a_step_that_raises_under_a_constant_scale_ends_with_the_update():
    scaler = paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    model, optimizer = net()

    def refuse(*_):
        raise ValueError("of the user's")

    handle = optimizer.register_step_pre_hook(refuse)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(ValueError, match="of the user's"):
        scaler.step(optimizer)
    handle.remove()
    scaler.update()
    optimizer.zero_grad()
    step(scaler, model, optimizer, minimizes=False)
    assert not scaler.last_step.skipped


def test_several_optimizers_are_one_step_between_updates():
    """Paddle's update knows what the last of them found, and no other."""
    scaler = paddle.GradScaler(init_loss_scaling=8.0)
    (one, first), (two, second) = net(1), net(2)
    before = one.weight.detach().clone(), two.weight.detach().clone()
    scaler.scale(loss_of(one, True) + 0).backward()
    scaler.scale(loss_of(two)).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert counted(scaler) == (4.0, 0, 0)
    assert torch.equal(before[0], one.weight)
    assert not torch.equal(before[1], two.weight)


def test_accumulation_and_clipping():
    model, optimizer = net()
    plain, other = net()
    scaler = paddle.GradScaler(init_loss_scaling=2.0**10)
    for _ in range(3):
        for _ in range(2):
            scaler.scale(loss_of(model) / 2).backward()
            (loss_of(plain) / 2).backward()
        scaler.unscale_(optimizer)
        assert torch.equal(model.weight.grad, plain.weight.grad)
        for each in (model, plain):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        other.step()
        for each in (optimizer, other):
            each.zero_grad()
    assert torch.equal(model.weight, plain.weight)


def test_a_loss_in_sixteen_bits_is_scaled_in_fp32():
    for dtype in (torch.float16, torch.bfloat16):
        scaled = paddle.GradScaler().scale(torch.ones(1, dtype=dtype, requires_grad=True) * 3)
        assert (scaled.item(), scaled.dtype) == (3 * 65536.0, torch.float32)


# Off -----------------------------------------------------------------------------------------------------


def test_a_disabled_scaler_scales_nothing():
    scaler = paddle.GradScaler(enable=False)
    model, optimizer = net()
    loss = loss_of(model)
    assert scaler.scale(loss) is loss
    loss.backward()
    before = model.weight.detach().clone()
    scaler.minimize(optimizer, loss)
    scaler.unscale_(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)
    assert not scaler.is_enable()
    assert not scaler.is_use_dynamic_loss_scaling()
    assert scaler.get_init_loss_scaling() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict(paddle.GradScaler().state_dict())
    assert scaler.state_dict() == {}


def test_after_a_region_in_bfloat16_it_disables_itself(emulating):
    """``test_amp_api.py``, TestGradScaler."""
    scaler, constant = paddle.GradScaler(), paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    model, optimizer = net()
    with paddle.auto_cast(custom_black_list=["matmul"], dtype="bfloat16"):
        loss = loss_of(model)
    with pytest.warns(UserWarning, match=r"GradScaler is disabled: torch\.bfloat16 needs no loss scale"):
        scaled = scaler.scale(loss)
    assert scaled is loss
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    assert not scaler.is_enable()
    assert not scaler.is_use_dynamic_loss_scaling()
    assert constant.scale(loss.detach()) == loss * 8
    with paddle.auto_cast():
        loss = loss_of(model)
    assert paddle.GradScaler().scale(loss.detach()) == loss * 65536


# Parameters ----------------------------------------------------------------------------------------------


def test_the_defaults_are_paddles():
    scaler = paddle.GradScaler()
    state = scaler.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=True) == state
    assert state == {
        "scale": [65536.0], "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1, "incr_count": 0, "decr_count": 0, "use_dynamic_loss_scaling": True,
    }  # fmt: skip
    assert scaler.is_enable()
    assert scaler.is_use_dynamic_loss_scaling()


@pytest.mark.parametrize(
    "name, value, other",
    [
        ("init_loss_scaling", 1024, 1000),
        ("incr_ratio", 2.0, 3.0),
        ("decr_ratio", 0.5, 0.1),
        ("incr_every_n_steps", 1000, 2000),
        ("decr_every_n_nan_or_inf", 2, 3),
    ],
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_each_parameter_is_got_and_set(name, value, other, dynamic):
    scaler = paddle.GradScaler(**{name: value}, use_dynamic_loss_scaling=dynamic)
    assert getattr(scaler, f"get_{name}")() == value
    getattr(scaler, f"set_{name}")(other)
    assert getattr(scaler, f"get_{name}")() == other
    state = scaler.state_dict()
    assert (state["scale"][0] if name == "init_loss_scaling" else state[name]) == other
    with pytest.raises(PolicyError, match=name):
        getattr(scaler, f"set_{name}")(-1)
    assert getattr(scaler, f"get_{name}")() == other


def test_what_is_set_counts_from_there_on():
    scaler, reference = paddle.GradScaler(init_loss_scaling=64.0), Reference(64.0, 2.0, 0.5, 2000, 1)
    model, optimizer = net()
    for each, call, rule in (
        (".", None, None),
        ("X", lambda: scaler.set_decr_every_n_nan_or_inf(2), (2.0, 0.5, 2000, 2)),
        ("X", lambda: scaler.set_decr_ratio(0.25), (2.0, 0.25, 2000, 2)),
        (".", lambda: scaler.set_incr_every_n_steps(2), (2.0, 0.25, 2, 2)),
        (".", lambda: scaler.set_incr_ratio(4.0), (4.0, 0.25, 2, 2)),
        (".", None, None),
    ):
        if call is not None:
            call()
            reference.rule = rule
        step(scaler, model, optimizer, each == "X")
        reference.update(each == "X")
        assert counted(scaler) == reference.state()
    scaler.set_init_loss_scaling(32.0)
    assert counted(scaler) == (32.0, *reference.state()[1:])


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("place", ["scaled", "unscaled", "stepped"])
@pytest.mark.parametrize("rule", ["incr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf"])
def test_what_is_set_inside_an_iteration_forgets_nothing_of_it(rule, place, overflows):
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.125), paddle.GradScaler(init_loss_scaling=1024.0)
    scaler.scale(weight.sum() * (torch.inf if overflows else 1.0)).backward()
    for call in ("scaled", "unscaled", "stepped"):
        if call == "unscaled":
            scaler.unscale_(optimizer)
        elif call == "stepped":
            scaler.step(optimizer)
        if call == place:
            getattr(scaler, f"set_{rule}")(1 if rule == "decr_every_n_nan_or_inf" else 3)
    with pytest.raises(StateError, match="already"):
        scaler.step(optimizer)
    scaler.update()
    assert weight.item() == (1.0 if overflows else 0.875)
    assert counted(scaler)[0] == (512.0 if overflows else 1024.0)


# State ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [np.asarray, torch.tensor, list])
def test_a_state_of_paddles_loads(wrap):
    state = {
        "scale": wrap([4096.0]), "incr_ratio": 3.0, "decr_ratio": 0.25, "incr_every_n_steps": 5,
        "decr_every_n_nan_or_inf": 3, "incr_count": 0, "decr_count": 2, "use_dynamic_loss_scaling": True,
    }  # fmt: skip
    scaler = paddle.GradScaler()
    scaler.load_state_dict(state)
    assert counted(scaler) == (4096.0, 0, 2)
    assert scaler.get_init_loss_scaling() == 4096.0
    assert scaler.state_dict() | {"scale": 0} == state | {"scale": 0}
    model, optimizer = net()
    step(scaler, model, optimizer, overflows=True)
    assert counted(scaler) == (1024.0, 0, 0)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_loaded_scaler_goes_on_as_the_one_that_was_saved(at):
    pattern, rule = "..XX.XXX...XX.....", {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
    scaler = paddle.GradScaler(init_loss_scaling=256.0, **rule)
    model, optimizer = net()
    for each in pattern[:at]:
        step(scaler, model, optimizer, each == "X")
    other = paddle.GradScaler()
    other.load_state_dict(scaler.state_dict())
    for each in pattern[at:]:
        for one in (scaler, other):
            step(one, model, optimizer, each == "X")
        assert counted(scaler) == counted(other)
    constant = paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    other.load_state_dict(constant.state_dict())
    assert not other.is_use_dynamic_loss_scaling()
    step(other, model, optimizer, overflows=True)
    assert counted(other) == (8.0, 0, 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_by_themselves(copied):
    scaler = paddle.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3)
    model, optimizer = net()
    step(scaler, model, optimizer)
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    step(other, model, optimizer, overflows=True)
    assert (counted(other), counted(scaler)) == ((32.0, 0, 0), (64.0, 1, 0))
    assert not copied(paddle.GradScaler(enable=False)).is_enable()
