"""The session on a CUDA device that computes: training that follows FP32."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]


def session(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)


def train(model, amp, steps):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(128, 64, device="cuda", generator=generator)
    y = x[:, :16].argmax(1)
    losses = []
    for _ in range(steps):
        with amp.autocast():
            loss = functional.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("policy", POLICIES)
def test_training_follows_fp32(policy):
    exact, mixed = (train(*session(text), 60)[-1].item() for text in ("O0", policy))
    assert mixed == pytest.approx(exact, abs=0.05)
