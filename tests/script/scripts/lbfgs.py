"""LBFGS, whose step evaluates the loss as often as it likes."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
x = torch.randn(128, 4)
y = x.sum(1, keepdim=True).tanh() + 0.3 * torch.randn(128, 1)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for _ in range(8):
    optimizer.step(closure)
with torch.no_grad():
    print(f"loss {(model(x) - y).square().mean().item():.4f}")
