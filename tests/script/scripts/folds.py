"""Cross-validation: a new model and a new optimizer for each fold."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(240, 8)
y = x[:, :2].sum(1, keepdim=True) + 0.5 * torch.randn(240, 1)
losses = []
for fold in range(3):
    held_out = torch.arange(240) % 3 == fold
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        (model(x[~held_out]) - y[~held_out]).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        losses.append((model(x[held_out]) - y[held_out]).square().mean().item())
print(f"loss {sum(losses) / 3:.4f}")
