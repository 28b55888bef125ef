"""Norms of gradients: FP32 whatever the gradients' dtype is, and wherever they are."""

import pytest
import torch

from mezzo.step.gradients import norms

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_float64(dtype):
    """Of what FP16 holds, and its norm of 94,868 does not."""
    gradients = [torch.full((1_000,), 3_000.0, dtype=dtype), torch.linspace(-1, 1, 999).to(dtype)]
    exact = [torch.linalg.vector_norm(g.to(torch.complex128)).real for g in gradients]
    torch.testing.assert_close(norms(gradients, torch.device("cpu")).double(), torch.stack(exact), rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_summed_in_fp32_where_torch_takes_them(dtype):
    """On other devices than CPUs, where mezzo's own kernels read low gradients."""
    gradients = [torch.empty(8, dtype=dtype, device="meta") for _ in range(3)]
    assert norms(gradients, torch.device("meta")).dtype == torch.float32
