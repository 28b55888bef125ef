"""`mezzo.compat.torch` on a CUDA device: no read in a step, torch's own bits, and a scale that lives there.

Where a test asks for ``gpu`` alone it also runs on a device that computes nothing (tests/fake_cuda).
"""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler, autocast
from mezzo.compat.torch.cuda import amp

from ..fake_cuda.case_sessions import FIRST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


class Loop:
    """The loop that torch's documentation teaches."""

    def __init__(self, optimizer, scaler):
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer, self.scaler = OPTIMIZERS[optimizer](self.model.parameters()), scaler

    def backward(self, number):
        x = torch.sin(torch.arange(64.0, device="cuda") * (number + 1)).view(4, 16)
        with autocast("cuda"):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss * torch.inf if number == 2 else loss).backward()

    def step(self, unscales=False):
        if unscales:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("optimizer", ["fused", "mezzo"])
def test_a_step_reads_nothing(gpu, optimizer, unscales):
    loop = Loop(optimizer, amp.GradScaler(growth_interval=3))
    for number in range(FIRST):
        loop.backward(number)
        loop.step(unscales)
    for number in range(FIRST, FIRST + 3):
        loop.backward(number)
        with gpu.unread():
            loop.step(unscales)
    assert loop.scaler.last_step.skipped.device.type == "cuda"
    assert loop.scaler._get_scale_async().device.type == "cuda"


@pytest.mark.parametrize("together", [1, 3])
def test_the_scale_moves_in_one_launch(gpu, together):
    """As torch's own, however many optimizers have stepped since it moved last."""
    scaler = GradScaler(growth_interval=3)
    loops = [Loop("fused", scaler) for _ in range(together)]
    for number in range(FIRST):
        for loop in loops:
            loop.backward(number)
            scaler.step(loop.optimizer)
        with gpu.kernels() as names:
            scaler.update()
    assert len(names) == 1


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_torchs_own(gpu, optimizer, unscales):
    if not gpu.computes:
        pytest.skip("numbers need a device that computes")
    found = []
    for scaler in (torch.amp.GradScaler("cuda", growth_interval=3), GradScaler("cuda", growth_interval=3)):
        loop, scales = Loop(optimizer, scaler), []
        for number in range(10):
            loop.backward(number)
            loop.step(unscales)
            scales.append(scaler.get_scale())
        found.append((list(loop.model.parameters()), scales))
    (theirs, scales), (mine, also) = found
    assert scales == also
    for one, other in zip(theirs, mine, strict=True):
        torch.testing.assert_close(one, other)
