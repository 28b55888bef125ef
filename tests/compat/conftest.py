"""What every test of a call style begins with: as in a process of its own."""

import pytest
import torch

from mezzo.compat.paddle.regions import last_dtype


@pytest.fixture(autouse=True)
def no_region_of_paddles_before():
    """Paddle's scaler goes by the last ``auto_cast``, which may be another test's."""
    token = last_dtype.set(torch.float16)
    yield
    last_dtype.reset(token)
