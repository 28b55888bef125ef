"""torch's fully_shard over gloo, as torchrun starts it: blocks or the whole, an evaluation at first, clipping."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

folder, *how = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
first = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU())
model = nn.Sequential(first, nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, 1))
own = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if "own" in how else {}
for block in model[:2] if "whole" not in how else ():
    fully_shard(block, **own)
fully_shard(model, **own)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(256, 16)
y = x[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(256, 1)


def loss_of_all():
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x).float(), y)
    model.train()
    return loss.item()


losses = [loss_of_all()]
for step in range(40):
    rows = (torch.arange(step * 64, step * 64 + 32) + 32 * dist.get_rank()) % 256
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[rows]).float(), y[rows])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
losses.append(loss_of_all())
weights = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
torch.save({"losses": losses, "model": weights}, f"{folder}/{dist.get_rank()}.pt")
dist.destroy_process_group()
