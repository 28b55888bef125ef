"""No clock decides what is computed: decisions on simulated processors, and on this one, under clocks that lie."""

import json
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from mezzo.cast.device import FAMILIES, arithmetic, child, decide, fast_format, intended, probe, probing
from mezzo.cast.device.probing import FORMATS, ISA_LIMIT

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
VARIABLE = "ONEDNN_MAX_CPU_ISA"
#: How far a reading may be from the truth, either way.
LIE = 3.0


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor: its lines of /proc/cpuinfo, how fast its products are beside FP32's, and what is to come of it.

    Speeds are those of products, convolution, attention and recurrent layers; no factor of three takes them over a
    bound. ``native`` names the families that are computed natively; all others are emulated.
    """

    lines: dict = field(default_factory=dict)
    bfloat16: tuple
    float16: tuple
    native: dict
    fast: torch.dtype = BFLOAT16
    dies: bool = False


ALL, NONE = set(FAMILIES), set()
BUT_CONVOLUTION = ALL - {"convolution"}
AVX512 = "fpu avx2 avx512f avx512bw avx512vl avx512_vnni"
SAPPHIRE = {"flags": f"{AVX512} avx512_bf16 amx_bf16 avx512_fp16 amx_tile"}

PROCESSORS = {
    "Zen 4": Processor(
        lines={"flags": f"{AVX512} avx512_bf16"}, bfloat16=(1.9, 1.6, 0.9, 1.2), float16=(0.03, 0.01, 0.4, 0.05),
        native={BFLOAT16: ALL, FLOAT16: NONE},
    ),
    "Zen 3": Processor(
        lines={"flags": "fpu avx avx2 fma f16c"}, bfloat16=(0.3, 0.1, 0.6, 0.4), float16=(0.03, 0.01, 0.5, 0.05),
        native={BFLOAT16: NONE, FLOAT16: NONE},
    ),
    "Skylake-X": Processor(
        lines={"flags": AVX512}, bfloat16=(0.6, 0.5, 0.6, 0.6), float16=(0.02, 0.01, 0.5, 0.05),
        native={BFLOAT16: NONE, FLOAT16: NONE},
    ),
    "Sapphire Rapids": Processor(
        lines=SAPPHIRE, bfloat16=(4.2, 3.0, 1.0, 1.5), float16=(1.0, 0.007, 0.65, 1.2),
        native={BFLOAT16: ALL, FLOAT16: BUT_CONVOLUTION},
    ),
    "Granite Rapids": Processor(
        lines={"flags": f"{SAPPHIRE['flags']} amx_fp16"}, bfloat16=(4.2, 3.0, 1.0, 1.5),
        float16=(4.0, 0.007, 0.65, 1.2), native={BFLOAT16: ALL, FLOAT16: BUT_CONVOLUTION},
    ),
    "Sapphire Rapids that dies of AMX": Processor(
        lines=SAPPHIRE, bfloat16=(1.8, 1.6, 0.9, 1.2), float16=(1.0, 0.007, 0.65, 1.2), dies=True,
        native={BFLOAT16: ALL, FLOAT16: BUT_CONVOLUTION},
    ),
    "Graviton3": Processor(
        lines={"Features": "fp asimd fphp asimdhp asimddp sve svebf16 i8mm bf16"}, bfloat16=(2.5, 2.0, 0.9, 1.5),
        float16=(0.6, 0.5, 0.6, 0.6), native={BFLOAT16: ALL, FLOAT16: NONE},
    ),
    "Graviton2": Processor(
        lines={"Features": "fp asimd fphp asimdhp asimddp"}, bfloat16=(0.1, 0.1, 0.5, 0.1),
        float16=(0.6, 0.5, 0.6, 0.6), native={BFLOAT16: NONE, FLOAT16: NONE},
    ),
    "unknown": Processor(
        bfloat16=(0.4, 0.5, 0.6, 0.3), float16=(0.02, 0.01, 0.5, 0.05), native={BFLOAT16: NONE, FLOAT16: NONE},
    ),
    "unknown, and far faster in FP16 products": Processor(
        bfloat16=(0.4, 0.5, 0.6, 0.3), float16=(8.0, 0.5, 0.6, 0.5), native={BFLOAT16: NONE, FLOAT16: {"products"}},
        fast=FLOAT16,
    ),
}  # fmt: skip


class Clock:
    """A clock that tells of each stretch of time some other one, by a factor that a function draws."""

    def __init__(self, now, factor):
        self._now, self._factor = now, factor
        self._read, self._told = now(), 0.0

    def __call__(self):
        now = self._now()
        self._told += (now - self._read) * self._factor()
        self._read = now
        return self._told


class Simulated:
    """A processor that computes nothing and takes its time for it."""

    def __init__(self, processor):
        self.processor, self.seconds, self.dtype = processor, 0.0, None

    def compute(self, name, operands, slope, dtype, device):
        self.dtype = dtype
        speeds = dict(
            zip(FAMILIES, self.processor.bfloat16 if dtype == BFLOAT16 else self.processor.float16, strict=True)
        )
        self.seconds += 0.015 / (1 if dtype == torch.float32 else speeds[child.PRODUCTS[name][0]])
        return [slope.to(dtype)]

    def ask(self, command, env, **_):
        """Answer as a child would."""
        dtype, limit = getattr(torch, command[-1]), env.get(VARIABLE)
        if self.processor.dies and dtype == BFLOAT16 and limit != ISA_LIMIT:
            return subprocess.CompletedProcess(command, -signal.SIGILL, b"", b"")
        answer = child.PREFIX + json.dumps(child.examined(dtype))
        return subprocess.CompletedProcess(command, 0, answer.encode(), b"")


def each_reading(rng, simulated):
    return lambda: LIE ** rng.uniform(-1, 1)


def each_format(rng, simulated):
    factors = {dtype: LIE ** rng.choice((-1, 1)) for dtype in FORMATS}
    return lambda: factors.get(simulated.dtype, 1.0)


def honestly(rng, simulated):
    return lambda: 1.0


def new_process(monkeypatch, cache):
    """Begin as a new process on a new machine does: nothing known, nothing kept."""
    for name in ("_reports", "_revived"):
        monkeypatch.setattr(decide, name, {})
    monkeypatch.setattr(decide, "_said", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def tell_time(monkeypatch, clock):
    monkeypatch.setattr(child, "time", SimpleNamespace(process_time=clock, perf_counter=clock))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_decides_and_no_clock_that_lies(name, monkeypatch, tmp_path):
    processor = PROCESSORS[name]
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(probing, "processor", lambda: {"name": name, **processor.lines})
    monkeypatch.setattr(child, "WIDTHS", (16,))
    tries = [(honestly, 0), *((lies, seed) for lies in (each_reading, each_format) for seed in range(4))]
    seen = set()
    for lies, seed in tries:
        simulated = Simulated(processor)
        new_process(monkeypatch, tmp_path / f"{lies.__name__}{seed}")
        monkeypatch.setattr(subprocess, "run", simulated.ask)
        monkeypatch.setattr(child, "_forward_and_backward", simulated.compute)
        factor = lies(random.Random(seed), simulated)
        tell_time(monkeypatch, Clock(lambda simulated=simulated: simulated.seconds, factor))
        report = probe("cpu")
        for dtype in FORMATS:
            does = intended(report, dtype)
            assert {family for family in FAMILIES if does[family] != "emulate"} == processor.native[dtype], (lies, seed)
            assert (does["products"] == "limit") == (processor.dies and dtype == BFLOAT16)
            if report.formats[dtype].status == "right":
                assert {family: choice.action for family, choice in arithmetic(dtype).items()} == does
        assert fast_format({"cpu"}) == processor.fast, (lies, seed)
        seen.add(tuple(family.speed_ratio for family in report.formats[BFLOAT16].families.values()))
    assert len(seen) > 5, "these clocks did lie"


def test_what_a_limit_on_onednn_masks_does_not_count():
    for limit, bfloat16, float16 in (
        (None, ("avx512_bf16", "amx_bf16"), ("avx512_fp16",)),
        ("ALL", ("avx512_bf16", "amx_bf16"), ("avx512_fp16",)),
        ("avx512_core_amx", ("avx512_bf16", "amx_bf16"), ("avx512_fp16",)),
        (ISA_LIMIT, ("avx512_bf16",), ("avx512_fp16",)),
        ("AVX10_1_512", ("avx512_bf16",), ("avx512_fp16",)),
        ("AVX512_CORE_BF16", ("avx512_bf16",), ()),
        ("AVX2", (), ()),
    ):
        for dtype, has in ((BFLOAT16, bfloat16), (FLOAT16, float16)):
            assert probing.claims.of_processor(SAPPHIRE, dtype, limit).has == has, limit
    masked = probing.claims.of_processor(SAPPHIRE, BFLOAT16, "AVX2")
    assert masked.words == "it has neither avx512_bf16 nor amx_bf16 under ONEDNN_MAX_CPU_ISA=AVX2"
    assert (
        probing.claims.of_processor({"flags": "avx2"}, FLOAT16, "AVX2").words
        == "it has neither avx512_fp16 nor amx_fp16"
    )
    nothing = probing.claims.of_processor({"name": "an unknown CPU"}, FLOAT16, None)
    assert nothing.words == "it does not say what it has for float16, which counts as nothing"


@pytest.mark.slow  # the real probe, several times
def test_this_processor_decides_and_no_clock_that_lies(monkeypatch, tmp_path):
    real = time.process_time
    monkeypatch.setenv(VARIABLE, "AVX512_CORE_FP16")  # as the tests' process has it
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)

    def ask(command, env, **_):
        answer = child.PREFIX + json.dumps(child.examined(getattr(torch, command[-1])))
        return subprocess.CompletedProcess(command, 0, answer.encode(), b"")

    monkeypatch.setattr(subprocess, "run", ask)
    decided = []
    for seed in range(4):
        rng = random.Random(seed)
        new_process(monkeypatch, tmp_path / str(seed))
        tell_time(monkeypatch, Clock(real, (lambda rng=rng: LIE ** rng.uniform(-1, 1)) if seed else lambda: 1.0))
        does = [tuple(choice.action for choice in arithmetic(dtype).values()) for dtype in FORMATS]
        decided.append((*does, fast_format({"cpu"})))
    assert len(set(decided)) == 1, decided
