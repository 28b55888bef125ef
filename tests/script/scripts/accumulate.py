"""Four micro-batches a step, clipped by their norm, with SGD and momentum; no function, no guard."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
x = torch.randn(512, 16)
y = x[:, :4].prod(1, keepdim=True) + x.sum(1, keepdim=True) / 4

norms, losses = [], []
for step in range(80):
    for part in range(4):
        rows = torch.arange((4 * step + part) * 32, (4 * step + part) * 32 + 32) % 512
        loss = (model(x[rows]) - y[rows]).square().mean() / 4
        loss.backward()
        losses.append(4 * loss.item())
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print(f"norm {sum(norms) / len(norms):.4f}")
print(f"loss {sum(losses[-64:]) / 64:.4f}")
