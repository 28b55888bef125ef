"""O2 over `fully_shard` with mezzo's optimizers: parts in 16 bits, their other half in the optimizer, no bit lost."""

import copy
import gc
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import optim
from mezzo.errors import NumericsError, UnsupportedError

from .ranks import on_ranks
from .test_fully_shard import batch, net, own_part

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Gradients travel in FP32: the mean of two ranks is then exact, but for one rounding to the weights' dtype.
BF16_O2, FP16_O2 = (f"O2,dtype={dtype},reduce=float32,loss_scale=1024" for dtype in ("bfloat16", "float16"))
O3 = "O3,dtype=bfloat16,reduce=float32"
OPTIMIZERS = {
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "lion": (optim.Lion, {"lr": 0.003}),
    "full": (optim.AdamW, {"lr": 0.01, "master": "full"}),
    "none": (optim.AdamW, {"lr": 0.01, "master": None}),
    "kahan": (optim.AdamW, {"lr": 0.01, "master": None, "rounding": "kahan"}),
}


def session(policy, name, model=None, **options):
    model = net() if model is None else model
    kind, defaults = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **(defaults | options))
    return model, optimizer, mezzo.MixedPrecision(model, optimizer, policy)


def sharded(policy, name, **options):
    return session(policy, name, mezzo.fully_shard(net(), policy), **options)


def backward(model, amp, number):
    x, y = map(own_part, batch(number))
    with amp.autocast():
        loss = (model(x) - y).square().mean()
    amp.backward(loss)


def average_gradients(model, wide):
    """Do what `fully_shard` does to gradients to those of a model that every rank has whole.

    It leaves them in FP32 where the parts are.
    """
    for param in model.parameters():
        mean = param.grad.to(FP32)
        dist.all_reduce(mean)
        param.grad_dtype = None
        param.grad = (mean / dist.get_world_size()).to(FP32 if wide else param.dtype)


def own_shard(tensor):
    """This rank's part of a tensor that it has whole: the last rank may have none."""
    parts = tensor.chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else tensor[:0]


def bits(tensor):
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.dtype, tuple(local.shape), local.detach().contiguous().view(-1).view(torch.uint8).tolist()


