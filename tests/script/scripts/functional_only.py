"""Tensors and an optimizer, and no module at all."""

import torch

torch.manual_seed(0)
weight = torch.randn(8, 1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
for _ in range(50):
    optimizer.zero_grad()
    loss = (x @ weight - y).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {1 + loss.item():.4f}")
