"""The states of torch's and Paddle's GradScaler and of apex.amp: continued as their own libraries would, or refused."""

import copy
import logging
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from mezzo import LossScale, MixedPrecision, Policy, StateError

RULES = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
SAME = "dynamic(init=16,interval=3)"


def session(policy, *, num_losses=1):
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, MixedPrecision(model, optimizer, policy, num_losses=num_losses)


def with_scale(loss_scale):
    # In bfloat16 nothing overflows but what a test makes overflow.
    return f"O1,dtype=bfloat16,emulate=true,loss_scale={loss_scale}"


class Torch:
    """torch's own loop, whose gradients overflow when they are told to."""

    def __init__(self, **rules):
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", **rules)

    def steps(self, overflows):
        scales = []
        for overflow in overflows:
            self.optimizer.zero_grad()
            self.scaler.scale((self.weight * (float("inf") if overflow else 1.0)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales


def steps(model, amp, overflows):
    scales = []
    for overflow in overflows:
        with amp.autocast():
            loss = model(torch.ones(1, 2)).sum().float()
        amp.backward(loss)
        if overflow:
            model.weight.grad.fill_(float("inf"))
        scales.append(float(amp.step().next_scale))
        amp.zero_grad()
    return scales


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rules", [RULES, RULES | {"growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 2}])
def test_a_gradscaler_s_trace_is_continued_as_torch_does(rules, seed):
    chance = random.Random(seed)
    theirs = Torch(**rules)
    theirs.steps(chance.random() < 0.3 for _ in range(chance.randrange(8)))
    saved = theirs.scaler.state_dict()
    factors = {
        "growth": rules["growth_factor"],
        "backoff": rules["backoff_factor"],
        "interval": rules["growth_interval"],
    }
    model, amp = session(with_scale(LossScale.like("torch", **factors)))
    steps(model, amp, [True, False])
    amp.load_state_dict(saved)
    assert float(amp.loss_scale) == saved["scale"]
    overflows = [chance.random() < 0.3 for _ in range(20)]
    assert steps(model, amp, overflows) == theirs.steps(overflows)
    assert amp.stats().steps == 22


def test_other_rules_are_logged_and_the_session_s_own_count(caplog):
    for init, rules, config, lines in (
        (1024.0, {"growth_factor": 3.0}, SAME, ["growth 3.0 → 2.0"]),
        (1024.0, {"backoff_factor": 0.1}, SAME, ["backoff 0.1 → 0.5"]),
        (1024.0, {"growth_interval": 1234567}, SAME, ["interval 1234567 → 3"]),
        (1024.0, {"growth_factor": 1.0000001}, SAME, ["growth 1.0000001 → 2.0"]),
        (1024.0, {}, "dynamic(interval=3,hysteresis=2)", ["hysteresis 1 → 2"]),
        (1024.0, {}, "dynamic(interval=3,growth_offset=2)", ["growth_offset 0 → 2"]),
        (1024.0, {}, "dynamic(interval=3,skip_rate_limit=0.5)", ["skip_rate_limit None → 0.5"]),
        (2.0**25, {}, SAME, ["ceiling None → 16777216"]),
        (2.0**-3, {}, SAME, ["floor 1.17"]),
        (
            1024.0,
            {"growth_factor": 3.0, "backoff_factor": 0.1, "growth_interval": 7},
            "dynamic(floor=2**-9,patience=4,hysteresis=2)",
            ["growth 3.0 → 2.0", "backoff 0.1 → 0.5", "interval 7 → 2000", "hysteresis 1 → 2"],
        ),
    ):
        theirs = Torch(**RULES | rules | {"init_scale": init})
        theirs.steps([False])
        saved = theirs.scaler.state_dict()
        model, amp = session(with_scale(config))
        caplog.clear()
        with caplog.at_level(logging.INFO, "mezzo.session.state"):
            amp.load_state_dict(saved)
        (said,) = (r.getMessage() for r in caplog.records if "goes on by this session's rules" in r.getMessage())
        assert all(line in said for line in lines)
        assert amp.state_dict()["loss_scales"][0]["scale"] == saved["scale"]
        assert amp.state_dict()["loss_scales"][0]["clean_steps"] == saved["_growth_tracker"]
        same, reference = session(with_scale(config))
        state = reference.state_dict()
        state["loss_scales"][0] |= {"scale": saved["scale"], "clean_steps": saved["_growth_tracker"]}
        reference.load_state_dict(state)
        overflows = [False, False, True, False, False, False, True]
        assert steps(model, amp, overflows) == steps(same, reference, overflows)


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=true", with_scale("constant(128)")])
@pytest.mark.parametrize("state", [torch.amp.GradScaler("cpu").state_dict(), {"loss_scaler0": {}}])
def test_a_session_without_a_dynamic_scale_has_no_place_for_one(policy, state):
    _, amp = session(policy)
    config = re.escape(str(Policy.parse(policy).loss_scale))
    with pytest.raises(
        StateError, match=rf"has a dynamic loss scale, and this session none(.|\n)*is {config}(.|\n)*O1"
    ):
        amp.load_state_dict(state)


