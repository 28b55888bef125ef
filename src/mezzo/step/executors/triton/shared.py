"""Functions of a step's few shared numbers as one launch each: from source that :mod:`..scalars` spells."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.scalars import Kind, Pure, Spelled, kind, spelled
from mezzo.step.executors.triton.source import TRITON, jitted, on

__all__ = ["Kernel", "Shared", "shared_source"]

logger = logging.getLogger(__name__)

#: One warp: a norm of a few hundred numbers is the longest work there is.
_OPTIONS: Final = {"num_warps": 1, "enable_fp_fusion": False, "enable_reflect_ftz": False}

_OWN: Final = {
    "aten.add.Tensor, alpha=-1": "tl.sub({0}, {1}, sanitize_overflow=False)",
    "aten.eq.Scalar": "{0} == {1}",
    "aten.eq.Tensor": "{0} == {1}",
    "aten.ne.Scalar": "{0} != {1}",
    "aten.ge.Scalar": "{0} >= {1}",
    "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.bitwise_not.default of torch.bool": "{0} == 0",
    "aten.clamp_min.default": "tl.where({0} < {1}, {1}, {0})",
    "aten.clamp_max.default": "tl.where({0} > {1}, {1}, {0})",
    "aten.bitwise_or.Tensor": "{0} | {1}",
    "aten.ones_like.default of torch.float32": "1.0",
    "aten.masked_fill.Scalar": "tl.where({1}, {2}, {0})",
    "aten.rsub.Scalar": "tl.sub({1}, {0}, sanitize_overflow=False)",
    "aten.reciprocal.default": "tl.div_rn(1.0, {0})",
    "aten.reciprocal.default of torch.float64": "1.0 / {0}",
    "aten.div.Tensor of torch.float64": "{0} / {1}",
    "aten.pow.Tensor_Tensor of torch.float64": "libdevice.pow({0}, {1})",
    "aten.rsqrt.default of torch.float64": "libdevice.rsqrt({0})",
    "aten.linalg_vector_norm.default of torch.float32": "total({0}_at, {0}_length)",
}

#: Numbers are loaded and stored as they are. float64 is divided as IEEE says; its powers and roots are CUDA's own
#: functions, as in torch's kernels: NVIDIA's compiler takes them from the same library, libdevice.
NUMBERS: Final = replace(
    TRITON,
    types=MappingProxyType(
        {
            **TRITON.types,
            torch.bfloat16: "tl.bfloat16",
            torch.float64: "tl.float64",
            torch.int64: "tl.int64",
        }
    ),
    operations=MappingProxyType({**TRITON.operations, **_OWN}),
    widened=MappingProxyType({}),
    narrowed=MappingProxyType({}),
    stored="tl.store({target}, {value})",
    literal=lambda value, dtype: repr(value) if abs(value) < float("inf") else f'float("{value}")',
)

_TOTAL: Final = '''\
@triton.jit
def total(vector, length):
    """Return the 2-norm of a vector, added up in one order."""
    squares = tl.full((1024,), 0.0, tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, 1024)
        value = tl.load(vector + places, mask=places < length, other=0.0)
        squares += value * value
        first += 1024
    return tl.sqrt_rn(tl.sum(squares))


'''

_FUNCTION: Final = """\
@triton.jit(do_not_specialize={lengths}, do_not_specialize_on_alignment={pointers})
def {name}({arguments}):
    {lines}
"""


def shared_source(name: str, function: Spelled, kinds: Sequence[Kind]) -> str:
    """Write a function as a kernel: pointers to its tensors, lengths of its vectors, pointers to its results.

    Args:
        name: What profilers call it.
        function: Its lines.
        kinds: Of its tensors.
    """
    vectors = [each for each, (_, dimensions) in zip(function.names, kinds, strict=True) if dimensions]
    lengths = [f"{each}_length" for each in vectors]
    numbers = [each for each, (_, dimensions) in zip(function.names, kinds, strict=True) if dimensions is None]
    given = [each if each in numbers else f"{each}_at" for each in function.names]
    lines = [f"{each} = tl.load({each}_at)" for each in function.names if each not in (*vectors, *numbers)]
    lines += function.body
    results: list[str] = []
    for place, result in enumerate(function.results):
        if result.given is None:
            results.append(f"result{place}")
            for at, value in enumerate(result.values):
                lines.append(NUMBERS.stored.format(target=f"result{place} + {at}", value=value))
    pointers = [each for each in (*given, *results) if each not in numbers]
    arguments = ", ".join([*given, *results, *lengths])
    return (_TOTAL if vectors else "") + _FUNCTION.format(
        name=name,
        lengths=lengths,
        pointers=pointers,
        arguments=arguments,
        lines="\n    ".join(lines),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A function's kernel, for tensors of certain kinds."""

    function: Spelled
    jitted: Any
    vectors: list[int]

    @classmethod
    def of(cls, function: Pure, given: tuple[Hashable, ...], kinds: Sequence[Kind]) -> Kernel:
        """Write a function for tensors of certain kinds; :func:`..scalars.spelled` says of what.

        Raises:
            UnsupportedError: It uses an operation that is not in the table.
        """
        found, name = spelled(function, given, kinds, NUMBERS), function.__name__.strip("_")
        vectors = [place for place, (_, dimensions) in enumerate(kinds) if dimensions]
        return cls(found, jitted(shared_source(name, found, kinds), name), vectors)

    def __call__(self, tensors: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
        """Launch it on a device, and return its results."""
        found = [
            tensors[each.given]
            if each.given is not None
            else torch.empty([len(each.values)] if each.is_vector else [], dtype=each.dtype, device=device)
            for each in self.function.results
        ]
        made = [tensor for tensor, each in zip(found, self.function.results, strict=True) if each.given is None]
        lengths = [len(tensors[place]) for place in self.vectors]
        with on(device):
            self.jitted[(1,)](*tensors, *made, *lengths, **_OPTIONS)
        return tuple(found)


class Shared:
    """Functions that were asked for, each written and compiled once for its dtypes."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Kernel | None] = {}

    def __call__(
        self, function: Pure, given: tuple[Hashable, ...], tensors: Sequence[Tensor | float]
    ) -> Sequence[Tensor]:
        """Return what a function makes of tensors of one device: in one launch, or by torch's operations.

        Args:
            function: See :func:`mezzo.step.executors.scalars.spelled`.
            given: Its first arguments.
            tensors: The others; vectors without gaps.
        """
        kinds = [kind(tensor) for tensor in tensors]
        devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            return function(*given, *tensors)
        key = (function, given, *kinds)
        if key not in self._known:
            try:
                self._known[key] = Kernel.of(function, given, kinds)
            except UnsupportedError as error:
                logger.debug("%s goes operation by operation, since %s", function.__name__, error)
                self._known[key] = None
        kernel = self._known[key]
        return function(*given, *tensors) if kernel is None else kernel(tensors, devices.pop())
