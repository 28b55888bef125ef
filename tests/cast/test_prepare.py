"""prepare: what a model stores, which rule each module, parameter and op of it gets, and undoing it."""

import copy

import pytest
import torch
from torch import nn

import mezzo
from mezzo import Policy, PolicyError
from mezzo.cast.model import refusals

from .models import assert_same, data

WIDE, BF16 = torch.float32, torch.bfloat16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("mask", torch.ones(8))
        self.register_buffer("rotary", torch.ones(8), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("wide", torch.ones(2, dtype=torch.float64))

    def forward(self, tokens):
        h = self.embed(tokens)  # (batch, tokens, channels)
        h = torch.relu(self.norm(self.conv(h.mT))).mT * self.mask
        return self.head(self.layer_norm(h))


def dtypes(model):
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


tokens = torch.arange(20).reshape(2, 10) % 10


# Storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.float16, BF16])
@pytest.mark.parametrize("level, norm", [("O2", WIDE), ("O3", None)])
def test_conversion_stores_what_the_design_says_and_remove_undoes_it(level, norm, low):
    """Parameters keep their identity, so that an optimizer's references stay."""
    model = Net()
    before, kept = dtypes(model), dict(model.named_parameters())
    exact = copy.deepcopy(model.state_dict())
    handle = mezzo.prepare(model, getattr(Policy, level)(low))
    assert dtypes(model) == {
        "embed.weight": low, "conv.weight": low, "conv.bias": low,
        "norm.weight": norm or low, "norm.bias": norm or low,
        "norm.running_mean": WIDE, "norm.running_var": WIDE, "norm.num_batches_tracked": torch.int64,
        "layer_norm.weight": low, "layer_norm.bias": low, "mask": low,
        "rotary": WIDE, "count": torch.int64, "wide": torch.float64,
    }  # fmt: skip
    assert torch.equal(model.conv.weight, exact["conv.weight"].to(low))
    assert model.head.weight is model.embed.weight
    assert all(param is kept[name] for name, param in model.named_parameters())
    out = model(tokens)
    assert out.dtype == WIDE
    out.sum().backward()
    assert model.embed.weight.grad.dtype == low
    handle.remove()
    assert dtypes(model) == before
    assert model.embed.weight.grad.dtype == WIDE
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    if low == BF16:
        assert torch.equal(model.conv.weight, exact["conv.weight"])
    mezzo.prepare(model, "O1")


def test_low_parameters_in_the_policy_s_own_dtype_are_welcome_and_complex_ones_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    handle = mezzo.prepare(model, "O2,dtype=float16,fp32_module=1")
    assert [layer.weight.dtype for layer in model] == [torch.float16, WIDE]
    handle.remove()
    assert [layer.weight.dtype for layer in model] == [torch.float16] * 2
    for policy in ("O1,emulate=true", "O2,emulate=true"):
        model, x = nn.Linear(4, 4, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64)
        plain = model(x)
        with mezzo.prepare(model, policy).autocast():
            assert torch.equal(model(x), plain)
        assert model.weight.dtype == torch.complex64


def test_a_conversion_that_fails_half_way_is_undone(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def out_of_memory():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model[1], "flatten_parameters", out_of_memory)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of memory"):
        mezzo.prepare(model, "O2,dtype=bfloat16")
    assert set(dtypes(model).values()) == {WIDE}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


# Norms with running statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", ["true", "false"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_batch_norm_statistics_follow_the_fp32_formula(level, emulate):
    """In O3 the weights are low and the statistics FP32: torch's kernel alone would refuse that."""
    model = nn.BatchNorm2d(8, momentum=0.5)
    mezzo.prepare(model, f"{level},dtype=bfloat16,emulate={emulate}")
    images = data(16, 8, 4, 4)
    model(images)
    given = images.bfloat16().float() if level == "O3" else images  # which has low weights of its own
    torch.testing.assert_close(model.running_mean, 0.5 * given.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    model.eval()
    assert torch.isfinite(model(images)).all()


@pytest.mark.parametrize("rule", ["low=batch_norm", "fp32=batch_norm", "low_module=0", "fp32_module=0"])
def test_rules_on_batch_norm_leave_its_statistics_alone(rule):
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=1.0))
    x = data(16, 8) + 3
    with mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=true,{rule}").autocast():
        out = model(x)
    assert out.dtype == (BF16 if rule.startswith("low") else WIDE)
    torch.testing.assert_close(model[0].running_mean, x.mean(0), rtol=1e-2, atol=0)


