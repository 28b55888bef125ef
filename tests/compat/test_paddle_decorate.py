"""``paddle.decorate``: what is stored in which dtype, masters, FP32 gradients, state dicts, and what is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import PolicyError, StateError, UnsupportedError
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


# Masters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_weight", [None, True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_take_what_would_round_away(dtype, master_weight):
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
            with paddle.auto_cast(level="O2", dtype=dtype, custom_black_list=["cross_entropy"]):
                loss = functional.cross_entropy(model(x), y) * (torch.inf if number == 5 else 1)
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
    if dtype == "float16" or optimizer == "mezzo":
        assert all(map(torch.equal, *results))
    assert all(p.isfinite().all() for p in results[1])


@pytest.mark.parametrize("overflows_at", [0, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_decorated_alone_gets_masters_with_the_scalers_first_step(optimizer, overflows_at):
    """As Paddle's guide has it: ``model = decorate(models=model, level="O2")`` and a scaler."""
    results = []
    for optimizers, unscales in ((True, False), (False, False), (False, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        made = OPTIMIZERS[optimizer](model.parameters())
        paddle.decorate(model, made if optimizers else None, level="O2", save_dtype="float32")
        scaler = paddle.GradScaler(init_loss_scaling=2.0**12, incr_every_n_steps=3)
        for number in range(8):
            x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(number)), torch.tensor([0, 1, 2, 0, 1])
            with paddle.auto_cast(level="O2"):
                loss = functional.cross_entropy(model(x), y) * (torch.inf if number == overflows_at else 1)
            scaled = scaler.scale(loss)
            scaled.backward()
            if unscales:
                scaler.unscale_(made)
            scaler.minimize(made, scaled)
            made.zero_grad()
        results.append([*model.state_dict().values()])
    assert all(torch.equal(*pair) for each in results[1:] for pair in zip(results[0], each, strict=True))
    assert any((value.half() != value).any() for value in results[1])  # the masters' own values are saved


def test_the_log_says_how_the_scalers_scale_moves_and_no_more(caplog):
    model, optimizer = pair()
    paddle.decorate(model, optimizer, level="O2")
    scaler = paddle.GradScaler(init_loss_scaling=8.0)
    with caplog.at_level("INFO", "mezzo.session.stats"):
        for factor in (1.0, 1e6, 1.0):
            scaler.scale((model(torch.ones(1, 3)) * factor).float().sum()).backward()
            scaler.minimize(optimizer)
            optimizer.zero_grad()
    assert [line for line in caplog.messages if "→" in line] == ["loss scale 8 → 4 after step 2, which overflowed"]


def test_an_optimizer_made_after_its_model_was_decorated_gets_masters_too():
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    paddle.decorate(models, level="O2", master_grad=True)
    both = torch.optim.SGD([param for each in models for param in each.parameters()], lr=2.0**-14)
    scaler = paddle.GradScaler(init_loss_scaling=8.0)
    before = [param.detach().float() for each in models for param in each.parameters()]
    for _ in range(3):
        scaled = scaler.scale(sum(each(torch.ones(1, 3)).float().sum() for each in models))
        scaled.backward()
        scaler.minimize(both, scaled)
        both.zero_grad()
    assert [group["params"][0].dtype for group in both.param_groups] == [torch.float32]
    exact = [value - 3 * 2.0**-14 for value in before]
    # The FP32 values are those that the models had before they were stored in FP16, of which these are roundings.
    for master, value, given in zip(both.param_groups[0]["params"], exact, before, strict=True):
        assert torch.equal((master + 3 * 2.0**-14).half(), given.half()), value
    assert {param.grad_dtype for each in models for param in each.parameters()} == {torch.float32}


def test_a_second_optimizer_of_a_model_decorated_alone_is_refused():
    model = nn.Linear(3, 2)
    paddle.decorate(model, level="O2")
    first, second = (torch.optim.SGD([param], lr=0.1) for param in (model.weight, model.bias))
    scaler = paddle.GradScaler(init_loss_scaling=8.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    scaler.unscale_(first)
    with pytest.raises(UnsupportedError, match="fp16 gradients cannot be unscaled") as raised:
        scaler.unscale_(second)
    assert "decorate(models=model, optimizers=optimizer" in str(raised.value)
    assert torch.equal(model.bias.grad, gradients[1])


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
        sums[master_grad] = -optimizer.param_groups[0]["params"][0].item()
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
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    scaler.step(optimizer)
    scaler.update()
    moved = before - optimizer.param_groups[0]["params"][0].detach()
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
    kind = None if save_dtype is None else getattr(torch, str(save_dtype).removeprefix("torch."))
    state = model.state_dict()
    assert state["1.num_batches_tracked"].dtype == torch.int64
    floats = {key: value for key, value in state.items() if value.is_floating_point()}
    if kind is None:
        assert {value.dtype for value in floats.values()} == {torch.float16, torch.float32}
        return
    assert {value.dtype for value in floats.values()} == {kind}
    assert {value.dtype for value in model[0].state_dict().values()} == {kind}
    assert stored(model[0]) == {torch.float16}
    for key, value in floats.items():
        exact = before[key] if made is not None else before[key].half() if key[0] != "1" else before[key]
        assert torch.equal(value, exact.to(kind)), key


def test_fp32_state_dicts_hold_the_masters_and_load_with_every_bit():
    runs = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        paddle.decorate(model, optimizer, level="O2", save_dtype="float32")
        scaler = paddle.GradScaler(incr_every_n_steps=2)
        for number in range(10):
            if number == 5 and resumes:
                saved = model.state_dict(), optimizer.state_dict(), scaler.state_dict()
                model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                paddle.decorate(model, optimizer, level="O2", save_dtype="float32")
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


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, words",
    [
        ({"level": "O0"}, ["unknown level 'O0'", "valid: O1, O2"]),
        ({"level": "OD"}, ["unknown level 'OD'"]),
        ({"level": "O2", "dtype": "float32"}, ["unknown dtype 'float32'"]),
        ({"master_weight": 1}, ["master_weight is 1", "True or False"]),
        ({"master_grad": None}, ["master_grad is None"]),
        ({"save_dtype": "float61"}, ["unknown save_dtype 'float61'", "valid: float16, bfloat16, float32, float64"]),
        ({"save_dtype": 3}, ["unknown save_dtype 3"]),
        ({"excluded_layers": ["conv"]}, ["excluded_layers has 'conv'", "a module of the model, or a class of modules"]),
        ({"excluded_layers": int}, ["excluded_layers has <class 'int'>"]),
        ({"level": "O2", "excluded_layers": nn.Linear(2, 2)}, ["a Linear that is in none of the models"]),
        ({"models": None}, ["models has to be a torch.nn.Module, or a list of them, not NoneType"]),
        ({"models": "net"}, ["models has to be a torch.nn.Module, or a list of them, not str"]),
        ({"optimizers": 3}, ["optimizers has to be a torch.optim.Optimizer, or a list of them, not int"]),
        ({"models": [nn.Linear(2, 2), 3], "level": "x", "dtype": "y", "save_dtype": "z"}, ["4 problems"]),
    ],
)
def test_refusals(given, words):
    model, optimizer = pair()
    with pytest.raises(PolicyError) as raised:
        paddle.decorate(**({"models": model, "optimizers": optimizer, "level": "O2"} | given))
    for word in words:
        assert word in str(raised.value)
    assert stored(model) == {torch.float32}


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


def test_what_cannot_be_decorated_is_as_it_was():
    model, optimizer = pair()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(PolicyError):
        paddle.decorate(model, other, level="O2")
    assert stored(model) == {torch.float32}
    paddle.decorate(model, optimizer, level="O2")
    with pytest.raises(StateError, match="prepared already"):
        paddle.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    with pytest.raises(PolicyError, match="the optimizer SGD is decorated already"):
        paddle.decorate(nn.Linear(2, 2), optimizer, level="O2")
    model(torch.ones(1, 3)).float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", ["momentum", "mezzo"])
def test_a_copy_of_a_decorated_model_is_said_to_be_low_in_paddles_words(optimizer, caplog):
    model, _ = pair()
    averaged, optimizer = torch.optim.swa_utils.AveragedModel(model), OPTIMIZERS[optimizer](model.parameters())
    paddle.decorate(model, optimizer, level="O2", save_dtype="float32")
    copy.deepcopy(model)
    assert "write  AveragedModel(model) before decorate(model, …), and after each step" in caplog.text
    advice = caplog.messages[-1].partition("averaged.update_parameters(")[2].removesuffix(")")
    averaged.update_parameters(eval(advice, {"nn": nn, "optimizer": optimizer}))
    assert all(map(torch.equal, averaged.module.state_dict().values(), model.state_dict().values()))


def test_fp16_weights_without_masters_are_not_unscaled():
    model, optimizer = pair()
    paddle.decorate(model, optimizer, level="O2", master_weight=False)
    scaler = paddle.GradScaler()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    for call in (scaler.unscale_, scaler.step, scaler.minimize):
        with pytest.raises(UnsupportedError) as raised:
            call(optimizer)
        assert "fp16 gradients cannot be unscaled in fp16" in str(raised.value)
        assert 'write  decorate(models=model, optimizers=optimizer, level="O2")   # keeps FP32' in str(raised.value)
    constant = paddle.GradScaler(init_loss_scaling=1.0, use_dynamic_loss_scaling=False)
    optimizer.zero_grad()
    constant.scale(model(torch.ones(1, 3)).sum()).backward()
    constant.minimize(optimizer)
