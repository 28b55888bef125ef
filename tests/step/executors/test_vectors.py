"""Pass 2 in vectors: the bits of any width, other processors, and how many instructions an element takes."""

import dataclasses
import shutil
import subprocess

import pytest
import torch

from mezzo import compiled
from mezzo.emit.cpp import headers
from mezzo.emit.vectors import VECTORS
from mezzo.step.executors import cpp
from mezzo.step.executors.cpp import Cpp
from mezzo.step.executors.cpp_source import update_source
from mezzo.step.storage import PLAIN, SPLIT
from mezzo.step.update import rule

from .implementations import (
    BF16,
    FP16,
    FP32,
    INT8,
    INT16,
    Implementation,
    assert_same,
    bucket_of,
    copied,
    pure_step,
    whole_step,
)
from .test_contract import check_case
from .test_cpp import COMPILERS

LARGEST = """
extern "C" void kernel(const int32_t* lanes, int32_t* largest_of, int64_t count) {
    for (int64_t i = 0; i < count; i += W) write(largest_of + i, largest<W>(lanes + i * W));
}
"""
TRUNCATED = """
extern "C" void kernel(const float* from, float* to) { write(to, to_float(to_int32(read(from)))); }
"""
WIDTH = """
extern "C" void kernel(int32_t* width) { *width = W; }
"""
UINT8 = torch.uint8
#: What is stored as what: gradient, parts and moments.
STORED = {
    "FP32 moments": (BF16, BF16, INT16, FP32, FP32),
    "BF16 moments": (BF16, BF16, INT16, BF16, BF16),
    "8-bit moments": (BF16, BF16, INT16, INT8, BF16, UINT8, BF16),
    "FP16": (FP16, FP16, INT16, FP32, FP32),
    "FP16, 8-bit moments": (FP16, FP16, INT16, INT8, BF16, UINT8, BF16),
}


@pytest.fixture(params=COMPILERS[1:])
def narrower(request, monkeypatch):
    """Compile as for a processor that has less."""
    monkeypatch.setenv("CXX", request.param)
    monkeypatch.setattr(cpp, "CHUNK", 1 << 11)
    cpp.built.cache_clear()
    yield
    cpp.built.cache_clear()


@pytest.mark.usefixtures("narrower")
def test_vectors_of_any_width_have_the_bits_of_the_pure_function():
    for case in (
        ("adamw", SPLIT, BF16, BF16, INT8),
        ("adam amsgrad maximize", SPLIT, FP16, FP16, BF16),
        ("lion", PLAIN, FP16, FP32, INT8),
    ):
        check_case(Implementation(Cpp, is_exact=True), *case)


