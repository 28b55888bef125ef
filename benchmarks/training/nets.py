"""Networks to time whole training steps of: bound by products, by convolutions, and by launching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["NETS", "Net", "loss_of"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A network with a batch to train it on.

    Attributes:
        unit: What a batch counts: ``"tokens"`` or ``"samples"``, one target each.
        build: The model, from the entries of a size.
        batch: Inputs and targets, from the entries of a size.
        sizes: Entries by the size's name: ``full`` for a GPU, ``small`` for two cores and a minute, ``least`` to see
            that everything runs.
    """

    unit: str
    build: Callable[..., nn.Module]
    batch: Callable[..., Batch]
    sizes: Mapping[str, Mapping[str, int]]

    def make(self, size: str, device: torch.device) -> tuple[nn.Module, Batch]:
        """Return a model and a batch on a device, the same ones each time.

        Args:
            size: A name of ``sizes``.
            device: Where. Both are made on the CPU, so that devices start from the same weights.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, (inputs, targets) = self.build(**self.sizes[size]), self.batch(**self.sizes[size])
        # The layout that low-precision convolutions want, for every way alike; it concerns 4-d weights only.
        model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, (inputs.to(device), targets.to(device))


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits, (…, classes), and as many targets."""
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


class _Block(nn.Module):
    """Attention and feed-forward, normalised before (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, tokens, head_dim)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return hidden


class _GPT(nn.Module):
    """GPT-2 with tied embeddings; its vocabulary is padded to a multiple of 64."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, tokens: int, **_: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) → (batch, tokens, vocabulary)
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _text(*, vocabulary: int, batch: int, tokens: int, **_: int) -> Batch:
    drawn = torch.randint(vocabulary, (batch, tokens + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class _Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, with the stride in the middle, as later ResNets have it."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        same = channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(out)


def _resnet(*, width: int, classes: int, **_: int) -> nn.Module:
    """ResNet-50 (He et al. 2016): 3, 4, 6 and 3 bottleneck blocks."""
    layers = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            layers.append(_Bottleneck(channels, width << stage, 2 if stage and not number else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _images(*, batch: int, pixels: int, classes: int, **_: int) -> Batch:
    drawn = torch.randn(batch, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
    return drawn, torch.randint(classes, (batch,))


class _Layers(nn.Module):
    """Many layers too small to keep a device busy: a normalisation, a linear, an activation, a residual each."""

    def __init__(self, *, width: int, layers: int, **_: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:  # (batch, width), classes as many as the width
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + functional.gelu(linear(norm(x)))
        return x


def _vectors(*, batch: int, width: int, **_: int) -> Batch:
    return torch.randn(batch, width), torch.randint(width, (batch,))


def _sizes(**sizes: dict[str, int]) -> Mapping[str, Mapping[str, int]]:
    return MappingProxyType({name: MappingProxyType(entries) for name, entries in sizes.items()})


def _net(unit: str, build: Any, batch: Callable[..., Batch], **sizes: dict[str, int]) -> Net:
    return Net(unit=unit, build=build, batch=batch, sizes=_sizes(**sizes))


#: Networks by name; ``full`` is the size of the papers, and of 64-tiny there is no larger one than ``small``.
NETS: Final[Mapping[str, Net]] = MappingProxyType(
    {
        "gpt2-small": _net(
            "tokens", _GPT, _text,
            full={"vocabulary": 50304, "width": 768, "layers": 12, "heads": 12, "tokens": 1024, "batch": 8},
            small={"vocabulary": 8192, "width": 384, "layers": 6, "heads": 6, "tokens": 128, "batch": 4},
            least={"vocabulary": 64, "width": 16, "layers": 1, "heads": 2, "tokens": 8, "batch": 2},
        ),
        "resnet-50": _net(
            "samples", _resnet, _images,
            full={"width": 64, "pixels": 224, "classes": 1000, "batch": 64},
            small={"width": 32, "pixels": 64, "classes": 100, "batch": 8},
            least={"width": 4, "pixels": 64, "classes": 10, "batch": 4},
        ),
        "64-tiny": _net(
            "samples", _Layers, _vectors,
            full={"width": 64, "layers": 64, "batch": 16},
            small={"width": 64, "layers": 64, "batch": 16},
            least={"width": 8, "layers": 4, "batch": 4},
        ),
    }
)  # fmt: skip
