"""prepare: conversion, casting at modules, module and parameter rules, and undoing it."""

import collections
import copy
import dataclasses
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import mezzo
from mezzo import Policy, PolicyError, StateError, UnsupportedError
from mezzo.cast.model import refusals
from mezzo.cast.nested import cast_floating

LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level, norm", [("O2", torch.float32), ("O3", None)])
def test_conversion_stores_what_the_design_says(level, norm, dtype):
    model, low = Net(), LOW[dtype]
    mezzo.prepare(model, getattr(Policy, level)(dtype))
    assert dtypes(model) == {
        "embed.weight": low, "conv.weight": low, "conv.bias": low,
        "norm.weight": norm or low, "norm.bias": norm or low,
        "norm.running_mean": torch.float32, "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
        "layer_norm.weight": low, "layer_norm.bias": low, "mask": low,
        "rotary": torch.float32, "count": torch.int64, "wide": torch.float64,
    }  # fmt: skip
    assert model.head.weight is model.embed.weight
    out = model(tokens)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert model.embed.weight.grad.dtype == low


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_convert_nothing(level):
    model = Net()
    before = {name: t.data_ptr() for name, t in model.named_parameters()}
    mezzo.prepare(model, level)
    assert set(dtypes(model).values()) <= {torch.float32, torch.float64, torch.int64}
    assert {name: t.data_ptr() for name, t in model.named_parameters()} == before


def test_parameters_keep_their_identity_and_optimizers_their_references():
    model = Net()
    before = dict(model.named_parameters())
    mezzo.prepare(model, "O2,dtype=bfloat16")
    assert all(param is before[name] for name, param in model.named_parameters())


def test_low_precision_weights_are_the_rounded_originals():
    model = nn.Linear(64, 64)
    original = model.weight.detach().clone()
    mezzo.prepare(model, "O2,dtype=float16")
    assert torch.equal(model.weight, original.half())


@dataclasses.dataclass(frozen=True)
class Batch:
    pixels: torch.Tensor
    labels: torch.Tensor
    name: str = "batch"


Pair = collections.namedtuple("Pair", "left right")


class Echo(nn.Module):
    """Returns what it is given, after noting its floating dtypes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return {"args": args, **kwargs}


def test_inputs_and_outputs_are_cast_through_nested_containers():
    model = Echo()
    mezzo.prepare(model, "O2,dtype=bfloat16")
    value = torch.ones(2)
    packed = pack_padded_sequence(torch.ones(2, 3, 1), [3, 2], batch_first=True)
    out = model(
        [value, (value, torch.arange(2))],
        Pair(value, None),
        collections.OrderedDict(a=value.double(), b=value.to(torch.complex64), c=value.half()),
        Batch(value, torch.arange(2)),
        collections.UserDict(x=value),
        packed=packed,
        text="unchanged",
    )
    (listed, pair, ordered, batch, user), kwargs = model.seen
    low = torch.bfloat16
    assert (listed[0].dtype, listed[1][0].dtype, listed[1][1].dtype) == (low, low, torch.int64)
    assert (type(pair), pair.left.dtype, pair.right) == (Pair, low, None)
    assert type(ordered) is collections.OrderedDict
    assert [t.dtype for t in ordered.values()] == [torch.float64, torch.complex64, low]
    assert (type(batch), batch.pixels.dtype, batch.labels.dtype, batch.name) == (
        Batch,
        low,
        torch.int64,
        "batch",
    )
    assert (type(user), user["x"].dtype) == (collections.UserDict, low)
    assert kwargs["packed"].data.dtype == low
    assert kwargs["text"] == "unchanged"
    assert out["args"][0][0].dtype == out["args"][3].pixels.dtype == out["packed"].data.dtype == torch.float32
    assert out["args"][2]["a"].dtype == torch.float64
    assert value.dtype == torch.float32


def test_containers_of_the_caller_are_not_changed():
    mine = {
        "x": torch.ones(2),
        "user": collections.UserDict(y=torch.ones(1)),
        "data": Batch(torch.ones(1), torch.ones(1)),
    }
    cast = cast_floating(mine, torch.float16)
    assert mine["x"].dtype == mine["user"]["y"].dtype == mine["data"].pixels.dtype == torch.float32
    assert cast["x"].dtype == cast["user"]["y"].dtype == cast["data"].pixels.dtype == torch.float16


def test_output_dtype_none_leaves_outputs():
    model = nn.Linear(4, 4)
    mezzo.prepare(model, "O2,dtype=bfloat16,output_dtype=none")
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("emulate", [True, False])
def test_batch_norm_statistics_follow_the_fp32_formula(emulate):
    """In O3 the weights are low and the statistics FP32: torch's kernel alone would refuse that."""
    for level in ("O2", "O3"):
        model = nn.BatchNorm2d(8, momentum=0.5)
        mezzo.prepare(model, f"{level},dtype=bfloat16,emulate={str(emulate).lower()}")
        images = torch.randn(16, 8, 4, 4)
        model(images)
        given = images.bfloat16().float() if level == "O3" else images  # which has low weights of its own
        mean = given.mean((0, 2, 3))
        torch.testing.assert_close(model.running_mean, 0.5 * mean, rtol=1e-4, atol=1e-5)
        model.eval()
        assert torch.isfinite(model(images)).all()


