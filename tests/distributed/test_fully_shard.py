"""`mezzo.fully_shard` and sessions over what it shards, against one process with the same global batch."""

import torch
import torch.distributed as dist
from torch import nn

import mezzo

from .ranks import on_ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Widths that no number of ranks divides, and a layer of one row, of which one rank has nothing."""

    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)


def own_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def whole(model):
    """The model's parameters, gathered, by name."""
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def trained(policy, name, steps=20, wrap=None, max_grad_norm=None):
    model = mezzo.fully_shard(net(), policy, wrap=wrap)
    optimizer = OPTIMIZERS[name](model.parameters())
    amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=max_grad_norm)
    norms = []
    for step in range(steps):
        x, y = map(own_part, batch(step))
        with amp.autocast():
            loss = (model(x) - y).square().mean()
        amp.backward(loss)
        norms.append(float(amp.step().grad_norm))
        amp.zero_grad()
    return whole(model), norms


def in_one_process(name, steps=20, max_grad_norm=None):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    norms = []
    for step in range(steps):
        x, y = batch(step)
        (model(x) - y).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def fp32_table():
    return {name: trained("O0", name) for name in OPTIMIZERS}


def test_fp32_is_what_one_process_makes_of_the_whole_batch():
    for found in on_ranks(2, fp32_table):
        for name, (params, norms) in found.items():
            expected, expected_norms = in_one_process(name)
            for key, value in expected.items():
                assert (params[key] - value).abs().max() <= 1e-6, (name, key)
            assert len(norms) == len(expected_norms)
