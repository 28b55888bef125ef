"""mezzo's optimizers over DTensors, no session around them: each shard as the same optimizer in one process has it."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from mezzo import optim
from mezzo.optim import optimizer as optimizer_file
from mezzo.sharded import local
from mezzo.step.executors.portable import Portable
from mezzo.step.moments import decode, fit
from mezzo.weights import Halves
from mezzo.weights.models import store

from .ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Shapes with a placement on one dim of ranks: uneven, empty on the last rank, by columns, replicated, and one number.
SHARDED = [((5, 3), Shard(0)), ((1, 4), Shard(0)), ((4, 6), Shard(1)), ((7,), Shard(0)), ((3, 2), Replicate()),
           ((), Replicate()), ((0, 3), Shard(0))]  # fmt: skip
RULES = {
    "adamw": (optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd": (optim.SGD, {"lr": 0.1}),
    "lion": (optim.Lion, {"lr": 0.01}),
}
STORED = [FP32, BF16, FP16]


def numbers(shape, seed):
    return torch.sin(torch.arange(1.0, 1 + torch.Size(shape).numel()) * (seed + 1.7)).view(shape)


def bits(tensor):
    tensor = local(tensor.detach()).clone()
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def shard(full, mesh, placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def halved(params, dtype):
    if dtype != FP32:
        store(dict.fromkeys(params, dtype), dict.fromkeys(params, "a weight"))
        assert all(isinstance(local(param), Halves) for param in params)


def params_of(mesh, placements=None):
    """The same parameters twice: as DTensors, the last one plain, and whole."""
    whole = [nn.Parameter(numbers(shape, seed)) for seed, (shape, _) in enumerate(SHARDED)]
    sharded = [
        nn.Parameter(shard(param.detach().clone(), mesh, placements if placements and param.dim() else [placement]))
        for param, (_, placement) in zip(whole, SHARDED, strict=True)
    ]
    plain = nn.Parameter(numbers((3,), 9))
    return [*sharded, plain], [*whole, nn.Parameter(plain.detach().clone())]


def give_gradients(params, step, without=()):
    for seed, param in enumerate(params):
        if seed in without:
            param.grad = None
            continue
        gradient = numbers(param.shape, 10 * step + seed).to(param.dtype)
        if isinstance(param, DTensor):
            gradient = shard(gradient, param.device_mesh, param.placements)
        param.grad = gradient


def same(have, want, ulps):
    """Whether two tensors are: bit for bit, or FP32 arithmetic within some units in the last place."""
    if not ulps or have.dtype in (torch.int16, torch.int64):
        return bits(have) == bits(want) or bool(ulps)
    have, want = (local(tensor.detach()) for tensor in (have, want))
    eps = torch.finfo(have.dtype).eps
    return torch.allclose(have, want, rtol=ulps * eps, atol=ulps * 2**-23)


def differences(sharded, whole, optimizer, other, ulps=0):
    """Name what of some sharded parameters and their state is not the shard of what it should be."""
    wrong = []
    for number, (mine, theirs) in enumerate(zip(sharded, whole, strict=True)):
        pairs = {"weight": (mine, theirs.detach().clone())}
        state, wanted = optimizer.state[mine], other.state[theirs]
        if state.keys() != wanted.keys():
            wrong.append((number, sorted(state), sorted(wanted)))
            continue
        pairs |= {name: (state[name], wanted[name]) for name in state}
        for name, (have, want) in pairs.items():
            if isinstance(mine, DTensor) and name != "step":
                if not isinstance(have, DTensor) or have.placements != mine.placements or have.shape != want.shape:
                    wrong.append((number, name, type(have).__name__))
                    continue
                want = shard(want.detach(), mine.device_mesh, mine.placements)
            if not same(have, want, ulps):
                wrong.append((number, name, have, want))
    return wrong


def updates(executor, cases):
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    # torch's own kernel for the CPU rounds the last few elements of a vector otherwise than the others.
    ulps = 2 if executor == "portable" else 0
    for rule, dtype in cases:
        optimizer_class, options = RULES[rule]
        sharded, whole = params_of(mesh)
        optimizer, other = (optimizer_class(params, **options) for params in (sharded, whole))
        halved([*sharded, *whole], dtype)
        for step in range(4):
            for params, its_optimizer in ((sharded, optimizer), (whole, other)):
                give_gradients(params, step, without=[1, 3] if step == 2 else ())
                if step == 3:
                    its_optimizer.param_groups[0]["lr"] *= 0.5
                its_optimizer.step()
        wrong += [(rule, dtype, *difference) for difference in differences(sharded, whole, optimizer, other, ulps)]
    return wrong


def lying_otherwise():
    """Gradients need not lie as their weights do: sums over ranks that nobody has taken, copies of all, plain ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, whole = params_of(mesh)
    optimizer, other = (optim.AdamW(params, lr=0.02) for params in (sharded, whole))
    halved([*sharded, *whole], BF16)
    give_gradients(whole, 1)
    other.step()
    for number, (mine, theirs) in enumerate(zip(sharded, whole, strict=True)):
        gradient = theirs.grad.clone()
        if number % 2 == 0:
            mine.grad = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()])
        elif number < len(SHARDED):
            mine.grad = shard(gradient, mesh, [Replicate()])
        else:
            mine.grad = gradient
    optimizer.step()
    return differences(sharded, whole, optimizer, other)


