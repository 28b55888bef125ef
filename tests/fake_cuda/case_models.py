"""Unusual models and loops on the fake device: what their steady steps read, a recorder beside them, and `explain`."""

import functools

import pytest
import torch
from torch import nn

import mezzo
from mezzo.numerics import Recorder

from .case_sessions import FIRST, Trained
from .machine import Machine

FUSED = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Odd(nn.Module):
    """Tied, 0-dim, empty, frozen and unused parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.scale, self.empty, self.unused = (nn.Parameter(torch.ones(shape)) for shape in [(), (0, 4), (5,)])
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.head(self.embedding(x) * self.scale + self.frozen) + self.empty.sum()


def odd():
    with torch.device("cuda"):
        return Odd(), torch.zeros(3, 5, dtype=torch.long)


def images():
    with torch.device("cuda"):
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4)
        )
        batch = torch.randn(2, 4, 8, 8)
    layout = {"memory_format": torch.channels_last}
    return model.to(**layout), batch.to(**layout)


def plain():
    with torch.device("cuda"):
        return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), torch.randn(8, 16)


class Loop:
    """A session over a model, and its step."""

    def __init__(self, policy, make_model, make_optimizer, **options):
        self.model, self.batch = make_model()
        self.optimizer = make_optimizer(self.model)
        self.amp = mezzo.MixedPrecision(self.model, self.optimizer, policy, max_grad_norm=1.0, **options)

    def backward(self):
        with self.amp.autocast():
            loss = self.model(self.batch).float().square().mean()
        self.amp.backward(loss)

    def end(self):
        self.amp.step()
        self.amp.zero_grad()

    def step(self):
        self.backward()
        self.end()

    def steady(self, machine, steps=4):
        """Return what some steps ask of the device, once nothing is left that happens only once."""
        for _ in range(FIRST):
            self.step()
        with machine.watched() as record:
            for _ in range(steps):
                self.step()
        return record


@pytest.mark.parametrize("level, make_model, make", [("O2", odd, FUSED), ("O1", images, mezzo.optim.AdamW)])
def test_models_of_any_kind_are_never_waited_for(machine, level, make_model, make):
    loop = Loop(f"{level},dtype=float16", make_model, lambda model: make(model.parameters()))
    assert loop.steady(machine).reads == []


def tensor_lr(model):
    optimizer = FUSED(model.parameters(), capturable=True)
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), 1e-3, device="cuda")
    return optimizer


def groups(model):
    first, *others = model.parameters()
    return mezzo.optim.AdamW([{"params": [first], "lr": torch.full((), 1e-3, device="cuda")}, {"params": others}])


@pytest.mark.parametrize("make", [tensor_lr, groups])
def test_learning_rates_that_are_tensors_stay_on_the_device(machine, make):
    record = Loop("O2,dtype=float16", plain, make).steady(machine)
    assert record.reads == []
    assert len(record.uploads) <= 8  # where gradients lie: of halves and of plain weights, which have other dtypes


def test_without_a_predicate_the_host_asks_once_a_step_and_for_nothing_else(machine):
    loop = Loop("O1,dtype=float16", plain, lambda model: torch.optim.NAdam(model.parameters(), foreach=True))
    reads = loop.steady(machine).reads
    assert len(reads) == 4
    assert all("session/writers.py" in read for read in reads)


@pytest.mark.parametrize("make", [mezzo.optim.AdamW, FUSED])
def test_a_session_goes_on_after_its_state_was_loaded(make):
    def account(host):  # an account: neither skipped nor failed, and a scale of one
        host.fill_(host.is_floating_point())
        if host.dim():
            host[:2] = 0

    with Machine(account) as machine:
        loop = Loop("O2,dtype=float16", plain, lambda model: make(model.parameters()))
        loop.step()
        states = [part.state_dict() for part in (loop.model, loop.optimizer, loop.amp)]
        loop.step()
        for part, state in zip((loop.model, loop.optimizer, loop.amp), states, strict=True):
            part.load_state_dict(state)
        loop.step()
        assert loop.amp.stats().steps == 2
        assert loop.steady(machine).reads == []


RECORDED = [("O1 fp16", "AdamW", "accumulated"), ("O2 fp16", "fused AdamW", "unscaled")]


@pytest.mark.parametrize("policy, optimizer, way", RECORDED, ids=map(" / ".join, RECORDED))
def test_only_recorded_steps_read_and_each_of_them_once(machine, policy, optimizer, way):
    trained = Trained(policy, optimizer, way)
    for _ in range(FIRST):
        trained.step()
    with Recorder(trained.model, trained.optimizer, every=3) as recorder:
        for number in range(1, 6):
            with machine.watched() as record:
                trained.step()
            assert len(record.reads) == (number % 3 == 1), (number, record.reads)
            if number % 3 == 1:
                assert "watches.py" in record.reads[0], record.reads
    assert [step.step for step in recorder.evidence.steps] == [1, 4]


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        return self.proj(torch.softmax(q @ k.mT, -1) @ v) + x


def explained(device):
    model = nn.Sequential(nn.Linear(16, 16), Attend(), Attend(), nn.Linear(16, 16)).to(device)
    return mezzo.explain(model, torch.ones(2, 8, 16, device=device), "O1,dtype=bfloat16,emulate=false")


def test_products_and_casts_are_those_of_a_cpu(machine, monkeypatch):
    monkeypatch.setattr("mezzo.explanation.explaining.copied", lambda model, *_: model)  # it computes nothing
    there, here = explained("cuda"), explained("cpu")
    assert there.devices == ("cuda",)
    assert there.products == here.products
    # A tensor of this device asks for its device as a kernel would, before autocast has cast it; a real one does not.
    assert [finding for finding in there.findings if "prim::device" not in finding.text] == list(here.findings)
    for phase in ("forward", "backward"):
        assert there.cast_bytes(phase=phase) == here.cast_bytes(phase=phase)
