"""``paddle.GradScaler``: Paddle's rule, parameters and state, step by step."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch

from mezzo import PolicyError, StateError
from mezzo.compat import paddle

from .programs import loss_of, network, update_of_paddle

#: A rule by Paddle's names, as the scaler takes it and as the reference does.
RULE = ("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")
REFERENCE = ("growth", "backoff", "grows_after", "backs_off_after")


class Loop:
    """A scaler in a loop, and what Paddle's own has come to by then."""

    def __init__(self, scale, *rule, **options):
        self.scaler = paddle.GradScaler(init_loss_scaling=scale, **dict(zip(RULE, rule, strict=False)), **options)
        self.rule, self.state = dict(zip(REFERENCE, rule, strict=False)), (scale, 0, 0)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, overflows=False, minimizes=True):
        before = self.model[0].weight.detach().clone()
        scaled = self.scaler.scale(loss_of(self.model, 0, overflows))
        scaled.backward()
        if minimizes:
            assert self.scaler.minimize(self.optimizer, scaled) == (None, None)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.state = update_of_paddle(self.state, overflows, **self.rule)
        assert counted(self.scaler) == pytest.approx(self.state)
        assert torch.equal(before, self.model[0].weight) == overflows == bool(self.scaler.last_step.skipped)


def counted(scaler):
    state = scaler.state_dict()
    return float(state["scale"][0]), state["incr_count"], state["decr_count"]


# The scale -----------------------------------------------------------------------------------------------


def test_the_scale_and_its_counts_are_paddles_after_each_step():
    patterns = ("..X..XX.X", "X.X.XXX.XX.X....")
    rules = [(1024.0, 2.0, 0.5, 4, decr_every) for decr_every in (1, 2, 3)] + [(1000.0, 3.0, 0.8, 2, 2)]
    for number, (pattern, rule) in enumerate(itertools.product(patterns, rules)):
        loop = Loop(*rule)
        for mark in pattern:
            loop.step(mark == "X", minimizes=bool(number % 2))


def test_a_constant_scale_stays_skips_and_needs_no_update():
    scaler = paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    assert not scaler.is_use_dynamic_loss_scaling()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for overflows, updates in itertools.product([False, True, False], [False, True]):
        before = model[0].weight.detach().clone()
        scaler.scale(loss_of(model, 0, overflows)).backward()
        scaler.step(optimizer)
        if updates:
            scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model[0].weight) == overflows
    assert counted(scaler) == (8.0, 0, 0)
    assert not scaler.state_dict()["use_dynamic_loss_scaling"]


