"""A processor as the tests are told of it: in the tests' own process, and in those of their ranks."""

import torch

from mezzo.cast.device import decide
from mezzo.cast.device.child import CASES
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport

__all__ = ["tell"]

_SPEEDS = {torch.bfloat16: 1.0, torch.float16: 0.1}


def tell():
    """Say that BF16 is fast and FP16 slow; tests of the probe forget it.

    What is fast decides what `emulate="auto"` does, and is a clock's answer: on a busy machine, or an older one, tests
    would run in other arithmetic.
    """
    decide._reports["cpu"] = DeviceReport(
        device_type="cpu",
        name="a CPU as the tests are told",
        formats={
            dtype: FormatSupport(
                dtype=dtype,
                cases=dict.fromkeys(CASES, "native")
                if dtype in _SPEEDS
                else {"storage": "native", "convolution": "unsupported"},
                speeds={"gemm": _SPEEDS[dtype]} if dtype in _SPEEDS else {},
                detail="",
            )
            for dtype in FORMATS
        },
        needs_isa_limit=False,
    )
