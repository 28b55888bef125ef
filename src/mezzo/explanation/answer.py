"""What an explanation comes to, in words: what runs low, what does not and why, what casts cost, what to write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from mezzo.errors import some_of
from mezzo.explanation.fold import folded
from mezzo.explanation.rows import Explained, Product
from mezzo.explanation.words import byte_text, counted, format_text, share_text
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.where import place_text

#: Why products are in another format: that many reasons are told apart.
_MOST_REASONS: Final = 2
_UNLISTED: Final = "no list names this op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An explanation in words.

    Attributes:
        headline: How many products run in the policy's format, and their share of the FLOPs.
        points: A sentence for each thing to know: products in another format, casts, dimensions, findings.
        write: The policy to use instead; ``""`` where there is nothing to change.
        why: What it changes.
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
    points = (
        *_other_products(explained, others), *_casts(explained), *_paddings(explained), *_found(explained),
    )  # fmt: skip
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
    dearest = sorted(reasons.items(), key=lambda each: -_flops(each[1]))
    for (dtype, why), products in dearest[:_MOST_REASONS]:
        share = share_text(_flops(products), _flops(explained.products))
        folds = folded(products, lambda each: each.module, lambda each: each.op)
        where = some_of([place_text(fold.text, fold.rows[0].op) for fold in folds], 1)
        yield f"{_count(products):,} in {format_text([dtype])}, {share} of the FLOPs: {where} ({why})"
    if rest := [each for _, products in dearest[_MOST_REASONS:] for each in products]:
        share = share_text(_flops(rest), _flops(explained.products))
        yield f"{_count(rest):,} more for other reasons, {share} of the FLOPs"


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


def _paddings(explained: Explained) -> Iterator[str]:
    if explained.misaligned:
        first = explained.misaligned[0]
        count = counted(sum(entry.count for entry in explained.misaligned), "product")
        yield f"{count} with dimensions that tensor cores do not like, such as {first.pads}"


def _found(explained: Explained) -> Iterator[str]:
    """Count what the findings below say, products apart, which are said above."""
    kinds = Counter(each.kind for each in explained.findings if each.kind != "FP32 product")
    if kinds:
        yield f"findings below: {', '.join(f'{kind} ×{count}' if count > 1 else kind for kind, count in kinds.items())}"


# What to write ------------------------------------------------------------------------------------------


def _advice(explained: Explained, policy: Policy, others: list[Product]) -> tuple[str, str]:
    """Return a better policy, and what it changes; only what costs no accuracy in itself."""
    unlisted = list(dict.fromkeys(each.op for each in others if each.why == _UNLISTED))
    if policy.dtype == torch.float32 or not unlisted:
        return "", ""
    return str(policy.low(*unlisted)), f"products that no list names run low: {some_of(unlisted)}"
