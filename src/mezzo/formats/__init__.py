"""Number formats: what their patterns mean, blocks of them under shared scales, and rounding a tensor to either.

Here belong values and pure functions of tensors. Which op gets which format is ``mezzo.policy``'s business; how
optimizers store weights and moments is ``mezzo.step``'s.
"""

from mezzo.formats.blocks import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    NVFP4_2D,
    ROWWISE_E4M3,
    ROWWISE_E5M2,
    TENSORWISE_E4M3,
    TENSORWISE_E5M2,
    BlockFormat,
    block_format,
)
from mezzo.formats.convert import Quantized, quantize, quantized
from mezzo.formats.definitions import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Coverage,
    Format,
    by_name,
)

__all__ = [
    "BF16",
    "BLOCK_FORMATS",
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP16",
    "FP32",
    "MXFP4",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "NVFP4_2D",
    "ROWWISE_E4M3",
    "ROWWISE_E5M2",
    "TENSORWISE_E4M3",
    "TENSORWISE_E5M2",
    "TF32",
    "BlockFormat",
    "Coverage",
    "Format",
    "Quantized",
    "block_format",
    "by_name",
    "quantize",
    "quantized",
]