def like_replicas(cases):
    """Every weight, FP32 value and state against sessions that have all of the model on each rank."""
    wrong = []
    for policy, name in cases:
        model, optimizer, amp = sharded(policy, name)
        other, whole, its = session(policy, name)
        for step in range(3):
            backward(model, amp, step)
            backward(other, its, step)
            average_gradients(other, wide=name == "full")
            amp.step()
            its.step()
            amp.zero_grad()
            its.zero_grad()
        for (key, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            pairs = {"master": (optimizer.master_of(mine), whole.master_of(theirs))}
            if name == "full":  # the part is the master, and what is gathered is rounded to nearest even
                wrong += [(policy, name, key)] if mine.dtype != FP32 else []
            else:
                pairs |= {k: (v, whole.state[theirs][k]) for k, v in optimizer.state[mine].items() if k != "step"}
                pairs["weight"] = mine, theirs
                wrong += [(policy, name, key, "state")] * (optimizer.state[mine].keys() != whole.state[theirs].keys())
            for what, (have, want) in pairs.items():
                if bits(have) != bits(own_shard(want)):
                    wrong.append((policy, name, key, what))
    return wrong


@pytest.mark.slow
def test_parts_are_trained_bit_for_bit_as_whole_models_are():
    assert on_ranks(2, like_replicas, [(BF16_O2, "adamw"), (FP16_O2, "adamw"), (BF16_O2, "full")]) == [[], []]


@pytest.mark.slow
def test_whatever_the_rule_and_the_storage():
    cases = [(BF16_O2, name) for name in ("amsgrad", "momentum", "lion")] + [(FP16_O2, "lion"), (FP16_O2, "full")]
    assert on_ranks(2, like_replicas, [*cases, (O3, "none"), (O3, "kahan")]) == [[], []]


# One session's life -------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Collects the shapes of FP32 tensors that are cast to another dtype."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].dtype == FP32 and kwargs.get("dtype") != FP32:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def exact(optimizer, model):
    return {name: optimizer.master_of(param).full_tensor() for name, param in model.named_parameters()}


def parts(model):
    return {name: param.full_tensor().clone() for name, param in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def lived():
    """From FP32 parts to 16 bits and back, twice, with forward passes before, between and after."""
    found = {}
    model = mezzo.fully_shard(net(), BF16_O2)
    x = own_part(batch(0)[0]).bfloat16()
    model(x).sum().backward()  # torch has looked at the dtypes of the parts by now
    model.zero_grad()
    before = parts(model)
    model, optimizer, amp = session(BF16_O2, "adamw", model)
    found["taken over"] = same(exact(optimizer, model), before)
    found["low"] = {param.dtype for param in model.parameters()} == {BF16}
    lies = [optimizer.state[p][name] for p in model.parameters() for name in ("remainder", "exp_avg", "exp_avg_sq")]
    found["state lies as weights do"] = all(isinstance(each, DTensor) for each in lies)
    with Casts() as casts, amp.autocast():
        loss = model(x.float()).float().sum()
    found["casts"] = [shape for shape in casts.shapes if shape != (4, 3)]  # of the input
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
    for number in range(2):
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()
    trained = exact(optimizer, model)
    found["trained"] = not same(trained, before)
    amp.close()
    found["given back"] = same(parts(model), trained) and {param.dtype for param in model.parameters()} == {FP32}
    found["state"] = {name for state in optimizer.state.values() for name in state}
    model(x).float().sum().backward()
    found["gradients"] = {param.grad.dtype for param in model.parameters()}
    model.zero_grad()
    amp = mezzo.MixedPrecision(model, optimizer, BF16_O2)
    found["again"] = same(exact(optimizer, model), trained)
    backward(model, amp, 3)
    amp.step()
    found["goes on"] = not same(exact(optimizer, model), trained)
    return found


LIVED = {
    "taken over": True,
    "low": True,
    "state lies as weights do": True,
    "casts": [],
    "trained": True,
    "given back": True,
    "state": {"step", "exp_avg", "exp_avg_sq"},
    "gradients": {FP32},
    "again": True,
    "goes on": True,
}


def refused():
    """What is refused leaves FP32 parts and an optimizer without state, on all ranks."""
    found = []
    model = mezzo.fully_shard(net(), FP16_O2)
    with torch.no_grad():  # 65510 is finite in FP16, as 65504; but no remainder goes with that
        if dist.get_rank() == 1:
            model.blocks[0].up.weight._local_tensor[0, 0] = 65510.0
    before = parts(model)
    optimizer = optim.AdamW(model.parameters())
    try:
        mezzo.MixedPrecision(model, optimizer, FP16_O2)
    except NumericsError as error:
        found.append(str(error))
    found.append((same(parts(model), before), len(optimizer.state), {p.dtype for p in model.parameters()}))
    model = mezzo.fully_shard(net(), BF16_O2, wrap="blocks.*")
    inside, around = [*model.blocks[0].up.parameters()], [*model.blocks[0].down.parameters()]
    before = parts(model)
    optimizers = [optim.AdamW(inside), torch.optim.SGD(around, lr=0.1)]
    try:
        mezzo.MixedPrecision(model, optimizers, BF16_O2)
    except UnsupportedError as error:
        found.append(str(error))
    found.append((same(parts(model), before), len(optimizers[0].state), {p.dtype for p in model.parameters()}))
    return found


def kinds_side_by_side():
    """Each module that is sharded by itself has its own kind of optimizer; what nobody updates goes along."""
    model = mezzo.fully_shard(net(), BF16_O2, wrap="blocks.*")
    model.blocks[0].norm.requires_grad_(False)
    split = [param for name, param in model.blocks[0].named_parameters() if "norm" not in name]
    plain = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    optimizers = [
        optim.AdamW(split, lr=0.01),
        optim.AdamW(model.blocks[1].parameters(), lr=0.01, master="full"),
        torch.optim.SGD(plain, lr=0.1),
    ]
    amp = mezzo.MixedPrecision(model, optimizers, BF16_O2)
    before = parts(model)
    for number in range(2):
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()
    after = parts(model)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    return dtypes, moved


def frozen():
    """A module that nobody updates is kept as it is gathered, whatever updates the others."""
    found = []
    for kind in (torch.optim.AdamW, optim.AdamW):
        model = mezzo.fully_shard(net(), BF16_O2, wrap="blocks.*")
        model.blocks[0].requires_grad_(False)
        before = parts(model)
        others = [param for param in model.parameters() if param.requires_grad]
        amp = mezzo.MixedPrecision(model, kind(others, lr=0.01), BF16_O2)
        low = {name for name, param in model.named_parameters() if param.dtype == BF16}
        backward(model, amp, 0)
        step = amp.step()
        amp.close()
        kept = {name: value for name, value in before.items() if "blocks.0" in name}
        now = {name: value for name, value in parts(model).items() if name in kept}
        expected = {name for name in before if kind is optim.AdamW or name in kept}
        found.append((low == expected, same(now, kept), step.skipped.item()))
    return found


def gradients_of(numbers, waits=False):
    """What a window adds up: a step of SGD shows it."""
    model, optimizer, amp = sharded(BF16_O2, "momentum", lr=1.0, momentum=0.0)
    before = exact(optimizer, model)
    for number in numbers:
        model.set_requires_gradient_sync(not waits or number == numbers[-1])
        backward(model, amp, number)
    amp.step()
    after = exact(optimizer, model)
    return {name: before[name] - after[name] for name in before}


def accumulated():
    """Sums over micro-batches against those of each alone, whether each is reduced or only the last."""
    numbers = range(3)
    alone = [gradients_of([number]) for number in numbers]
    return alone, gradients_of(numbers), gradients_of(numbers, waits=True)


def kept():
    """What is saved of a session, loaded into others: they go on as it does; into one process too."""
    found = {}
    model, optimizer, amp = sharded(BF16_O2, "adamw")
    for number in range(3):
        backward(model, amp, number)
        if number < 2:
            amp.step()
            amp.zero_grad()
    found["master params"] = [
        param is each for param, each in zip(amp.master_params(), model.parameters(), strict=True)
    ]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))  # in mid-window
    want = exact(optimizer, model)
    found["masters"] = same({name: value.full_tensor() for name, value in saved[2]["masters"].items()}, want)
    found["model"] = same({n: v.full_tensor() for n, v in optimizer.model_state_dict(model).items()}, want)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        fresh = sharded(BF16_O2, "adamw")
        for each in order:
            fresh[each].load_state_dict(copy.deepcopy(saved[each]))
        found["loaded", order] = same(exact(fresh[1], fresh[0]), want)
    amp.step()
    fresh[2].step()
    found["goes on"] = same(exact(fresh[1], fresh[0]), exact(optimizer, model))
    fresh = sharded(BF16_O2, "adamw")
    fresh[0].load_state_dict(dict(want))  # FP32 values, whole on every rank
    found["whole"] = same(exact(fresh[1], fresh[0]), want)
    alone = session(BF16_O2, "adamw")
    alone[1].load_state_dict(saved[1])
    alone[0].load_state_dict({name: value.full_tensor() for name, value in saved[0].items()})
    found["one process"] = same({n: alone[1].master_of(p) for n, p in alone[0].named_parameters()}, want)
    params = dict(model.named_parameters())
    large = {
        name: distribute_tensor(value, params[name].device_mesh, params[name].placements, src_data_rank=None)
        for name, value in want.items()
    }
    if dist.get_rank() == 1:
        large["blocks.0.up.weight"]._local_tensor.fill_(1e6)
    fresh = sharded(FP16_O2, "adamw")
    try:
        fresh[0].load_state_dict(large)
    except UnsupportedError as error:
        found["too large"] = str(error).splitlines()[0]
    return found


