"""The casting engine against torch.autocast, paired in one run: time per step, casts, and bytes kept for backward.

Run with ``make bench``. The model of tiny layers is bound by dispatch, so that what a region costs per op shows;
the Transformer encoder repeats the experiment of allowing linear, then softmax, then gelu in low precision.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from harness import DEVICE, Row, paired, show, write
from mezzo.numerics.footprint import SavedBytes

BF16 = "O1,dtype=bfloat16,emulate=false"
Region = Callable[[], contextlib.AbstractContextManager[object]]


class Tiny(nn.Module):
    """Layers of width 32: a linear, a normalisation, an activation, a residual."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + functional.gelu(linear(norm(x)))
        return x


class Null(TorchFunctionMode):
    """A mode that does nothing: what any function mode costs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def null_mode():  # type: ignore[no-untyped-def]
    with torch.autocast(DEVICE, dtype=torch.bfloat16), Null():
        yield


def loop(region: Region, where: str, layers: int) -> Callable[[], None]:
    """A training step: eager, compiled with the region around the graph, or inside it."""
    torch.manual_seed(0)
    model, x = Tiny(layers).to(DEVICE), torch.randn(8, 32, device=DEVICE)

    def inside(x: Tensor) -> Tensor:
        with region():
            return model(x)

    run = {"eager": model, "outside": torch.compile(model), "inside": torch.compile(inside)}[where]
    around = contextlib.nullcontext if where == "inside" else region

    def step() -> None:
        with around():
            loss = run(x).float().square().mean()
        loss.backward()
        model.zero_grad()

    return step


def torch_region() -> contextlib.AbstractContextManager[object]:
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def region_of(policy: str) -> Region:
    value = mezzo.Policy.parse(policy)
    return lambda: mezzo.autocast(value, DEVICE)


def speed(repetitions: int, layers: int) -> list[Row]:
    cases: list[tuple[str, Region, str]] = [
        ("null function mode", null_mode, "eager"),
        (f"{BF16},lists=device", region_of(f"{BF16},lists=device"), "eager"),
        (BF16, region_of(BF16), "eager"),
        (f"{BF16},low=layer_norm", region_of(f"{BF16},low=layer_norm"), "eager"),
        ("null function mode", null_mode, "outside"),
        (BF16, region_of(BF16), "outside"),
        (BF16, region_of(BF16), "inside"),
        (f"{BF16},low=layer_norm", region_of(f"{BF16},low=layer_norm"), "inside"),
    ]
    names = {"eager": "eager", "outside": "compiled, region outside", "inside": "compiled, region inside"}
    rival = "torch.autocast bfloat16, the same way"
    return [
        Row(
            name=f"{name}; {names[where]}",
            against=rival,
            **paired(loop(region, where, layers), loop(torch_region, where, layers), repetitions),
        )
        for name, region, where in cases
    ]


class Encoder(nn.Module):
    """A Transformer encoder with its softmax in the open, as it was before fused attention."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                "norm2": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            })
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # (batch, heads, tokens, tokens)
            x = x + layer["out"]((weights @ v).transpose(1, 2).flatten(2))
            x = x + layer["down"](functional.gelu(layer["up"](layer["norm2"](x))))
        return x


class Casts(TorchDispatchMode):
    """Count the casts of weights."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.shapes, self.count = {w.shape for w in weights}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        to = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and to == torch.bfloat16:
            self.count += args[0].dtype == torch.float32 and args[0].shape in self.shapes
        return func(*args, **(kwargs or {}))


def memory() -> dict[str, dict[str, float]]:
    x = torch.randn(8, 128, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    regions: dict[str, Region] = {
        "FP32": contextlib.nullcontext,
        "torch.amp bfloat16": torch_region,
        "linear allowed": region_of(f"{BF16},fp32=softmax+gelu"),
        "+ softmax": region_of(f"{BF16},fp32=gelu,low=softmax"),
        "+ softmax and gelu": region_of(f"{BF16},low=softmax+gelu"),
    }
    found = {}
    for name, region in regions.items():
        torch.manual_seed(0)
        model = Encoder().to(DEVICE)
        casts = Casts([p for p in model.parameters() if p.dim() == 2])
        with SavedBytes(model) as saved, casts, region():
            for _ in range(3):
                loss = model(x).float().square().mean()
        del loss
        found[name] = {"saved_mib_of_3_micro_batches": saved.total / 2**20, "weight_casts": casts.count}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--layers", type=int, default=64, help="of the model that is bound by dispatch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = speed(options.repetitions, options.layers)
    show(rows, f"mezzo / torch.autocast: {options.layers} tiny layers, forward and backward")
    kept = memory()
    for name, facts in kept.items():
        print(f"{name:<20} saved {facts['saved_mib_of_3_micro_batches']:.4g} MiB, {facts['weight_casts']} weight casts")
    sizes = {"repetitions": options.repetitions, "layers": options.layers}
    write(options.out, "engine", rows, **sizes, saved_for_backward=kept)


if __name__ == "__main__":
    main()
