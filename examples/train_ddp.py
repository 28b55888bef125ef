"""Several GPUs, or processes on a CPU, with DistributedDataParallel; three lines differ for mezzo, as in train_min.py.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mezzo

dist.init_process_group()  # over NCCL between GPUs, over gloo between CPUs
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)  # first, or mezzo.prepare
ddp = DistributedDataParallel(model)  # then

x = torch.randn(512, 16, device=device)[rank::size]  # this rank's share
y = x[:, :4].argmax(dim=1)
for epoch in range(60):
    with amp.autocast():
        loss = functional.cross_entropy(ddp(x), y)
    amp.backward(loss)
    step = amp.step()  # all ranks step, or all skip
    amp.zero_grad()
    if epoch % 20 == 19 and rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
dist.destroy_process_group()
