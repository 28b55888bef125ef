"""How weights are stored: what is kept, what comes back, and what is refused."""

import pytest
import torch

from mezzo.step.split import decode
from mezzo.step.storage import FULL, KAHAN, PLAIN, SPLIT, STOCHASTIC, storage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = [SPLIT, FULL, PLAIN, STOCHASTIC, KAHAN]
#: A bound of |w − w'| / |w|, for |w| ≥ 2^-6. FP16's compensation is a subnormal there, in steps of 2^-24.
BOUND = {"split": 0, "full": 0, "kahan": {BF16: 2.0**-17, FP16: 2.0**-19}}
PLAIN_BOUND = {BF16: 2.0**-7, FP16: 2.0**-10}


def weights():
    w = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    return torch.where(w.abs() < 2**-6, w.sign() * 2**-6, w)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.name)
def test_what_is_stored_comes_back(kept, dtype):
    w = weights()
    weight, extra = kept.make(w, dtype, "head.weight")
    assert weight.dtype == dtype
    assert weight.shape == w.shape
    assert (extra is None) == (kept.extra is None)
    parts = kept.parts(weight, extra)
    assert parts[0].data_ptr() == weight.data_ptr()
    assert all(part.shape == w.shape for part in parts)
    bound = BOUND.get(kept.name, PLAIN_BOUND)
    bound = bound[dtype] if isinstance(bound, dict) else bound
    assert ((kept.read(parts) - w).abs() <= bound * w.abs()).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.name)
def test_writing_what_was_read_changes_nothing(kept, dtype):
    weight, extra = kept.make(weights(), dtype, None)
    parts = kept.parts(weight, extra)
    values = kept.write(kept.read(parts), dtype, lambda: torch.full(weight.shape, 0xFFFF, dtype=torch.int32))
    copied = [torch.empty_like(part).copy_(value) for part, value in zip(parts, values, strict=True)]
    assert torch.equal(kept.read(tuple(copied)), kept.read(parts))
    if kept is not KAHAN:  # a compensation of just half a spacing may belong to either neighbour
        assert all(torch.equal(*pair) for pair in zip(copied, parts, strict=True))


def test_split_weights_are_those_of_encode():
    assert torch.equal(decode(*SPLIT.make(weights(), FP16, None)), weights())


@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.name)
def test_nothing_is_shared_with_what_was_given(kept):
    w = weights()
    made = kept.make(torch.nn.Parameter(w), BF16, None)
    before = [tensor.clone() for tensor in made if tensor is not None]
    w.zero_()
    assert all(torch.equal(*pair) for pair in zip((t for t in made if t is not None), before, strict=True))
    assert not any(tensor.requires_grad for tensor in made if tensor is not None)


def test_full_and_split_round_the_weight_alike():
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    assert torch.equal(FULL.make(ties, BF16, None)[0], SPLIT.make(ties, BF16, None)[0])
    assert FULL.make(ties, BF16, None)[0][0] > 1  # away from zero; PLAIN goes to even
    assert PLAIN.make(ties, BF16, None)[0][0] == 1


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("split", BF16), SPLIT),
        (("full", FP16), FULL),
        ((None, FP16), PLAIN),
        (("split", FP32), PLAIN),
        (("full", FP32), PLAIN),
    ],
)
def test_storages_by_name(arguments, expected):
    assert storage(*arguments) is expected


def test_storages_by_rounding():
    assert storage(None, BF16, rounding="stochastic") is STOCHASTIC
    assert storage(None, FP16, rounding="kahan") is KAHAN
    assert storage(None, FP32, rounding="stochastic") is PLAIN