def averaged(gradient):
    mean = gradient.to(FP32)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).to(FP16).to(gradient.dtype)  # parts travel in FP32 and arrive in FP16


def edited():
    """Weights that are clamped, gradients that are clipped by hand, several losses: as on replicas."""
    wrong = []
    policy = "O2,dtype=float16,reduce=float32"
    pairs = [
        (model, *rest, mezzo.MixedPrecision(model, rest[0], policy, num_losses=2))
        for model in (mezzo.fully_shard(net(), policy), net())
        for rest in [(optim.AdamW(model.parameters(), lr=0.01),)]
    ]
    for param in pairs[1][0].parameters():
        param.register_hook(averaged)
    for model, _, amp in pairs:
        state = amp.state_dict()
        for number, scale in enumerate((1024.0, 64.0)):
            state["loss_scales"][number]["scale"] = scale
        amp.load_state_dict(state)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.25, 0.25)
        for number in range(2):
            for loss_id in (0, 1):
                x, y = map(own_part, batch(2 * number + loss_id))
                with amp.autocast():
                    loss = (model(x) - y).square().mean()
                amp.backward(loss, loss_id=loss_id)
            amp.unscale_()
            for param in model.parameters():
                param.grad.mul_(0.5)
            amp.step()
            amp.zero_grad()
    (mine, optimizer, _), (theirs, whole, _) = pairs
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        if bits(optimizer.master_of(one)) != bits(own_shard(whole.master_of(other))):
            wrong.append(name)
    return wrong


