"""mezzo's session against torch.amp, paired in one run: whole training steps.

Run with ``make bench``. Prints ratios (below 1 is faster than torch.amp) and writes one dated JSON file under
``benchmarks/results/``. Each pair alternates, so that what disturbs the machine disturbs both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn
from torch.nn import functional

import mezzo
from harness import DEVICE, Row, paired, show, write

Loop = Callable[[], None]


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(256, 256), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                         nn.Linear(256, 256)).to(DEVICE)  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def torch_amp_training(dtype: torch.dtype | None) -> Loop:
    """The loop of torch's own documentation; ``None`` is FP32."""
    model, data = transformer(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    region = (lambda: torch.autocast(DEVICE, dtype=dtype)) if dtype else contextlib.nullcontext

    def step() -> None:
        with region():
            loss = functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def mezzo_training(policy: str) -> Loop:
    model, data = transformer(), tokens()
    amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy, max_grad_norm=1.0)

    def step() -> None:
        with amp.autocast():
            loss = functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    return step


TRAINING = [
    ("O0", None, "FP32"),
    ("O1,dtype=bfloat16,lists=device", torch.bfloat16, "torch.amp bfloat16"),
    ("O1,dtype=bfloat16", torch.bfloat16, "torch.amp bfloat16"),
    ("O2,dtype=bfloat16", torch.bfloat16, "torch.amp bfloat16"),
    ("O1,dtype=bfloat16", None, "FP32"),
    ("O2,dtype=bfloat16", None, "FP32"),
]


def cases() -> Iterator[tuple[str, str, Loop, Loop]]:
    """Yield what is compared, against what, and both loops."""
    for policy, dtype, against in TRAINING:
        yield f"training step, {policy}", against, mezzo_training(policy), torch_amp_training(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = [
        Row(name=name, against=against, **paired(mine, rival, options.repetitions))
        for name, against, mine, rival in cases()
    ]
    show(rows, "mezzo / rival: whole training steps")
    write(options.out, "session", rows, repetitions=options.repetitions)


if __name__ == "__main__":
    main()
