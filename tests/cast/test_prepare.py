"""prepare: what a model stores, which rule each module, parameter and op of it gets, and undoing it."""

import copy
import math

import pytest
import torch
from torch import nn

import mezzo
from mezzo import Policy, PolicyError, StateError
from mezzo.cast import region
from mezzo.cast.model import checks, prepare
from mezzo.weights import Halves, halves

from ..support.refusals import refused
from .models import assert_same, data, seeded

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


def in_halves(model):
    return {name: p.hi.dtype for name, p in model.named_parameters() if isinstance(p, Halves)}


@pytest.mark.parametrize("low", [torch.float16, BF16])
def test_o2_stores_large_parameters_in_halves_and_remove_undoes_it(low):
    """Parameters keep their identity, so that an optimizer's references stay."""
    model = Net()
    before, kept, names = dtypes(model), dict(model.named_parameters()), [vars(m).keys() for m in Net().modules()]
    exact = copy.deepcopy(model.state_dict())
    handle = mezzo.prepare(model, Policy.O2(low))
    assert in_halves(model) == {"embed.weight": low, "conv.weight": low}
    assert dtypes(model) == before
    assert torch.equal(model.conv.weight.hi, exact["conv.weight"].to(low))
    assert model.conv.weight.lo.dtype == torch.int16
    assert model.head.weight is model.embed.weight
    assert all(param is kept[name] for name, param in model.named_parameters())
    assert str(halves(model)) == "272 of 312 elements in halves: 544 + 544 bytes, and 160 bytes plain"
    model(tokens).sum().backward()
    assert model.embed.weight.grad.dtype == WIDE
    handle.remove()
    assert dtypes(model) == before
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(param is kept[name] for name, param in model.named_parameters())
    assert model.embed.weight.grad.dtype == WIDE
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert [vars(m).keys() for m in model.modules()] == names
    for name, param in model.named_parameters():  # FP16's halves are exact from 2^-16 on
        assert torch.equal(param, exact[name]) if low == BF16 else (param - exact[name]).abs().max() <= 2**-40, name
    mezzo.prepare(model, "O1")


class Sphere(nn.Parameter):
    """A parameter of a class of its own, as a manifold's."""


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in {"scalar": (), "vector": (8,), "row": (1, 8), "column": (8, 1), "matrix": (2, 2)}.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.sphere, self.complex = Sphere(torch.eye(4)), nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
        self.register_buffer("table", torch.ones(4, 4))


STORED = {
    "O1,bf16": set(), "O2,bf16": {"matrix", "frozen"}, "O2,bf16,fp32_param=matrix": {"frozen"},
    "O2,bf16,low_param=vector+scalar": {"matrix", "frozen", "vector", "scalar"}, "O1,bf16,low_param=row": {"row"},
    "O2,bf16,low_param=*": {"scalar", "vector", "row", "column", "matrix", "frozen"}, "O2,bf16,fp32_param=*": set(),
    "O2,bf16,low_param=matrix,fp32_param=*": {"matrix"},
}  # fmt: skip


@pytest.mark.parametrize("policy", STORED)
def test_which_parameters_are_stored_in_halves(policy):
    """Those with two dimensions longer than one, and those that a rule names; of torch's own class, and real."""
    model = Shapes()
    mezzo.prepare(model, policy)
    assert in_halves(model).keys() == STORED[policy]
    assert type(model.sphere) is Sphere
    assert type(model.table) is torch.Tensor
    assert not model.frozen.requires_grad


def test_modules_that_are_kept_in_fp32_are_stored_plainly_but_for_low_ones_in_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.LSTM(4, 4))
    mezzo.prepare(model, "O2,bf16,low_module=1.1,fp32_module=1")
    assert in_halves(model).keys() == {"0.weight", "1.1.weight", "2.weight_ih_l0", "2.weight_hh_l0"}


def test_models_of_one_session_may_share_a_module():
    shared = nn.Linear(4, 4)
    models = nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), shared)
    weight, value = shared.weight, shared.weight.detach().clone()
    params = list(dict.fromkeys([*models[0].parameters(), *models[1].parameters()]))
    amp = mezzo.MixedPrecision(list(models), torch.optim.SGD(params, lr=0.1), "O2,bf16")
    assert [in_halves(model).keys() for model in models] == [{"0.weight", "1.weight"}] * 2
    amp.close()
    assert shared.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, value)


@pytest.mark.parametrize("policy", ["O2,bf16", "O2,fp16", "O2,fp16,fp32_module=1"])
def test_a_model_that_comes_in_the_policy_s_own_format_is_fp32_from_then_on(policy):
    dtype = Policy.of(policy).dtype
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    exact = {name: value.float() for name, value in model.state_dict().items()}
    handle = mezzo.prepare(model, policy)
    assert set(dtypes(model).values()) == {WIDE, torch.int64}
    assert in_halves(model).keys() == {"0.weight"}
    assert model[0].weight.lo.count_nonzero() == 0
    assert all(torch.equal(value.float(), exact[name]) for name, value in model.state_dict().items())
    with handle.autocast():
        assert model(data(3, 4)).isfinite().all()
    handle.remove()
    assert set(dtypes(model).values()) == {WIDE, torch.int64}
    assert all(torch.equal(value.float(), exact[name]) for name, value in model.state_dict().items() if "0." in name)


