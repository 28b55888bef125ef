"""One recipe trained under one policy, with everything counted that a comparison shows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mezzo.errors import NumericsError, PolicyError
from mezzo.numerics.footprint import SavedBytes, StateBytes, state_bytes
from mezzo.policy import Policy
from mezzo.recipes.parallel import Parallel, World, joined
from mezzo.recipes.rank_meter import RankMeter, RankStep
from mezzo.recipes.recipe import Batch, Recipe, Split

__all__ = ["RunResult", "StepRecord", "Training", "Watcher", "num_steps", "step_ms", "train"]

#: How often the held-out data is scored in a run; the best of these is the best metric.
NUM_EVALUATIONS = 10
#: Steps at the start that are not timed: allocators, thread pools and kernel choices settle in them.
UNTIMED_STEPS = 5

Arithmetic = Literal["native", "emulated"]
Status = Literal["finished", "interrupted", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, as one line of ``metrics.jsonl``.

    Attributes:
        policy: The policy's text.
        step: From 1.
        loss: The training loss before the step, unscaled.
        scale: The loss scale used in this step.
        skipped: Whether the weights were left alone because a gradient was not finite.
        grad_norm: Global norm of the unscaled gradients before clipping.
        ms: Wall time of the step in milliseconds, evaluation excluded.
        metric: The recipe's metric, in steps after which it was measured.
    """

    policy: str
    step: int
    loss: float
    scale: float
    skipped: bool
    grad_norm: float
    ms: float
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What training under one policy came to.

    Attributes:
        policy: The policy's text.
        status: ``interrupted`` by the user, or ``stopped`` by a numerics error, which is in ``note``.
        note: Why it stopped.
        arithmetic: ``native``, or ``emulated``: computed in FP32 from rounded operands; then the time is no
            measure of what the format can do.
        memory_format: Layout of weights and inputs.
        steps: How many were taken, skipped ones included.
        seconds: Wall time of all steps and evaluations.
        final_metric: The metric at the end.
        best_metric: The best of the evaluations, the last one included.
        best_step: Where it was reached.
        final_loss: Training loss of the last step.
        step_ms: 10th, 50th and 90th percentile of the step time in milliseconds.
        state_bytes: Weights, gradients, low halves, optimizer state, right after a backward pass.
        saved_bytes: What autograd saved for the backward pass of one step.
        peak_bytes: Peak allocated in one step, on a GPU.
        skipped_steps: Steps that left the weights alone.
        final_scale: The loss scale the next step would use.
        nonfinite_losses: Steps whose loss was infinite or NaN.
        low_share: The share of the work of matrix products that ran low, where it was measured.
    """

    policy: str
    status: Status
    note: str
    arithmetic: Arithmetic
    memory_format: Literal["contiguous", "channels-last"]
    steps: int
    seconds: float
    final_metric: float | None
    best_metric: float | None = None
    best_step: int | None = None
    final_loss: float | None
    step_ms: tuple[float, float, float] | None
    state_bytes: StateBytes | None
    saved_bytes: int | None = None
    peak_bytes: int | None
    skipped_steps: int
    final_scale: float | None
    nonfinite_losses: int
    low_share: float | None = None


class Watcher(Protocol):
    """What follows a run while it goes on: a progress bar, a log.

    Each method returns at once: the time it takes is not counted in ``ms``, but the user waits for it.
    """

    def started(self, policy: Policy, steps: int) -> None:
        """Training under ``policy`` begins and will take ``steps`` steps."""

    def stepped(self, record: StepRecord) -> None:
        """One step is done."""

    def ended(self, result: RunResult) -> None:
        """Training under the policy is over, whatever the status."""


class Training:
    """Train one recipe under one policy, step by step, and keep what is needed for the result.

    Made in two moves so that an interrupted run still has a result: :meth:`train`, then :meth:`result`.

    Args:
        recipe: What to train.
        policy: In what precision.
        split: The recipe's data, as :attr:`Recipe.load` returns it.
        steps: How many steps; the recipe's own number when ``None``.
        seed: Of initial weights and batches.
        world: The processes that train together; when ``None`` one, on the accelerator if there is one.
        log: Takes what this rank knows of each step.

    Raises:
        PolicyError: ``steps`` is not a positive integer.
        UnsupportedError: The device cannot do what the policy asks for.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        split: Split,
        *,
        steps: int | None = None,
        seed: int = 0,
        world: World | None = None,
        log: Callable[[RankStep], None] | None = None,
    ) -> None:
        self.recipe, self.policy, self.split = recipe, policy, split
        self.steps = num_steps(recipe, steps)
        self.world = world or World()
        self.device = self.world.device
        # What is sharded lies row by row, whatever its layout was.
        is_free = policy.dtype != torch.float32 and self.world.parallel != "fsdp"
        self.layout = recipe.low_memory_format if is_free else torch.contiguous_format
        self.model = recipe.build(seed).to(self.device, memory_format=self.layout)  # type: ignore[call-overload]
        self.optimizer, self.amp, self._called = self.world.session(recipe, self.model, policy)
        self._meter = RankMeter(self.world, self.amp, log)
        self.arithmetic: Arithmetic = "emulated" if self.amp.emulated else "native"
        self.schedule = recipe.schedule(self.optimizer, self.steps)
        self.batches = recipe.batches(split, seed)
        self.records: list[StepRecord] = []
        self.final_scale: float | None = None
        self.seconds = 0.0
        self.note = ""
        self._probed_step = 0
        self._saved_bytes: int | None = None
        self._peak_bytes: int | None = None
        self._state_bytes: StateBytes | None = None

    def train(self, watchers: Sequence[Watcher] = ()) -> None:
        """Take all steps, and tell when they begin and of each; return early when the session raises a numerics error.

        **Cost**: one transfer from the device per step, which also ends the step's time.
        """
        for watcher in watchers:
            watcher.started(self.policy, self.steps)
        evaluated = {math.ceil(part * self.steps / NUM_EVALUATIONS) for part in range(1, NUM_EVALUATIONS + 1)}
        begin = time.perf_counter()
        try:
            for number in range(1, self.steps + 1):
                self._step(number, evaluate=number in evaluated)
                for watcher in watchers:
                    watcher.stepped(self.records[-1])
        except NumericsError as error:
            self.note = str(error)
        finally:
            self.seconds = time.perf_counter() - begin

    def close(self) -> None:
        """Take the session off the model."""
        self.amp.close()

    def _step(self, number: int, *, evaluate: bool) -> None:
        inputs, targets = self._on_device(self.world.share(next(self.batches)))
        # Moments exist after the first step that was not skipped; before that there would be less to count.
        probe = not self._probed_step and (number == self.steps or bool(self.optimizer.state))
        begin = time.perf_counter()
        with self._meter.counting(number <= UNTIMED_STEPS):
            if probe:
                loss = self._probed_backward(inputs, targets)
                self._probed_step = number
            else:
                loss = self._backward(self._forward(inputs, targets))
            step = self.amp.step()
        self.amp.zero_grad()
        numbers = (loss, step.scale, step.next_scale, step.skipped, step.grad_norm)
        # One transfer for all five, which also waits for the device to finish the step.
        read = torch.stack([number.detach().float() for number in numbers]).tolist()
        if not read[3]:
            self.schedule.step()
        ms = (time.perf_counter() - begin) * 1e3
        self._meter.ended(number, ms, len(inputs))
        if probe and self.device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.final_scale = read[2]
        self.records.append(
            StepRecord(
                policy=str(self.policy),
                step=number,
                loss=read[0],
                scale=read[1],
                skipped=bool(read[3]),
                grad_norm=read[4],
                ms=ms,
                metric=self._evaluate() if evaluate else None,
            )
        )

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.amp.autocast():
            return self.recipe.loss(self._called(inputs), targets)

    def _backward(self, loss: Tensor) -> Tensor:
        """Run the backward pass; return the loss of the whole batch."""
        mean = self._meter.mean(loss)
        self.amp.backward(loss)
        return mean

    def _probed_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with SavedBytes(self.model) as saved:
            loss = self._forward(inputs, targets)
        mean = self._backward(loss)
        self._saved_bytes = saved.total
        self._state_bytes = state_bytes(self.model, self.optimizer)
        return mean

    def _evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad(), self.amp.autocast():
            value = self.recipe.evaluate(self.model, self.split)
        self.model.train()
        self.world.wait()  # else the next step would be waiting for a rank that is still at it
        return value

    def _on_device(self, batch: Batch) -> Batch:
        inputs, targets = (tensor.to(self.device) for tensor in batch)
        return (inputs.contiguous(memory_format=self.layout) if inputs.ndim == 4 else inputs), targets

    def result(self, watchers: Sequence[Watcher] = (), *, interrupted: bool = False) -> RunResult:
        """Sum up the steps taken so far, and tell of that."""
        scored = [(record.metric, record.step) for record in self.records if record.metric is not None]
        best: tuple[float, int] | None = None
        for value, step in scored:
            if best is None or self.recipe.metric.better(value, best[0]):
                best = value, step
        result = RunResult(
            policy=str(self.policy),
            status="interrupted" if interrupted else "stopped" if self.note else "finished",
            note=self.note,
            arithmetic=self.arithmetic,
            memory_format="channels-last" if self.layout == torch.channels_last else "contiguous",
            steps=len(self.records),
            seconds=self.seconds,
            final_metric=scored[-1][0] if scored else None,
            best_metric=best[0] if best else None,
            best_step=best[1] if best else None,
            final_loss=self.records[-1].loss if self.records else None,
            step_ms=step_ms(self.records, self._probed_step),
            state_bytes=self._state_bytes,
            saved_bytes=self._saved_bytes,
            peak_bytes=self._peak_bytes,
            skipped_steps=sum(record.skipped for record in self.records),
            final_scale=self.final_scale,
            nonfinite_losses=sum(not math.isfinite(record.loss) for record in self.records),
        )
        for watcher in watchers:
            watcher.ended(result)
        return result


