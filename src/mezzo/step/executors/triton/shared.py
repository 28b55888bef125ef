"""Functions of a step's few shared numbers as one launch each: from source that :mod:`..emit` spells."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.emit import Pure, Spelled, spelled
from mezzo.step.executors.triton.source import TRITON, Launch, jitted, on

__all__ = ["Kernel", "Shared", "written"]

logger = logging.getLogger(__name__)

#: What code depends on of an argument: its dtype, and 0 or 1 dimensions; or FP32 and none for a Python number.
Kind: TypeAlias = tuple[torch.dtype, int | None]

#: One warp: a norm of a few hundred numbers is the longest work there is.
_OPTIONS: Final = {"num_warps": 1, "enable_fp_fusion": False, "enable_reflect_ftz": False}

#: Numbers are loaded and stored as they are.
NUMBERS: Final = replace(
    TRITON,
    types=MappingProxyType({**TRITON.types, torch.bfloat16: "tl.bfloat16"}),
    widened=MappingProxyType({}),
    narrowed=MappingProxyType({}),
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


def written(function: Pure, given: tuple[Hashable, ...], kinds: Sequence[Kind]) -> Spelled:
    """Write the lines of a function of numbers, 0-d tensors, and vectors of which it takes the norm.

    Args:
        function: Called with ``given`` and then the tensors.
        given: Its first arguments, which are no tensors.
        kinds: Of the tensors.

    Raises:
        UnsupportedError: It uses an operation that is not in the table.
    """
    names = [f"given{place}" for place in range(len(kinds))]
    examples = [torch.ones((2,) * (dimensions or 0), dtype=dtype, device="cpu") for dtype, dimensions in kinds]
    where = f"the function {getattr(function, '__name__', function)}"
    return spelled(lambda *tensors: function(*given, *tensors), examples, names, where, NUMBERS)


class Kernel:
    """A function's kernel, for tensors of certain kinds.

    It takes pointers to tensors, or numbers; pointers to results, but for those that it was given; lengths of vectors.

    Raises:
        UnsupportedError: The function uses an operation that is not in the table.
    """

    def __init__(self, function: Pure, given: tuple[Hashable, ...], kinds: Sequence[Kind]) -> None:
        self.function = written(function, given, kinds)
        names = [str(name) for name in self.function.names]
        self.vectors = [place for place, (_, dimensions) in enumerate(kinds) if dimensions]
        numbers = [name for name, (_, dimensions) in zip(names, kinds, strict=True) if dimensions is None]
        arguments = [name if name in numbers else f"{name}_at" for name in names]
        lines = [f"{name} = tl.load({name}_at)" for name, (_, n) in zip(names, kinds, strict=True) if n == 0]
        lines += self.function.body
        for place, result in enumerate(self.function.results):
            if result.word not in names:
                arguments.append(f"result{place}")
                words = [result.word] if isinstance(result.word, str) else result.word
                lines += [f"tl.store(result{place} + {at}, {word})" for at, word in enumerate(words)]
        lengths, name = [f"{names[place]}_length" for place in self.vectors], function.__name__.strip("_")
        source = (_TOTAL if lengths else "") + _FUNCTION.format(
            name=name,
            lengths=lengths,
            pointers=[each for each in arguments if each not in numbers],
            arguments=", ".join([*arguments, *lengths]),
            lines="\n    ".join(lines),
        )
        self.launch = Launch(jitted(source, name), _OPTIONS)

    def __call__(self, tensors: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
        """Launch it on a device, and return its results."""
        given = dict(zip(self.function.names, tensors, strict=True))
        made, found = [], []
        for result in self.function.results:
            if isinstance(result.word, str) and result.word in given:
                found.append(given[result.word])
            else:
                size = [] if isinstance(result.word, str) else [len(result.word)]
                made.append(torch.empty(size, dtype=result.dtype, device=device))
                found.append(made[-1])
        with on(device):
            self.launch(1, device, *tensors, *made, *[len(tensors[place]) for place in self.vectors])
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
            function: See :func:`written`.
            given: Its first arguments.
            tensors: The others; vectors without gaps.
        """
        kinds = [(each.dtype, each.dim()) if isinstance(each, Tensor) else (torch.float32, None) for each in tensors]
        devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            return function(*given, *tensors)
        key = (function, given, *kinds)
        if key not in self._known:
            try:
                self._known[key] = Kernel(function, given, kinds)
            except UnsupportedError as error:
                logger.debug("%s goes operation by operation, since %s", function.__name__, error)
                self._known[key] = None
        kernel = self._known[key]
        return function(*given, *tensors) if kernel is None else kernel(tensors, devices.pop())
