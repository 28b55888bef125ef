"""What one training step asks of the machine, counted from a profile of it: calls, kernels, syncs, memory."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["SYNCS", "Events", "counted", "observe"]

#: What ``Events.syncs`` counts, by device type.
SYNCS: Final[Mapping[str, str]] = {
    "cpu": "reads of a tensor's value (aten::_local_scalar_dense) outside of torch's fused optimizer kernels, "
    "which read device memory by themselves on a GPU",
    "cuda": "calls that torch.cuda.set_sync_debug_mode reports",
}

_LAUNCH: Final = re.compile(r"Launch\w*Kernel|GraphLaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What one step asked of the machine.

    Attributes:
        calls: aten operators called, by Python and by autograd; not those which another aten operator calls, nor
            kernels that ``torch.compile`` made.
        kernels: GPU kernels that ran, copies and fills not counted; None on a CPU.
        launches: How often the host started something on the GPU; one for a whole captured step. None on a CPU.
        syncs: How often the host waited: see :data:`SYNCS`.
        growth_bytes: On a CPU the most that was allocated beyond what there was before the step; None on a GPU.
    """

    calls: int
    kernels: int | None
    launches: int | None
    syncs: int
    growth_bytes: int | None


def observe(step: Callable[[], object], device: torch.device) -> Events:
    """Run a step under the profiler, and on a GPU once more to count syncs.

    Args:
        step: The step; what it compiles is to be compiled before.
        device: A CPU or a CUDA device.

    Returns:
        Its events.

    **Cost**: one or two steps, many times slower than others.

    Example:
        >>> x = torch.zeros(1000)
        >>> found = observe(lambda: x.exp().sum().item(), torch.device("cpu"))
        >>> found.calls, found.syncs, found.growth_bytes  # exp, sum, item; 1000 floats and their sum
        (3, 1, 4004)
    """
    on_cpu = device.type == "cpu"
    activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, profile_memory=on_cpu, acc_events=True) as profiled:  # else torch 2.11 warns
        step()
        if not on_cpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    return counted(trace, None if on_cpu else _cuda_syncs(step))


def counted(trace: Iterable[Mapping[str, Any]], cuda_syncs: int | None) -> Events:
    """Count the events of a Chrome trace as ``torch.profiler`` writes it.

    Args:
        trace: Its ``traceEvents``.
        cuda_syncs: Syncs of the same step on a GPU; None for a trace of a CPU, which tells them by itself.
    """
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for event in trace:
        by_category.setdefault(event.get("cat", ""), []).append(event)
    ops = [event for event in by_category.get("cpu_op", []) if event["name"].startswith("aten::")]
    if cuda_syncs is None:
        fused = [event for event in ops if event["name"].startswith("aten::_fused_")]
        reads = [event for event in ops if event["name"] == "aten::_local_scalar_dense"]
        outside = len(reads) - sum(_within(event, span) for event in reads for span in fused)
        growth = _growth(by_category.get("cpu_instant_event", []))
        return Events(calls=_outermost(ops), kernels=None, launches=None, syncs=outside, growth_bytes=growth)
    started = [*by_category.get("cuda_runtime", []), *by_category.get("cuda_driver", [])]
    return Events(
        calls=_outermost(ops),
        kernels=len(by_category.get("kernel", [])),
        launches=sum(_LAUNCH.search(event["name"]) is not None for event in started),
        syncs=cuda_syncs,
        growth_bytes=None,
    )


def _outermost(ops: list[Mapping[str, Any]]) -> int:
    """Count the spans that lie in no other of their thread."""
    ends: dict[Any, float] = {}
    count = 0
    for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
        if op["ts"] >= ends.get(op["tid"], float("-inf")):
            ends[op["tid"]] = op["ts"] + op["dur"]
            count += 1
    return count


def _within(event: Mapping[str, Any], span: Mapping[str, Any]) -> bool:
    begins = span["ts"] <= event["ts"] < span["ts"] + span["dur"]
    return bool(begins and event["tid"] == span["tid"])


def _growth(instants: list[Mapping[str, Any]]) -> int:
    """Return the highest running sum of the allocations and frees."""
    memory = [event for event in instants if event["name"] == "[memory]"]
    now = highest = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        highest = max(highest, now)
    return highest


def _cuda_syncs(step: Callable[[], object]) -> int:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in said)
