"""Programs in apex's form, and loops of plain torch that they are held against.

Test files import it as ``from .apex import …`` and vary one thing each.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional

from mezzo.compat.apex import amp

INF = float("inf")


@contextlib.contextmanager
def initialized(models, optimizers=None, **options):
    """``amp.initialize``, and ``amp.deinitialize`` whatever comes between."""
    try:
        yield amp.initialize(models, optimizers, verbosity=0, **options)
    finally:
        amp.deinitialize()


def digits(number, size=32):
    """Small pictures of ten kinds, each a pattern with noise."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 10, (size,), generator=generator)
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return patterns[labels] + 0.3 * torch.randn(size, 1, 8, 8, generator=generator), labels


def convolutions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
        )


def perceptron(seed=0, width=8):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def points(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def loss_of(model, number):
    x, y = points(number)
    return functional.cross_entropy(model(x), y)


def values(params):
    return [param.detach().clone() for param in params]


def scales():
    return [state["loss_scale"] for state in amp.state_dict().values()]
