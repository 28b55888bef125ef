"""Below sixteen bits: every policy is one, rows are beside BF16 with the same seed, and layers have a mean."""

import dataclasses
from pathlib import Path

import pytest

import below_sixteen as bench
from mezzo.policy import Policy
from mezzo.script.comparison import Comparison, Run
from mezzo.script.metric import Metric

NAMES = {name: bench.POLICIES[name] for name in ("BF16", "NVFP4")}


def run(policy, seed, metric, operands=()):
    return Run(
        policy=policy, seed=seed, metric=metric, code=0, loss=1.0, steps=200, skipped=0, nonfinite=0, step_ms=None,
        held_bytes=None, saved_bytes=10, peak_bytes=None, scale=1.0, low_share=1.0, emulated=True, operands=operands,
        folder=Path("out"),
    )  # fmt: skip


def comparison():
    lost = {
        "name": "weight",
        "role": "gradient",
        "format": "nvfp4",
        "saturated": 0.5,
        "flushed": 0.25,
        "noise": 0.1,
        "steps": 4,
    }
    layers = (
        lost | {"module": "up", "below_noise": 0.5},
        lost | {"module": "down", "below_noise": None, "flushed": 0.75},
    )
    policies = {"O0": (3.5, 3.75), str(Policy.of(bench.BF16)): (3.5, 4.0), str(Policy.of(bench.NVFP4)): (3.625, 4.375)}
    runs = [
        run(policy, seed, metric, layers if "nvfp4" in policy else ())
        for policy, metrics in policies.items() for seed, metric in enumerate(metrics)
    ]  # fmt: skip
    return Comparison(
        script=bench.SCRIPT, metric=Metric(name="test loss", unit="bits/byte", better="lower"), margin=bench.MARGIN,
        policies=tuple(policies), seeds=2, steps=None, date="2026-11-27", machine={}, runs=tuple(runs),
        interrupted=False,
    )  # fmt: skip


def test_policies_are_read_and_differ():
    assert len({str(Policy.of(text)) for text in bench.POLICIES.values()}) == len(bench.POLICIES) == 13


def test_rows_are_beside_fp32_and_beside_bf16():
    fp32, bf16, nvfp4 = bench.table(comparison(), NAMES)
    assert [row["name"] for row in (fp32, bf16, nvfp4)] == ["FP32", "BF16", "NVFP4"]
    assert (bf16["difference_to_fp32"], "difference_to_bf16" in bf16) == (0.125, False)
    assert (nvfp4["difference_to_fp32"], nvfp4["difference_to_bf16"]) == (0.375, 0.25)
    low, high = nvfp4["interval_to_bf16"]
    assert (low + high) / 2 == pytest.approx(0.25)
    assert high - low == pytest.approx(2 * 12.7062 * 0.125, rel=1e-4)  # Student's t of one degree of freedom
    assert nvfp4["bits_per_byte"] == [3.625, 4.375]


def test_what_layers_lose_has_a_mean_over_them():
    losses = bench.operands(comparison(), NAMES)
    assert [loss["layer"] for loss in losses] == ["up", "down", "all"]
    assert (losses[-1]["saturated"], losses[-1]["flushed"], losses[-1]["below_noise"]) == (0.5, 0.5, 0.5)
    none = dataclasses.replace(comparison(), runs=comparison().runs[:2])
    assert bench.operands(none, NAMES) == []
