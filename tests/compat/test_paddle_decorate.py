"""``paddle.decorate``: what is stored in halves, FP32 values and gradients, state dicts, and Paddle's programs."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import PolicyError
from mezzo.compat import paddle
from mezzo.weights import Halves

from ..support.refusals import refused
from .programs import HALVES, OPTIMIZERS


@pytest.fixture(autouse=True)
def _emulating(emulating):
    """Products in FP16 are slow here."""


def stored(*modules):
    """The dtypes of high halves, and those of parameters that are stored plainly."""
    params = [param for module in modules for param in module.parameters()]
    assert all(param.dtype == torch.float32 for param in params)
    return {param.hi.dtype if isinstance(param, Halves) else torch.float32 for param in params}


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


#: The dtype, what is excluded, and which parts are stored plainly then, and which in halves but for their biases.
STORED = [
    ("float16", lambda m: None, ["layernorm", "conv.norm"], ["conv.conv", "linear"]),
    ("float16", lambda m: m.conv, ["conv", "layernorm"], ["linear"]),
    ("float16", lambda m: [nn.Conv2d, m.linear], ["conv", "linear", "layernorm"], []),
    ("float16", lambda m: nn.Linear, ["linear", "layernorm", "conv.norm"], ["conv.conv"]),
    ("float16", lambda m: m, [""], []),
    ("bfloat16", lambda m: None, ["layernorm", "conv.norm"], ["conv.conv", "linear"]),
    ("bfloat16", lambda m: [nn.LayerNorm, nn.BatchNorm2d], ["layernorm", "conv.norm"], ["conv.conv", "linear"]),
]


def test_what_is_stored_in_halves():
    for number, (dtype, excluded, wide, low) in enumerate(STORED):
        model = Model()
        model.layernorm[1] = MyLayerNorm(8)  # a subclass of what may be excluded
        assert paddle.decorate(models=model, level="O2", dtype=dtype, excluded_layers=excluded(model)) is model
        assert all(stored(model.get_submodule(path)) == {torch.float32} for path in wide), number
        assert all(stored(model.get_submodule(path)) == {HALVES[dtype], torch.float32} for path in low), number
        for first in (torch.float32, HALVES[dtype]):
            with paddle.auto_cast(level="O2", dtype=dtype):
                out = model(torch.rand(2, 4, 8, 8).to(first))
            assert out.dtype == torch.float32 and out.isfinite().all(), number  # noqa: PT018 - one output
        assert model.conv.norm.running_mean.dtype == torch.float32, number


def test_a_layer_of_one_model_that_another_has_too():
    one, two = Model(), Model()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    words = "keep linear of one model in FP32, and not of another", "models[1] has a Linear at the same path"
    with refused(PolicyError, *words, parts=(one, two, optimizer)):
        paddle.decorate([one, two], optimizer, level="O2", excluded_layers=[one.linear])
    paddle.decorate([one, two], optimizer, level="O2", excluded_layers=[one.linear, two.linear])
    assert stored(one.linear, two.linear) == {torch.float32}


# What comes back -----------------------------------------------------------------------------------------


def pair():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_returns_what_it_was_given(level):
    model, optimizer = pair()
    decorated = paddle.decorate(models=model, optimizers=optimizer, level=level)
    assert decorated[0] is model and decorated[1] is optimizer and len(decorated) == 2  # noqa: PT018 - one shape
    (one, first), (two, second) = pair(), pair()
    models, optimizers = paddle.decorate(models=[one, two], optimizers=[first, second], level=level)
    assert (models, optimizers) == ([one, two], [first, second])
    alone = nn.Linear(3, 2)
    assert paddle.decorate(alone, level=level) is alone
    both = [nn.Linear(3, 2), nn.Linear(3, 2)]
    assert paddle.decorate(both, level=level) == both
    model, optimizer = pair()
    assert paddle.decorate(model, optimizers=[optimizer], level=level) == (model, [optimizer])
    halves = set() if level == "O1" else {torch.float16}
    assert stored(one, two, alone, *both, model) == {torch.float32, *halves}


# FP32 values and gradients -------------------------------------------------------------------------------


def test_fp32_values_take_what_would_round_away():
    """A ten-thousandth, ten times over: of one model or of two, with one optimizer or two."""
    for dtype, master_weight, count in (*itertools.product(HALVES, (None, True), (1,)), ("float16", None, 2)):
        models = [nn.Linear(2, 2, bias=False) for _ in range(count)]
        for model in models:
            nn.init.ones_(model.weight)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
        paddle.decorate(models, optimizers, level="O2", dtype=dtype, master_weight=master_weight)
        for _ in range(10):
            for model, optimizer in zip(models, optimizers, strict=True):
                with paddle.auto_cast(level="O2", dtype=dtype):
                    loss = model(torch.ones(1, 2)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for model in models:
            assert stored(model) == {HALVES[dtype]}
            torch.testing.assert_close(model.state_dict()["weight"], torch.full((2, 2), 0.999), rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw fused", "mezzo"])
def test_master_grad(optimizer):
    """``test_amp_master_grad.py``: FP32 after each backward pass; a quarter is not lost beside a thousand."""
    for dtype, master_grad in itertools.product(HALVES, (True, False)):
        model = nn.Linear(2, 2, bias=False)
        made = OPTIMIZERS[optimizer](model.parameters())
        paddle.decorate(model, made, level="O2", dtype=dtype, master_grad=master_grad)
        scaler = paddle.GradScaler(enable=dtype == "float16", init_loss_scaling=8.0)
        for _ in range(2):
            for value in (1024.0, 0.25, 0.25, 0.25, 0.25):
                with paddle.auto_cast(level="O2", dtype=dtype):
                    loss = model(torch.full((1, 2), value)).sum()
                scaler.scale(loss).backward()
                assert model.weight.grad.dtype == torch.float32
            scaler.unscale_(made)
            assert torch.equal(model.weight.grad, torch.full((2, 2), 1025.0))
            scaler.step(made)
            scaler.update()
            made.zero_grad()


# State dicts ---------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_save_dtype():
    kinds = ("float16", "bfloat16", "float32", "float64", torch.float32, None)
    for save_dtype, optimizer in zip(kinds * 2, (None, "adam", "mezzo", None) * 3, strict=True):
        model = net()
        before = copy.deepcopy(model.state_dict())
        made = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
        paddle.decorate(model, made, level="O2", save_dtype=save_dtype)
        dtype = torch.float32 if save_dtype is None else getattr(torch, str(save_dtype).removeprefix("torch."))
        state = model.state_dict()
        assert state["1.num_batches_tracked"].dtype == torch.int64
        floats = {key: value for key, value in state.items() if value.is_floating_point()}
        assert {value.dtype for value in (*floats.values(), *model[0].state_dict().values())} == {dtype}
        assert stored(model[0]) == {torch.float16, torch.float32}
        shown = model.state_dict(keep_vars=True)
        assert all(shown[key] is param for key, param in model.named_parameters())
        for key, value in floats.items():
            assert torch.equal(value, before[key].to(dtype)), key


def test_state_dicts_load_with_every_bit_and_copies_are_plain_fp32_models(tmp_path):
    for save_dtype in ("float64", None):
        ends, saved = [], None
        for _ in range(2):
            model = net()
            optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), paddle.GradScaler(incr_every_n_steps=2)
            paddle.decorate(model, optimizer, level="O2", save_dtype=save_dtype)
            parts = model, optimizer, scaler
            for number in range(0 if saved is None else 3, 6):
                if number == 3:
                    saved = saved or copy.deepcopy([part.state_dict() for part in parts])
                    for part, state in zip(parts, saved, strict=True):
                        part.load_state_dict(copy.deepcopy(state))
                with paddle.auto_cast(level="O2"):
                    loss = model(torch.linspace(0.1, number + 1, 6).view(2, 3)).square().mean()
                scaled = scaler.scale(loss)
                scaled.backward()
                scaler.minimize(optimizer, scaled)
                optimizer.zero_grad()
            ends.append((model.state_dict(), scaler.state_dict()))
        assert ends[0][1] == ends[1][1]
        assert all(map(torch.equal, ends[0][0].values(), ends[1][0].values()))
    torch.save(model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert stored(copied) == {torch.float32}
        assert all(torch.equal(value, ends[1][0][name]) for name, value in copied.state_dict().items())


# Counts of calls, as Paddle's own tests have them --------------------------------------------------------


class Calls(torch.overrides.TorchFunctionMode):
    """Count calls inside a region by op and dtype of the result: entered inside, it sees what the region returns."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.counts[func.__name__, out.dtype] += 1
        return out

    def of(self, dtype):
        return {name: count for (name, call_dtype), count in self.counts.items() if call_dtype == dtype}


