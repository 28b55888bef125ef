"""A small finished run of the real thing, narrower, and a summary written by hand."""

import dataclasses
import json
from unittest import mock

import pytest

from mezzo.cast.device import decide
from mezzo.recipes import compare, get
from mezzo.recipes.digits_cnn import DigitsNet


@pytest.fixture(scope="session")
def finished_run(emulated, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    digits = get("digits-cnn")

    def evaluate(model, split):
        few = tuple(tensor[:60] for tensor in split.held_out)
        return digits.evaluate(model, dataclasses.replace(split, held_out=few))

    narrow = dataclasses.replace(digits, build=lambda seed: DigitsNet(width=8), evaluate=evaluate)
    with mock.patch.dict(decide._reports, cpu=emulated):
        compare(narrow, ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"], steps=12, out=directory)
    return directory


def _row(policy, **changes):
    return {
        "policy": policy, "status": "finished", "note": "", "arithmetic": "native",
        "memory_format": "channels-last", "steps": 300, "seconds": 4.0, "final_metric": 99.1638,
        "best_metric": 99.3300, "best_step": 210, "final_loss": 0.5,
        "step_ms": {"p10": 10.26, "median": 11.31, "p90": 13.0},
        "state_bytes": {"weights": 1, "gradients": 1, "masters": 1, "optimizer": 1, "total": 2 * 2**20},
        "saved_bytes": 4 * 2**20, "peak_bytes": None, "skipped_steps": 0, "final_scale": 1.0,
        "nonfinite_losses": 0, "difference": 0.1674,
    } | changes  # fmt: skip


@pytest.fixture
def summary():
    """Three policies: the reference, an emulated one, and one that diverged and was interrupted."""
    written = {
        "schema": 1, "recipe": "digits-cnn", "summary": "a network on digits", "references": {"chance": 11.2228},
        "metric": {"name": "test accuracy", "unit": "%", "unit_of_difference": "points",
                   "higher_is_better": True, "decimals": 2},
        "data_sha256": "ab", "steps": 300, "seed": 0, "date": "2026-11-21T05:33:00+00:00",
        "machine": {"cpu": "AMD EPYC", "cores": 2, "threads": 2, "torch": "2.13.0", "mezzo": "0.1.0",
                    "device": "cpu", "python": "3.11.7"},
        "policies": ["O0", "O2,dtype=float16", "O3,dtype=float16", "O1,dtype=bfloat16"],
        "reference": "O0", "interrupted": True,
        "rows": [
            _row("O0", memory_format="contiguous", difference=None, final_metric=98.9964),
            _row("O2,dtype=float16", arithmetic="emulated", saved_bytes=2 * 2**20, final_scale=65536.0,
                 skipped_steps=2),
            _row("O3,dtype=float16", status="interrupted", steps=120, final_metric="nan", difference="nan",
                 best_metric=42.0, step_ms=None, saved_bytes=None, state_bytes=None, final_scale=None,
                 nonfinite_losses=17),
        ],
    }  # fmt: skip
    return json.loads(json.dumps(written))
