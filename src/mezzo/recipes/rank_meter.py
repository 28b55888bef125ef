"""What one rank knows of its own steps: a line of its log for each."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.numerics.traffic import Traffic
from mezzo.recipes.parallel import World
from mezzo.session import MixedPrecision

__all__ = ["RankMeter", "RankStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One training step as one rank saw it, one line of ``metrics.rank1.jsonl``.

    Attributes:
        policy: The policy's text.
        step: From 1.
        ms: Wall time of the step in milliseconds, the same for all ranks but for noise: they wait for each other.
        samples_per_s: Samples of this rank's own share in a second.
        waiting_ms: How long it waited for the slowest rank between its forward and its backward pass, and in the
            session's own exchanges.
        wire_bytes: What it sent to other ranks, as :class:`mezzo.numerics.traffic.Traffic` counts it in the run's first
            steps; all later ones are like the last of them.
        overflowed: Whether this rank's own loss was not finite.
        peak_bytes: The most memory so far: allocated on a GPU, resident in the process on a CPU.
    """

    policy: str
    step: int
    ms: float
    samples_per_s: float
    waiting_ms: float
    wire_bytes: int
    overflowed: bool
    peak_bytes: int


class RankMeter:
    """Exchange what all ranks must know of a step, and measure what one rank has to say of it.

    With one process it does nothing.

    Args:
        world: The processes.
        amp: The session.
        write: What takes each line.
    """

    def __init__(self, world: World, amp: MixedPrecision, write: Callable[[RankStep], None] | None = None) -> None:
        self._world, self._amp, self._write = world, amp, write
        self._waited = 0.0
        self._loss_failed = False
        self._wire_bytes = 0

    @contextmanager
    def counting(self, is_on: bool) -> Iterator[None]:
        """Count what is sent inside the block, if it is to be counted."""
        if self._world.size == 1 or not is_on:
            yield
            return
        with Traffic() as traffic:
            yield
        self._wire_bytes = traffic.wire_bytes

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean of all ranks' losses, 0-d, detached.

        Each rank has done its own forward pass here, and none has sent a gradient: the fast ones wait for the slow.

        Raises:
            KeyboardInterrupt: The user has asked any of the ranks to stop.

        **Cost**: with several ranks, one all-reduce of 8 bytes, and two waits for the device.
        """
        if self._world.size == 1:
            return loss.detach()
        value = loss.detach().float()
        told = torch.stack((value, torch.full_like(value, self._world.is_interrupted)))
        self._loss_failed = not math.isfinite(value.item())  # waits for this rank's own work, which is not waiting
        begin = time.perf_counter()
        dist.all_reduce(told)
        _, interrupted = told.tolist()
        self._waited = time.perf_counter() - begin
        if interrupted:
            raise KeyboardInterrupt
        return told[0] / self._world.size

    def ended(self, number: int, ms: float, num_samples: int) -> None:
        """Write the line of a step."""
        if self._write is None:
            return
        self._write(
            RankStep(
                policy=str(self._amp.policy),
                step=number,
                ms=ms,
                samples_per_s=1e3 * num_samples / ms,
                waiting_ms=1e3 * self._waited,
                wire_bytes=self._wire_bytes,
                overflowed=self._loss_failed,
                peak_bytes=_peak_bytes(self._world.device),
            )
        )


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    # In KiB, and on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