class SimpleConvNet(nn.Module):
    """``SimpleConvNet`` of test/amp/amp_base_models.py; biases are added by ops of their own, as in Paddle."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 6, 3, bias=False), nn.Linear(96, 4, bias=False)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(6, 1, 1)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        out = torch.add(self.conv(x), self.bias1)
        out = functional.relu(out.to(torch.float32)).flatten(1)
        return functional.softmax(torch.add(self.linear(out), self.bias2), 1)


@pytest.mark.parametrize(
    "level, use_promote, expected",
    [
        ("O1", True, {"conv2d": 1, "add": 0, "relu": 0, "linear": 1, "softmax": 0, "mean": 0}),
        ("O2", True, {"conv2d": 1, "add": 0, "relu": 0, "linear": 1, "softmax": 0, "mean": 0}),  # biases are FP32
        ("O2", False, {"conv2d": 1, "add": 2, "relu": 1, "linear": 1, "softmax": 1, "mean": 1}),
        ("OD", True, {"conv2d": 1, "add": 0, "relu": 0, "linear": 1, "softmax": 0, "mean": 0}),
    ],
)
def test_low_calls_by_op(level, use_promote, expected):
    """``test_amp_promote.py`` and ``test_amp_api.py``: FP16 calls, and how many weights lie in halves."""
    torch.manual_seed(0)
    model = SimpleConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.78, 0.836), eps=1e-4)
    scaler = paddle.GradScaler(init_loss_scaling=32768.0)
    if level == "O2":
        model, optimizer = paddle.decorate(models=model, optimizers=optimizer, level=level)
    before = [p.detach().clone() for p in model.parameters()]
    with paddle.auto_cast(level=level, use_promote=use_promote), Calls() as calls:
        loss = torch.mean(model(torch.rand(1, 1, 6, 6)))
    counts = {name: calls.of(torch.float16).get(name, 0) for name in expected}
    assert counts == expected
    scaled = scaler.scale(loss + sum(p.float().sum() for p in model.parameters()))  # softmax's mean has no gradient
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.zero_grad()
    assert sum(isinstance(p, Halves) for p in model.parameters()) == (2 if level == "O2" else 0)
    assert not any(torch.equal(old, new.detach()) for old, new in zip(before, model.parameters(), strict=True))
