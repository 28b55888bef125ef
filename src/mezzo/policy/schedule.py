"""``Schedule``: which policy each step of a run has, as one frozen value with a text of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import torch

from mezzo.errors import PolicyError, raise_together, shown
from mezzo.policy.fields import STEP, parts_of
from mezzo.policy.policy import Policy

_EXAMPLE: Final = 'mezzo.Schedule.of("fp8_module=*@0; O1,bf16@900")'


@dataclass(frozen=True, slots=True)
class Schedule:
    """Policies of a run, each from a step on: FP8 or FP4 for most of it, and BF16 at the end.

    Its text has the parts with ``;`` between, and behind the last ``@`` of each how many steps were begun before it,
    skipped ones included. A text without ``;`` is a policy for the whole run. Schedules compare by value, and print as
    text that reads back.

    Args:
        parts: ``(steps, policy)`` for each part, the first from step 0, in the order of their steps. A policy may be
            given by what :meth:`Policy.of` takes.

    Attributes:
        parts: The same, with policies.

    Raises:
        PolicyError: No parts, a wrong policy, or steps that do not rise from 0.

    Example:
        >>> import mezzo
        >>> schedule = mezzo.Schedule.of("bf16,nvfp4_module=*@0; bf16@900")
        >>> str(schedule.at(899)), str(schedule.at(900))
        ('O1,dtype=bfloat16,nvfp4_module=*', 'O1,dtype=bfloat16')
        >>> mezzo.Schedule.of(str(schedule)) == schedule
        True
    """

    parts: tuple[tuple[int, Policy], ...]

    def __post_init__(self) -> None:
        pairs = self.parts
        is_sequence = isinstance(pairs, list | tuple) and pairs
        if not is_sequence or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise PolicyError(f"a schedule cannot be made from {shown(pairs)}", write=_EXAMPLE)
        object.__setattr__(self, "parts", tuple((step, Policy.of(policy)) for step, policy in pairs))
        steps = [step for step, _ in self.parts]
        if wrong := [step for step in steps if not isinstance(step, int) or isinstance(step, bool)]:
            raise PolicyError(f"a part begins with step {shown(wrong[0])}, no whole number", write=_EXAMPLE)
        text = "; ".join(f"{policy}@{step}" for step, policy in self.parts)
        if steps[0]:
            raise PolicyError(
                f"the first part begins with step {steps[0]}",
                where=text,
                why="a run has a policy from its first step on; what stands behind the last @ of a part is its step, "
                "also behind a rule on a module: low=linear@3@0",
                write="; ".join(f"{policy}@{max(0, step - steps[0])}" for step, policy in self.parts),
            )
        if fallen := [step for before, step in pairwise(steps) if step <= before]:
            raise PolicyError(
                f"step {fallen[0]} does not stand behind a smaller one",
                where=text,
                why="parts follow each other, and the steps that they begin with rise",
                write=_EXAMPLE,
            )

    @classmethod
    def of(cls, value: ScheduleLike) -> Self:
        """Return the schedule that a value stands for: itself, its text, or one policy for the whole run.

        A text that is a policy's is one. Each part of a schedule's is a policy's text or the path of a policy file.

        Raises:
            PolicyError: Every part that is wrong.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            return cls(((0, Policy.of(value)),))  # type: ignore[arg-type]
        texts = parts_of(value)
        try:
            return cls(((0, Policy.of(value)),))
        except PolicyError:
            if not texts or (len(texts) == 1 and not STEP.fullmatch(texts[0])):
                raise
        if not any(map(STEP.fullmatch, texts)):
            raise PolicyError(
                f"no part of {shown(value)} has a step",
                why="a schedule's part ends with @ and how many steps there are before it",
                write="; ".join(f"{text}@{900 * number}" for number, text in enumerate(texts))
                + ";\nor mezzo compare, which takes several policies",
            )
        parts, problems = list[tuple[int, Policy]](), list[PolicyError]()
        for number, text in enumerate(texts, start=1):
            try:
                parts.append(_read(text))
            except PolicyError as problem:
                problems.append(PolicyError(f"part {number}: {problem}"))
        raise_together(problems)
        return cls(tuple(parts))

    def at(self, steps: int) -> Policy:
        """Return the policy of the step before which so many were begun."""
        return next((policy for step, policy in reversed(self.parts) if step <= steps), self.parts[0][1])

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of all parts, in their order."""
        return tuple(policy for _, policy in self.parts)

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.parts[0][1])
        return "; ".join(f"{policy}@{step}" for step, policy in self.parts)


#: What a schedule is given as: itself, its text, or what a policy is given as.
ScheduleLike = Schedule | Policy | str | os.PathLike[str] | torch.dtype


def _read(text: str) -> tuple[int, Policy]:
    """Read one part of a schedule's text.

    Raises:
        PolicyError: It has no step; or no policy's text stands before it.
    """
    match = STEP.fullmatch(text)
    if match is None:
        raise PolicyError(
            f"{shown(text)} has no step",
            why="a schedule's part ends with @ and how many steps there are before it",
            write=f"{text}@0 for the first part, {text}@900 for one after 900 steps",
        )
    return int(match[2]), Policy.of(match[1].strip())
