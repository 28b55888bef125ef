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
    losses: dict[int, list[tuple[KernelRecord, KernelRecord]]] = {}
    for product, loss, weight in _losses(table):
        losses.setdefault(weight.number, []).append((product, loss))
    for (product, loss), *more in losses.values():
        *_, classes = shape = loss.reads[0].shape
        rows = math.prod(shape) // max(1, classes)
        of_logits, _ = _bytes(table, shape)
        in_forward, beside = _bytes(table, shape, forward=True)
        if more or rows <= _FEWEST or sum(in_forward) < _LARGE_SHARE * (sum(in_forward) + sum(beside)):
            continue
        if max(in_forward) <= max(beside, default=0):
            continue
        fewer = max(_FEWEST, 1 << (rows // 4).bit_length() - 1)
        size, argument = (ROWS, "") if rows > ROWS else (fewer, f", rows={fewer}")
        text = (
            f"the logits are the largest activation: {rows:,}×{classes:,}, {byte_text(max(in_forward))} in "
            f"{format_text([dtype_name(loss.reads[0].dtype)])}, {byte_text(sum(of_logits))} with casts, losses and "
            f"gradients; write mezzo.linear_cross_entropy(hidden, head.weight, target{argument}), which holds {size:,} "
            "rows at a time"
        )
        yield Finding(kind="logits", where=location_text(product.module, product.op, product.call.line), text=text)


def _losses(table: WatchedPass) -> Iterator[tuple[KernelRecord, KernelRecord, Value]]:
    """Yield each product of a weight, the log-softmax of a cross entropy that reads its results, and the weight."""
    of_product: dict[int, tuple[KernelRecord, Value]] = {}
    for record in table.kernels:
        if record.phase != "forward":
            continue
        origin = next((of_product[value.number] for value in record.reads if value.number in of_product), None)
        if record.flops is not None:
            weights = (value for value in factors(record.kernel, record.reads) if table.role_of(value) == "parameter")
            weight = next(weights, None)
            origin = None if weight is None else (record, _uncast(table, weight))
        elif record.effect not in HANDS_ON:
            if origin is not None and _is_of_loss(table, record):
                yield origin[0], record, origin[1]
            continue
        if origin is not None:
            of_product.update((value.number, origin) for value in record.gives)


def _uncast(table: WatchedPass, value: Value) -> Value:
    """Return what was cast to a value."""
    while (maker := table.maker(value)) is not None and maker.effect in ("cast", "free cast"):
        value = maker.reads[0]
    return value


def _is_of_loss(table: WatchedPass, record: KernelRecord) -> bool:
    """Whether a kernel is the log-softmax of a cross entropy, over the last dimension."""
    num_dims = len(record.reads[0].shape)
    if record.name != "log_softmax" or record.constants[0] % max(1, num_dims) != num_dims - 1:
        return False
    readers = (reader.name for value in record.gives for reader in table.readers(value))
    return record.call.op == "cross_entropy" or any(name.startswith("nll_loss") for name in readers)


def _bytes(table: WatchedPass, shape: tuple[int, ...], *, forward: bool = False) -> tuple[list[int], list[int]]:
    """Return the bytes of each tensor of as many rows and classes as the logits, and of each other activation."""
    sizes: dict[int, tuple[bool, int]] = {}
    for record in table.kernels:
        if forward and record.phase != "forward":
            continue
        for value in record.gives:
            # Under emulation an FP32 tensor stands for one of 16 bits.
            if (record.by == "emulation" and value.dtype not in LOW) or table.role_of(value) == "parameter":
                continue
            is_alike = value.shape[-1:] == shape[-1:] and math.prod(value.shape) == math.prod(shape)
            _, most = sizes.get(value.memory, (False, 0))
            sizes[value.memory] = is_alike, max(most, math.prod(value.shape) * value.dtype.itemsize)
    alike, beside = ([size for is_alike, size in sizes.values() if is_alike == wanted] for wanted in (True, False))
    return alike, beside
