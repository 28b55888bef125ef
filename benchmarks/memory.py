"""What training keeps, counted whole: GPT-2 small, ResNet-50 and a LLaMA in the sizes of their papers.

Each model takes two real steps on a batch of a few tokens or images, and the bytes of its tensors are added up: nothing
is timed, and no size is estimated. So gradients have the dtypes that they have in a training: of a weight that several
operations read they are FP32.

What a loss of many rows allocates is counted as the allocator has it, from the head to the end of the backward pass.

``OMP_NUM_THREADS=1 python benchmarks/memory.py`` takes four minutes and 3 GiB, and writes two dated JSON files.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import mezzo
from harness import write_dated
from mezzo.numerics.footprint import state_bytes
from mezzo.weights import Halves, halves
from stepping.facts import facts
from training.nets import NETS, loss_of

MIB: Final = 1 << 20
LOW: Final = torch.bfloat16

# Models -----------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """Attention with rotary positions and a gated feed-forward (Touvron et al. 2023)."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        normed = self.norm1(x)
        q, k, v = (
            projection(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        gated: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return gated


def _rotated(x: Tensor) -> Tensor:  # (batch, heads, tokens, head_dim)
    places = torch.arange(x.shape[-2], dtype=torch.float32)
    angles = places[:, None] * 1e4 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = angles.repeat(1, 2)  # (tokens, head_dim)
    first, second = x.chunk(2, dim=-1)
    return (x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()).to(x.dtype)


class _Llama(nn.Module):
    """LLaMA, whose head is no embedding."""

    def __init__(self, *, vocabulary: int, width: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) → (batch, tokens, vocabulary)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to count.

    Attributes:
        name: For tables.
        build: Makes it, from the entries of a size.
        batch: The shape of its inputs; and targets for as many.
        full: Entries of the paper's size.
        least: Entries to see that everything runs.
    """

    name: str
    build: Callable[..., nn.Module]
    batch: tuple[int, ...]
    full: Mapping[str, int]
    least: Mapping[str, int]

    def inputs(self, classes: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets: tokens and the next ones, or images and their classes."""
        if len(self.batch) == 2:
            return torch.randint(classes, self.batch), torch.randint(classes, self.batch)
        return torch.randn(self.batch), torch.randint(classes, self.batch[:1])


MODELS: Final = (
    Model(
        name="GPT-2 small", build=NETS["gpt2-small"].build, batch=(1, 8),
        full={"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12, "tokens": 1024},
        least={"vocabulary": 64, "width": 16, "layers": 1, "heads": 2, "tokens": 32},
    ),
    Model(
        name="ResNet-50", build=NETS["resnet-50"].build, batch=(2, 3, 64, 64),
        full={"width": 64, "classes": 1000}, least={"width": 4, "classes": 10},
    ),
    Model(  # JackFram/llama-160m
        name="LLaMA 160M", build=_Llama, batch=(1, 8),
        full={"vocabulary": 32000, "width": 768, "hidden": 3072, "layers": 12, "heads": 12},
        least={"vocabulary": 64, "width": 16, "hidden": 32, "layers": 1, "heads": 2},
    ),
)  # fmt: skip

# Ways to train ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: its policy, or torch.amp; and what makes the optimizer of a model."""

    policy: str | None
    optimizer: Callable[[nn.Module], Optimizer]


def _adamw(net: nn.Module) -> Optimizer:
    return mezzo.optim.AdamW(net.parameters())


def _coded(net: nn.Module) -> Optimizer:
    return mezzo.optim.AdamW(net.parameters(), state_dtype="int8")


def _muon(net: nn.Module) -> Optimizer:
    return mezzo.optim.Muon(mezzo.optim.matrices_of(net), state_dtype="int8")


def _fused(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), fused=True)


def _foreach(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), foreach=True)


WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        "torch.amp": Way(None, _fused),
        "O1": Way("O1,bf16", _adamw),
        "O2, torch's AdamW": Way("O2,bf16", _foreach),
        "O2": Way("O2,bf16", _adamw),
        "O2, int8 moments": Way("O2,bf16", _coded),
        "O2, Muon, int8 moments": Way("O2,bf16", _muon),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one way keeps of one model, in bytes.

    Attributes:
        model: Its name.
        way: A name of :data:`WAYS`.
        num_parameters: Of the model; tied ones count once.
        num_in_halves: How many of them are stored in halves.
        weights: Parameters, with both halves, and buffers.
        gradients: After a backward pass.
        moments: What the optimizer keeps.
        casts: Copies of weights in 16 bits that live from the forward pass to the backward pass.
        step: FP32 values of weights in halves that are there while the optimizer steps.
    """

    model: str
    way: str
    num_parameters: int
    num_in_halves: int
    weights: int
    gradients: int
    moments: int
    casts: int
    step: int

    @property
    def kept(self) -> int:
        """Weights, gradients and moments."""
        return self.weights + self.gradients + self.moments


def counted(model: Model, entries: Mapping[str, int], name: str) -> Row:
    """Return the bytes of each kind of tensor after the second step's backward pass."""
    way = WAYS[name]
    torch.manual_seed(0)
    net = model.build(**entries)
    inputs, targets = model.inputs(entries.get("vocabulary", entries.get("classes", 0)))
    optimizer = way.optimizer(net)
    decoded: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: decoded.append(_decoded(net)))
    amp = None if way.policy is None else mezzo.MixedPrecision(net, optimizer, way.policy)
    region = (lambda: torch.autocast("cpu", LOW)) if amp is None else amp.autocast
    for number in range(2):
        casts = _Casts(net)
        with region(), casts:
            loss = loss_of(net(inputs), targets)
        if amp is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            amp.backward(loss)
        del loss
        if number == 0:
            (optimizer if amp is None else amp).step()
            optimizer.zero_grad()
    sizes = state_bytes(net, optimizer)
    return Row(
        model=model.name, way=name, num_parameters=sum(param.numel() for param in net.parameters()),
        num_in_halves=halves(net).count, weights=sizes.weights + sizes.remainders, gradients=sizes.gradients,
        moments=sizes.optimizer, casts=casts.total, step=max(decoded, default=0),
    )  # fmt: skip


