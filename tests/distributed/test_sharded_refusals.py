"""What is refused of sharded models, before anything is changed: by `fully_shard`, by sessions, and between the two."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import mezzo
from mezzo import DistributedError, PolicyError, StateError, UnsupportedError

from .ranks import on_ranks

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def untouched(model):
    plain = {*map(type, model.parameters())} == {nn.Parameter}
    return plain and not any(isinstance(module, FSDPModule) for module in model.modules())


def refused(error, text, model, *args, **kwargs):
    with pytest.raises(error, match=text):
        mezzo.fully_shard(model, *args, **kwargs)
    assert untouched(model)


def test_without_ranks_nothing_is_sharded():
    refused(StateError, "no ranks to shard over(.|\n)*torchrun --nproc-per-node 2", net(), "O1")


@pytest.mark.parametrize(
    "kwargs, error, text",
    [
        ({"mp_policy": LOW}, PolicyError, "mp_policy is what the policy says"),
        (
            {"reshard_after": True},
            PolicyError,
            "takes no 'reshard_after'\n  why    did you mean 'reshard_after_forward'",
        ),
        ({"mesh": "cpu"}, PolicyError, "mesh is 'cpu', not a DeviceMesh"),
        ({"wrap": "blocks.*"}, PolicyError, "matches no module"),
        ({"mesh": 1, "wrap": "blocks.*", "mp_policy": 1}, PolicyError, "2 problems"),
    ],
)
def test_arguments_that_mean_nothing(alone, kwargs, error, text):
    refused(error, text, net(), "O2,dtype=bfloat16", **kwargs)


def test_meshes_of_the_wrong_kind(alone):
    for shape, names in [((1, 1, 1), ("a", "b", "c")), ((1, 1), None)]:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        refused(PolicyError, "takes no such mesh", net(), "O1", mesh=mesh)


def test_models_that_cannot_be_sharded(alone):
    scalar, twisted, wide = net(), net(), net().double()
    scalar[1].gain = nn.Parameter(torch.ones(()))
    twisted[1].weight = nn.Parameter(torch.ones(4, 4, 2).transpose(0, 2))
    refused(UnsupportedError, "without a dimension(.|\n)*1.gain", scalar, "O1")
    refused(UnsupportedError, "must be contiguous(.|\n)*1.weight", twisted, "O1")
    refused(UnsupportedError, "float64 parameters", wide, "O1")
    refused(PolicyError, "matches no module", net(), mezzo.Policy.O2("bfloat16").keep_fp32(modules="head"))
    refused(UnsupportedError, "two dtypes(.|\n)*1.bias in float32", net(), "O2,dtype=bfloat16,fp32_param=1.bias")
    with pytest.raises(PolicyError, match=r"must be an nn.Module"):
        mezzo.fully_shard([net()], "O1")
    prepared = net()
    handle = mezzo.prepare(prepared, "O2,dtype=bfloat16")
    refused(PolicyError, r"prepared with another policy(.|\n)*dtype", prepared, "O2,dtype=float16")
    handle.remove()
    wrapped = nn.parallel.DistributedDataParallel(net())
    refused(StateError, "wrapped by DistributedDataParallel", wrapped, "O1")
    sharded = mezzo.fully_shard(net(), "O1")
    with pytest.raises(StateError, match="sharded already"):
        mezzo.fully_shard(sharded, "O1")


def differing(what):
    """Return what each rank is told where they do not agree, and whether its model was left alone."""
    model, rank = net(), dist.get_rank()
    policy, wrap, mesh = "O2,dtype=bfloat16", (), None
    if what == "policy":
        policy = "O2,dtype=bfloat16" if rank else "O2,dtype=float16"
    elif what == "wrap":
        wrap = ["1"] if rank else ["0", "1"]
    elif what == "model" and rank:
        model[1].gain = nn.Parameter(torch.ones(()))
    elif what == "mesh":
        mesh = dist.DeviceMesh("cpu", [0])
    try:
        mezzo.fully_shard(model, policy, wrap=wrap, mesh=mesh)
    except mezzo.MezzoError as error:
        return type(error), str(error), untouched(model)
    return None, "", untouched(model)


def disagreements():
    return [differing(what) for what in ("policy", "wrap", "model", "mesh")]


def test_ranks_that_do_not_agree_are_all_refused():
    first, second = on_ranks(2, disagreements)
    assert all(left_alone for _, _, left_alone in (*first[:3], *second))
    for kind, text, _ in (first[0], second[0], first[1], second[1]):
        assert kind is PolicyError
        assert "ranks are about to shard the model differently" in text
    assert "here O2,dtype=float16, there O2,dtype=bfloat16" in first[0][1]
    assert "here O2,dtype=bfloat16, there O2,dtype=float16" in second[0][1]
    kind, text, _ = first[2]
    assert (kind, "1.gain" in text, "rank 1" in text) == (DistributedError, True, True)
    kind, text, _ = second[2]
    assert (kind, "without a dimension" in text) == (UnsupportedError, True)
    # A mesh of some ranks: those shard, the others learn that they are not in it.
    assert first[3] == (None, "", False)
    kind, text, _ = second[3]
    assert (kind, "the mesh does not hold this rank" in text) == (PolicyError, True)


# torch's own fully_shard --------------------------------------------------------------------------------


def session(model, policy):
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_torchs_own_is_taken_where_its_dtypes_agree(alone):
    for policy, mp_policy in [
        ("O0", MixedPrecisionPolicy()),
        ("O1,dtype=bfloat16", MixedPrecisionPolicy()),
        ("O2,dtype=bfloat16", LOW),
        ("O2,dtype=bfloat16", MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)),
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


@pytest.mark.parametrize(
    "policy, mp_policy, text",
    [
        (
            "O2,dtype=bfloat16",
            None,
            "gathers parameters in float32, and O2 wants bfloat16(.|\n)*param_dtype=torch.bfloat16",
        ),
        ("O2,dtype=float16", LOW, "gathers parameters in bfloat16, and O2 wants float16"),
        ("O1,dtype=bfloat16", LOW, "gathers parameters in bfloat16, and O1 wants float32(.|\n)*without param_dtype"),
        (
            "O2,dtype=bfloat16,fp32_module=2",
            LOW,
            r"2.weight, 2.bias, of fully_shard\(model\)(.|\n)*fully_shard\(model.2\) without param_dtype",
        ),
    ],
)
def test_torchs_own_is_refused_where_they_differ(alone, policy, mp_policy, text):
    model = fully_shard(net(), mp_policy=mp_policy or MixedPrecisionPolicy())
    with pytest.raises(UnsupportedError, match=text) as caught:
        session(model, policy)
    assert f"mezzo.fully_shard(model, '{policy}" in str(caught.value)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_modules_that_were_forgotten_are_named(alone):
    model = net()
    fully_shard(model[1])
    with pytest.raises(
        UnsupportedError, match=r"not be averaged over ranks\n  where  0.weight, 0.bias, 2.weight, 2.bias"
    ):
        session(model, "O1,dtype=bfloat16")
    for module in (model[0], model[2]):
        module.requires_grad_(False)
    session(model, "O1,dtype=bfloat16").close()
    for param in model.parameters():  # a user who averages them by hand
        param.requires_grad_(True).register_post_accumulate_grad_hook(lambda param: None)
    session(model, "O1,dtype=bfloat16").close()


def test_values_beyond_float16_are_named(alone):
    model = net()
    model[1].weight.data[2, 3] = 70000
    mezzo.fully_shard(model, "O2,dtype=float16")
    with pytest.raises(UnsupportedError, match=r"do not fit float16\n  where  1.weight"):
        session(model, "O2,dtype=float16")


# The order of calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16", "O2,dtype=bfloat16"])
def test_a_session_made_before_is_refused(alone, policy):
    model = net()
    amp = session(model, policy)
    fully_shard(model)
    with amp.autocast():
        loss = model(torch.ones(2, 3)).mean()
    with pytest.raises(
        StateError, match=r"gave the modules new parameters(.|\n)*fully_shard first, then the optimizer"
    ):
        amp.backward(loss)


def test_an_optimizer_made_before_is_refused(alone):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.fully_shard(model, "O1,dtype=bfloat16")
    with pytest.raises(PolicyError, match=r"parameters that are not the models'(.|\n)*fully_shard"):
        mezzo.MixedPrecision(model, optimizer, "O1,dtype=bfloat16")


def test_parameters_on_the_meta_device_have_no_values(alone):
    with torch.device("meta"):
        model = net()
    mezzo.fully_shard(model, "O2,dtype=bfloat16")
    with pytest.raises(StateError, match=r"meta device(.|\n)*to_empty"):
        session(model, "O2,dtype=bfloat16")
