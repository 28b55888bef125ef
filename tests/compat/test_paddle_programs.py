"""Whole programs as Paddle's documentation teaches them: they learn, in Paddle's dtypes, along Paddle's scales."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat import paddle as amp

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.03),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.03, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.03),
}


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
        return {name: count for (name, kind), count in self.counts.items() if kind == dtype}


class Encoder(nn.Module):
    """Attention and a feed-forward block: what a white list with softmax and gelu is for."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm1 = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.up, self.down, self.norm2 = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (batch, tokens, 8)
        x = self.norm1(x + self.out(functional.softmax(torch.matmul(q, k.transpose(1, 2)) / 3, dim=-1) @ v))
        x = self.norm2(x + self.down(functional.gelu(self.up(x))))
        return self.head(x.mean(dim=1))


def batch(number):
    x = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(number % 6))
    return x, (x[:, :, 0].sum(dim=1) > 0).long()


def program(level, dtype, optimizer="adamw", accumulate=2, steps=12, overflows=(), **decorates):
    """Accumulation, a white list, a schedule: the loop of Paddle's guide, with planted overflows."""
    torch.manual_seed(0)
    model = Encoder()
    made = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.98)
    rule = {"init_loss_scaling": 1024, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
    scaler = amp.GradScaler(enable=dtype == "float16", **rule)
    model, made = amp.decorate(models=model, optimizers=made, level=level, dtype=dtype, **decorates)
    losses, scales = [], []
    for number in range(steps * accumulate):
        x, labels = batch(number)
        with amp.auto_cast(custom_white_list=["softmax", "gelu"], level=level, dtype=dtype), Calls() as calls:
            loss = functional.cross_entropy(model(x), labels)
        losses.append(loss.item())
        if number in overflows:
            loss = loss * torch.inf
        scaled = scaler.scale(loss / accumulate)
        scaled.backward()
        if (number + 1) % accumulate == 0:
            scaler.minimize(made, scaled)
            schedule.step()
            made.zero_grad()
            scales += scaler.state_dict().get("scale", [1.0])
    return model, losses, scales, calls


def paddles_scales(pattern, start=1024.0, incr_every=3, decr_every=2):
    """``AmpScaler._update``."""
    scale, good, bad, found = start, 0, 0, []
    for each in pattern:
        good, bad = (0, bad + 1) if each == "X" else (good + 1, 0)
        if bad == decr_every:
            scale, bad = scale / 2, 0
        if good == incr_every:
            scale, good = scale * 2, 0
        found.append(scale)
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_with_accumulation_a_white_list_and_a_schedule(level, dtype, emulating):
    low = HALVES[dtype]
    overflows = (6, 8, 19) if dtype == "float16" else ()  # without a scale nothing looks for them
    model, losses, scales, calls = program(level, dtype, steps=20, overflows=overflows)
    assert sum(losses[-6:]) < sum(losses[:6]) / 2
    pattern = "...XX....X.........."
    assert scales == (paddles_scales(pattern) if dtype == "float16" else [1.0] * 20)
    there, wide = calls.of(low), calls.of(torch.float32)
    assert (there["softmax"], there["gelu"], there["matmul"]) == (1, 1, 2)
    assert "softmax" not in wide
    assert there["linear"] == 5
    assert "linear" not in wide
    if level == "O1":  # layer_norm, mean and the loss are on the black list; a sum of FP32 and low is FP32
        assert (wide["layer_norm"], wide["mean"], wide["cross_entropy"], wide["add"]) == (2, 1, 1, 2)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    else:  # the first sum reads the FP32 batch; float16 keeps layer norm's weights in FP32, and its results follow x
        assert wide["add"] >= 1
        assert there.get("cross_entropy", 0) + wide.get("cross_entropy", 0) == 1
        norms = {p.dtype for name, p in model.named_parameters() if "norm" in name}
        assert norms == {torch.float32 if dtype == "float16" else torch.bfloat16}
        assert model.up.weight.dtype == low


def crossed(optimizers, steps):
    """Level, dtype, masters, FP32 gradients, optimizer, accumulation, overflows: each with each."""
    levels = [("O1", None, False), *itertools.product(["O2"], [None, False], [False, True])]
    return [
        (level, dtype, master_weight, master_grad, optimizer, accumulate, overflows)
        for (level, master_weight, master_grad), dtype, optimizer, accumulate, overflows in itertools.product(
            levels, HALVES, optimizers, steps, [(), (2,)]
        )
        if not (dtype == "float16" and master_weight is False and optimizer != "mezzo")
        and (dtype == "float16" or not overflows)
    ]  # FP16 weights of torch's without masters are not unscaled, or learn little; no scaler looks for an infinity


def run_crossed(cases):
    wrong = []
    for level, dtype, master_weight, master_grad, optimizer, accumulate, overflows in cases:
        extra = {"master_weight": master_weight, "master_grad": master_grad}
        model, losses, scales, _ = program(level, dtype, optimizer, accumulate, 8, overflows, **extra)
        fine = sum(losses[-4:]) < sum(losses[:4]) * 0.9 and all(p.isfinite().all() for p in model.parameters())
        pattern = "".join("X" if number in {each // accumulate for each in overflows} else "." for number in range(8))
        if not fine or scales != (paddles_scales(pattern) if dtype == "float16" else [1.0] * 8):
            wrong.append((level, dtype, extra, optimizer, accumulate, overflows, losses[0], losses[-1], scales))
    return wrong


def test_options_crossed(emulating):
    cases = crossed(["mezzo"], [2])
    assert len(cases) == 15
    assert run_crossed(cases) == []


@pytest.mark.filterwarnings("ignore:Detected call of")  # a schedule moves though the first step is skipped
@pytest.mark.slow
def test_all_options_crossed(emulating):
    assert run_crossed(crossed(OPTIMIZERS, [1, 2, 3])) == []


# Counts of calls, as Paddle's own tests have them -----------------------------------------------------


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
        ("O2", True, {"conv2d": 1, "add": 2, "relu": 0, "linear": 1, "softmax": 1, "mean": 1}),
        ("O2", False, {"conv2d": 1, "add": 2, "relu": 1, "linear": 1, "softmax": 1, "mean": 1}),
        ("OD", True, {"conv2d": 1, "add": 0, "relu": 0, "linear": 1, "softmax": 0, "mean": 0}),
    ],
)
def test_low_calls_by_op(level, use_promote, expected, emulating):
    """``test_amp_promote.py`` and ``test_amp_api.py``: FP16 calls, and how many weights Adam updates in FP16."""
    torch.manual_seed(0)
    model = SimpleConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.78, 0.836), eps=1e-4)
    scaler = amp.GradScaler(init_loss_scaling=32768.0)
    if level == "O2":
        model, optimizer = amp.decorate(models=model, optimizers=optimizer, level=level)
    before = [p.detach().clone() for p in model.parameters()]
    with amp.auto_cast(level=level, use_promote=use_promote), Calls() as calls:
        loss = torch.mean(model(torch.rand(1, 1, 6, 6)))
    found = {name: calls.of(torch.float16).get(name, 0) for name in expected}
    assert found == expected
    scaled = scaler.scale(loss + sum(p.float().sum() for p in model.parameters()))  # softmax's mean has no gradient
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.zero_grad()
    low = [p for p in model.parameters() if p.dtype == torch.float16]
    assert len(low) == (4 if level == "O2" else 0)
    assert not any(map(torch.equal, before, model.parameters()))


