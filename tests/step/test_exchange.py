"""Halves that are widened to FP32 tensors and stored again, by every executor: the pure functions, bit for bit."""

import functools
import itertools
import math

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step.exchange import Exchange
from mezzo.step.executors import choose
from mezzo.step.executors.cpp import build
from mezzo.step.executors.cpp import launch as cpp
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Compiled, Portable
from mezzo.step.split import decode, encode, encode_into

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CPU = torch.device("cpu")


@pytest.fixture(params=["portable", "predicated", "cpp", "compiled", "interpreted", pytest.param("cuda", marks=CUDA)])
def device(request, monkeypatch):
    """Where tensors are: each executor in turn carries exchanges out there."""
    if request.param == "cuda":
        return torch.device("cuda")
    monkeypatch.setattr(choose, "executor_for", executor_of(request))
    return CPU


def executor_of(request):
    if request.param == "compiled":
        request.getfixturevalue("graphs")
    if request.param == "interpreted":
        pytest.importorskip("triton", reason="needs Triton")
        request.getfixturevalue("interpreted")
        from mezzo.step.executors.triton.launch import Triton

        return lambda device: Triton()
    known = {"portable": Portable, "predicated": Predicated, "cpp": Cpp, "compiled": CompiledHere}
    return lambda device: known[request.param]()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile makes kernels of, run as they are."""
    from mezzo.step.executors import portable

    torch._dynamo.reset()
    portable._kernel.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    portable._kernel.cache_clear()


class Predicated(Portable):
    """As on a device where the flag stays."""

    def update_of(self, bucket):
        update = super().update_of(bucket)
        update.on_cpu = False
        return update


class CompiledHere(Compiled, Predicated):
    """The same, compiled."""


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ODD = [0.0, -0.0, 1e-45, -1e-40, 2.0**-25, -(2.0**-25), 2.0**-14, 2.0**-14 - 2.0**-27, 6.1008e-05, 65504.0, 65519.9]
ODD += [65520.0, -1e30, math.inf, -math.inf, math.nan]
LAYOUTS = {
    "contiguous": lambda seed: random((3, 5), seed),
    "two chunks": lambda seed: random(((1 << 14) + 5,), seed),
    "odd values": lambda seed: torch.tensor(ODD * 3).roll(seed),
    "channels last": lambda seed: random((2, 3, 4, 5), seed).to(memory_format=torch.channels_last),
    "transposed": lambda seed: random((4, 3), seed).t(),
    "scalar": lambda seed: random((), seed),
    "empty": lambda seed: random((0, 3), seed),
    "gaps": lambda seed: random((4, 6), seed)[:, ::2],
    "not at 16 bytes": lambda seed: random((1101,), seed)[1:],
}


def like(tensor, dtype, device):
    """Memory of a dtype with a tensor's own strides and offset."""
    base = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=dtype, device=device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Case:
    """Tensors of every layout in either dtype, with gradients of all three by turns."""

    def __init__(self, device, with_gradients=True):
        kinds = list(itertools.product(LAYOUTS.values(), (BF16, FP16)))
        wide = [layout(seed) for seed, (layout, _) in enumerate(kinds)]
        self.high = [like(w, dtype, device) for w, (_, dtype) in zip(wide, kinds, strict=True)]
        self.rest = [like(w, torch.int16, device) for w in wide]
        for w, hi, lo in zip(wide, self.high, self.rest, strict=True):
            encode_into(w.to(device), hi, lo)
        # Values with gaps of their own would be one more layout: they lie as their weights do, without the gaps.
        self.values = [torch.full_like(hi, 7.0, dtype=FP32) for hi in self.high]
        self.gradients = [torch.full_like(hi, 7.0, dtype=FP32) for hi in self.high] if with_gradients else None
        dtypes = itertools.cycle((BF16, FP32, FP16))
        self.given = [random(hi.shape, seed).to(device, next(dtypes)) for seed, hi in enumerate(self.high)]
        self.exchange = Exchange(self.high, self.rest, self.values, self.gradients)


