"""The cost of arithmetic against that of moving bytes: a table by device and format, from data sheets.

Nothing is timed, so that a plan is the same on the same machine in each run, however busy that is. A product's
arithmetic counts where it takes longer than the bytes that the product reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from mezzo.cast.device import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The speed of a device's arithmetic against that of its memory.

    Attributes:
        fp32_flops_per_byte: Operations of an FP32 product that take as long as a byte that a copy reads or writes.
        low_speedup: How many times as many a product in the low format makes in that time.
    """

    fp32_flops_per_byte: float
    low_speedup: float

    def work(self, num_bytes: int, num_flops: int, *, low: bool) -> float:
        """Return the bytes that could be moved while a kernel runs: its own, or more if it computes longer."""
        return max(num_bytes, num_flops / (self.fp32_flops_per_byte * (self.low_speedup if low else 1)))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A row of the table: a device by its data sheet.

    Attributes:
        name: A feature of the device for the format, from ``Claim.has`` of :mod:`mezzo.cast.device`.
        fp32: FP32 products without TF32, in TFLOP/s; of a processor operations in a cycle of a core.
        low: Products in the low format with FP32 sums and without sparsity, in the same unit.
        gb_per_s: The bandwidth of its memory; 0 for a processor, since all sockets are close to the default.
        source: The data sheet or manual.
    """

    name: str
    fp32: float
    low: float
    gb_per_s: float
    source: str


#: FP32 operations for a byte where no row has the bandwidth. Sockets of servers have 16 (EPYC 9654: 7.4 TFLOP/s at
#: 461 GB/s), 17 (Graviton3), 23 (Xeon 8480+) and 28 (Xeon 8180), GPUs for training 9 to 20.
DEFAULT_FLOPS_PER_BYTE: Final = 20.0
#: The speed of a format without a row, against FP32; of an emulated one, too, since plans made where products are
#: emulated are meant for devices where they are not. Half the bytes are read, so twice is the least that it can be.
DEFAULT_SPEEDUP: Final = 2.0

#: The first row with a feature of the device counts.
TABLE: Final = (
    Sheet("amx_bf16", 64, 1024, 0, "Intel 64 Optimization Manual, AMX: 1024 BF16 operations a cycle; 2 AVX-512 ports"),
    Sheet("avx512_bf16", 64, 128, 0, "Intel SDM 2, VDPBF16PS: two products in a lane"),
    Sheet("amx_fp16", 64, 1024, 0, "Intel SDM 2, TDPFP16PS: as many operations as TDPBF16PS"),
    Sheet("avx512_fp16", 64, 128, 0, "Intel SDM 2, VFMADD132PH: twice the lanes"),
    Sheet("bf16", 32, 128, 0, "Arm Neoverse V1 Optimization Guide: BFMMLA as often as FMLA, four times the products"),
    Sheet("sm_70", 15.7, 125, 900, "NVIDIA V100 SXM2 data sheet"),
    Sheet("sm_75", 8.1, 65, 320, "NVIDIA T4 data sheet"),
    Sheet("sm_80", 19.5, 312, 2039, "NVIDIA A100 80GB SXM data sheet; 1555 GB/s with 40 GB"),
    Sheet("sm_86", 31.2, 125, 600, "NVIDIA A10 data sheet"),
    Sheet("sm_89", 30.3, 121, 300, "NVIDIA L4 data sheet; an L40S has 91.6, 362 and 864"),
    Sheet("sm_90", 67, 989, 3350, "NVIDIA H100 SXM data sheet; an H200 has 4800 GB/s"),
    Sheet("sm_100", 75, 2250, 8000, "NVIDIA HGX B200 data sheet, an eighth of it"),
    Sheet("sm_120", 104.8, 209.5, 1792, "NVIDIA RTX Blackwell architecture, GeForce RTX 5090"),
)


def balance(has: tuple[str, ...], *, emulated: bool = False) -> Balance:
    """Return the balance of a device, from its features for a format.

    Args:
        has: The features. A GPU without a row counts as the next older one of its generation; a device without any has
            ``DEFAULT_FLOPS_PER_BYTE`` and ``DEFAULT_SPEEDUP``.
        emulated: Whether products are emulated in the format there: it counts as twice as fast as FP32.

    Example:
        >>> balance(("amx_bf16", "avx512_bf16")), balance(("sm_87",)) == balance(("sm_86",))
        (Balance(fp32_flops_per_byte=20.0, low_speedup=16.0), True)
    """
    row = next((row for row in TABLE if row.name in has), None) or next(filter(None, map(_older, has)), None)
    if row is None:
        return Balance(fp32_flops_per_byte=DEFAULT_FLOPS_PER_BYTE, low_speedup=DEFAULT_SPEEDUP)
    per_byte = 1e3 * row.fp32 / row.gb_per_s if row.gb_per_s else DEFAULT_FLOPS_PER_BYTE
    return Balance(fp32_flops_per_byte=per_byte, low_speedup=DEFAULT_SPEEDUP if emulated else row.low / row.fp32)


def _older(name: str) -> Sheet | None:
    """Return the row of the next older GPU of a generation: names that differ in the last digit."""
    return next((row for row in reversed(TABLE) if row.name[:-1] == name[:-1] and row.name <= name), None)


def balance_of(device_type: str, dtype: torch.dtype, *, emulated: bool) -> Balance:
    """Return the balance of a device of this machine.

    Args:
        device_type: The device.
        dtype: The low format.
        emulated: See :func:`balance`.

    **Cost**: that of :func:`mezzo.cast.device.probe`, which a policy for the device has asked already.
    """
    support = probe(device_type).formats.get(dtype)
    return balance(support.families["products"].claim.has if support else (), emulated=emulated)