# Modules with rules -------------------------------------------------------------------------------------


class Ops(nn.Module):
    """Functions alone, whose dtypes are kept."""

    def forward(self, x):
        self.inside = torch.exp(x).dtype, x.softmax(-1).dtype, (x @ x.mT).dtype
        return torch.exp(x)


TREATMENTS = [
    ("low_module=0", (BF16, BF16, BF16), BF16),
    ("fp32_module=0", (WIDE, WIDE, WIDE), WIDE),
    ("fp32_math=*@0", (BF16, BF16, BF16), BF16),
    ("native=*@0", (BF16, BF16, BF16), BF16),
    ("low=softmax@0", (WIDE, BF16, BF16), WIDE),
    ("low=softmax@1", (WIDE, WIDE, BF16), WIDE),
]


@pytest.mark.parametrize("rule, inside, after", TREATMENTS)
def test_every_treatment_of_a_module_or_its_ops(rule, inside, after):
    model = nn.Sequential(Ops(), nn.Identity())
    with mezzo.prepare(model, f"O1,dtype=bfloat16,{rule}").autocast():
        out = model[0](torch.ones(2, 2).bfloat16())
    assert (model[0].inside, out.dtype) == (inside, after)
    assert model(torch.ones(2, 2)).dtype == WIDE  # nothing is cast outside any region


class Stack(nn.Module):
    """Calls the parts of a container, which is never called itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)])
        self.tail = nn.Linear(8, 8)

    def forward(self, x):
        self.seen = []
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return self.tail(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_rule_on_a_container_reaches_its_modules(level):
    model = Stack()
    with mezzo.prepare(model, f"{level},bf16,emulate=true,output_dtype=none,fp32_module=blocks").autocast():
        out = model(x := data(2, 8))
    assert model.blocks[0][0].weight.dtype == WIDE
    assert (model.seen, out.dtype) == ([WIDE] * 2, BF16)
    hidden = model.blocks[1](model.blocks[0](x.bfloat16().float() if level == "O2" else x))
    torch.testing.assert_close(out.float(), model.tail(hidden).float(), rtol=0.02, atol=0.02)


class Island(nn.Module):
    """A part that may be low, a weight of its own, and functions of both, whose dtypes are kept."""

    def __init__(self):
        super().__init__()
        self.part, self.weight = nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x):
        part = self.part(x)
        product, after = part.exp() @ self.weight, torch.nn.functional.linear(part, torch.eye(8))
        self.dtypes = part.dtype, product.dtype, after.dtype
        return product


ISLANDS = [
    ("fp32_module=0,fp32_param=*weight", WIDE),
    ("low_module=0.part,fp32_module=0", BF16),
    ("low_param=0.part.*,fp32_module=0", BF16),
    ("low=linear@0.part,fp32_module=0", BF16),
]


@pytest.mark.parametrize("level", ["O1,bf16,emulate=true", "O2,bf16,emulate=true", "O2,bf16,emulate=false"])
def test_what_is_low_inside_a_module_in_fp32_stays_alone(level):
    for rules, part in ISLANDS:
        model = nn.Sequential(Island(), nn.Linear(8, 2))
        with mezzo.prepare(model, f"{level},{rules}").autocast():
            model(data(4, 8)).sum().backward()
        assert model[0].dtypes == (part, WIDE, WIDE), rules


@pytest.mark.parametrize("rule, inside, around", [
    ("fp32_module=head", WIDE, BF16), ("fp32=linear@head", WIDE, BF16), ("low_module=head,fp32=linear", BF16, WIDE),
])  # fmt: skip
def test_parts_that_are_called_by_themselves_follow_the_rule_of_what_they_are_in(rule, inside, around):
    model = nn.Sequential()
    model.body, model.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    with mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=true,{rule}").autocast():
        whole = model.head(h := model.body(data(2, 8)))
        h = model.head[0](h)
        last = model.head[1][0](h)
        after = model.body(last)
    assert (whole.dtype, h.dtype, last.dtype, after.dtype) == (inside, inside, inside, around)
    assert torch.equal(whole, last)


def test_a_rule_that_cannot_reach_inside_is_reported(caplog):
    mezzo.prepare(nn.Sequential(nn.LSTM(4, 4)), "O1,dtype=bfloat16,fp32=tanh")
    assert "the rule fp32=tanh does not reach tanh inside 0" in caplog.text
    caplog.clear()
    mezzo.prepare(nn.Sequential(nn.Linear(4, 4)), "O1,dtype=bfloat16,fp32=tanh")
    assert caplog.text == ""


def test_a_rule_may_speak_of_an_op_that_this_version_of_torch_lacks(monkeypatch):
    monkeypatch.setattr(refusals, "functions", lambda op: ())
    with pytest.raises(PolicyError, match="the op glob 'gelu' matches no op"):
        mezzo.prepare(Net(), "O1,native=gelu")  # torch has it, and nothing would cast it
    monkeypatch.setattr(refusals, "callables", lambda op: ())
    mezzo.prepare(Net(), "O1,native=gelu").remove()


# Parameters with rules ----------------------------------------------------------------------------------


class Views(nn.Module):
    """Reads a weight through views and in a list, and a scale."""

    def __init__(self):
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.full((8,), 1 + 2**-20))

    def forward(self, x):
        self.seen = x @ self.w.T, torch.einsum("ij,jk->ik", [x, self.w]), x[:, :2] @ self.w[:2]
        return self.seen[0] * self.scale


def test_parameter_rules_store_and_treat_and_follow_views_and_lists():
    model = Views()
    mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(params=["scale"]))
    assert (model.scale.dtype, model.w.dtype) == (WIDE, BF16)
    assert model.scale[0] == 1 + 2**-20
    assert model(data(2, 8)).dtype == WIDE
    model = Views()
    with mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true,fp32_param=w").autocast():
        model(data(4, 8))
    assert [out.dtype for out in model.seen] == [WIDE] * 3


class Chain(nn.Module):
    """Two layers, and the dtypes of what they return."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 1 + 2**-20))

    def forward(self, x):
        first = self.first(x)
        second = self.second(first)
        shifted = first * self.shift
        self.seen = (first.dtype, second.dtype, shifted.dtype)
        return second + shifted


