"""Programs in apex's form on a CUDA device: the host waits for nothing in a steady step, and casts hold in training.

Where a test asks for ``gpu`` alone it also runs on a device that computes nothing (tests/fake_cuda).
"""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp

from ..support.tables import thinned
from .apex import convolutions, digits, initialized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-3),
}


@pytest.mark.parametrize("optimizer, level", thinned(OPTIMIZERS, ["O0", "O1", "O2"], every=2))
def test_steady_steps_wait_for_nothing(gpu, level, optimizer):
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
        batch = torch.randn(8, 16)
    with initialized(model, OPTIMIZERS[optimizer](model.parameters()), opt_level=level) as (model, made):

        def step():
            for delays in (True, False):
                loss = model(batch).float().square().mean()
                with amp.scale_loss(loss, made, delay_unscale=delays) as scaled:
                    scaled.backward()
            made.step()
            made.zero_grad()

        for _ in range(4):
            step()
        with gpu.unread():
            for _ in range(18):
                step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_convolution_net_learns(computing, level):
    model = convolutions().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with initialized(model, optimizer, opt_level=level) as (model, optimizer):
        for number in range(30):
            x, y = (each.cuda() for each in digits(number))
            output = model(x)
            assert output.dtype == torch.float32
            loss = nn.functional.cross_entropy(output, y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 < 2 < losses[0]