def test_a_model_that_comes_low_stays_so_under_o1():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    before = dtypes(model)
    mezzo.prepare(model, "O1,bf16,fp32_param=0.weight")
    assert dtypes(model) == {**before, "0.weight": WIDE}


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true"])
def test_complex_models_stay_as_they_are(policy):
    model, x = nn.Linear(4, 4, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64)
    plain = model(x)
    with mezzo.prepare(model, policy).autocast():
        assert torch.equal(model(x), plain)
    assert model.weight.dtype == torch.complex64


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_a_cast_of_a_prepared_model_is_refused(cast):
    model = nn.Sequential(nn.Linear(4, 4))
    handle = mezzo.prepare(model, "O2,bf16")
    with refused(StateError, "a converted model is cast", "float32 → ", "or prepared.remove()", parts=(model,)):
        getattr(model, cast)()
    assert in_halves(model.float()).keys() == {"0.weight"}
    handle.remove()
    assert getattr(model, cast)()[0].weight.dtype != WIDE


@pytest.mark.parametrize("level, came", [("O2", WIDE), ("O2", BF16), ("O3", WIDE)])
def test_a_conversion_that_fails_half_way_is_undone(monkeypatch, level, came):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)).to(came)
    before, kept = copy.deepcopy(model.state_dict()), dict(model.named_parameters())

    def out_of_memory(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prepare, "hide_storage", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        mezzo.prepare(model, f"{level},dtype=bfloat16")
    assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, came)}
    assert all(p is kept[name] and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


# Casts of weights ---------------------------------------------------------------------------------------


class Widths(nn.Module):
    """Products whose weights have a size of their own; one is used twice."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        return self.down((self.up(x) + self.up(x.square())).relu())


def copies(size, call):
    """Count the copies of as many numbers as a weight has, below all that Python sees."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profiled:
        out = call()
    shapes = [event.input_shapes[0] for event in profiled.events() if event.name == "aten::copy_"]
    return sum(math.prod(shape) == size for shape in shapes), out


@pytest.mark.parametrize("policy", [
    "dtype=bfloat16,emulate=false", "dtype=bfloat16,emulate=false,lists=device", "dtype=bfloat16,emulate=true",
    "dtype=float16,emulate=true"])  # fmt: skip
@pytest.mark.parametrize("region", ["mezzo's", "torch's"])
def test_a_cast_of_a_weight_costs_nothing_under_any_region(region, policy):
    """O1 casts each of two once; what emulation widens it widens under both."""
    runs = {}
    for level in ("O1", "O2"):
        model, x, kept = seeded(Widths), data(3, 24), []
        for param in model.parameters():  # which both levels round alike
            param.data = param.data.bfloat16().float()
        handle = mezzo.prepare(model, f"{level},{policy}")
        around = handle.autocast() if region == "mezzo's" else torch.autocast("cpu", handle.policy.dtype)
        with around, torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            count, out = copies(24 * 48, lambda model=model, x=x: model(x))
        out.float().square().sum().backward()
        runs[level] = count, [out, *(p.grad for p in model.parameters())]
        low = [t for t in kept if t.numel() == 24 * 48 and t.dtype == handle.policy.dtype]
        assert low
        assert level == "O1" or all(map(torch._C._is_cow_tensor, low))  # nor has any been copied since
    assert runs["O1"][0] - runs["O2"][0] == 2
    if "emulate=false" in policy:
        assert runs["O2"][0] == 0
    assert_same(runs["O2"][1], runs["O1"][1])


# O3 -----------------------------------------------------------------------------------------------------


class Various(nn.Module):
    """Norms, buffers, tied weights, attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.attend = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2)
        self.layer_norm, self.head, self.tail = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tail.weight = self.head.weight
        self.register_buffer("shift", data(8))
        self.register_buffer("rotary", data(8), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        h = self.norm(self.conv(x)).mT * self.rotary + self.shift
        h = self.attend(h, h, h, need_weights=False)[0]
        return self.tail(self.head(self.layer_norm(h)).softmax(-1).exp())


@pytest.mark.parametrize("low", [torch.float16, BF16])
def test_o3_is_what_model_to_computes_and_gives_out_fp32(low):
    model, plain, x = seeded(Various), seeded(Various).to(low), data(2, 4, 6)
    before, kept = dtypes(model), dict(model.named_parameters())
    handle = mezzo.prepare(model, Policy.O3(low, emulate=False))
    assert dtypes(model) == dtypes(plain)
    assert set(dtypes(model).values()) == {low, torch.int64}
    assert in_halves(model) == {}
    for training in (True, False):
        model.train(training)
        plain.train(training)
        with handle.autocast():
            out = model(x)
        wanted = plain(x.to(low)).float()
        out.square().sum().backward()
        wanted.square().sum().backward()
        params, theirs = (dict(net.named_parameters(), **dict(net.named_buffers())) for net in (model, plain))
        assert_same([out], [wanted])
        for name, value in params.items():
            assert torch.equal(value, theirs[name]), name
            assert value.grad is None or torch.equal(value.grad, theirs[name].grad), name
    values = {name: param.detach().float() for name, param in model.named_parameters()}
    handle.remove()
    assert dtypes(model) == before
    assert all(p is kept[name] and torch.equal(p, values[name]) for name, p in model.named_parameters())


def test_what_has_taken_the_place_of_an_o3_models_tensors_goes_back_too():
    """``model.to(device)`` makes other buffers, and a program other parameters."""
    model = seeded(Various)
    before, handle = dtypes(model), mezzo.prepare(model, "O3,bf16,fp32_module=head")
    model._apply(torch.clone)
    model.shift = nn.Parameter(torch.ones_like(model.shift))
    handle.remove()
    assert dtypes(model) == before
    assert torch.equal(model.shift, torch.ones_like(model.shift))


def test_rules_keep_parts_of_an_o3_model_in_fp32():
    """Modules with all that they have, parameters, buffers, and norms with running statistics."""
    model = seeded(Various)
    mezzo.prepare(model, "O3,bf16,keep_batchnorm_fp32=true,fp32_module=head,fp32_param=shift")
    assert {name for name, dtype in dtypes(model).items() if dtype == WIDE} == {
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "head.weight", "head.bias", "shift",
    }  # fmt: skip


# Norms with running statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O2,emulate=true", "O2,emulate=false", "O3,keep_batchnorm_fp32=true"])
def test_batch_norm_statistics_follow_the_fp32_formula(policy):
    model = nn.BatchNorm2d(8, momentum=0.5)
    with mezzo.prepare(model, f"{policy},dtype=bfloat16").autocast():
        model(images := data(16, 8, 4, 4))
        torch.testing.assert_close(model.running_mean, 0.5 * images.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
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
    with mezzo.prepare(model, f"{level},bf16,emulate=true,fp32_module=blocks").autocast():
        out = model(x := data(2, 8))
    assert model.blocks[0][0].weight.dtype == WIDE
    assert (model.seen, out.dtype) == ([WIDE] * 2, BF16)
    hidden = model.blocks[1](model.blocks[0](x))
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
    ("low_param=0.part.*,fp32_module=0", WIDE),  # which says how it is stored
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
    monkeypatch.setattr(checks, "functions", lambda op: ())
    with pytest.raises(PolicyError, match="the op glob 'gelu' matches no op"):
        mezzo.prepare(Net(), "O1,native=gelu")  # torch has it, and nothing would cast it
    monkeypatch.setattr(checks, "callables", lambda op: ())
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
    mezzo.prepare(model, Policy.O3("bfloat16").keep_fp32(params=["scale"]))
    assert (model.scale.dtype, model.w.dtype) == (WIDE, BF16)
    assert model.scale[0] == 1 + 2**-20
    assert model(data(2, 8)).dtype == WIDE
    for level, rule, dtype in (("O1", "fp32_param=w", WIDE), ("O2", "fp32_param=w", WIDE), ("O2", "low_param=w", BF16)):
        model = Views()
        with mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=true,{rule}").autocast():
            model(data(4, 8))
        assert [out.dtype for out in model.seen] == [dtype] * 3


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.full((2,), 256.0))

    def forward(self, x):
        self.seen = self.seen + 1
        return self.layer(x)


def test_a_counter_that_a_rule_keeps_in_fp32_counts_on():
    """BF16 holds 256 and 258."""
    for policy, wanted in (("O3,bf16", 256), ("O3,bf16,fp32_param=seen", 257), ("O2,bf16", 257)):
        model = Counter()
        with mezzo.prepare(model, policy).autocast():
            model(torch.ones(1, 2))
        assert model.seen.tolist() == [wanted] * 2


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
    assert seen[2] == WIDE  # of a low activation and an FP32 buffer
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


def test_a_region_is_resolved_once_and_again_where_a_model_has_moved(monkeypatch):
    resolved, find = [], region.find_differences
    monkeypatch.setattr(region, "find_differences", lambda *given: resolved.append(given) or find(*given))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,bf16,emulate=true")
    for number in range(3):
        with amp.autocast():
            loss = model(torch.ones(3, 4)).float().sum()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        assert not (resolved and number)
        resolved.clear()
    model.to("meta")
    amp.autocast()
    assert len(resolved) == 1
    amp.close()
