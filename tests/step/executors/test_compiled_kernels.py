"""What NVIDIA's compiler makes of the kernels, which takes no GPU: registers, spills, shared memory, widths of loads.

Registers decide how many threads a multiprocessor holds: its 65,536 hold six programs of eight warps whose threads take
40, five where they take 48, and memory is read at full speed only by many. Bounds are those of what is compiled now.
"""

import functools
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mezzo.launched import jitted
from mezzo.scale import LossScale, device_state
from mezzo.step import verdict
from mezzo.step.executors import cpp_source
from mezzo.step.executors import triton as shared
from mezzo.step.executors import triton as tables
from mezzo.step.executors import triton_source as source_of
from mezzo.step.executors.source import update_name
from mezzo.step.storage import PLAIN, READ, SPLIT
from mezzo.step.update import rule
from mezzo.weights.codec import STORE, WIDEN

from ...support.releases import FP32_NORM_REGISTERS, since

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux"),
    pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing"),  # of Triton's own, under Python 3.13
]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BF16, FP16, FP32, INT16 = torch.bfloat16, torch.float16, torch.float32, torch.int16
INT8, UINT8 = torch.int8, torch.uint8
UPDATED = {"addresses": "*i64", "rows": "*i64", "chunks": "*i32", "step": "*i64", "found_inf": "*u1"}
UPDATED |= {"scalars": "*fp32", "multiplier": "*fp32", "start": "i32"}


@dataclass(frozen=True)
class Facts:
    """Of one compiled kernel: per thread, and its loads by their width in bits, which takes a disassembler."""

    registers: int
    stack: int
    shared: int
    file: Path
    ptx: str

    @functools.cached_property
    def loads(self):
        loads = re.findall(
            r"\bLDG\.E(?:\.[A-Z_]+)*?(?:\.(64|128|U8|U16|S8|S16))?\b", output_of(TOOLS / "nvdisasm", self.file)
        )
        return Counter(int(re.sub(r"\D", "", load) or 32) for load in loads)


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def facts(kernel, arguments, capability, folder, options=tables._OPTIONS, **constants):
    compiler, backends = (importlib.import_module(f"triton.{module}") for module in ("compiler", "backends.compiler"))
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = backends.GPUTarget("cuda", capability, 32)
    file = folder / f"{len(os.listdir(folder))}.cubin"
    code = triton.compile(source, target=target, options=dict(options)).asm
    file.write_bytes(code["cubin"])
    ((registers, stack, shared),) = re.findall(
        r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+)", output_of(TOOLS / "cuobjdump", "-res-usage", file)
    )
    return Facts(int(registers), int(stack), int(shared), file, code["ptx"])


@pytest.fixture
def native(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(os.environ["XDG_CACHE_HOME"], "mezzo", "triton")))
    return functools.partial(facts, folder=tmp_path)


#: Rule, storage, dtypes of gradient, parts and states; most registers, as measured, in eights.
UPDATES = {
    "adamw split bf16": ("adamw", SPLIT, (BF16, BF16, INT16, FP32, FP32), 48),
    "adamw split fp16": ("adamw", SPLIT, (FP16, FP16, INT16, FP32, FP32), 48),
    "adamw split bf16, moments": ("adamw", SPLIT, (BF16, BF16, INT16, BF16, BF16), 72),
    "adamw split fp16, moments": ("adamw", SPLIT, (FP16, FP16, INT16, BF16, BF16), 72),
    "adamw split bf16, codes": ("adamw", SPLIT, (BF16, BF16, INT16, INT8, BF16, UINT8, BF16), 96),
    "adamw split bf16, fp32 gradients": ("adamw", SPLIT, (FP32, BF16, INT16, FP32, FP32), 48),
    "adamw fp32": ("adamw", PLAIN, (FP32, FP32, FP32, FP32), 40),
    "sgd split bf16": ("sgd", SPLIT, (BF16, BF16, INT16), 48),
    "lion split bf16": ("lion", SPLIT, (BF16, BF16, INT16, FP32), 32),
    "lion plain, moments": ("lion", PLAIN, (BF16, BF16, BF16), 48),
}
MOST_USED = [("adamw split bf16", 90), ("adamw split bf16, moments", 80), ("adamw split bf16, codes", 90)]


def assert_update_fits(native, name, capability):
    rule_name, storage, dtypes, most = UPDATES[name]
    chosen = rule(rule_name)
    kernel = jitted(source_of.update_source(chosen, storage, dtypes), update_name(chosen, storage))
    compiled = native(kernel, UPDATED, capability, options=tables.options_of(dtypes), BLOCK=tables.BLOCK)
    assert compiled.registers <= most
    # The largest of a group goes through memory that warps share.
    first, is_coded = 1 + storage.num_parts, INT8 in dtypes
    assert compiled.stack == 0
    assert compiled.shared <= 1024 * is_coded
    # The fast path: a load of 128 bits of each of the widest tensors, and one of 64 bits of those half as wide.
    of_elements = dtypes[:first] + dtypes[first :: 1 + is_coded]
    wide = sum(dtype.itemsize == max(other.itemsize for other in dtypes) for dtype in of_elements)
    assert compiled.loads.get(128, 0) == wide
    assert compiled.loads.get(64, 0) >= len(of_elements) - wide
    # Rounded as IEEE says, and subnormal numbers kept: what rounds at random takes their bits.
    assert not any(instruction in compiled.ptx for instruction in ("fma.", "mad.f", "approx", ".ftz", "div.full"))
    assert rule_name != "adamw" or ("div.rn.f32" in compiled.ptx and "sqrt.rn.f32" in compiled.ptx)


