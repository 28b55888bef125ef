"""Pass 2 in variants: time of its kernel alone, share of the copy's bandwidth, and whether bits are the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import mezzo.step.executors.triton as executor_of
import mezzo.step.executors.triton_source as source_of
from mezzo.step.storage import SPLIT, encode
from mezzo.step.update import rule
from mezzo.step.verdict import Bucket, Verdict
from stepping.shapes import shapes
from stepping.timing import Behind, copying, spread

from .plan import Plan
from .steps import on_device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HYPERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to compile pass 2."""

    name: str
    block: int
    warps: int | None
    rewritten: Callable[[str], str] = lambda text: text


def wide(text: str) -> str:
    """Tell Triton that whole blocks stand at multiples of 16 bytes, also in dtypes of two."""
    return re.sub(r", (\d) \* VECTOR\)", r", 16 if VECTOR > 1 else \1)", text)


def streamed(text: str) -> str:
    """Let what is read and written leave the cache first."""
    return re.sub(r"(tl\.(?:load|store)\([^\n]*), mask=mask\)", r'\1, mask=mask, eviction_policy="evict_first")', text)


VARIANTS = (
    Variant("as it ships", 1024, None),
    Variant("as it ships", 1024, 8),
    Variant("as it ships", 512, 4),
    Variant("as it ships", 1024, 4),
    Variant("as it ships", 2048, 8),
    Variant("16-byte hints", 2048, 8, wide),
    Variant("16-byte hints", 1024, 4, wide),
    Variant("16-byte hints", 4096, 8, wide),
    Variant("evict first", 1024, 8, streamed),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of weights: dtypes, and the bytes a parameter that pass 2 moves."""

    low: torch.dtype
    moments: torch.dtype
    moved: int

    def __str__(self) -> str:
        return f"halves {str(self.low)[6:]}, moments {str(self.moments)[6:]}"


CASES = (
    Case(BF16, FP32, 26),
    Case(FP16, FP32, 26),
    Case(BF16, BF16, 18),
)


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Time each variant of each case, and the first variant on gradients that are no usual ones."""
    copy, moved = copying(plan.device, 1 << (20 if plan.dry else 31)), 2 << (20 if plan.dry else 31)
    behind = Behind(plan.device)
    copy()
    bandwidth = moved / spread([behind(copy).seconds for _ in range(plan.repetitions)]).median
    del copy
    sizes = [(33, 5), (2500,)] if plan.dry else shapes("gpt2-small")
    cases = CASES[:1] if plan.dry else CASES
    return [row for case in cases for row in _Weights(case, sizes, plan).rows(bandwidth)]


class _Weights:
    """Weights of one kind with their gradients, and where they began."""

    def __init__(self, case: Case, sizes: list[tuple[int, ...]], plan: Plan) -> None:
        self.case, self.plan, device = case, plan, plan.device
        torch.manual_seed(0)
        made = [encode(torch.randn(size, device=device) * 0.02, case.low) for size in sizes]
        update = rule("adamw")
        self.gradients = [torch.randn(size, device=device).to(case.low) for size in sizes]
        self.count = sum(gradient.numel() for gradient in self.gradients)
        self.bucket = Bucket(
            rule=update,
            storage=SPLIT,
            hypers={name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in HYPERS.items()},
            step=torch.ones((), dtype=torch.int64, device=device),
            weights=[weight for weight, _ in made],
            extras=[extra for _, extra in made],
            states=[
                tuple(torch.zeros(size, dtype=case.moments, device=device) for _ in update.states) for size in sizes
            ],
        )
        self.start = [tensor.clone() for tensor in self.tensors()]
        one = torch.ones((), device=device)
        self.check = Verdict(norms=one, grad_norm=one, found_inf=one.eq(0), multiplier=one)

    def tensors(self) -> list[Tensor]:
        groups = zip(self.bucket.weights, self.bucket.extras, self.bucket.states, strict=True)
        flat = (tensor for weight, extra, states in groups for tensor in (weight, extra, *states))
        return [tensor for tensor in flat if tensor is not None]

    def rows(self, bandwidth: float) -> Iterator[dict[str, Any]]:
        expected: list[Tensor] = []
        for variant in VARIANTS[: 2 if self.plan.dry else None]:
            row = {
                "case": str(self.case),
                "variant": variant.name,
                "block": variant.block,
                "warps": variant.warps or "its own",
            }
            try:
                with _compiled_as(variant):
                    row |= self.timed(self.gradients, bandwidth)
                    bits = [tensor.clone() for tensor in self.after_one()]
            except Exception as error:  # a compiler's: one variant less, and the others still tell
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            expected = expected or bits
            yield {**row, "same_bits": all(map(_same, bits, expected))}
        for name, gradients in self.unusual().items():
            plain = VARIANTS[0]
            row = {
                "case": f"{self.case}, {name}",
                "variant": plain.name,
                "block": plain.block,
                "warps": plain.warps or "its own",
            }
            with _compiled_as(plain):
                yield {**row, **self.timed(gradients, bandwidth), "same_bits": None}

    def unusual(self) -> dict[str, list[Tensor]]:
        """At odd addresses, as views of a bucket are; zero, as of rows of an embedding that no batch holds."""
        odd = [torch.empty(each.numel() + 1, dtype=each.dtype, device=each.device) for each in self.gradients]
        views = [own[1:].view(each.shape).copy_(each) for own, each in zip(odd, self.gradients, strict=True)]
        return {"odd addresses": views, "all zero": [torch.zeros_like(each) for each in self.gradients]}

    def begin(self) -> None:
        for tensor, value in zip(self.tensors(), self.start, strict=True):
            tensor.copy_(value)

    def after_one(self) -> list[Tensor]:
        """One update from the start on, by a kernel that is compiled by now."""
        self.begin()
        executor_of.Triton().update_of(self.bucket)(self.gradients, self.check)
        return self.tensors()

    def timed(self, gradients: list[Tensor], bandwidth: float) -> dict[str, Any]:
        self.begin()
        update = executor_of.Triton().update_of(self.bucket)
        update(gradients, self.check)

        def several() -> None:
            for _ in range(self.plan.repetitions):
                update(gradients, self.check)

        times = [each for name, each in on_device(several, self.plan.device).items() if name.startswith("adamw")]
        if not times:
            return {"us": None, "share": None}
        middle = spread(times[0]).median
        return {"us": middle, "share": self.case.moved * self.count / (1e-6 * middle) / bandwidth}


@contextlib.contextmanager
def _compiled_as(variant: Variant) -> Iterator[None]:
    plain, options_of = source_of.update_source, executor_of.options_of
    options = {**executor_of._OPTIONS, "num_warps": variant.warps}
    with (
        patch.object(source_of, "update_source", lambda *key: variant.rewritten(plain(*key))),
        patch.multiple(executor_of, BLOCK=variant.block),
        patch.object(executor_of, "options_of", options_of if variant.warps is None else lambda _: options),
    ):
        yield


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
