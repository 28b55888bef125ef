"""The processor that tests assume, whatever the real one is: in their own process, and in those of their ranks."""

import torch

from mezzo.cast.device import Claim, DeviceReport, FormatSupport, decide

__all__ = ["tell"]


def tell():
    """Set the probed report of the CPU: BF16 and no FP16. Tests of the probe clear it.

    The features of a processor decide what `emulate="auto"` does and where plans place casts: with those of the real
    one, tests would run in other arithmetic.
    """
    has = {torch.float16: (), torch.bfloat16: ("avx512_bf16",)}
    decide._reports["cpu"] = DeviceReport(
        device_type="cpu",
        name="a CPU as the tests are told",
        formats={
            dtype: FormatSupport.same_for_all("right", "", claim=Claim(has=features, words="as the tests are told"))
            for dtype, features in has.items()
        },
    )
