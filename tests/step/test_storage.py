"""How weights are stored: what comes back, and what an update writes."""

import pytest
import torch

from mezzo.step.split import encode
from mezzo.step.storage import PLAIN, READ, SPLIT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def weights():
    return torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).clamp(min=2.0**-16)


def copied(values, parts):
    return tuple(torch.empty_like(part).copy_(value) for part, value in zip(parts, values, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_halves_are_those_of_encode_and_writing_what_was_read_changes_nothing(dtype):
    parts = SPLIT.parts(*encode(weights(), dtype))
    assert torch.equal(SPLIT.read(parts), weights())
    assert torch.equal(READ.read(parts), weights())
    written = copied(SPLIT.write(SPLIT.read(parts), dtype), parts)
    assert all(torch.equal(*pair) for pair in zip(written, parts, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_plain_weights_are_rounded_to_nearest(dtype):
    (written,) = copied(PLAIN.write(weights(), dtype), PLAIN.parts(weights().to(dtype), None))
    assert torch.equal(written, weights().to(dtype))
    assert torch.equal(PLAIN.read((written,)), weights().to(dtype).float())
