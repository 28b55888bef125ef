"""What ranks send and keep under DDP and FSDP2, counted, and how long their steps take, against torch's own.

Every way trains the same network from the same weights. Counted in one step, from the collectives and the tensors
themselves: bytes that a rank gathers and reduces, collectives, casts of weights, and bytes that all ranks together keep
for a parameter. Step times are ratios, in turns. Run with ``make bench``, over gloo on CPUs; on all GPUs of a machine:

    torchrun --nproc-per-node gpu benchmarks/distributed.py
    torchrun --nproc-per-node 2 benchmarks/distributed.py --repetitions 0    # counts alone, which no load disturbs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from harness import write_dated
from mezzo.numerics.footprint import state_bytes
from mezzo.sharded import local
from mezzo.trace.kernels import is_cast
from mezzo.weights import Halves
from stepping.facts import facts
from stepping.timing import against, rounds, seconds
from traffic import Traffic
from training.nets import NETS, loss_of

_LEARNING_RATE: Final = 1e-4
_MAX_NORM: Final = 1.0
_POLICY: Final = "O2,dtype=bfloat16"
#: Collectives of at most so many bytes for each parameter tensor are exchanges of numbers: norms, found-inf.
_NUMBERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training that has begun on this rank.

    Attributes:
        model: Its model, shards and all.
        optimizer: Its optimizer.
        masters: What the optimizer updates.
        forward_and_backward: The first half of a step, after which there are gradients.
        finish: The second half: clip, update, clear.
    """

    model: nn.Module
    optimizer: Optimizer
    masters: Callable[[], Any]
    forward_and_backward: Callable[[], torch.Tensor]
    finish: Callable[[], object]

    def step(self) -> torch.Tensor:
        loss = self.forward_and_backward()
        self.finish()
        return loss


Start = Callable[[nn.Module, Any], Training]


def _torch(wrap: Callable[[nn.Module], nn.Module], *, low: bool = False) -> Start:
    """A loop of torch's alone, with autocast where ``low``."""

    def start(model: nn.Module, batch: Any) -> Training:
        (inputs, targets), wrapped = batch, wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

        def forward_and_backward() -> torch.Tensor:
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=low):
                loss = loss_of(wrapped(inputs), targets)
            loss.backward()
            return loss.detach()

        def finish() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return Training(
            model=model,
            optimizer=optimizer,
            masters=list,
            forward_and_backward=forward_and_backward,
            finish=finish,
        )

    return start


def _mezzo(make: Callable[..., Optimizer], *, shards: bool) -> Start:
    def start(model: nn.Module, batch: Any) -> Training:
        inputs, targets = batch
        if shards:
            mezzo.fully_shard(model, _POLICY)
        optimizer = make(model.parameters(), lr=_LEARNING_RATE)
        amp = mezzo.MixedPrecision(model, optimizer, _POLICY, max_grad_norm=_MAX_NORM)
        wrapped = model if shards else DistributedDataParallel(model)

        def forward_and_backward() -> torch.Tensor:
            with amp.autocast():
                loss = loss_of(wrapped(inputs), targets)
            amp.backward(loss)
            return loss.detach()

        def finish() -> None:
            amp.step()
            amp.zero_grad()

        return Training(
            model=model,
            optimizer=optimizer,
            masters=amp.master_params,
            forward_and_backward=forward_and_backward,
            finish=finish,
        )

    return start


def _sharded(low: torch.dtype | None, model: nn.Module) -> nn.Module:
    """torch's FSDP2 over FP32 shards, each block by itself; what is gathered low is reduced in FP32."""
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train on several ranks.

    Attributes:
        start: Begins a training.
        rival: The way that its time is compared with.
    """

    start: Start
    rival: str


_FSDP, _DDP = "FSDP2, BF16 from FP32 shards", "DDP, torch.amp"
WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        _FSDP: Way(start=_torch(partial(_sharded, torch.bfloat16)), rival=_FSDP),
        "FSDP2, FP32": Way(start=_torch(partial(_sharded, None)), rival=_FSDP),
        "FSDP2, mezzo O2, torch's AdamW": Way(start=_mezzo(torch.optim.AdamW, shards=True), rival=_FSDP),
        "FSDP2, mezzo O2, AdamW split": Way(start=_mezzo(mezzo.optim.AdamW, shards=True), rival=_FSDP),
        _DDP: Way(start=_torch(DistributedDataParallel, low=True), rival=_DDP),
        "DDP, mezzo O2, AdamW split": Way(start=_mezzo(mezzo.optim.AdamW, shards=False), rival=_DDP),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedRow:
    """What one way sends, keeps and takes; bytes are for each of the model's parameters.

    Attributes:
        way: Its name.
        gathered_bytes: Weights that a rank gathers in a step, as a whole: it sends and receives (W − 1)/W of them.
        reduced_bytes: Gradients that it reduces, as a whole.
        wire_bytes: What a rank sends in all, where ranks form a ring.
        kept_bytes: Weights, gradients, masters and optimizer state after a backward pass, of all ranks together.
        weight_casts: How many weights, or a rank's parts of them, are cast in a forward and a backward pass.
        collectives: Of weights and gradients, in a step.
        exchanges: Collectives of a few numbers: norms and found-inf.
        exchanged_bytes: How large they are together, not for a parameter.
        ratio: Step time against the rival's, with tenths; ``None`` if it was not measured.
    """

    way: str
    gathered_bytes: float
    reduced_bytes: float
    wire_bytes: float
    kept_bytes: float
    weight_casts: int
    collectives: int
    exchanges: int
    exchanged_bytes: int
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None


class WeightCasts(TorchDispatchMode):
    """Count the weights that are cast: tensors in the memory of what a rank keeps, copied into another dtype.

    What is stored in halves has its cast there already.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count = 0
        plain = (each for each in map(local, model.parameters()) if not isinstance(each, Halves))
        self._places = {each.untyped_storage().data_ptr() for each in plain}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if is_cast(func, args, out):
            self._look(args[0], out)
        elif func is torch.ops.aten._foreach_copy_.default:  # FSDP2's, before it gathers
            for target, source in zip(*args[:2], strict=True):
                self._look(source, target)
        return out

    def _look(self, source: torch.Tensor, target: torch.Tensor) -> None:
        is_plain = source.dtype != target.dtype and not isinstance(source, Halves)
        self.count += is_plain and source.untyped_storage().data_ptr() in self._places


