"""What is C++'s own: conversions spelled out, threads, and which kernels there are."""

import threading

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step.exchange import STORE, WIDEN
from mezzo.step.executors.cpp import build
from mezzo.step.executors.cpp import launch as cpp
from mezzo.step.executors.cpp import source as cpp_source
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.passes import judge
from mezzo.step.storage import PLAIN, READ, SPLIT
from mezzo.step.update import rule

from .test_contract import BF16, FP16, FP32, advance, bucket_of, gradients_of, same_bits, take, tensors_of

WIDENED = """
extern "C" void kernel(const uint16_t* from, float* to, int64_t count, int64_t start) {
    widen(from + start, to + start, count - start);
}
"""
NARROWED = """
extern "C" void kernel(const float* from, uint16_t* to, int64_t count, int64_t start) {
    narrow(from + start, to + start, count - start);
}
"""


#: The processor's own conversion of FP16, 16 or 8 at a time, and that spelled out.
COMPILERS = ["g++", "g++ -mno-avx512f", "g++ -mno-f16c -mno-avx512f"]


@pytest.fixture(params=COMPILERS)
def compiler(request, monkeypatch):
    monkeypatch.setenv("CXX", request.param)
    build.built.cache_clear()
    yield request.param
    build.built.cache_clear()


@pytest.mark.parametrize("start", [0, 1])  # aligned or not, with a rest or not
def test_every_number_of_float16_goes_to_float32_and_back(compiler, start):
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(FP16)
    wide, back = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=FP16)
    before = torch.tensor([1e-39]) * 1
    flushing = torch.set_flush_denormal(True)
    try:  # FP16's subnormals are none of FP32's
        build.built(cpp_source._headers((FP16,)) + WIDENED)(patterns, wide, 1 << 16, start)
        build.built(cpp_source._headers((FP16,)) + NARROWED)(wide, back, 1 << 16, start)
    finally:
        torch.set_flush_denormal(False)
    assert flushing
    assert before == 1e-39
    number = ~patterns.isnan()
    number[:start] = False
    assert same_bits([wide[number]], [patterns.float()[number]])
    assert same_bits([back[number]], [patterns[number]])
    assert back[start:][patterns[start:].isnan()].isnan().all()


def test_what_is_too_large_for_float16_is_infinite(compiler):
    wide = torch.tensor([65536.0, -65536.0, 1e30, 65504.0, -torch.inf, torch.nan, 0.0, -0.0, 2.0**-24, -(2.0**-14)])
    back = torch.zeros(len(wide), dtype=FP16)
    build.built(cpp_source._headers((FP16,)) + NARROWED)(wide, back, len(wide), 0)
    assert same_bits([back[[0, 1, 2, 3, 4, 6, 7, 8, 9]]], [wide.half()[[0, 1, 2, 3, 4, 6, 7, 8, 9]]])
    assert back[5].isnan()


@pytest.mark.parametrize("gradient", [FP32, BF16, FP16])
def test_the_number_of_threads_changes_no_bit(gradient, monkeypatch):
    monkeypatch.setattr(cpp, "WORTH_A_THREAD", 100)
    shapes, before = [(50_000,), (3, 5), (17_000,)], torch.get_num_threads()
    mine, theirs = (bucket_of("adamw", SPLIT, FP16, shapes, state_dtype=BF16) for _ in range(2))
    found = []
    try:
        for bucket, threads in ((mine, 1), (theirs, 2)):
            torch.set_num_threads(threads)
            executor = Cpp()
            update = executor.update_of(bucket)
            for number in range(2):
                found.append(take(executor, bucket, update, gradients_of(bucket, number, gradient)).norms)
    finally:
        torch.set_num_threads(before)
    assert same_bits(found[:2], found[2:])
    assert same_bits(tensors_of(mine), tensors_of(theirs))


def test_threads_are_torch_s_and_as_many_as_are_worth_waking():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert [cpp.threads(count) for count in (0, 1, 1 << 14, 1 << 15, 1 << 30)] == [1, 1, 1, 2, 2]
        torch.set_num_threads(1)
        assert cpp.threads(1 << 30) == 1
    finally:
        torch.set_num_threads(before)


