"""``bench_train``: whole training steps in each way that a user could take them, with memory, kernels and syncs."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

import mezzo
from harness import in_turns
from mezzo.errors import MezzoError, NumericsError, PolicyError, UnsupportedError, nearest
from stepping.facts import checked_device, facts
from stepping.timing import against, seconds, spread

from .events import SYNCS, Events, observe
from .nets import NETS
from .result import TrainResult, TrainRow, row_name
from .ways import WAYS, Task, Training

__all__ = ["bench_train", "check_trains"]

REFERENCE: Final = "fp32"
RIVAL: Final = "torch.amp"
#: Steps before anything is counted or timed, eager and compiled: they make the optimizer's state, and compile; torch
#: compiles what it cannot keep up to eight times before it leaves it to Python.
WARM_UP: Final = (3, 10)
#: What a timed round takes at least, so that neither the clock nor the wait at its end weighs.
ROUND_SECONDS: Final = 0.02
#: And on a GPU its steps, so that a way whose host never waits may run ahead of the device.
CUDA_STEPS: Final = 5


def bench_train(
    net: str = "64-tiny",
    *,
    size: str = "small",
    dtype: str = "bfloat16",
    device: str | torch.device = "cpu",
    repetitions: int = 15,
    ways: Sequence[str] | None = None,
    compiled: bool = False,
) -> TrainResult:
    """Time whole training steps in each way that a user could take them, in turns with torch.amp.

    All start from the same weights and train on the same batch. Two trainings are alive at a time, a way and its
    rival, so that a GPU need not hold them all. Forward, loss, backward, check, clipping, update and ``zero_grad`` are
    timed.

    Args:
        net: A name of :data:`training.nets.NETS`.
        size: ``"full"`` for a GPU, ``"small"`` for two cores and a minute, ``"least"`` to see that everything runs.
        dtype: The low precision, ``"bfloat16"`` or ``"float16"``; the second with a dynamic loss scale.
        device: A CPU or a CUDA device.
        repetitions: Rounds.
        ways: Names of :data:`training.ways.WAYS`; all when omitted. ``fp32``, whose loss the others must follow,
            and ``torch.amp``, the rival, always run.
        compiled: Time each way with ``torch.compile(model)`` too, against torch.amp's compiled step; takes minutes.

    Returns:
        Times, ratios with their spread, throughput, peak memory, kernels and syncs.

    Raises:
        PolicyError: Unknown net, size, dtype or way, or no repetitions.
        UnsupportedError: A device that is not there, or neither.
        NumericsError: A way whose loss is not finite, or goes up where FP32's goes down.

    **Cost**: two to twelve trainings of a few dozen steps, one after another.
    """
    where, chosen = checked_device(device), list(WAYS if ways is None else ways)
    _check(net, size, dtype, repetitions, chosen)
    names = [name for name in WAYS if name in {*chosen, REFERENCE, RIVAL}]
    bench = _Bench(net, size, getattr(torch, dtype), where, repetitions)
    with _tf32_restored(where):
        bench.measure(names, compiled=False)
        if compiled:
            bench.measure(names, compiled=True)
    entries = NETS[net].sizes[size]
    return TrainResult(
        net=net,
        size=size,
        entries=dict(entries),
        num_parameters=bench.num_parameters,
        items_per_step=bench.items,
        unit=NETS[net].unit,
        dtype=dtype,
        repetitions=repetitions,
        steps_per_round=bench.steps_per_round,
        syncs_are=SYNCS[where.type],
        mezzo=mezzo.__version__,
        notes=bench.notes,
        rows=bench.rows,
        **facts(where),
    )


def _check(net: str, size: str, dtype: str, repetitions: int, ways: list[str]) -> None:
    closed = [("net", net, NETS), ("dtype", dtype, ("bfloat16", "float16")), *(("way", way, WAYS) for way in ways)]
    if net in NETS:
        closed.append(("size", size, NETS[net].sizes))
    errors: list[MezzoError] = [
        PolicyError(f"unknown {kind} {name!r}", why=nearest(name, words))
        for kind, name, words in closed
        if name not in words
    ]
    if repetitions < 1:
        errors.append(PolicyError(f"no rounds to time: {repetitions} repetitions", write="repetitions=15"))
    if errors:
        raise PolicyError.together(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A training that has taken its first steps, with what was counted on the way."""

    way: str
    compiled: bool
    training: Training
    first_loss: float
    events: Events
    peak_bytes: int

    @property
    def name(self) -> str:
        return row_name(self.way, compiled=self.compiled)