def test_the_empty_state_of_a_disabled_gradscaler():
    state = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    assert state == {}
    model, amp = session("O1,dtype=bfloat16,emulate=true")
    steps(model, amp, [False, True])
    amp.load_state_dict(state)
    assert (amp.stats().steps, amp.stats().scale) == (2, 1.0)
    for policy in (with_scale(SAME), with_scale("constant(128)")):
        _, amp = session(policy)
        with pytest.raises(StateError, match=r"empty mapping(.|\n)*disabled torch.amp.GradScaler(.|\n)*starts afresh"):
            amp.load_state_dict(state)


@pytest.mark.parametrize("change", ["scale", "_growth_tracker", "growth_factor", "backoff_factor", "growth_interval"])
def test_damaged_gradscaler_states(change):
    _, amp = session(with_scale(SAME))
    state = torch.amp.GradScaler("cpu", growth_interval=3).state_dict()
    before = str(amp.state_dict())
    for wrong in ("7", None, [1], float("nan"), torch.ones(2), np.ones(2)):
        with pytest.raises(StateError, match="GradScaler"):
            amp.load_state_dict(state | {change: wrong})
    del state[change]
    with pytest.raises(StateError, match=f"the state of torch.amp.GradScaler lacks {change}(.|\n)*it has "):
        amp.load_state_dict(state)
    assert str(amp.state_dict()) == before


# apex ---------------------------------------------------------------------------------------------------

#: What apex.amp.state_dict() returns, from apex/amp/frontend.py.
APEX = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 2}, "loss_scaler1": {"loss_scale": 64.0, "unskipped": 0}}


def test_apex_s_scales_go_on_counting():
    model, amp = session(with_scale(SAME))
    amp.load_state_dict({"loss_scaler0": APEX["loss_scaler0"]})
    # apex/amp/scaler.py, update_scale: 2 clean steps were counted, the third of 3 grows.
    assert steps(model, amp, [False, False, False, False, True]) == [8192.0, 8192.0, 8192.0, 16384.0, 8192.0]
    _, two = session(with_scale(SAME), num_losses=2)
    two.load_state_dict(APEX)
    assert two.loss_scale.tolist() == [4096.0, 64.0]
    assert [two.stats(number).highest_scale for number in (0, 1)] == [4096.0, 64.0]