def counted(name: str, training: Training, count: int) -> DistributedRow:
    """Take one step, and count.

    Args:
        name: The way's.
        training: One that has taken steps: DDP rearranges its buckets in the second one.
        count: The model's parameters, of all ranks together.
    """
    number = len(list(training.model.parameters()))
    with Traffic() as traffic:
        with WeightCasts(training.model) as casts:
            training.forward_and_backward()
        kept = torch.tensor([float(state_bytes(training.model, training.optimizer).total)], dtype=torch.float64)
        training.finish()
    dist.all_reduce(kept := kept.to(next(iter(training.model.parameters())).device))
    few = [each for each in traffic.collectives if each.whole_bytes <= _NUMBERS * number]
    many = [each for each in traffic.collectives if each not in few]
    return DistributedRow(
        way=name,
        gathered_bytes=sum(each.whole_bytes for each in many if each.kind == "all-gather") / count,
        reduced_bytes=sum(each.whole_bytes for each in many if each.kind in ("all-reduce", "reduce-scatter")) / count,
        wire_bytes=traffic.wire_bytes / count,
        kept_bytes=kept.item() / count,
        weight_casts=casts.count,
        collectives=len(many),
        exchanges=len(few),
        exchanged_bytes=sum(each.whole_bytes for each in few),
    )


def measured(net: str, size: str, device: torch.device, repetitions: int, warm_up: int = 3) -> list[DistributedRow]:
    """Count a step of every way on this rank, and time them in turns."""
    trainings, rows, count = {}, [], 0
    for name, way in WAYS.items():
        model, batch = NETS[net].make(size, device)
        count = sum(param.numel() for param in model.parameters())
        trainings[name] = way.start(model, batch)
        for _ in range(warm_up):
            loss = trainings[name].step()
        if not loss.isfinite():
            raise SystemExit(f"{name} does not train: its loss is {loss.item()}")
        rows.append(counted(name, trainings[name], count))
    if not repetitions:
        return rows
    calls = {name: (dist.barrier, training.step) for name, training in trainings.items()}
    taken = rounds(calls, partial(seconds, device=device), repetitions, warm_up=1)
    timed = []
    for row in rows:
        ratio = against(taken[row.way], taken[WAYS[row.way].rival])
        numbers = {"ratio": ratio.median, "ratio_p10": ratio.p10, "ratio_p90": ratio.p90}
        timed.append(DistributedRow(**{**asdict(row), **numbers}))
    return timed


def show(rows: list[DistributedRow], title: str) -> None:
    heads = ["way", "gathered", "reduced", "on the wire", "kept", "weight casts", "collectives", "exchanges"]
    table = Table(*heads, "step time", title=f"{title}; bytes for each parameter")
    for row in rows:
        taken = f"{row.ratio:.2f}× ({row.ratio_p10:.2f}–{row.ratio_p90:.2f})" if row.ratio is not None else "–"
        each = [f"{number:.3g}" for number in (row.gathered_bytes, row.reduced_bytes, row.wire_bytes, row.kept_bytes)]
        extra = f"{row.exchanges}, {row.exchanged_bytes} B"
        table.add_row(row.way, *each, str(row.weight_casts), str(row.collectives), extra, taken)
    Console(width=150).print(table)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="gpt2-small", choices=("gpt2-small", "64-tiny"))
    parser.add_argument("--size", help="full, small or least; small on CPUs, full on GPUs")
    parser.add_argument(
        "--repetitions", type=int, default=10, help="rounds in which all ways take turns; 0 only counts"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file")
    return parser.parse_args()


def benchmark(given: argparse.Namespace) -> None:
    """Measure on this rank; the first one prints and writes."""
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = given.size or ("small" if device.type == "cpu" else "full")
    rows = measured(given.net, size, device, given.repetitions)
    if dist.get_rank():
        return
    backend, ranks = dist.get_backend(), dist.get_world_size()
    show(rows, f"{given.net}, size {size}, {ranks} ranks over {backend}")
    result = {
        **facts(device), "mezzo": mezzo.__version__, "ranks": ranks, "backend": backend, "net": given.net,
        "size": size, "repetitions": given.repetitions, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    print(f"written to {write_dated(given.out, 'distributed', result)}")


def main() -> None:
    given = options()
    if "RANK" not in os.environ:
        raise SystemExit("one process has no ranks: torchrun --nproc-per-node 2 benchmarks/distributed.py")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    benchmark(given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
