"""Programs in Paddle's form on two ranks, decorated and then wrapped, against one process in float64."""

import pytest
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mezzo.compat import paddle

from ..distributed.ranks import on_ranks
from .apex import INF, perceptron, points, values

STEPS, BAD = 3, 1
#: How the optimizer comes by its masters, the dtype, and whether a scaler steps.
CASES = [
    ("together", "float16", True),
    ("together", "bfloat16", False),
    ("O1", "float16", True),
]


def programs():
    """Train in each case: weights, and the scale after each step."""
    rank, found = torch.distributed.get_rank(), []
    for way, dtype, scales in CASES:
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        level = "O1" if way == "O1" else "O2"
        paddle.decorate(model, optimizer if way == "together" else None, level=level, dtype=dtype, save_dtype="float32")
        wrapped, scaler = DistributedDataParallel(model), paddle.GradScaler(enable=scales, init_loss_scaling=256.0)
        trace = []
        for step in range(STEPS):
            for micro_batch in range(2):
                x, y = points(100 * step + 10 * micro_batch + rank)
                with paddle.auto_cast(level=level, dtype=dtype):
                    loss = functional.cross_entropy(wrapped(x).float(), y)
                scaled = scaler.scale(loss)
                scaled.backward()
            if scales and step == BAD and rank == 1:
                next(model.parameters()).grad.fill_(INF)
            scaler.minimize(optimizer, scaled)
            optimizer.zero_grad()
            trace.append(scaler.state_dict().get("scale", [1.0])[0])
        found.append((values(model.state_dict().values()), trace))
    return found


def exact(skips):
    """Return the weights of one process in float64."""
    twin = perceptron().double()
    plain = torch.optim.SGD(twin.parameters(), lr=0.2)
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            for micro_batch in range(2):
                x, y = points(100 * step + 10 * micro_batch + rank)
                (functional.cross_entropy(twin(x.double()), y) / 2).backward()
        if not (skips and step == BAD):
            plain.step()
    return values(twin.parameters())


@pytest.mark.slow  # what is of ranks in it has a test of its own, in tests/distributed
def test_two_ranks_take_the_steps_of_one_process():
    one, other = on_ranks(2, programs, timeout=120)
    for (way, dtype, scales), (mine, trace), (theirs, same) in zip(CASES, one, other, strict=True):
        assert all(map(torch.equal, mine, theirs)), (way, dtype)
        assert trace == same == ([256.0, 128.0, 128.0] if scales else [1.0] * STEPS), (way, dtype)
        for value, right in zip(mine, exact(scales), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=0, atol=3e-3 if dtype == "float16" else 3e-2)
