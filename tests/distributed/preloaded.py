"""What ranks import and write anyway, once for all of them: forked from here, one starts in a fiftieth of a second.

What is imported lives to the end: a rank that looked at it for garbage would copy all of it, and take a second longer.
"""

import gc

import pytest  # noqa: F401
import torch._dynamo  # which DistributedDataParallel imports
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler

import mezzo.distributed
import mezzo.numerics
import mezzo.optim
import mezzo.session
import mezzo.weights

for dtype in (torch.float32, torch.bfloat16, torch.float16):  # their kernels: one takes a fifth of a second to write
    weight = torch.nn.Parameter(torch.ones(8))
    if dtype != torch.float32:
        weight = torch.nn.Parameter(mezzo.weights.Halves.of(weight, dtype))
    weight.grad = torch.ones(8)
    for optimizer in (mezzo.optim.AdamW([weight]), mezzo.optim.SGD([weight], lr=0.1, momentum=0.9)):
        optimizer.step()

gc.collect()
gc.freeze()
