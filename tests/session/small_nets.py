"""A small network of every kind of layer, its batches, and a loop over them."""

import copy

import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision

POLICIES = [
    "O0",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
]

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),  # 1e-8 is zero in FP16, O3's own trouble
}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(144),
            nn.Linear(144, 5),
        )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def of_torch(params, policy, fused):
    """SGD with momentum; fused under O3, AdamW: torch's fused SGD leaves low-precision weights on CPUs as they are."""
    if fused and policy.startswith("O3"):
        return torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused)


def train(amp, model, steps, *, micro_batches=1):
    for step in steps:
        for part in range(micro_batches):
            backward(amp, model, step * micro_batches + part)
        amp.step()
        amp.zero_grad()


def backward(amp, model, number):
    x, y = batch(number)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    return loss


def session(policy, optimizer="sgd", **options):
    model = network()
    built = OPTIMIZERS[optimizer](model.parameters())
    return model, built, MixedPrecision(model, built, policy, **options)


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def fresh():
    model = network()
    return model, OPTIMIZERS["adamw"](model.parameters())
