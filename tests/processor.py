"""A processor as the tests are told of it: in the tests' own process, and in those of their ranks."""

import torch

from mezzo.cast.device import Claim, DeviceReport, FormatSupport, decide

__all__ = ["tell"]


def tell():
    """Say that it has BF16 and not FP16; tests of the probe forget it.

    What a processor has decides what `emulate="auto"` does and where plans place casts: on another one tests would run
    in other arithmetic.
    """
    has = {torch.float16: (), torch.bfloat16: ("avx512_bf16",)}
    decide._reports["cpu"] = DeviceReport(
        device_type="cpu",
        name="a CPU as the tests are told",
        formats={
            dtype: FormatSupport.alike("right", "", claim=Claim(has=each, words="as the tests are told"))
            for dtype, each in has.items()
        },
    )
