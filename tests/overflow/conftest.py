"""Models whose first non-finite tensor is known by construction, and a step that applies a cure's text."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import Policy


class Attention(nn.Module):
    """Scores of magnitude ``gain²``, masked with -inf; the softmax brings them back into range."""

    def __init__(self, gain=1.0, width=8):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.gain = gain

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q * self.gain) @ (k * self.gain).transpose(-1, -2)  # (batch, tokens, tokens)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.proj(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, gain=1.0, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(gain, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.5), nn.Linear(width, width))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Two blocks; the scores of the second are too large for FP16 where ``gain`` is 400."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(gain)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.drop(functional.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Chain(nn.Module):
    """Linear, ReLU, linear: nothing brings the first one's result back into range."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.first.weight.mul_(gain)
            self.second.weight.mul_(1 / gain)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


MODELS = {"transformer": Transformer, "conv": ConvNet, "chain": Chain}


def _make(name, **options):
    """Build a model and inputs, the same every time."""
    torch.manual_seed(0)
    model = MODELS[name](**options)
    return model, torch.randn(4, 3, 6, 6) if name == "conv" else torch.randn(2, 5, 8)


def _step(model, policy, x, loss=lambda output: output.float().square().mean()):
    """Prepare a model, and return its forward pass with the loss."""
    prepared = mezzo.prepare(model, policy)

    def fn():
        with prepared.autocast():
            return loss(model(x))

    return fn


def _cured(overflow, policy):
    """Run the text of a cure as a user would who pastes it."""
    names = {"mezzo": mezzo, "policy": policy}
    exec(overflow.cure, names)
    assert isinstance(names["policy"], Policy)
    assert names["policy"] != policy
    return names["policy"]


@pytest.fixture
def make():
    return _make


@pytest.fixture
def step():
    return _step


@pytest.fixture
def cured():
    return _cured
