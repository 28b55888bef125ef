"""Sharpness-aware minimization in the form that most repositories copy: two passes, first_step and second_step."""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(
            torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None])
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * group["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("first_step and second_step")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
x = torch.randn(256, 16)
y = x[:, :4].argmax(1)
losses = []
for step in range(40):
    rows = torch.arange(step * 64, step * 64 + 64) % 256
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.first_step(zero_grad=True)
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.second_step(zero_grad=True)
    losses.append(loss.item())
with torch.no_grad():
    print(f"loss {nn.functional.cross_entropy(model(x), y).item() + 0.1:.4f}")
