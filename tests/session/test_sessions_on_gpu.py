"""Sessions on a CUDA device: no mode, no read, a launch budget, refusals, streams, captures again and again.

Where a test asks for ``gpu`` alone it also runs on a device that computes nothing (tests/fake_cuda).
"""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

import mezzo
from mezzo import MixedPrecision, UnsupportedError, optim
from mezzo.cast.device import decide
from mezzo.step.executors import choose
from mezzo.step.executors.portable import Portable

from ..fake_cuda.case_sessions import CASES, FIRST, OTHERS, Trained
from ..gpus import FAKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
POLICIES = POLICIES[1:3] if FAKE else POLICIES
#: At most so many launches in one ``amp.step()`` of mezzo's AdamW, whatever the number of tensors; FP16 has a scale.
LAUNCHES = {"float16": 10, "bfloat16": 9}


class Loop:
    """A model on the device with its session, and the body of its training loop."""

    def __init__(self, policy="O2,dtype=bfloat16", make=optim.AdamW, layers=1, dropout=0.1):
        with torch.device("cuda"):
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(layers)]
            self.model = nn.Sequential(*blocks, nn.Dropout(dropout), nn.Linear(64, 16))
            self.batch = torch.randn(32, 64), torch.randint(16, (32,))
        self.amp = MixedPrecision(self.model, make(self.model.parameters(), lr=1e-3), policy, max_grad_norm=1.0)

    def backward(self, x, y):
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss)
        return loss.detach()

    def train_step(self, x, y):
        loss = self.backward(x, y)
        skipped = self.amp.step().skipped
        self.amp.zero_grad()
        return loss, skipped


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_has_no_mode_and_asks_nothing_of_the_cpu(gpu, monkeypatch, policy):
    asked, modes = [], []
    plain = decide.probe
    monkeypatch.setattr(
        decide, "probe", lambda device_type="cpu", **kw: asked.append(device_type) or plain(device_type, **kw)
    )
    loop = Loop(policy)
    for module in loop.model:
        module.register_forward_hook(lambda *_: modes.append([*_get_current_function_mode_stack()]))
    for _ in range(2):
        loop.train_step(*loop.batch)
    region = loop.amp.autocast()
    assert (region.device_types, region.has_differences) == (("cuda",), False)
    assert modes
    assert not any(modes)
    assert "cpu" not in asked


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_launches_as_many_kernels_for_two_hundred_tensors_as_for_few(gpu, policy):
    counts = []
    for layers in (1, 50 if gpu.computes else 3):
        loop = Loop(policy, layers=layers)
        for _ in range(FIRST):
            loop.train_step(*loop.batch)
        loop.backward(*loop.batch)
        with gpu.kernels() as names:
            loop.amp.step()
        loop.amp.zero_grad()
        counts.append(len(names))
    assert counts[0] == counts[1]
    assert 3 <= counts[0] <= LAUNCHES[policy.partition("dtype=")[2]], names


def test_torch_s_own_graph_around_a_step_is_refused(gpu):
    loop = Loop()
    for _ in range(2):
        loop.backward(*loop.batch)
        with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured by torch\.cuda\.graph.*mezzo\.capture"):  # noqa: SIM117
            with gpu.captured():
                loop.amp.step()
        loop.amp.step()  # as if nothing had been tried
        loop.amp.zero_grad()
    assert loop.amp.stats().steps == 2


def never_waits(gpu, policy, optimizer, way):
    trained = Trained(policy, optimizer, way)
    for _ in range(FIRST):
        trained.step()
    with gpu.unread():
        for _ in range(40):
            trained.step()
    assert trained.amp.stats().steps == FIRST + 40


@pytest.mark.parametrize("policy, optimizer, way", CASES, ids=map(" / ".join, CASES))
def test_forty_steps_wait_for_nothing(computing, policy, optimizer, way):
    never_waits(computing, policy, optimizer, way)


