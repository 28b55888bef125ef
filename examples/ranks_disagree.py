"""My ranks disagree: a share of the data is broken, or a rank goes on from another state. Which rank it is, is told.

torchrun --nproc-per-node 2 examples/ranks_disagree.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mezzo

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
policy = "O2,dtype=float16,loss_scale=dynamic(init=1024,interval=5)"
amp = mezzo.MixedPrecision(model, optimizer, policy, check_ranks=True)  # or the variable MEZZO_CHECK_RANKS=1
ddp = DistributedDataParallel(model)
before = amp.state_dict()
share = torch.randn(512, 16, device=device)[rank::size]


def train_step(x: torch.Tensor) -> tuple[torch.Tensor, mezzo.Step]:
    """Take one step."""
    with amp.autocast():
        loss = functional.cross_entropy(ddp(x), x[:, :4].argmax(dim=1))
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    return loss, step


for _ in range(5):
    train_step(share)
broken = share.where(torch.tensor(rank != 1), torch.inf)  # the data of one rank
_, step = train_step(broken)
if rank == 0:
    print(f"skipped by all ranks: {bool(step.skipped)}; not finite first on rank {int(step.rank_found)}")

if rank == 1:
    amp.load_state_dict(before)  # a checkpoint that one rank alone has found: its loss scale is another one
try:
    train_step(share)
except mezzo.StateError as error:
    if rank == 0:
        print(error)

amp.zero_grad()
amp.load_state_dict(before)  # on all ranks
loss, _ = train_step(share)
if rank == 0:
    print(f"together again: loss {loss.item():.4g}")
dist.destroy_process_group()
