"""What this GPU can do at best: bandwidth of a copy, and the price of a kernel that does nothing much."""

from __future__ import annotations

import time
from typing import Any

import torch

import mezzo
from stepping.timing import Behind, copying, seconds, spread

from .plan import Plan

POLICIES = ("O1,dtype=float16", "O1,dtype=bfloat16", "O2,dtype=float16", "O2,dtype=bfloat16")
KERNELS = 200


def measure(plan: Plan) -> dict[str, Any]:
    """Copies of two sizes by two clocks, one-element kernels in a stream and in a graph, sessions."""
    return {
        "copies": [_copy(plan, mib) for mib in ((1, 2) if plan.dry else (256, 2048))],
        "one_element_kernel": _kernel(plan),
        "sessions": [_session(plan, policy) for policy in POLICIES],
    }


def _copy(plan: Plan, mib: int) -> dict[str, float]:
    """Bytes read and written a second: by events behind a sleep, and by the host's clock from an idle device."""
    call, behind = copying(plan.device, mib << 20), Behind(plan.device)
    moved, rounds = 2 * (mib << 20), 2 * plan.repetitions
    call()
    return {
        "mib": mib,
        "tb_per_s": moved / spread([behind(call).seconds for _ in range(rounds)]).median / 1e12,
        "tb_per_s_from_idle": moved / spread([seconds(call, plan.device) for _ in range(rounds)]).median / 1e12,
    }


def _kernel(plan: Plan) -> dict[str, float | None]:
    one = torch.ones((), device=plan.device)

    def chain() -> None:
        result = one
        for _ in range(KERNELS):
            result = result * 1.0

    chain()
    behind = Behind(plan.device)
    taken = [behind(chain) for _ in range(plan.repetitions + 1)][1:]
    found: dict[str, float | None] = {
        "stream_us": 1e6 * spread([each.seconds for each in taken]).median / KERNELS,
        "host_us": 1e6 * spread([each.host_seconds for each in taken]).median / KERNELS,
        "graph_us": None,
    }
    if plan.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        replays = [behind(graph.replay).seconds for _ in range(plan.repetitions + 1)][1:]
        found["graph_us"] = 1e6 * spread(replays).median / KERNELS
    return found


def _session(plan: Plan, policy: str) -> dict[str, Any]:
    """What it takes to have a session, and whether its regions need Python at each operation."""
    model = torch.nn.Linear(8, 8, device=plan.device)
    start = time.perf_counter()
    emulated = "" if plan.device.type == "cuda" else ",emulate=true"
    amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), fused=True), policy + emulated)
    region = amp.autocast()
    taken = time.perf_counter() - start
    found = {"policy": policy, "s": taken, "covers": list(region.device_types), "has_mode": region.has_differences}
    amp.close()
    return found
