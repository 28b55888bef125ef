"""A model sharded over ranks: each keeps its part of weights, in halves, gradients and moments.

torchrun --nproc-per-node 2 examples/train_fsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional

import mezzo

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
policy = "O2,dtype=bfloat16"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
mezzo.fully_shard(model, policy, wrap=torch.nn.Linear)  # torch's, under the policy; each linear by itself
optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)  # of a shard in halves the high one is gathered
amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)  # the norm of whole gradients

x = torch.randn(512, 16, device=device)[rank::size]
y = x[:, :4].argmax(dim=1)
for epoch in range(60):
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    if epoch % 20 == 19 and rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
dist.destroy_process_group()
