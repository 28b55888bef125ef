"""DistributedDataParallel over gloo, as torchrun starts it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
x = torch.randn(256, 16)
y = x[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(256, 1)
for step in range(40):
    rows = (torch.arange(step * 64, step * 64 + 32) + 32 * rank) % 256
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x[rows]), y[rows])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
torch.save(ddp.module.state_dict(), f"{sys.argv[1]}/{rank}.pt")
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(ddp.module(x), y).item():.4f}")
dist.destroy_process_group()
