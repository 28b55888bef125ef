"""What a training task is: one frozen value that hands out data, model, optimizer and metric."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["Batch", "Metric", "Recipe", "Split", "decayed_groups", "first_step", "own_seed", "warmup_cosine"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The number a recipe is judged by, measured on data it was not trained on.

    Attributes:
        name: Full words, such as ``test accuracy``.
        unit: Printed after the number, such as ``%``.
        unit_of_difference: Printed after the difference of two such numbers: points, for percentages.
        higher_is_better: The direction.
        decimals: How many decimals the size of the held-out data supports.

    Example:
        >>> accuracy = Metric(
        ...     name="test accuracy", unit="%", unit_of_difference="points", higher_is_better=True, decimals=2
        ... )
        >>> accuracy.better(99.1, 98.7), accuracy.better(float("nan"), 98.7)
        (True, False)
    """

    name: str
    unit: str
    unit_of_difference: str
    higher_is_better: bool
    decimals: int

    def better(self, value: float, than: float) -> bool:
        """Whether ``value`` beats ``than``; NaN beats nothing, and everything finite beats NaN."""
        if math.isnan(value) or math.isnan(than):
            return math.isnan(than) and not math.isnan(value)
        return value > than if self.higher_is_better else value < than


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A fixed division of a data set; tensors on the CPU, in the recipe's own layout.

    Attributes:
        train: What :attr:`Recipe.batches` draws from.
        held_out: What :attr:`Recipe.evaluate` scores, never seen in training.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]

    def sha256(self) -> str:
        """Return a fingerprint of every tensor's dtype, shape and bytes, in order.

        Example:
            >>> one = Split(train=(torch.arange(4),), held_out=(torch.arange(2),))
            >>> other = Split(train=(torch.arange(2),), held_out=(torch.arange(4),))
            >>> one.sha256() == other.sha256()
            False
        """
        digest = hashlib.sha256()
        for name, tensors in (("train", self.train), ("held_out", self.held_out)):
            for tensor in tensors:
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training task on real data, the same for every policy.

    Everything random is a function of the seed, through generators of its own: the global random state is
    neither read nor moved, so two policies see the same initial weights and the same batches.

    Attributes:
        name: What the command line calls it.
        summary: One line: model, data, size.
        metric: What :attr:`evaluate` returns.
        steps: How many steps a full run takes.
        max_grad_norm: Where the global gradient norm is clipped.
        low_memory_format: Layout of weights and inputs when a policy computes in low precision; FP32 keeps
            the contiguous one (convolution kernels are tuned for FP32 NCHW and mixed-precision NHWC).
        load: Read the data and divide it; the slow part, done once per comparison.
        build: Make the model on the CPU in FP32 from a seed.
        batches: An endless stream of CPU batches from a split and a seed.
        loss: The training loss of a model output and a target.
        optimizer: Make the optimizer of a model.
        schedule: Make the learning-rate schedule of an optimizer over so many steps.
        evaluate: Score a model in evaluation mode on the held-out data.
        references: Named values of the metric to stand beside the results, from the data alone.
    """

    name: str
    summary: str
    metric: Metric
    steps: int
    max_grad_norm: float
    low_memory_format: torch.memory_format
    load: Callable[[], Split]
    build: Callable[[int], nn.Module]
    batches: Callable[[Split, int], Iterator[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler]
    evaluate: Callable[[nn.Module, Split], float]
    references: Callable[[Split], Mapping[str, float]]


def first_step(
    recipe: Recipe, split: Split, seed: int, device: torch.device
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return what a first training step is made of, on a device: the model, its inputs, the loss of its output."""
    inputs, targets = (tensor.to(device) for tensor in next(recipe.batches(split, seed)))
    return recipe.build(seed).to(device), inputs, lambda output: recipe.loss(output, targets)


@contextmanager
def own_seed(seed: int) -> Iterator[None]:
    """Draw from a fresh CPU random stream inside the block, and put the global one back after it.

    Args:
        seed: Any integer that :meth:`torch.Generator.manual_seed` takes.

    Example:
        >>> before = torch.get_rng_state()
        >>> with own_seed(3):
        ...     first = torch.rand(2)
        >>> with own_seed(3):
        ...     print(torch.equal(first, torch.rand(2)))
        True
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every accelerator as well, and nothing puts those back.
        torch.default_generator.manual_seed(seed)
        yield


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Divide parameters into those that decay (matrices, filters) and those that do not (gains, biases).

    Args:
        model: Any module; frozen parameters are left out, tied ones appear once.
        weight_decay: For parameters with two dimensions or more.

    Returns:
        Two parameter groups, for any torch optimizer.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(optimizer: Optimizer, steps: int, *, warmup: float, final: float) -> LambdaLR:
    """Raise the learning rate linearly, then lower it along half a cosine.

    Args:
        optimizer: Its groups' ``lr`` is the peak.
        steps: Length of the whole run.
        warmup: Share of the steps in which the rate rises.
        final: Share of the peak at the last step.

    Returns:
        The schedule, to be stepped once per optimizer step.
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        passed = min(1.0, (step - rising) / max(1, steps - 1 - rising))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * passed))

    return LambdaLR(optimizer, factor)
