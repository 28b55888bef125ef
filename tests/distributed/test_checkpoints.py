"""Checkpoints of several ranks: as many go on bit for bit, more or fewer with equal weights, moments and counters."""

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import MixedPrecision, StateError, optim
from mezzo.session.session import weights_of
from mezzo.step.moments import valued

from .ranks import on_ranks

# What torch says of a checkpoint in one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")

OPTIMIZERS = {
    "split": lambda params: optim.AdamW(params, lr=0.01),
    "codes": lambda params: optim.AdamW(params, lr=0.01, state_dtype="int8"),
    "muon": lambda params: optim.Muon(params, lr=0.01, adamw={"lr": 0.01}),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "damped": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
}
POLICIES = ["O2,dtype=bfloat16,emulate=true", "O2,emulate=true", "O1,emulate=true"]
#: By name: how many ranks, and their mesh where the model is sharded.
WORLDS = {"one": (1, None), "ddp": (2, None), "two": (2, (2,)), "four": (4, (4,)), "hsdp": (4, (2, 2))}


def net(seed, width=7):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 3))


def session(world, policy, name, seed, width=7):
    """Return what to call, and the session; shards are uneven, and on four ranks some are empty."""
    (count, shape), model = WORLDS[world], net(seed, width)
    if shape is not None:
        names = ("copies", "parts")[-len(shape) :]
        mezzo.fully_shard(model, policy, wrap=nn.Linear, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    amp = MixedPrecision(model, OPTIMIZERS[name](model.parameters()), policy)
    return model if shape is not None or count == 1 else DistributedDataParallel(model), amp


def train(model, amp, numbers):
    for number in numbers:
        x = torch.sin(torch.arange(48.0) * (number + 1)).view(8, 6).chunk(dist.get_world_size())[dist.get_rank()]
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()


def flat(value):
    """Yield a state as bytes: of DTensors what all ranks hold, of numbers their values, whatever their dtype."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from flat(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield whole.detach().double().contiguous().numpy().tobytes()
    else:
        yield str(value).encode()


def digest(*values):
    return hashlib.sha256(b"".join(flat(values))).hexdigest()


def state(amp):
    """Return a session's state in one word: FP32 weights, moments, counters and scales."""
    states = amp.stateful().state_dict()
    session = states["session"][0]
    stats = {name: value for name, value in session["stats"].items() if name != "ranks"}
    return digest(states["model"], states["optimizers"], session["loss_scale"], stats)


def saved(folders):
    words = {}
    for (world, policy, name), folder in folders.items():
        model, amp = session(world, policy, name, seed=0)
        train(model, amp, range(2))
        checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder)
        before = state(amp)
        train(model, amp, range(5, 7))
        words[world, policy, name] = [before, state(amp)]
    return words


def loaded(worlds, folders):
    words = {}
    for world, ((source, policy, name), folder) in itertools.product(worlds, folders.items()):
        model, amp = session(world, policy, name, seed=1)
        checkpoint.load({"app": amp.stateful()}, checkpoint_id=folder)
        words[world, source, policy, name] = [state(amp)]
        if world == source:
            train(model, amp, range(5, 7))
            words[world, source, policy, name].append(state(amp))
    return words


FEW = ["one", "ddp", "two"], [(POLICIES[0], "split"), (POLICIES[0], "muon")]
#: Four ranks and two dims of them; policies, and optimizers of torch's.
MORE = list(WORLDS), [(POLICIES[1], "adamw"), (POLICIES[2], "damped")]


def all_saved(folders, file):
    words = saved(folders)
    return (words, to_a_file(file)) if dist.get_world_size() == 1 else (words, None)


def all_loaded(worlds, folders, file):
    """Load what any number of ranks has saved; on two ranks a file of one process and other models' too."""
    words, results = loaded(worlds, folders), {}
    if dist.get_world_size() == 2:
        results = {"file": from_a_file(file), "others": other_models(folders)}
    if dist.get_world_size() < 4:
        results["torch"] = by_torch([case for case in BY_TORCH if case[0] in worlds], file.parent)
    return words, results


#: Policies and optimizers that go through torch's own state dicts, without the session.
BY_TORCH = [
    ("one", POLICIES[1], "split"),
    ("ddp", POLICIES[0], "fused"),
    ("two", POLICIES[0], "fused"),
    ("two", POLICIES[1], "split"),
    ("two", POLICIES[0], "codes"),
    ("two", POLICIES[0], "muon"),
]


