"""A processor as the tests are told of it: in the tests' own process, and in those of their ranks."""

import torch

from mezzo.cast.device import DeviceReport, FormatSupport, decide

__all__ = ["tell"]


def tell():
    """Say that BF16 is fast and FP16 slow; tests of the probe forget it.

    What is fast decides what `emulate="auto"` does, and is a clock's answer: on a busy machine, or an older one, tests
    would run in other arithmetic.
    """
    speeds = {torch.float16: 0.1, torch.bfloat16: 1.0}
    decide._reports["cpu"] = DeviceReport(
        device_type="cpu",
        name="a CPU as the tests are told",
        formats={dtype: FormatSupport.alike("right", "", each) for dtype, each in speeds.items()},
    )
