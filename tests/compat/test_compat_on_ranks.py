"""Programs in apex's and Paddle's form on two ranks, wrapped as those want it, against one process in float64."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.compat import paddle
from mezzo.compat.apex import amp

from ..distributed.ranks import on_ranks
from .programs import apex_pass, apex_scale, initialized, loss_of, network, weights

STEPS, BAD = 3, 1
#: The system, its level, and the dtype; Paddle's scaler is for float16.
CASES = [
    ("apex", "O1", "float16"),
    ("apex", "O2", "float16"),
    ("Paddle", "O2", "float16"),
    ("Paddle", "O2", "bfloat16"),
]


def in_apexs_form(rank, level, _):
    model, trace = network(), []
    with initialized(model, torch.optim.SGD(model.parameters(), lr=0.2), opt_level=level) as (model, optimizer):
        wrapped = DistributedDataParallel(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                apex_pass(loss_of(wrapped, 100 * step + 10 * part + rank), optimizer, delay_unscale=part == 0)
            if step == BAD and rank == 1:
                next(model.parameters()).grad.fill_(torch.inf)
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            optimizer.step()
            trace.append(apex_scale())
        return [value.clone() for value in model.state_dict().values()], trace


def in_paddles_form(rank, level, dtype):
    model, trace = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    paddle.decorate(model, optimizer, level=level, dtype=dtype)
    wrapped, scaler = DistributedDataParallel(model), paddle.GradScaler(enable=dtype == "float16")
    for step in range(STEPS):
        for part in range(2):
            with paddle.auto_cast(level=level, dtype=dtype):
                loss = loss_of(wrapped, 100 * step + 10 * part + rank)
            scaled = scaler.scale(loss)
            scaled.backward()
        if dtype == "float16" and step == BAD and rank == 1:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.minimize(optimizer, scaled)
        optimizer.zero_grad()
        trace.append(scaler.state_dict().get("scale", [1.0])[0])
    return [value.clone() for value in model.state_dict().values()], trace


def programs():
    rank, forms = torch.distributed.get_rank(), {"apex": in_apexs_form, "Paddle": in_paddles_form}
    return [forms[system](rank, level, dtype) for system, level, dtype in CASES]


def exact(system, dtype):
    """The weights of one process in float64."""
    twin = network().double()
    plain = torch.optim.SGD(twin.parameters(), lr=0.2)
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            for part in range(2):
                (loss_of(twin, 100 * step + 10 * part + rank) / 2).backward()
        if system == "apex":
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        if step != BAD or dtype == "bfloat16":
            plain.step()
    return weights(twin)


@pytest.mark.slow  # the step that ranks take together has fast tests in tests/distributed
def test_two_ranks_take_the_steps_of_one_process():
    one, other = on_ranks(2, programs, timeout=120)
    for (system, level, dtype), (mine, trace), (theirs, same) in zip(CASES, one, other, strict=True):
        assert all(map(torch.equal, mine, theirs)), (system, level, dtype)
        scales = [2.0**16, 2.0**15, 2.0**15] if dtype == "float16" else [1.0] * STEPS
        assert trace == same == scales, (system, level, dtype)
        for value, right in zip(mine, exact(system, dtype), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=0, atol=3e-3 if dtype == "float16" else 3e-2)
