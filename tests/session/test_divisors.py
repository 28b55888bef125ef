"""Optimizers of torch's that divide by an ``eps`` which is zero in FP16: refused where torch itself makes NaN of it."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mezzo
from mezzo import MixedPrecision, UnsupportedError
from mezzo.session.weights import divisors

OF = torch.optim
ADAMS = (OF.Adam, OF.AdamW, OF.NAdam, OF.RAdam, OF.Adamax, OF.RMSprop, OF.Adagrad, OF.Adadelta)
KINDS = [
    *((kind, {"foreach": each, **eps}) for kind in ADAMS for each in (False, True) for eps in ({}, {"eps": 1e-4})),
    *((kind, {"fused": True}) for kind in (OF.Adam, OF.AdamW, OF.Adagrad)),
    (OF.Adam, {"amsgrad": True}), (OF.RMSprop, {"centered": True, "momentum": 0.9}), (OF.Adadelta, {"eps": 1e-9}),
    (OF.Adam, {"eps": 1e-7}), (OF.Adafactor, {}), (OF.Muon, {}), (OF.Muon, {"eps": 1e-9}), (OF.ASGD, {}),
    (OF.Rprop, {}), (OF.SGD, {"momentum": 0.9}),
]  # fmt: skip
O3 = "O3,emulate=true"
LOST = "an eps of 1e-08 is zero in float16, and weights whose gradients are zero become nan"


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(8, 8, bias=False).to(dtype)


def backward(amp, model):
    with amp.autocast():
        loss = model(torch.eye(8)[:2]).float().square().sum()  # most columns of the weight get no gradient
    amp.backward(loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, options", KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_torch_makes_nan_of_is_refused_and_nothing_else(kind, options, dtype):
    """The oracle is that optimizer by itself, over a model that was cast."""
    plain = net(dtype)
    alone = kind(plain.parameters(), **options)
    for _ in range(8):
        plain.weight.grad = torch.zeros_like(plain.weight)
        alone.step()
    model, policy = net(dtype), f"O3,dtype={str(dtype).removeprefix('torch.')},emulate=true"
    optimizer = kind(model.parameters(), **options)
    if plain.weight.isfinite().all():
        amp = MixedPrecision(model, optimizer, policy)
        for _ in range(8):
            backward(amp, model)
            amp.step()
            amp.zero_grad()
        assert model.weight.isfinite().all()
    else:
        with pytest.raises(UnsupportedError, match=r"is zero in float16, .*nan(.|\n)*eps=1e-4"):
            MixedPrecision(model, optimizer, policy)
        assert not optimizer._optimizer_step_pre_hooks


def test_the_message():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": model[0].weight, "eps": 1e-3}, {"params": model[0].bias, "eps": 2e-8}]
    optimizer = OF.AdamW([*groups, {"params": model[1].parameters()}])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError) as error:
        MixedPrecision(model, optimizer, O3)
    assert str(error.value) == (
        f"{LOST}\n"
        "  where  AdamW(…, eps=2e-08), group 1: 0.bias\n"
        "         AdamW(…, eps=1e-08), group 2: 1.weight, 1.bias\n"
        f"  why    torch {torch.__version__} adds it in the weights' dtype, and 0 / (0 + eps) is 0 / 0; "
        "float16 has nothing between 0 and 6e-08\n"
        "  write  AdamW(…, eps=1e-4); or dtype=bfloat16, which holds 1e-08;\n"
        '         or policy="O2", whose updates are FP32, or mezzo.optim, whose always are'
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer.state


@pytest.mark.parametrize("make", [mezzo.optim.Adam, mezzo.optim.AdamW])
def test_mezzo_s_own_compute_in_fp32(make):
    model = net()
    amp = MixedPrecision(model, make(model.parameters(), lr=0.01), O3)
    for _ in range(3):
        backward(amp, model)
        amp.step()
        amp.zero_grad()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("policy", ["O0", "O1,emulate=true", "O2,emulate=true", "O3,dtype=bfloat16,emulate=true"])
def test_other_policies_take_the_same_optimizer(policy):
    model = net()
    amp = MixedPrecision(model, OF.Adam(model.parameters()), policy)
    for _ in range(3):
        backward(amp, model)
        amp.step()
        amp.zero_grad()
    assert model.weight.isfinite().all()


def test_weights_that_a_rule_keeps_in_fp32_and_frozen_ones_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.LayerNorm(4))
    optimizer = OF.Adam([{"params": [*model[0].parameters()], "eps": 1e-4}, {"params": [*model[1:].parameters()]}])
    policy = f"{O3},fp32_module=2"
    amp = MixedPrecision(model, optimizer, policy)
    assert model[2].weight.dtype == torch.float32
    model[1].requires_grad_(True)  # until it thaws
    with amp.autocast():
        loss = model(torch.ones(2, 4)).square().sum()
    with pytest.raises(UnsupportedError, match=r"eps=1e-08\), group 1: 1.weight, 1.bias\n"):
        amp.backward(loss)


@pytest.mark.parametrize("way", ["set", "loaded", "added group", "added optimizer"])
def test_one_that_comes_later_is_refused_before_anything_is_written(way, bits):
    model = nn.Sequential(net(), net())
    first = OF.Adam(model[0].parameters(), eps=1e-4)
    amp = MixedPrecision(model, first, O3)

    def step():
        backward(amp, model)
        amp.step()
        amp.zero_grad()

    step()
    saved, before = copy.deepcopy(first.state_dict()), bits(model.state_dict())
    if way == "added optimizer":
        with pytest.raises(UnsupportedError, match=LOST):
            amp.add(OF.Adam(model[1].parameters()))
    elif way == "loaded":
        other = copy.deepcopy(saved)
        other["param_groups"][0]["eps"] = 1e-8
        first.load_state_dict(other)
    elif way == "added group":
        first.add_param_group({"params": [*model[1].parameters()], "eps": 1e-8})
    else:
        first.param_groups[0]["eps"] = 1e-8
    if way != "added optimizer":
        with pytest.raises(UnsupportedError, match=LOST):
            step()
        assert bits(model.state_dict()) == before
        first.param_groups[-1]["eps"] = 1e-4
    amp.zero_grad()
    step()
    assert bits(model.state_dict()) != before
    assert all(param.isfinite().all() for param in model.parameters())


def test_one_that_is_set_between_a_backward_pass_and_its_step(bits):
    model = net()
    optimizer = OF.Adam(model.parameters(), eps=1e-4)
    amp = MixedPrecision(model, optimizer, O3)
    backward(amp, model)
    optimizer.param_groups[0]["eps"] = 1e-8
    before = bits(model.state_dict())
    with pytest.raises(UnsupportedError, match=LOST):
        amp.step()
    assert bits(model.state_dict()) == before
    assert not optimizer.state
    optimizer.param_groups[0]["eps"] = 1e-4
    assert not amp.step().skipped


def test_a_loop_of_its_own_is_told_the_same():
    model = net()
    with pytest.raises(UnsupportedError, match=LOST):
        mezzo.attach(model, OF.Adam(model.parameters()), O3)
    assert model.weight.dtype == torch.float32
    mezzo.attach(model, OF.Adam(model.parameters(), eps=1e-4), O3).detach()


class Named(OF.Adam):
    """A class of a program's, which steps as torch's does."""


class OwnStep(OF.Adam):
    """One that adds it in FP32, for all that can be known."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param -= self.param_groups[0]["lr"] * param.grad


def test_classes_of_the_program_s_own_count_by_the_step_that_they_take():
    model = net()
    with pytest.raises(UnsupportedError, match="Named"):
        MixedPrecision(model, Named(model.parameters()), O3)
    model = net()
    amp = MixedPrecision(model, OwnStep(model.parameters()), O3)
    backward(amp, model)
    assert not amp.step().skipped


def test_trying_is_seen_by_no_one(monkeypatch):
    """Not by hooks of all optimizers, nor by what replaces their constructor, as ``mezzo run`` does."""
    divisors._is_lost.cache_clear()
    seen = []
    model = net()
    optimizer = OF.Adam(model.parameters())
    hook = register_optimizer_step_pre_hook(lambda each, *_: seen.append(each))
    monkeypatch.setattr(OF.Optimizer, "__init__", lambda self, *_: seen.append(self))
    try:
        with pytest.raises(UnsupportedError, match=LOST):
            MixedPrecision(model, optimizer, O3)
    finally:
        hook.remove()
    assert not seen
    assert divisors._is_lost.cache_info().misses == 1
