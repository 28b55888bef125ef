"""Sessions of every level on the fake device: what steady steps ask of it."""

import functools

import pytest
import torch
from torch import nn

import mezzo

#: Enough for the account of sixteen steps to travel once.
STEADY = 13
#: Steps for what happens only once: states, tables, and the first numbers that travel to the host, sixteen together.
FIRST = 4

POLICIES = {
    "O0": "O0",
    "O1 fp16": "O1,dtype=float16",
    "O1 bf16": "O1,dtype=bfloat16",
    "O2 fp16": "O2,dtype=float16",
    "O2 bf16": "O2,dtype=bfloat16",
    "O3 fp16": "O3,dtype=float16",
    "O3 bf16": "O3,dtype=bfloat16",
}
OPTIMIZERS = {
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True),
    "fused SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "AdamW": functools.partial(mezzo.optim.AdamW, lr=1e-3),
    "moments": functools.partial(mezzo.optim.AdamW, lr=1e-3, state_dtype="bfloat16"),
    "codes": functools.partial(mezzo.optim.AdamW, lr=1e-3, state_dtype="int8"),
    "SGD": functools.partial(mezzo.optim.SGD, lr=1e-3, momentum=0.9),
    "Lion": functools.partial(mezzo.optim.Lion, lr=1e-4),
    "Muon": functools.partial(mezzo.optim.Muon, lr=0.02, adamw={"lr": 1e-3}),
    "Muon codes": functools.partial(mezzo.optim.Muon, lr=0.02, adamw={"lr": 1e-3}, state_dtype="int8"),
}
WAYS = ["plain", "accumulated", "unscaled"]
ALL = [(policy, optimizer, way) for policy in POLICIES for optimizer in OPTIMIZERS for way in WAYS]
#: Each policy and each optimizer, and each way with a loss scale or masters to keep.
CASES = [
    ("O0", "fused AdamW", "accumulated"),
    ("O1 fp16", "AdamW", "accumulated"),
    ("O1 bf16", "fused SGD", "unscaled"),
    ("O2 fp16", "AdamW", "unscaled"),
    ("O2 bf16", "moments", "accumulated"),
    ("O2 bf16", "codes", "plain"),
    ("O3 fp16", "Lion", "plain"),
    ("O3 bf16", "SGD", "plain"),
    ("O1 fp16", "Muon", "plain"),
    ("O2 fp16", "Muon codes", "accumulated"),
]
OTHERS = [case for case in ALL if case not in CASES]


class Trained:
    """A model, its session, and a train step that goes a way."""

    def __init__(self, policy, optimizer, way="plain", layers=1):
        self.way = way
        with torch.device("cuda"):
            blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()) for _ in range(layers)]
            self.model = nn.Sequential(*blocks, nn.Linear(16, 4))
            self.batch = torch.randn(8, 16)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.amp = mezzo.MixedPrecision(self.model, self.optimizer, POLICIES[policy], max_grad_norm=1.0)

    def step(self):
        amp = self.amp
        self.backward_all()
        if self.way == "unscaled":
            amp.unscale_()
        step = amp.step()
        amp.zero_grad()
        return step

    def backward_all(self):
        for _ in range(1 + (self.way == "accumulated")):
            with self.amp.autocast():
                loss = self.model(self.batch).float().square().mean()
            self.amp.backward(loss)


def steady(machine, trained):
    for _ in range(FIRST):
        trained.step()
    with machine.watched() as record:
        for _ in range(STEADY):
            trained.step()
    return record


@pytest.mark.parametrize("policy, optimizer, way", CASES, ids=map(" / ".join, CASES))
def test_steady_steps_read_nothing(machine, policy, optimizer, way):
    record = steady(machine, Trained(policy, optimizer, way))
    assert record.reads == []
    assert record.downloads, "the account of sixteen steps has travelled"


@pytest.mark.slow
@pytest.mark.parametrize("policy, optimizer, way", OTHERS, ids=map(" / ".join, OTHERS))
def test_nor_do_those_of_any_other_combination(machine, policy, optimizer, way):
    assert steady(machine, Trained(policy, optimizer, way)).reads == []


BELOW = ["fp8_module=1", "fp8_recipe=rowwise,fp8_module=1", "fp8_recipe=delayed,fp8_module=1", "mxfp8_module=1",
         "nvfp4_module=1"]  # fmt: skip


@pytest.mark.parametrize("emulate", ["auto", pytest.param("true", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rules", BELOW)
def test_products_below_sixteen_bits_read_nothing_either(machine, rules, emulate):
    with torch.device("cuda"):
        model, batch = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), torch.randn(32, 32)
    amp = mezzo.MixedPrecision(
        model, mezzo.optim.AdamW(model.parameters()), f"O1,dtype=bfloat16,emulate={emulate},{rules}"
    )

    def step():
        with amp.autocast():
            loss = model(batch).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    for _ in range(FIRST):
        step()
    with machine.watched() as record:
        for _ in range(STEADY):
            step()
    assert record.reads == []
    assert [upload for upload in record.uploads if "step/executors" not in upload] == [], (
        "the optimizer's table alone goes there"
    )
