"""The harness itself: what ranks return, raise and leave behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from .ranks import RankError, on_ranks


def summed(number):
    total = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def failing(fault):
    dist.barrier()  # both have found each other
    if dist.get_rank() == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "asleep":
            time.sleep(9)
        raise ValueError("only here")
    return "well"


def test_ranks_return_in_their_order_and_reach_each_other():
    assert on_ranks(2, summed, 10) == [(rank, 2, torch.tensor([21.0])) for rank in range(2)]


@pytest.mark.parametrize(
    "fault, text", [("error", "ValueError: only here"), ("killed", "was killed"), ("asleep", "did not end in 1 s")]
)
def test_what_became_of_a_rank_is_told(fault, text):
    with pytest.raises(RankError, match=text) as caught:
        on_ranks(2, failing, fault, timeout=1 if fault == "asleep" else 600, fresh=True)
    assert 1 in caught.value.texts