def test_module_rules_in_o1():
    model = nn.Sequential(collections.OrderedDict(body=nn.Linear(8, 8), head=nn.Sequential(nn.Linear(8, 8))))
    seen = {}
    model.body.register_forward_hook(lambda m, a, out: seen.update(body=out.dtype))
    model.head[0].register_forward_hook(lambda m, a, out: seen.update(head=(a[0].dtype, out.dtype)))
    handle = mezzo.prepare(model, Policy.O1("bfloat16").keep_fp32(modules=["head"]))
    with handle.autocast():
        out = model(torch.ones(2, 8))
    assert seen == {"body": torch.bfloat16, "head": (torch.float32, torch.float32)}
    assert out.dtype == torch.float32
    reference = model.head(model.body(torch.ones(2, 8)).bfloat16().float())
    torch.testing.assert_close(out, reference, atol=0.02, rtol=0)


def test_module_rules_in_o2_store_fp32_and_the_next_module_goes_on_low():
    model = nn.Sequential(collections.OrderedDict(head=nn.Linear(8, 8), tail=nn.Linear(8, 8)))
    seen = {}
    model.head.register_forward_hook(lambda m, a, out: seen.update(head=(a[0].dtype, out.dtype)))
    mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(modules=["head"]))
    assert model.head.weight.dtype == torch.float32
    model.tail.register_forward_pre_hook(lambda m, a: seen.update(tail=a[0].dtype))
    model(torch.ones(2, 8))
    assert seen == {"head": (torch.float32, torch.float32), "tail": torch.bfloat16}


