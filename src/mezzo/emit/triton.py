"""Triton for the operations of pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from mezzo.emit.tracing import ALIKE, Dialect, Pure, spelled_alone

#: What kernels call the dtypes of elements in memory. BF16 is moved as its bits, which are FP32's upper half: exact
#: both ways, since values to store are on BF16's grid already, and the sign of a NaN stays.
_TYPES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float32: "tl.float32",
        torch.float16: "tl.float16",
        torch.bfloat16: "tl.int16",
        torch.int32: "tl.int32",
        torch.int16: "tl.int16",
        torch.int8: "tl.int8",
        torch.uint8: "tl.uint8",
        torch.bool: "tl.int1",
        torch.float64: "tl.float64",
        torch.int64: "tl.int64",
    }
)
_WIDENED: Final = "({0}.to(tl.int32) << 16).to(tl.float32, bitcast=True)"
_NARROWED: Final = "({0}.to(tl.int32, bitcast=True) >> 16).to(tl.int16)"

#: Triton for each aten operation that occurs. Each is IEEE arithmetic: ``/`` and ``tl.sqrt`` are approximate on a GPU,
#: ``-x`` is 0 − x there, and ``+`` on integers is checked for overflow in debug mode, which hashing means.
_OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **ALIKE,
        "aten.scalar_tensor.default": "tl.full((), {0}, {dtype})",
        "aten.add.Tensor": "tl.add({0}, {1}, sanitize_overflow=False)",
        "aten.sub.Tensor": "tl.sub({0}, {1}, sanitize_overflow=False)",
        "aten.mul.Tensor": "tl.mul({0}, {1}, sanitize_overflow=False)",
        "aten.neg.default": "tl.mul({0}, -1, sanitize_overflow=False)",
        "aten.div.Tensor of torch.float32": "tl.div_rn({0}, {1})",
        "aten.sqrt.default of torch.float32": "tl.sqrt_rn({0})",
        "aten.abs.default": "tl.abs({0})",
        # Below 2^23, adding it to |x| rounds to an integer, ties to even; from there on every value is one.
        "aten.round.default of torch.float32": (
            "tl.where(tl.abs({0}) < 8388608.0, (((tl.abs({0}) + 8388608.0) - 8388608.0).to(tl.int32, bitcast=True)"
            " | ({0}.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True), {0})"
        ),
        "aten.sign.default of torch.float32": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
        "aten.maximum.default": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        "aten.clamp.default": "tl.where({0} < {1}, {1}, tl.where({0} > {2}, {2}, {0}))",
        "aten.where.self": "tl.where({0}, {1}, {2})",
        "aten.view.dtype": "{0}.to({dtype}, bitcast=True)",
        "aten._to_copy.default": "{0}.to({dtype})",
        # Of the few numbers that a step shares. float64 is divided as IEEE says; its powers and roots are CUDA's own
        # functions, as in torch's kernels: NVIDIA's compiler takes them from the same library, libdevice.
        "aten.add.Tensor, alpha=-1": "tl.sub({0}, {1}, sanitize_overflow=False)",
        "aten.eq.Scalar": "{0} == {1}",
        "aten.ne.Scalar": "{0} != {1}",
        "aten.ge.Scalar": "{0} >= {1}",
        "aten.ge.Tensor": "{0} >= {1}",
        "aten.bitwise_and.Tensor": "{0} & {1}",
        "aten.bitwise_not.default of torch.bool": "{0} == 0",
        "aten.clamp_min.default": "tl.where({0} < {1}, {1}, {0})",
        "aten.clamp_max.default": "tl.where({0} > {1}, {1}, {0})",
        "aten.ones_like.default of torch.float32": "1.0",
        "aten.masked_fill.Scalar": "tl.where({1}, {2}, {0})",
        "aten.rsub.Scalar": "tl.sub({1}, {0}, sanitize_overflow=False)",
        "aten.reciprocal.default of torch.float32": "tl.div_rn(1.0, {0})",
        "aten.reciprocal.default of torch.float64": "1.0 / {0}",
        "aten.div.Tensor of torch.float64": "{0} / {1}",
        "aten.pow.Tensor_Tensor of torch.float64": "libdevice.pow({0}, {1})",
        "aten.rsqrt.default of torch.float64": "libdevice.rsqrt({0})",
        "aten.linalg_vector_norm.default of torch.float32": "total({0}_at, {0}_length)",
    }
)


def _literal(value: float, dtype: torch.dtype) -> str:
    number = float(value) if dtype.is_floating_point else bool(value) if dtype == torch.bool else int(value)
    return repr(number) if abs(number) < float("inf") else f'float("{number}")'


TRITON: Final = Dialect(
    name="Triton",
    types=_TYPES,
    operations=_OPERATIONS,
    widened=MappingProxyType({torch.bfloat16: _WIDENED}),
    narrowed=MappingProxyType({torch.bfloat16: _NARROWED}),
    assigned="{name} = {value}",
    literal=_literal,
)


def function(name: str, rule: Pure, parameters: Mapping[str, torch.dtype]) -> str:
    """Write a Triton function of numbers or blocks of them, which returns what the rule returns.

    Args:
        name: Of the function.
        rule: What it computes, a pure function of 0-d tensors.
        parameters: Names of its parameters, and their dtypes.

    Raises:
        NoKernel: The rule uses an operation that is not in the table.
    """
    body = spelled_alone(rule, parameters, TRITON)
    lines = "\n    ".join([*body.body, f"return {', '.join(str(result.word) for result in body.results)}"])
    return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n    {lines}\n\n\n"
