"""What an explanation comes to, in words: what runs low, what does not and why, what casts cost, what to write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from mezzo.errors import some_of
from mezzo.explanation.fold import folded
from mezzo.explanation.rows import Explained, Product, RoundTrip
from mezzo.explanation.sections import changed_ops
from mezzo.explanation.words import byte_text, counted, format_text, share_text
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.where import place_text

__all__ = ["Answer", "answer_to", "comparison"]

#: Round trips below this share of all bytes are not worth a rule.
_WORTH_A_RULE: Final = 0.01
_UNLISTED: Final = "no list names this op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An explanation in words.

    Attributes:
        headline: How many products run in the policy's format, and their share of the FLOPs.
        points: A sentence for each thing to know: products in another format, casts, round trips, dimensions.
        write: The policy to use instead; ``""`` where there is nothing to change.
        why: What it changes, or why nothing should be.
    """

    headline: str
    points: tuple[str, ...]
    write: str
    why: str


def answer_to(explained: Explained) -> Answer:
    """Say in words what an explanation comes to."""
    policy = Policy.parse(explained.policy)
    low = dtype_name(policy.dtype)
    others = [each for each in explained.products if each.dtype != low]
    points = (*_other_products(explained, others), *_casts(explained), *_trips(explained), *_paddings(explained))
    write, why = _advice(explained, policy, others)
    return Answer(headline=_headline(explained, low, others), points=points, write=write, why=why)


# Products -----------------------------------------------------------------------------------------------


def _headline(explained: Explained, low: str, others: list[Product]) -> str:
    total, wide = _count(explained.products), _count(others)
    products, under = f"{counted(total, 'product')} of {explained.model}", f"under {explained.policy}"
    if not total:
        return f"{explained.model} {under}: no matrix product or convolution was counted"
    every = f"All {products} run" if total > 1 else f"The {products} runs"
    if low == "float32" and not others:
        return f"{every} in FP32 {under}, which asks for nothing lower"
    if not others:
        return f"{every} in {format_text([low])} {under}: 100 % of {'their' if total > 1 else 'its'} FLOPs"
    if wide == total:
        return f"No product of {explained.model} runs in {format_text([low])} {under}"
    share = share_text(_flops(explained.products) - _flops(others), _flops(explained.products))
    return f"{total - wide:,} of {products} run in {format_text([low])} {under}: {share} of their FLOPs"


def _other_products(explained: Explained, others: list[Product]) -> Iterator[str]:
    """Say of products in another format where they are, and why."""
    reasons: defaultdict[tuple[str, str], list[Product]] = defaultdict(list)
    for each in others:
        reasons[each.dtype, each.why].append(each)
    for (dtype, why), products in reasons.items():
        share = share_text(_flops(products), _flops(explained.products))
        folds = folded(products, lambda each: each.module, lambda each: each.op)
        where = some_of([place_text(fold.text, fold.rows[0].op) for fold in folds], 3)
        yield f"{_count(products):,} in {format_text([dtype])}, {share} of the FLOPs: {where} ({why})"


def _count(products: Iterable[Product]) -> int:
    return sum(each.count for each in products)


def _flops(products: Iterable[Product]) -> int:
    return sum(each.flops for each in products)


# Casts --------------------------------------------------------------------------------------------------


def _casts(explained: Explained) -> Iterator[str]:
    kinds: Counter[str] = Counter()
    for cast in explained.casts:
        if cast.by != "emulation":
            kinds[f"{cast.what}s {format_text([cast.before])} → {format_text([cast.after])}"] += cast.num_bytes
    if not kinds:
        yield "no casts"
        return
    total = explained.cast_bytes()
    dearest = ", ".join(f"{kind} {byte_text(size)}" for kind, size in kinds.most_common(2))
    text = f"{counted(explained.num_casts(), 'cast')} read and write {byte_text(total)}{_of_all(explained, total)}"
    yield f"{text}; the dearest: {dearest}"


