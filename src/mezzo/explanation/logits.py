"""Where the logits are the largest activation of a pass: what they take, and what holds a part of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from mezzo.cast.chunked import ROWS
from mezzo.explanation.rows import Finding, byte_text, format_text
from mezzo.tensors import LOW, dtype_name
from mezzo.trace.function_calls import location_text
from mezzo.trace.kernels import factors
from mezzo.trace.table import HANDS_ON, KernelRecord, Value, WatchedPass

#: Of all that a forward pass makes, logits are worth a word from such a share on.
_LARGE_SHARE: Final = 0.25
#: The fewest rows of a chunk.
_FEWEST: Final = 32


def logits(table: WatchedPass) -> Iterator[Finding]:
    """Yield the product whose results a cross entropy reads, where they are the largest activation of the pass.

    None is yielded where the product of the same weight feeds several losses: the program has chunks.

    Args:
        table: The pass.
    """
    losses: dict[int, list[tuple[KernelRecord, Value]]] = {}
    for product, weight, read in _losses(table):
        losses.setdefault(weight.number, []).append((product, read))
    for (product, read), *more in losses.values():
        size, classes = math.prod(read.shape), read.shape[-1]
        rows = size // max(1, classes)
        in_forward, beside = _bytes(table, size, classes, phases=("forward",))
        is_large = sum(in_forward) >= _LARGE_SHARE * (sum(in_forward) + sum(beside))
        if more or rows <= _FEWEST or not is_large or max(in_forward) <= max(beside, default=0):
            continue
        fewer = ROWS if rows > ROWS else max(_FEWEST, 1 << (rows // 4).bit_length() - 1)
        argument = "" if fewer == ROWS else f", rows={fewer}"
        of_all = sum(_bytes(table, size, classes, phases=("forward", "backward"))[0])
        text = (
            f"the logits are the largest activation: {rows:,}×{classes:,}, {byte_text(size * read.dtype.itemsize)} in "
            f"{format_text([dtype_name(read.dtype)])}, {byte_text(of_all)} with casts, losses and gradients; write "
            f"mezzo.linear_cross_entropy(hidden, head.weight, target{argument}), which holds {fewer:,} rows at a time"
        )
        yield Finding(kind="logits", where=location_text(product.module, product.op, product.call.line), text=text)


def _losses(table: WatchedPass) -> Iterator[tuple[KernelRecord, Value, Value]]:
    """Yield each product of a weight, the weight, and the logits as the log-softmax of a cross entropy reads them."""
    origins: dict[int, tuple[KernelRecord, Value]] = {}
    for record in table.kernels:
        if record.phase != "forward":
            continue
        origin = next((origins[value.number] for value in record.reads if value.number in origins), None)
        if record.flops is not None:
            weights = (value for value in factors(record.kernel, record.reads) if table.role_of(value) == "parameter")
            weight = next(weights, None)
            origin = None if weight is None else (record, _uncast(table, weight))
        elif record.effect not in HANDS_ON:
            if origin is not None and _is_of_loss(table, record):
                yield *origin, record.reads[0]
            continue
        if origin is not None:
            origins.update((value.number, origin) for value in record.gives)


def _uncast(table: WatchedPass, value: Value) -> Value:
    """Return what was cast to a value."""
    while (maker := table.maker(value)) is not None and maker.effect in ("cast", "free cast"):
        value = maker.reads[0]
    return value


def _is_of_loss(table: WatchedPass, record: KernelRecord) -> bool:
    """Whether a kernel is the log-softmax of a cross entropy, over the last dimension."""
    last = len(record.reads[0].shape) - 1
    if record.name != "log_softmax" or last < 1 or record.constants[0] not in (-1, last):
        return False
    readers = (reader.name for value in record.gives for reader in table.readers(value))
    return record.call.op == "cross_entropy" or any(name.startswith("nll_loss") for name in readers)


def _bytes(table: WatchedPass, size: int, classes: int, *, phases: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return the bytes of each tensor of as many rows and classes as the logits, and of each other activation."""
    alike, beside = dict[int, int](), dict[int, int]()
    for record in table.kernels:
        for value in record.gives if record.phase in phases else ():
            # Under emulation an FP32 tensor stands for one of 16 bits.
            if table.role_of(value) != "parameter" and (record.by != "emulation" or value.dtype in LOW):
                numel = math.prod(value.shape)
                sizes = alike if (numel, value.shape[-1:]) == (size, (classes,)) else beside
                sizes[value.memory] = max(sizes.get(value.memory, 0), numel * value.dtype.itemsize)
    return [*alike.values()], [*beside.values()]