def test_op_rules_scoped_to_a_module():
    class Block(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    model = nn.ModuleDict({"a": Block(), "b": Block()})
    handle = mezzo.prepare(model, Policy.parse("O1,dtype=bfloat16,low=softmax@a"))
    x = torch.ones(2, 4).bfloat16()
    with handle.autocast():
        assert model["a"](x).dtype == torch.bfloat16
        assert model["b"](x).dtype == torch.float32


@pytest.mark.parametrize("rule, inside, after", [
    ("low_module=0", torch.bfloat16, torch.bfloat16), ("fp32_module=0", torch.float32, torch.float32),
    ("fp32_math=*@0", torch.bfloat16, torch.bfloat16), ("native=*@0", torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_every_treatment_of_a_module_or_its_ops(rule, inside, after):
    class Exp(nn.Module):
        def forward(self, x):
            self.inside = torch.exp(x).dtype
            return torch.exp(x)

    model = nn.Sequential(Exp())
    handle = mezzo.prepare(model, Policy.parse(f"O1,dtype=bfloat16,{rule}"))
    with handle.autocast():
        out = model(torch.ones(2).bfloat16())
    assert (model[0].inside, out.dtype) == (inside, after)
    assert model(torch.ones(2)).dtype == torch.float32  # nothing is cast outside any region


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


@pytest.mark.parametrize("level", ["O1,bf16,emulate=true", "O2,bf16,emulate=true", "O2,bf16,emulate=false"])
@pytest.mark.parametrize(
    "rules, part",
    [
        ("fp32_module=0,fp32_param=*weight", torch.float32),
        ("low_module=0.part,fp32_module=0", torch.bfloat16),
        ("low_param=0.part.*,fp32_module=0", torch.bfloat16),
        ("low=linear@0.part,fp32_module=0", torch.bfloat16),
    ],
)
def test_what_is_low_inside_a_module_in_fp32_stays_alone(level, rules, part):
    model = nn.Sequential(Island(), nn.Linear(8, 2))
    with mezzo.prepare(model, f"{level},{rules}").autocast():
        model(torch.randn(4, 8)).sum().backward()
    assert model[0].dtypes == (part, torch.float32, torch.float32)


def test_a_banned_op_of_a_module_says_so():
    model = nn.Sequential(nn.Linear(2, 2))
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,ban=*@0")
    with pytest.raises(UnsupportedError, match="linear is banned"), handle.autocast():
        model(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu")


def test_parameter_rules_store_and_treat():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8, bias=False)
            self.scale = nn.Parameter(torch.full((8,), 1 + 2**-20))

        def forward(self, x):
            return self.fc(x) * self.scale

    model = Scaled()
    mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(params=["scale"]))
    assert (model.scale.dtype, model.fc.weight.dtype) == (torch.float32, torch.bfloat16)
    assert model(torch.ones(2, 8)).dtype == torch.float32
    model = Scaled()
    handle = mezzo.prepare(model, Policy.O1("bfloat16").keep_fp32(params=["fc.weight"]))
    with handle.autocast():
        assert model.fc(torch.ones(2, 8)).dtype == torch.float32


def test_remove_undoes_everything():
    model = Net()
    before = dtypes(model)
    handle = mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(modules=["head"]))
    handle.remove()
    assert dtypes(model) == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert model(tokens).dtype == torch.float32
    mezzo.prepare(model, "O1")


def test_copies_and_pickles_of_a_prepared_model_are_plain_fp32_models():
    model = Net()
    expected = model(tokens)
    mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(modules=["layer_norm"], params=["conv.bias"]))
    assert not torch.equal(model(tokens), expected)
    assert torch.equal(copy.deepcopy(model)(tokens), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), expected)


def test_an_exception_in_the_model_leaves_no_region():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ZeroDivisionError

    model = nn.Sequential(Broken())
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true,fp32_module=0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_threads_may_run_one_prepared_model():
    model = Net().eval()
    mezzo.prepare(model, Policy.O2("bfloat16").keep_fp32(modules=["head"]))
    expected, failures = model(tokens), []

    def run():
        for _ in range(10):
            if not torch.equal(model(tokens), expected):
                failures.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def half_parameters():
    return nn.Linear(4, 4).half()


def held_gradient():
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    return model


def prepared():
    model = nn.Linear(4, 4)
    mezzo.prepare(model, "O2,dtype=bfloat16")
    return model


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true"])
def test_complex_parameters_stay_what_they_are(policy):
    model = nn.Linear(4, 4, dtype=torch.complex64)
    x = torch.randn(2, 4, dtype=torch.complex64)
    plain = model(x)
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        assert torch.equal(model(x), plain)
    assert model.weight.dtype == torch.complex64


def test_a_rule_may_speak_of_an_op_that_this_version_of_torch_lacks(monkeypatch):
    monkeypatch.setattr(refusals, "functions", lambda op: ())
    with pytest.raises(PolicyError, match="the op glob 'gelu' matches no op"):
        mezzo.prepare(Net(), "O1,native=gelu")  # torch has it, and nothing would cast it
    monkeypatch.setattr(refusals, "callables", lambda op: ())
    mezzo.prepare(Net(), "O1,native=gelu").remove()


def test_hooks_lie_in_memory_in_the_order_in_which_they_run():
    """Dynamo of torch 2.11 counts them so, and found one hook's fields in another."""
    model = Net()
    model.embed.register_forward_pre_hook(lambda *_: None)
    mezzo.prepare(model, "O2,dtype=bfloat16,fp32=softmax@embed")
    for module in model.modules():
        hooks = module._forward_pre_hooks
        assert list(dict.keys(hooks)) == list(hooks)
    assert len(model.embed._forward_pre_hooks) > 1


