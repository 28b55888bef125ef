"""What is Triton's own: launches, tables in device memory, captured graphs; interpreted on the CPU, or on a GPU.

That its kernels compute the pure function is for ``test_contract.py`` to say.
"""

import dataclasses
import importlib
import math
import subprocess

import numpy
import pytest
import torch

from mezzo import UnsupportedError
from mezzo.emit.tracing import NoKernel
from mezzo.step.executors import triton as tables
from mezzo.step.executors import triton_source as source_of
from mezzo.step.executors.triton import Triton
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.update import rule
from mezzo.step.verdict import judge

from ...support.refusals import refused
from .implementations import (
    BF16,
    FP16,
    FP32,
    INT8,
    SHAPES,
    STATES,
    advance,
    assert_same,
    bucket_of,
    clones,
    copied,
    gradients_of,
    pure_step,
    same_bits,
    tensors_of,
    whole_step,
)

triton = pytest.importorskip("triton", reason="needs Triton")


@pytest.fixture
def uploads(monkeypatch):
    uploaded, upload = [], tables._uploaded
    monkeypatch.setattr(tables, "_uploaded", lambda table, device: uploaded.append(table) or upload(table, device))
    return uploaded


@pytest.mark.usefixtures("interpreted")
def test_what_a_gpu_finds_beyond_a_tensor_is_of_no_group(monkeypatch):
    """A masked load leaves anything there; Triton's interpreter leaves zeros, which would be seen nowhere."""
    inside = importlib.import_module("triton.runtime.interpreter")
    load = inside.InterpreterBuilder.create_masked_load

    def beyond(builder, ptrs, mask, other, *options):
        element_type = ptrs.get_element_ty()
        full = numpy.zeros_like(ptrs.data, dtype=inside._get_np_dtype(element_type))
        full.view(numpy.uint8)[...] = 0x4D  # large numbers in every format
        return load(builder, ptrs, mask, inside.TensorHandle(full, element_type) if other is None else other, *options)

    monkeypatch.setattr(inside.InterpreterBuilder, "create_masked_load", beyond)
    mine = bucket_of("adamw", SPLIT, BF16, [(45,), (3, 5)], state_dtype=INT8)
    theirs, executor = copied(mine), Triton()
    gradients = gradients_of(mine, 0, BF16, scale=1e-3)
    pure_step(theirs, gradients, whole_step(executor, mine, executor.update_of(mine), gradients))
    assert_same(mine, theirs, True)


@pytest.mark.usefixtures("interpreted")
def test_while_a_graph_is_captured_moved_gradients_come_from_a_reserve(monkeypatch, uploads):
    """As if captured: uploads are recorded, and the tables that a graph will read are kept."""
    monkeypatch.setattr(tables, "RESERVE", 4)
    bucket, executor = bucket_of("adamw", SPLIT, BF16, [(20,), (3, 5)]), Triton()
    update = executor.update_of(bucket)
    gradients = gradients_of(bucket, 0, BF16)
    whole_step(executor, bucket, update, gradients)
    uploads.clear()
    capturing = True
    monkeypatch.setattr(tables, "_is_capturing", lambda device: capturing)
    whole_step(executor, bucket, update, gradients)
    kept = list(executor._retained)
    assert sum(entry is update.addresses.table for entry in kept) == 2  # both passes read it
    assert any(entry[0] is update.table for entry in kept if isinstance(entry, tuple))
    theirs = copied(bucket)
    elsewhere = [gradient.clone() for gradient in gradients]
    verdict = whole_step(executor, bucket, update, elsewhere)
    pure_step(theirs, elsewhere, verdict)
    assert_same(bucket, theirs, True)
    assert not uploads
    addresses = torch.tensor([gradient.data_ptr() for gradient in elsewhere])
    fresh = [pair for pair in executor._retained[len(kept) :] if len(pair) == 2 and torch.is_tensor(pair[1])]
    recorded = [pair for pair in fresh if all(torch.equal(tensor, addresses) for tensor in pair)]
    assert len(recorded) == 2  # one for each pass, in host and device memory
    for _ in range(tables.RESERVE - 1):
        whole_step(executor, bucket, update, [gradient.clone() for gradient in gradients_of(bucket, 1, BF16)])
    with pytest.raises(
        UnsupportedError, match=r"(?s)cannot be captured.*had new addresses 4 times.*write  at most 4 steps in a graph"
    ):
        whole_step(executor, bucket, update, [gradient.clone() for gradient in gradients])
    capturing = False
    whole_step(executor, bucket, update, elsewhere)  # what was recorded has not happened: uploaded after all
    assert len(uploads) == 1