def faulty(steps=16):
    """Faults that one rank sees, in a shard or in a loss: skips, scales and weights against those of replicas."""
    policy, ways = "O2,dtype=float16,reduce=float32,loss_scale=dynamic(init=1024,interval=3)", []
    for model in (mezzo.fully_shard(net(), policy), net()):
        model, optimizer, amp = session(policy, "adamw", model)
        if not isinstance(model.head.bias, DTensor):
            for param in model.parameters():
                param.register_hook(averaged)
        chance, seen = random.Random(0), []
        for number in range(steps):
            fault, guilty = chance.choice(["", "", "shard", "loss"]), chance.randrange(2)
            x, y = map(own_part, batch(number))
            with amp.autocast():
                loss = (model(x) - y).square().mean()
            amp.backward(loss * torch.nan if fault == "loss" and dist.get_rank() == guilty else loss)
            weight = chance.choice(list(model.blocks[0].parameters()))
            if fault == "shard" and dist.get_rank() == guilty:
                shard = weight.grad._local_tensor if isinstance(weight, DTensor) else weight.grad
                shard.view(-1)[0] = torch.inf
            step = amp.step()
            amp.zero_grad()
            seen.append((fault, bool(step.skipped), float(step.next_scale), int(step.rank_found)))
        ways.append((seen, [bits(optimizer.master_of(param)) for param in model.parameters()], optimizer, model))
    (mine, exact_parts, *_), (theirs, _, optimizer, model) = ways
    whole = [bits(own_shard(optimizer.master_of(param))) for param in model.parameters()]
    return mine, mine == theirs, exact_parts == whole


def life():
    return lived(), refused(), kinds_side_by_side(), accumulated(), frozen(), faulty(), kept(), edited()


@pytest.fixture(scope="module")
def lives():
    return on_ranks(2, life)


def test_parts_are_halved_and_made_whole_again(lives):
    for found, *_ in lives:
        assert found == LIVED


def test_a_fault_in_one_part_is_one_of_all(lives):
    (*_, (seen, alike, exact_too), _, _), (*_, (others, *rest), _, _) = lives
    assert seen == others
    assert alike
    assert exact_too
    assert all(rest)
    assert {fault for fault, skipped, *_ in seen if skipped} == {"shard", "loss"}
    assert not any(skipped for fault, skipped, *_ in seen if not fault)


