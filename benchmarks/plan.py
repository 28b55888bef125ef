"""Where casts go: torch.autocast, Paddle's gray list, TensorFlow's painting and mezzo's cut, on five models.

Of each model and placement: casts, bytes moved and kept for the backward pass, as the plan counts them for eager and
for fused kernels; the time of a training step, forward and backward, eager and compiled by inductor, all in turns; and
how far its gradients are from FP32's. Ratios are taken round by round against torch.autocast run the same way.

The models: a block of GPT, ResNet-50, a BERT encoder, a chain of convolutions with log and square between them, whose
casts eat what low precision gains, and an LSTM. GPT-2 small, of 12 blocks, is planned and not run.

``OMP_NUM_THREADS=2 python benchmarks/plan.py`` writes one dated JSON file: of small models on a CPU, on a GPU of those
that people train. ``--models`` and ``--size`` choose others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn import functional

import mezzo
from harness import DEVICE, WARM_UP, in_turns, write_dated
from mezzo.numerics.footprint import SavedBytes
from mezzo.plan import heuristics, planning
from mezzo.plan.balance import balance_of
from mezzo.plan.carry_out import carry_out
from mezzo.plan.costs import Costs
from mezzo.plan.cut import cheapest
from mezzo.plan.graph import Graph, capture, read
from mezzo.policy import Policy
from stepping.facts import facts
from stepping.timing import against, nothing

Size = Literal["small", "full"]

#: With the lists of torch.autocast on CUDA, on every device. On a CPU torch's own have no rule about log, nor about
#: layer norm, whose kernel there adds up the weight's gradient in BF16 where it reads BF16.
POLICY: Final = "O1,dtype=bfloat16,emulate=false"

# The models: each gives the loss of one batch --------------------------------------------------------------------


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, tokens, head_dim)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2: embeddings, blocks, and a head that has the embedding's weight; it gives the loss of the next token."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, tokens: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:  # (batch, tokens) twice
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.words.weight)  # (batch, tokens, words)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """ResNet's: three convolutions around which the input goes by itself, or through one of its own."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((given, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(_conv(*shape) for shape in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(shape[1]) for shape in shapes)
        self.beside = nn.Identity()
        if stride != 1 or given != 4 * width:
            self.beside = nn.Sequential(_conv(given, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = y.relu() if number < 2 else y
        return (y + self.beside(x)).relu()


class ResNet50(nn.Sequential):
    """He et al. 2016, with the stride at the 3×3 convolution."""

    def __init__(self, classes: int = 1000) -> None:
        layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        given = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(count):
                layers.append(Bottleneck(given, width, 2 if number == 0 and width > 64 else 1))
                given = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes))