@pytest.mark.usefixtures("interpreted")
def test_buckets_of_any_dtype_find_their_gradients_in_the_table_of_pass_1(uploads):
    executor = Triton()
    buckets = [bucket_of("adamw", SPLIT, dtype, [(20,), (3, 5)]) for dtype in (BF16, FP16)]
    theirs = [copied(bucket) for bucket in buckets]
    updates = [executor.update_of(bucket) for bucket in buckets]
    kept = []
    for number in range(2):
        uploads.clear()
        pairs = [gradients_of(bucket, number, bucket.weights[0].dtype) for bucket in buckets]
        mixed = [gradient for pair in zip(*pairs, strict=True) for gradient in pair]
        kept += mixed  # so that the next lie elsewhere
        norms = executor.norms(mixed)
        expected = torch.stack([torch.linalg.vector_norm(gradient.double()).float() for gradient in mixed])
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0.0)
        verdict = judge(norms, torch.tensor(1 / 1024))
        for bucket, update, their, gradients in zip(buckets, updates, theirs, pairs, strict=True):
            advance([bucket.step], verdict.found_inf)
            update(gradients, verdict)
            pure_step(their, gradients, verdict)
            assert_same(bucket, their, True)
    assert len(uploads) == 1


def alike_steps(executor, bucket, update, count, alive):
    """Steps with gradients that lie elsewhere each time, since all of them stay in the list of those alive."""
    sets = [gradients_of(bucket, number, BF16) for number in range(count)]
    alive += sets
    for gradients in sets:
        whole_step(executor, bucket, update, gradients)


@pytest.mark.usefixtures("interpreted")
def test_the_reserve_is_filled_again_by_an_uncaptured_step(monkeypatch):
    """Three alike steps in a graph, after one rehearsal of them; then a second graph, after another one."""
    monkeypatch.setattr(tables, "RESERVE", 4)
    bucket, executor = bucket_of("lion", SPLIT, BF16, [(20,)]), Triton()
    update, theirs, alive = executor.update_of(bucket), copied(bucket), []
    for capturing in (False, True, False, True):
        monkeypatch.setattr(tables, "_is_capturing", lambda device, capturing=capturing: capturing)
        alike_steps(executor, bucket, update, 3, alive)
    assert len(executor._retained) >= 4 * 3
    with pytest.raises(UnsupportedError, match=r"(?s)had new addresses 4 times.*at most 4 steps in a graph"):
        alike_steps(executor, copied(bucket), lambda gradients, verdict: None, 2, alive)
    monkeypatch.setattr(tables, "_is_capturing", lambda device: False)
    other = Triton()
    alike = other.update_of(theirs)
    for _ in range(4):
        alike_steps(other, theirs, alike, 3, alive)
    assert bucket.step == 12
    assert same_bits(tensors_of(bucket), tensors_of(theirs))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("default, kept", [("meta", SPLIT), (torch.float64, PLAIN)], ids=str)
