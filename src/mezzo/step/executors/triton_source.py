"""Triton source of both passes: pass 2 from its one pure function (:mod:`.source`), pass 1 as written here.

Triton is imported when the first kernel is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch

from mezzo.emit.tracing import Dialect, Of, spelled
from mezzo.emit.triton import TRITON as LANGUAGE
from mezzo.step.executors.source import ORDER, spelled_update, update_name
from mezzo.step.moments import GROUP
from mezzo.step.storage import Storage, key_of
from mezzo.step.update import UpdateRule

#: Triton that walks over blocks.
TRITON: Final[Dialect] = replace(
    LANGUAGE,
    stored="tl.store({target}_at, {value}, mask=mask)",
    stored_of_group="tl.store({target}_at, {value}, mask=mask_of_groups)",
    largest="{name} = largest({value}, mask, BLOCK)",
    spread="spread({0}, BLOCK)",
)

_HELPERS: Final = f'''\
@triton.jit
def largest(values, mask, BLOCK: tl.constexpr):
    """Return the largest of the values of each group, none of which is negative."""
    if mask is not None:
        values = tl.where(mask, values, 0)
    return tl.max(tl.reshape(values, (BLOCK // {GROUP}, {GROUP})), axis=1)


@triton.jit
def spread(values, BLOCK: tl.constexpr):
    """Return the value of its group for each element."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(values, 1), (BLOCK // {GROUP}, {GROUP})), (BLOCK,))


'''

_UPDATE: Final = """\
@triton.jit
def {name}_block(
    {columns}, scalars, multiplier, key, start, length, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    offsets = start + tl.arange(0, BLOCK)
    {order} = offsets.to(tl.int32)
    mask = offsets < length if VECTOR == 1 else None
    {groups}
    {lines}


@triton.jit(
    do_not_specialize=["start"],
    do_not_specialize_on_alignment=["addresses", "rows", "chunks", "scalars", "multiplier", "found_inf", "step"],
)
def {name}(addresses, rows, chunks, scalars, multiplier, found_inf, step, start, BLOCK: tl.constexpr):
    if tl.load(found_inf) == 0:
        tensor = tl.load(chunks + 2 * tl.program_id(0))
        {key}
        first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
        length = tl.load(rows + tensor * {width})
        gradient = tl.load(addresses + tensor)
        {addresses}
        # Blocks lie at multiples of BLOCK from a tensor's first element: where all of those stand at multiples of 16
        # bytes, threads move {vector} elements at once. All others go in parts, of one element a thread: side by side
        # these few instructions take the registers of the fast path, as a whole block without vectors they take twice
        # as many, and both paths share one count.
        if (({together}) % 16 == 0) & (first + BLOCK <= length):
            {name}_block({pointers}, scalars, tl.load(multiplier), key, first, length, BLOCK, {vector})
        else:
            for part in range(0, BLOCK, BLOCK // {vector}):
                {name}_block({pointers}, scalars, tl.load(multiplier), key, first + part, length, BLOCK // {vector}, 1)
"""

_GROUPS: Final = (
    f"groups = start // {GROUP} + tl.arange(0, BLOCK // {GROUP})",
    f"mask_of_groups = groups * {GROUP} < length if VECTOR == 1 else None",
)

_NORMS: Final = '''\
@triton.jit
def widened(bits):
    return {widened}


