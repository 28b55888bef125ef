"""apex's and torch's loops on a CUDA device: the host waits for nothing in a steady step, and training follows torch's.

Where a test asks for ``gpu`` alone it also runs on a device that computes nothing (tests/fake_cuda).
"""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler, autocast
from mezzo.compat.torch.cuda.amp import GradScaler as CudaGradScaler

from ..fake_cuda.case_sessions import FIRST
from .programs import apex_pass, initialized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


def network():
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def batch(number):
    return torch.sin(torch.arange(64.0, device="cuda") * (number + 1)).view(4, 16)


@pytest.mark.parametrize("level, optimizer", [("O0", "fused"), ("O1", "mezzo"), ("O2", "fused"), ("O2", "mezzo")])
def test_steady_steps_in_apexs_form_wait_for_nothing(gpu, level, optimizer):
    model = network()
    with initialized(model, OPTIMIZERS[optimizer](model.parameters()), opt_level=level) as (model, made):

        def step(number):
            for delays in (True, False):
                apex_pass(model(batch(number)).float().square().mean(), made, delay_unscale=delays)
            made.step()
            made.zero_grad()

        for number in range(4):
            step(number)
        with gpu.unread():
            for number in range(8):
                step(number)


class Loop:
    """The loop that torch's documentation teaches."""

    def __init__(self, optimizer, scaler):
        self.model, self.scaler = network(), scaler
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def backward(self, number):
        with autocast("cuda"):
            loss = self.model(batch(number)).float().square().mean()
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
def test_a_step_of_the_scaler_reads_nothing(gpu, optimizer, unscales):
    loop = Loop(optimizer, CudaGradScaler(growth_interval=3))
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
def test_it_trains_as_torchs_own(computing, optimizer, unscales):
    runs = []
    for scaler in (torch.amp.GradScaler("cuda", growth_interval=3), GradScaler("cuda", growth_interval=3)):
        loop, scales = Loop(optimizer, scaler), []
        for number in range(10):
            loop.backward(number)
            loop.step(unscales)
            scales.append(scaler.get_scale())
        runs.append((list(loop.model.parameters()), scales))
    (theirs, scales), (mine, also) = runs
    assert scales == also
    torch.testing.assert_close(theirs, mine)
