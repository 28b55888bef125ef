"""Older call styles under `mezzo.capture`, with a stand-in for a graph: apex's is captured, scalers' are refused."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.apex import amp
from mezzo.compat.torch import GradScaler
from mezzo.optim import optimizer as one_pass
from mezzo.session.capture.captured import Captured
from mezzo.step import gradients

from ..session.capture.host_graph import HostGraph, Predicated
from .apex import INF, initialized, perceptron, scales, values

pytestmark = pytest.mark.usefixtures("emulating")


@pytest.fixture(autouse=True)
def _predicated(monkeypatch):
    for module in (one_pass, gradients):
        monkeypatch.setattr(module, "executor_for", lambda device: Predicated())


def batches(bad=None):
    made = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(5)]
    return [batch * INF if number == bad else batch for number, batch in enumerate(made)]


def trained(level, bad, delay, *, captures):
    """A loop of apex's, and what it came to: weights, scales, losses."""
    model = perceptron()
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=0.1)  # which overflows now and then in FP16
    with initialized(model, optimizer, opt_level=level) as (model, optimizer):

        def step(x):
            for number, part in enumerate(x.chunk(2)):
                loss = model(part).float().square().mean()
                with amp.scale_loss(loss, optimizer, delay_unscale=delay and number == 0) as scaled:
                    scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        data = batches(bad)
        run = Captured(step, (data[0],), HostGraph) if captures else step
        losses = [run(x).detach().clone() for x in data]
        return [*values(model.state_dict().values()), *losses, torch.tensor(scales())]


def test_a_step_in_apexs_form_is_captured_bit_for_bit():
    for level, bad, delay in (("O0", None, False), ("O1", 2, True), ("O2", None, True), ("O2", 2, False)):
        eager, captured = (trained(level, bad, delay, captures=captures) for captures in (False, True))
        for one, other in zip(eager, captured, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"{level} {bad} {delay}")


def paddles(model, optimizer):
    paddle.decorate(model, optimizer, level="O2", dtype="bfloat16")
    return lambda loss: (loss.backward(), optimizer.step())


def paddles_scaler(model, optimizer):
    paddle.decorate(model, optimizer, level="O2")
    scaler = paddle.GradScaler(init_loss_scaling=8.0)
    return lambda loss: (scaler.scale(loss).backward(), scaler.minimize(optimizer))


def torchs_scaler(_, optimizer):
    scaler = GradScaler("cpu", init_scale=8.0)
    return lambda loss: (scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update())


@pytest.mark.parametrize("style", [paddles, paddles_scaler, torchs_scaler])
def test_scalers_and_optimizers_by_themselves_are_refused_and_go_on(style):
    model = perceptron()
    optimizer = mezzo.optim.SGD(model.parameters(), lr=0.1)
    finish = style(model, optimizer)

    def step(x):
        finish(model(x).float().square().mean())
        optimizer.zero_grad()

    before = values(model.parameters())
    with pytest.raises(mezzo.UnsupportedError, match="the calls of a GradScaler cannot be captured") as raised:
        Captured(step, (batches()[0],), HostGraph)
    assert "write  amp = MixedPrecision(model, optimizer, policy), and its calls in the train step" in str(raised.value)
    assert all(map(torch.equal, before, model.parameters()))
    step(batches()[0])
    assert not any(map(torch.equal, before, model.parameters()))
