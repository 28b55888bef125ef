"""What every test of a call style begins with: as in a process of its own."""

import pytest
import torch

from mezzo.compat.apex import amp
from mezzo.compat.paddle.regions import last_dtype


@pytest.fixture(autouse=True)
def anew():
    """Paddle's scaler goes by the last ``auto_cast``, and apex has one session a process."""
    token = last_dtype.set(torch.float16)
    yield
    last_dtype.reset(token)
    amp.deinitialize()
