"""Models whose answers are known, and an independent count of what the kernels do."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo


class TwoLayers(nn.Module):
    """x (3, 4) → 8 → 2: 32 + 8 and 16 + 2 parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x)))
        return self.head(functional.max_pool2d(x, 2).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        heads = (part.view(batch, tokens, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).split(width, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.proj(functional.gelu(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


MODELS = {
    "two-layers": (TwoLayers, lambda: torch.randn(3, 4)),
    "conv": (ConvNet, lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (TinyGPT, lambda: torch.randint(17, (2, 6))),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
    "lstm": (Recurrent, lambda: torch.randn(2, 4, 8)),
}


class Kernels(TorchDispatchMode):
    """Write down every kernel with the dtypes that enter it, and count casts and their bytes."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.casts = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        floating = [x.dtype for x in args if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
        if name == "_to_copy" and floating and out.dtype != floating[0] and out.dtype.is_floating_point:
            self.casts[str(floating[0]).removeprefix("torch."), str(out.dtype).removeprefix("torch.")] += 1
            self.num_bytes += args[0].numel() * (args[0].element_size() + out.element_size())
        elif floating:
            self.calls[name, frozenset(str(dtype).removeprefix("torch.") for dtype in floating)] += 1
        return out


def _make(name):
    torch.manual_seed(0)
    build, data = MODELS[name]
    return build(), data()


def _independent(model, inputs, policy):
    """Run one training step as a session does, and return what the kernels and the modules' outputs were."""
    outputs = {}

    def watch(path, module):
        def note(_, __, out):
            outputs[path] = str((out if torch.is_tensor(out) else out[0]).dtype).removeprefix("torch.")

        module.register_forward_hook(note)

    for path, module in model.named_modules():
        if not list(module.children()):
            watch(path, module)
    handle = mezzo.prepare(model, policy)
    region = handle.autocast()
    with Kernels() as forward, region:
        output = model(inputs)
    gradient = torch.ones_like(output)
    with Kernels() as backward:
        region.run_backward(output, grad_tensors=[gradient])
    return SimpleNamespace(forward=forward, backward=backward, outputs=outputs)


@pytest.fixture
def make():
    """Build one of the models by name, with inputs; the same every time."""
    return _make


@pytest.fixture
def independent():
    return _independent


@pytest.fixture
def two_layers():
    return _make("two-layers")
