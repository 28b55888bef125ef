"""Triton's kernels under its interpreter on the CPU, compiled for Hopper without one, and natively where there is one.

The oracle is the pure function, run with IEEE roots: torch's own are off by one unit in the last place on some CPUs.
"""

import dataclasses
import functools
import importlib
import math
import re
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import UnsupportedError
from mezzo.optim import optimizer
from mezzo.step.exchange import STORE, WIDEN
from mezzo.step.executors import choose, emit
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Compiled, Portable
from mezzo.step.executors.triton import launch as tables
from mezzo.step.executors.triton import source as source_of
from mezzo.step.executors.triton.launch import Triton
from mezzo.step.passes import judge
from mezzo.step.storage import PLAIN, READ, SPLIT
from mezzo.step.update import rule

from .test_contract import (
    BF16,
    FP16,
    FP32,
    advance,
    bucket_of,
    gradients_of,
    random,
    same_bits,
    take,
    tensors_of,
)
from .test_kernels import (
    CUDA,
    SHAPES,
    Ieee,
    assert_same_but_for_nan,
    made,
    moved,
    on,
    pure_step,
    step,
)

triton = pytest.importorskip("triton", reason="needs Triton")


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=CUDA)])
def device(request):
    """Where kernels run: interpreted on the CPU, or compiled."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels launched."""
    found = []

    def counted(run):
        @functools.wraps(run)
        def launch(kernel, *args, **kwargs):
            found.append(kernel.fn.__name__)
            return run(kernel, *args, **kwargs)

        return launch

    for kind in (triton.runtime.jit.JITFunction, triton.runtime.interpreter.InterpretedFunction):
        monkeypatch.setattr(kind, "run", counted(kind.run))
    return found


@pytest.fixture
def uploads(monkeypatch):
    found, upload = [], tables._uploaded
    monkeypatch.setattr(tables, "_uploaded", lambda table, device: found.append(table) or upload(table, device))
    return found


@pytest.mark.parametrize("count", [1, 9])
def test_launches_do_not_depend_on_the_number_of_tensors(device, launches, count):
    bucket, executor = made(device, "adamw", SPLIT, BF16, [(20,)] * count), Triton()
    update = executor.update_of(bucket)
    step(executor, bucket, update, on(device, gradients_of(bucket, 0, BF16)))
    assert launches == ["squares", "roots", "scalars", "adamw_split"]
    launches.clear()
    mixed = [gradient.to((BF16, FP32)[i % 2]) for i, gradient in enumerate(gradients_of(bucket, 1, BF16))]
    step(executor, bucket, update, on(device, mixed))
    assert launches == ["squares", *["squares"] * (count > 1), "roots", "scalars", *["adamw_split"] * min(count, 2)]


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0] if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default) else NotImplemented


def test_tensors_without_memory_are_refused_before_any_launch(device, launches):
    bucket, executor = made(device, "adamw", SPLIT, BF16, [(20,), (20,)]), Triton()
    update = executor.update_of(bucket)
    gradients = [gradients_of(bucket, 0, BF16)[0].to(device), Wrapped(torch.ones(20, dtype=BF16, device=device))]
    verdict = judge(torch.ones(2, device=device), torch.ones((), device=device))
    before = [tensor.clone() for tensor in tensors_of(bucket)]
    for read in (lambda: executor.norms(gradients), lambda: update(gradients, verdict)):
        with pytest.raises(UnsupportedError, match=r"cannot find a tensor\n  where  Wrapped of shape \(20,\)"):
            read()
    assert launches == []
    assert same_bits(before, tensors_of(bucket))


class Kernels(TorchDispatchMode):
    """Counts operations that would launch something."""

    def __init__(self):
        self.count = 0
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.view)
        return func(*args, **(kwargs or {}))


