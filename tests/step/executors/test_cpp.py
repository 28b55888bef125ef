"""What is C++'s own: conversions spelled out, threads, and which kernels there are."""

import pytest
import torch

from mezzo import compiled
from mezzo.emit.cpp import headers
from mezzo.emit.vectors import VECTORS
from mezzo.step.executors import cpp
from mezzo.step.executors.cpp import Cpp
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.verdict import judge

from .implementations import (
    BF16,
    FP16,
    FP32,
    advance,
    bucket_of,
    clones,
    gradients_of,
    same_bits,
    tensors_of,
    whole_step,
)

WIDENED = """
extern "C" void kernel(const float16* from, float* to, int64_t count, int64_t start) {
    for (int64_t i = start; i < count; i += W) {
        const int n = count - i < W ? int(count - i) : W;
        store(to + i, load(from + i, n), n);
    }
}
"""
NARROWED = WIDENED.replace("const float16* from, float* to", "const float* from, float16* to")
#: The processor's own conversion of FP16, 16 or 8 at a time, and that spelled out, 8 or 4 at a time.
COMPILERS = ["g++", "g++ -mno-avx512f", "g++ -mno-avx512f -mno-f16c", "g++ -mno-avx512f -mno-avx"]


@pytest.fixture(params=COMPILERS)
def compiler(request, monkeypatch):
    monkeypatch.setenv("CXX", request.param)
    cpp.built.cache_clear()
    yield request.param
    cpp.built.cache_clear()


def test_every_number_of_float16_goes_to_float32_and_back_and_what_is_too_large_is_infinite(compiler):
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(FP16)
    widen, narrow = (cpp.built(headers(()) + VECTORS + text) for text in (WIDENED, NARROWED))
    for start in (0, 1):  # aligned or not, with a rest or not
        wide, back = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=FP16)
        flushing = torch.set_flush_denormal(True)
        try:  # FP16's subnormals are none of FP32's
            widen(patterns, wide, 1 << 16, start)
            narrow(wide, back, 1 << 16, start)
        finally:
            torch.set_flush_denormal(False)
        assert flushing
        number = ~patterns.isnan()
        number[:start] = False
        assert same_bits([wide[number]], [patterns.float()[number]])
        assert same_bits([back[number]], [patterns[number]])
        assert back[start:][patterns[start:].isnan()].isnan().all()
    wide = torch.tensor([65536.0, -65536.0, 1e30, 65504.0, -torch.inf, 0.0, -0.0, 2.0**-24, -(2.0**-14)])
    back = torch.zeros(len(wide), dtype=FP16)
    narrow(wide, back, len(wide), 0)
    assert same_bits([back], [wide.half()])


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 100)
    shapes, before = [(50_000,), (3, 5), (17_000,)], torch.get_num_threads()
    mine, theirs = (bucket_of("adamw", SPLIT, FP16, shapes, state_dtype=BF16) for _ in range(2))
    norms = []
    try:
        for bucket, threads in ((mine, 1), (theirs, 2)):
            torch.set_num_threads(threads)
            executor = Cpp()
            update = executor.update_of(bucket)
            for number in range(2):
                norms.append(
                    whole_step(executor, bucket, update, gradients_of(bucket, number, (FP16, FP32)[number])).norms
                )
    finally:
        torch.set_num_threads(before)
    assert same_bits(norms[:2], norms[2:])
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
    whole_step(executor, bucket, update, gradients_of(bucket, 2, BF16))  # traces, compiles and makes tables
    for number in range(2):
        gradients = gradients_of(bucket, number, BF16)
        if number:
            gradients[1][0, 0] = torch.inf
        before = clones(tensors_of(bucket))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
            verdict = judge(executor.norms(gradients), torch.tensor(1 / 1024), max_norm=1.0)
            advance([bucket.step], verdict.found_inf)
            update(gradients, verdict)
        assert "aten::_local_scalar_dense" not in {event.name for event in profiled.events()}
        assert same_bits(tensors_of(bucket), before) is bool(verdict.found_inf) is bool(number)


def test_one_call_for_each_pass_however_many_tensors_there_are(monkeypatch):
    calls, built = [], cpp.built

    def counted(source):
        kernel, pass_name = built(source), "norms" if "double* sums" in source else "update"
        return cpp.CppKernel(lambda *args: calls.append(pass_name) or kernel._function(*args))

    monkeypatch.setattr(cpp, "built", counted)
    executor, bucket = Cpp(), bucket_of("adamw", SPLIT, BF16, [(20,)] * 40)
    update = executor.update_of(bucket)
    for number in range(2):
        whole_step(executor, bucket, update, gradients_of(bucket, number, BF16))
    assert calls == ["norms", "update"] * 2


def test_a_negative_view_is_read_as_what_it_is():
    bucket, executor = bucket_of("sgd", PLAIN, FP32, [(300,)]), Cpp()
    before = bucket.weights[0].clone()
    gradient = torch._neg_view(torch.ones(300))
    assert gradient.is_neg()
    verdict = judge(executor.norms([gradient]), torch.tensor(1.0))
    advance([bucket.step], verdict.found_inf)
    executor.update_of(bucket)([gradient], verdict)
    assert (bucket.weights[0] > before).all()
