"""What sources of pass 2 share: the update of one element, from its one pure function, line by line."""

from __future__ import annotations

import itertools
from typing import Final

import torch
from torch import Tensor

from mezzo.emit.tracing import Dialect, Line, Of, Spelled, spelled
from mezzo.step.moments import is_coded
from mezzo.step.storage import Storage
from mezzo.step.update import UpdateRule
from mezzo.step.verdict import updated

#: The name of the number of an element.
ORDER: Final = "order"


def update_name(rule: UpdateRule, storage: Storage) -> str:
    """Return the name, in profilers too, of the kernel of a rule with its options and a storage."""
    return "_".join((rule.name, *sorted(rule.options), storage.name))


def spelled_update(
    rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...], dialect: Dialect
) -> tuple[list[str], list[str], Spelled]:
    """Write the update of one element, with a line that stores each target, but for targets that stay as they are.

    Numbers that are in no tensor have the names of ``rule.numbers``, ``multiplier``, ``key`` and ``order``.

    Args:
        rule: The update rule.
        storage: How weights are stored.
        dtypes: The gradient's, then the parts' and the states'.
        dialect: The language.

    Returns:
        The names of elements in memory: the gradient's, then the parts' and the states'; the names of those that are
        stored; and the lines.

    Raises:
        NoKernel: The rule or the storage uses an operation that is not in the language's table, or torch cannot trace
            them.
    """
    num_parts = storage.num_parts
    in_codes = any(map(is_coded, dtypes[1 + num_parts :]))
    state_names = [[f"{name}_state", f"{name}_scale"] if in_codes else [f"{name}_state"] for name in rule.states]
    names = ["gradient", *(f"part{index}" for index in range(num_parts)), *itertools.chain(*state_names)]
    scales = [scale for _, scale in state_names] if in_codes else []
    elements = [torch.ones((), dtype=dtype, device="cpu") for dtype in dtypes]
    scalars, multiplier = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((len(rule.numbers),), ()))
    key, order = (torch.ones((), dtype=torch.int32, device="cpu") for _ in range(2))
    examples = [*elements, scalars, multiplier, key, order]

    def step(gradient: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        return updated(rule, storage, gradient, arguments[:-4], *arguments[-4:])

    words = [*names, rule.numbers, "multiplier", "key", ORDER]
    of_elements = [*(name for name in names if name not in scales), ORDER]
    step_of = spelled(step, examples, words, dialect, elements=of_elements, groups=scales)
    stored = []
    for target, dtype, result in zip(names[1:], dtypes[1:], step_of.results, strict=True):
        if result.word == target:
            continue
        stored.append(target)
        step_of.used.add(result.word)  # the element of another tensor, where a copy is all
        narrowed = dialect.element_of(result.word, dtype)
        of, phase = Of.GROUP if target in scales else Of.ELEMENT, step_of.places[result.word][1]
        template = dialect.stored_of_group if target in scales else dialect.stored
        line = Line(template.format(target=target, value=narrowed), of, phase, reads=(str(result.word),))
        step_of.lines.append(line)
    return names, stored, step_of
