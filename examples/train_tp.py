"""A language model over two axes of ranks: tensor parallelism within a node, sharded data between nodes.

torchrun --nproc-per-node 4 examples/train_tp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import mezzo


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(self.up, nn.GELU(), self.down)

    def forward(self, x):
        return x + self.feed(self.norm(x))


class Model(nn.Module):
    def __init__(self, classes=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


dist.init_process_group()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
policy = "O2,dtype=bfloat16"

# Between the blocks each rank along the tensors has a part of the sequence; the logits stay cut by class.
whole, part = Replicate(), Shard(1)
plan = {
    "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.feed": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(output_layouts=part),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
}
torch.manual_seed(0)
model = parallelize_module(Model().to(device), mesh["tensor"], plan)
mezzo.fully_shard(model, policy, mesh=mesh["data"])
optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)

tokens = torch.randint(64, (32, 16), device=device)
tokens = tokens.chunk(mesh["data"].size())[mesh.get_local_rank("data")]
labels = (3 * tokens + 1) % 64
for epoch in range(60):
    with loss_parallel():  # around the backward pass, too
        with amp.autocast():
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    loss = loss.detach().full_tensor()  # a DTensor, the same on the ranks of one part of the data
    if epoch % 20 == 19 and dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
dist.destroy_process_group()
