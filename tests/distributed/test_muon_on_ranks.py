"""mezzo.optim.Muon over DTensors and in sharded sessions: each shard as torch's Muon has it in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import optim
from mezzo.sharded import local, placed
from mezzo.tensors import tensors
from mezzo.weights import Halves
from mezzo.weights.models import store

from .ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
#: Each shard has whole vectors of a processor: sums round once in those, and twice in what is left of a tensor.
WHOLE_VECTORS = [(3, 64), (1, 64), (64, 128), (128, 64), (8, 64)]
#: The bits of others depend on where shards end; and (0, 5) has no element at all.
UNEVEN = [(5, 3), (3, 20), (9, 1), (0, 5)]


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shard(full, mesh, placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to(FP32).clone()


def pairs(shapes, mesh, placements):
    """Return the same matrices twice: as DTensors, and whole."""
    values = [normal(shape, seed) for seed, shape in enumerate(shapes)]
    sharded = [nn.Parameter(shard(value, mesh, placements)) for value in values]
    return sharded, [nn.Parameter(value.clone()) for value in values]


def give_gradients(params, step):
    for seed, param in enumerate(params):
        gradient = normal(param.shape, 100 * step + seed + 50)
        param.grad = shard(gradient, param.device_mesh, param.placements) if isinstance(param, DTensor) else gradient


def distances(sharded, others, optimizer, other):
    """Return how far weights and momentum are apart, at most."""
    columns = [(whole(mine), theirs.detach()) for mine, theirs in zip(sharded, others, strict=True)]
    for mine, theirs in zip(sharded, others, strict=True):
        assert isinstance(optimizer.state[mine]["momentum_buffer"], DTensor)
        columns.append((whole(optimizer.state[mine]["momentum_buffer"]), other.state[theirs]["momentum_buffer"]))
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in columns]


def updates(mesh, layouts, shapes, dtype=FP32):
    farthest = {}
    for placements in layouts:
        sharded, others = pairs(shapes, mesh, placements)
        optimizer, other = optim.Muon(sharded, lr=0.02), torch.optim.Muon([p for p in others if p.numel()], lr=0.02)
        if dtype != FP32:
            store(dict.fromkeys(sharded, dtype), dict.fromkeys(sharded, "a weight"))
            assert all(isinstance(local(param), Halves) for param in sharded)
        for step in range(3):
            for params, stepping in ((sharded, optimizer), (others, other)):
                give_gradients(params, step)
                stepping.step()
        filled = [index for index, param in enumerate(others) if param.numel()]
        mine, theirs = ([params[index] for index in filled] for params in (sharded, others))
        farthest[str(placements)] = max(distances(mine, theirs, optimizer, other))
    return farthest


def changed_over():
    """A state of shards goes on in one process, and one of a single process in shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, others = pairs(WHOLE_VECTORS, mesh, [Shard(0)])
    optimizer, other = optim.Muon(sharded, lr=0.02), optim.Muon(others, lr=0.02)
    for step in range(4):
        if step == 2:
            states = optimizer.state_dict(), other.state_dict()
            optimizer, other = optim.Muon(sharded, lr=0.5), optim.Muon(others, lr=0.5)
            optimizer.load_state_dict(states[1])
            other.load_state_dict(states[0])
        for params, stepping in ((sharded, optimizer), (others, other)):
            give_gradients(params, step)
            stepping.step()
    return max(distances(sharded, others, optimizer, other))


