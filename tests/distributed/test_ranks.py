"""The harness itself: what is told of ranks that fail."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from .ranks import RankError, on_ranks


def failing(fault):
    dist.barrier()  # both have found each other
    if dist.get_rank() == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "asleep":
            time.sleep(9)
        raise ValueError("only here")
    return "well"


@pytest.mark.parametrize(
    "fault, text", [("error", "ValueError: only here"), ("killed", "was killed"), ("asleep", "did not end in 0.4 s")]
)
def test_what_became_of_a_rank_is_told(fault, text):
    with pytest.raises(RankError, match=text) as caught:
        on_ranks(2, failing, fault, timeout=0.4 if fault == "asleep" else 600, fresh=True)
    assert 1 in caught.value.texts