def test_master_weights_follow_fp32(emulating):
    """``test_amp_master_weight.py``: the same losses whichever way weights are kept, and near those of FP32."""
    found = {}
    for way in ("FP32", "decorated", "O1"):
        model = nn.Linear(100, 100)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = amp.GradScaler(enable=way != "FP32", init_loss_scaling=1024.0)  # a loss in FP16 overflows with 65536
        if way == "decorated":
            amp.decorate(models=model, optimizers=optimizer, level="O2")
        x, losses = torch.rand(100, 100, generator=torch.Generator().manual_seed(1)), []
        for _ in range(4):
            with amp.auto_cast(enable=way != "FP32", level="O2" if way == "decorated" else "O1"):
                loss = model(x.half() if way != "FP32" else x).mean()
            losses.append(loss.item())
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.minimize(optimizer, scaled)
            optimizer.zero_grad()
        found[way] = losses
    assert found["decorated"] == pytest.approx(found["FP32"], rel=2**-9)
    assert found["O1"] == pytest.approx(found["FP32"], rel=2**-9)


def test_a_generator_and_a_critic_take_turns(emulating):
    """Two models, two optimizers, one scaler: decorated together, stepped apart."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.02) for each in (generator, critic)]
    _, optimizers = amp.decorate([generator, critic], optimizers, level="O2", master_grad=True)
    scaler = amp.GradScaler(init_loss_scaling=256.0)
    for number in range(12):
        real = torch.randn(16, 2, generator=torch.Generator().manual_seed(number)) + 2
        noise = torch.randn(16, 2, generator=torch.Generator().manual_seed(100 + number))
        with amp.auto_cast(level="O2"):
            loss = (critic(generator(noise).detach()) - critic(real)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        optimizers[1].zero_grad()
        with amp.auto_cast(level="O2"):
            loss = -critic(generator(noise)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert not scaler.last_step.skipped
    assert generator.bias.sum() > 0.1
    assert scaler.state_dict()["incr_count"] == 12
