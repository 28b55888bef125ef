"""What a checked step costs beyond the bare optimizer step: mezzo's session against torch.amp's GradScaler.

Run with ``make bench``. Both clip. The three steps (bare, ``GradScaler``, ``MixedPrecision``) take turns; a ratio
compares what the two add to the bare one, and is below 1 where mezzo adds less. Gradients are made outside the timed
part. GradScaler's part is ``unscale_``, ``clip_grad_norm_``, ``step`` and ``update``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn

import mezzo
from harness import DEVICE, Row, overheads, show, write

SHAPES = {"200 of 64×64": [(64, 64)] * 200, "3 of 1024×1024": [(1024, 1024)] * 3}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """A step, and what makes its gradients ready."""

    ready: Callable[[], None]
    step: Callable[[], object]


class Parameters:
    """Parameters with gradients to be set before each step."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
        self._gradients = [torch.randn_like(param) for param in self.params]

    def set_gradients(self) -> None:
        for param, gradient in zip(self.params, self._gradients, strict=True):
            param.grad = gradient.clone()


def bare(shapes: list[tuple[int, ...]], make: Callable[..., torch.optim.Optimizer]) -> Case:
    made = Parameters(shapes)
    return Case(made.set_gradients, make(made.params).step)


def torch_amp(shapes: list[tuple[int, ...]], make: Callable[..., torch.optim.Optimizer]) -> Case:
    made = Parameters(shapes)
    optimizer, scaler = make(made.params), torch.amp.GradScaler(DEVICE, init_scale=1024.0)

    def ready() -> None:
        scaler.scale(torch.ones((), device=DEVICE))
        made.set_gradients()

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(made.params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Case(ready, step)


def mezzo_session(shapes: list[tuple[int, ...]], make: Callable[..., torch.optim.Optimizer]) -> Case:
    made = Parameters(shapes)
    policy = "O1,loss_scale=dynamic(init=1024),emulate=true"
    amp = mezzo.MixedPrecision(nn.ParameterList(made.params), make(made.params), policy, max_grad_norm=1.0)
    zero = torch.zeros((), device=DEVICE, requires_grad=True)

    def ready() -> None:
        amp.zero_grad()
        amp.backward(zero * 1.0)
        made.set_gradients()

    return Case(ready, amp.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for sizes, shapes in SHAPES.items():
        for name, make in OPTIMIZERS.items():
            cases = [build(shapes, make) for build in (bare, mezzo_session, torch_amp)]
            timed = overheads(*((case.ready, case.step) for case in cases), repetitions=options.repetitions)
            rows.append(Row(name=f"{sizes}, {name}", against="GradScaler", **timed))
    show(rows, "what a checked step adds to the bare optimizer step, mezzo / GradScaler")
    write(options.out, "scaler", rows, repetitions=options.repetitions)


if __name__ == "__main__":
    main()
