"""One recipe trained under several policies on the same batches, with the evidence side by side."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from mezzo.cast.device import default_kinds, fast_format
from mezzo.errors import MezzoError, PolicyError, raise_together
from mezzo.machine import describe
from mezzo.policy import Policy
from mezzo.recipes.parallel import Parallel, World, joined
from mezzo.recipes.rank_meter import RankStep
from mezzo.recipes.recipe import Metric, Recipe, Split
from mezzo.recipes.run_directory import RankLog, RunDirectory
from mezzo.recipes.training import RunResult, Training, Watcher, num_steps
from mezzo.tensors import LOW, dtype_name

__all__ = ["SCHEMA", "Comparison", "compare", "default_policies", "parse_policies"]

logger = logging.getLogger(__name__)

#: Version of ``summary.json``; a reader refuses one it does not know.
SCHEMA: Final = 1


def default_policies() -> tuple[str, ...]:
    """Return FP32, each level in the format to train in on this machine, and in the other one those that keep FP32.

    Example:
        >>> default_policies()[0], len(default_policies())
        ('O0', 6)
    """
    fast = fast_format(default_kinds())
    (other,) = (dtype for dtype in LOW if dtype != fast)
    low = [("O1", fast), ("O2", fast), ("O3", fast), ("O1", other), ("O2", other)]
    return ("O0", *(f"{level},dtype={dtype_name(dtype)}" for level, dtype in low))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of one recipe under several policies; before its first step, what is known already.

    Attributes:
        recipe: Its name.
        summary: Its one line.
        metric: What the rows are judged by.
        references: Values of the metric that the data alone gives.
        data_sha256: Fingerprint of the data and its division.
        steps: Steps per policy.
        seed: Of initial weights and batches; ``None`` for a script, which seeds by itself.
        date: When it ended, or began, ISO 8601 with the time zone.
        machine: What it ran on.
        parallel: How the ranks shared the work; ``None`` for one process.
        ranks: How many there were. Times and bytes are those of rank 0.
        policies: Every policy asked for, in order.
        rows: The results, in the same order; fewer than policies after an interruption.
        interrupted: Whether the user stopped it.
        directory: Where the files are, if any were written.
    """

    recipe: str
    summary: str
    metric: Metric
    references: Mapping[str, float] = field(default_factory=dict)
    data_sha256: str = ""
    steps: int
    seed: int | None = None
    date: str = field(default_factory=_now)
    machine: Mapping[str, str | int | bool]
    parallel: Parallel | None = None
    ranks: int = 1
    policies: tuple[str, ...]
    rows: tuple[RunResult, ...] = ()
    interrupted: bool = True
    directory: Path | None = None

    @property
    def reference(self) -> str:
        """The policy the others are compared with: the first plain O0, else the first of all."""
        return next((text for text in self.policies if text == "O0"), self.policies[0])

    def difference(self, row: RunResult) -> float | None:
        """The row's final metric less the reference's; ``None`` for the reference and where unknown."""
        base = next((other.final_metric for other in self.rows if other.policy == self.reference), None)
        if row.policy == self.reference or base is None or row.final_metric is None:
            return None
        return row.final_metric - base

    def ended(self, rows: tuple[RunResult, ...]) -> Comparison:
        """Return the comparison with its results, as of now."""
        stopped = len(rows) < len(self.policies) or rows[-1].status == "interrupted"
        return dataclasses.replace(self, rows=rows, interrupted=stopped, date=_now())

    def to_dict(self) -> dict[str, Any]:
        """Return what ``summary.json`` holds; every key with a unit names it."""
        rows = [
            dataclasses.asdict(row)
            | {
                "difference": self.difference(row),
                "step_ms": row.step_ms and dict(zip(("p10", "median", "p90"), row.step_ms, strict=True)),
                "state_bytes": row.state_bytes
                and dataclasses.asdict(row.state_bytes) | {"total": row.state_bytes.total},
            }
            for row in self.rows
        ]
        fields = dataclasses.asdict(self) | {"policies": list(self.policies), "reference": self.reference, "rows": rows}
        return {"schema": SCHEMA, **{name: value for name, value in fields.items() if name != "directory"}}


