"""``digits-cnn``: a small residual network on scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.errors import require_extra
from mezzo.recipes.recipe import Batch, Metric, Recipe, Split, decayed_groups, own_seed, warmup_cosine

__all__ = ["DIGITS_CNN", "DigitsNet"]

#: One third of the 1797 images: one image is 0.17 points of accuracy.
HELD_OUT_IMAGES = 597
BATCH_SIZE = 64
WIDTH = 32  # a multiple of 8, as tensor cores want every GEMM dimension


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut; the first may halve the image."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, height, width) to (batch, channels, height/stride, width/stride)."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A residual network for 8×8 images: a stem, three blocks, the mean over the image, a linear head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width, stride=1),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) images to (batch, 10) scores."""
        x = functional.relu(self.stem_norm(self.stem(images)))  # (batch, width, 8, 8)
        x = self.blocks(x)  # (batch, 2 * width, 4, 4)
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def load() -> Split:
    """Read the 1797 images, pixels in [0, 1], and hold out a third by a fixed permutation.

    Raises:
        UnsupportedError: scikit-learn, which carries the images, is not installed.
    """
    needs = "the recipe digits-cnn needs scikit-learn"
    require_extra("recipes", needs, "sklearn.datasets", why="its images come with that package")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)  # (1797, 1, 8, 8)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    held_out, train = order[:HELD_OUT_IMAGES], order[HELD_OUT_IMAGES:]
    return Split(train=(images[train], labels[train]), held_out=(images[held_out], labels[held_out]))


def build(seed: int) -> nn.Module:
    """Make the network, its weights a function of the seed alone."""
    with own_seed(seed):
        return DigitsNet()


def batches(split: Split, seed: int) -> Iterator[Batch]:
    """Yield 64 images and labels at a time, in a new order every epoch, for ever."""
    images, labels = split.train
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for chosen in torch.split(order, BATCH_SIZE):
            # A short last batch would have noisier batch statistics; its images come round next epoch.
            if len(chosen) == BATCH_SIZE:
                yield images[chosen], labels[chosen]


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats; smoothed labels halve what the seed alone does to the accuracy."""
    return functional.cross_entropy(scores, labels, label_smoothing=0.1)


def optimizer(model: nn.Module) -> Optimizer:
    """SGD with Nesterov momentum: on this task steadier between seeds than AdamW."""
    return SGD(decayed_groups(model, 5e-4), lr=0.1, momentum=0.9, nesterov=True)


def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Rise for a fifth of the run, then fall to nothing."""
    return warmup_cosine(optimizer, steps, warmup=0.2, final=0.0)


def evaluate(model: nn.Module, split: Split) -> float:
    """Return the percentage of held-out images whose highest score is the right digit."""
    images, labels = split.held_out
    device = next(model.parameters()).device
    scores = model(images.to(device))
    # argmax calls the first NaN the largest, which would count as an answer: a NaN is not one.
    right = (scores.argmax(1) == labels.to(device)) & scores.isfinite().all(1)
    return 100.0 * float(right.float().mean())


def references(split: Split) -> Mapping[str, float]:
    """Always answering the commonest digit: what a network that learned nothing reaches."""
    labels = split.held_out[1]
    return {"commonest digit": 100.0 * labels.bincount().max().item() / len(labels)}


DIGITS_CNN = Recipe(
    name="digits-cnn",
    summary="residual network with batch norm on handwritten digits (scikit-learn, 1200 + 597 images of 8×8)",
    metric=Metric(name="test accuracy", unit="%", unit_of_difference="points", higher_is_better=True, decimals=2),
    steps=300,
    max_grad_norm=5.0,
    low_memory_format=torch.channels_last,
    load=load,
    build=build,
    batches=batches,
    loss=loss,
    optimizer=optimizer,
    schedule=schedule,
    evaluate=evaluate,
    references=references,
)