def only_counted_together():
    """A step of zero rates and gradients only makes state; it is one for all ranks, although one sees zeros alone."""
    mesh, counts = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for gradient in (torch.zeros(2), torch.tensor([1.0, 0.0])):
        param = nn.Parameter(shard(torch.ones(2), mesh, [Shard(0)]))
        optimizer = optim.AdamW([param], lr=0.0)
        param.grad = shard(gradient, mesh, [Shard(0)])
        optimizer.step()
        counts.append(int(optimizer.state[param]["step"]))
    return counts


def edited():
    """Programs put moments where they like, whole ones and shards; a count that is set to zero is one for all ranks."""
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for rule, options in (("adamw", {}), ("momentum", {"nesterov": False, "dampening": 0.5}), ("lion", {})):
        optimizer_class, known = RULES[rule]
        sharded, whole = params_of(mesh)
        optimizer, other = (optimizer_class(params, **{**known, **options}) for params in (sharded, whole))
        for step in range(5):
            for params, its_optimizer in ((sharded, optimizer), (whole, other)):
                if step == 2:
                    edit(its_optimizer, params, whole)
                if step == 3:
                    its_optimizer.state.pop(params[2])
                give_gradients(params, step)
                its_optimizer.step()
        wrong += [(rule, *difference) for difference in differences(sharded, whole, optimizer, other)]
    return wrong


def edit(optimizer, params, whole):
    for number, (param, like) in enumerate(zip(params, whole, strict=True)):
        entry = optimizer.state[param]
        for name in [name for name in entry if name != "step"]:
            value = numbers(like.shape, number).abs()
            if number == 0:  # on the first rank alone it is not zero
                value[1:] = 0
            on_mesh = isinstance(param, DTensor) and number % 2 == 0
            entry[name] = shard(value, param.device_mesh, param.placements) if on_mesh else value
        if number == 0:
            entry["step"] = 0


SOME = [(rule, dtype) for rule, dtype in itertools.product(RULES, STORED) if rule == "adamw" or dtype == BF16]


def trained(dtype, mesh):
    sharded, whole = params_of(mesh)
    optimizer, other = (optim.AdamW(params, lr=0.02) for params in (sharded, whole))
    halved([*sharded, *whole], dtype)
    for step in range(2):
        for params, its_optimizer in ((sharded, optimizer), (whole, other)):
            give_gradients(params, step)
            its_optimizer.step()
    return sharded, whole, optimizer, other


def moved():
    """A shard that lies elsewhere since the last step is found again: as after torch's FSDP has padded it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, whole, optimizer, other = trained(BF16, mesh)
    before = [param._local_tensor for param in sharded[:-1]]
    for param in sharded[:-1]:
        param._local_tensor = param._local_tensor.to(FP32, copy=True)  # as halves again
    kept = [value.clone() for value in before]
    for params, its_optimizer in ((sharded, optimizer), (whole, other)):
        give_gradients(params, 7)
        its_optimizer.step()
    stale = [bits(mine) != bits(copied) for mine, copied in zip(before, kept, strict=True)]
    return differences(sharded, whole, optimizer, other), any(stale)


def in_codes():
    """Groups end where shards do: of each, codes and scales that belong together, and stand for the exact moments."""
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for rule in ("amsgrad", "momentum"):
        optimizer_class, options = RULES[rule]
        sharded, whole = params_of(mesh)
        optimizer, other = optimizer_class(sharded, state_dtype="int8", **options), optimizer_class(whole, **options)
        halved(sharded, BF16)
        for _ in range(3):
            for params, its_optimizer in ((sharded, optimizer), (whole, other)):
                give_gradients(params, 0)  # so that nothing cancels out
                its_optimizer.step()
        for number, (mine, theirs) in enumerate(zip(sharded, whole, strict=True)):
            for name in optimizer.rule_of(optimizer.param_groups[0]).states:
                codes, here = (optimizer.state[mine][f"{name}_{part}"] for part in ("codes", "scale"))
                exact = other.state[theirs][name]
                most = 0.2 * max(map(abs, exact.flatten().tolist()), default=0.0)  # three roundings of a sixteenth each
                exact = shard(exact, mesh, mine.placements)._local_tensor if isinstance(mine, DTensor) else exact
                is_near = torch.allclose(decode(local(codes), here), exact, rtol=0, atol=most)
                lies = isinstance(codes, DTensor) == isinstance(mine, DTensor) and fit(local(codes), here)
                wrong += [] if is_near and lies else [(rule, number, name)]
    return wrong


def everything():
    results = {"C++": updates("C++", SOME), "moved": moved(), "lying otherwise": lying_otherwise(), "edited": edited()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer_file, "executor_for", lambda device: Portable())
        results["portable"] = updates("portable", SOME[1:3])
    return results | {"counted": only_counted_together(), "codes": in_codes()}


def test_every_shard_is_updated_as_in_one_process():
    for results in on_ranks(2, everything):
        assert results.pop("moved") == ([], False)
        assert results.pop("counted") == [0, 1]
        assert {what: wrong for what, wrong in results.items() if wrong} == {}
