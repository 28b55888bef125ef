"""Parameter shapes of well-known networks, to step optimizers on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mezzo.errors import PolicyError, nearest

__all__ = ["SHAPES", "shapes"]

Shape = tuple[int, ...]


def _gpt2(vocabulary: int = 50257, width: int = 768, layers: int = 12) -> list[Shape]:
    """GPT-2 (Radford et al. 2019) with tied embeddings: 124 M parameters as it is."""
    vector = (width,)
    block: list[Shape] = [
        vector, vector, (3 * width, width), (3 * width,), (width, width), vector,
        vector, vector, (4 * width, width), (4 * width,), (width, 4 * width), vector,
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *block * layers, vector, vector]


def _resnet50() -> list[Shape]:
    """ResNet-50 (He et al. 2016): 25.6 M parameters in 161 tensors."""
    found: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            out = 4 * width
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
            if number == 0:
                convolutions.append((out, channels, 1, 1))
            for shape in convolutions:
                found += [shape, (shape[0],), (shape[0],)]
            channels = out
    return [*found, (1000, 2048), (1000,)]


#: Shapes by name.
SHAPES: Final[Mapping[str, Callable[[], list[Shape]]]] = MappingProxyType(
    {
        "gpt2-small": _gpt2,
        "gpt2-mini": lambda: _gpt2(vocabulary=8192, width=384, layers=6),
        "resnet-50": _resnet50,
        "200-tiny": lambda: [(64, 64)] * 200,
    }
)


def shapes(name: str) -> list[Shape]:
    """Return the shapes of a network's parameters.

    Args:
        name: ``gpt2-small`` (124 M), ``gpt2-mini`` (14 M), ``resnet-50`` (26 M) or ``200-tiny`` (0.8 M).

    Raises:
        PolicyError: Another name.

    Example:
        >>> import math
        >>> sum(map(math.prod, shapes("gpt2-small"))), sum(map(math.prod, shapes("resnet-50")))
        (124439808, 25557032)
    """
    if name not in SHAPES:
        raise PolicyError(f"unknown shapes {name!r}", why=nearest(name, SHAPES), write='"gpt2-small"')
    return SHAPES[name]()
