"""What is trained: a network with each kind of product, on handwritten digits, or on made ones without scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mezzo.errors import UnsupportedError
from mezzo.recipes.digits_cnn import load
from mezzo.recipes.recipe import own_seed

__all__ = ["Digits", "TrialNet", "build", "digits"]

_HEADS: Final = 4
#: Patches of an image of 8×8, each from the 3×3 pixels around it.
_TOKENS: Final = 16
#: Ten classes, and as many more as tensor cores want of a dimension.
_SCORES: Final = 16
_BATCH_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Digits:
    """Images and labels on a device.

    Attributes:
        source: Where they come from, in words.
        images: (count, 1, 8, 8), FP32.
        labels: (count,), from 0 to 9.
    """

    source: str
    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Digits:
        """Return the same data on a device."""
        return Digits(self.source, self.images.to(device), self.labels.to(device))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step: the same one whenever it is asked for."""
        chosen = torch.randint(len(self.labels), (_BATCH_SIZE,), generator=torch.Generator().manual_seed(number))
        chosen = chosen.to(self.labels.device)
        return self.images[chosen], self.labels[chosen]


def digits() -> Digits:
    """Return scikit-learn's handwritten digits; where it is not installed noisy drawings of ten patterns."""
    try:
        images, labels = load().train
    except UnsupportedError:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.rand(10, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (1200,), generator=generator)
        return Digits("made digits", patterns[labels] + 0.6 * torch.randn(1200, 1, 8, 8, generator=generator), labels)
    return Digits("handwritten digits", images, labels)


class TrialNet(nn.Module):
    """A convolution, one block of attention and one of linear layers, norms, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(_TOKENS * width, _SCORES)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) images to (batch, 16) scores."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 16 tokens, width)
        batch, tokens, width = x.shape
        qkv = self.queries_keys_values(self.norm1(x)).view(batch, tokens, 3, _HEADS, width // _HEADS)
        attended = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # (batch, heads, tokens, …)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        scores: Tensor = self.head(self.norm3(x).flatten(1))
        return scores


def build(seed: int, device: torch.device, width: int = 64) -> TrialNet:
    """Make the network, its weights a function of the seed alone."""
    with own_seed(seed):
        return TrialNet(width).to(device)
