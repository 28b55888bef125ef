"""What a run came to: written down while the script runs, and told at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mezzo.documents import jsonable
from mezzo.explanation.words import counted, format_text, scale_text, share_text
from mezzo.numerics.footprint import StateBytes
from mezzo.numerics.skips import MANY
from mezzo.session import Stats

__all__ = ["Ledger", "ScriptReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """What a script's run under a policy came to.

    Attributes:
        program: The script's path, or the module's name.
        policy: The policy.
        models: The models whose forward passes ran under it.
        optimizers: The optimizers whose steps were checked.
        steps: How many steps there were, skipped ones included.
        skipped: How many of them updated nothing.
        scale: The loss scale at the end; ``None`` where there was no session.
        lowest_scale: Its lowest value.
        highest_scale: Its highest value.
        flops: The operations of matrix products in the first steps, by the format that their kernels read;
            ``emulated`` for those that were computed in FP32 from rounded operands.
        low_share: The share of these that ran low, emulated ones included.
        measured_steps: How many steps that was measured in.
        intercepted: What of the script's was carried out otherwise, and how often.
        left_alone: What was not, and why.
        state_bytes: Weights, gradients, masters and optimizer state in the second step, where steps were told of.
        peak_bytes: The most that was allocated at a time, on a GPU.
    """

    program: str
    policy: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    steps: int
    skipped: int
    scale: float | None
    lowest_scale: float | None
    highest_scale: float | None
    flops: dict[str, int]
    low_share: float
    measured_steps: int
    intercepted: dict[str, int]
    left_alone: dict[str, str]
    state_bytes: StateBytes | None
    peak_bytes: int | None

    @property
    def alarm(self) -> str:
        """What is wrong with the run as one in mixed precision; empty where nothing is."""
        if not self.low_share:
            return "nothing ran in low precision"
        if 2 * self.skipped > self.steps:
            return f"{self.skipped} of {self.steps} steps were skipped"
        return ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The report, the answer first."""
        return tuple(self._lines())

    def to_json(self) -> str:
        """Return it as JSON, with the alarm."""
        return json.dumps(jsonable({**asdict(self), "alarm": self.alarm}), indent=2, allow_nan=False)

    def _lines(self) -> Iterator[str]:
        yield f"mezzo run {self.program} under {self.policy}: {self._answer()}"
        if self.steps:
            found = "; docs/nan.md says how to find out why" if self.skipped > MANY * self.steps else ""
            yield f"  steps        {self.steps}, {self.skipped or 'none'} skipped{found}"
            yield f"  loss scale   {self._scales()}"
        for label, names in (("models", self.models), ("optimizers", self.optimizers)):
            if names:
                yield f"  {label:<11}  {', '.join(_folded(names))}"
        if self.flops:
            parts = (f"{share_text(n, self._flops)} {_format(name)}" for name, n in Counter(self.flops).most_common())
            yield f"  products     {', '.join(parts)}"
        for number, (what, times) in enumerate(self.intercepted.items()):
            yield f"  {'' if number else 'intercepted':<11}  {what}{f' ×{times}' if times > 1 else ''}"
        for number, (what, why) in enumerate(self.left_alone.items()):
            first, *rest = why.split("\n")
            yield f"  {'' if number else 'left alone':<11}  {what}: {first}"
            yield from (f"  {'':<11}  {line}" for line in rest)

    def _answer(self) -> str:
        if not self.flops:
            return self.alarm
        share = share_text(round(self.low_share * self._flops), self._flops)
        measured = f"{share} of the work of its matrix products ran low, measured in "
        return measured + f"{counted(self.measured_steps, 'step')}" + (f"; {self.alarm}" if self.alarm else "")

    def _scales(self) -> str:
        if self.lowest_scale == self.highest_scale:
            return scale_text(self.scale)
        return f"{scale_text(self.scale)}, between {scale_text(self.lowest_scale)} and {scale_text(self.highest_scale)}"

    @property
    def _flops(self) -> int:
        return sum(self.flops.values())


@dataclass(slots=True)
class Ledger:
    """What is written down while a script runs.

    Attributes:
        stats: Those of each session that has ended.
        models: The models of all sessions.
        optimizers: The optimizers of all sessions.
        flops: The operations of matrix products by format, as far as they were counted.
        low_share: The share of these that ran low.
        measured_steps: How many steps were counted.
        intercepted: What was carried out otherwise, and how often.
        left_alone: What was not, and why.
        state_bytes: Those of the second step, where steps were told of.
    """

    stats: list[Stats] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    low_share: float = 0.0
    measured_steps: int = 0
    intercepted: Counter[str] = field(default_factory=Counter)
    left_alone: dict[str, str] = field(default_factory=dict)
    state_bytes: StateBytes | None = None

    def report(self, program: str, policy: Any) -> ScriptReport:
        """Return what it comes to."""
        return ScriptReport(
            program=program,
            policy=str(policy),
            models=tuple(self.models),
            optimizers=tuple(self.optimizers),
            steps=sum(each.steps for each in self.stats),
            skipped=sum(each.skipped for each in self.stats),
            scale=self.stats[-1].scale if self.stats else None,
            lowest_scale=min((each.lowest_scale for each in self.stats), default=None),
            highest_scale=max((each.highest_scale for each in self.stats), default=None),
            flops=dict(self.flops),
            low_share=self.low_share,
            measured_steps=self.measured_steps,
            intercepted=dict(self.intercepted),
            left_alone=dict(self.left_alone),
            state_bytes=self.state_bytes,
            peak_bytes=torch.cuda.max_memory_allocated() or None,
        )


def _folded(names: tuple[str, ...]) -> Iterator[str]:
    return (f"{name} ×{times}" if times > 1 else name for name, times in Counter(names).items())


def _format(name: str) -> str:
    return "emulated: in FP32 from rounded operands" if name == "emulated" else format_text([name])