def copies(*groups):
    return [tensor.clone() for group in groups for tensor in group]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        nan = one.isnan()
        assert torch.equal(nan, other.isnan())
        kind = torch.int32 if one.dtype == FP32 else torch.int16
        assert torch.equal(one[~nan].view(kind), other[~nan].view(kind))


@pytest.mark.parametrize("multiplier", [None, 1 / 3])
def test_widening_is_decoding_and_leaves_halves_and_gradients_as_they_are(device, multiplier):
    case = Case(device)
    before = copies(case.high, case.rest, case.given)
    factor = None if multiplier is None else torch.tensor(multiplier, device=device)
    for _ in range(2):
        case.exchange.widen(case.given, factor)
        assert_same(case.values, [decode(*pair) for pair in zip(case.high, case.rest, strict=True)])
        expected = [each.float() if factor is None else each.float() * factor for each in case.given]
        assert_same(case.gradients, expected)
        assert_same([*case.high, *case.rest, *case.given], before)


def test_storing_is_encoding_and_leaves_the_values_as_they_are(device):
    case = Case(device)
    layouts = [layout for layout in LAYOUTS.values() for _ in (BF16, FP16)]
    values = [layout(seed + 5).to(device) for seed, layout in enumerate(layouts)]
    values[0][1, 2] = values[1][0, 0] = 3.4e38  # which BF16 rounds to infinity
    before = copies(values)
    case.exchange.store(values)
    for value, hi, lo in zip(values, case.high, case.rest, strict=True):
        expected = torch.empty_like(hi), torch.empty_like(lo)
        encode_into(value, *expected)
        assert_same([hi], expected[:1])
        # Beside an infinity or NaN the remainder is nothing's.
        assert torch.equal(lo[hi.isfinite()], expected[1][hi.isfinite()])
    assert_same(values, before)


def test_storing_what_was_widened_changes_no_bit(device):
    case = Case(device)
    before = copies(case.high, case.rest)
    case.exchange.widen(case.given)
    case.exchange.store(case.values)
    assert_same([*case.high, *case.rest], before)


@pytest.mark.parametrize("flag", [torch.tensor(True), torch.tensor([1.0])], ids=["bool", "as fused"])
def test_a_skipped_step_writes_nothing(device, flag):
    case, flag = Case(device), flag.to(device)
    before = copies(case.high, case.rest, case.values, case.gradients)
    case.exchange.widen(case.given, torch.tensor(0.5, device=device), flag)
    case.exchange.store([torch.ones_like(value) for value in case.values], flag)
    assert_same([*case.high, *case.rest, *case.values, *case.gradients], before)
    case.exchange.store([torch.ones_like(value) for value in case.values], torch.zeros_like(flag))
    assert all((hi == 1).all() for hi in case.high)
    assert not any(lo.any() for lo in case.rest)


def test_values_alone_need_no_gradients(device):
    case = Case(device, with_gradients=False)
    before = copies(case.high, case.rest)
    case.exchange.widen(None)
    assert_same(case.values, [decode(*pair) for pair in zip(case.high, case.rest, strict=True)])
    case.exchange.store(case.values)
    assert_same([*case.high, *case.rest], before)


def test_memory_comes_and_goes_between_steps(device):
    case = Case(device)
    storages = [each.untyped_storage() for each in (*case.values, *case.gradients)]
    sizes, keeper = [storage.nbytes() for storage in storages], []
    for number in range(3):
        case.exchange.widen(case.given)
        assert_same(case.values, [decode(*pair) for pair in zip(case.high, case.rest, strict=True)])
        assert_same(case.gradients, [each.float() for each in case.given])
        for value in case.values:
            value.mul_(-1)
        expected = [encode(value.nan_to_num(3, 3, 3).clamp(-9, 9), FP16) for value in case.values]
        for value, (hi, lo) in zip(case.values, expected, strict=True):
            value.copy_(decode(hi, lo))
        case.exchange.store(case.values)
        for hi, (other, lo), rest in zip(case.high, expected, case.rest, strict=True):
            assert hi.dtype != FP16 or (torch.equal(hi, other) and torch.equal(rest, lo))
        for storage in storages:
            storage.resize_(0)
        keeper.append(torch.empty(1000 * (number + 1), device=device))  # takes some of what was given back
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)


