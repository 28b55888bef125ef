"""Whole training steps, as ``benchmarks/train.py`` times them."""

from __future__ import annotations

from typing import Any

from training import bench_train

from .plan import Plan

#: What is compiled; eager it is every way.
COMPILED = ("mezzo O1", "mezzo O2")


def measure(plan: Plan, net: str, compiled: bool) -> dict[str, Any]:
    """Time the ways to train a network in BF16; compiled ones after eager ones, as FP32 is."""
    return bench_train(
        net,
        size="least" if plan.dry else "full",
        device=plan.device,
        repetitions=plan.repetitions,
        ways=COMPILED if compiled or plan.dry else None,
        compiled=compiled and not plan.dry,
    ).to_json()
