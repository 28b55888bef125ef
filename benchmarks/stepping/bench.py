"""``bench_step``: the optimizer step against what else a user could take, with bytes and bandwidth."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.table import Table

from mezzo.errors import PolicyError, UnsupportedError, nearest
from stepping.contenders import CAPTURED, CONTENDERS, Contender
from stepping.facts import checked_device, facts
from stepping.shapes import shapes
from stepping.timing import Behind, against, copying, nothing, rounds, spread

__all__ = ["StepResult", "StepRow", "bench_step"]

#: Of the copy that bandwidths are compared with: far beyond a cache, and on a GPU long beside the start of a kernel.
COPY_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 31}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One way to step.

    Attributes:
        name: Its name.
        step_ms: Median time of the step: of the device, which on a GPU has all of it before it begins.
        host_ms: Median time until the host has issued it; on a CPU the same.
        ahead: Whether the host had issued all of it before the device began, every time; where it had not (it reads
            the device, or takes longer than the device can be kept asleep), ``step_ms`` holds waits for the host.
        casts_ms: Median time of the casts of all weights that the next forward pass makes; 0 where it needs none.
        ratio: (step + casts) / the first contender's, pair by pair; below 1 is faster.
        ratio_p10: A tenth of the ratios are below.
        ratio_p90: A tenth are above.
        moved_bytes: Bytes a parameter read and written, by count.
        kept_bytes: Bytes a parameter kept between steps, gradients included, measured.
        bandwidth_share: Moved bytes a second, as a share of what this machine copies.
    """

    name: str
    step_ms: float
    host_ms: float
    ahead: bool
    casts_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    moved_bytes: float
    kept_bytes: float
    bandwidth_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What ``bench_step`` measured, with the machine and the date."""

    shapes: str
    num_parameters: int
    dtype: str
    device: str
    machine: str
    threads: int
    cores: int
    torch: str
    python: str
    date: str
    repetitions: int
    copy_gb_per_s: float
    rows: list[StepRow]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """Return a table to print."""
        table = Table(
            title=f"optimizer step, {self.shapes} ({self.num_parameters / 1e6:.4g} M parameters), {self.dtype}, "
            f"clipping on; {self.machine}, {self.threads} threads, copies {self.copy_gb_per_s:.3g} GB/s"
        )
        on_gpu = self.device == "cuda"
        host = ("host ms",) if on_gpu else ()
        for name in ("", "step ms", *host, "casts ms", "ratio", "10–90 %", "bytes moved", "bytes kept", "of bandwidth"):
            table.add_column(name, justify="left" if not name else "right", overflow="fold")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.step_ms:.4g}",
                *([f"{row.host_ms:.3g}{'' if row.ahead else ' waits'}"] if on_gpu else []),
                f"{row.casts_ms:.3g}" if row.casts_ms else "–",
                f"{row.ratio:.2f}",
                f"{row.ratio_p10:.2f}–{row.ratio_p90:.2f}",
                f"{row.moved_bytes:g}",
                f"{row.kept_bytes:.3g}",
                f"{row.bandwidth_share:.0%}",
            )
        return table


def bench_step(
    name: str = "gpt2-mini",
    *,
    dtype: str = "bfloat16",
    device: str | torch.device = "cpu",
    repetitions: int = 15,
    contenders: list[str] | None = None,
) -> StepResult:
    """Time one optimizer step in each way that a user could take it, each in turns with the first and with a copy.

    Args:
        name: Shapes to step on: see :func:`stepping.shapes.shapes`.
        dtype: The low precision, ``"bfloat16"`` or ``"float16"``.
        device: Where.
        repetitions: Rounds.
        contenders: Names of :data:`stepping.contenders.CONTENDERS`, on CUDA of ``CAPTURED`` too; all when omitted.
            The first is the rival.

    Returns:
        Times, ratios with their spread, bytes, and the share of this machine's copy bandwidth.

    Raises:
        PolicyError: Unknown shapes, dtype, device or contender.
        UnsupportedError: The device is not there, or a contender is not there on it.

    **Cost**: memory for two contenders at once, some 45 bytes a parameter, and for the copy: 0.5 GiB, on a GPU 4 GiB.
    """
    if dtype not in ("bfloat16", "float16"):
        raise PolicyError(f"unknown dtype {dtype!r}", why=nearest(dtype, ("bfloat16", "float16")))
    where, low, sizes = checked_device(device), getattr(torch, dtype), shapes(name)
    there = {**CONTENDERS, **CAPTURED} if where.type == "cuda" else CONTENDERS
    names = list(there) if contenders is None else contenders
    _check(names, there, where)
    count = sum(map(math.prod, sizes))
    copy = copying(where, COPY_BYTES[where.type])
    rows, bandwidths = [], []
    for each in names:
        row, bandwidth = _timed({key: there[key] for key in (names[0], each)}, copy, sizes, low, where, repetitions)
        rows.append(row)
        bandwidths.append(bandwidth)
        gc.collect()
    return StepResult(
        shapes=name,
        num_parameters=count,
        dtype=dtype,
        repetitions=repetitions,
        copy_gb_per_s=spread(bandwidths).median / 1e9,
        rows=rows,
        **facts(where),
    )


def _check(names: list[str], there: Mapping[str, Contender], device: torch.device) -> None:
    for name in names:
        if name in CAPTURED and name not in there:
            raise UnsupportedError(f"{name}: there is no CUDA graph on {device}", write=name.rpartition(",")[0])
        if name not in there:
            raise PolicyError(f"unknown contender {name!r}", why=nearest(name, there))


def _timed(
    contenders: Mapping[str, Contender],
    copy: Callable[[], object],
    sizes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    repetitions: int,
) -> tuple[StepRow, float]:
    """Return the row of the last contender against the first, and how many bytes a second were copied meanwhile."""
    rival, name = next(iter(contenders)), list(contenders)[-1]
    ready = {each: contender.build(sizes, dtype, device) for each, contender in contenders.items()}
    calls = {each: (r.before, r.step) for each, r in ready.items()}
    calls |= {f"{each} casts": (nothing, r.casts) for each, r in ready.items() if r.casts is not None}
    calls["copy"] = (nothing, copy)
    found = rounds(calls, Behind(device), repetitions)
    taken = {each: [one.seconds for one in times] for each, times in found.items()}
    none = [0.0] * repetitions
    totals = {
        each: [step + casts for step, casts in zip(taken[each], taken.get(f"{each} casts", none), strict=True)]
        for each in ready
    }
    ratio = against(totals[name], totals[rival])
    ready[name].before()  # some steps free the gradients
    count, moved, copied = sum(map(math.prod, sizes)), contenders[name].moved_bytes, 2 * COPY_BYTES[device.type]
    row = StepRow(
        name=name,
        step_ms=1e3 * spread(taken[name]).median,
        host_ms=1e3 * spread([one.host_seconds for one in found[name]]).median,
        ahead=all(one.ahead for one in found[name]),
        casts_ms=1e3 * spread(taken.get(f"{name} casts", none)).median,
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        moved_bytes=moved,
        kept_bytes=sum(tensor.nbytes for tensor in ready[name].kept()) / count,
        bandwidth_share=moved * count / copied * against(taken["copy"], totals[name]).median,
    )
    return row, copied / spread(taken["copy"]).median
