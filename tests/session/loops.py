"""A small classifier and the steps of its training loop, what is left of them to compare, and a count of host syncs.

Test files import it as ``from .loops import …`` and vary one thing each.
"""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import MixedPrecision

INF = float("inf")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def sgd(params, **options):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def session(policy, optimizer=sgd, **options):
    model = network()
    built = optimizer(model.parameters())
    return model, built, MixedPrecision(model, built, policy, **options)


def backward(amp, model, number, *, spoilt=False):
    x, y = batch(number)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    if spoilt:
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(INF)


def train(amp, model, number, *, spoilt=False, **options):
    backward(amp, model, number, spoilt=spoilt)
    step = amp.step(**options)
    amp.zero_grad()
    return step


def weights(amp):
    return [p.detach().clone() for p in amp.master_params()]


def state(amp, model):
    return copy.deepcopy((weights(amp), dict(model.state_dict()), [o.state_dict() for o in amp._core.optimizers]))


def assert_same(one, two):
    """Compare the leaves of nested containers, tensors bit for bit."""
    flat_one, flat_two = (torch.utils._pytree.tree_leaves(value) for value in (one, two))
    assert len(flat_one) == len(flat_two)
    for a, b in zip(flat_one, flat_two, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Syncs(TorchDispatchMode):
    """Count conversions of tensors to Python values, which on a GPU wait for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