@pytest.mark.parametrize("losses, saved", [(1, 2), (2, 1)])
def test_apex_s_losses_must_be_as_many(losses, saved):
    _, amp = session(with_scale(SAME), num_losses=losses)
    state = dict(list(APEX.items())[:saved])
    with pytest.raises(
        StateError, match=rf"apex.amp has {saved} losses, and this session {losses}(.|\n)*num_losses={saved}"
    ):
        amp.load_state_dict(state)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"loss_scaler0": {"loss_scale": 8.0}}, "the state of apex.amp, loss_scaler0 lacks unskipped"),
        ({"loss_scaler0": {}}, "lacks loss_scale, unskipped(.|\n)*it has nothing"),
        ({"loss_scaler0": 7}, "loss_scaler0 is a int"),
        ({"loss_scaler0": {"loss_scale": "8", "unskipped": 0}}, "loss_scaler0 has wrong values(.|\n)*'8'"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0.5}}, "loss_scaler0 has wrong values(.|\n)*0.5"),
        ({"loss_scaler0": {"loss_scale": float("inf"), "unskipped": 0}}, "loss_scaler0 has wrong values(.|\n)*inf"),
        ({"loss_scaler7": APEX["loss_scaler0"]}, "the state of apex.amp lacks loss_scaler0(.|\n)*loss_scaler7"),
    ],
)
def test_damaged_apex_states(change, says):
    _, amp = session(with_scale(SAME))
    before = str(amp.state_dict())
    with pytest.raises(StateError, match=says):
        amp.load_state_dict(copy.deepcopy(change))
    assert str(amp.state_dict()) == before


@pytest.mark.parametrize("loss_scale", ["none", "128"])
def test_apex_s_constant_scale_is_that_of_a_session_with_the_same(loss_scale):
    """apex saves it with a count of steps that nothing reads, as it does for O0 and O3."""
    model, amp = session(with_scale(loss_scale))
    constant = amp.stats().scale
    amp.load_state_dict({"loss_scaler0": {"loss_scale": constant, "unskipped": 2000}})
    assert steps(model, amp, [False, True]) == [constant] * 2
    with pytest.raises(StateError, match="this session none"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2 * constant, "unskipped": 0}})


def test_one_gradscaler_serves_several_losses():
    """As a loop with one scaler for all its losses has it."""
    _, amp = session(with_scale(SAME), num_losses=2)
    amp.load_state_dict(Torch(**RULES).scaler.state_dict())
    assert amp.loss_scale.tolist() == [1024.0, 1024.0]


# Paddle -------------------------------------------------------------------------------------------------


class Paddle:
    """Paddle's GradScaler, from python/paddle/amp/grad_scaler.py: ``_update``, and what ``state_dict`` returns."""

    def __init__(self, scale=1024.0, interval=3, every=2, growth=2.0, backoff=0.5):
        self.scale, self.growth, self.backoff = scale, growth, backoff
        self.interval, self.every, self.good, self.bad = interval, every, 0, 0

    def steps(self, overflows):
        scales = []
        for overflow in overflows:
            self.good, self.bad = (0, self.bad + 1) if overflow else (self.good + 1, 0)
            if self.bad == self.every:
                self.scale, self.bad = max(self.scale * self.backoff, 1.0), 0
            elif self.good == self.interval:
                self.scale, self.good = self.scale * self.growth, 0
            scales.append(self.scale)
        return scales

    def state_dict(self):
        return {
            "scale": np.array([self.scale], dtype=np.float32), "incr_ratio": self.growth, "decr_ratio": self.backoff,
            "incr_every_n_steps": self.interval, "decr_every_n_nan_or_inf": self.every,
            "incr_count": self.good, "decr_count": self.bad, "use_dynamic_loss_scaling": True,
        }  # fmt: skip


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_paddle_s_scale_goes_on_as_paddle_does(seed, every, caplog):
    chance = random.Random(seed)
    theirs = Paddle(every=every, growth=4.0, backoff=0.25)
    theirs.steps(chance.random() < 0.5 for _ in range(chance.randrange(12)))
    like = LossScale.like("paddle", growth=4.0, backoff=0.25, interval=3, hysteresis=every)
    model, amp = session(with_scale(like))
    steps(model, amp, [True, False])
    with caplog.at_level(logging.INFO, "mezzo.session.state"):
        amp.load_state_dict(theirs.state_dict())
    assert not any("goes on by" in record.getMessage() for record in caplog.records)
    overflows = [chance.random() < 0.5 for _ in range(20)]
    assert steps(model, amp, overflows) == theirs.steps(overflows)