def test_torch_s_operations_around_them_do_not_either(device):
    counts = []
    for number in (1, 6):
        bucket, executor = made(device, "adamw", SPLIT, BF16, [(20,)] * number, state_dtype=BF16), Triton()
        update = executor.update_of(bucket)
        gradients = on(device, gradients_of(bucket, 0, BF16))
        step(executor, bucket, update, gradients)
        verdict = judge(executor.norms(gradients), torch.ones((), device=device))
        with Kernels() as kernels:
            executor.norms(gradients)
            update(gradients, verdict)
        counts.append(kernels.count)
    assert counts[0] == counts[1]


def test_addresses_are_uploaded_when_they_have_changed(device, uploads):
    bucket, executor = made(device, "adamw", SPLIT, BF16, SHAPES), Triton()
    update = executor.update_of(bucket)
    gradients = on(device, gradients_of(bucket, 0, BF16))
    step(executor, bucket, update, gradients)
    uploads.clear()
    for _ in range(3):
        step(executor, bucket, update, gradients)
    assert not uploads
    gradients[1] = gradients[1].clone()
    step(executor, bucket, update, gradients)
    assert len(uploads) == 1  # for both passes
    before = [weight.clone() for weight in bucket.weights]
    for weight in bucket.weights:
        weight.data = weight.data.clone()
    uploads.clear()
    step(executor, bucket, update, gradients)
    assert len(uploads) == 1  # the rows: chunks stay what they are
    assert not any(same_bits([one], [other]) for one, other in zip(before, bucket.weights, strict=True))


def test_old_tables_of_norms_are_forgotten(device):
    executor = Triton()
    for length in range(1, tables.REMEMBERED + 3):
        ones = [torch.ones(length, device=device)]
        assert executor.norms(ones).item() == pytest.approx(length**0.5)
    assert len(executor._known) == tables.REMEMBERED


@pytest.mark.usefixtures("interpreted")
def test_while_a_graph_is_captured_moved_gradients_come_from_a_reserve(monkeypatch, uploads):
    """As if captured: uploads are recorded, and the tables that a graph will read are kept."""
    monkeypatch.setattr(tables, "RESERVE", 4)
    bucket, executor = bucket_of("adamw", SPLIT, BF16, [(20,), (3, 5)]), Triton()
    update = executor.update_of(bucket)
    gradients = gradients_of(bucket, 0, BF16)
    take(executor, bucket, update, gradients)
    uploads.clear()
    capturing = True
    monkeypatch.setattr(tables, "_is_capturing", lambda device: capturing)
    take(executor, bucket, update, gradients)
    kept = list(executor._kept)
    assert sum(each is update.addresses.table for each in kept) == 2  # both passes read it
    assert any(each[0] is update.table for each in kept if isinstance(each, tuple))
    theirs = moved(bucket, "cpu")
    elsewhere = [gradient.clone() for gradient in gradients]
    verdict = take(executor, bucket, update, elsewhere)
    advance([theirs.step], verdict.found_inf)
    pure_step(theirs, elsewhere, verdict)
    assert_same_but_for_nan(bucket, theirs)
    assert not uploads
    addresses = torch.tensor([gradient.data_ptr() for gradient in elsewhere])
    fresh = [pair for pair in executor._kept[len(kept) :] if len(pair) == 2 and torch.is_tensor(pair[1])]
    recorded = [pair for pair in fresh if all(torch.equal(each, addresses) for each in pair)]
    assert len(recorded) == 2  # one for each pass, in host and device memory
    for _ in range(tables.RESERVE - 1):
        take(executor, bucket, update, [gradient.clone() for gradient in gradients_of(bucket, 1, BF16)])
    with pytest.raises(
        UnsupportedError, match=r"(?s)cannot be captured.*had new addresses 4 times.*write  at most 4 steps in a graph"
    ):
        take(executor, bucket, update, [gradient.clone() for gradient in gradients])
    capturing = False
    take(executor, bucket, update, elsewhere)  # what was recorded has not happened: uploaded after all
    assert len(uploads) == 1


