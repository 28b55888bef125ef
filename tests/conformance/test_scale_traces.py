"""How six systems move their scale, step by step, as traces taken from their own rules."""

import json
from pathlib import Path

import pytest
import torch

from mezzo.scale import LossScale, next_scale

GIVEN = json.loads(Path(__file__).with_name("scale_traces.json").read_text())
COMMON = {
    "init": 2.0 ** GIVEN["start_log2"],
    "interval": GIVEN["interval"],
    "hysteresis": GIVEN["hysteresis"],
}
TORCH = LossScale.like("torch", **{**COMMON, "hysteresis": 1})  # torch backs off at every overflow

#: The value of mezzo's that stands for each system of the file.
SYSTEMS = {
    "torch": TORCH,
    "apex_kernel": LossScale.like("apex", **COMMON),
    "megatron": LossScale.like("megatron", **COMMON),
    "deepspeed": LossScale.like("deepspeed", **COMMON),
    "deepspeed_consecutive": LossScale.like("deepspeed", **COMMON, refill="clean"),
    "paddle": LossScale.like("paddle", **COMMON),
}

#: Two more patterns of the same study, as log2 of the scale after each step.
X_EVERY_OTHER = "X.X.X......."
CLEAN = "............"
MORE = [
    ("torch", X_EVERY_OTHER, "9 9 8 8 7 7 7 7 8 8 8 8"),
    ("apex_kernel", X_EVERY_OTHER, "10 10 10 10 10 10 10 10 11 11 11 11"),
    ("megatron", X_EVERY_OTHER, "10 10 9 9 8 8 8 8 9 9 9 9"),
    ("deepspeed", X_EVERY_OTHER, "10 10 9 9 8 8 8 8 8 9 9 9"),
    ("deepspeed_consecutive", X_EVERY_OTHER, "10 10 10 10 10 10 10 10 10 11 11 11"),
    ("paddle", X_EVERY_OTHER, "10 10 10 10 10 10 10 10 11 11 11 11"),
    *[
        (system, CLEAN, "10 10 10 11 11 11 11 12 12 12 12 13")
        for system in ("torch", "apex_kernel", "megatron", "paddle")
    ],
    ("deepspeed", CLEAN, "10 10 10 10 11 11 11 11 12 12 12 12"),
    ("deepspeed_consecutive", CLEAN, "10 10 10 10 11 11 11 11 12 12 12 12"),
]


def trace(config: LossScale, pattern: str) -> list[float]:
    """The scale after each step, as log2."""
    state, scales = config.start(), []
    for step in pattern:
        state = next_scale(state, torch.tensor(step == "X"), config)
        scales.append(state.scale.log2().item())
    return scales


@pytest.mark.parametrize(
    "entry", GIVEN["traces"], ids=[f"{entry['system']} {entry['pattern']}" for entry in GIVEN["traces"]]
)
def test_trace(entry):
    assert trace(SYSTEMS[entry["system"]], entry["pattern"]) == entry["log2_scale_after_step"]


@pytest.mark.parametrize("system, pattern, scales", MORE)
def test_more_traces(system, pattern, scales):
    assert trace(SYSTEMS[system], pattern) == [float(word) for word in scales.split()]
