"""Products of weights below sixteen bits: which operands are written down in which format, forward and backward.

A linear layer has three products, each with a dimension that it sums over: the output (over features in), the gradient
of its input (over features out) and that of its weight (over rows). Operands are quantised before each, summed in FP32
and rounded once to the policy's dtype. What is saved for the backward pass are quantised operands.

A format whose scales do not depend on the dimension (one for the tensor, or for square blocks) is written down once for
both products that an operand is in; else once along each dimension, from the operand itself.

Here belongs how such a product is computed, on every device. Which products are, the policy says; how numbers are
rounded, :mod:`mezzo.formats`.

Sources: Micikevicius et al. 2022 (E4M3 forward, E5M2 for gradients); torchao's ``Float8LinearConfig`` (row-wise);
OCP Microscaling Formats 1.0; NVIDIA, *Pretraining Large Language Models with NVFP4*, arXiv 2509.25149.
"""

from mezzo.cast.products.functions import Operands, cast_as, operands_or_reason, placed, product
from mezzo.cast.products.memory import ROLES, Memory
from mezzo.cast.products.recipes import Recipe, recipe_of, recipe_on, recipe_support

__all__ = [
    "ROLES",
    "Memory",
    "Operands",
    "Recipe",
    "cast_as",
    "operands_or_reason",
    "placed",
    "product",
    "recipe_of",
    "recipe_support",
]
__all__ += ["recipe_on"]