def step_ms(records: Sequence[StepRecord], probed_step: int = 0) -> tuple[float, float, float] | None:
    """Return the 10th, 50th and 90th percentile of the time of steps that count, in milliseconds.

    Args:
        records: The steps.
        probed_step: One that does not count, since it was looked into.
    """
    times = [record.ms for record in records if record.step > UNTIMED_STEPS and record.step != probed_step]
    if len(times) < 2:  # a run too short to leave its first steps out has no step time worth showing
        return None
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[0], statistics.median(times), tenths[-1]


def num_steps(recipe: Recipe, steps: int | None) -> int:
    """Return the number of steps to take.

    Raises:
        PolicyError: It is not a positive integer.
    """
    if steps is None:
        return recipe.steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PolicyError(
            f"steps must be a positive integer, not {steps!r}",
            where=f"recipe {recipe.name}",
            write=f"steps={recipe.steps}, which is its default",
        )
    return steps


def train(
    recipe: Recipe,
    policy: Policy | str,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    parallel: Parallel | World | None = None,
    watcher: Watcher | None = None,
) -> RunResult:
    """Train one recipe under one policy.

    Args:
        recipe: What to train, such as ``mezzo.recipes.get("digits-cnn")``.
        policy: A policy, its text, or the path of a policy file.
        steps: How many steps; the recipe's own number when ``None``.
        seed: Of initial weights and batches; the same seed gives every policy the same ones.
        device: Where; the accelerator if there is one.
        parallel: How the processes that torchrun started share each batch; ``None`` for a training in one process. The
            batches are the same: one process and several differ by the order of sums alone, but for batch norm, whose
            statistics are those of a rank's share.
        watcher: Told of every step.

    Returns:
        The result. A training that diverges is a result like any other: see ``nonfinite_losses``.

    Raises:
        PolicyError: ``policy`` or ``steps`` makes no sense.
        UnsupportedError: The data's package is missing, or the device cannot do what the policy asks for.
        DistributedError: Another rank did not answer.

    **Cost**: one transfer from the device per step; with several ranks one all-reduce and two waits more.

    Example:
        >>> from mezzo.recipes import get
        >>> result = train(get("digits-cnn"), "O0", steps=2)
        >>> result.steps, result.arithmetic, result.skipped_steps
        (2, 'native', 0)
    """
    policy = Policy.of(policy)
    num_steps(recipe, steps)
    with joined(parallel, device) as world:
        split = recipe.load()
        world.require_share(recipe, split)
        training = Training(recipe, policy, split, steps=steps, seed=seed, world=world)
        watchers = [] if watcher is None else [watcher]
        try:
            training.train(watchers)
            return training.result(watchers)
        finally:
            training.close()
