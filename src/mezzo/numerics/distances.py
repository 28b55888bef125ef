"""How far tensors of two models are apart: in spacings of a format, and as log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.formats import Format
from mezzo.sharded import local

#: Elements that are compared at a time, to bound the float64 scratch memory.
CHUNK: Final = 1 << 21
#: What :func:`measured` returns, in this order.
_NUMBERS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far the elements of two tensors are apart.

    The unit is the spacing of the format at the first tensor's value: 1 means neighbours. Beyond the format's range it
    is that of its largest numbers; of integers it is 1. NaN equals NaN, and an infinity itself.

    Attributes:
        largest: The largest distance; infinite where one of two elements is finite and the other not.
        mean: The mean over all elements, of those that are finite in both.
        share: The share of elements that differ, from 0 to 1.
        beyond: The share of those that are more than one spacing apart. Numbers near zero have small spacings, so that
            the largest distance and the mean may be theirs alone.
        at: The index of the largest.
        not_finite: How many elements differ and are not finite, in the first tensor and in the second.
    """

    largest: float
    mean: float
    share: float
    beyond: float
    at: tuple[int, ...]
    not_finite: tuple[int, int]

    @property
    def differs(self) -> bool:
        """Whether any element does."""
        return self.share > 0.0

    @classmethod
    def of(cls, numbers: Sequence[float], shape: Sequence[int]) -> Distance:
        """Read what :func:`measured` has written.

        Args:
            numbers: Its numbers, on the host.
            shape: The shape of the tensors.
        """
        largest, total, count, index, num_beyond, *not_finite = numbers
        position, at = int(index), list[int]()
        for size in reversed(shape):
            position, remainder = divmod(position, max(size, 1))
            at.insert(0, remainder)
        elements = max(torch.Size(shape).numel(), 1)
        return cls(
            largest=largest,
            mean=total / elements,
            share=count / elements,
            beyond=num_beyond / elements,
            at=tuple(at),
            not_finite=(int(not_finite[0]), int(not_finite[1])),
        )


def is_comparable(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read one by one: it is dense, and no meta tensor."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


@torch.no_grad()
def measured(first: Tensor, second: Tensor, spacing: Format) -> Tensor:
    """Return how far two tensors of one shape are apart, for :meth:`Distance.of`: a few float64 on the second's device.

    **Cost**: some twenty element-wise kernels, less than 256 MiB of scratch memory, no host sync.
    """
    first, second = local(first.detach()).to(second.device), local(second.detach())
    has_grid = first.is_floating_point() or first.is_complex()
    flat = [(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1) for x in (first, second)]
    result = torch.zeros(_NUMBERS, dtype=torch.float64, device=second.device)
    for start in range(0, min(x.numel() for x in flat), CHUNK):
        a, b = (x[start : start + CHUNK].double() for x in flat)
        a_finite, b_finite = a.isfinite(), b.isfinite()
        differs = ~((a == b) | (a.isnan() & b.isnan()))
        steps = (a - b).abs_()
        if has_grid:
            steps /= spacing.spacings(a.clamp(-spacing.max, spacing.max))
        are_finite = a_finite & b_finite
        total = torch.where(are_finite & differs, steps, 0.0).sum()
        steps = torch.where(are_finite, steps, torch.inf).masked_fill_(~differs, 0.0)
        largest, index = steps.max(0)
        counts = differs, steps > 1.0, differs & ~a_finite, differs & ~b_finite
        num_differing, *more = (flags.sum() for flags in counts)
        row = [largest, total, num_differing, index + start, *more]
        now = torch.stack([number.double() for number in row])
        merged = result + now
        merged[0], merged[3] = torch.where(now[0] > result[0], now[[0, 3]], result[[0, 3]])
        result = merged
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """How far the log-probabilities of tokens are apart, of a model that learns and one that has drawn the tokens.

    With *a* and *b* the log-probabilities of a token by the first and the second model:

    Attributes:
        count: How many tokens were compared.
        largest: The largest ``|a − b|``.
        mean: Its mean.
        kl: The mean of ``exp(a − b) − 1 − (a − b)``, never negative: an estimate of KL(second, first) without bias if
            the second model drew the tokens.
        ratio: The 5 %, 50 % and 95 % quantiles of ``exp(a − b)``, the importance ratio of policy gradients.

    References:
        Schulman 2020, http://joschu.net/blog/kl-approx.html (k3).
    """

    count: int
    largest: float
    mean: float
    kl: float
    ratio: tuple[float, float, float]

    @classmethod
    @torch.no_grad()
    def of(cls, first: Tensor, second: Tensor) -> LogProbs:
        """Compare log-probabilities of the same tokens.

        Args:
            first: Those of the model that learns, of any shape.
            second: Those that the tokens were drawn by, in the same shape.

        **Cost**: one host sync.

        Example:
            >>> LogProbs.of(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])).mean
            0.25
        """
        if first.shape != second.shape:
            raise PolicyError(
                "log-probabilities of other tokens cannot be compared",
                where=f"{list(first.shape)} and {list(second.shape)}",
                write="LogProbs.of(first, second), a number for each token in both",
            )
        difference = first.double().flatten().to(second.device) - second.double().flatten()
        if not difference.numel():
            return cls(count=0, largest=0.0, mean=0.0, kl=0.0, ratio=(1.0, 1.0, 1.0))
        quantiles = difference.exp().quantile(difference.new_tensor([0.05, 0.5, 0.95]))
        kl = (torch.expm1(difference) - difference).mean()
        largest, mean, kl_mean, *ratio = torch.stack(
            [difference.abs().max(), difference.abs().mean(), kl, *quantiles]
        ).tolist()
        return cls(
            count=difference.numel(), largest=largest, mean=mean, kl=kl_mean, ratio=(ratio[0], ratio[1], ratio[2])
        )


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of tokens that are not negative, one after the other, in float64."""
    wide, index = logits.detach().double(), tokens.to(logits.device)
    chosen = wide.gather(-1, index.clamp(min=0)[..., None])[..., 0]
    return (chosen - wide.logsumexp(-1))[index >= 0]