@pytest.mark.usefixtures("narrower")
def test_the_largest_of_each_row_is_in_its_own_lane():
    width = torch.zeros(1, dtype=torch.int32)
    cpp.built(headers(()) + VECTORS + WIDTH)(width)
    lanes = torch.randint(0, 1 << 30, (32, int(width)), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    largest = torch.zeros(32, dtype=torch.int32)
    cpp.built(headers(()) + VECTORS + LARGEST)(lanes, largest, 32)
    assert largest.tolist() == lanes.amax(1).tolist()


@pytest.mark.usefixtures("narrower")
def test_integers_that_become_numbers_are_never_minus_zero():
    numbers, truncated = torch.full((16,), -0.5), torch.ones(16)
    cpp.built(headers(()) + VECTORS + TRUNCATED)(numbers, truncated)
    assert truncated[:4].view(torch.int32).tolist() == [0, 0, 0, 0]


def test_what_lies_beyond_a_tensor_is_zero_to_rules_as_in_the_pure_function():
    """Of a rule whose moments are largest where everything is zero."""
    lion = rule("lion")

    def apply(gradient, weight, states, numbers):
        return weight, (-states[0] - gradient + 1.0,)

    odd = dataclasses.replace(lion, name="lion_of_beyond", apply=apply)
    mine = bucket_of("lion", SPLIT, BF16, [(50,)], state_dtype=INT8)
    mine = dataclasses.replace(mine, rule=odd)
    theirs, executor = copied(mine), Cpp()
    gradients = [torch.full((50,), 0.75)]
    pure_step(theirs, gradients, whole_step(executor, mine, executor.update_of(mine), gradients, inverse=1.0))
    assert_same(mine, theirs, True)


# Compiled for one processor, on another ---------------------------------------------------------------------

#: Sizes of elements, and whether there is one for each group of 32.
MAIN = """
#include <cstdlib>
int main() {{
    const int64_t count = 1 << 16, sizes[] = {{{sizes}}}, of_group[] = {{{of_group}}};
    int64_t addresses[{num}], rows[{num}] = {{count}};
    for (int tensor = 0; tensor < {num}; ++tensor) {{
        const int64_t bytes = count * sizes[tensor] / (of_group[tensor] ? 32 : 1);
        uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
        for (int64_t i = 0; i < bytes; ++i) memory[i] = uint8_t(i * 37 % 60);
        (tensor ? rows[tensor] : addresses[0]) = reinterpret_cast<int64_t>(memory);
    }}
    const int32_t chunks[] = {{0, 0, 0, 1, 0, 2, 0, 3}}, key = 77;
    const float scalars[8] = {{.99999f, .9f, .1f, .999f, .001f, 1e-3f, 1.f, 1e-8f}}, multiplier = 1;
    const bool found_inf = false;
    auto* volatile step = kernel;  // or it would be part of main
    step(addresses, rows, chunks, 4, 1 << 14, scalars, &multiplier, &found_inf, &key, 1);
}}
"""


def compiled_for(processor, source, path, *options):
    flags = [flag for flag in compiled._FLAGS if flag not in ("-march=native", "-fopenmp", "-shared", "-fPIC")]
    command = ["g++", *flags, f"-march={processor}", *options, "-x", "c++", "-", "-o", str(path)]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False)


x86 = pytest.mark.skipif(
    compiled.os.uname().machine != "x86_64" or not shutil.which("g++"), reason="needs g++ for x86-64"
)


@x86
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "x86-64-v4"])
def test_kernels_compile_for_other_processors(processor, tmp_path):
    for name, dtypes in STORED.items():
        done = compiled_for(processor, update_source(rule("adamw"), SPLIT, dtypes), tmp_path / "kernel.o", "-c")
        assert done.returncode == 0, f"{name}: {done.stderr}"


#: Instructions an element under AVX2, as GCC 12 makes them, and a twentieth.
INSTRUCTIONS = {
    "FP32 moments": 6.8,
    "BF16 moments": 11.6,
    "8-bit moments": 14.6,
    "FP16": 8.5,
    "FP16, 8-bit moments": 16.4,
}


@x86
@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind, which counts instructions")
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_element_takes_few_instructions(name, tmp_path):
    """Compilers make a third more of plain loops over 8-bit moments and FP16."""
    dtypes = STORED[name]
    of_group = [position in (4, 6) and INT8 in dtypes for position in range(len(dtypes))]
    main = MAIN.format(
        sizes=", ".join(str(dtype.itemsize) for dtype in dtypes),
        of_group=", ".join(str(int(flag)) for flag in of_group),
        num=len(dtypes),
    )
    done = compiled_for("haswell", update_source(rule("adamw"), SPLIT, dtypes) + main, tmp_path / "step")
    assert done.returncode == 0, done.stderr
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={tmp_path / 'counts'}", "--toggle-collect=kernel"]
    counted = subprocess.run([*tool, str(tmp_path / "step")], text=True, capture_output=True, check=True).stderr
    instructions = int(counted.split("Collected :")[1].split()[0]) / (1 << 16)
    assert INSTRUCTIONS[name] * 0.8 < instructions < INSTRUCTIONS[name]
