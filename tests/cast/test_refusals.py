"""What stands against converting a model: wrappers that collect its gradients, and formats that do not hold it."""

import gc

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError, StateError, UnsupportedError

CONVERTING = ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true", "O3,dtype=bfloat16,emulate=true"]


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def prepared(model, policy):
    return mezzo.prepare(model, policy)


def in_session(model, policy):
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_the_model_inside_a_data_parallel_wrapper_is_not_converted(alone):
    for policy, build in zip(CONVERTING, [prepared, in_session, prepared], strict=True):
        ddp = nn.parallel.DistributedDataParallel(network())
        with pytest.raises(StateError) as error:
            build(ddp.module, policy)
        assert str(error.value) == (
            f"{policy[:2]} cannot convert parameters whose gradients are collected already\n"
            "  where  0.weight, 0.bias, 2.weight, 2.bias\n"
            "  why    a wrapper around this model, such as DistributedDataParallel, was made for their old dtype and "
            "would reduce no gradient;\n"
            "         or a loss or output of an earlier forward pass is kept\n"
            "  write  prepare first, then DistributedDataParallel(model), and the session with the model inside;\n"
            "         del loss, output; or O1 without rules for parameters, which converts nothing"
        )
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
        del ddp, error
        gc.collect()
        build(network(), policy)


@pytest.mark.parametrize("policy", ["O0", "O1,emulate=true", "O1,dtype=bfloat16,emulate=true"])
def test_what_converts_nothing_takes_it(alone, policy):
    ddp = nn.parallel.DistributedDataParallel(network())
    in_session(ddp.module, policy)


def test_rules_for_parameters_convert_under_o1_too(alone):
    ddp = nn.parallel.DistributedDataParallel(network())
    policy = "O1,dtype=bfloat16,emulate=true,low_param=0.weight"
    with pytest.raises(StateError, match=r"O1 cannot convert parameters whose gradients(.|\n)*where  0.weight\n"):
        mezzo.prepare(ddp.module, policy)
    with pytest.raises(StateError, match="O1 cannot convert a model that DistributedDataParallel already wraps"):
        mezzo.prepare(ddp, policy.replace("0.weight", "module.0.weight"))
    plain = network()
    plain(torch.ones(1, 4)).sum().backward()
    with pytest.raises(StateError, match="hold gradients"):
        mezzo.prepare(plain, policy)


def test_a_kept_loss_is_the_other_cause(alone):
    model = network()
    output = model(torch.ones(1, 4))
    with pytest.raises(StateError, match="or a loss or output of an earlier forward pass is kept"):
        mezzo.prepare(model, "O2,emulate=true")
    del output
    mezzo.prepare(model, "O2,emulate=true")


def test_a_loss_in_a_cycle_is_kept_by_nothing(alone):
    model = network()
    kept = [model(torch.ones(1, 4))]
    kept.append(kept)
    gc.disable()
    try:
        del kept
        mezzo.prepare(model, "O2,emulate=true")
    finally:
        gc.enable()


def test_frozen_parameters_are_not_asked(alone):
    model = network()
    model[0].requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(StateError, match=r"where  2.weight, 2.bias\n"):
        mezzo.prepare(ddp.module, "O2,emulate=true")
    mezzo.prepare(model[0], "O2,emulate=true")


def test_without_a_alone_a_kept_loss_does_not_matter():
    model = network()
    output = model(torch.ones(1, 4))
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true")
    assert output.requires_grad


# Formats ------------------------------------------------------------------------------------------------


def base_and_adapter(base):
    model = network()
    model[0].to(base).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "base, policy, held",
    [
        (torch.bfloat16, "O2,emulate=true", 0.75),
        (torch.float16, "O2,dtype=bfloat16,emulate=true", 0.75),
        (torch.bfloat16, "O3,emulate=true", 2.0**-24),
    ],
)
def test_frozen_weights_go_to_another_format_where_it_holds_them(base, policy, held):
    model = base_and_adapter(base)
    with torch.no_grad():
        model[0].weight.fill_(held)
        model[0].bias.zero_()
    amp = MixedPrecision(model, torch.optim.SGD(model[2].parameters(), lr=0.1), policy)
    assert model[0].weight.dtype == amp.policy.dtype
    assert model[0].weight.double().unique().item() == held
    with amp.autocast():
        loss = model(torch.ones(2, 4)).square().mean()
    amp.backward(loss)
    assert not amp.step().skipped
    amp.close()
    assert model[0].weight.dtype == base
    assert model[0].weight.double().unique().item() == held


@pytest.mark.parametrize(
    "base, policy, lost",
    [(torch.bfloat16, "O2,emulate=true", 2.0**-25), (torch.float16, "O2,dtype=bfloat16,emulate=true", 1 + 2.0**-10)],
)
def test_only_those_that_it_does_not_hold_are_named(base, policy, lost):
    model = base_and_adapter(base)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[0].bias.fill_(lost)
    dtypes = [str(each).removeprefix("torch.") for each in (base, mezzo.Policy.of(policy).dtype)]
    with pytest.raises(UnsupportedError) as error:
        mezzo.prepare(model, policy)
    assert str(error.value) == (
        "parameters are already in a low precision that O2 would change\n"
        f"  where  0.bias ({dtypes[0]})\n"
        f"  why    one 16-bit format does not hold what another does; the policy says {dtypes[1]}\n"
        f'  write  model.float() first; or Policy.O2("{dtypes[0]}"), the text O2,dtype={dtypes[0]}'
    )
    assert model[0].weight.dtype == base


@pytest.mark.parametrize("wrong", [None, "model", 3, nn.Linear, [nn.Linear(1, 1)], torch.ones(1)])
def test_what_is_no_model_is_refused_with_the_order(wrong):
    says = (
        rf"a model must be an nn.Module, not {type(wrong).__name__}\n  write  mezzo.prepare\(model, \"O1\"\): the model"
    )
    with pytest.raises(PolicyError, match=says):
        mezzo.prepare(wrong, "O1")
    with pytest.raises(PolicyError, match=r"a model must be an nn\.Module, not str"):
        mezzo.prepare("O1", nn.Linear(1, 1))
