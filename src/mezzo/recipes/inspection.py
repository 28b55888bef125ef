"""A training run recorded: what it does to numbers, and so in which formats it is safe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from mezzo.explanation import Explanation, explain
from mezzo.machine import default_device
from mezzo.numerics import Diagnosis, Evidence, Recorder, diagnose, read_evidence
from mezzo.policy import Policy
from mezzo.recipes.comparison import Comparison, begun
from mezzo.recipes.parallel import World, require_one_process
from mezzo.recipes.recipe import Recipe, first_step
from mezzo.recipes.run_directory import EVIDENCE, EXPLANATION, PARTIAL, POLICY, RunDirectory
from mezzo.recipes.training import Training, Watcher, num_steps

__all__ = ["DEFAULT_POLICY", "Inspection", "inspect", "recorded"]

#: In FP32 nothing is lost before it is seen; what other formats would lose of it is computed from what was seen.
DEFAULT_POLICY: Final = "O0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found out about one training run.

    Attributes:
        run: The run itself, as a comparison of one policy.
        evidence: What was recorded of it.
        explanation: Which precision each op of its model gets, and why; ``None`` of a script.
        diagnosis: What the evidence comes to, in words.
    """

    run: Comparison
    evidence: Evidence
    explanation: Explanation | None
    diagnosis: Diagnosis

    def to_dict(self) -> dict[str, Any]:
        """Return what ``summary.json`` holds: the run's, how often it was recorded, and what that came to."""
        found = {"every": self.evidence.header.every, "diagnosis": self.diagnosis.to_dict()}
        return self.run.to_dict() | found


def inspect(
    recipe: Recipe,
    policy: Policy | str = DEFAULT_POLICY,
    *,
    steps: int | None = None,
    every: int = 50,
    seed: int = 0,
    out: Path | str | None = None,
    overwrite: bool = False,
    device: torch.device | None = None,
    watcher: Watcher | None = None,
) -> Inspection:
    """Train a recipe under one policy, and record what that does to numbers.

    Everything that can be refused is refused before the first step. Ctrl-C ends the training early; what there is until
    then is summed up and marked as partial.

    Args:
        recipe: What to train.
        policy: A policy, its text, or the path of a policy file. FP32 by default: gradients that a format flushes, or
            weights that it rounds, are seen whole only where that format is not in use.
        steps: How many steps; the recipe's own number when ``None``.
        every: Steps from one recorded step to the next; the first one is recorded.
        seed: Of initial weights and batches.
        out: Directory for the run; nothing is written when ``None``.
        overwrite: Whether a run that is in ``out`` may be replaced.
        device: Where; the accelerator if there is one.
        watcher: Told of every step.

    Returns:
        The run, its evidence, and its model's explanation.

    Raises:
        PolicyError: Policy, steps, ``every`` or directory make no sense.
        UnsupportedError: The data's package is missing, or the device cannot do what the policy asks for.

    **Cost**: the training, and on recorded steps what :class:`mezzo.numerics.Recorder` costs.

    Example:
        >>> from mezzo.recipes import get
        >>> inspection = inspect(get("digits-cnn"), steps=2, every=1)
        >>> [step.step for step in inspection.evidence.steps], inspection.evidence.header.policy
        ([1, 2], 'O0')
    """
    require_one_process("inspect")
    steps = num_steps(recipe, steps)
    policy = Policy.of(policy)
    world = World(device=device or default_device())
    directory = None if out is None else RunDirectory(Path(out), overwrite=overwrite)
    split = recipe.load()
    model, inputs, loss = first_step(recipe, split, seed, world.device)
    explanation = explain(model, inputs, policy, loss=loss)
    training = Training(recipe, policy, split, steps=steps, seed=seed, world=world)
    watchers = [each for each in (directory, watcher) if each is not None]
    try:
        run = begun(recipe, [policy], split, steps=steps, seed=seed, world=world, directory=directory)
        if directory is not None:
            directory.begin(run.to_dict() | {"every": every}, {EXPLANATION: explanation.to_json()})
        evidence, interrupted = recorded(
            training.model, partial(training.train, watchers), every=every, directory=directory
        )
        result = training.result(watchers, interrupted=interrupted)
    finally:
        training.close()
        if directory is not None:
            directory.close()
    found = diagnose(evidence)
    inspection = Inspection(run=run.ended((result,)), evidence=evidence, explanation=explanation, diagnosis=found)
    if directory is not None:
        directory.finish(inspection.to_dict(), made=[] if interrupted else [EVIDENCE])
        (found.policy or policy).save(directory.path / POLICY)
    return inspection


def recorded(
    model: nn.Module,
    loop: Callable[[], None],
    *,
    every: int = 50,
    directory: RunDirectory | None = None,
    **options: Any,
) -> tuple[Evidence, bool]:
    """Run a training loop, a recipe's or any other, and record it.

    Args:
        model: The model that it trains.
        loop: The whole loop, with a session in it.
        every: Steps from one recorded step to the next.
        directory: What recorded steps are written to at once; without one all are kept in memory.
        **options: Of :class:`mezzo.numerics.Recorder`; a loop without a session has to call its ``step()``.

    Returns:
        What was recorded, and whether Ctrl-C ended the loop.
    """
    recorder = Recorder(model, every=every, keep=None, **options)
    stream = None if directory is None else directory.open() / EVIDENCE
    if stream is not None:  # now that nothing is left to refuse
        recorder = Recorder(model, every=every, keep=1, stream=stream, **options)
    interrupted = False
    try:
        with recorder:
            loop()
    except KeyboardInterrupt:
        interrupted = True
    if stream is None:
        return recorder.evidence, interrupted
    written = stream.with_name(EVIDENCE + PARTIAL) if interrupted else stream
    return read_evidence(written) if written.exists() else recorder.evidence, interrupted
