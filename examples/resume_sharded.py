"""Save on any number of ranks, and go on from there on any other: run it on two, then on four.

torchrun --nproc-per-node 2 examples/resume_sharded.py
torchrun --nproc-per-node 4 examples/resume_sharded.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn import functional

import mezzo

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
policy = "O2,dtype=bfloat16"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
mezzo.fully_shard(model, policy, wrap=torch.nn.Linear)
optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)

saved = sorted(Path("checkpoints").glob("step-*"))
if saved:  # weights, moments, counts and loss scale, whatever the number of ranks that wrote them
    dcp.load({"app": amp.stateful()}, checkpoint_id=saved[-1])
steps = amp.stats().steps
for step in range(steps, steps + 20):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))[rank::size].to(device)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
dcp.save({"app": amp.stateful()}, checkpoint_id=f"checkpoints/step-{steps + 20:04}")  # each rank writes its part
if rank == 0:
    print(f"steps {steps + 1} to {steps + 20} on {size} ranks: loss {loss.item():.4g}")
dist.destroy_process_group()