def test_an_overflow_that_paddle_has_counted_counts(caplog):
    theirs = Paddle(every=2)
    theirs.steps([True])  # the next in a row halves the scale
    model, amp = session(with_scale("dynamic(init=16,interval=3,hysteresis=2,refill=clean+backoff)"))
    amp.load_state_dict(theirs.state_dict())
    assert steps(model, amp, [True]) == [512.0]


@pytest.mark.parametrize(
    "config, saved, says",
    [
        (SAME, {"every": 2}, ["hysteresis 2 → 1"]),
        ("dynamic(interval=3,hysteresis=2)", {"every": 2}, ["refill 'clean+backoff' → backoff"]),
        (SAME, {"every": 1, "growth": 3.0, "backoff": 0.1, "interval": 7},
         ["growth 3.0 → 2.0", "backoff 0.1 → 0.5", "interval 7 → 3"]),
        ("dynamic(interval=3,growth_offset=2)", {"every": 1}, ["growth_offset 0 → 2"]),
        (SAME, {"every": 1, "scale": 2.0**25}, ["ceiling None → 16777216"]),
    ],
)  # fmt: skip
def test_paddle_s_other_rules_are_logged_and_the_session_s_own_count(config, saved, says, caplog):
    state = Paddle(**saved).state_dict()
    _, amp = session(with_scale(config))
    with caplog.at_level(logging.INFO, "mezzo.session.state"):
        amp.load_state_dict(state)
    (said,) = (r.getMessage() for r in caplog.records if "goes on by this session's rules" in r.getMessage())
    assert "not by those of paddle.amp.GradScaler: " in said
    assert all(line in said for line in says)
    assert float(amp.loss_scale) == state["scale"][0]


@pytest.mark.parametrize("form", [torch.tensor, np.asarray, list, lambda one: one[0]])
def test_paddle_s_scale_in_whatever_holds_one_number(form):
    _, amp = session(with_scale(SAME))
    amp.load_state_dict(Paddle().state_dict() | {"scale": form([8.0])})
    assert float(amp.loss_scale) == 8.0


def test_paddle_s_constant_scale_is_that_of_a_session_with_the_same():
    state = Paddle(scale=128.0).state_dict() | {"use_dynamic_loss_scaling": False}
    model, amp = session(with_scale("128"))
    amp.load_state_dict(state)
    assert steps(model, amp, [False, True]) == [128.0] * 2
    for other in (SAME, "64", "none"):
        _, amp = session(with_scale(other))
        says = rf"constant loss scale 128.0, and this session another(.|\n)*{re.escape(str(LossScale.parse(other)))}"
        with pytest.raises(StateError, match=rf"{says}(.|\n)*loss_scale=128"):
            amp.load_state_dict(state)


@pytest.mark.parametrize("change", Paddle().state_dict())
def test_damaged_paddle_states(change):
    _, amp = session(with_scale(SAME))
    state, before = Paddle().state_dict(), str(amp.state_dict())
    for wrong in ("7", None, [1, 2], float("nan"), np.ones(2)):
        with pytest.raises(StateError, match=r"state of paddle\.amp\.GradScaler has wrong values"):
            amp.load_state_dict(state | {change: wrong})
    del state[change]
    with pytest.raises(StateError, match=f"the state of paddle.amp.GradScaler lacks {change}(.|\n)*it has "):
        amp.load_state_dict(state)
    assert str(amp.state_dict()) == before
    for policy in ("O0", with_scale("128")):
        _, amp = session(policy)
        with pytest.raises(StateError, match=r"state of paddle\.amp\.GradScaler has a dynamic loss scale"):
            amp.load_state_dict(Paddle().state_dict())
