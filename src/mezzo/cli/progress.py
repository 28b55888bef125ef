"""How a long training shows that it goes on: bars in a terminal, one line per policy anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mezzo.policy import Policy
from mezzo.recipes import Metric, RunResult, StepRecord, Watcher

__all__ = ["bars", "watching"]

#: Ten steps a second are plenty to look at, and drawing takes time from training on two cores.
REFRESH_PER_SECOND = 4


def bars(console: Console) -> Progress:
    """Return bars with the time left, and ``news`` behind it, that vanish in the end."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}", markup=False),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
        transient=True,
    )


@contextmanager
def watching(console: Console, metric: Metric, num_policies: int) -> Iterator[Watcher]:
    """Show progress on a console inside the block.

    Args:
        console: On stderr, so that results can be piped.
        metric: What the recipe is judged by.
        num_policies: How many trainings there will be, for the time left.
    """
    progress = bars(console)
    # Output that is no terminal is a log: bars that never start are counted, and not drawn.
    with progress if console.is_terminal else nullcontext():
        yield _Shown(progress, metric, num_policies)


class _Shown:
    """A bar for the whole comparison and one for the policy that is being trained; its line when it is over."""

    def __init__(self, progress: Progress, metric: Metric, num_policies: int) -> None:
        self._progress, self._metric, self._num_policies = progress, metric, num_policies
        self._whole = progress.add_task(f"{num_policies} policies", total=None, news="", visible=num_policies > 1)
        self._current = self._whole

    def started(self, policy: Policy, steps: int) -> None:
        """Add the policy's bar."""
        self._progress.update(self._whole, total=steps * self._num_policies)
        self._current = self._progress.add_task(str(policy), total=steps, news="")

    def stepped(self, record: StepRecord) -> None:
        """Move both bars on."""
        self._progress.advance(self._whole)
        self._progress.update(self._current, advance=1, news=f"loss {record.loss:.4g}")

    def ended(self, result: RunResult) -> None:
        """Replace the policy's bar by a line on how the training went."""
        self._progress.remove_task(self._current)
        value = result.final_metric
        score = "not scored" if value is None else f"{value:.{self._metric.decimals}f} {self._metric.unit}"
        text = f"{result.policy}: {result.status}, {result.steps} steps in {result.seconds:.3g} s, "
        text += f"{self._metric.name} {score}, {result.skipped_steps} skipped"
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
