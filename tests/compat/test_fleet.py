"""Fleet's ``amp_configs`` as a policy: every key, its defaults, its loss scale step by step, and what is refused."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import LossScale
from mezzo.compat import fleet

GIVEN = json.loads((Path(__file__).parent.parent / "conformance" / "scale_traces.json").read_text())


def test_fleets_defaults():
    policy = fleet.policy()
    assert policy == fleet.policy({})
    assert (policy.level, policy.dtype, policy.param_dtype) == ("O1", torch.float16, torch.float32)
    assert policy.loss_scale == LossScale.like("fleet")
    scale = policy.loss_scale
    assert (scale.init, scale.interval, scale.hysteresis) == (32768, 1000, 2)
    assert (scale.growth, scale.backoff) == (2.0, 0.5)
    for op in ("conv2d", "matmul", "linear", "mm"):
        assert policy.explain(op).treatment == "low"
    black = "exp square log mean sum cosine_similarity softmax cross_entropy binary_cross_entropy_with_logits"
    for op in black.split():
        assert policy.explain(op).treatment == "fp32"
    for op in ("relu", "batch_norm", "avg_pool2d", "add", "gelu", "pow", "layer_norm", "conv3d"):
        assert policy.explain(op).treatment in ("native", "promote", "fp32_math")


@pytest.mark.parametrize(
    "key, value, field",
    [
        ("init_loss_scaling", 1024, "init"),
        ("incr_every_n_steps", 7, "interval"),
        ("decr_every_n_nan_or_inf", 3, "hysteresis"),
        ("incr_ratio", 4.0, "growth"),
        ("decr_ratio", 0.8, "backoff"),
    ],
)
def test_each_knob_of_the_loss_scale(key, value, field):
    assert fleet.policy({key: value}).loss_scale == LossScale.like("fleet", **{field: value})
    assert fleet.policy({key: value, "use_dynamic_loss_scaling": True}).loss_scale.mode == "dynamic"
    constant = fleet.policy({key: value, "use_dynamic_loss_scaling": False}).loss_scale
    assert constant == LossScale.constant(1024 if field == "init" else 32768)


@pytest.mark.parametrize("key, dtype", [("use_pure_fp16", torch.float16), ("use_pure_bf16", torch.bfloat16)])
def test_pure_is_o2(key, dtype):
    policy = fleet.policy({key: True, "custom_black_list": ["softmax"], "custom_black_varnames": ["head.*"]})
    assert (policy.level, policy.dtype, policy.param_dtype, policy.master_weights) == ("O2", dtype, dtype, True)
    assert policy.loss_scale == (LossScale.like("fleet") if dtype == torch.float16 else LossScale.none())
    assert policy.explain("softmax").treatment == "fp32"
    assert policy.explain("mean").treatment == "native"  # Fleet's own black list says nothing in O2
    assert policy.storage("head.weight", "head")[0] == torch.float32
    off = {"use_pure_fp16": False, "use_pure_bf16": False, "use_fp16_guard": True, "use_optimizer_fp16": False}
    assert fleet.policy(off) == fleet.policy()
    assert fleet.policy({key: True, "use_fp16_guard": False}) == fleet.policy({key: True})


class Encoder(nn.Module):
    """What the key names are for: attention and a feed-forward block, a head that stays in FP32."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.words(x)  # (batch, tokens, 16)
        q, k, v = self.qkv(self.norm1(h)).chunk(3, dim=-1)
        h = h + self.out(functional.softmax(q @ k.transpose(1, 2) / 4, dim=-1) @ v)
        h = h + self.down(functional.gelu(self.up(self.norm2(h))))
        return self.head(h.mean(dim=1))


class Calls(torch.overrides.TorchFunctionMode):
    """Count calls by op and dtype of the result, inside the region: what runs, after the policy's casts."""

    def __init__(self):
        super().__init__()
        self.low, self.wide = {}, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            counts = self.wide if out.dtype == torch.float32 else self.low
            counts[func.__name__] = counts.get(func.__name__, 0) + 1
        return out


