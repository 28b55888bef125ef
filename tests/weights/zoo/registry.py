"""What builders of programs share."""

from itertools import pairwise

import torch
from torch import nn


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def indices(count, *shape, seed=1):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape):
    """Return a parameter of the size that products keep."""
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def squared(out):
    """Return a loss in FP32, so that attach computes the same outside any region."""
    return out.float().square().mean()


class Made(nn.Module):
    """A module of some parts, which may be tensors, layers and parameters; a function of them is its ``forward``."""

    def __init__(self, run, parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def made(run, /, **parts):
    return Made(run, parts)


def perceptron(*widths):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


def over(model, *inputs):
    """Return a program whose loss is the square of what a model makes of its inputs."""
    return model, lambda: squared(model(*inputs))


def registered(programs):
    """Return a decorator that enters a builder under its name."""

    def enter(build):
        assert build.__name__ not in programs, build.__name__
        programs[build.__name__] = build
        return build

    return enter
