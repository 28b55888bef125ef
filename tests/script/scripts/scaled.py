"""A script that uses torch.autocast and GradScaler already, with unscale_ before it clips."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cpu", init_scale=2.0**12)
x = torch.randn(256, 1, 16)
y = x.square().mean(2)

losses = []
for step in range(40):
    rows = torch.arange(step * 32, step * 32 + 32) % 256
    optimizer.zero_grad(set_to_none=True)
    with autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"scale {scaler.get_scale():.1f}")
print(f"loss {sum(losses[-32:]) / 32:.4f}")