class Gathers(TorchDispatchMode):
    """Lists the dtype of all that is gathered meanwhile, and names other collectives."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(cls.__module__.startswith("torch.distributed") for cls in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and not any(
            word in func._opname for word in ("wait", "wrap")
        ):
            if "gather" in func._opname.replace("_", ""):
                self.dtypes.append(str(next(iter(tensors([*args, out]))).dtype))
            else:
                self.others.append(func._opname)
        return out


def gathers():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, _ = pairs(WHOLE_VECTORS, mesh, [Shard(0)])
    optimizer = optim.Muon(sharded, lr=0.02, state_dtype="int8")
    store(dict.fromkeys(sharded, BF16), dict.fromkeys(sharded, "a weight"))
    for step in range(2):
        give_gradients(sharded, step)
        with Gathers() as counted:
            optimizer.step()
    optimizer.found_inf = torch.tensor(1.0)
    with Gathers() as skipped:
        optimizer.step()
    return counted.dtypes, counted.others, len(skipped.dtypes)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 11)
    )


def session(policy, mesh=None, state_dtype="float32"):
    """Train on the same batch on each rank, so that the mean of gradients is each of them: one batch is infinite."""
    model = model_of()
    if mesh is not None:
        mezzo.fully_shard(model, policy, mesh=mesh, wrap=(nn.Linear,))
    optimizer = optim.Muon(optim.matrices_of(model, lr=1e-3), lr=0.02, state_dtype=state_dtype)
    amp = mezzo.MixedPrecision(model, optimizer, policy)  # without clipping: sums of norms differ in their last bit
    skipped = []
    for batch in range(4):
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(batch))
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        amp.backward(loss * (torch.inf if batch == 2 else 1.0))
        skipped.append(bool(amp.step().skipped))
        amp.zero_grad()
    return {name: whole(param) for name, param in model.named_parameters()}, skipped


POLICIES = ("O0", "O1,bf16,emulate=true", "O2,bf16,emulate=true")


def over_two_axes():
    """Matrices that tensor parallelism has cut, each part cut again by ``fully_shard``, in two orders of the cuts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    values = [normal(layer.weight.shape, seed) for seed, layer in enumerate(model)]
    others = [nn.Parameter(value.clone()) for value in values]
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    mezzo.fully_shard(model, "O2,bf16,emulate=true", mesh=mesh["data"])
    sharded = [layer.weight for layer in model]
    with torch.no_grad():
        for param, value in zip(sharded, values, strict=True):
            param.copy_(placed(value, param))
    optimizer, other = optim.Muon(sharded, lr=0.02), torch.optim.Muon(others, lr=0.02)
    for step in range(3):
        for seed, (param, theirs) in enumerate(zip(sharded, others, strict=True)):
            theirs.grad = normal(theirs.shape, 100 * step + seed)
            param.grad = placed(theirs.grad, param)
        optimizer.step()
        other.step()
    return max(distances(sharded, others, optimizer, other)), [str(param.placements) for param in sharded]


def of_two_ranks():
    mesh = init_device_mesh("cpu", (2,))
    layouts = [[Shard(0)], [Replicate()]]
    return {
        "whole vectors": updates(mesh, layouts, WHOLE_VECTORS),
        "by columns": updates(mesh, [[Shard(1)]], WHOLE_VECTORS[2:4]),
        "in halves": updates(mesh, layouts, WHOLE_VECTORS, BF16),
        "uneven": updates(mesh, [*layouts, [Shard(1)]], UNEVEN),
        "changed over": changed_over(),
        "gathers": gathers(),
        "sessions": {policy: session(policy, mesh) for policy in POLICIES},
    }


def of_four_ranks():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layouts = [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(1)]]
    return {
        "layouts": updates(mesh, layouts, [(64, 128), (128, 256)], BF16),
        "sessions": {policy: session(policy, mesh) for policy in POLICIES[::2]},
        "copies": session(POLICIES[2], mesh, "int8"),
        "two axes": over_two_axes(),
    }


@pytest.fixture(scope="module")
def of_two():
    return on_ranks(2, of_two_ranks)


@pytest.fixture(scope="module")
def of_four():
    return on_ranks(4, of_four_ranks)


def test_shards_of_whole_vectors_are_torch_s_bit_for_bit(of_two, of_four):
    for result in of_two:
        for name in ("whole vectors", "by columns", "in halves"):
            assert set(result[name].values()) == {0.0}, (name, result[name])
    for result in of_four:
        assert set(result["layouts"].values()) == {0.0}, result["layouts"]


def test_parts_of_tensor_parallelism_that_are_cut_again_are_torch_s_bit_for_bit(of_four):
    for result in of_four:
        farthest, placements = result["two axes"]
        assert farthest == 0.0, placements
        assert "Strided" in placements[0]


def test_other_shards_are_so_up_to_the_roundings_of_sixteen_bits(of_two):
    for result in of_two:
        assert max(result["uneven"].values()) <= 3 * 0.02 * 2**-6, result["uneven"]


def test_a_state_goes_on_over_another_number_of_ranks(of_two):
    assert [result["changed over"] for result in of_two] == [0.0, 0.0]


def test_each_matrix_is_gathered_once_in_sixteen_bits_and_a_skipped_step_gathers_none(of_two):
    for result in of_two:
        assert result["gathers"] == (["torch.bfloat16"] * len(WHOLE_VECTORS), [], 0)


def test_sharded_sessions_train_as_one_process_does_and_skip_together(of_two, of_four):
    for policy in POLICIES:
        expected, skipped = session(policy)
        assert skipped == [False, False, True, False]
        for result in (*of_two, *of_four):
            if policy in result["sessions"]:
                params, skips = result["sessions"][policy]
                assert skips == skipped
                assert [name for name, value in expected.items() if not torch.equal(params[name], value)] == [], policy


def test_replicas_of_a_momentum_in_codes_stay_the_same(of_four):
    params = [result["copies"][0] for result in of_four]
    assert all(torch.equal(other[name], value) for other in params[1:] for name, value in params[0].items())