@pytest.mark.parametrize("worlds, kinds", [FEW, pytest.param(*MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_any_number_of_ranks_loads_what_any_other_saved(worlds, kinds, tmp_path):
    folders = {(world, *kinds[n]): tmp_path / f"{world}{n}" for world in worlds for n in range(len(kinds))}
    counts = sorted({WORLDS[world][0] for world in worlds})
    of = {count: [world for world in worlds if WORLDS[world][0] == count] for count in counts}
    there, wrong, file = {}, [], tmp_path / "one.pt"
    for count, alike in of.items():
        mine = {key: path for key, path in folders.items() if key[0] in alike}
        ranks = on_ranks(count, all_saved, mine, file)
        words = [of_rank for of_rank, _ in ranks]
        wrong += [("saved", key) for key in words[0] if any(of_rank[key] != words[0][key] for of_rank in words)]
        there |= words[0]
        there["file"] = ranks[0][1] or there["file"]
    for count, alike in of.items():
        ranks = on_ranks(count, all_loaded, alike, folders, file)
        words = [of_rank for of_rank, _ in ranks]
        for key, word in words[0].items():
            wrong += [("ranks differ", key)] * any(of_rank[key] != word for of_rank in words)
            wrong += [("loaded", key)] * (word != there[key[1:]][: len(word)])
        for _, results in ranks:
            wrong += results.get("torch", [])
            if count == 2:
                assert results["file"] == [there["file"]] * 2  # whole, and in parts
                refused = [("StateError", True), True, ("CheckpointException", True), True]
                assert results["others"] == refused * 2  # on all ranks, and nothing is loaded
    assert wrong == []


def from_a_file(path):
    words = []
    for world in ("ddp", "two"):
        _, amp = session(world, POLICIES[0], "split", seed=1)
        amp.stateful().load_state_dict(mezzo.load(path))
        words.append(state(amp))
    return words


def to_a_file(path):
    model, amp = session("one", POLICIES[0], "adamw", seed=0)
    train(model, amp, range(2))
    mezzo.save(path, **amp.stateful().state_dict())
    return state(amp)


def other_models(folders):
    outcomes = []
    for world in ("ddp", "two"):
        (policy, name), folder = next((key[1:], path) for key, path in folders.items() if key[0] == world)
        for width in (7, 9):
            _, same = session(world, policy, name, seed=1, width=width)
            if width == 7:  # a smaller model, whose every key is there
                inner = nn.Sequential(nn.Linear(6, 7))
                mezzo.fully_shard(inner, policy, wrap=nn.Linear) if world == "two" else None
                same = MixedPrecision(inner, OPTIMIZERS[name](inner.parameters()), policy)
            before = state(same)
            try:
                checkpoint.load({"app": same.stateful()}, checkpoint_id=folder)
            except (StateError, checkpoint.CheckpointException) as error:
                outcomes.append((type(error).__name__, "0.weight" in str(error) or "2.weight" in str(error)))
            outcomes.append(before == state(same))
    return outcomes


def by_torch(kinds, folder):
    """Go through torch's own state dicts of models and optimizers, without the session."""
    wrong = []
    for world, policy, name in kinds:
        sessions = []
        for seed in range(2):
            model, amp = session(world, policy, name, seed)
            train(model, amp, range(0 if seed else 2))
            weights, moments = get_state_dict(model, weights_of(amp).optimizers[0])
            sessions.append((model, amp, {"model": weights, "optimizer": moments}))
        (model, amp, there), (other, same, read) = sessions
        checkpoint.save(there, checkpoint_id=folder / f"torch{world}{policy}{name}")
        checkpoint.load(read, checkpoint_id=folder / f"torch{world}{policy}{name}")
        moments = {"model_state_dict": read["model"], "optim_state_dict": read["optimizer"]}
        set_state_dict(other, weights_of(same).optimizers[0], **moments)
        train(model, amp, range(2, 4))
        train(other, same, range(2, 4))
        wrong += [("went on", world, policy, name)] * (kept(amp) != kept(same))
    return wrong


def kept(amp):
    """Return FP32 weights and the optimizer's state in one word."""
    states = amp.stateful().state_dict()
    return digest(states["model"], states["optimizers"])


# By torch.distributed.checkpoint alone ----------------------------------------------------------------------


def of_model(model):
    return digest(model.state_dict())


def plain_or_halves(policy, seed):
    """Return a model in either storage: in one process whole, else in shards."""
    model = net(seed)
    if dist.get_world_size() > 1:
        mezzo.fully_shard(model, policy, wrap=nn.Linear)
    return model, MixedPrecision(model, OPTIMIZERS["adamw"](model.parameters()), policy)


def saved_by_torch(folder):
    """Save a model by each call, once more weights than were saved have changed since; return what was there."""
    words = {}
    for name in ("save", "async_save"):
        model, amp = plain_or_halves(POLICIES[0], 0)
        train(model, amp, range(2))
        words[name] = of_model(model)
        saving = getattr(checkpoint, name)({"model": model.state_dict()}, checkpoint_id=folder / name)
        with torch.no_grad():
            for param in model.parameters() if name == "async_save" else ():
                param.mul_(2)
        if name == "async_save":
            saving.result()
        words[f"{name}, after"] = of_model(model) != words[name]
    return words


def loaded_by_torch(folder, names):
    """Load into halves and into plain parameters: by ``load_state_dict``, and into the tensors that are there."""
    words = {}
    for name in names:
        for policy in (POLICIES[0], "O1,dtype=bfloat16,emulate=true"):
            model, _ = plain_or_halves(policy, 1)
            state = {"model": model.state_dict()}
            checkpoint.load(state, checkpoint_id=folder / name)
            model.load_state_dict(state["model"])
            words[name, policy] = of_model(model)
    return words


def test_torch_alone_saves_and_loads_halves_over_any_number_of_ranks(tmp_path):
    ranks = on_ranks(2, saved_by_torch, tmp_path)
    there, names = ranks[0], ("save", "async_save")
    assert ranks[1] == there
    assert there["save, after"] is False
    assert there["async_save, after"] is True
    for count in (1, 2, 4):
        for words in on_ranks(count, loaded_by_torch, tmp_path, names):
            assert {key: word == there[key[0]] for key, word in words.items()} == dict.fromkeys(words, True), count


# Moments in codes -----------------------------------------------------------------------------------------


def decoded(amp):
    """Return the moments that codes stand for."""
    values = []
    for moments in amp.stateful().state_dict()["optimizers"]["0"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            codes, scales = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                             for tensor in (moments[f"{name}_codes"], moments[f"{name}_scale"]))  # fmt: skip
            values.append(valued(codes, scales).flatten().tolist())
    return values


def read_in_codes(world, folders):
    """Load what each number of ranks has saved: the state in one word, the weights, and the moments."""
    by_source = {}
    for source, folder in folders.items():
        _, amp = session(world, POLICIES[0], "codes", seed=1)
        checkpoint.load({"app": amp.stateful()}, checkpoint_id=folder)
        by_source[source] = state(amp), digest(amp.stateful().state_dict()["model"]), decoded(amp)
    return by_source


def saved_in_codes(world, folder):
    model, amp = session(world, POLICIES[0], "codes", seed=0)
    train(model, amp, range(2))
    checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder)
    return state(amp), digest(amp.stateful().state_dict()["model"]), decoded(amp)


def test_codes_are_the_same_over_as_many_shards_and_rounded_once_more_over_others(tmp_path):
    """Groups of neighbours are those of a shard."""
    worlds = ("one", "ddp", "two")
    folders = {world: tmp_path / world for world in worlds}
    before = {world: on_ranks(WORLDS[world][0], saved_in_codes, world, folders[world])[0] for world in worlds}
    alike = {"one": {"one", "ddp"}, "ddp": {"one", "ddp"}, "two": {"two"}}
    for world in worlds:
        for by_source in on_ranks(WORLDS[world][0], read_in_codes, world, folders):
            for source, (word, weights, moments) in by_source.items():
                assert weights == before[source][1]
                assert source not in alike[world] or word == before[source][0], (source, world)
                for mine, theirs in zip(moments, before[source][2], strict=True):
                    most = max(map(abs, theirs))  # within half a code, of which 2^-7 is the largest next to zero
                    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1 / 32, atol=most / 2**12)
