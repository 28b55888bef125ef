"""The host's time of a step, on a CUDA device that computes nothing: so much for any step, and so much more a tensor.

Run with ``make bench``; it needs g++, Triton, and torch's CPU build. The device is that of ``tests/fake_cuda``, with
real tensors: each launch is issued as on a GPU and comes back at once, so that what is left is the host's. mezzo's
checked, clipped step takes turns with torch.amp's (``GradScaler`` where gradients are FP16, ``clip_grad_norm_``, fused
AdamW); gradients are made outside the timed part, by a forward and a backward pass. Times are the thread's own on its
processor, of a round the least of its steps: on a shared machine the work of others is no part of them, but what it
does to the caches is. Ratios are medians over rounds; what a tensor adds is read off the least times of all.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fake_cuda"))

import building
import machine

FAKE = os.environ.get("MEZZO_HOST_DEVICE")
if FAKE:  # before torch is imported, which looks for devices once
    ctypes.CDLL(FAKE)

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

if FAKE:
    machine.plug_in(Path(FAKE), has_memory=True)

import mezzo
from harness import write_dated
from mezzo.compat import torch as compat
from mezzo.files import cache_folder
from stepping.facts import facts
from stepping.timing import against

#: By name: the policy, and the optimizer; none for torch.amp's own program with its import changed.
CASES: dict[str, tuple[str, Callable[..., torch.optim.Optimizer] | None]] = {
    "O1 BF16, AdamW": ("O1,dtype=bfloat16", mezzo.optim.AdamW),
    "O1 FP16, AdamW": ("O1,dtype=float16", mezzo.optim.AdamW),
    "O2 BF16, AdamW": ("O2,dtype=bfloat16", mezzo.optim.AdamW),
    "O1 BF16, torch's fused AdamW": ("O1,dtype=bfloat16", lambda params: torch.optim.AdamW(params, fused=True)),
    "O1 FP16, torch's fused AdamW": ("O1,dtype=float16", lambda params: torch.optim.AdamW(params, fused=True)),
    "O2 BF16, torch's fused AdamW": ("O2,dtype=bfloat16", lambda params: torch.optim.AdamW(params, fused=True)),
    "torch style FP16, torch's fused AdamW": ("O1,dtype=float16", None),
}
WARM_UP = 5
STEPS = 5


class Net(nn.Module):
    """So many square weights, one after the other."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(16, 16)) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.mm(x, weight)
        return x


def of_mezzo(tensors: int, policy: str, make: Callable[..., torch.optim.Optimizer]) -> Callable[[], float]:
    """Return what takes a training step, and returns the seconds of its last part."""
    with torch.device("cuda"):
        net, batch = Net(tensors), torch.empty(8, 16)
    amp = mezzo.MixedPrecision(net, make(net.parameters()), policy, max_grad_norm=1.0)

    def step() -> float:
        with amp.autocast():
            loss = net(batch).float().square().mean()
        amp.backward(loss)
        seconds = timed(amp.step)
        amp.zero_grad()
        return seconds

    return step


def of_torch(tensors: int, policy: str, amp: Any = torch.amp) -> Callable[[], float]:
    """Return the same of torch.amp, whose weights are FP32, or of what has its names."""
    with torch.device("cuda"):
        net, batch = Net(tensors), torch.empty(8, 16)
    dtype = mezzo.Policy.parse(policy).dtype
    params, optimizer = list(net.parameters()), torch.optim.AdamW(net.parameters(), fused=True)
    scaler = amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def checked() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    def step() -> float:
        with amp.autocast("cuda", dtype):
            loss = net(batch).float().square().mean()
        scaler.scale(loss).backward()
        seconds = timed(checked)
        optimizer.zero_grad()
        return seconds

    return step


def timed(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def in_turns(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the least time of each round, in milliseconds, by name."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            seconds[name].append(1e3 * min(steps[name]() for _ in range(STEPS)))
    return seconds


def line(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Return the least-squares line through times: milliseconds of any step, and microseconds of each tensor."""
    slope, base = statistics.linear_regression(sizes, times)
    return base, 1e3 * slope


def row(name: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Measure one case at each size: the ratio is that of the largest, lines go through the least times."""
    policy, make = CASES[name]
    mine = partial(of_torch, amp=compat) if make is None else partial(of_mezzo, make=make)
    taken = [in_turns({"mezzo": mine(n, policy), "torch": of_torch(n, policy)}, rounds) for n in sizes]
    least = {who: [min(counts[who]) for counts in taken] for who in ("mezzo", "torch")}
    ratio = against(taken[-1]["mezzo"], taken[-1]["torch"])
    (base, tensor), (rival_base, rival_tensor) = (line(sizes, least[who]) for who in ("mezzo", "torch"))
    return {
        "name": name, "against": "torch.amp, fused AdamW", "ratio": ratio.median, "ratio_p10": ratio.p10,
        "ratio_p90": ratio.p90, "base_ms": base, "tensor_us": tensor, "rival_base_ms": rival_base,
        "rival_tensor_us": rival_tensor, "mezzo_ms": least["mezzo"], "rival_ms": least["torch"],
    }  # fmt: skip


def show(rows: list[dict[str, Any]], tensors: int) -> None:
    title = f"the host's time of a step; ratios with {tensors} tensors"
    table = Table("step", "ratio", "10–90 %", "any step, ms", "a tensor, µs", "torch.amp: ms", "µs", title=title)
    for row in rows:
        tenths = f"{row['ratio_p10']:.2f}–{row['ratio_p90']:.2f}"
        times = [f"{row[name]:.3g}" for name in ("base_ms", "tensor_us", "rival_base_ms", "rival_tensor_us")]
        table.add_row(row["name"], f"{row['ratio']:.2f}", tenths, *times)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[20, 150, 600])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not FAKE:
        if (reason := building.obstacle()) is not None:
            print(f"not measured: {reason}")
            return
        made = building.library(cache_folder(), "device.cpp", "operations.cpp")
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MEZZO_HOST_DEVICE": str(made)})
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    gc.disable()
    rows = [row(name, options.tensors, options.rounds) for name in CASES]
    show(rows, options.tensors[-1])
    result = {
        **facts(torch.device("cpu")), "mezzo": mezzo.__version__, "load": round(load, 1), "tensors": options.tensors,
        "rounds": options.rounds, "steps": STEPS, "rows": rows,
    }  # fmt: skip
    print(f"written to {write_dated(options.out, 'host', result)}")


if __name__ == "__main__":
    main()