@pytest.mark.parametrize(
    "build, policy, error, says",
    [
        (lambda: nn.Linear(4, 4).double(), "O2", UnsupportedError, "float64 parameters"),
        (half_parameters, "O2,dtype=bfloat16", UnsupportedError, "already in a low precision"),
        (held_gradient, "O2", StateError, "hold gradients"),
        (prepared, "O2,dtype=bfloat16", StateError, "prepared already"),
        (Net, "O2,fp32_module=haed", PolicyError, r"(?s)'haed' matches no module.*the text fp32_module=head$"),
        (Net, "O1,low=exp@haed", PolicyError, r"(?s)'haed' matches no module.*the text low=exp@head$"),
        (Net, "O2,fp32_module=head.weight", PolicyError, r"(?s)matches no module.*the text fp32_param=head.weight$"),
        (Net, "O1,fp32=sofmax*", PolicyError, r"(?s)the op glob 'sofmax\*' matches no op.*the text fp32=softmax$"),
        (Net, "O1,fp32=view", PolicyError, r"(?s)'view' matches no op that could be.*the policy without fp32=view$"),
        (Net, "O2,fp32_param=*.scale", PolicyError, r"'\*.scale' matches no parameter"),
        (Net, "O2,fp32_param=haed.weight", PolicyError, r"(?s)no parameter.*keep_fp32\(params=\[\"head.weight\"\]\)"),
        (Net, "O2,fp32_param=head", PolicyError, r"(?s)matches no parameter or buffer.*the text fp32_module=head$"),
        (Net, "O2,fp32_param=head.weight,low_param=embed.weight", PolicyError, "two storage dtypes"),
        (lambda: "model", "O2", PolicyError, "must be an nn.Module, not str"),
    ],
)
def test_refusals_name_the_fault_and_change_nothing(build, policy, error, says):
    model = build()
    before = dtypes(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=says) as caught:
        mezzo.prepare(model, policy)
    assert len(str(caught.value).splitlines()) > 1
    if before is not None:
        assert dtypes(model) == before


def test_several_problems_are_reported_together():
    with pytest.raises(PolicyError) as caught:
        mezzo.prepare(Net(), "O2,fp32_module=haed,fp32_param=nothing")
    assert "2 problems" in str(caught.value)
    assert "did you mean 'head'?" in str(caught.value)


def test_low_parameters_in_the_policy_s_own_dtype_are_welcome():
    model = half_parameters()
    mezzo.prepare(model, "O2,dtype=float16")
    assert model.weight.dtype == torch.float16


def test_a_rule_on_a_container_reaches_its_modules():
    """An nn.ModuleList is never called itself."""

    class Stack(nn.Module):
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

    for level in ("O1", "O2"):
        model = Stack()
        handle = mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=true,output_dtype=none,fp32_module=blocks")
        with handle.autocast():
            out = model(torch.ones(2, 8))
        assert model.blocks[0][0].weight.dtype == torch.float32
        assert (model.seen, out.dtype) == ([torch.float32] * 2, torch.bfloat16)


@pytest.mark.parametrize("rule, inside, around", [
    ("fp32_module=head", torch.float32, torch.bfloat16),
    ("fp32=linear@head", torch.float32, torch.bfloat16),
    ("low_module=head,fp32=linear", torch.bfloat16, torch.float32),
])  # fmt: skip
def test_parts_that_are_called_by_themselves_follow_the_rule_of_what_they_are_in(rule, inside, around):
    model = nn.Sequential()
    model.body, model.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    handle = mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=true,{rule}")
    x = torch.randn(2, 8)
    with handle.autocast():
        whole = model.head(h := model.body(x))
        h = model.head[0](h)
        last = model.head[1][0](h)
        after = model.body(last)
    assert (whole.dtype, h.dtype, last.dtype, after.dtype) == (inside, inside, inside, around)
    assert torch.equal(whole, last)


def test_parameter_rules_follow_views_and_lists():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x @ self.w.T, torch.einsum("ij,jk->ik", [x, self.w]), x[:, :2] @ self.w[:2]

    model = Views()
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true,fp32_param=w")
    with handle.autocast():
        assert [out.dtype for out in model(torch.randn(4, 8))] == [torch.float32] * 3