class _Bench:
    """One network on one device, with the rows that it got so far."""

    def __init__(self, net: str, size: str, dtype: torch.dtype, device: torch.device, repetitions: int) -> None:
        self._name, self._net, self._size = net, NETS[net], size
        self._dtype, self._device = dtype, device
        self._repetitions = repetitions
        self.rows: list[TrainRow] = []
        self.notes: list[str] = []
        self.num_parameters = self.items = self.steps_per_round = 0
        self._reference: TrainRow | None = None

    def measure(self, ways: list[str], *, compiled: bool) -> None:
        """Add a row for each way; torch.amp's own is from the first pair, or compiled against its eager step."""
        rival = self._ready(RIVAL, compiled=compiled)
        rows: dict[str, TrainRow] = {}
        if compiled:
            rows[RIVAL], _ = self._pair(rival, self._ready(RIVAL, compiled=False))
            _collect(self._device)
        for way in ways:
            if way != RIVAL and (mine := self._present(way, compiled=compiled)):
                rows[way], rivals = self._pair(mine, rival)
                rows.setdefault(RIVAL, rivals)
                del mine
                _collect(self._device)
        self.rows += [rows[way] for way in ways if way in rows]
        del rival
        _collect(self._device)

    def _present(self, way: str, *, compiled: bool) -> _Ready | None:
        """Return a training that can be timed here; else note why there is none."""
        if absent := WAYS[way].absent(self._device.type):
            self._note(f"{way} is left out: {absent}")
            return None
        try:
            return self._ready(way, compiled=compiled)
        except UnsupportedError as error:
            self._note(f"{row_name(way, compiled=compiled)} is left out: {error}")
            return None

    def _ready(self, way: str, *, compiled: bool) -> _Ready:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            _settle(self._device)
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        _use_tf32(self._device, WAYS[way].tf32)
        training = self._started(way, compiled=compiled)
        first_loss = float(training.step())
        for _ in range(WARM_UP[compiled] - 1):
            training.step()
        # From the start on, not in a later step: a captured one allocates nothing when it is replayed.
        peak = torch.cuda.max_memory_allocated(self._device) - before if on_gpu else 0
        events = observe(training.step, self._device)
        if events.growth_bytes is not None:
            peak = training.held_bytes() + events.growth_bytes
        return _Ready(
            way=way, compiled=compiled, training=training, first_loss=first_loss, events=events, peak_bytes=peak
        )

    def _started(self, way: str, *, compiled: bool) -> Training:
        model, batch = self._net.make(self._size, self._device)
        self.num_parameters, self.items = sum(p.numel() for p in model.parameters()), batch[1].numel()
        dtype = str(self._dtype).removeprefix("torch.")
        name = f"{self._name} {self._size} {dtype} {way}"
        task = Task(name=name, model=model, batch=batch, dtype=self._dtype, compiled=compiled)
        training = WAYS[way].start(task)
        if WAYS[way].captured:
            self._note(f"{way}: its peak holds what a capture puts back afterwards, a copy of weights and masters")
        if training.emulated:
            self._note(f"{way}: {dtype} products are computed in float32 from rounded operands here")
        return training

    def _pair(self, mine: _Ready, rival: _Ready) -> tuple[TrainRow, TrainRow]:
        """Time both in turns, and return the row of each."""
        if not self.steps_per_round:
            least = CUDA_STEPS if self._device.type == "cuda" else 1
            once = seconds(rival.training.step, self._device)
            self.steps_per_round = max(least, math.ceil(ROUND_SECONDS / once))
        calls = {ready.name: self._round(ready) for ready in (mine, rival)}
        taken = in_turns(calls, self._device, self._repetitions, warm_up=1)
        row, rivals = (self._row(ready, taken[ready.name], rival.name, taken[rival.name]) for ready in (mine, rival))
        self._reference = self._reference or row  # FP32 is the first of all pairs
        for each in (row, rivals):
            check_trains(each, self._reference)
        return row, rivals

    def _round(self, ready: _Ready) -> tuple[Callable[[], object], Callable[[], object]]:
        def steps() -> None:
            for _ in range(self.steps_per_round):
                ready.training.step()

        return functools.partial(_use_tf32, self._device, WAYS[ready.way].tf32), steps

    def _row(self, ready: _Ready, taken: list[float], rival: str, rivals: list[float]) -> TrainRow:
        _use_tf32(self._device, WAYS[ready.way].tf32)
        once, ratio = spread(taken).median / self.steps_per_round, against(taken, rivals)
        return TrainRow(
            way=ready.way,
            compiled=ready.compiled,
            tf32=WAYS[ready.way].tf32,
            against=rival,
            step_ms=1e3 * once,
            ratio=ratio.median,
            ratio_p10=ratio.p10,
            ratio_p90=ratio.p90,
            items_per_s=self.items / once,
            peak_bytes=ready.peak_bytes,
            calls=ready.events.calls,
            kernels=ready.events.kernels,
            launches=ready.events.launches,
            syncs=ready.events.syncs,
            first_loss=ready.first_loss,
            last_loss=float(ready.training.step()),
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def check_trains(row: TrainRow, reference: TrainRow) -> None:
    """Refuse a way that does not train.

    Args:
        row: Of the way.
        reference: FP32's.

    Raises:
        NumericsError: Its loss is not finite, or goes the other way than FP32's.
    """
    finite = math.isfinite(row.first_loss) and math.isfinite(row.last_loss)
    if finite and (row.last_loss < row.first_loss) == (reference.last_loss < reference.first_loss):
        return
    raise NumericsError(
        f"{row.name} does not train, so its time means nothing",
        where=f"loss from {row.first_loss:.4g} to {row.last_loss:.4g}",
        why=f"{reference.name} trains on the same batch from {reference.first_loss:.4g} to {reference.last_loss:.4g}",
    )


def _settle(device: torch.device) -> None:
    """Make the GPU's libraries take the workspaces that they keep, so that they are in no way's peak."""
    ones = torch.ones(8, 8, device=device, requires_grad=True)
    (ones @ ones).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _use_tf32(device: torch.device, use: bool) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = use


@contextlib.contextmanager
def _tf32_restored(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
