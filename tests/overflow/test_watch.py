"""What counts as an origin, kernel by kernel."""

import pytest
import torch
from torch import nn

from mezzo.overflow.diagnose import Context
from mezzo.overflow.watch import Watch
from mezzo.trace.modes import KernelMode
from mezzo.trace.where import Where


@pytest.fixture
def watch():
    return Watch(Context([nn.Linear(1, 1)], None), Where())


def sources(watch):
    return [origin.source for origin in watch.origins]


def test_a_number_has_one_origin_however_far_it_is_handed_on(watch):
    x = torch.zeros(3)
    with KernelMode(watch):
        y = (x.log() + 1).view(3, 1).expand(3, 2).contiguous()[1:]
    assert sources(watch) == ["made"]
    assert watch.first([x, y]) is watch.origins[0]
    assert watch.first([x]) is None


def test_the_first_of_several_is_blamed(watch):
    x = torch.zeros(3)
    with KernelMode(watch):
        a = x.log()
        b = x.reciprocal()
        y = a + b
    assert sources(watch) == ["made", "made"]
    assert watch.first([y]).kernel == "aten::log"
    assert watch.first([b]).kernel == "aten::reciprocal"


def test_what_is_meant_is_blamed_last(watch):
    x = torch.zeros(3)
    with KernelMode(watch):
        y = x.masked_fill(torch.tensor([True, False, False]), -torch.inf) + x.log()
    assert sources(watch) == ["written", "made"]
    assert watch.first([y]).kernel == "aten::log"


def test_a_number_that_is_overwritten_leaves_its_storage_clean(watch):
    with KernelMode(watch):
        x = torch.zeros(3).log_()
        x.fill_(2.0)
        y = x.mul_(1e30).mul_(1e30)
    assert sources(watch) == ["made", "made"]
    assert watch.first([y]).kernel == "aten::mul_"


def test_memory_that_nothing_was_written_to(watch):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        with KernelMode(watch):
            x = torch.empty(3)
            assert bool(x.isnan().all())
            y = torch.add(torch.ones(3), 1, out=x)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not watch.origins
    assert watch.first([y]) is None


def test_an_end_that_nothing_made(watch):
    found = watch.first([torch.tensor([torch.nan])])
    assert (found.source, found.tensor.name) == ("given", "a tensor made before the step")


def test_a_sparse_tensor_that_a_cast_takes_beyond_its_range(watch):
    """It has no storage by which it could be followed: the first dense tensor is blamed."""
    with KernelMode(watch):
        y = torch.full((3,), 1e6).mul(torch.ones(3)).to_sparse().to(torch.float16).to_dense()
    assert not y.isfinite().any()
    assert watch.first([y]).kernel == "aten::_to_dense"