def test_several_optimizers_are_one_step_between_updates():
    """Paddle's update knows what the last of them found, and no other."""
    scaler, models = paddle.GradScaler(init_loss_scaling=8.0), [network(1), network(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    before = [model[0].weight.detach().clone() for model in models]
    for model, overflows in zip(models, (True, False), strict=True):
        scaler.scale(loss_of(model, 0, overflows)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert counted(scaler) == (4.0, 0, 0)
    assert [torch.equal(old, model[0].weight) for old, model in zip(before, models, strict=True)] == [True, False]


def test_a_loss_in_sixteen_bits_is_scaled_in_fp32():
    for dtype in (torch.float16, torch.bfloat16):
        scaled = paddle.GradScaler().scale(torch.ones(1, dtype=dtype, requires_grad=True) * 3)
        assert (scaled.item(), scaled.dtype) == (3 * 65536.0, torch.float32)


# Off -----------------------------------------------------------------------------------------------------


def test_a_disabled_scaler_scales_nothing():
    scaler, model = paddle.GradScaler(enable=False), network()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), loss_of(model, 0)
    assert scaler.scale(loss) is loss
    loss.backward()
    before = model[0].weight.detach().clone()
    scaler.minimize(optimizer, loss)
    scaler.unscale_(optimizer)
    scaler.update()
    assert not torch.equal(before, model[0].weight)
    assert not scaler.is_enable()
    assert not scaler.is_use_dynamic_loss_scaling()
    assert scaler.get_init_loss_scaling() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict(paddle.GradScaler().state_dict())
    assert scaler.state_dict() == {}


def test_after_a_region_in_bfloat16_it_disables_itself(emulating):
    """``test_amp_api.py``, TestGradScaler."""
    scaler, constant = paddle.GradScaler(), paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    model = network()
    with paddle.auto_cast(custom_black_list=["matmul"], dtype="bfloat16"):
        loss = loss_of(model, 0)
    with paddle.auto_cast(enable=False):
        pass  # which is a region in no dtype
    with pytest.warns(UserWarning, match=r"GradScaler is disabled: torch\.bfloat16 needs no loss scale"):
        scaled = scaler.scale(loss)
    assert scaled is loss
    scaled.backward()
    scaler.minimize(torch.optim.SGD(model.parameters(), lr=0.1), scaled)
    assert not scaler.is_enable()
    assert not scaler.is_use_dynamic_loss_scaling()
    assert constant.scale(loss.detach()) == loss * 8
    with paddle.auto_cast():
        loss = loss_of(model, 0)
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


def test_each_parameter_is_got_and_set():
    values = {
        "init_loss_scaling": (1024, 1000), "incr_ratio": (2.0, 3.0), "decr_ratio": (0.5, 0.1),
        "incr_every_n_steps": (1000, 2000), "decr_every_n_nan_or_inf": (2, 3),
    }  # fmt: skip
    for (name, (value, other)), dynamic in itertools.product(values.items(), (True, False)):
        scaler = paddle.GradScaler(**{name: value}, use_dynamic_loss_scaling=dynamic)
        get, set_ = getattr(scaler, f"get_{name}"), getattr(scaler, f"set_{name}")
        assert get() == value
        set_(other)
        assert get() == other
        state = scaler.state_dict()
        assert (state["scale"][0] if name == "init_loss_scaling" else state[name]) == other
        with pytest.raises(PolicyError, match=name):
            set_(-1)
        assert get() == other


def test_what_is_set_counts_from_there_on():
    loop = Loop(64.0)
    loop.step()
    for overflows, name, theirs, value in (
        (True, "decr_every_n_nan_or_inf", "backs_off_after", 2),
        (True, "decr_ratio", "backoff", 0.25),
        (False, "incr_every_n_steps", "grows_after", 2),
        (False, "incr_ratio", "growth", 4.0),
        (False, "incr_ratio", "growth", 4.0),
    ):
        getattr(loop.scaler, f"set_{name}")(value)
        loop.rule[theirs] = value
        loop.step(overflows)
    loop.scaler.set_init_loss_scaling(32.0)
    assert counted(loop.scaler) == (32.0, *loop.state[1:])


def test_what_is_set_inside_an_iteration_forgets_nothing_of_it():
    places, rules = ("scaled", "unscaled", "stepped"), ("incr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")
    for (moment, rule), overflows in itertools.product(zip(places, rules, strict=True), (False, True)):
        weight = torch.ones(1, requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight], lr=0.125), paddle.GradScaler(init_loss_scaling=1024.0)
        scaler.scale(weight.sum() * (torch.inf if overflows else 1.0)).backward()
        for call in places:
            if call == "unscaled":
                scaler.unscale_(optimizer)
            elif call == "stepped":
                scaler.step(optimizer)
            if call == moment:
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
    loop = Loop(65536.0)
    loop.scaler.load_state_dict(state)
    assert counted(loop.scaler) == (4096.0, 0, 2)
    assert loop.scaler.get_init_loss_scaling() == 4096.0
    assert loop.scaler.state_dict() | {"scale": 0} == state | {"scale": 0}
    loop.state, loop.rule = (4096.0, 0, 2), dict(zip(REFERENCE, (3.0, 0.25, 5, 3), strict=True))
    for overflows in (True, False, False, False, False, False):
        loop.step(overflows)
    assert loop.state == (3072.0, 0, 0)
    constant = paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    loop.scaler.load_state_dict(constant.state_dict())
    assert not loop.scaler.is_use_dynamic_loss_scaling()
    assert counted(loop.scaler) == (8.0, 0, 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_by_themselves(copied):
    loop = Loop(64.0, 2.0, 0.5, 3)
    loop.step()
    first, loop.scaler = loop.scaler, copied(loop.scaler)
    assert loop.scaler.state_dict() == first.state_dict()
    loop.step(overflows=True)
    assert (counted(loop.scaler), counted(first)) == ((32.0, 0, 0), (64.0, 1, 0))
    assert not copied(paddle.GradScaler(enable=False)).is_enable()
    constant = copied(paddle.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False))
    assert not constant.is_use_dynamic_loss_scaling()