@pytest.mark.usefixtures("interpreted")
def test_buckets_of_any_dtype_find_their_gradients_in_the_table_of_pass_1(uploads):
    executor = Triton()
    buckets = [bucket_of("adamw", SPLIT, dtype, [(20,), (3, 5)]) for dtype in (BF16, FP16)]
    theirs = [moved(bucket, "cpu") for bucket in buckets]
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
            advance([bucket.step, their.step], verdict.found_inf)
            update(gradients, verdict)
            pure_step(their, gradients, verdict)
            assert_same_but_for_nan(bucket, their)
    assert len(uploads) == 1


def alike_steps(executor, bucket, update, count, alive):
    """Steps with gradients that lie elsewhere each time, since all of them stay in the list of those alive."""
    sets = [gradients_of(bucket, number, BF16) for number in range(count)]
    alive += sets
    for gradients in sets:
        take(executor, bucket, update, gradients)


@pytest.mark.usefixtures("interpreted")
def test_the_reserve_is_filled_again_by_an_uncaptured_step(monkeypatch):
    """Five alike steps in a graph, after one rehearsal of them; then a second graph, after another one."""
    monkeypatch.setattr(tables, "RESERVE", 6)
    bucket, executor = bucket_of("adamw", SPLIT, BF16, [(20,), (3, 5)]), Triton()
    update, theirs, alive = executor.update_of(bucket), moved(bucket, "cpu"), []
    for capturing in (False, True, False, True):
        monkeypatch.setattr(tables, "_is_capturing", lambda device, capturing=capturing: capturing)
        alike_steps(executor, bucket, update, 5, alive)
    assert len(executor._kept) > 4 * 5
    with pytest.raises(UnsupportedError, match=r"(?s)had new addresses 6 times.*at most 6 steps in a graph"):
        alike_steps(executor, moved(bucket, "cpu"), lambda gradients, verdict: None, 2, alive)
    monkeypatch.setattr(tables, "_is_capturing", lambda device: False)
    other = Triton()
    alike = other.update_of(theirs)
    for _ in range(4):
        alike_steps(other, theirs, alike, 5, alive)
    assert bucket.step == 20
    assert same_bits(tensors_of(bucket), tensors_of(theirs))


def test_the_reserve_is_bounded(device):
    addresses, ones = tables._Addresses(3, device, [], {}), [torch.ones(2, device=device) for _ in range(3)]
    for _ in range(3):
        addresses.of(ones)
        assert len(addresses.reserve) == tables.RESERVE
    assert all(host.shape == table.shape == (3,) for host, table in addresses.reserve)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kept", [SPLIT, PLAIN], ids=lambda kept: kept.name)
@pytest.mark.parametrize("default", ["meta", torch.bfloat16, torch.float64], ids=str)
def test_torch_s_defaults_change_nothing(monkeypatch, default, kept):
    """Not a default device, on which no table could be pinned; and not a default dtype."""
    gaps = torch.zeros(6, 10, dtype=BF16)[:, :5]  # updated by torch's operations
    shapes = [(2500,), (3, 5)]
    mine = bucket_of("lion", kept, BF16, shapes, state_dtype=BF16)
    extra = torch.zeros(6, 5, dtype=torch.int16) if kept.extra else None
    mine = dataclasses.replace(
        mine,
        weights=[*mine.weights, gaps],
        extras=[*mine.extras, extra],
        states=[*mine.states, (torch.zeros(6, 5, dtype=BF16),)],
    )
    theirs, executor = moved(mine, "cpu"), Triton()
    gradients, inverse = gradients_of(mine, 0, BF16), torch.tensor(1 / 1024)
    verdict = judge(executor.norms(gradients), inverse, max_norm=1.0)
    advance([mine.step, theirs.step], verdict.found_inf)
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
    assert_same_but_for_nan(mine, theirs)


