"""Halves that are widened to FP32 tensors and stored again, by every executor: the pure functions, bit for bit."""

import itertools

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step.executors import choose, cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.storage import decode, encode, encode_into
from mezzo.weights.codec import Exchange

from ..step.executors.implementations import BF16, CPU, FP16, FP32, LAYOUTS, PARAMETERS, like, prepared, random


@pytest.fixture(params=PARAMETERS)
def device(request, monkeypatch):
    """Where tensors are: each executor in turn carries exchanges out there."""
    implementation = prepared(request, monkeypatch)
    monkeypatch.setattr(choose, "executor_for", lambda device: implementation.make())
    return implementation.device


class Case:
    """Tensors of every layout, in either dtype by turns."""

    def __init__(self, device):
        wide = [layout(seed) for seed, layout in enumerate(LAYOUTS.values())]
        self.high = [like(w, dtype, device) for w, dtype in zip(wide, itertools.cycle((BF16, FP16)), strict=False)]
        self.low = [like(w, torch.int16, device) for w in wide]
        for w, hi, lo in zip(wide, self.high, self.low, strict=True):
            encode_into(w.to(device), hi, lo)
        # Values with gaps of their own would be one more layout: they lie as their weights do, without the gaps.
        self.values = [torch.full_like(hi, 7.0, dtype=FP32) for hi in self.high]
        self.exchange = Exchange(self.high, self.low, self.values)


def copies(*groups):
    return [tensor.clone() for group in groups for tensor in group]


def assert_same(tensors, expected):
    for one, other in zip(tensors, expected, strict=True):
        assert one.dtype == other.dtype
        nan = one.isnan()
        assert torch.equal(nan, other.isnan())
        as_bits = torch.int32 if one.dtype == FP32 else torch.int16
        assert torch.equal(one[~nan].view(as_bits), other[~nan].view(as_bits))


def test_widening_is_decoding_and_storing_is_encoding(device):
    case = Case(device)
    before = copies(case.high, case.low)
    case.exchange.widen()
    assert_same(case.values, [decode(*pair) for pair in zip(case.high, case.low, strict=True)])
    assert_same([*case.high, *case.low], before)

    values = [layout(seed + 5).to(device) for seed, layout in enumerate(LAYOUTS.values())]
    values[0][1, 2] = values[1][7] = 3.4e38  # which BF16 rounds to infinity
    before = copies(values)
    case.exchange.store(values)
    for value, hi, lo in zip(values, case.high, case.low, strict=True):
        expected = torch.empty_like(hi), torch.empty_like(lo)
        encode_into(value, *expected)
        assert_same([hi], expected[:1])
        # Beside an infinity or NaN the remainder is nothing's.
        assert torch.equal(lo[hi.isfinite()], expected[1][hi.isfinite()])
    assert_same(values, before)


def test_memory_comes_and_goes_between_steps_and_storing_what_was_widened_changes_no_bit(device):
    halves = [encode(random(shape, 1).to(device), BF16) for shape in ((3, 5), (1101,))]
    values = [torch.empty(high.shape, device=device) for high, _ in halves]
    exchange = Exchange(*map(list, zip(*halves, strict=True)), values)
    before, storages = copies(*halves), [value.untyped_storage() for value in values]
    sizes, keeper = [storage.nbytes() for storage in storages], []
    for number in range(2):
        exchange.widen()
        assert_same(values, [decode(*pair) for pair in halves])
        exchange.store(values)
        assert_same([half for pair in halves for half in pair], before)
        for storage in storages:
            storage.resize_(0)
        keeper.append(torch.empty(1000 * (number + 1), device=device))  # takes some of what was given back
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)


def test_one_launch_for_each_set_of_dtypes_however_many_tensors_there_are(monkeypatch):
    calls, built = [], cpp.built

    def counted(source):
        kernel = built(source)
        return cpp.CppKernel(lambda *args: calls.append(1) or kernel._function(*args))

    choose.executor_for(CPU)  # tries a kernel of another kind
    monkeypatch.setattr(cpp, "built", counted)
    high, low = zip(*[encode(random((20,), n), dtype) for n in range(20) for dtype in (BF16, FP16)], strict=True)
    values = [torch.empty(20) for _ in high]
    exchange = Exchange(high, low, values)
    for _ in range(2):
        exchange.widen()
        assert len(calls) == 2
        exchange.store(values)
        assert len(calls) == 4
        calls.clear()


def test_nothing_is_asked_of_the_device(monkeypatch):
    """Of tensors that have no values."""
    monkeypatch.setattr(choose, "executor_for", lambda device: Portable())
    with torch.device("meta"):
        hi, lo, value = torch.empty(5, dtype=BF16), torch.empty(5, dtype=torch.int16), torch.empty(5)
        exchange = Exchange([hi], [lo], [value])
        exchange.widen()
        exchange.store([value])


def test_where_a_kernel_cannot_be_built_tensors_go_on_block_by_block(monkeypatch, caplog):
    high, low = encode(random((20,), 0), BF16)
    value = torch.empty(20)

    def refuse(source):
        raise UnsupportedError("no compiler any more")

    choose.executor_for(CPU)
    monkeypatch.setattr(cpp, "built", refuse)
    exchange = Exchange([high], [low], [value])
    exchange.widen()
    assert_same([value], [decode(high, low)])
    exchange.store([-value])
    assert_same([decode(high, low)], [-value])
    assert "by torch's own operations, since no compiler any more" in caplog.text