def _decoded(net: nn.Module) -> int:
    decoded = (param.cell.decoded for param in net.parameters() if isinstance(param, Halves))
    return sum(values.nbytes for values in decoded if values is not None)


class _Casts(torch.autograd.graph.saved_tensors_hooks):
    """Count what autograd saves that has the shape of a weight, 16 bits, and memory of its own."""

    def __init__(self, net: nn.Module) -> None:
        self.total = 0
        self._shapes = {_sizes(param) for param in net.parameters() if param.dim() > 1}
        self._seen = {_address(param.hi) for param in net.parameters() if isinstance(param, Halves)}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == LOW and _sizes(tensor) in self._shapes and _address(tensor) not in self._seen:
            self._seen.add(_address(tensor))
            self.total += tensor.nbytes
        return tensor


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape that a transposed tensor has as well."""
    return tuple(sorted(tensor.shape))


def _address(tensor: Tensor) -> int:
    """Return where memory lies, without a write that would copy what is shared until then."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


# Losses -----------------------------------------------------------------------------------------------------------

#: Heads by their model: features and classes. Their rows are the tokens of a text, and those of a chunk a quarter.
HEADS: Final = MappingProxyType({"GPT-2 small": (768, 50257), "LLaMA 160M": (768, 32000)})
NUM_ROWS: Final = 1024


def _whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), target)


def _by_torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = functional.linear_cross_entropy(hidden, weight, target, options=nn.LinearCrossEntropyOptions())
    return loss


def _in_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return mezzo.linear_cross_entropy(hidden, weight, target, rows=len(hidden) // 4)


LOSSES: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = MappingProxyType(
    {"two calls": _whole, "in four chunks": _in_chunks, "torch's options": _by_torch}
)


@dataclass(frozen=True, slots=True)
class LossRow:
    """The most bytes that a head, its loss and their backward pass have allocated at once.

    Attributes:
        model: Its name.
        policy: A level and its dtype; without one it is FP32.
        loss: A name of :data:`LOSSES`.
        peak: The bytes, gradients of the hidden rows and of the weight among them.
    """

    model: str
    policy: str
    loss: str
    peak: int


def loss_bytes(model: str, num_rows: int, features: int, classes: int, *, policy: str, name: str) -> LossRow:
    """Return what one way of a loss allocates under a policy."""
    torch.manual_seed(0)
    head = nn.Linear(features, classes, bias=False)
    hidden, target = torch.randn(num_rows, features, requires_grad=True), torch.randint(classes, (num_rows,))
    mezzo.prepare(head, policy)
    gc.collect()  # what was allocated before is not to be freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with mezzo.autocast(policy, "cpu"):
            loss = LOSSES[name](hidden, head.weight, target)
        loss.backward()  # type: ignore[no-untyped-call]
    result = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((event.start_ns(), event.nbytes()) for event in result.events() if event.name() == "[memory]")
    return LossRow(model, policy, name, max(itertools.accumulate(size for _, size in events)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="full", choices=("full", "least"), help="of the papers, or a few numbers")
    parser.add_argument("--losses", action="store_true", help="count losses alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON files")
    given = parser.parse_args()
    result = {**facts(torch.device("cpu")), "mezzo": mezzo.__version__, "size": given.size, "timed": False}
    if not given.losses:
        rows = [{**asdict(row), "kept": row.kept} for row in _all_counted(given.size)]
        print(f"written to {write_dated(given.out, 'memory', {**result, 'rows': rows})}")
    losses = [asdict(row) for row in _all_losses(given.size)]
    print(f"written to {write_dated(given.out, 'losses', {**result, 'num_rows': NUM_ROWS, 'rows': losses})}")


def _all_counted(size: str) -> list[Row]:
    """Return, and print, what every way keeps of every model."""
    rows: list[Row] = []
    for model in MODELS:
        for name in WAYS:
            rows.append(counted(model, model.full if size == "full" else model.least, name))
            gc.collect()
    table = Table(
        "model", "way", "weights", "gradients", "moments", "kept", "a parameter", "casts", "step", title="MiB"
    )
    for row in rows:
        counts = (row.weights, row.gradients, row.moments, row.kept)
        sizes = [f"{count / MIB:.1f}" for count in counts]
        more = [f"{count / MIB:.1f}" for count in (row.casts, row.step)]
        table.add_row(row.model, row.way, *sizes, f"{row.kept / row.num_parameters:.3f}", *more)
    Console(width=120).print(table)
    return rows


def _all_losses(size: str) -> list[LossRow]:
    """Return, and print, what every loss allocates at the head of every language model."""
    rows: list[LossRow] = []
    table = Table("model", "policy", "loss", "MiB at once")
    for model, (features, classes) in HEADS.items():
        sizes = (NUM_ROWS, features, classes) if size == "full" else (128, 16, 64)
        for policy, name in itertools.product(("O0", "O1,bf16", "O2,bf16"), LOSSES):
            rows.append(loss_bytes(model, *sizes, policy=policy, name=name))
            table.add_row(model, policy, name, f"{rows[-1].peak / MIB:.1f}")
    Console(width=120).print(table)
    return rows


if __name__ == "__main__":
    main()
