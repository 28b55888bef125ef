"""``paddle.decorate``: what is stored in which dtype, FP32 values, FP32 gradients, state dicts, and what is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import PolicyError
from mezzo.compat import paddle

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
}


@pytest.fixture(autouse=True)
def _emulating(emulating):
    """Products in FP16 are slow here."""


def stored(module):
    return {param.dtype for param in module.parameters()}


# Paddle's own tests: test_amp_decorate.py -------------------------------------------------------------


class ConvBN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = ConvBN(), nn.Linear(8, 8)
        self.layernorm = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))

    def forward(self, x):
        return self.layernorm(functional.relu(self.linear(self.conv(x))))


class MyLayerNorm(nn.LayerNorm):
    pass


@pytest.mark.parametrize(
    "dtype, excluded, wide, low",
    [
        ("float16", None, ["layernorm", "conv.norm"], ["conv.conv", "linear"]),
        ("float16", lambda m: m.conv, ["conv", "layernorm"], ["linear"]),
        ("float16", lambda m: [m.conv, m.linear], ["conv", "linear", "layernorm"], []),
        ("float16", lambda m: [nn.Conv2d, m.linear], ["conv", "linear", "layernorm"], []),
        ("float16", lambda m: nn.Linear, ["linear", "layernorm", "conv.norm"], ["conv.conv"]),
        ("float16", lambda m: m, [""], []),
        ("bfloat16", None, ["conv.norm"], ["conv.conv", "linear", "layernorm"]),
        ("bfloat16", lambda m: [nn.LayerNorm, nn.BatchNorm2d], ["layernorm", "conv.norm"], ["conv.conv", "linear"]),
    ],
)
def test_what_is_stored_in_fp32(dtype, excluded, wide, low):
    model = Model()
    given = None if excluded is None else excluded(model)
    assert paddle.decorate(models=model, level="O2", dtype=dtype, excluded_layers=given) is model
    assert all(stored(model.get_submodule(path)) == {torch.float32} for path in wide)
    assert all(stored(model.get_submodule(path)) == {HALVES[dtype]} for path in low)
    for first in (torch.float32, HALVES[dtype]):
        with paddle.auto_cast(level="O2", dtype=dtype):
            assert model(torch.rand(2, 4, 8, 8).to(first)).isfinite().all()
    assert model.conv.norm.running_mean.dtype == torch.float32


def test_subclasses_of_an_excluded_class_are_excluded():
    model = nn.Sequential(nn.Linear(8, 8), MyLayerNorm(8))
    paddle.decorate(model, level="O2", dtype="bfloat16", excluded_layers=[nn.LayerNorm])
    assert (stored(model[0]), stored(model[1])) == ({torch.bfloat16}, {torch.float32})


# What comes back -----------------------------------------------------------------------------------------


def pair():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_returns_what_it_was_given(level):
    model, optimizer = pair()
    found = paddle.decorate(models=model, optimizers=optimizer, level=level)
    assert found[0] is model and found[1] is optimizer and len(found) == 2  # noqa: PT018 - one shape
    (one, first), (two, second) = pair(), pair()
    models, optimizers = paddle.decorate(models=[one, two], optimizers=[first, second], level=level)
    assert (models, optimizers) == ([one, two], [first, second])
    alone = nn.Linear(3, 2)
    assert paddle.decorate(alone, level=level) is alone
    both = [nn.Linear(3, 2), nn.Linear(3, 2)]
    assert paddle.decorate(both, level=level) == both
    model, optimizer = pair()
    assert paddle.decorate(model, optimizers=[optimizer], level=level) == (model, [optimizer])
    dtype = torch.float32 if level == "O1" else torch.float16
    assert {p.dtype for each in (one, two, alone, *both, model) for p in each.parameters()} == {dtype}


# FP32 values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_weight", [None, True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_values_take_what_would_round_away(dtype, master_weight):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    paddle.decorate(model, optimizer, level="O2", dtype=dtype, master_weight=master_weight)
    for _ in range(100):
        with paddle.auto_cast(level="O2", dtype=dtype):
            loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    swallowed = master_weight is False
    assert model.weight.item() == pytest.approx(1.0 if swallowed else 0.99, rel=0 if swallowed else 2**-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_decorated_program_is_a_session_of_o2_bit_for_bit(dtype, optimizer):
    """The same loop in mezzo's own five lines; the regions are the same, as Paddle's holds inside the model."""
    results = []
    for decorated in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        made = OPTIMIZERS[optimizer](model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        rules = mezzo.LossScale.like("paddle", init=2.0**12, interval=3)
        if decorated:
            paddle.decorate(model, made, level="O2", dtype=dtype)
            scaler = paddle.GradScaler(enable=dtype == "float16", init_loss_scaling=2.0**12, incr_every_n_steps=3)
        else:
            scale = rules if dtype == "float16" else None
            policy = mezzo.Policy.O2(dtype, output_dtype=None, loss_scale=scale)
            amp = mezzo.MixedPrecision(model, made, policy)
        for number in range(8):
            x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(number)), torch.tensor([0, 1, 2, 0, 1])
            overflows = number == 5 and dtype == "float16"  # in bfloat16 there is no scaler that would skip
            with paddle.auto_cast(level="O2", dtype=dtype, custom_black_list=["cross_entropy"]):
                loss = functional.cross_entropy(model(x), y) * (torch.inf if overflows else 1)
            if decorated:
                scaled = scaler.scale(loss)
                scaled.backward()
                scaler.minimize(made, scaled)
                made.zero_grad()
            else:
                amp.backward(loss)
                amp.step()
                amp.zero_grad()
            schedule.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
    assert all(p.isfinite().all() for p in results[1])


def test_optimizers_step_by_themselves_and_with_closures():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    paddle.decorate(model, optimizer, level="O2", dtype="bfloat16", master_grad=True)
    losses = []

    def closure():
        optimizer.zero_grad()
        with paddle.auto_cast(level="O2", dtype="bfloat16"):
            loss = functional.mse_loss(model(x).float(), y)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(losses) > 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_that_wrap_before_and_after(first):
    model, optimizer = pair()
    schedulers = []
    if first:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    paddle.decorate(model, optimizer, level="O2", dtype="bfloat16")
    if not first:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for rate in (0.1, 0.05, 0.025):
        assert optimizer.param_groups[0]["lr"] == rate
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedulers[0].step()


# Gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, optimizer, master_grad, accumulate", [*itertools.product(HALVES, OPTIMIZERS, [True, False], [1, 2])]
)
def test_master_grad(dtype, optimizer, master_grad, accumulate):
    """``test_amp_master_grad.py``: FP32 after each backward pass, and its counts of calls."""
    model = nn.Linear(2, 4)
    made = OPTIMIZERS[optimizer](model.parameters())
    paddle.decorate(model, made, level="O2", dtype=dtype, master_grad=master_grad)
    scaler, low, updates = paddle.GradScaler(enable=dtype == "float16"), 0, 0
    for number in range(4):
        with paddle.auto_cast(level="O2", dtype=dtype):
            out = model(torch.rand(2, 2))
            loss = functional.l1_loss(out, torch.rand(2, 4))
        low += out.dtype == HALVES[dtype]
        before = [None if p.grad is None else p.grad.double() for p in model.parameters()]
        scaler.scale(loss).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32 if master_grad else HALVES[dtype]}
        if master_grad and before[0] is not None:
            assert not torch.equal(before[0], model.weight.grad.double())
        if (number + 1) % accumulate == 0:
            was = model.weight.detach().clone()
            scaler.step(made)
            scaler.update()
            made.zero_grad()
            updates += not torch.equal(was, model.weight)
            assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    assert (low, updates) == (4, 4 // accumulate)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_micro_batches_with_and_without_master_grad(dtype):
    """A thousand ones, and then a thousandth, which sixteen bits cannot add."""
    sums = {}
    for master_grad in (True, False):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nn.init.zeros_(model.weight)
        paddle.decorate(model, optimizer, level="O2", dtype=dtype, master_grad=master_grad)
        for value in (1024.0, 0.25, 0.25, 0.25, 0.25):
            model(torch.full((1, 1), value)).sum().backward()
        optimizer.step()
        sums[master_grad] = -model.state_dict()["weight"].item()
    assert sums == {True: 1025.0, False: 1024.0}


def test_the_gradients_are_unscaled_for_users_who_clip_them():
    model, optimizer = pair()
    paddle.decorate(model, optimizer, level="O2", master_grad=True)
    scaler = paddle.GradScaler(init_loss_scaling=1024.0)
    with paddle.auto_cast(level="O2"):
        loss = model(torch.ones(1, 3)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(8**0.5)
    before = model.state_dict()["weight"]
    scaler.step(optimizer)
    scaler.update()
    moved = before - model.state_dict()["weight"]
    torch.testing.assert_close(moved, torch.full((2, 3), 0.1 / 8**0.5))


# State dicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, "adamw", "mezzo"])
@pytest.mark.parametrize("save_dtype", ["float16", "bfloat16", "float32", "float64", torch.float32, None])
def test_save_dtype(save_dtype, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = copy.deepcopy(model.state_dict())
    made = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
    paddle.decorate(model, made, level="O2", save_dtype=save_dtype)
    kind = torch.float32 if save_dtype is None else getattr(torch, str(save_dtype).removeprefix("torch."))
    state = model.state_dict()
    assert state["1.num_batches_tracked"].dtype == torch.int64
    floats = {key: value for key, value in state.items() if value.is_floating_point()}
    assert {value.dtype for value in floats.values()} == {kind}
    assert {value.dtype for value in model[0].state_dict().values()} == {kind}
    assert stored(model[0]) == {torch.float16}
    shown = model.state_dict(keep_vars=True)
    assert all(shown[key] is param for key, param in model.named_parameters())
    for key, value in floats.items():
        exact = before[key] if made is not None else before[key].half() if key[0] != "1" else before[key]
        assert torch.equal(value, exact.to(kind)), key


@pytest.mark.parametrize("save_dtype", ["float32", "float64", None])
def test_state_dicts_load_with_every_bit(save_dtype):
    runs = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        paddle.decorate(model, optimizer, level="O2", save_dtype=save_dtype)
        scaler = paddle.GradScaler(incr_every_n_steps=2)
        for number in range(10):
            if number == 5 and resumes:
                saved = model.state_dict(), optimizer.state_dict(), scaler.state_dict()
                model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                paddle.decorate(model, optimizer, level="O2", save_dtype=save_dtype)
                scaler = paddle.GradScaler()
                for each, state in zip((model, optimizer, scaler), saved, strict=True):
                    each.load_state_dict(state)
            with paddle.auto_cast(level="O2"):
                loss = model(torch.full((2, 3), 0.1 * number)).square().mean()
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.minimize(optimizer, scaled)
            optimizer.zero_grad()
        runs.append(([*model.state_dict().values()], scaler.state_dict()))
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("save_dtype", ["float16", "float32"])
def test_copies_and_pickles_of_a_decorated_model_are_plain_fp32_models(save_dtype, tmp_path):
    model, optimizer = pair()
    before = copy.deepcopy(model.state_dict())
    paddle.decorate(model, optimizer, level="O2", save_dtype=save_dtype)
    torch.save(model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert stored(copied) == {torch.float32}
        for name, value in copied.state_dict().items():
            assert torch.equal(value, before[name])


# Refusals ------------------------------------------------------------------------------------------------


def test_a_layer_of_one_model_that_another_has_too():
    one, two = Model(), Model()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(PolicyError) as raised:
        paddle.decorate([one, two], optimizer, level="O2", excluded_layers=[one.linear])
    assert "keep linear of one model in FP32, and not of another" in str(raised.value)
    assert "models[1] has a Linear at the same path" in str(raised.value)
    assert stored(one) == stored(two) == {torch.float32}
    paddle.decorate([one, two], optimizer, level="O2", excluded_layers=[one.linear, two.linear])
    assert stored(one.linear) == stored(two.linear) == {torch.float32}
