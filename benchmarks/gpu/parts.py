"""What is measured, in its order, with the time that each part may take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from . import ceilings, edges, placing, quantising, steps, training, variants
from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to measure, in a process of its own.

    Attributes:
        measure: Returns plain values.
        limit_s: After so many seconds it is ended; nothing of it is kept.
    """

    measure: Callable[[Plan], Any]
    limit_s: int


def _step(shapes: str, dtype: str, limit_s: int) -> Part:
    return Part(measure=functools.partial(steps.measure, name=shapes, dtype=dtype), limit_s=limit_s)


def _train(net: str, limit_s: int, *, compiled: bool = False) -> Part:
    return Part(measure=functools.partial(training.measure, net=net, compiled=compiled), limit_s=limit_s)


def _placements(model: str, limit_s: int) -> Part:
    return Part(measure=functools.partial(placing.measure, model=model), limit_s=limit_s)


#: By name, half an hour altogether; what the goals ask for comes before what they do not.
PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "ceilings": Part(measure=ceilings.measure, limit_s=60),
        "edges": Part(measure=edges.measure, limit_s=360),
        "step-bfloat16": _step("gpt2-small", "bfloat16", 120),
        "step-float16": _step("gpt2-small", "float16", 120),
        "step-tiny": _step("200-tiny", "bfloat16", 60),
        "fp8": Part(measure=quantising.measure, limit_s=120),
        "variants": Part(measure=variants.measure, limit_s=240),
        "train-gpt2": _train("gpt2-small", 150),
        "train-tiny": _train("64-tiny", 90),
        "train-gpt2-compiled": _train("gpt2-small", 240, compiled=True),
        "train-resnet": _train("resnet-50", 120),
        "plan-gpt": _placements("GPT block", 240),
        "plan-resnet": _placements("ResNet-50", 300),
        "edges-slow": Part(measure=edges.measure_slow, limit_s=240),
    }
)
