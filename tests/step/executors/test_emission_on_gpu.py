"""Steps by torch's own operations on a GPU, where a release traces rules to what no kernel is written of."""

import pytest
import torch
from torch import nn

from mezzo import optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_they_read_nothing_and_can_be_captured(gpu, lacking, caplog, state_dtype):
    lacking("aten.sqrt.")
    param = nn.Parameter(torch.ones(50, 70, device="cuda"))
    optimizer = optim.AdamW([param], lr=0.5, state_dtype=state_dtype)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with gpu.unread(), gpu.kernels() as names:
        optimizer.step()
    with gpu.captured():
        optimizer.step()
    assert not [name for name in names if "adamw" in name]
    messages = [entry.getMessage() for entry in caplog.records if entry.name.startswith("mezzo")]
    assert [f"no Triton for aten.sqrt.default of torch {torch.__version__}" in text for text in messages] == [True]
    if gpu.computes:
        assert param[0, 0].item() == pytest.approx(0.995 * (0.995 - 0.5) - 0.5, abs=0.01)
