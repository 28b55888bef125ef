"""Quantising a tensor to each block format, against reading it once, and training by emulation, against FP32.

Three parts, all paired: of each pair one call after the other, so that what disturbs the machine disturbs both.

- *large*: 64 M elements of FP32, along both dimensions, to nearest and at random, beside ``x.abs().max()``;
- *small*: tensors of a small model's size, where a call's own cost counts;
- *training*: steps of ``examples/families/docs_lm.py`` whose blocks' products are below sixteen bits.

``OMP_NUM_THREADS=2 python benchmarks/formats.py`` takes four minutes on two cores, and writes one dated JSON file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

import mezzo
from harness import in_turns, write_dated
from mezzo.formats import BLOCK_FORMATS, BlockFormat, quantized
from stepping.facts import facts
from stepping.timing import against

ROOT: Final = Path(__file__).parents[1]
SMALL: Final = ((1024, 128), (1024, 256), (1024, 512))
DTYPES: Final = (torch.float32, torch.bfloat16)
#: What docs_lm is trained under: the reference, and what is compared with it.
TRAINED: Final = (
    "O0",
    "O1,bf16",
    *(f"O1,bf16,fp8_recipe={recipe},fp8_module=blocks.*" for recipe in ("tensorwise", "rowwise", "delayed")),
    "O1,bf16,mxfp8_module=blocks.*",
    "O1,bf16,nvfp4_module=blocks.*",
)
#: Of small tensors: one scale for all, for a row, for a block, and two levels of them.
KINDS: Final = ("tensorwise_e4m3", "rowwise_e4m3", "mxfp8_e4m3", "nvfp4")


def ways(x: Tensor, fmt: BlockFormat) -> dict[str, Callable[[], object]]:
    """Return the calls that are compared, by name."""
    key = torch.tensor(1)
    return {
        "x.abs().max()": lambda: x.abs().max(),
        "nearest": lambda: quantized(x, fmt),
        "stochastic": lambda: quantized(x, fmt, key=key),
        "nearest, dim=0": lambda: quantized(x, fmt, 0),
        "stochastic, dim=0": lambda: quantized(x, fmt, 0, key=key),
    }


def measured(x: Tensor, fmt: BlockFormat, repetitions: int) -> dict[str, Any]:
    """Time each way, and take its ratio to reading the tensor, pair by pair and of the fastest calls."""
    calls = {name: (lambda: None, call) for name, call in ways(x, fmt).items()}
    taken = in_turns(calls, x.device, repetitions)
    rival = taken.pop("x.abs().max()")
    row: dict[str, Any] = {"format": fmt.name, "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
    row["read_ms"] = 1e3 * min(rival)
    for name, times in taken.items():
        ratio = against(times, rival)
        row[name] = {
            "ms": 1e3 * min(times), "fastest": min(times) / min(rival), "ratio": ratio.median, "ratio_p10": ratio.p10,
            "ratio_p90": ratio.p90,
        }  # fmt: skip
    told = ", ".join(f"{name} {1e3 * row[name]['ms']:.0f} µs, {row[name]['fastest']:.2f}" for name in taken)
    print(f"{fmt.name} {row['dtype']} {tuple(x.shape)}: read {1e3 * row['read_ms']:.0f} µs; {told}", flush=True)
    return row


def training(repetitions: int) -> list[dict[str, Any]]:
    """Time training steps of docs_lm under each policy, and take their ratios to FP32's, step by step."""
    sys.path.insert(0, str(ROOT / "examples" / "families"))
    import docs_lm

    given, following = next(docs_lm.batches(torch.tensor(list(docs_lm.divide(docs_lm.topics)[0].encode())), 0))

    def step_of(policy: str) -> Callable[[], object]:
        torch.manual_seed(0)
        model = docs_lm.ByteGPT()
        amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-5), policy)

        def step() -> None:
            with amp.autocast():
                loss = functional.cross_entropy(model(given).flatten(0, 1), following.flatten())
            amp.backward(loss)
            amp.step()
            amp.zero_grad()

        for _ in range(3):
            step()
        return step

    taken = in_turns({text: (lambda: None, step_of(text)) for text in TRAINED}, torch.device("cpu"), repetitions)
    rival, rows = taken.pop("O0"), []
    for text, times in taken.items():
        ratio = against(times, rival)
        row = {"policy": text, "ms": 1e3 * min(times), "rival": "O0", "rival_ms": 1e3 * min(rival)}
        row |= {"ratio": ratio.median, "ratio_p10": ratio.p10, "ratio_p90": ratio.p90}
        rows.append({**row, "fastest": min(times) / min(rival)})
        print(f"{text}: {ratio.median:.2f} ({ratio.p10:.2f} to {ratio.p90:.2f}) times FP32's step", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 26, help="of the large tensor: a square number of them")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="pairs of large tensors; a hundred times as many small"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    side = round(options.elements**0.5)
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(side, side, generator=generator)
    rows = {"large": [measured(large, fmt, options.repetitions) for fmt in BLOCK_FORMATS.values()]}
    del large
    rows["small"] = [
        measured(torch.randn(shape, generator=generator).to(dtype), BLOCK_FORMATS[name], 100 * options.repetitions)
        for dtype in DTYPES
        for shape in SMALL
        for name in KINDS
    ]
    rows["training"] = training(10 * options.repetitions)
    result = {**facts(torch.device("cpu")), "mezzo": mezzo.__version__, "repetitions": options.repetitions, **rows}
    print(f"written to {write_dated(options.out, 'formats', result)}")


if __name__ == "__main__":
    main()
