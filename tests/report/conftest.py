"""Comparisons that were not run: what a report makes of them is known beforehand."""

from pathlib import Path

import pytest

from mezzo.script.comparison import Comparison, Run
from mezzo.script.metric import Metric


def made(policy, metric, seed=None, **changes):
    """A run of ten steps."""
    plain = {
        "code": 0, "loss": 0.25, "steps": 10, "skipped": 0, "nonfinite": 0, "step_ms": (1.0, 2.0, 3.0),
        "held_bytes": 2048, "saved_bytes": 1024, "peak_bytes": None, "scale": 1.0, "low_share": 1.0, "emulated": False,
        "losses": tuple(1 / step for step in range(1, 11)), "scales": (1.0,) * 10, "folder": Path("out", policy),
    }  # fmt: skip
    return Run(policy=policy, seed=seed, metric=metric, **plain | changes)


@pytest.fixture
def compared():
    """Make a comparison: metrics by policy, one a seed, or runs; one run where it is no list."""

    def make(*, better="higher", unit="%", name="test accuracy", margin=None, missing=(), **policies):
        seeds = next((len(runs) for runs in policies.values() if isinstance(runs, list)), None)
        runs = []
        for policy, values in policies.items():
            for seed, value in enumerate(values if isinstance(values, list) else [values]):
                number = seed if isinstance(values, list) else None
                runs.append(value(policy, number) if callable(value) else made(policy, value, number))
        return Comparison(
            script="train.py --epochs 3",
            metric=Metric(name=name, unit=unit, better=better),
            margin=margin,
            policies=(*policies, *missing),
            seeds=seeds,
            steps=None,
            date="2026-11-24T20:01:22+00:00",
            machine={"cpu": "a processor", "torch": "2.13.0"},
            runs=tuple(runs),
            interrupted=bool(missing),
        )

    return make


@pytest.fixture
def run_of():
    """A run with something else than usual, as a value for :func:`compared`."""
    return lambda metric, **changes: lambda policy, seed: made(policy, metric, seed, **changes)