def test_nothing_is_asked_of_a_tensor():
    """Not even on the CPU, where asking costs little: the flag is read by the kernel."""
    executor, bucket = Cpp(), bucket_of("adamw", SPLIT, BF16)
    update = executor.update_of(bucket)
    take(executor, bucket, update, gradients_of(bucket, 2, BF16))  # traces, compiles and makes tables
    for number in range(2):
        gradients = gradients_of(bucket, number, BF16)
        if number:
            gradients[1][0, 0] = torch.inf
        before = [tensor.clone() for tensor in tensors_of(bucket)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
            verdict = judge(executor.norms(gradients), torch.tensor(1 / 1024), max_norm=1.0)
            advance([bucket.step], verdict.found_inf)
            update(gradients, verdict)
        assert "aten::_local_scalar_dense" not in {event.name for event in profiled.events()}
        assert same_bits(tensors_of(bucket), before) is bool(verdict.found_inf) is bool(number)


@pytest.mark.parametrize("count", [1, 40])
def test_one_call_for_each_pass_however_many_tensors_there_are(monkeypatch, count):
    calls, built = [], build.built

    def counted(source):
        kernel, kind = built(source), "norms" if "double* sums" in source else "update"
        return build.CppKernel(lambda *args: calls.append(kind) or kernel._function(*args))

    monkeypatch.setattr(cpp, "built", counted)
    executor, bucket = Cpp(), bucket_of("adamw", SPLIT, BF16, [(20,)] * count)
    update = executor.update_of(bucket)
    for number in range(2):
        take(executor, bucket, update, gradients_of(bucket, number, BF16))
    assert calls == ["norms", "update"] * 2


def test_tables_follow_tensors_that_were_given_other_memory():
    bucket, executor = bucket_of("sgd", SPLIT, BF16, [(20,), (3,)]), Cpp()
    update = executor.update_of(bucket)
    gradients = [torch.ones_like(weight) for weight in bucket.weights]
    for _ in range(2):
        values = [extra.clone() for extra in bucket.extras]
        take(executor, bucket, update, gradients, inverse=1.0)
        for value, extra in zip(values, bucket.extras, strict=True):
            assert not same_bits([value], [extra])
        bucket.weights[0].data = bucket.weights[0].data.clone()
        bucket.extras[1] = bucket.extras[1].clone()
        gradients = [gradient.float() for gradient in gradients]


def test_old_tables_of_norms_are_forgotten():
    executor = Cpp()
    for length in range(1, cpp.REMEMBERED + 3):
        assert executor.norms([torch.ones(length)]).item() == pytest.approx(length**0.5)
    assert executor._known.cache_info().currsize == cpp.REMEMBERED


def test_two_threads_of_python_may_step_at_once():
    buckets = [bucket_of("adamw", SPLIT, BF16, [(200_000,)]) for _ in range(2)]
    executor = Cpp()
    verdicts = []
    for bucket in buckets:
        gradients = gradients_of(bucket, 0, BF16)
        verdict = judge(executor.norms(gradients), torch.tensor(1 / 1024))
        advance([bucket.step], verdict.found_inf)
        verdicts.append((executor.update_of(bucket), gradients, verdict))
    threads = [threading.Thread(target=update, args=(gradients, verdict)) for update, gradients, verdict in verdicts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_bits(tensors_of(buckets[0]), tensors_of(buckets[1]))


def test_what_is_wrong_is_told_before_anything_is_updated(monkeypatch):
    def refuse(source):
        raise UnsupportedError("no space")

    bucket = bucket_of("lion", SPLIT, BF16)
    monkeypatch.setattr(cpp, "built", refuse)
    with pytest.raises(UnsupportedError, match="no space"):
        Cpp().update_of(bucket)  # which a step does for all buckets first


def test_a_negative_view_is_read_as_what_it_is():
    bucket, executor = bucket_of("sgd", PLAIN, FP32, [(300,)]), Cpp()
    before = bucket.weights[0].clone()
    gradient = torch._neg_view(torch.ones(300))
    assert gradient.is_neg()
    verdict = judge(executor.norms([gradient]), torch.tensor(1.0))
    advance([bucket.step], verdict.found_inf)
    executor.update_of(bucket)([gradient], verdict)
    assert (bucket.weights[0] > before).all()


def test_tensors_without_memory_are_refused():
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return args[0] if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default) else NotImplemented

    with pytest.raises(UnsupportedError, match=r"cannot find a tensor\n  where  Wrapped of shape \(4,\)"):
        Cpp().norms([Wrapped(torch.ones(4))])


@pytest.mark.parametrize("executor", [Cpp(), Portable()], ids=["cpp", "portable"])
def test_a_weight_that_was_turned_round_keeps_its_own_momentum(executor):
    """At the same address, of the same shape: only its strides differ."""
    bucket = bucket_of("sgd momentum", PLAIN, FP32, [(300, 300)])
    theirs = [bucket.weights[0].clone(), torch.zeros(300, 300)]
    update = executor.update_of(bucket)
    for number in range(2):
        gradient = torch.randn(300, 300, generator=torch.Generator().manual_seed(number))
        take(executor, bucket, update, [gradient], inverse=1.0)
        decayed = gradient + 0.01 * theirs[0]
        theirs[1] = theirs[1] * 0.9 + decayed * (0.9 if number else 1.0)
        theirs[0] = theirs[0] - 0.1 * theirs[1]
        torch.testing.assert_close(bucket.weights[0], theirs[0], rtol=1e-5, atol=1e-6)
        bucket.weights[0].data, theirs[0] = bucket.weights[0].data.t(), theirs[0].t().clone()


def test_no_weights_at_all():
    bucket = bucket_of("adamw", SPLIT, BF16, [])
    Cpp().update_of(bucket)([], judge(torch.ones(1), torch.tensor(1.0)))


def test_a_float64_bound_does_not_change_what_kernels_read():
    verdict = judge(torch.tensor([2.0]), torch.tensor(1.0), max_norm=torch.tensor(1.0, dtype=torch.float64))
    assert verdict.multiplier.dtype == FP32
    assert verdict.multiplier == pytest.approx(0.5)


def test_what_is_not_written_is_not_stored_and_what_is_not_used_is_not_read():
    for dtype in (FP16, BF16):
        read = cpp_source.update_source(WIDEN, READ, (dtype, dtype, torch.int16, FP32, FP32))
        assert "= part0_row[i];" in read
        assert "part0_row[i] = " not in read
        assert "part1_row[i] = " not in read
        assert "narrow(part0_row" not in read
        assert "= value_state_row[i];" not in read
        stored = cpp_source.update_source(STORE, SPLIT, (FP32, dtype, torch.int16))
        assert "= part0_row[i];" not in stored
        assert "widen(part0_at" not in stored
        assert "part0_row[i] = " in stored
        assert ("narrow(part0_row" in stored) is (dtype == FP16)
    both = cpp_source.update_source(rule("adamw"), SPLIT, (FP16, FP16, torch.int16, FP32, FP32))
    assert "widen(part0_at + row, part0_row, count)" in both
    assert "narrow(part0_row, part0_at + row, count)" in both