@pytest.mark.parametrize("rule", ["fp32_param=second.weight", "fp32_param=shift", "fp32_param=*.bias+shift"])
@pytest.mark.parametrize(
    "policy", ["O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,lists=device"]
)
def test_a_parameter_s_rule_speaks_about_the_tensor_that_stands_in_its_place(policy, rule):
    """torch.func.functional_call puts others there, plain or those of a transform."""
    model, x = Chain(), data(3, 4)
    handle = mezzo.prepare(model, f"{policy},{rule}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def loss(given, x):
        with handle.autocast():
            return torch.func.functional_call(model, given, (x,)).float().square().sum()

    with handle.autocast():
        expected = model(x).float().square().sum()
    seen = model.seen
    is_low = policy.startswith("O2")
    assert is_low or WIDE in seen
    assert (model.shift[0] == 1) == (is_low and "shift" not in rule)
    assert seen[2] == (BF16 if is_low else WIDE)  # of what is not low it meets
    wanted = torch.autograd.grad(expected, list(tensors.values())[:4])
    assert torch.equal(loss(copies, x), expected)
    assert model.seen == seen
    parameters, buffers = dict(list(copies.items())[:4]), {"shift": copies["shift"]}
    gradients = torch.func.grad(lambda given: loss({**given, **buffers}, x))(parameters)
    assert model.seen == seen
    assert_same(gradients.values(), wanted)
    if "lists=device" not in policy:  # torch's own autocast leaves the products of a vmap in FP32
        rows = torch.func.vmap(lambda row: loss(copies, row))(x)
        assert model.seen == seen
        torch.testing.assert_close(rows.sum(), expected, rtol=0.02, atol=0)


def test_a_parameter_s_rule_outlives_the_parameter():
    model, x = Chain(), data(3, 4)
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true,fp32_param=second.weight")
    model.second.weight = nn.Parameter(torch.randn(4, 4))
    with handle.autocast():
        model(x)
    assert model.seen == (BF16, WIDE, WIDE)
    model.second.weight = None
    with handle.autocast(), pytest.raises(TypeError):
        model(x)
