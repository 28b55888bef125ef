"""What prepare, regions and pins refuse: with which words, and that every bit of the model stays as it was."""

import gc

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError, StateError, UnsupportedError
from mezzo.cast.region import RegionArgumentError

from ..support.refusals import refused
from ..support.releases import torchscript

CONVERTING = ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true", "O3,dtype=bfloat16,emulate=true"]


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Named(nn.Module):
    """Modules and parameters with names, two of them tied."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attn = nn.Embedding(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def held_gradient():
    model = network()
    model(torch.ones(1, 4)).sum().backward()
    return model


def prepared():
    model = network()
    mezzo.prepare(model, "O2,dtype=bfloat16")
    return model


def scripted():
    return nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))


def overflowing():
    model = network()
    model[2].weight.data[0, 0] = 1e6
    return model


ROWS = {
    "float64": (lambda: network().double(), "O2", UnsupportedError, ["float64 parameters", "0.weight (float64)"]),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "O1", UnsupportedError, ["lazy parameters have no values yet"]),
    "scripted": (scripted, "O1", UnsupportedError, ["torch.jit has compiled a module"]),
    "beyond FP16": (overflowing, "O2", UnsupportedError, ["do not fit float16", "2.weight", "beyond 65504",
                    'keep_fp32(params=["2.weight"]), the text fp32_param=2.weight; or Policy.O2("bfloat16")']),
    "beyond FP16, in O3": (overflowing, "O3", UnsupportedError, ["do not fit float16", "2.weight"]),
    "beyond FP16, in BF16": (lambda: overflowing().bfloat16(), "O2", UnsupportedError, ["do not fit float16"]),
    "halves of a buffer": (Named, "O2,low_param=norm.running_mean", PolicyError, [
        "the parameter glob 'norm.running_mean' matches nothing that can be stored in halves", "buffers are FP32",
        "the policy without low_param=norm.running_mean"]),
    "halves of a buffer, in O1": (Named, "O1,low_param=*.running_*", PolicyError, ["nothing that can be stored"]),
    "gradients": (held_gradient, "O2", StateError, ["hold gradients", "optimizer.zero_grad(set_to_none=True)"]),
    "gradients under O1": (held_gradient, "O1,bf16,low_param=0.weight", StateError, ["hold gradients"]),
    "prepared": (prepared, "O2,bf16", StateError, ["prepared already", "handle.remove()"]),
    "inside another": (lambda: nn.Sequential(prepared()), "O2,bf16", StateError, ["prepared already"]),
    "module": (Named, "O2,fp32_module=haed", PolicyError, ["'haed' matches no module", "text fp32_module=head"]),
    "op of a module": (Named, "O1,low=exp@haed", PolicyError, ["'haed' matches no module", "the text low=exp@head"]),
    "a parameter's path": (Named, "O2,fp32_module=head.weight", PolicyError, ["no module", "fp32_param=head.weight"]),
    "op": (Named, "O1,fp32=sofmax*", PolicyError, ["the op glob 'sofmax*' matches no op", "the text fp32=softmax"]),
    "a view": (Named, "O1,fp32=view", PolicyError, ["'view' matches no op that could be", "policy without fp32=view"]),
    "parameter": (Named, "O2,fp32_param=*.scale", PolicyError, ["'*.scale' matches no parameter"]),
    "near parameter": (Named, "O2,fp32_param=haed.weight", PolicyError, ['keep_fp32(params=["head.weight"])']),
    "a module's path": (Named, "O2,fp32_param=head", PolicyError, ["no parameter or buffer", "text fp32_module=head"]),
    "tied": (Named, "O2,fp32_param=head.weight,low_param=embed.weight", PolicyError, ["two storage dtypes"]),
    "two": (Named, "O2,fp32_module=haed,fp32_param=nothing", PolicyError, ["2 problems", "did you mean 'head'?"]),
    "never called": (Named, "O1,fp32_module=attn.out_proj", PolicyError, [
        "never called", "the text fp32_module=attn; or ", "the text fp32_param=attn.out_proj.weight"]),
}  # fmt: skip


@torchscript
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", ROWS)
def test_what_no_model_can_be_prepared_with(name):
    build, policy, error, words = ROWS[name]
    model = build()
    parts = () if name in ("lazy", "scripted") else (model,)  # which have no bits to be looked at
    with refused(error, *words, parts=parts):
        mezzo.prepare(model, policy)
    assert not any(module._forward_hooks for module in model.modules()) or "prepared" in words[0]


@pytest.mark.parametrize("wrong", [None, "model", 3, nn.Linear, [nn.Linear(1, 1)], torch.ones(1)])
def test_what_is_no_model_is_refused_with_the_order(wrong):
    name = type(wrong).__name__
    with refused(PolicyError, f'be an nn.Module, not {name}\n  write  mezzo.prepare(model, "O1"): the model first'):
        mezzo.prepare(wrong, "O1")


def test_what_is_no_policy_no_device_and_no_pin():
    absent = "xpu" if torch.cuda.is_available() else "cuda"
    for make, error, words in (
        (lambda: mezzo.autocast("O7"), PolicyError, "unknown level 'O7'"),
        (lambda: mezzo.autocast(3), PolicyError, "cannot be made from int"),
        (lambda: mezzo.prepare("O1", nn.Linear(1, 1)), PolicyError, "a model must be an nn.Module, not str"),
        (lambda: mezzo.autocast("O1,bf16", absent), UnsupportedError, absent),
        (lambda: mezzo.fp32(int), PolicyError, "int is a class, and not one of modules"),
        (lambda: mezzo.low(3), PolicyError, "3 cannot be pinned"),
    ):
        with refused(error, words):
            make()


#: What is written by the habit of torch.autocast, and what to write instead.
TORCHS = [
    (("cuda", torch.bfloat16), {}, ('autocast("bfloat16", "cuda")', 'autocast("cuda", dtype=torch.bfloat16)')),
    (("cuda",), {"dtype": torch.float16}, ('autocast("float16", "cuda")', 'autocast("cuda", dtype=torch.float16)')),
    ((), {"device_type": "cpu", "dtype": torch.bfloat16}, ('autocast("bfloat16", "cpu")', 'autocast("cpu", dtype=')),
    (("cpu",), {"enabled": False}, ('autocast("bfloat16", "cpu")',)),
    (("cuda:0",), {}, ('autocast("bfloat16", "cuda:0")',)),
    (("bf16",), {"cache_enabled": False}, ("a policy first",)),
]


@pytest.mark.parametrize("args, kwargs, words", TORCHS)
def test_the_arguments_of_torchs_autocast_are_answered_with_ours(args, kwargs, words):
    with refused(RegionArgumentError, "these are the arguments of torch.autocast", *words):
        mezzo.autocast(*args, **kwargs)


def test_an_argument_that_no_region_has_is_named():
    assert issubclass(RegionArgumentError, TypeError)
    with refused(PolicyError, "a region takes no dtyp\n", 'write  mezzo.autocast("bfloat16")'):
        mezzo.autocast("O1", dtyp="bf16")
    with refused(PolicyError, "there is no level"):
        mezzo.autocast()


# Wrappers that collect gradients ------------------------------------------------------------------------


def in_session(model, policy):
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_a_model_that_ddp_wraps_is_not_converted(alone):
    """Itself, a part of it, or the model inside, whose gradients the wrapper collects."""
    for policy, build in zip(CONVERTING, [mezzo.prepare, in_session, mezzo.prepare], strict=True):
        ddp = nn.parallel.DistributedDataParallel(network())
        for model in (ddp, nn.Sequential(ddp)):
            with refused(StateError, f"{policy[:2]} cannot convert a model that DistributedDataParallel already wraps",
                         "prepare first, then DistributedDataParallel(model); or O1", parts=(ddp,)):  # fmt: skip
                build(model, policy)
        with refused(
            StateError,
            f"{policy[:2]} cannot convert parameters whose gradients are collected already\n"
            f"  where  {'0.weight, 0.bias, 2.weight, 2.bias' if policy.startswith('O3') else '0.weight, 2.weight'}\n"
            "  why    a wrapper around this model, such as DistributedDataParallel, was made for them as they were "
            "and would reduce no gradient;\n"
            "         or a loss or output of an earlier forward pass is kept\n"
            "  write  prepare first, then DistributedDataParallel(model), and the session with the model inside;\n"
            "         del loss, output; or O1 without rules for parameters, which converts nothing",
            parts=(ddp.module,),
        ):
            build(ddp.module, policy)
        del ddp, model
        gc.collect()
        build(network(), policy)


def test_what_converts_nothing_takes_it_and_rules_for_parameters_convert(alone):
    for policy in ("O0", "O1,emulate=true", "O1,dtype=bfloat16,emulate=true"):
        in_session(nn.parallel.DistributedDataParallel(network()).module, policy)
    ddp, policy = nn.parallel.DistributedDataParallel(network()), "O1,dtype=bfloat16,emulate=true,low_param="
    with refused(StateError, "O1 cannot convert parameters whose gradients", "where  0.weight\n"):
        mezzo.prepare(ddp.module, policy + "0.weight")
    with refused(StateError, "O1 cannot convert a model that DistributedDataParallel already wraps"):
        mezzo.prepare(ddp, policy + "module.0.weight")


def test_a_kept_loss_is_the_other_cause_and_one_in_a_cycle_is_kept_by_nothing(alone):
    model = network()
    output = model(torch.ones(1, 4))
    with refused(StateError, "or a loss or output of an earlier forward pass is kept"):
        mezzo.prepare(model, CONVERTING[0])
    output = [output]
    output.append(output)
    gc.disable()
    try:
        del output
        mezzo.prepare(model, CONVERTING[0])
    finally:
        gc.enable()


def test_frozen_parameters_are_not_asked(alone):
    model = network()
    model[0].requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel(model)
    with refused(StateError, "where  2.weight\n"):
        mezzo.prepare(ddp.module, CONVERTING[0])
    mezzo.prepare(model[0], CONVERTING[0])


def test_without_ranks_a_kept_loss_does_not_matter():
    model = network()
    output = model(torch.ones(1, 4))
    mezzo.prepare(model, CONVERTING[1])
    assert output.requires_grad


# Formats ------------------------------------------------------------------------------------------------


def base_and_adapter(base, value):
    model = network()
    model[0].to(base).requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(value)
        model[0].bias.zero_()
    return model


@pytest.mark.parametrize("policy", ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("base, value", [(torch.bfloat16, 2.0**-25), (torch.float16, 1 + 2.0**-10)])
def test_weights_that_came_in_another_low_format_are_fp32_with_the_same_values(base, value, policy):
    """Also such as the policy's format does not hold."""
    model = base_and_adapter(base, value)
    amp = MixedPrecision(model, torch.optim.SGD(model[2].parameters(), lr=0.1), policy)
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.double().unique().item() == value
    with amp.autocast():
        loss = model(torch.ones(2, 4)).square().mean()
    amp.backward(loss)
    assert not amp.step().skipped
    amp.close()
    assert model[0].weight.double().unique().item() == value


def test_under_o3_they_are_rounded_as_model_to_rounds_them():
    model = base_and_adapter(torch.float16, 1 + 2.0**-10)
    handle = mezzo.prepare(model, "O3,dtype=bfloat16,emulate=true")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model[0].weight.unique().item() == 1
    handle.remove()
    assert model[0].weight.dtype == torch.float16
