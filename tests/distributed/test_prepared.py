"""Models that are prepared, wrapped by DistributedDataParallel, and get their session last."""

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import MixedPrecision, optim

from .ranks import on_ranks

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "split": lambda params: optim.AdamW(params, lr=0.01),
    "full": lambda params: optim.AdamW(params, lr=0.01, master="full"),
}
FEW = [("O1,dtype=float16,emulate=true", "split"), *(("O2,dtype=bfloat16,emulate=true", name) for name in OPTIMIZERS)]
MANY = [
    (f"{level},dtype={dtype},emulate=true", name)
    for level in ("O1", "O2", "O3")
    for dtype in ("float16", "bfloat16")
    for name in OPTIMIZERS
    if (level, dtype, name) != ("O3", "float16", "adamw")  # whose epsilon is zero in FP16
]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, amp, numbers=range(3)):
    for number in numbers:
        x = torch.sin(torch.arange(24.0) * (number + 1 + dist.get_rank())).view(4, 6)
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()


def digest(amp, model):
    tensors = [*model.state_dict().values(), *amp.state_dict()["masters"].values(), amp.loss_scale]
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in flat)).hexdigest()


def session_first(model, make, policy):
    amp = MixedPrecision(model, make(model.parameters()), policy)
    return DistributedDataParallel(model), amp


def handle_last(model, make, policy):
    prepared = mezzo.prepare(model, policy)
    wrapper = DistributedDataParallel(model)
    return wrapper, MixedPrecision(prepared, make(wrapper.parameters()))


def wrapper_last(model, make, policy):
    optimizer = make(model.parameters())
    mezzo.prepare(model, policy)
    wrapper = DistributedDataParallel(model)
    return wrapper, MixedPrecision(wrapper, optimizer, policy)


def orders(cases):
    found = {}
    for (policy, name), seed in itertools.product(cases, (0, dist.get_rank())):
        for order in (session_first, handle_last, wrapper_last):
            model = net(seed)
            wrapper, amp = order(model, OPTIMIZERS[name], policy)
            train(wrapper, amp)
            found.setdefault((policy, name), []).append(digest(amp, model))
    return found


@pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_every_order_trains_the_same_and_ranks_stay_equal(cases):
    """Also where each rank has initialised its model by itself: the wrapper gives all of them the first weights."""
    first, second = on_ranks(2, orders, cases)
    assert [kind for kind in first if len({*first[kind], *second[kind]}) > 1] == []