@pytest.mark.usefixtures("interpreted")
def test_tables_of_other_tensors_cannot_be_made_while_a_graph_is_captured(monkeypatch):
    bucket, executor = bucket_of("adamw", SPLIT, BF16, [(20,), (3, 5)]), Triton()
    update = executor.update_of(bucket)
    gradients = gradients_of(bucket, 0, BF16)
    verdict = take(executor, bucket, update, gradients)
    before = [tensor.clone() for tensor in tensors_of(bucket)]
    monkeypatch.setattr(tables, "_is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured.*gradients of other shapes, on cpu"):
        executor.norms(gradients[:1])
    with pytest.raises(UnsupportedError, match="weights or states that were given other memory"):
        update([gradient.float() for gradient in gradients], verdict)
    with pytest.raises(UnsupportedError, match="weights or states"):
        executor.update_of(bucket)(gradients, verdict)
    assert same_bits(tensors_of(bucket), before)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 40), torch.nn.Linear(40, 30)


def test_an_optimizer_takes_a_launch_for_each_group(device, launches, monkeypatch):
    torch.manual_seed(0)
    nets = [Net().to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    kinds = []
    for net, executor in zip(nets, (Triton, Portable), strict=True):
        monkeypatch.setattr(optimizer, "executor_for", lambda *_, executor=executor: executor())
        groups = [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.5}]
        kinds.append(mezzo.optim.AdamW(groups, lr=0.1, state_dtype="bfloat16"))
        for number in range(3):
            for seed, param in enumerate(net.parameters()):
                param.grad = random(param.shape, 10 * number + seed).to(device)
            with Ieee():
                kinds[-1].step()
    assert launches == ["scalars", "adamw_plain"] * 2 * 3
    assert same_bits(nets[0].state_dict().values(), nets[1].state_dict().values())
    saved = [kind.state_dict()["state"] for kind in kinds]
    for one, other in zip(saved[0].values(), saved[1].values(), strict=True):
        assert same_bits(one.values(), other.values())


# Source ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept, stores", [(SPLIT, 2), (PLAIN, 1), (READ, 0)], ids=lambda kept: str(kept))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_storage_can_be_written_in_triton(kept, stores, dtype):
    source = source_of.update_source(rule("lion"), kept, (dtype, dtype, *[torch.int16] * kept.extra, FP32))
    compile(source, "", "exec")
    assert source.count("tl.store(") == stores + 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_is_not_used_is_not_loaded(dtype):
    widening = source_of.update_source(WIDEN, READ, (dtype, dtype, torch.int16, FP32, FP32))
    assert re.findall(r"(\w+) = tl.load\(\1_at", widening) == ["gradient", "part0", "part1"]
    assert re.findall(r"tl.store\((\w+)_at", widening) == ["value_state", "gradient_state"]
    storing = source_of.update_source(STORE, SPLIT, (FP32, dtype, torch.int16))
    assert re.findall(r"(\w+) = tl.load\(\1_at", storing) == ["gradient"]
    assert re.findall(r"tl.store\((\w+)_at", storing) == ["part0", "part1"]


def test_kernels_are_named_for_profilers():
    assert emit.update_name(rule("adam", "maximize", "amsgrad"), SPLIT) == "adam_amsgrad_maximize_split"


@pytest.mark.parametrize("wrong", [lambda w: w.erf(), lambda w: torch.add(w, w, alpha=2), lambda w: w.half() * 2])
def test_an_operation_without_triton_is_refused_by_name(wrong):
    odd = dataclasses.replace(
        rule("sgd"), name="odd", apply=lambda gradient, weight, states, numbers: (wrong(gradient).float(), ())
    )
    with pytest.raises(UnsupportedError, match=r"(?s)no Triton for aten\.(erf|add|mul).*rule odd.*write  a line in"):
        source_of.update_source(odd, PLAIN, (FP32, FP32))


UPDATED = {"addresses": "*i64", "rows": "*i64", "chunks": "*i32", "step": "*i64", "found_inf": "*u1"}
UPDATED |= {"scalars": "*fp32", "multiplier": "*fp32", "start": "i32"}


