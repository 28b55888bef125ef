"""What is refused of sharded models, before anything is changed: by `fully_shard`, by sessions, and between the two."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import mezzo
from mezzo import PolicyError, StateError, UnsupportedError

from ..support.refusals import refused

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
O2 = "O2,dtype=bfloat16"


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def prepared():
    model = net()
    model.handle = [mezzo.prepare(model, O2)]
    return model


#: By what is wrong: the model, the policy, and what else `fully_shard` is given; the error and its words.
REFUSED = [
    (net, O2, {"mp_policy": LOW}, TypeError, "mp_policy"),
    (net, O2, {"wrap": nn.Conv2d}, PolicyError, "no module of the model is a Conv2d"),
    (net, O2, {"wrap": 3}, TypeError, "not iterable"),
    (net, O2, {"wrap": "blocks.*"}, PolicyError, "takes classes of modules", "'blocks"),
    (net, O2, {"wrap": [nn.Linear, len]}, PolicyError, "takes classes of modules", "len"),
    (net, f"{O2},fp32_module=head", {}, PolicyError, "matches no module"),
    (net, "O3,dtype=bfloat16,fp32_param=1.bias", {}, UnsupportedError, "two dtypes", "1.bias in float32",
     "1.weight in bfloat16", "policy.keep_fp32(modules=[\"1\"]), the text fp32_module=1: for all of them"),
    (lambda: net().double(), "O1", {}, UnsupportedError, "float64 parameters"),
    (lambda: [net()], "O1", {}, PolicyError, "must be an nn.Module"),
    (prepared, "O2,dtype=float16", {}, PolicyError, "prepared with another policy", "dtype"),
]  # fmt: skip


def test_what_cannot_be_sharded_stays_as_it_is(alone):
    for make, policy, kwargs, error, *words in REFUSED:
        model = make()
        with refused(error, *words, parts=[model]):
            mezzo.fully_shard(model, policy, **kwargs)
        assert not any(
            isinstance(module, FSDPModule) for module in (model.modules() if isinstance(model, nn.Module) else ())
        )


def test_an_overflow_of_a_sharded_model_is_not_explained_in_the_run(alone):
    model = mezzo.fully_shard(net(), O2)
    with pytest.raises(UnsupportedError, match=r"cannot be located in the run\n  where  1 modules"):
        mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), O2, on_overflow="locate")


@pytest.mark.filterwarnings("ignore:FSDP")
def test_fsdp1_is_refused(alone, monkeypatch):
    """Of which a CPU can make none: told by the class alone."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", nn.Sequential)
    with pytest.raises(UnsupportedError, match=r"FullyShardedDataParallel, which is FSDP1(.|\n)*mezzo.fully_shard"):
        session(net(), O2)


# torch's own fully_shard --------------------------------------------------------------------------------


def session(model, policy):
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_torchs_own_is_taken_where_its_dtypes_agree(alone):
    for policy, mp_policy in [
        ("O0", MixedPrecisionPolicy()),
        ("O1,dtype=bfloat16", MixedPrecisionPolicy()),
        (O2, LOW),
        (O2, MixedPrecisionPolicy()),
        (O2, MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)),
        ("O3,dtype=bfloat16", LOW),
    ]:
        model = fully_shard(net(), mp_policy=mp_policy)
        amp = session(model, policy)
        with amp.autocast():
            loss = model(torch.ones(2, 3)).mean()
        amp.backward(loss)
        assert not amp.step().skipped
        amp.close()
        assert {param.dtype for param in model.parameters()} == {torch.float32}


def on_meta():
    with torch.device("meta"):
        model = net()
    return mezzo.fully_shard(model, O2)


def large():
    model = net()
    model[1].weight.data[2, 3] = 70000
    return mezzo.fully_shard(model, "O2,dtype=float16")


def forgotten():
    model = net()
    fully_shard(model[1])
    return model


def by_torch(mp_policy=None):
    return fully_shard(net(), mp_policy=mp_policy or MixedPrecisionPolicy())


#: The model, the policy of the session, the error and its words.
SHARDED_OTHERWISE = [
    (lambda: by_torch(LOW), "O2,dtype=float16", UnsupportedError, "in bfloat16, and O2 wants float16",
     "mezzo.fully_shard"),
    (lambda: by_torch(LOW), "O1,dtype=bfloat16", UnsupportedError,
     "gathers parameters in bfloat16, and O1 wants float32", "without param_dtype"),
    (lambda: by_torch(LOW), f"{O2},fp32_module=2", UnsupportedError, "in bfloat16, and O2 wants float32",
     "2.weight, 2.bias, of fully_shard(model)", "fully_shard(model) without param_dtype"),
    (forgotten, "O1,dtype=bfloat16", UnsupportedError, "not be averaged over ranks",
     "where  0.weight, 0.bias, 2.weight, 2.bias"),
    (large, "O2,dtype=float16", UnsupportedError, "do not fit float16", "where  1.weight"),
    (on_meta, O2, StateError, "meta device", "to_empty"),
]  # fmt: skip


def test_a_session_refuses_what_was_sharded_otherwise(alone):
    for make, policy, error, *words in SHARDED_OTHERWISE:
        model = make()
        with refused(error, *words):
            session(model, policy)
        assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_parameters_that_are_averaged_by_hand_need_no_unit(alone):
    model = forgotten()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: None)
    session(model, "O1,dtype=bfloat16").close()


# The order of calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", O2])
def test_a_session_made_before_trains_nothing_silently(alone, policy):
    model = net()
    amp = session(model, policy)
    fully_shard(model)
    with amp.autocast():
        loss = model(torch.ones(2, 3)).mean()

    def step():
        amp.backward(loss)
        amp.step()

    with pytest.raises(StateError):
        step()


def test_an_optimizer_made_before_is_refused(alone):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.fully_shard(model, "O1,dtype=bfloat16")
    with pytest.raises(PolicyError, match="parameters that are not the models'"):
        mezzo.MixedPrecision(model, optimizer, "O1,dtype=bfloat16")