def batches(count):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        words = torch.randint(0, 12, (16, 5), generator=generator)
        yield words, (words.sum(dim=1) > 27).long()  # two of three classes


@pytest.mark.parametrize("pure", [False, True])
def test_a_program_with_an_inner_momentum_optimizer(pure):
    torch.manual_seed(0)
    model = Encoder()
    before = copy.deepcopy(model.state_dict())
    amp_configs = {
        "init_loss_scaling": 2.0**15,
        "incr_every_n_steps": 10,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "use_dynamic_loss_scaling": True,
        "custom_white_list": ["softmax", "gelu"],
        "custom_black_list": ["elementwise_add"] if not pure else None,
        "custom_black_varnames": ["head.weight", "head.bias"],
        "use_pure_fp16": pure,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = fleet.policy(amp_configs).evolve(emulate=False)  # emulated products are no calls of torch's
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    stored = {name: p.dtype for name, p in model.named_parameters()}
    assert stored["head.weight"] == torch.float32
    assert stored["up.weight"] == (torch.float16 if pure else torch.float32)
    losses, scales = [], []
    for number, (words, labels) in enumerate(batches(30)):
        with Calls() as calls, amp.autocast():
            loss = functional.cross_entropy(model(words), labels)
        planted = [model.up.weight.register_hook(lambda grad: grad * torch.inf)] if number in (3, 4, 17) else []
        amp.backward(loss)
        for hook in planted:
            hook.remove()
        amp.step()
        amp.zero_grad()
        losses.append(loss.item())
        scales.append(amp.stats().scale)
    assert loss.dtype == torch.float32
    assert sum(losses[-5:]) < sum(losses[:5]) / 1.5
    assert calls.low["softmax"] == 1
    assert calls.low["gelu"] == 1
    assert calls.low.get("linear") == 4
    assert calls.wide["linear"] == 1
    assert calls.wide["cross_entropy"] == 1
    if not pure:
        assert calls.wide["mean"] == 1
        assert calls.wide["add"] == 2
        assert "add" not in calls.low
    assert before.keys() == model.state_dict().keys()
    assert scales == paddles_scale(10, 2, "...XX............X............", start=2.0**15)


def paddles_scale(incr_every, decr_every, pattern, start):
    """``update_loss_scaling`` of paddle/phi/kernels/impl/amp_kernel_impl.h, step by step."""
    scale, good, bad, found = start, 0, 0, []
    for step in pattern:
        if step == "X":
            good, bad = 0, bad + 1
            if bad == decr_every:
                scale, bad = max(scale * 0.5, 1.0), 0
        else:
            bad, good = 0, good + 1
            if good == incr_every:
                scale, good = scale * 2.0, 0
        found.append(scale)
    return found


@pytest.mark.parametrize("entry", [e for e in GIVEN["traces"] if e["system"] == "paddle"], ids=lambda e: e["pattern"])
def test_the_scale_moves_as_fleets(entry):
    configs = {"init_loss_scaling": 2.0 ** GIVEN["start_log2"], "incr_every_n_steps": GIVEN["interval"]}
    configs["decr_every_n_nan_or_inf"] = GIVEN["hysteresis"]
    config = fleet.policy(configs).loss_scale
    state, scales = config.start(), []
    for step in entry["pattern"]:
        state = mezzo.scale.next_scale(state, torch.tensor(step == "X"), config)
        scales.append(state.scale.log2().item())
    assert scales == entry["log2_scale_after_step"]


def test_every_step_that_is_skipped_by_a_constant_scale_leaves_it():
    config = fleet.policy({"use_dynamic_loss_scaling": False, "init_loss_scaling": 128}).loss_scale
    state = mezzo.scale.next_scale(config.start(), torch.tensor(True), config)
    assert state.scale == 128
