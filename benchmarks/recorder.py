"""What recording costs: a run with a recorder against the same run without, and a histogram against ``x.abs().max()``.

Run with ``make bench``. Each pair alternates, so that what disturbs the machine disturbs both. A ratio is above 1 by
what recording adds: 1.03 is 3 % of the run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

import lm
import mezzo
from harness import DEVICE, Row, paired, show, write
from mezzo.numerics import Recorder, exponent_histogram

Loop = Callable[[], None]
ELEMENTS = 1 << 22


class Run:
    """The model of ``lm.py``, step by step, compiled whole or not."""

    def __init__(self, policy: str, *, compiled: bool = False) -> None:
        self.model = lm.build(0).to(DEVICE)
        self._called = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.optimizer = torch.optim.AdamW(lm.groups(self.model), lr=2.5e-3, betas=(0.9, 0.99))
        self._amp = mezzo.MixedPrecision(self.model, self.optimizer, policy, max_grad_norm=1.0)
        self._batches = lm.batches(0)

    def step(self) -> None:
        inputs, targets = (tensor.to(DEVICE) for tensor in next(self._batches))
        with self._amp.autocast():
            loss = lm.loss(self._called(inputs), targets)
        self._amp.backward(loss)
        self._amp.step()
        self._amp.zero_grad()


def recorded(policy: str, every: int, steps: int, stack: ExitStack, *, compiled: bool) -> tuple[Loop, Loop]:
    """Return so many steps with a recorder, and without."""
    mine, rival = Run(policy, compiled=compiled), Run(policy, compiled=compiled)
    stack.enter_context(Recorder(mine.model, mine.optimizer, every=every))
    mine.step()  # the recorded one

    def loop(run: Run) -> Loop:
        def step() -> None:
            for _ in range(steps):
                run.step()

        return step

    return loop(mine), loop(rival)


def counted(values: torch.Tensor) -> tuple[Loop, Loop]:
    """Return a histogram of a tensor, and a pass that only reads it."""
    return lambda: exponent_histogram(values), lambda: values.abs().max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50, help="from one that is recorded to the next")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        timed = paired(*counted(torch.randn(ELEMENTS, device=DEVICE).to(dtype)), options.repetitions)
        name = str(dtype).removeprefix("torch.")
        rows.append(Row(name=f"histogram of 4 M {name}", against="x.abs().max()", **timed))
    for policy, compiled in (("O0", False), ("O1,dtype=bfloat16", False), ("O0", True)):
        for name, every, steps in (
            ("a recorded step, five kinds", 1, 1),
            ("a step not recorded", 10**9, 1),
            (f"{options.steps} steps, one of them recorded", options.steps, options.steps),
        ):
            with ExitStack() as stack:
                timed = paired(*recorded(policy, every, steps, stack, compiled=compiled), options.repetitions)
            how = f"{policy}, compiled" if compiled else policy
            rows.append(Row(name=f"six layers, {how}: {name}", against="no recorder", **timed))
    show(rows, "what recording costs, with / without")
    write(options.out, "recorder", rows, repetitions=options.repetitions, steps=options.steps)


if __name__ == "__main__":
    main()
