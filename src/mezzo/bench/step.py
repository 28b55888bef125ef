"""``bench_step``: the optimizer step against what else a user could take, with bytes and bandwidth."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.table import Table

from mezzo.bench.contenders import CONTENDERS
from mezzo.bench.facts import checked_device, facts
from mezzo.bench.shapes import shapes
from mezzo.bench.timing import against, copying, in_turns, spread
from mezzo.errors import PolicyError, nearest

__all__ = ["StepResult", "StepRow", "bench_step"]

#: Of the copy that bandwidths are compared with; far beyond a cache.
COPY_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One way to step.

    Attributes:
        name: Its name.
        step_ms: Median time of the step.
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
        for name in ("", "step ms", "casts ms", "ratio", "10–90 %", "bytes moved", "bytes kept", "of bandwidth"):
            table.add_column(name, justify="left" if not name else "right")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.step_ms:.4g}",
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
        name: Shapes to step on: see :func:`mezzo.bench.shapes.shapes`.
        dtype: The low precision, ``"bfloat16"`` or ``"float16"``.
        device: Where.
        repetitions: Rounds.
        contenders: Names of :data:`mezzo.bench.contenders.CONTENDERS`; all when omitted. The first is the rival.

    Returns:
        Times, ratios with their spread, bytes, and the share of this machine's copy bandwidth.

    Raises:
        PolicyError: Unknown shapes, dtype, device or contender.
        UnsupportedError: The device is not there.

    **Cost**: memory for two contenders at once, some 45 bytes a parameter.
    """
    if dtype not in ("bfloat16", "float16"):
        raise PolicyError(f"unknown dtype {dtype!r}", why=nearest(dtype, ("bfloat16", "float16")))
    names = list(CONTENDERS) if contenders is None else contenders
    if unknown := [each for each in names if each not in CONTENDERS]:
        raise PolicyError(f"unknown contender {unknown[0]!r}", why=nearest(unknown[0], CONTENDERS))
    where, low, sizes = checked_device(device), getattr(torch, dtype), shapes(name)
    count = sum(map(math.prod, sizes))
    rows, bandwidths = [], []
    for each in names:
        row, bandwidth = _timed(each, names[0], sizes, low, where, repetitions)
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


def _timed(
    name: str, rival: str, sizes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, repetitions: int
) -> tuple[StepRow, float]:
    """Return a contender's row, and how many bytes a second the device copied meanwhile."""
    ready = {each: CONTENDERS[each].build(sizes, dtype, device) for each in dict.fromkeys((rival, name))}
    calls = {each: (r.before, r.step) for each, r in ready.items()}
    calls |= {f"{each} casts": (_nothing, r.casts) for each, r in ready.items() if r.casts is not None}
    calls["copy"] = (_nothing, copying(device, COPY_BYTES))
    taken = in_turns(calls, device, repetitions)
    none = [0.0] * repetitions
    totals = {
        each: [step + casts for step, casts in zip(taken[each], taken.get(f"{each} casts", none), strict=True)]
        for each in ready
    }
    ratio = against(totals[name], totals[rival])
    ready[name].before()  # some steps free the gradients
    count, moved = sum(map(math.prod, sizes)), CONTENDERS[name].moved_bytes[dtype]
    row = StepRow(
        name=name,
        step_ms=1e3 * spread(taken[name]).median,
        casts_ms=1e3 * spread(taken.get(f"{name} casts", none)).median,
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        moved_bytes=moved,
        kept_bytes=sum(tensor.nbytes for tensor in ready[name].kept()) / count,
        bandwidth_share=moved * count / (2 * COPY_BYTES) * against(taken["copy"], totals[name]).median,
    )
    return row, 2 * COPY_BYTES / spread(taken["copy"]).median


def _nothing() -> None:
    """What makes a call ready that needs nothing."""
