"""A small finished run of the real thing, narrower, a summary written by hand, and evidence of every kind."""

import dataclasses
import json
import shutil
from unittest import mock

import pytest
import torch

from mezzo.cast.device import decide
from mezzo.numerics import KINDS, Evidence, RecordedStep, RecordedTensor, SwallowedUpdates, evidence_file
from mezzo.numerics.evidence import EvidenceHeader, RecordedModule
from mezzo.numerics.histogram import exponent_histogram
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
        "state_bytes": {"weights": 1, "gradients": 1, "remainders": 1, "optimizer": 1, "total": 2 * 2**20},
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


#: A step for the loss scale of each, and a layer for each of the tensors' sizes: some below FP16's numbers, some above.
SCALES = (65536.0, 32768.0, 1000.0)
SIZES = {"stem": 2.0**-3, "blocks.0.up": 2.0**-20, "blocks.1.up": 2.0**-26, "blocks.1.down": 2.0**15, "head": 1.0}


@pytest.fixture(scope="session")
def evidence():
    """Three steps of five layers, all kinds, with whatever special values there are."""
    generator = torch.Generator().manual_seed(3)

    def tensor(kind, module, size, step):
        values = torch.randn(500, generator=generator) * size * 2.0 ** (step - 1)
        values[:20] = 0.0
        values[20:60] = size * 2.0 ** torch.arange(-20, 20)  # powers of two, on which limits fall
        if (module, step) == ("blocks.1.down", 1):
            values[60:63] = torch.tensor([float("inf"), float("-inf"), float("nan")])
        lost = SwallowedUpdates(updated=480, swallowed={"float16": 7 * step, "bfloat16": 400}, beyond=100)
        return RecordedTensor(
            kind=kind,
            module=module,
            name="output" if kind.startswith("activation") else "weight",
            dtype="float32",
            histogram=exponent_histogram(values),
            swallowed=lost if kind == "updates" else None,
        )

    steps = [
        RecordedStep(
            step=1 + 50 * place,
            loss_scales=(scale,),
            skipped=place == 1,
            tensors=tuple(
                tensor(kind, module, size, place)
                for kind in KINDS
                if (kind, place) != ("updates", 1)
                for module, size in SIZES.items()
            ),
        )
        for place, scale in enumerate(SCALES)
    ]
    header = EvidenceHeader(
        mezzo="0.1.0", model="Net", policy="O1,dtype=float16", compute_dtype="float16", loss_scale="dynamic", every=50,
        kinds=KINDS, formats=("float16", "bfloat16"),
        modules=tuple(RecordedModule(path=path, type="Linear") for path in SIZES),
    )  # fmt: skip
    return Evidence(header=header, steps=tuple(steps), num_steps=150)


@pytest.fixture
def recorded_run(finished_run, evidence, tmp_path):
    """A finished run with evidence."""
    run = shutil.copytree(finished_run, tmp_path / "recorded")
    evidence_file.write(evidence, run / "evidence.jsonl")
    return run