def test_what_is_saved_goes_on(lives):
    for *_, found, _ in lives:
        assert found.pop("too large") == "values do not fit float16"
        assert all(found.pop("master params"))
        assert set(found.values()) == {True}


def test_edits_and_several_losses(lives):
    for *_, wrong in lives:
        assert wrong == []


def test_what_cannot_be_kept_is_refused_on_all_ranks(lives):
    for rank, (_, found, *_) in enumerate(lives):
        too_large, state, mixed, after = found
        here = "1 of 15 weights are too large" if rank == 1 else "weights of another rank are too large"
        assert too_large.startswith(here)
        assert "blocks.0.up.weight" in too_large
        assert mixed.startswith("parameters that are gathered together are kept in two ways")
        assert state == after == (True, 0, {FP32})


def test_optimizers_of_several_kinds_update_one_model(lives):
    for _, _, (dtypes, moved), *_ in lives:
        assert {name for name, dtype in dtypes.items() if dtype == BF16} == {n for n in dtypes if "blocks.0" in n}
        assert moved == {name for name in dtypes if not name.startswith("blocks.0.norm")}


def test_what_nobody_updates_is_kept_as_it_is_gathered(lives):
    for _, _, _, _, found, *_ in lives:
        assert found == [(True, True, False)] * 2


def test_gradients_of_micro_batches_are_summed_in_fp32(lives):
    for _, _, _, (alone, together, reduced_once), *_ in lives:
        for name, total in together.items():
            want = sum(each[name] for each in alone)
            largest = max(each[name].abs().max() for each in alone)
            assert (total - want).abs().max() <= 2**-22  # half spacings of weights up to 1, in FP32
            assert (reduced_once[name] - want).abs().max() <= 2**-7 * largest  # spacings of BF16


# Memory, and copies of shards ---------------------------------------------------------------------------


class Wide(nn.Module):
    """Blocks of equal size, each gathered by itself."""

    def __init__(self, width=192):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def held_bytes():
    """Bytes of all tensors, each memory once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and type(each) is not DTensor]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def memory():
    before = held_bytes()
    model = mezzo.fully_shard(Wide(), BF16_O2)
    elements = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    model, _, amp = session(BF16_O2, "adamw", model)
    inside = []
    for _ in range(2):
        hook = model.blocks[3].register_forward_hook(lambda *_: inside.append(held_bytes() - before))
        with amp.autocast():
            loss = model(torch.ones(2, 192)).float().square().mean()
        amp.backward(loss)
        del loss
        hook.remove()
        with_gradients = held_bytes() - before
        amp.step()
        amp.zero_grad()
    return sum(elements), max(elements), with_gradients, inside[-1]


def test_a_parameter_takes_14_bytes_over_all_ranks_and_what_is_gathered():
    for elements, largest, with_gradients, inside in on_ranks(2, memory):
        assert with_gradients == pytest.approx(14 * elements / 2, rel=0.05)
        # Between two blocks torch still holds what arrived of the last one: 2 bytes each. There are no gradients yet.
        assert inside <= 1.05 * (12 * elements / 2 + 2 * 2 * largest)


def replicas():
    """Two replicas of two shards: with random rounding, with gradients that differ on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = "O2,dtype=bfloat16,reduce=float32"
    model = mezzo.fully_shard(net(), policy, mesh=mesh)
    model, optimizer, amp = session(policy, "adamw", model, state_dtype="bfloat16")
    for number in range(3):
        x, y = map(own_part, batch(number))
        with amp.autocast():
            loss = (model(x) - y).square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
    found = {name: bits(optimizer.master_of(param)) for name, param in model.named_parameters()}
    return found, [bits(optimizer.state[param]["exp_avg"]) for param in model.parameters()]


@pytest.mark.slow
def test_replicas_stay_alike_to_the_bit():
    ranks = on_ranks(4, replicas)
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert ranks[0] != ranks[1]
