"""Checkpoints of two dims of ranks: as many go on bit for bit, others with equal weights, moments and counts."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mezzo
from mezzo import MixedPrecision
from mezzo.sharded import local, placed

from .ranks import on_ranks
from .test_checkpoints import OPTIMIZERS, decoded, digest, net, state
from .test_fully_shard import same, whole

POLICY = "O2,dtype=bfloat16,emulate=true"
#: By name: the mesh, and the names of its dims; seven rows are cut unevenly, and of three one rank has none.
MESHES = {
    "mesh": ((2, 2), ("data", "tensor")),
    "renamed": ((2, 2), ("rows", "heads")),
    "tensors": ((1, 4), ("data", "tensor")),
    "data": ((4,), ("data",)),
}
CUT = {
    "0": ColwiseParallel(use_local_output=False),
    "2": RowwiseParallel(),
    "4": ColwiseParallel(output_layouts=Replicate()),
}


def session(name, optimizer, seed):
    """Return a model on a mesh, its session, and this rank's part of the data; in one process without a mesh."""
    model, rank, size = net(seed), 0, 1
    if name in MESHES:
        shape, dims = MESHES[name]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
        if len(shape) == 2:
            parallelize_module(model, mesh[dims[1]], CUT)
        if shape[0] > 1:
            mezzo.fully_shard(model, POLICY, wrap=nn.Linear, mesh=mesh[dims[0]])
        rank, size = mesh.get_local_rank(dims[0]), shape[0]
    return model, MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), POLICY), (rank, size)


def train(model, amp, part, numbers):
    rank, size = part
    for number in numbers:
        x = torch.sin(torch.arange(48.0) * (number + 1)).view(8, 6).chunk(size)[rank]
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()


def word(amp, optimizer):
    """Return weights, and moments and counts as far as they are the same numbers over any shards."""
    return digest(amp.stateful().state_dict()["model"]) if optimizer == "codes" else state(amp)


def saved(name, optimizer, folder):
    """Train and save; return what was saved, and what two more steps make of it."""
    model, amp, part = session(name, optimizer, seed=0)
    train(model, amp, part, range(2))
    checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder)
    before = word(amp, optimizer), decoded(amp) if optimizer == "codes" else []
    train(model, amp, part, range(2, 4))
    return *before, word(amp, optimizer)


def loaded(name, optimizer, folder, goes_on):
    model, amp, part = session(name, optimizer, seed=1)
    checkpoint.load({"app": amp.stateful()}, checkpoint_id=folder)
    before = word(amp, optimizer), decoded(amp) if optimizer == "codes" else []
    if goes_on:
        train(model, amp, part, range(2, 4))
    return *before, word(amp, optimizer)


def saved_and_loaded(folder):
    """Save on one mesh and load on each; save on others and load on that one."""
    texts = {}
    for optimizer in ("split", "codes"):
        for name in ("mesh", "data") if optimizer == "split" else ("mesh",):
            texts["saved", optimizer, name] = saved(name, optimizer, folder / f"{optimizer} {name}")
    for name in MESHES:
        alike = name in ("mesh", "renamed")
        texts["loaded", "split", "mesh", name] = loaded(name, "split", folder / "split mesh", goes_on=alike)
    texts["loaded", "codes", "mesh", "renamed"] = loaded("renamed", "codes", folder / "codes mesh", goes_on=True)
    texts["loaded", "codes", "mesh", "data"] = loaded("data", "codes", folder / "codes mesh", goes_on=False)
    texts["loaded", "split", "data", "mesh"] = loaded("mesh", "split", folder / "split data", goes_on=False)
    texts["loaded", "split", "one", "mesh"] = loaded("mesh", "split", folder / "split one", goes_on=False)
    return texts, places()


# Where a whole tensor goes --------------------------------------------------------------------------------


class Matrix(nn.Module):
    def __init__(self, rows, mesh, placement):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.arange(rows * 6.0).view(rows, 6), mesh, [placement]))


def places():
    """Return for which shapes a whole tensor is not cut as ``fully_shard`` has cut a parameter over a part of it."""
    mesh, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), []
    for rows in range(1, 8):
        for placement in (Shard(0), Shard(1), Replicate()):
            model = mezzo.fully_shard(Matrix(rows, mesh["tensor"], placement), "O0", mesh=mesh["data"])
            expected = torch.arange(rows * 6.0).view(rows, 6)
            pairs = {"gathered": whole(model)["weight"], "placed": local(placed(expected, model.weight))}
            wrong += [(rows, model.weight.placements, "gathered")] * bool(same({"": pairs["gathered"]}, {"": expected}))
            here = local(model.weight.detach())
            wrong += [(rows, model.weight.placements, "placed")] * bool(same({"": pairs["placed"]}, {"": here}))
    return wrong


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """What one process has saved, what it makes of each checkpoint, and what four ranks do with them."""
    folder = tmp_path_factory.mktemp("meshes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of a checkpoint in one process
        alone = saved("one", "split", folder / "split one")
        ranks = on_ranks(4, saved_and_loaded, folder)
        back = {name: loaded("one", name, folder / f"{name} mesh", goes_on=False) for name in ("split", "codes")}
    return alone, ranks, back


def test_meshes_load_what_any_other_has_saved(of_four):
    alone, ranks, back = of_four
    for texts, _ in ranks:
        source = texts["saved", "split", "mesh"]
        assert texts["loaded", "split", "mesh", "mesh"] == texts["loaded", "split", "mesh", "renamed"] == source
        for name in ("tensors", "data"):
            assert texts["loaded", "split", "mesh", name][0] == source[0], name
        assert back["split"][0] == source[0]
        assert texts["loaded", "split", "data", "mesh"][0] == texts["saved", "split", "data"][0]
        assert texts["loaded", "split", "one", "mesh"][0] == alone[0]


def test_moments_in_codes_are_those_of_the_same_mesh_and_close_on_others(of_four):
    _, ranks, back = of_four
    for texts, _ in ranks:
        weights, moments, later = texts["saved", "codes", "mesh"]
        assert texts["loaded", "codes", "mesh", "renamed"] == (weights, moments, later)
        for other in (texts["loaded", "codes", "mesh", "data"], back["codes"]):
            assert other[0] == weights
            for numbers, expected in zip(other[1], moments, strict=True):
                largest = max(map(abs, expected))
                numbers, expected = torch.tensor(numbers), torch.tensor(expected)
                torch.testing.assert_close(numbers, expected, rtol=1 / 32, atol=largest / 2**12)


def test_a_whole_tensor_is_cut_as_fully_shard_cuts_what_lies_in_parts(of_four):
    _, ranks, _ = of_four
    assert [wrong for _, wrong in ranks] == [[]] * 4
