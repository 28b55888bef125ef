"""Programs in the forms of other systems: a small network, its batches and losses, and two scalers side by side.

The loss is so small that FP16 holds its gradients 65536 times.
"""

import contextlib

import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp
from mezzo.compat.torch import GradScaler

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCALERS = {"torch": torch.amp.GradScaler, "mezzo": GradScaler}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number):
    return torch.sin(torch.arange(12.0) * (number + 1)).view(3, 4)


def loss_of(model, number, overflows=False):
    x = batch(number)
    out = model(x.double() if next(model.parameters()).dtype == torch.float64 else x)
    loss = (out if out.dtype == torch.float64 else out.float()).square().mean() / 4
    return loss * torch.inf if overflows else loss


def weights(*models):
    return [param.detach().clone() for model in models for param in model.parameters()]


def assert_same(results, expected):
    """The same tensors, bit for bit."""
    assert len(results) == len(expected)
    assert all(map(torch.equal, results, expected))


def both(program, *args, **kwargs):
    """Run a program with each scaler, and compare its weights and whatever else it returns."""
    theirs, ours = (program(SCALERS[name], *args, **kwargs) for name in ("torch", "mezzo"))
    assert_same(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]
    return ours


def update_of_paddle(state, overflows, *, growth=2.0, backoff=0.5, grows_after=2000, backs_off_after=1):
    """``AmpScaler._update`` of python/paddle/amp/grad_scaler.py: the scale, its clean steps and its overflows."""
    scale, good, bad = state
    good, bad = (0, bad + 1) if overflows else (good + 1, 0)
    if bad == backs_off_after:
        return scale * backoff, good, 0
    return (scale * growth, 0, bad) if good == grows_after else (scale, good, bad)


# In apex's form ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def initialized(models, optimizers=None, **options):
    """``amp.initialize``, and ``amp.deinitialize`` whatever comes between."""
    try:
        yield amp.initialize(models, optimizers, verbosity=0, **options)
    finally:
        amp.deinitialize()


def apex_pass(loss, optimizer, **options):
    """A backward pass as apex teaches it."""
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def apex_scale():
    (state,) = amp.state_dict().values()
    return state["loss_scale"]