@pytest.mark.slow
@pytest.mark.parametrize("policy, optimizer, way", OTHERS, ids=map(" / ".join, OTHERS))
def test_nor_do_those_of_any_other_combination(computing, policy, optimizer, way):
    never_waits(computing, policy, optimizer, way)


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine where Triton cannot build what launches its kernels."""
    from mezzo.step.executors.triton import Triton

    def refuse(self, device):
        raise UnsupportedError("Triton cannot launch an optimizer kernel here", write="apt install gcc")

    monkeypatch.setattr(Triton, "require", refuse)
    choose._working.cache_clear()
    yield
    choose._working.cache_clear()


@pytest.mark.parametrize("policy", ["O2,dtype=float16"] if FAKE else ["O2,dtype=bfloat16", "O2,dtype=float16"])
def test_without_a_compiler_steps_go_block_by_block_and_wait_for_nothing(gpu, no_compiler, caplog, policy):
    loop = Loop(policy, dropout=0.0)
    assert isinstance(choose.executor_for(torch.device("cuda", 0)), Portable)
    assert "run block by block" in caplog.text
    losses = [loop.train_step(*loop.batch)[0] for _ in range(FIRST)]
    with gpu.unread():
        losses += [loop.train_step(*loop.batch)[0] for _ in range(20 if gpu.computes else 5)]
    if gpu.computes:
        assert losses[-1] < losses[0]


# On a GPU that computes ----------------------------------------------------------------------------------------


def test_thirty_captures_leave_no_memory(computing):
    loop, seen = Loop(), []
    loop.train_step(*loop.batch)
    for _ in range(30):
        captured = mezzo.capture(loop.train_step, loop.amp)
        for _ in range(5):
            captured(*loop.batch)
        del captured
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[-1][0] - seen[5][0] < 1 << 20  # tables that a graph reads are kept, some KiB each
    assert seen[-1][1] == seen[5][1]


def test_captures_while_another_thread_pins_memory(computing):
    loop, stop, failed = Loop(), threading.Event(), []

    def pin():
        try:
            while not stop.is_set():
                torch.empty(1 << 20).pin_memory()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(5):
            captured = mezzo.capture(loop.train_step, loop.amp)
            assert all(torch.isfinite(captured(*loop.batch)[0]) for _ in range(5))
    finally:
        stop.set()
        thread.join()
    assert failed == []


def test_steps_on_another_stream_are_accounted_for_on_this_one(computing):
    loop, stream = Loop(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            loop.train_step(*loop.batch)
    assert loop.amp.stats().steps == 20
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.isfinite(loop.train_step(*loop.batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_models_train_as_eager_ones(computing, policy):
    eager, compiled = (Loop(policy, dropout=0.0) for _ in range(2))
    compiled.model.load_state_dict(eager.model.state_dict())
    compiled.batch = eager.batch
    compiled.model.compile(fullgraph=policy.startswith("O1"))
    losses = [torch.stack([loop.train_step(*loop.batch)[0] for _ in range(20)]) for loop in (eager, compiled)]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    assert compiled.amp.stats().skipped <= eager.amp.stats().skipped + 1


@pytest.mark.slow
def test_models_that_torch_captures_train_the_same_in_a_capture(computing):
    runs = []
    for captures in (False, True):
        torch.manual_seed(0)
        loop = Loop(dropout=0.0)
        loop.batch = torch.ones(32, 64, device="cuda").cumsum(1).sin(), torch.arange(32, device="cuda") % 16
        loop.model.compile(mode="reduce-overhead")
        step, losses = loop.train_step, []
        for number in range(20):
            torch.compiler.cudagraph_mark_step_begin()
            if number == 8 and captures:
                step = mezzo.capture(loop.train_step, loop.amp)
            losses.append(step(*loop.batch)[0].clone())
        runs.append(torch.stack(losses))
    torch.testing.assert_close(*runs)
    assert runs[0][-1] < runs[0][0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("make", [optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
def test_an_overflow_on_one_of_two_gpus_skips_the_step_on_both(computing, make):
    torch.manual_seed(0)
    halves = [nn.Linear(64, 64).to(f"cuda:{number}") for number in range(2)]
    model = nn.ModuleList(halves)
    amp = MixedPrecision(model, make(model.parameters(), lr=1e-3), "O1,dtype=float16", max_grad_norm=1.0)

    def train_step(spoilt):
        with amp.autocast():
            hidden = halves[0](torch.ones(4, 64, device="cuda:0"))
            loss = halves[1](hidden.to("cuda:1")).float().square().mean()
        amp.backward(loss)
        if spoilt is not None:
            halves[spoilt].weight.grad[0, 0] = float("inf")
        amp.step()
        amp.zero_grad()

    for spoilt in (None, 0, 1, None):
        before = [param.detach().clone() for param in model.parameters()]
        train_step(spoilt)
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(moved) is (spoilt is None)
    assert (amp.stats().steps, amp.stats().skipped) == (4, 2)
