"""What a checked step costs beyond the bare optimizer step: mezzo's session against torch.amp's GradScaler.

Run with ``make bench``. Both clip. The three steps (bare, ``GradScaler``, ``MixedPrecision``) take turns; a ratio
compares what the two add to the bare one, and is below 1 where mezzo adds less. Gradients are made outside the timed
part. GradScaler's part is ``unscale_``, ``clip_grad_norm_``, ``step`` and ``update``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn

import mezzo
from harness import DEVICE, Case, Row, overheads, show, write

SHAPES = {"200 of 64×64": [(64, 64)] * 200, "3 of 1024×1024": [(1024, 1024)] * 3}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def inside(optimizer: torch.optim.Optimizer) -> Callable[[], float] | None:
    """Return what tells how long the optimizer's own step took last, if that does no more than the bare one."""
    if optimizer.defaults.get("fused"):
        return None
    marks = [0.0, 0.0]
    optimizer.register_step_pre_hook(lambda *_: marks.__setitem__(0, time.perf_counter()))
    optimizer.register_step_post_hook(lambda *_: marks.__setitem__(1, time.perf_counter()))
    return lambda: marks[1] - marks[0]


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

    return Case(ready, step, inside(optimizer))


def mezzo_session(shapes: list[tuple[int, ...]], make: Callable[..., torch.optim.Optimizer]) -> Case:
    made = Parameters(shapes)
    policy = "O1,loss_scale=dynamic(init=1024),emulate=true"
    optimizer = make(made.params)
    amp = mezzo.MixedPrecision(nn.ParameterList(made.params), optimizer, policy, max_grad_norm=1.0)
    zero = torch.zeros((), device=DEVICE, requires_grad=True)

    def ready() -> None:
        amp.zero_grad()
        amp.backward(zero * 1.0)
        made.set_gradients()

    return Case(ready, amp.step, inside(optimizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for sizes, shapes in SHAPES.items():
        for name, make in OPTIMIZERS.items():
            cases = [build(shapes, make) for build in (bare, mezzo_session, torch_amp)]
            timed = overheads(*cases, repetitions=options.repetitions)
            rows.append(Row(name=f"{sizes}, {name}", against="GradScaler", **timed))
    show(rows, "what a checked step adds to the bare optimizer step, mezzo / GradScaler")
    write(options.out, "scaler", rows, repetitions=options.repetitions)


if __name__ == "__main__":
    main()
