"""What an optimizer keeps from one step to the next: what is updated together, and until when that holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.optim.groups import Hypers
from mezzo.step.update import UpdateRule
from mezzo.step.verdict import BucketUpdate, Verdict
from mezzo.tensors import versions

#: Of the count of a cohort: its memory, and the version that the last step has left there.
_MEMORY: Final = attrgetter("count.counts")
_LEFT: Final = attrgetter("count.version")


@dataclass(slots=True, eq=False)
class Count:
    """How many updates some parameters have had: one number, of which the state of each has a view.

    Attributes:
        counts: (parameters,) int64.
        number: The first of them, 0-d.
        version: Of that memory, as the last step has left it: another one tells that a program has written there.
    """

    counts: Tensor
    number: Tensor
    version: int

    @classmethod
    def of(cls, number: Tensor | int, size: int, device: torch.device) -> Count:
        """Count on from a number."""
        tensor = torch.empty(size, dtype=torch.int64, device=device)
        tensor.copy_(number) if isinstance(number, Tensor) else tensor.fill_(number)
        return cls(tensor, tensor[0], tensor._version)

    def is_whole(self) -> bool:
        """Whether all parameters still have one count."""
        return self.counts._version == self.version

    def write(self, number: Tensor) -> None:
        """Set all counts to another number."""
        self.counts.copy_(number)
        self.version = self.counts._version


@dataclass(slots=True, eq=False)
class Ready:
    """Parameters that are updated together, and what updates this rank's part of them.

    Attributes:
        params: The parameters.
        indices: Theirs among all gradients of a step.
        update: What updates them.
        is_sharded: Whether they are DTensors.
    """

    params: list[Tensor]
    indices: list[int]
    update: BucketUpdate
    is_sharded: bool


@dataclass(slots=True, eq=False)
class Cohort:
    """Parameters of one group on one device that were updated equally often: the numbers of a step are theirs together.

    Attributes:
        group: The group's number.
        rule: The update rule.
        hypers: The group's hyper-parameters on the device.
        count: How often they were updated.
        ready: The parameters, by how they are stored.
    """

    group: int
    rule: UpdateRule
    hypers: Hypers
    count: Count
    ready: list[Ready] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a step reads and a program may change between two steps, without a call that would show it.

    Attributes:
        options: Of each group: how many parameters, the options of its rule, and the dtype of moments.
        params: All parameters.
        have_gradients: Which of them have a gradient.
        gradients: These gradients.
        forms: Dtypes, shapes and devices of the parameters that have one.
        memory: The tensors in which the values of parameters lie on this rank, where these are not parameters.
    """

    options: list[tuple[Any, ...]]
    params: list[Tensor]
    have_gradients: list[bool]
    gradients: list[Tensor]
    forms: list[Any]
    memory: list[Any]


class UpdatePlan:
    """What steps write: it holds until a step's inputs, or the entries of ``optimizer.state`` behind it, change.

    Args:
        inputs: What it was made for.
        cohorts: What is updated, by group.
        read: The names that a step reads of the state of each parameter, and other ones that tell of an edit.
        state: The optimizer's.
    """

    def __init__(
        self,
        inputs: StepInputs,
        cohorts: list[Cohort],
        read: list[tuple[list[Tensor], tuple[str, ...], set[str]]],
        state: Mapping[Any, Any],
    ) -> None:
        self.inputs, self.cohorts = replace(inputs, gradients=[]), cohorts
        self.params = [param for cohort in cohorts for ready in cohort.ready for param in ready.params]
        self.by_device: dict[torch.device, list[Cohort]] = {}
        for cohort in cohorts:
            self.by_device.setdefault(cohort.count.number.device, []).append(cohort)
        # Of several names, so that each returns a tuple.
        self._read = [(params, itemgetter(*keys, *keys[:1]), others) for params, keys, others in read]
        self._find(state)
        self._held = self._look()

    def _find(self, state: Mapping[Any, Any]) -> None:
        """Find the entries of the parameters in a state."""
        self._keys, self._values = [*state], [*state.values()]
        self._entries: list[tuple[list[Any], itemgetter[Any], set[str]]] = [
            ([*map(state.get, params)], read, others) for params, read, others in self._read
        ]

    def _look(self) -> list[Any]:
        values: list[Any] = []
        for entries, read, _ in self._entries:
            values += chain.from_iterable(map(read, entries))
        return values

    def serves(self, inputs: StepInputs, state: Mapping[Any, Any]) -> bool:
        """Whether the plan holds for these inputs and this state; loops of C's."""
        planned = self.inputs
        return (
            inputs.options == planned.options
            and inputs.have_gradients == planned.have_gradients
            and inputs.forms == planned.forms
            and len(inputs.memory) == len(planned.memory)
            and all(map(is_, inputs.params, planned.params))
            and all(map(is_, inputs.memory, planned.memory))
            and self.is_held(state)
        )

    def is_held(self, state: Mapping[Any, Any]) -> bool:
        """Whether a state holds the tensors that the plan reads and writes: a program may put others there.

        **Cost**: loops of C's, 0.3 µs a parameter.
        """
        keys, values = self._keys, self._values
        if len(state) != len(keys) or not (all(map(is_, state, keys)) and all(map(is_, state.values(), values))):
            self._find(state)
        try:
            if not all(map(is_, self._look(), self._held)):
                return False
        except (KeyError, TypeError):  # no mapping, or nothing of this name
            return False
        for entries, _, others in self._entries:
            for name in others:
                if any(map(contains, entries, repeat(name))):
                    return False
        return versions([*map(_MEMORY, self.cohorts)]) == [*map(_LEFT, self.cohorts)]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """The updates that a step is about to write, after everything that can be refused was.

    Attributes:
        verdict: Of the gradients; ``None`` where the flags are another library's.
        updates: What updates a bucket, with the gradients, their verdict, the count and the rule's numbers.
        counts: The counts of updates before this step, and the numbers after it.
        params: All that is updated.
    """

    verdict: Verdict | None
    params: list[Tensor]
    updates: list[tuple[BucketUpdate, Sequence[Tensor], Verdict, Tensor, Tensor]] = field(default_factory=list)
    counts: list[tuple[Count, Tensor]] = field(default_factory=list)
