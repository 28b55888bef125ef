"""Tensors that kernels must find in device memory, or refuse before they are launched."""

import pytest
import torch
from torch import nn

from mezzo import UnsupportedError, optim
from mezzo.step.executors.choose import executor_for

from .test_contract import Wrapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Beyond the numbers of 32 bits, and no multiple of any block.
HUGE = (1 << 31) + 4096 + 3


def test_more_than_two_to_the_31_elements(gpu):
    if gpu.computes and torch.cuda.mem_get_info()[0] < 10 * HUGE:
        pytest.skip("needs 20 GiB of GPU memory")
    param = nn.Parameter(torch.zeros(HUGE, dtype=torch.bfloat16, device="cuda"))
    optimizer = optim.Lion([param], lr=0.5, betas=(0.9, 0.99), state_dtype="bfloat16")
    optimizer.rounds = True  # as under O3
    param.grad = torch.zeros_like(param)
    param.grad[-5:] = 1.0
    param.grad[5] = -1.0
    with gpu.kernels() as names:
        norm = executor_for(param.device).norms([param.grad])
        optimizer.step()
    assert len([name for name in names if "squares" in name or "lion" in name]) >= 2
    if gpu.computes:
        assert norm.item() == pytest.approx(6**0.5)
        assert (param[-5:].tolist(), param[5].item()) == ([-0.5] * 5, 0.5)
        assert param.count_nonzero().item() == 6


def sharded(inner):
    from torch.distributed.tensor import DTensor, Replicate

    mesh = torch.distributed.init_device_mesh("cuda", (1,))
    return DTensor.from_local(inner, mesh, [Replicate()])


def refused(gpu, gradient):
    executor = executor_for(torch.device("cuda", 0))
    with (
        gpu.kernels() as names,
        pytest.raises(UnsupportedError, match=r"(?s)cannot find a tensor.*no memory of its own"),
    ):
        executor.norms([torch.ones(3, device="cuda"), gradient])
    assert not [name for name in names if "squares" in name or "roots" in name]
    assert executor.norms([torch.ones(3, device="cuda")]).shape == (1,)  # the device is as usable as before


def test_gradients_without_memory_of_their_own_are_refused_before_any_launch(gpu):
    refused(gpu, Wrapped(torch.ones(3, device="cuda")))


def test_gradients_of_fully_sharded_models_are_refused_before_any_launch(computing, alone):
    refused(computing, sharded(torch.ones(3, device="cuda")))
