"""The optimizer step: ``benchmarks/step.py``, and the kernels that it consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from stepping import bench_step
from stepping.bench import COPY_BYTES
from stepping.contenders import CONTENDERS
from stepping.shapes import shapes

from .plan import Plan

#: Whose kernels are listed.
LISTED = (
    "mezzo O2, AdamW split",
    "mezzo O2, AdamW split, BF16 moments",
    "mezzo O2, AdamW split, int8 moments",
)
#: Microseconds from which on a kernel is one of those that move the bytes.
LARGE = 20.0


def measure(plan: Plan, name: str, dtype: str) -> dict[str, Any]:
    """Time every contender, and list the kernels of mezzo's own."""
    name = "200-tiny" if plan.dry else name
    few = [next(iter(CONTENDERS)), *LISTED] if plan.dry else None
    with patch.dict(COPY_BYTES, {"cpu": 1 << 20} if plan.dry else {}):
        result = bench_step(name, dtype=dtype, device=plan.device, repetitions=plan.repetitions, contenders=few)
    return {**result.to_json(), "kernels": [_kernels(plan, name, dtype, each) for each in LISTED]}


def _kernels(plan: Plan, name: str, dtype: str, contender: str) -> dict[str, Any]:
    sizes = shapes(name)
    ready = CONTENDERS[contender].build(sizes, getattr(torch, dtype), plan.device)
    for _ in range(3):
        ready.before()
        ready.step()
    ready.before()
    times = on_device(ready.step, plan.device)
    large = {kernel: sum(each) for kernel, each in times.items() if max(each) > LARGE}
    return {
        "name": contender,
        "tensors": len(sizes),
        "large_us": large,
        "small": sum(len(each) for kernel, each in times.items() if kernel not in large),
        "small_us": sum(sum(each) for kernel, each in times.items() if kernel not in large),
    }


def on_device(call: Callable[[], object], device: torch.device) -> dict[str, list[float]]:
    """Return the microseconds of each launch of each kernel of a call, by name; of a CPU there are none."""
    found: dict[str, list[float]] = defaultdict(list)
    if device.type != "cuda":
        call()
        return found
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize(device)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            found[event.name].append(event.device_time)
    return found
