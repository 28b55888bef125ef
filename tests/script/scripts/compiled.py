"""A compiled model."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(256, 16)
y = x[:, :1] * x[:, 1:2] + 0.3 * torch.randn(256, 1)
losses = []
for step in range(60):
    rows = torch.arange(step * 64, step * 64 + 64) % 256
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(compiled(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-4:]) / 4:.4f}")
