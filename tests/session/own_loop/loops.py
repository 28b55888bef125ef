"""A loop as plain PyTorch has it, and the same loop in the calls of a session: the oracle of what is attached."""

import contextlib

import torch
from torch import nn
from torch.nn import functional

import mezzo

from ..loops import batch, network

POLICIES = {
    "O0": "O0",
    "O0, scaled": "O0,loss_scale=dynamic(init=1024)",
    "O1": "O1,emulate=true",
    "O1, bfloat16": "O1,dtype=bfloat16,emulate=true",
    "O2": "O2,emulate=true",
    "O2, bfloat16": "O2,dtype=bfloat16,emulate=true",
    "O3": "O3,emulate=true",
    "O3, bfloat16": "O3,dtype=bfloat16,emulate=true",
}

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-2, eps=1e-4),
}

CLIPPING = {
    "none": None,
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.01),
}


@contextlib.contextmanager
def attached(*args, **options):
    amp = mezzo.attach(*args, **options)
    try:
        yield amp
    finally:
        amp.detach()


def loss_of(model, number, amp=None):
    """The loss of a batch; in a session's own region where there is one, and FP32 outside, as what is attached is."""
    x, y = batch(number)
    with contextlib.nullcontext() if amp is None else amp.autocast():
        out = model(x)
    return functional.cross_entropy(out.float(), y)


def build(optimizer="SGD"):
    model = network()
    return model, OPTIMIZERS[optimizer](model.parameters())


def spoil(model):
    next(model.parameters()).grad.fill_(float("inf"))


def train(model, optimizer, *, steps=range(3), micro_batches=1, clip=None, schedulers=(), spoilt=(1,)):
    """A loop that knows nothing of mezzo; what clipping returned."""
    found = []
    for number in steps:
        for part in range(micro_batches):
            (loss_of(model, number * micro_batches + part) / micro_batches).backward()
        if number in spoilt:
            spoil(model)
        if clip is not None:
            found.append(clip(model.parameters()))
            if clip is CLIPPING["value"] and number in spoilt:
                found.pop()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
    return found


def train_with(amp, model, optimizer, *, steps=range(3), micro_batches=1, clip=None, schedulers=(), spoilt=(1,)):
    """The same in the session's calls."""
    found = []
    for number in steps:
        for part in range(micro_batches):
            amp.backward(loss_of(model, number * micro_batches + part, amp) / micro_batches)
        if number in spoilt:
            spoil(model)
        if clip is not None:
            amp.unscale_()
            if clip is not CLIPPING["value"] or number not in spoilt:  # that step is skipped
                found.append(clip(model.parameters()))
        amp.step(scheduler=list(schedulers) or None)
        amp.zero_grad()
    return found


def ends(amp, optimizer):
    """What a run has come to, to be compared bit for bit."""
    state = {key: value for key, value in optimizer.state_dict().items() if key != "mezzo"}
    return [p.detach().clone() for p in amp.master_params()], state, amp.loss_scale, amp.stats()
