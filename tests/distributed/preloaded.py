"""What ranks import anyway, once for all of them: forked from here, one starts in a fiftieth of a second.

What is imported lives to the end: a rank that looked at it for garbage would copy all of it, and take a second longer.
"""

import gc

import pytest  # noqa: F401
import torch._dynamo  # which DistributedDataParallel imports
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import mezzo.numerics
import mezzo.optim
import mezzo.session  # noqa: F401

gc.collect()
gc.freeze()
