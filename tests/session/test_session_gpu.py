"""The session on a CUDA device: no host sync, no mode, and training that follows FP32."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import MixedPrecision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = ["O0", *(f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16"))]


def session(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)


def train(model, amp, steps, poison=()):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(128, 64, device="cuda", generator=generator)
    y = x[:, :16].argmax(1)
    losses = []
    for number in range(steps):
        with amp.autocast():
            loss = functional.cross_entropy(model(x), y)
        amp.backward(loss)
        if number in poison:
            model[0].weight.grad.mul_(float("inf"))
        amp.step()
        amp.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("policy", POLICIES)
def test_twenty_steps_two_of_them_skipped_make_no_host_sync(policy):
    model, amp = session(policy)
    train(model, amp, 2)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        losses = train(model, amp, 20, poison=(3, 7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(torch.stack(losses)).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_training_follows_fp32(policy):
    exact, mixed = (train(*session(each), 60)[-1].item() for each in ("O0", policy))
    assert mixed == pytest.approx(exact, abs=0.05)


def test_portable_o1_needs_no_mode_on_an_accelerator():
    assert not mezzo.autocast("O1,dtype=bfloat16", "cuda").has_differences
    with mezzo.autocast("O1,dtype=bfloat16", "cuda"):
        low = torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
        assert (low.dtype, low.softmax(-1).dtype) == (torch.bfloat16, torch.float32)


def test_lost_weights_are_named_without_a_host_sync(caplog):
    model, amp = session("O2,dtype=float16")
    train(model, amp, 2)
    with torch.no_grad():  # so that its master takes it over
        model[3].weight[0, 0] = float("inf")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        train(model, amp, 40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert amp.stats().skipped == 40
    assert "1 weight is not finite: 3.weight (float16)" in caplog.text