def _conv(given: int, made: int, side: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(given, made, side, stride, side // 2, bias=False)


class Chain(nn.Module):
    """conv → log → conv → square → conv, twice: ops that want FP32 between products that want less.

    What log and square give is multiplied by a gain of each channel, which either precision would do for.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(6))
        self.gains = nn.ParameterList(torch.ones(channels, 1, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        first, second, third, fourth, fifth, last = self.convs
        x = second((first(x).relu() + 1).log() * self.gains[0])
        x = fourth(third(x.square() * self.gains[1]))
        x = fifth((x.relu() + 1).log() * self.gains[2])
        return last(x.square() * self.gains[3])


class Lstm(nn.Module):
    """One layer with its cell written out, since nn.LSTM is one op, and nothing in it can be chosen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.given, self.hidden = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        outs = []
        for given in self.given(x).unbind(1):  # (batch, 4 × width)
            i, f, g, o = (given + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class Loss(nn.Module):
    """A model with its loss: of classes where targets are integers, otherwise of squares."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.model(x)
        return functional.mse_loss(y, target) if target.is_floating_point() else functional.cross_entropy(y, target)


def gpt_block(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, heads, batch, tokens = (256, 4, 8, 128) if size == "small" else (768, 12, 8, 1024)
    x = torch.randn(batch, tokens, width, requires_grad=True)  # as in the midst of a model
    return Block(width, heads), (x, torch.randn(batch, tokens, width))


def resnet50(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    batch, side = (4, 64) if size == "small" else (64, 224)
    return ResNet50(), (torch.randn(batch, 3, side, side), torch.randint(1000, (batch,)))


def bert(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, heads, batch, tokens = (256, 4, 8, 128) if size == "small" else (768, 12, 16, 512)
    layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu", batch_first=True)
    shape = (batch, tokens, width)
    return nn.Sequential(layer(), layer()), (torch.randn(shape, requires_grad=True), torch.randn(shape))


def chain(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    batch, channels, side = (4, 32, 32) if size == "small" else (32, 128, 64)
    shape = (batch, channels, side, side)
    return Chain(channels), (torch.randn(shape), torch.randn(shape))


def lstm(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    batch, tokens, width = (16, 16, 128) if size == "small" else (64, 64, 1024)
    return Lstm(width), (torch.randn(batch, tokens, width), torch.randn(batch, tokens, width))


MODELS: Final[dict[str, Callable[[Size], tuple[nn.Module, tuple[Tensor, ...]]]]] = {
    "GPT block": gpt_block, "ResNet-50": resnet50, "BERT encoder": bert, "conv–log chain": chain, "LSTM": lstm,
}  # fmt: skip


def made(name: str, size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Make a model with its loss, and a batch: the same ones each time."""
    torch.manual_seed(0)
    model, batch = MODELS[name](size)
    moved = tuple(each.detach().to(DEVICE).requires_grad_(each.requires_grad) for each in batch)
    return Loss(model).to(DEVICE), moved


# Placements --------------------------------------------------------------------------------------------------------

Place = Callable[[Costs], Sequence[bool]]


def _followed(follow: Callable[[heuristics.Listed], tuple[bool, ...]]) -> Place:
    return lambda costs: follow(planning.listed(costs.graph))


AUTOCAST, CUT = "torch.autocast", "cut"
#: The backend of torch.compile that makes them.
KERNELS: Final = {"eager": "eager", "compiled": "inductor"}
PLACEMENTS: Final[dict[str, Place]] = {
    AUTOCAST: _followed(heuristics.promoted),
    "Paddle's gray": _followed(heuristics.gray),
    "TensorFlow's painting": _followed(heuristics.painted),
    CUT: lambda costs: cheapest(costs.problem).low[: len(costs.graph.ops)],
}


class Placed:
    """A backend of torch.compile like mezzo's, with any placement: one without a session or a region."""

    places_casts = True

    def __init__(self, policy: Policy, place: Place, inner: str) -> None:
        self.policy, self.place, self.inner = policy, place, inner

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = read(module, self.policy)
        carry_out(graph, self.place(account_of(graph, self.inner)))
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(self.inner)(graph.whole, inputs)
        return compiled


def account_of(graph: Graph, inner: str) -> Costs:
    balance = balance_of(graph.device_type, graph.policy.dtype, emulated="products" in graph.emulated)
    return Costs(graph, balance, objective=0.0, fused=inner == "inductor")


def counted(name: str, size: Size, policy: Policy) -> dict[str, Any]:
    """Capture a model, and count what each placement comes to; with the seconds that this took."""
    model, batch = made(name, size)
    start = time.perf_counter()
    graph = capture(model, batch, {}, policy)
    found: dict[str, Any] = {
        "policy": str(policy), "capture_s": time.perf_counter() - start, "ops": len(graph.ops),
    }  # fmt: skip
    for kernels, inner in KERNELS.items():
        start = time.perf_counter()
        costs = account_of(graph, inner)
        placed = {CUT: PLACEMENTS[CUT](costs)}
        found[f"{kernels}_planning_s"] = time.perf_counter() - start
        placed |= {whose: follow(costs) for whose, follow in PLACEMENTS.items() if whose != CUT}
        first = {tuple(placed[whose]): whose for whose in reversed(PLACEMENTS)}
        found[kernels] = {
            whose: {**asdict(costs.totals(low)), "low": sum(low), "same_as": first[tuple(low)]}
            for whose in PLACEMENTS
            for low in (placed[whose],)
        }
    return found


def planned_gpt2(policy: Policy) -> dict[str, Any]:
    """Plan GPT-2 small, which does not run."""
    torch.manual_seed(0)
    model, words = Gpt().to(DEVICE), torch.randint(50257, (1, 1024), device=DEVICE)
    start = time.perf_counter()
    graph = capture(model, (words, words), {}, policy)
    found: dict[str, Any] = {"capture_s": time.perf_counter() - start, "ops": len(graph.ops)}
    for kernels, inner in KERNELS.items():
        start = time.perf_counter()
        costs = account_of(graph, inner)
        account_s = time.perf_counter() - start
        PLACEMENTS[CUT](costs)
        found |= {f"{kernels}_planning_s": time.perf_counter() - start, f"{kernels}_account_s": account_s}
    return found


# Time and gradients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step of a model of its own.

    Attributes:
        model: The model.
        run: Forward and backward.
    """

    model: nn.Module
    run: Callable[[], None]


def step_of(name: str, size: Size, backend: Any = None, region: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Make a step, compiled where a backend is named, with a region around its forward pass."""
    model, batch = made(name, size)

    def call(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    call.__code__ = call.__code__.replace()  # by its code Dynamo finds what to check: of each step its own
    if backend is not None:
        call = torch.compile(call, backend=backend, fullgraph=True)

    def run() -> None:
        model.zero_grad()
        with region():
            loss = call(*batch)
        loss.backward()

    return Step(model=model, run=run)


def steps_of(name: str, size: Size, policy: Policy, counts: dict[str, Any]) -> dict[tuple[str, str], Step]:
    """Make the steps that are compared, by kernels and placement; of equal placements the first, and the cut."""
    model, batch = made(name, size)
    rules = mezzo.plan.plan(model, *batch, policy=policy).policy()
    step, placed, compiled = partial(step_of, name, size), partial(Placed, policy), KERNELS["compiled"]
    amp = partial(torch.autocast, DEVICE, dtype=policy.dtype)
    found = {
        ("eager", "FP32"): step(),
        ("eager", AUTOCAST): step(region=amp),
        ("eager", f"{CUT}, as rules"): step(region=partial(mezzo.autocast, rules, DEVICE)),
    }
    found |= {("compiled", "FP32"): step(compiled), ("compiled", AUTOCAST): step(compiled, region=amp)}
    for kernels, inner in KERNELS.items():
        for whose, follow in PLACEMENTS.items():
            if counts[kernels][whose]["same_as"] != whose != CUT:
                continue
            backend = mezzo.compile_backend(policy, inner=inner) if whose == CUT else placed(follow, inner)
            found[kernels, f"{whose}, placed" if whose == AUTOCAST else whose] = step(backend)
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "compiled"))


def gradients(step: Step) -> list[Tensor]:
    step.run()
    return [each.grad.detach().double() for each in step.model.parameters() if each.grad is not None]


def kept(step: Step) -> int:
    """Return the bytes that autograd keeps for the backward pass, inputs included."""
    with SavedBytes(step.model) as saved:
        step.run()
    return saved.total


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient: the norm of the difference over that of FP32's."""
    pairs = zip(found, exact, strict=True)
    return max(float((mine - true).norm() / true.norm()) for mine, true in pairs if true.norm() > 0)


def timed(name: str, size: Size, policy: Policy, counts: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Run a model's steps in turns; ratios are against torch.autocast's with the same kernels."""
    torch._dynamo.reset()
    steps = steps_of(name, size, policy, counts)
    exact = gradients(steps["eager", "FP32"])
    errors = {case: error(gradients(step), exact) for case, step in steps.items()}
    saved = {case: kept(step) for case, step in steps.items()}
    loops = {case: (nothing, step.run) for case, step in steps.items()}
    taken = in_turns(loops, torch.device(DEVICE), repetitions, WARM_UP)  # type: ignore[arg-type,type-var]
    rows = []
    for (kernels, whose), times in taken.items():
        ratio = against(times, taken[kernels, AUTOCAST])
        rows.append({
            "model": name, "kernels": kernels, "placement": whose, "ms": 1e3 * statistics.median(times),
            "least_ms": 1e3 * min(times), "ratio": ratio.median, "ratio_p10": ratio.p10, "ratio_p90": ratio.p90,
            "gradient_error": errors[kernels, whose], "kept_bytes": saved[kernels, whose],
        })  # fmt: skip
    return rows


# The command -------------------------------------------------------------------------------------------------------


def show(name: str, counts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    heads = "kernels, placement, casts, MB moved, MB kept, measured, ms, / autocast, 10–90 %, off FP32".split(", ")
    table = Table(*heads, title=f"{name} ({DEVICE}): {counts['ops']} ops; {counts['policy']}")
    for row in rows:
        sums = counts[row["kernels"]].get(row["placement"].partition(", ")[0])
        counted = ("", "", "")
        if sums:
            counted = f"{sums['casts']}", f"{sums['moved_bytes'] / 1e6:.4g}", f"{sums['kept_bytes'] / 1e6:.4g}"
        measured = f"{row['kept_bytes'] / 1e6:.4g}", f"{row['ms']:.3g}", f"{row['ratio']:.3f}"
        tenths = f"{row['ratio_p10']:.2f}–{row['ratio_p90']:.2f}"
        table.add_row(row["kernels"], row["placement"], *counted, *measured, tenths, f"{row['gradient_error']:.2g}")
    Console(width=140).print(table)
    for kernels in KERNELS:
        same = [f"{whose} as {sums['same_as']}" for whose, sums in counts[kernels].items() if sums["same_as"] != whose]
        if same:
            print(f"the same placement, {kernels}: {', '.join(same)}")
    say(name, counts)


def say(name: str, counts: dict[str, Any]) -> None:
    took = " and ".join(f"{counts[f'{kernels}_planning_s']:.2g} s for {kernels} kernels" for kernels in KERNELS)
    print(f"{name}: {counts['ops']} ops captured in {counts['capture_s']:.2g} s, planned in {took}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--size", choices=("small", "full"), default="full" if DEVICE == "cuda" else "small")
    parser.add_argument("--policy", type=Policy.parse, default=POLICY)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--counts-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    gpt2 = planned_gpt2(options.policy)  # first, so that what is done once in a process is in it
    say("GPT-2 small", gpt2)
    counts, rows = {}, list[dict[str, Any]]()
    for name in options.models:
        counts[name] = counted(name, options.size, options.policy)
        found = (
            [] if options.counts_only else timed(name, options.size, options.policy, counts[name], options.repetitions)
        )
        show(name, counts[name], found)
        rows += found
        result = {
            **facts(torch.device(DEVICE)), "mezzo": mezzo.__version__, "size": options.size,
            "repetitions": options.repetitions, "balance": asdict(balance_of(DEVICE, torch.bfloat16, emulated=False)),
            "gpt2_small": gpt2, "counts": counts, "rows": rows,
        }  # fmt: skip
        print(f"written to {write_dated(options.out, 'plan', result)}")  # after each model: they take minutes


if __name__ == "__main__":
    main()
