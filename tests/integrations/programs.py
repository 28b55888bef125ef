"""What programs for every framework are made of: a small classifier, its batches, and gradients that overflow."""

import os
from functools import partial

import pytest
import torch
from torch import nn

import mezzo

os.environ["HF_HUB_OFFLINE"] = "1"

#: Policies and optimizers, each with each but for what the acceptance machine crosses.
CASES = [
    ("O1,dtype=float16", "torch"),
    ("O1,dtype=bfloat16", "mezzo"),
    ("O2,dtype=float16", "mezzo"),
    ("O2,dtype=bfloat16", "torch"),
]
OPTIMIZERS = {"torch": partial(torch.optim.AdamW, lr=0.01), "mezzo": partial(mezzo.optim.AdamW, lr=0.01)}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def dataset():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


def batches(epochs=1, size=8):
    return [*zip(*(tensor.split(size) for tensor in dataset().tensors), strict=True)] * epochs


def loss_of(scores, labels):
    return nn.functional.cross_entropy(scores.float(), labels)


def overflow(output):
    """Let the gradient of an output be infinite."""
    output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


def flat(tensors):
    return torch.cat([tensor.detach().flatten().float().clone() for tensor in tensors])


def assert_alike(weights, expected, rel=0.02):
    """Vectors whose distance is small beside the expected one."""
    assert (weights - expected).norm() < rel * expected.norm()


def ends(losses, count=4):
    """The last losses, which are to be FP32's within a hundredth."""
    return pytest.approx(sum(losses[-count:]), rel=0.01)