def test_a_module_that_is_never_called_cannot_have_a_rule():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    with pytest.raises(PolicyError, match="never called") as caught:
        mezzo.prepare(model, "O1,fp32_module=attn.out_proj")
    assert "the text fp32_module=attn; or " in str(caught.value)
    assert "the text fp32_param=attn.out_proj.weight" in str(caught.value)
    mezzo.prepare(model, "O1,fp32_module=attn")


def test_a_conversion_that_fails_half_way_is_undone(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def out_of_memory():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model[1], "flatten_parameters", out_of_memory)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of memory"):
        mezzo.prepare(model, "O2,dtype=bfloat16")
    assert set(dtypes(model).values()) == {torch.float32}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_remove_converts_gradients_too():
    model = nn.Linear(4, 4)
    handle = mezzo.prepare(model, "O2,dtype=bfloat16")
    model(torch.ones(1, 4)).sum().backward()
    handle.remove()
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("rule", ["low=batch_norm", "fp32=batch_norm", "low_module=0", "fp32_module=0"])
def test_rules_on_batch_norm_leave_its_statistics_alone(rule):
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=1.0))
    handle = mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=true,{rule}")
    data = torch.randn(16, 8) + 3
    with handle.autocast():
        out = model(data)
    assert out.dtype == (torch.bfloat16 if rule.startswith("low") else torch.float32)
    torch.testing.assert_close(model[0].running_mean, data.mean(0), rtol=1e-2, atol=0)


def test_one_tensor_in_several_places_is_cast_once():
    model = Echo()
    mezzo.prepare(model, "O2,dtype=bfloat16")
    x = torch.ones(2)
    model(x, [x], again=x)
    (first, (second,)), kwargs = model.seen
    assert first is second is kwargs["again"]


def test_a_rule_that_cannot_reach_inside_is_reported(caplog):
    model = nn.Sequential(nn.LSTM(4, 4))
    mezzo.prepare(model, "O1,dtype=bfloat16,fp32=tanh")
    assert "the rule fp32=tanh does not reach tanh inside 0" in caplog.text
    caplog.clear()
    mezzo.prepare(nn.Sequential(nn.Linear(4, 4)), "O1,dtype=bfloat16,fp32=tanh")
    assert caplog.text == ""


def test_ddp_anywhere_in_the_model_is_not_converted(alone):
    inner = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(StateError, match="DistributedDataParallel already wraps"):
        mezzo.prepare(nn.Sequential(inner), "O2,dtype=bfloat16")
    mezzo.prepare(nn.Sequential(inner), "O1,dtype=bfloat16")


class Chain(nn.Module):
    """Two layers, and the dtypes of what they return."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

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
    model, x = Chain(), torch.randn(3, 4)
    handle = mezzo.prepare(model, f"{policy},{rule}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def loss(given, x):
        with handle.autocast():
            return torch.func.functional_call(model, given, (x,)).float().square().sum()

    with handle.autocast():
        expected = model(x).float().square().sum()
    seen = model.seen
    assert policy.startswith("O2") or torch.float32 in seen
    wanted = torch.autograd.grad(expected, list(tensors.values())[:4])
    model.seen = None
    assert torch.equal(loss(copies, x), expected)
    assert model.seen == seen
    parameters, buffers = dict(list(copies.items())[:4]), {"shift": copies["shift"]}
    gradients = torch.func.grad(lambda given: loss({**given, **buffers}, x))(parameters)
    assert model.seen == seen
    for mine, theirs in zip(gradients.values(), wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    if "lists=device" in policy:
        return  # torch's own autocast leaves the products of a vmap in FP32
    rows = torch.func.vmap(lambda row: loss(copies, row))(x)
    assert model.seen == seen
    torch.testing.assert_close(rows.sum(), expected, rtol=0.02, atol=0)


def test_a_parameter_s_rule_outlives_the_parameter():
    model, x = Chain(), torch.randn(3, 4)
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true,fp32_param=second.weight")
    model.second.weight = nn.Parameter(torch.randn(4, 4))
    with handle.autocast():
        model(x)
    assert model.seen == (torch.bfloat16, torch.float32, torch.float32)
    model.second.weight = None
    with handle.autocast(), pytest.raises(TypeError):
        model(x)
