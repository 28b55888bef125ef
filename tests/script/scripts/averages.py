"""An average of weights by hand, and torch's AveragedModel beside it."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
average = copy.deepcopy(model)
swa = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)
x = torch.randn(512, 16)
y = x[:, :8].sum(1, keepdim=True) / 3 + 0.5 * torch.randn(512, 1)
for step in range(80):
    rows = torch.arange(step * 64, step * 64 + 64) % 512
    loss = (model(x[rows]) - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.float(), 0.1)
        for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
    if step >= 40:
        swa.update_parameters(model)
        scheduler.step()
update_bn([x], swa)
average.eval()
swa.eval()
with torch.no_grad():
    print(f"average {(average(x) - y).square().mean().item():.4f}")
    print(f"loss {(swa(x) - y).square().mean().item():.4f}")
