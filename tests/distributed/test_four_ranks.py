"""Two dims of ranks, which take four: replicas of shards, tensor parallelism beside shards, and groups of both."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import optim
from mezzo.distributed.exchange import Ranks

from .ranks import on_ranks
from .test_fully_shard import BF16, O1, OPTIMIZERS, in_one_process, net, same, train, whole
from .test_sharded_optimizers import bits, differences, give_gradients, halved, numbers, shard
from .test_sharded_sessions import FIXED

# Norms ----------------------------------------------------------------------------------------------------


class FromTheHost(TorchDispatchMode):
    """Counts tensors that are made of Python numbers, each of which a GPU would have to wait for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **kwargs or {})


def norms_over_two_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = [torch.arange(8.0).view(4, 2) + number for number in range(3)]
    placements = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]]
    params = [
        nn.Parameter(distribute_tensor(*arguments)) for arguments in zip(whole, [mesh] * 3, placements, strict=True)
    ]
    ranks = Ranks.of()
    ranks.shards = ranks.shards_of(params, lambda param: "a parameter")
    own = torch.stack([param.detach().to_local().norm() for param in params])
    first = ranks.norms(params, own)
    with FromTheHost() as made:
        again = ranks.norms(params, own)
    return first.tolist(), again.tolist(), [tensor.norm().item() for tensor in whole], made.count


# Optimizers -----------------------------------------------------------------------------------------------


def of_two_dims():
    """Weights in every pair of placements, on 2 × 2 ranks."""
    mesh, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")), []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        full = numbers((5, 6), 0)
        mine, theirs = nn.Parameter(shard(full.clone(), mesh, placements)), nn.Parameter(full.clone())
        optimizer, other = optim.AdamW([mine], lr=0.02), optim.AdamW([theirs], lr=0.02)
        halved([mine, theirs], torch.bfloat16)
        for step in range(3):
            for param, its_optimizer in ((mine, optimizer), (theirs, other)):
                give_gradients([param], step)
                its_optimizer.step()
        wrong += [(placements, *difference) for difference in differences([mine], [theirs], optimizer, other)]
    return wrong


#: Of moments that are rounded at random.
STATES = ("bfloat16", "int8")


def rounded_at_random(state_dtype):
    """Equal values everywhere, so that only random bits can make a difference."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layouts = [Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(0)]
    params = [nn.Parameter(shard(torch.ones(4, 64), mesh, layout)) for layout in layouts]
    params.append(nn.Parameter(torch.ones(4, 64)))
    optimizer = optim.AdamW(params, lr=1e-3, weight_decay=0.0, state_dtype=state_dtype)
    halved(params, torch.bfloat16)
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 0.3)
        optimizer.step()
    kept = "exp_avg_codes" if state_dtype == "int8" else "exp_avg"
    return [bits(optimizer.state[param][kept]) for param in params]


# Sessions -------------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def on_meshes():
    trained = {}
    for policy in ("O0", O1, BF16):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = mezzo.fully_shard(net(), policy, mesh=mesh)
        amp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw"](model.parameters()), policy)
        norms = train(model, amp, steps=2)
        trained[policy, "replicas"] = whole(model), norms
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        model = parallelize_module(Parallel(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mezzo.fully_shard(model, policy, mesh=mesh["data"])
        amp = mezzo.MixedPrecision(model, OPTIMIZERS["adamw"](model.parameters()), policy)
        rank = mesh.get_local_rank("data")
        norms = train(model, amp, steps=2, part=lambda tensor, rank=rank: tensor.chunk(2)[rank])
        trained[policy, "tensor"] = whole(model), norms
    return trained


def replicas(state_dtype):
    """Two replicas of two shards: with random rounding, with gradients that differ on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mezzo.fully_shard(net(), FIXED[0], mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, state_dtype=state_dtype)
    amp = mezzo.MixedPrecision(model, optimizer, FIXED[0])
    train(model, amp, steps=2)
    names = "exp_avg", "exp_avg_codes", "exp_avg_scale"
    kept = [name for name in names if name in optimizer.state[model.head.weight]]
    moments = [bits(optimizer.state[param][name]) for param in model.parameters() for name in kept]
    amp.close()
    return moments, [bits(param) for param in model.parameters()]


def everything():
    results = {"norms": norms_over_two_groups(), "shards": of_two_dims(), "meshes": on_meshes()}
    return results | {name: (rounded_at_random(name), replicas(name)) for name in STATES}


@pytest.fixture(scope="module")
def of_four():
    """What :func:`everything` returns on each of four ranks; rank = 2 · its replica + its shard."""
    return on_ranks(4, everything)


def test_norms_over_several_groups_send_nothing_to_the_device_once_it_has_their_places(of_four):
    for first, again, expected, count in (rank["norms"] for rank in of_four):
        assert first == again
        torch.testing.assert_close(torch.tensor(first), torch.tensor(expected))
        assert count == 0


def test_shards_of_any_placement_are_updated_as_in_one_process(of_four):
    assert [rank["shards"] for rank in of_four] == [[]] * 4


@pytest.mark.parametrize("state_dtype", STATES)
def test_copies_of_a_shard_are_rounded_alike_at_random_and_shards_are_not(of_four, state_dtype):
    rounded, ranks = zip(*(rank[state_dtype] for rank in of_four), strict=True)
    hsdp, copies, other_dim, cut_twice, plain = zip(*rounded, strict=True)
    assert hsdp[0] == hsdp[2]
    assert hsdp[1] == hsdp[3]
    assert hsdp[0] != hsdp[1]
    assert len({str(copy) for copy in copies}) == 1
    assert len({str(copy) for copy in plain}) == 1
    assert other_dim[0] == other_dim[1]
    assert other_dim[2] == other_dim[3]
    assert other_dim[0] != other_dim[2]
    assert len({str(copy) for copy in cut_twice}) == 4
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert ranks[0] != ranks[1]


def test_replicas_and_tensor_parallel_shards_train_as_one_process_does(of_four):
    def parallel():
        torch.manual_seed(0)
        return Parallel()

    for policy, limit in (("O0", 1e-5), (BF16, 0.03)):
        for way, make in (("replicas", net), ("tensor", parallel)):
            exact, norms = in_one_process("O0", make, steps=2)
            for rank in of_four:
                params, theirs = rank["meshes"][policy, way]
                worst = max(float((params[name] - value).abs().max()) for name, value in exact.items())
                assert worst < limit, (policy, way)
                assert theirs == pytest.approx(norms, rel=1e-4 if policy == "O0" else 0.05), (policy, way)
                assert same(params, of_four[0]["meshes"][policy, way][0]) == []


def test_o2_is_o1_bit_for_bit_on_two_dims_of_ranks(of_four):
    for meshes in (rank["meshes"] for rank in of_four):
        for way in ("replicas", "tensor"):
            (params, norms), (others, theirs) = meshes[O1, way], meshes[BF16, way]
            assert same(params, others) == [], way
            assert norms == theirs, way
