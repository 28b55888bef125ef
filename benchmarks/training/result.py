"""What ``bench_train`` measured, as plain values and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

__all__ = ["TrainResult", "TrainRow", "row_name"]


def row_name(way: str, *, compiled: bool) -> str:
    """Return what a row is called."""
    return f"{way}, compiled" if compiled else way


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One way to train.

    Attributes:
        way: A name of :data:`training.ways.WAYS`.
        compiled: Whether the model went through ``torch.compile``.
        tf32: Whether FP32 products used TF32.
        against: What it took turns with.
        step_ms: Median time of a step.
        ratio: Its time / that of ``against``, pair by pair; below 1 is faster.
        ratio_p10: A tenth of the ratios are below.
        ratio_p90: A tenth are above.
        items_per_s: Tokens or samples a second.
        peak_bytes: Most bytes alive at once in a training step. On a GPU: allocated from the model's making to the
            end of the first steps, above what there was before; of a captured way with the copy of weights and masters
            that a capture holds while it runs. On a CPU: weights, masters, optimizer state and
            batch, and what a step allocates beyond them.
        calls: aten operators called: see :class:`training.events.Events`.
        kernels: GPU kernels a step; None on a CPU.
        launches: What the host started on the GPU; None on a CPU.
        syncs: Host syncs a step, as ``syncs_are`` of the result has it.
        first_loss: Before the first step.
        last_loss: After the timed ones.
    """

    way: str
    compiled: bool
    tf32: bool
    against: str
    step_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    items_per_s: float
    peak_bytes: int
    calls: int
    kernels: int | None
    launches: int | None
    syncs: int
    first_loss: float
    last_loss: float

    @property
    def name(self) -> str:
        """What the row is called."""
        return row_name(self.way, compiled=self.compiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What ``bench_train`` measured, with the machine and the date.

    Attributes:
        entries: What the size stands for: width, layers, batch and so on.
        unit: What ``items_per_step`` counts.
        steps_per_round: Steps that were timed together.
        syncs_are: What was counted as a host sync.
        notes: What was left out and why, and what computes otherwise than it says.
    """

    net: str
    size: str
    entries: dict[str, int]
    num_parameters: int
    items_per_step: int
    unit: str
    dtype: str
    device: str
    machine: str
    threads: int
    cores: int
    torch: str
    python: str
    mezzo: str
    date: str
    repetitions: int
    steps_per_round: int
    syncs_are: str
    notes: list[str]
    rows: list[TrainRow]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """Return a table to print."""
        entries = ", ".join(f"{name} {value}" for name, value in self.entries.items())
        table = Table(
            title=f"training step, {self.net} {self.size} ({self.num_parameters / 1e6:.4g} M parameters: {entries}), "
            f"{self.dtype}, clipping on; {self.machine}, {self.threads} threads",
            caption="\n".join([f"syncs: {self.syncs_are}", *self.notes]),
            caption_justify="left",
        )
        on_gpu = self.device == "cuda"
        counts = ("kernels", "launches", "syncs") if on_gpu else ("aten calls", "syncs")
        for title in ("", "step ms", "against", "ratio", "10–90 %", f"{self.unit}/s", "peak MiB", *counts, "loss"):
            table.add_column(title, justify="left" if title in ("", "against") else "right")
        for row in self.rows:
            counted = (row.kernels, row.launches, row.syncs) if on_gpu else (row.calls, row.syncs)
            table.add_row(
                row.name,
                f"{row.step_ms:.4g}",
                row.against,
                f"{row.ratio:.2f}",
                f"{row.ratio_p10:.2f}–{row.ratio_p90:.2f}",
                f"{row.items_per_s:.4g}",
                f"{row.peak_bytes / 2**20:.4g}",
                *(str(count) for count in counted),
                f"{row.first_loss:.3g} → {row.last_loss:.3g}",
            )
        return table
