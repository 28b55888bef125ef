"""Sessions over weights that lie on several ranks without `fully_shard`: tensor parallelism, against one process."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mezzo
from mezzo import optim

from .ranks import on_ranks

MAKE = {
    "split": lambda params: optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "looped": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
#: With the largest distance of a weight after four steps of 0.01: FP32's noise, and a few steps' of BF16's.
POLICIES = {"O0": 1e-6, "O1,dtype=bfloat16,emulate=true": 0.02, "O2,dtype=bfloat16,emulate=true": 0.02}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def trained(model, make, policy):
    optimizer = make(model.parameters())
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    dtypes = {param.dtype for param in model.parameters()}
    lies = {type(param) for param in amp.master_params()}
    for step in range(4):
        for number in (2 * step, 2 * step + 1):
            x, y = batch(number)
            with amp.autocast():
                loss = (model(x) - y).square().mean()
            amp.backward(loss)
        amp.step()
        amp.zero_grad()
    kept = {name: whole(value) for name, value in model.state_dict().items()}
    lies |= {type(rest) for rest in amp.state_dict()["remainders"].values()}
    amp.load_state_dict(amp.state_dict())
    amp.close()
    return [whole(param) for param in model.parameters()], dtypes, lies, kept


def all_of_them():
    found = []
    for (policy, most), (name, make) in itertools.product(POLICIES.items(), MAKE.items()):
        mine, dtypes, lies, kept = trained(parallel(), make, policy)
        theirs, *_ = trained(net(), make, policy)
        low = {torch.bfloat16} if policy.startswith("O2") else {torch.float32}
        exact = all(torch.equal(a, b) for a, b in zip(kept.values(), mine, strict=True))
        far = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
        if dtypes != low or lies != {DTensor} or not exact or far > most:
            found.append((policy, name, dtypes, lies, exact, far))
    return found


def optimizers_alone():
    ways = []
    for model in (parallel(), net()):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for number in range(3):
            x, y = batch(number)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ways.append([whole(param) for param in model.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*ways, strict=True))


def both():
    return all_of_them(), optimizers_alone()


@pytest.mark.slow
def test_sessions_train_what_tensor_parallelism_has_made_of_a_model():
    for wrong, far in on_ranks(2, both):
        assert wrong == []
        assert far <= 1e-6
