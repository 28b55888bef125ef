"""What a device says of itself about a format: which instructions a processor names, what a GPU's capability is.

This decides whether a format is fast. No clock is asked: the same machine gives the same answer, however busy it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from mezzo.tensors import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a device says of itself about a format.

    Args:
        has: What it names that computes in the format: instructions of a processor, ``sm_90`` of a GPU. Without any the
            format counts as slow.
        words: The same as a clause, ``"it has avx512_bf16"``.
    """

    has: tuple[str, ...] = ()
    words: str


#: Of a device that was not asked.
NOTHING: Final = Claim(words="it says nothing of itself")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction set that multiplies in a format.

    Attributes:
        dtype: The format.
        name: What ``/proc/cpuinfo`` calls it.
        line: In which of its lines.
        limit: The lowest ``ONEDNN_MAX_CPU_ISA`` under which oneDNN uses it; ``""`` where it has no such limit.
        source: Where that is said.
    """

    dtype: torch.dtype
    name: str
    line: str
    limit: str
    source: str


_X86, _ARM = "flags", "Features"

#: What makes a format fast on a processor: any of its rows. AVX-NE-CONVERT and F16C convert, and multiply in FP32.
#: Arm's ``asimdhp`` multiplies in FP16, and it varies with the build of torch whether products of matrices use it.
INSTRUCTIONS: Final = (
    Instruction(torch.bfloat16, "avx512_bf16", _X86, "AVX512_CORE_BF16", "Intel SDM 2, VDPBF16PS"),
    Instruction(torch.bfloat16, "amx_bf16", _X86, "AVX512_CORE_AMX", "Intel SDM 2, TDPBF16PS"),
    Instruction(torch.float16, "avx512_fp16", _X86, "AVX512_CORE_FP16", "Intel SDM 2, VFMADD132PH"),
    Instruction(torch.float16, "amx_fp16", _X86, "AVX512_CORE_AMX_FP16", "Intel SDM 2, TDPFP16PS"),
    Instruction(torch.bfloat16, "bf16", _ARM, "", "Arm ARM, FEAT_BF16: BFMMLA"),
)

#: Limits on oneDNN, each with all before it (oneDNN, "CPU Dispatcher Control"). A limit of another name masks nothing.
_LIMITS: Final = tuple(
    """
    SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16 AVX512_CORE_FP16 AVX10_1_512
    AVX512_CORE_AMX AVX512_CORE_AMX_FP16
    """.split()
)

#: The compute capability from which on a GPU of NVIDIA multiplies in a format by tensor cores.
TENSOR_CORES: Final = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}


def of_processor(facts: Mapping[str, str], dtype: torch.dtype, limit: str | None) -> Claim:
    """Return what a processor says of itself about a format.

    Args:
        facts: Lines of ``/proc/cpuinfo`` by their keys. A processor of which they name no instructions, as on systems
            that have no such file, counts as one without any for either format: emulation costs little more than FP32
            does, and a product without instructions many times that.
        dtype: The format.
        limit: The limit on oneDNN that it is used with; what it masks does not count.

    Example:
        >>> of_processor({"flags": "avx512f avx512_bf16 amx_bf16"}, torch.bfloat16, "AVX512_CORE_FP16").words
        'it has avx512_bf16'
    """
    rows = [row for row in INSTRUCTIONS if row.dtype is dtype and row.line in facts]
    if not rows:
        return Claim(words=f"it does not say what it has for {dtype_name(dtype)}, which counts as nothing")
    named = [row for row in rows if row.name in facts[row.line].split()]
    used = tuple(row.name for row in named if not _masks(limit, row.limit))
    if used:
        return Claim(has=used, words=f"it has {' and '.join(used)}")
    names = " nor ".join(row.name for row in rows)
    under = f" under ONEDNN_MAX_CPU_ISA={limit}" if named else ""
    return Claim(words=f"it has {'neither' if len(rows) > 1 else 'no'} {names}{under}")


def _masks(limit: str | None, needed: str) -> bool:
    numbers = {name: number for number, name in enumerate(_LIMITS)}
    return limit is not None and numbers.get(limit.upper(), len(_LIMITS)) < numbers.get(needed, 0)


def of_cuda(capability: tuple[int, int] | None, dtype: torch.dtype) -> Claim:
    """Return what a GPU says of itself about a format.

    Args:
        capability: Its compute capability; None of a GPU that is not NVIDIA's, which counts as made for both formats.
        dtype: The format.

    Example:
        >>> of_cuda((7, 5), torch.float16), of_cuda((6, 1), torch.float16).has
        (Claim(has=('sm_75',), words='it is sm_75'), ())
    """
    if capability is None:
        return Claim(has=("ROCm",), words="it has matrix cores")
    name, least = "sm_{}{}".format(*capability), "sm_{}{}".format(*TENSOR_CORES[dtype])
    if capability < TENSOR_CORES[dtype]:
        return Claim(words=f"it is {name}, and {dtype_name(dtype)} is fast from {least} on")
    return Claim(has=(name,), words=f"it is {name}")


def of_accelerator(device_type: str) -> Claim:
    """Return what holds of another accelerator: it counts as made for both formats, where its products are right."""
    return Claim(has=(device_type,), words="an accelerator counts as made for it")
