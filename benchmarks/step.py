"""The optimizer step against torch.amp's path, at several sizes: writes one dated JSON file.

Run with ``make bench``; all shapes and both dtypes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from rich.console import Console

from harness import DEVICE, write_dated
from stepping import bench_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["gpt2-small", "resnet-50", "200-tiny"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results = []
    for shapes in options.shapes:
        for dtype in options.dtypes:
            result = bench_step(shapes, dtype=dtype, device=DEVICE, repetitions=options.repetitions)
            Console(width=140).print(result.table())
            results.append(result.to_json())
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    print(f"written to {write_dated(options.out, 'step', results)}")


if __name__ == "__main__":
    main()