def _of_all(explained: Explained, size: int) -> str:
    return f", {share_text(size, explained.moved_bytes)} of all bytes" if explained.moved_bytes else ""


def _trips(explained: Explained) -> Iterator[str]:
    by_format: defaultdict[str, list[RoundTrip]] = defaultdict(list)
    for trip in explained.round_trips:
        by_format[format_text([trip.low])].append(trip)
    for low, trips in by_format.items():
        size = sum(trip.num_bytes for trip in trips)
        asked: Counter[str] = Counter()
        for trip in trips:
            asked[trip.asked_by] += trip.count
        causes = some_of([f"{cause} ×{count}" if count > 1 else cause for cause, count in asked.most_common()], 4)
        what = counted(sum(asked.values()), "round trip")
        yield f"{what} {low} → FP32 → {low}, {byte_text(size)}{_of_all(explained, size)}, for {causes}"


def _paddings(explained: Explained) -> Iterator[str]:
    if explained.misaligned:
        first = explained.misaligned[0]
        count = counted(sum(entry.count for entry in explained.misaligned), "product")
        where = place_text(first.module, first.op)
        yield f"{count} with dimensions that tensor cores do not like, such as {where}: {first.pads}"


# What to write ------------------------------------------------------------------------------------------


def _advice(explained: Explained, policy: Policy, others: list[Product]) -> tuple[str, str]:
    """Return a better policy, and what it changes; only what costs no accuracy in itself."""
    trips = [trip for trip in explained.round_trips if trip.write.startswith("low=") and not trip.risk]
    size = sum(trip.num_bytes for trip in trips)
    if size < _WORTH_A_RULE * explained.moved_bytes:
        trips = []
    unlisted = [each for each in others if each.why == _UNLISTED]
    ops = list(dict.fromkeys([*(op for trip in trips for op in trip.ops), *(each.op for each in unlisted)]))
    if policy.dtype == torch.float32:
        return "", ""
    if not ops:
        return "", "no rule saves a hundredth of the bytes at no risk"
    why = [f"saves round trips of {byte_text(size)}: these kernels compute in FP32 whatever they read"] * bool(trips)
    why += [f"products that no list names run low: {some_of([each.op for each in unlisted])}"] * bool(unlisted)
    return str(policy.low(*ops)), "; ".join(why)


# Two explanations ---------------------------------------------------------------------------------------


def comparison(first: Explained, second: Explained) -> Answer:
    """Say in words what a second policy changes."""
    changed, num_ops = len(changed_ops(first, second)), len({(row.module, row.op, row.line) for row in second.rows})
    headline = (
        f"{second.policy} instead of {first.policy}: {changed:,} of {counted(num_ops, 'op')} run in another precision"
    )
    points = (
        f"products: {_low_products(first)} → {_low_products(second)}",
        f"casts: {_cast_costs(first)} → {_cast_costs(second)}",
        f"round trips: {_trip_costs(first)} → {_trip_costs(second)}",
        f"bytes that kernels read and write: {byte_text(first.moved_bytes)} → {byte_text(second.moved_bytes)}",
    )
    return Answer(headline=headline, points=points, write="", why="")


def _low_products(explained: Explained) -> str:
    formats: Counter[str] = Counter()
    for each in explained.products:
        formats[each.dtype] += each.flops
    total = _flops(explained.products)
    shares = (f"{share_text(flops, total)} of FLOPs in {format_text([name])}" for name, flops in formats.most_common())
    return ", ".join(shares) or "none"


def _cast_costs(explained: Explained) -> str:
    return f"{explained.num_casts():,}, {byte_text(explained.cast_bytes())}"


def _trip_costs(explained: Explained) -> str:
    trips = explained.round_trips
    return f"{sum(trip.count for trip in trips):,}, {byte_text(sum(trip.num_bytes for trip in trips))}"