def compare(
    recipe: Recipe,
    policies: Sequence[Policy | str] | None = None,
    *,
    steps: int | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    overwrite: bool = False,
    device: torch.device | None = None,
    parallel: Parallel | World | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Train a recipe under each policy, from the same weights on the same batches.

    Everything that can be refused is refused before the first step: data, policies, device, directory. Ctrl-C
    ends the comparison early: the policies so far are summed up and written, the last one marked
    ``interrupted``, and the comparison is returned with ``interrupted`` set.

    Args:
        recipe: What to train.
        policies: Policies, their texts, or paths of policy files, each once; :func:`default_policies` when omitted, of
            which O3 is left out where the recipe's optimizer cannot train without FP32 values.
        steps: Steps per policy; the recipe's own number when ``None``.
        seed: Of initial weights and batches.
        out: Directory for ``summary.json`` and ``metrics.jsonl``; nothing is written when ``None``. Of several
            ranks the first writes these, and each its ``metrics.rank0.jsonl``: one line a step, of :class:`RankStep`.
        overwrite: Whether a run that is in ``out`` may be replaced.
        device: Where; the accelerator if there is one.
        parallel: As for :func:`train`.
        watcher: Told of every step of every policy.

    Returns:
        The comparison.

    Raises:
        PolicyError: Policies, steps or directory make no sense; all faulty policies in one error.
        UnsupportedError: The data's package is missing, or the device cannot do what a policy asks for.
        DistributedError: Another rank did not answer.

    **Cost**: the trainings, one after the other; one transfer from the device per step.

    Example:
        >>> from mezzo.recipes import get
        >>> comparison = compare(get("digits-cnn"), ["O0", "O1,dtype=bfloat16"], steps=2)
        >>> [row.policy for row in comparison.rows], comparison.reference
        (['O0', 'O1,dtype=bfloat16'], 'O0')
    """
    steps = num_steps(recipe, steps)
    usual = default_policies()
    policies = usual if policies is None else policies
    parsed = parse_policies(policies)
    with joined(parallel, device) as world, ExitStack() as files:
        directory = None
        if out is not None:
            directory = world.on_first(partial(RunDirectory, Path(out), overwrite=overwrite))
        split = recipe.load()
        world.require_share(recipe, split)
        parsed = _tried_out(recipe, parsed, split, world, are_asked_for=tuple(policies) != usual)

        comparison = begun(recipe, parsed, split, steps=steps, seed=seed, world=world, directory=directory)
        if directory is not None:
            files.callback(directory.close)
        log = None
        if out is not None and world.size > 1:
            world.on_first(lambda: directory and directory.open())
            log = files.enter_context(RankLog(Path(out), world.rank)).write
        watchers = [each for each in (directory, watcher) if each is not None]
        comparison = comparison.ended(tuple(_results(recipe, parsed, split, steps, seed, world, watchers, log)))
        files.close()
        world.wait()  # until all logs are whole
        if directory is not None:
            directory.finish(comparison.to_dict())
        return comparison


def begun(
    recipe: Recipe,
    policies: Sequence[Policy],
    split: Split,
    *,
    steps: int,
    seed: int,
    world: World,
    directory: RunDirectory | None,
) -> Comparison:
    """Return a comparison before its first step, and let its directory know."""
    comparison = Comparison(
        recipe=recipe.name,
        summary=recipe.summary,
        metric=recipe.metric,
        references=recipe.references(split),
        data_sha256=split.sha256(),
        steps=steps,
        seed=seed,
        machine=describe(world.device),
        parallel=world.parallel,
        ranks=world.size,
        policies=tuple(str(policy) for policy in policies),
        directory=None if directory is None else directory.path,
    )
    if directory is not None:
        directory.begin(comparison.to_dict())
    return comparison


def _results(
    recipe: Recipe,
    policies: Sequence[Policy],
    split: Split,
    steps: int,
    seed: int,
    world: World,
    watchers: Sequence[Watcher],
    log: Callable[[RankStep], None] | None,
) -> Iterator[RunResult]:
    """Train under one policy after the other, until the user interrupts."""
    for policy in policies:
        training: Training | None = None
        interrupted = False
        try:
            training = Training(recipe, policy, split, steps=steps, seed=seed, world=world, log=log)
            training.train(watchers)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if training is not None:
                training.close()
        if training is not None:
            yield training.result(watchers, interrupted=interrupted)
        if interrupted:
            return


def parse_policies(policies: Sequence[Policy | str]) -> list[Policy]:
    """Read every policy, and refuse all faulty and repeated ones together."""
    parsed: list[Policy] = []
    problems: list[PolicyError] = []
    for policy in policies:
        try:
            value = Policy.of(policy)
        except PolicyError as error:
            problems.append(error)
            continue
        if value in parsed:
            problems.append(
                PolicyError(
                    f"the policy {value} is listed twice",
                    why="both rows would show the same training",
                    write="each policy once",
                )
            )
        parsed.append(value)
    raise_together(problems)
    if not parsed:
        raise PolicyError("no policy to compare", write='policies=["O0", "O1,dtype=bfloat16"]')
    return parsed


def _tried_out(
    recipe: Recipe, policies: Sequence[Policy], split: Split, world: World, *, are_asked_for: bool
) -> list[Policy]:
    """Set up every training once, so that what the device cannot do is said before minutes are spent.

    Args:
        recipe: The recipe.
        policies: All of them.
        split: Its data.
        world: Who trains.
        are_asked_for: Whether each is the user's wish. Else those that keep high halves alone are left out, and told
            of, where the recipe's optimizer cannot train so: AdamW in FP16.

    Returns:
        The policies to train under.
    """
    problems: list[MezzoError] = []
    fitting: list[Policy] = []
    for policy in policies:
        try:
            Training(recipe, policy, split, steps=1, world=world).close()
            fitting.append(policy)
        except MezzoError as error:
            if are_asked_for or policy.master_weights or policy.param_dtype == torch.float32:
                problems.append(error)
            else:
                logger.warning("%s is left out: %s", policy, error)
    raise_together(problems)
    return fitting
