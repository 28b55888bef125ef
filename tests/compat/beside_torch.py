"""The same program under torch's own ``GradScaler`` and under mezzo's: what both come to."""

import torch
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler

SCALERS = {"torch": torch.amp.GradScaler, "mezzo": GradScaler}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
MEZZO = {"mezzo adamw": lambda params: mezzo.optim.AdamW(params, lr=0.01)}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number):
    return torch.sin(torch.arange(12.0) * (number + 1)).view(3, 4)


def loss_of(model, number, overflows=False):
    loss = model(batch(number)).square().mean()
    return loss * torch.inf if overflows else loss


def weights(*models):
    return [param.detach().clone() for model in models for param in model.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def both(program, *args, **kwargs):
    """Run a program with each, and compare its weights and whatever else it returns."""
    theirs, ours = (program(SCALERS[name], *args, **kwargs) for name in ("torch", "mezzo"))
    assert_same(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]
    return ours