@triton.jit(do_not_specialize_on_alignment=["addresses", "lengths", "chunks", "partials"])
def squares(
    addresses, lengths, chunks, partials,
    TYPE: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sum the squares of one chunk of one gradient."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    length = tl.load(lengths + tensor)
    address = tl.load(addresses + tensor)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    if (address % 16 == 0) & (start + CHUNK <= length):
        for block in range(0, CHUNK, BLOCK):
            places = address.to(tl.pointer_type(TYPE)) + (start + block + tl.arange(0, BLOCK))
            value = tl.load(tl.multiple_of(places, 16))
            value = widened(value) if BITS else value.to(tl.float32)
            total += value * value
    else:
        for block in range(0, CHUNK, BLOCK):
            offsets = start + block + tl.arange(0, BLOCK)
            value = tl.load(address.to(tl.pointer_type(TYPE)) + offsets, mask=offsets < length, other=0)
            value = widened(value) if BITS else value.to(tl.float32)
            total += value * value
    tl.store(partials + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize_on_alignment=["partials", "spans", "norms"])
def roots(partials, spans, norms, BLOCK: tl.constexpr):
    """Add up the chunks of one gradient, always in the same order."""
    start = tl.load(spans + 2 * tl.program_id(0))
    end = tl.load(spans + 2 * tl.program_id(0) + 1)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    while start < end:
        places = start + tl.arange(0, BLOCK)
        total += tl.load(partials + places, mask=places < end, other=0.0)
        start += BLOCK
    tl.store(norms + tl.program_id(0), tl.sqrt_rn(tl.sum(total)))
'''


@cache
def update_source(rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...]) -> str:
    """Write the kernel of pass 2 for tensors without gaps.

    Its arguments are device memory: a gradient's address for each tensor (int64), the rows of tensors (int64: length,
    then the addresses of parts and states), the chunks (int32: tensor, number of the block), numbers of the rule,
    multiplier, flag and count of steps; and where the bucket's random keys start. One program updates one chunk.

    Args:
        rule: The update rule.
        storage: How weights are stored.
        dtypes: The gradient's, then the parts' and the states'.

    Raises:
        NoKernel: The rule or the storage uses an operation that is not in the table.
    """
    names, stored, step = spelled_update(rule, storage, dtypes, TRITON)
    kernel_name = update_name(rule, storage)
    lines = [f"{number} = tl.load(scalars + {index})" for index, number in enumerate(rule.numbers)]
    touched = [(name, dtype) for name, dtype in zip(names, dtypes, strict=True) if name in step.used or name in stored]
    groups = [name for name, _ in touched if step.places[name][0] == Of.GROUP]
    for name, dtype in touched:
        positions, alignment = (
            ("groups", "16 if VECTOR > 1 else 2") if name in groups else ("offsets", f"{dtype.itemsize} * VECTOR")
        )
        lines.append(f"{name}_at = tl.multiple_of({name}_at + {positions}, {alignment})")
    lines += [
        f"{name} = tl.load({name}_at, mask={'mask_of_groups' if name in groups else 'mask'})"
        for name in names
        if name in step.used
    ]
    lines += step.body
    return (_HELPERS if groups else "") + _UPDATE.format(
        name=kernel_name,
        order=ORDER,
        groups="\n    ".join(_GROUPS if groups else ()),
        columns=", ".join(f"{name}_at" for name in names),
        lines="\n    ".join(lines),
        width=len(names),
        vector=elements_of_a_thread(dtypes),
        addresses="\n        ".join(
            f"{name} = tl.load(rows + tensor * {len(names)} + {index})" for index, name in enumerate(names) if index
        ),
        together=" | ".join(names),
        pointers=", ".join(
            f"{name}.to(tl.pointer_type({TRITON.types[dtype]}))" for name, dtype in zip(names, dtypes, strict=True)
        ),
        key="\n        ".join(_key() if "key" in step.used else ["key = 0"]),
    )


def elements_of_a_thread(dtypes: Sequence[torch.dtype]) -> int:
    """Return how many elements a thread of pass 2 moves at once: 16 bytes of the widest tensor.

    With eight elements of two bytes a multiprocessor has more bytes under way than with four, although its threads take
    more registers (tests/step/executors/test_compiled_kernels.py). Four of FP32 are 16 bytes already.
    """
    return 16 // max(4 if dtype == torch.float32 else 2 for dtype in dtypes)


def _key() -> list[str]:
    """Return the lines that compute the key of a parameter from ``tensor``, ``step`` and ``start``."""
    examples = [torch.ones((), dtype=torch.int32, device="cpu") for _ in range(3)]  # of one, one input would be traced
    key = spelled(lambda *arguments: (key_of(*arguments),), examples, ["tensor", "when", "start"], TRITON)
    return ["when = tl.load(step).to(tl.int32)", *key.body, f"key = {key.results[0].word}"]


def norm_source() -> str:
    """Write the two kernels of pass 1: ``squares`` for each chunk, and ``roots`` of their sums for each gradient."""
    return _NORMS.format(widened=TRITON.widened[torch.bfloat16].format("bits"))


def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's name for the elements of a dtype, as ``squares`` takes it."""
    return getattr(importlib.import_module("triton.language"), TRITON.types[dtype].removeprefix("tl."))