def test_torch_s_defaults_change_nothing(monkeypatch, default, kept):
    """Not a default device, on which no table could be pinned; and not a default dtype."""
    gaps = torch.zeros(6, 10, dtype=BF16)[:, :5]  # updated by torch's operations
    mine = bucket_of("lion", kept, BF16, [(1101,), (3, 5)], state_dtype=BF16)
    extra = torch.zeros(6, 5, dtype=torch.int16) if kept.extra else None
    mine = dataclasses.replace(
        mine,
        weights=[*mine.weights, gaps],
        extras=[*mine.extras, extra],
        states=[*mine.states, (torch.zeros(6, 5, dtype=BF16),)],
    )
    theirs, executor = copied(mine), Triton()
    gradients, inverse = gradients_of(mine, 0, BF16), torch.tensor(1 / 1024)
    verdict = judge(executor.norms(gradients), inverse, max_norm=1.0)
    advance([mine.step], verdict.found_inf)
    pure_step(theirs, gradients, verdict)
    monkeypatch.setattr(source_of, "update_source", source_of.update_source.__wrapped__)  # traced anew
    before = torch.get_default_dtype()
    try:
        if default != "meta":
            torch.set_default_dtype(default)
        with torch.device("meta" if default == "meta" else "cpu"):
            executor = Triton()
            norms = executor.norms(gradients)
            assert norms.dtype == executor.norms([]).dtype == FP32
            assert executor.norms([]).device == norms.device
            executor.update_of(mine)(gradients, verdict)
            executor.require(torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert same_bits([norms], [verdict.norms])
    assert_same(mine, theirs, True)


@pytest.mark.usefixtures("interpreted")
def test_tables_of_other_tensors_cannot_be_made_while_a_graph_is_captured(monkeypatch):
    bucket, executor = bucket_of("adamw", SPLIT, BF16, [(20,), (3, 5)]), Triton()
    update = executor.update_of(bucket)
    gradients = gradients_of(bucket, 0, BF16)
    verdict = whole_step(executor, bucket, update, gradients)
    before = clones(tensors_of(bucket))
    monkeypatch.setattr(tables, "_is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured.*gradients of other shapes, on cpu"):
        executor.norms(gradients[:1])
    with pytest.raises(UnsupportedError, match="weights or states that were given other memory"):
        update([gradient.float() for gradient in gradients], verdict)
    with pytest.raises(UnsupportedError, match="weights or states"):
        executor.update_of(bucket)(gradients, verdict)
    assert same_bits(tensors_of(bucket), before)


# Refusals -------------------------------------------------------------------------------------------------


def test_an_operation_without_triton_is_named():
    for wrong in (lambda w: w.erf(), lambda w: torch.add(w, w, alpha=2), lambda w: w.half() * 2):
        odd = dataclasses.replace(
            rule("sgd"),
            name="odd",
            apply=lambda gradient, weight, states, numbers, wrong=wrong: (wrong(gradient).float(), ()),
        )
        with pytest.raises(
            NoKernel, match=r"(?s)no Triton for aten\.(erf|add|_to_copy).*of torch \d.*write.*a line in"
        ):
            source_of.update_source(odd, PLAIN, (FP32, FP32))


CACHE = "/home/of nobody/.triton/cache"
COMPILER, FOLDER = "apt install gcc python3-dev", "TRITON_CACHE_DIR=, a folder that you can write to"
#: What raises in the launch that tries whether Triton works here: what is said of it, and what to write.
FAILURES = [
    (RuntimeError("\nFailed to find C compiler. Please\nmore"), "Failed to find C compiler", COMPILER),
    (subprocess.CalledProcessError(1, ["/bin/gcc", "main.c"]), "Command '['/bin/gcc', 'main.c']'", COMPILER),
    (AssertionError(), "AssertionError", COMPILER),
    (FileNotFoundError(2, "No such file", "/opt/cc"), "/opt/cc", COMPILER),
    (FileNotFoundError(2, "No such file", "/home/of nobody"), "/home/of nobody", FOLDER),
    (PermissionError(13, "Permission denied", f"{CACHE}/ab/c.so"), "Permission denied", FOLDER),
    (OSError(28, "No space left on device"), "No space left on device", FOLDER),
]


def test_triton_without_what_it_builds_launchers_with_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", CACHE)
    for failure, why, write in [*FAILURES, (torch.OutOfMemoryError(), None, None)]:

        def launch(*_, failure=failure, **__):
            raise failure

        monkeypatch.setattr(tables, "jitted", lambda *_, launch=launch: {(1,): launch})
        if why is None:  # memory that runs out says nothing of a compiler
            with pytest.raises(torch.OutOfMemoryError):
                Triton().require(torch.device("cpu"))
        else:
            with refused(UnsupportedError, "Triton cannot launch", "on cpu", why, f"write  {write}"):
                Triton().require(torch.device("cpu"))


@pytest.mark.parametrize("current, captured", [(1, True), (0, True), (1, False)])
def test_whether_a_graph_is_captured_is_asked_on_the_tensors_device(monkeypatch, current, captured):
    """As if there were two devices, of which another is the current one."""
    now, capturing = [current], {0: captured, 1: not captured}

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, now[0] = now[0], self.device.index

        def __exit__(self, *_):
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[now[0]])
    assert tables._is_capturing(torch.device("cuda", 0)) is captured
    assert now == [current]


# On a GPU alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_syncs():
    """Let a sync raise, once what happens only once has happened."""

    def begin():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("state", STATES)
def test_a_step_makes_no_host_sync(no_syncs, state):
    bucket, executor = bucket_of("adamw", SPLIT, BF16, SHAPES, state_dtype=state, device="cuda"), Triton()
    update, inverse = executor.update_of(bucket), torch.tensor(1 / 1024, device="cuda")
    sets = [gradients_of(bucket, number, BF16) for number in range(4)]  # each lies elsewhere
    for number in (0, 0, 1, 2, 3):
        verdict = judge(executor.norms(sets[number]), inverse, max_norm=1.0)
        advance([bucket.step], verdict.found_inf)
        update(sets[number], verdict)
        if number == 0:
            no_syncs()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where, state", [("as before", INT8), ("elsewhere", BF16)])
def test_a_captured_step_replays_what_the_eager_one_does(where, state):
    mine = bucket_of("adamw", SPLIT, BF16, SHAPES, state_dtype=state, device="cuda")
    theirs, executor, inverse = copied(mine), Triton(), torch.tensor(1 / 1024, device="cuda")
    updates = executor.update_of(mine), executor.update_of(theirs)

    def run(bucket, update, gradients):
        verdict = judge(executor.norms(gradients), inverse, max_norm=1.0)
        advance([bucket.step], verdict.found_inf)
        update(gradients, verdict)

    static = gradients_of(mine, 0, BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(mine, updates[0], static)
    torch.cuda.current_stream().wait_stream(stream)
    run(theirs, updates[1], static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gradients = static if where == "as before" else [gradient * 1 for gradient in static]
        run(mine, updates[0], gradients)
    for number in range(1, 5):
        fresh = gradients_of(mine, number, BF16)
        if number == 3:
            fresh[0][7] = math.inf
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        run(theirs, updates[1], fresh)  # which lie elsewhere each time
        assert same_bits(tensors_of(mine), tensors_of(theirs))
    run(mine, updates[0], static)
    run(theirs, updates[1], static)
    assert same_bits(tensors_of(mine), tensors_of(theirs))
    assert mine.step == 5