@pytest.mark.parametrize("name, capability", MOST_USED)
def test_an_update_leaves_room_for_many_threads_and_moves_vectors(native, name, capability):
    assert_update_fits(native, name, capability)


def under_way(compiled, elements, dtypes):
    """Bytes that a multiprocessor's threads ask for at once, as many as its 65,536 registers hold, in eights."""
    warps = tables.BLOCK // (32 * elements)
    programs = min(65_536 // (-(-compiled.registers // 8) * 8 * 32 * warps), 64 // warps)
    return programs * tables.BLOCK * sum(dtype.itemsize for dtype in dtypes)


def test_eight_elements_of_two_bytes_a_thread_are_more_bytes_under_way_than_four(native, monkeypatch):
    rule_name, storage, dtypes, _ = UPDATES["adamw split bf16, moments"]
    chosen, bytes_under_way = rule(rule_name), {}
    assert source_of.elements_of_a_thread(dtypes) == 8
    for elements in (4, 8):
        monkeypatch.setattr(source_of, "elements_of_a_thread", lambda _, elements=elements: elements)
        text, options = source_of.update_source.__wrapped__(chosen, storage, dtypes), tables.options_of(dtypes)
        kernel = jitted(text, update_name(chosen, storage))
        bytes_under_way[elements] = under_way(
            native(kernel, UPDATED, 90, options=options, BLOCK=tables.BLOCK), elements, dtypes
        )
    assert bytes_under_way[8] > bytes_under_way[4]


@pytest.mark.slow
def test_so_does_every_other(native):
    for name in UPDATES:
        for capability in (90, 80):
            assert_update_fits(native, name, capability)


@pytest.mark.parametrize("dtype, capability", [(BF16, 90), (FP32, 80)])
def test_pass_1_leaves_room_for_many_threads_and_moves_vectors(native, dtype, capability):
    squares = jitted(source_of.norm_source(), "squares")
    arguments = {"addresses": "*i64", "lengths": "*i64", "chunks": "*i32", "partials": "*fp32"}
    constants = {"TYPE": source_of.element_type(dtype), "BITS": dtype == BF16}
    compiled = native(squares, arguments, capability, CHUNK=tables.CHUNK, BLOCK=tables.NORM_BLOCK, **constants)
    assert compiled.registers <= (since(FP32_NORM_REGISTERS, triton.__version__) if dtype == FP32 else 48)
    assert compiled.stack == 0
    assert compiled.shared <= 1024
    assert compiled.loads[128] >= 1


LOSS_SCALE = LossScale.dynamic()
F32, F64, I64, FLAG = (FP32, 0), (torch.float64, 0), (torch.int64, 0), (torch.bool, 0)
#: Functions of a few numbers: their first arguments, the kinds of the others, and the most registers, in eights.
SHARED = {
    "adamw's numbers": (verdict.numbers_of_step, ((rule("adamw"),),), [FLAG, I64, *[F64] * 5], 48),
    "verdict": (verdict.judge_numbers, (True, True), [(FP32, 1), F32, (FP32, None)], 80),
    "counts": (verdict.counted, (), [FLAG, I64, I64], 24),
    "next scale": (device_state.moved_on, (LOSS_SCALE,), [F32, I64, I64, I64, FLAG, FLAG], 32),
    "next scale of two optimizers": (device_state.moved_on, (LOSS_SCALE,), [F32, I64, I64, I64, *[FLAG] * 4], 32),
    "verdict, told to a fused optimizer": (
        verdict.judge_step_numbers,
        (True, True, True, 0, 1),
        [(FP32, 1), F32, (FP32, None), F32, FLAG],
        80,
    ),
}
POINTERS = {FP32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.bool: "*u1"}


@pytest.mark.parametrize("name", SHARED)
def test_a_few_numbers_take_one_warp_and_no_stack(native, name):
    function, given, kinds, most = SHARED[name]
    kernel = shared.Kernel(function, given, kinds)
    arguments = {}
    for called, (dtype, dimensions) in zip(kernel.function.names, kinds, strict=True):
        arguments |= {called: "fp32"} if dimensions is None else {f"{called}_at": POINTERS[dtype]}
        arguments |= {f"{called}_length": "i32"}
    arguments |= {
        f"result{position}": POINTERS[result.dtype] for position, result in enumerate(kernel.function.results)
    }
    compiled = native(kernel.launch.kernel, arguments, 90, options=shared._SHARED_OPTIONS)
    assert compiled.registers <= most
    assert (compiled.stack, compiled.shared) == (0, 0)


def test_what_is_not_used_is_neither_loaded_nor_stored():
    """Bytes are what a step costs; in C++ beside Triton."""
    for dtype in (BF16, FP16):
        widening = (WIDEN, READ, (dtype, dtype, INT16, FP32))
        storing = (STORE, SPLIT, (FP32, dtype, INT16))
        text = source_of.update_source(*widening)
        assert re.findall(r"(\w+) = tl.load\(\1_at", text) == ["part0", "part1"]
        assert re.findall(r"tl.store\((\w+)_at", text) == ["value_state"]
        text = source_of.update_source(*storing)
        assert re.findall(r"(\w+) = tl.load\(\1_at", text) == ["gradient"]
        assert re.findall(r"tl.store\((\w+)_at", text) == ["part0", "part1"]
        text = cpp_source.update_source(*widening)
        assert set(re.findall(r" (\w+) = load\(\1_row", text)) == {"part0", "part1"}
        assert set(re.findall(r"store\((\w+)_row", text)) == {"value_state"}
        text = cpp_source.update_source(*storing)
        assert set(re.findall(r" (\w+) = load\(\1_row", text)) == {"gradient"}
        assert set(re.findall(r"store\((\w+)_row", text)) == {"part0", "part1"}
