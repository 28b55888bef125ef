"""Several processes that train together: who they are, what each takes of a batch, how a model is wrapped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mezzo.distributed import fully_shard
from mezzo.errors import DistributedError, MezzoError, PolicyError, UnsupportedError, nearest
from mezzo.machine import default_device
from mezzo.policy import Policy
from mezzo.recipes.recipe import Batch, Recipe, Split
from mezzo.session import MixedPrecision

__all__ = ["Parallel", "World", "joined", "require_one_process"]

Parallel = Literal["ddp", "fsdp"]
Result = TypeVar("Result")

_TORCHRUN: Final = "torchrun --nproc-per-node {} -m mezzo train docs-lm --parallel {}"


@dataclass(slots=True, kw_only=True)
class World:
    """The processes that train together, as one of them sees them; by default there is one.

    Attributes:
        parallel: How they share the work; ``None`` for one process.
        rank: Which of them this is.
        size: How many there are.
        device: Where this one computes.
        is_interrupted: Whether the user has pressed Ctrl-C: all of them stop after the same step.
    """

    parallel: Parallel | None = None
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=default_device)
    is_interrupted: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this one writes the run directory, and prints."""
        return self.rank == 0

    def share(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch: all parts, in the order of ranks, are the batch."""
        inputs, targets = (tensor.chunk(self.size)[self.rank] for tensor in batch)
        return inputs, targets

    def require_share(self, recipe: Recipe, split: Split) -> None:
        """Refuse batches that the ranks cannot share in equal parts.

        Raises:
            PolicyError: The mean over ranks would not be the mean over the batch.
        """
        count = len(next(recipe.batches(split, 0))[0])
        if count % self.size:
            fitting = max(each for each in range(1, self.size) if count % each == 0)
            raise PolicyError(
                f"{self.size} ranks cannot share a batch of {count} in equal parts",
                where=f"recipe {recipe.name}, rank {self.rank} of {self.size}",
                why="the mean over ranks is the mean over the batch only where each has as many samples",
                write=f"torchrun --nproc-per-node {fitting} …" if fitting > 1 else f"mezzo train {recipe.name}",
            )

    def session(self, recipe: Recipe, model: nn.Module, policy: Policy) -> tuple[Optimizer, MixedPrecision, nn.Module]:
        """Return the optimizer, the session, and what to call for a forward pass."""
        if self.parallel == "fsdp":
            fully_shard(model, policy)
        optimizer = recipe.optimizer(model)
        amp = MixedPrecision(model, optimizer, policy, max_grad_norm=recipe.max_grad_norm)
        return optimizer, amp, nn.parallel.DistributedDataParallel(model) if self.parallel == "ddp" else model

    def on_first(self, call: Callable[[], Result]) -> Result | None:
        """Call a function on rank 0 alone, while the others wait; what it refuses, all refuse.

        Returns:
            What it returned on rank 0, and ``None`` on the others.
        """
        if self.size == 1:
            return call()
        result, fault = None, None
        if self.is_first:
            try:
                result = call()
            except MezzoError as error:
                fault = error
        told = self.same(fault)
        if told is not None:
            raise told
        return result

    def same(self, value: Result) -> Result:
        """Return rank 0's value on all ranks."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(parallel: str | World | None, device: torch.device | None = None) -> Iterator[World]:
    """Join the processes of a training inside the block, over gloo on CPUs and NCCL on GPUs.

    A process group that is there already is used, and left as it is. Inside the block Ctrl-C stops all ranks after the
    same step.

    Args:
        parallel: ``ddp``, ``fsdp``; ``None`` for a training in one process; or ranks that have joined already.
        device: Where this rank computes; the accelerator of its number on this machine, if there is one.

    Raises:
        PolicyError: There is one process where several are asked for, or several where nothing says how they share
            the work, or the word is unknown.
        UnsupportedError: torch has no backend for the device, or there are fewer devices than ranks.
        DistributedError: The ranks did not find each other.
    """
    if isinstance(parallel, World):
        yield parallel
        return
    device, is_there = device or default_device(), dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_there else int(os.environ.get("RANK", "0"))
    size = dist.get_world_size() if is_there else int(os.environ.get("WORLD_SIZE", "1"))
    if parallel is None:
        if size > 1:
            raise PolicyError(
                f"each of {size} processes would train all of it, and write the same files",
                where=f"rank {rank} of {size}",
                why="nothing says how they share the work",
                write="--parallel ddp, or --parallel fsdp",
            )
        yield World(device=device)
        return
    if parallel not in get_args(Parallel):
        raise PolicyError(f"unknown way to train in parallel {parallel!r}", why=nearest(parallel, get_args(Parallel)))
    if size == 1:
        told = "torchrun started one process: --nproc-per-node says how many" if "WORLD_SIZE" in os.environ else ""
        raise PolicyError(
            f"--parallel {parallel} is for several processes, and this is the only one",
            why=told or "torchrun starts them",
            write=_TORCHRUN.format(2, parallel),
        )
    world = World(
        parallel=cast(Parallel, parallel), rank=rank, size=size, device=_own(device, f"rank {rank} of {size}")
    )
    with nullcontext() if is_there else _group(world), _in_order(world):
        yield world


def require_one_process(verb: str) -> None:
    """Refuse a verb that works in one process where several were started.

    Raises:
        PolicyError: They would do the same work, and write the same files.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise PolicyError(
            f"mezzo {verb} works in one process, and {size} were started",
            where=f"rank {os.environ.get('RANK', '0')} of {size}",
            why="all of them would do the same, and write the same files",
            write=f"mezzo {verb} …, without torchrun",
        )


def _own(device: torch.device, where: str) -> torch.device:
    """Return the device of this rank, or refuse."""
    if not dist.is_available():
        raise UnsupportedError("this torch was built without torch.distributed", where=where, write="pip install torch")
    backend = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):
        raise UnsupportedError(
            f"this torch was built without {backend}",
            where=f"{where}, on {device.type}",
            why=f"ranks on {device.type} talk to each other over it",
            write="CUDA_VISIBLE_DEVICES= torchrun …, which trains on CPUs over gloo",
        )
    if device.type == "cpu" or device != torch.device(device.type):  # which has a number
        return device
    count, local = torch.accelerator.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if local >= count:
        raise UnsupportedError(
            f"there are {count} devices for {os.environ.get('LOCAL_WORLD_SIZE', local + 1)} ranks on this machine",
            where=where,
            why="each rank needs a device of its own",
            write=f"torchrun --nproc-per-node {count} …",
        )
    torch.accelerator.set_device_index(local)
    return torch.device(device.type, local)


@contextmanager
def _group(world: World) -> Iterator[None]:
    backend = dist.get_default_backend_for_device(world.device)
    try:
        dist.init_process_group(backend, device_id=world.device if backend == "nccl" else None)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            "the ranks did not find each other",
            where=f"rank {world.rank} of {world.size}, {backend}",
            why=str(error),
            write=_TORCHRUN.format(world.size, world.parallel),
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _in_order(world: World) -> Iterator[None]:
    """At Ctrl-C end all ranks between two steps: they tell each other of it once a step.

    torchrun ends all ranks when one has failed: that signal waits too, for what they have to say about it.
    """
    if threading.current_thread() is not threading.main_thread():  # where signals can be handled
        yield
        return
    seen: set[int] = set()

    def remember(number: int, _: Any) -> None:
        if number in seen:  # for the second time
            raise KeyboardInterrupt
        seen.add(number)
        world.is_interrupted = True

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