def test_an_update_in_between_is_that_of_fp32_weights(device):
    """Ten steps of torch's own AdamW, against the same on FP32 weights."""
    weights = [random((40, 30), 0), random((7,), 1)]
    theirs = [torch.nn.Parameter(w.clone().to(device)) for w in weights]
    halves = [encode(w.to(device), BF16) for w in weights]
    views = [torch.nn.Parameter(torch.empty_like(w)) for w in theirs]
    for view in views:
        view.grad = torch.empty_like(view)
    exchange = Exchange(*map(list, zip(*halves, strict=True)), views, [view.grad for view in views])
    optimizers = [torch.optim.AdamW(params, lr=0.1, foreach=False) for params in (theirs, views)]
    for number in range(10):
        given = [random(w.shape, 10 + number).to(device, BF16) for w in weights]
        exchange.widen(given, torch.tensor(0.25, device=device))
        for param, each in zip(theirs, given, strict=True):
            param.grad = each.float() * 0.25
        for optimizer in optimizers:
            optimizer.step()
        exchange.store(views)
        for view in views:
            view.data.fill_(math.nan)  # nothing is kept there
    assert_same([decode(*pair) for pair in halves], [w.detach() for w in theirs])


@pytest.mark.parametrize("count", [1, 20])
def test_one_launch_for_each_set_of_dtypes_however_many_tensors_there_are(monkeypatch, count):
    calls, built = [], build.built

    def counted(source):
        kernel = built(source)
        return build.CppKernel(lambda *args: calls.append(1) or kernel._function(*args))

    choose.executor_for(CPU)  # tries a kernel of another kind
    monkeypatch.setattr(cpp, "built", counted)
    high, rest = zip(*[encode(random((20,), n), dtype) for n in range(count) for dtype in (BF16, FP16)], strict=True)
    values, gradients = ([torch.empty(20) for _ in high] for _ in "12")
    exchange = Exchange(high, rest, values, gradients)
    for _ in range(2):
        exchange.widen([hi.clone() for hi in high])
        assert len(calls) == 2
        exchange.store(values)
        assert len(calls) == 4
        calls.clear()


def test_nothing_is_asked_of_the_device():
    """Of tensors that have no values; and by profile, where kernels read them."""
    with torch.device("meta"):
        hi, lo, value = torch.empty(5, dtype=BF16), torch.empty(5, dtype=torch.int16), torch.empty(5)
        exchange = Exchange([hi], [lo], [value], [torch.empty(5)])
        exchange.widen([hi], torch.tensor(1.0), torch.tensor(0.0))
        exchange.store([value], torch.tensor(False))
    case, flag = Case(CPU), torch.tensor(False)
    case.exchange.widen(case.given, torch.tensor(0.5), flag)
    case.exchange.store(case.values, flag)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        case.exchange.widen(case.given, torch.tensor(0.5), flag)
        case.exchange.store(case.values, flag)
    assert "aten::_local_scalar_dense" not in {event.name for event in profiled.events()}


def test_where_a_kernel_cannot_be_built_later_tensors_go_on_block_by_block(monkeypatch, caplog):
    """A kernel for gradients of another dtype than the weights': asked for when they come."""
    high, rest = encode(random((20,), 0), BF16)
    value, gradient = torch.empty(20), torch.empty(20)
    exchange = Exchange([high], [rest], [value], [gradient])

    def refuse(source):
        raise UnsupportedError("no compiler any more")

    monkeypatch.setattr(cpp, "built", refuse)
    given = random((20,), 1).to(FP16)
    exchange.widen([given])
    assert_same([value, gradient], [decode(high, rest), given.float()])
    assert "block by block, since no compiler any more" in caplog.text
    again = Exchange([high], [rest], [value], [gradient])
    again.store([-value])
    assert_same([decode(high, rest)], [-value])