def native(kernel, arguments, **constants):
    """Compile for sm_90, which takes no GPU."""
    compiler, backends = (importlib.import_module(f"triton.{each}") for each in ("compiler", "backends.compiler"))
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = backends.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=dict(tables._OPTIONS)).asm["ptx"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
def test_hopper_code_that_rounds_at_random_keeps_subnormals(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source = source_of.update_source(rule("lion"), PLAIN, (BF16, BF16, BF16))
    code = native(source_of.jitted(source, "lion_plain"), UPDATED, BLOCK=tables.BLOCK)
    assert not any(each in code for each in ("fma.", "mad.f", "approx", ".ftz", "div.full"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_hopper_code_moves_vectors_and_rounds_as_ieee_says(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source = source_of.update_source(rule("adamw"), SPLIT, (dtype, dtype, torch.int16, FP32, FP32))
    code = native(source_of.jitted(source, "adamw_split"), UPDATED, BLOCK=tables.BLOCK)
    whole = code.split("bra.uni")[0]  # blocks without a mask
    counts = {each: whole.count(each) for each in ("ld.global.v4.b32", "ld.global.v2.b32", "st.global.v4.b32")}
    assert counts == {"ld.global.v4.b32": 2, "ld.global.v2.b32": 3, "st.global.v4.b32": 2}
    assert "div.rn.f32" in code
    assert "sqrt.rn.f32" in code
    assert not any(each in code for each in ("fma.", "mad.f", "approx", ".ftz", "div.full"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
def test_hopper_code_of_pass_1_moves_vectors(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    squares, roots = (source_of.jitted(source_of.norm_source(), name) for name in ("squares", "roots"))
    arguments = {"addresses": "*i64", "lengths": "*i64", "chunks": "*i32", "partials": "*fp32"}
    sizes = {"CHUNK": tables.CHUNK, "BLOCK": tables.NORM_BLOCK}
    for dtype in (BF16, FP32):
        constants = {"TYPE": source_of.element_type(dtype), "BITS": dtype == BF16, **sizes}
        assert "ld.global.v4.b32" in native(squares, arguments, **constants)
    arguments = {"partials": "*fp32", "spans": "*i32", "norms": "*fp32"}
    assert "sqrt.rn.f32" in native(roots, arguments, BLOCK=tables.ROOT_BLOCK)


# Which executor, and what it costs to import ----------------------------------------------------------------


@pytest.mark.parametrize("built, found, triton_s", [("13.0", True, True), ("13.0", False, False), (None, True, False)])
def test_cuda_devices_take_triton_where_it_is(monkeypatch, built, found, triton_s):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: found or None)
    monkeypatch.setattr(Triton, "require", lambda self, device: None)
    monkeypatch.setattr(Compiled, "require", lambda self, device: None)
    monkeypatch.setattr(tables, "_is_capturing", lambda device: False)
    choose.has_triton.cache_clear()
    choose._working.cache_clear()
    try:
        assert isinstance(choose.executor_for(torch.device("cuda")), Triton if triton_s else Compiled)
        assert isinstance(choose.executor_for(torch.device("cpu")), Cpp)
        assert isinstance(choose.executor_for(torch.device("xpu")), Compiled)
    finally:
        choose.has_triton.cache_clear()
        choose._working.cache_clear()


def test_triton_is_tried_where_it_is_to_run(device, launches):
    executor = Triton()
    executor.require(device)
    assert launches == ["squares", "roots"]
    assert not executor._known


CACHE = "/home/of nobody/.triton/cache"
COMPILER, FOLDER = r"apt install gcc python3-dev", r"TRITON_CACHE_DIR=, a folder that you can write to"
FAILURES = {
    "no compiler": (RuntimeError("\nFailed to find C compiler. Please\nmore"), "Failed to find C compiler", COMPILER),
    "no Python.h": (
        subprocess.CalledProcessError(1, ["/bin/gcc", "main.c"]), r"Command '\['/bin/gcc', 'main.c'\]'", COMPILER
    ),
    "no libcuda": (AssertionError(), "AssertionError", COMPILER),
    "CC is not there": (FileNotFoundError(2, "No such file", "/opt/cc"), "No such file.*/opt/cc", COMPILER),
    "no home": (FileNotFoundError(2, "No such file", "/home/of nobody"), "No such file.*/home/of nobody", FOLDER),
    "read-only": (PermissionError(13, "Permission denied", f"{CACHE}/ab/c.so"), "Permission denied", FOLDER),
    "full": (OSError(28, "No space left on device"), "No space left on device", FOLDER),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_triton_without_what_it_builds_launchers_with_is_refused(monkeypatch, case):
    failure, why, write = FAILURES[case]

    def launch(*_, **__):
        raise failure

    monkeypatch.setenv("TRITON_CACHE_DIR", CACHE)
    monkeypatch.setattr(source_of, "jitted", lambda *_: {(1,): launch})
    with pytest.raises(
        UnsupportedError, match=rf"(?s)Triton cannot launch.*on cpu.*why    [^\n]*{why}.*write  {write}"
    ):
        Triton().require(torch.device("cpu"))


def test_memory_that_runs_out_does_not_count_as_a_missing_compiler(monkeypatch):
    def launch(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(source_of, "jitted", lambda *_: {(1,): launch})
    with pytest.raises(torch.OutOfMemoryError):
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
@pytest.mark.parametrize("state", [FP32, BF16])
def test_a_step_makes_no_host_sync(no_syncs, state):
    bucket, executor = made("cuda", "adamw", SPLIT, BF16, SHAPES, state_dtype=state), Triton()
    update, inverse = executor.update_of(bucket), torch.tensor(1 / 1024, device="cuda")
    sets = [on("cuda", gradients_of(bucket, number, BF16)) for number in range(4)]  # each lies elsewhere
    for number in (0, 0, 1, 2, 3):
        verdict = judge(executor.norms(sets[number]), inverse, max_norm=1.0)
        advance([bucket.step], verdict.found_inf)
        update(sets[number], verdict)
        if number == 0:
            no_syncs()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_counts_the_same_kernels_for_one_tensor_and_for_many():
    counts = []
    for number in (1, 200):
        bucket, executor = made("cuda", "adamw", SPLIT, BF16, [(3000,)] * number), Triton()
        update, gradients = executor.update_of(bucket), on("cuda", gradients_of(bucket, 0, BF16))
        step(executor, bucket, update, gradients)
        verdict = judge(executor.norms(gradients), torch.ones((), device="cuda"))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            executor.norms(gradients)
            update(gradients, verdict)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts.append((len(names), [names.count(each) for each in ("squares", "roots", "adamw_split")]))
    assert counts[0] == counts[1]
    assert counts[0][1] == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["as before", "elsewhere"])
def test_a_captured_step_replays_what_the_eager_one_does(where):
    mine = made("cuda", "adamw", SPLIT, BF16, SHAPES, state_dtype=BF16)
    theirs, executor, inverse = moved(mine, "cuda"), Triton(), torch.tensor(1 / 1024, device="cuda")
    updates = executor.update_of(mine), executor.update_of(theirs)

    def run(bucket, update, gradients):
        verdict = judge(executor.norms(gradients), inverse, max_norm=1.0)
        advance([bucket.step], verdict.found_inf)
        update(gradients, verdict)

    static = on("cuda", gradients_of(mine, 0, BF16))
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
        fresh = on("cuda", gradients_of(mine, number, BF16))
        if number == 3:
            fresh[0][7] = math.inf
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        run(theirs, updates[1], fresh)  # which lie elsewhere each time
        assert same_bits(on("cpu", tensors_of(mine)), on("cpu", tensors_of(theirs)))
    run(mine, updates[0], static)
    run(theirs, updates[1], static)
    assert same_bits(on("cpu", tensors_of(mine)), on("cpu", tensors_of(theirs)))
    assert mine.step == 5
