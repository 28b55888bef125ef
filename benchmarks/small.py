"""A small model under mezzo against torch.amp, paired in one run: where Python, and not arithmetic, takes the time.

Run with ``make bench``. Prints ratios (below 1 is faster than torch.amp) and writes one dated JSON file under
``benchmarks/results/``. Each pair alternates, so that what disturbs the machine disturbs both. A row is many calls of
one loop: those of policies and small networks of games take some 0.1 ms each.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn

import mezzo
from harness import DEVICE, Row, paired, show, write

Loop = Callable[[], None]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

#: Calls, and whole training steps, in one measurement.
CALLS, STEPS = 100, 20

OPTIMIZERS: dict[str, Make] = {
    "torch's Adam": torch.optim.Adam,
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "torch's SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "mezzo's AdamW": mezzo.optim.AdamW,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    return nn.Sequential(*layers).to(DEVICE)


def batch() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def repeated(count: int, once: Loop) -> Loop:
    def loop() -> None:
        for _ in range(count):
            once()

    return loop


def torch_call() -> Loop:
    model, x = network(), batch()

    def call() -> None:
        with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
            model(x)

    return repeated(CALLS, call)


def torch_training(make: Make) -> Loop:
    model, x = network(), batch()
    optimizer = make([*model.parameters()])

    def step() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return repeated(STEPS, step)


class Attached:
    """Loops of a model that is attached; a process has one session at a time, which begins and ends around each."""

    def __init__(self, make: Make, policy: str) -> None:
        self.model, self.x, self.policy = network(), batch(), policy
        self.optimizer = make([*self.model.parameters()])

    def __enter__(self) -> Attached:
        self.amp = mezzo.attach(self.model, self.optimizer, self.policy)
        return self

    def __exit__(self, *_: object) -> None:
        self.amp.detach()

    def call(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def five_lines(make: Make, policy: str) -> Loop:
    model, x = network(), batch()
    amp = mezzo.MixedPrecision(model, make([*model.parameters()]), policy)

    def step() -> None:
        with amp.autocast():
            out = model(x)
        amp.backward(out.float().square().mean())
        amp.step()
        amp.zero_grad()

    return repeated(STEPS, step)


def rows(repetitions: int) -> Iterator[Row]:
    """Yield what is compared, against what."""
    for policy in ("O1,bf16", "O1,bf16,emulate=true", "O1,bf16,lists=device", "O2,bf16"):
        with Attached(torch.optim.Adam, policy) as attached:
            figures = paired(repeated(CALLS, attached.call), torch_call(), repetitions)
        yield Row(name=f"{CALLS} calls under no_grad, attached, {policy}", against="torch.amp", **figures)
    for name, make in OPTIMIZERS.items():
        rival = torch_training(make if name != "mezzo's AdamW" else torch.optim.AdamW)
        with Attached(make, "O1,bf16") as attached:
            figures = paired(repeated(STEPS, attached.step), rival, repetitions)
        yield Row(name=f"{STEPS} training steps, attached, {name}", against="torch.amp", **figures)
        figures = paired(five_lines(make, "O1,bf16"), rival, repetitions)
        yield Row(name=f"{STEPS} training steps, five lines, {name}", against="torch.amp", **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found = [*rows(options.repetitions)]
    show(found, "mezzo / torch.amp: a small model")
    write(options.out, "small", found, repetitions=options.repetitions)


if __name__ == "__main__":
    main()
