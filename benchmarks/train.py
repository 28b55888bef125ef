"""Whole training steps against torch.amp's, on three networks: writes one dated JSON file.

Run with ``make bench``; the same as ``mezzo bench train``, for all networks. On a GPU in the sizes of the papers and
compiled as well, on a CPU in small ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rich.console import Console

from harness import DEVICE
from mezzo.bench import bench_train
from mezzo.bench.facts import write_dated
from mezzo.bench.nets import NETS
from mezzo.errors import MezzoError


def main() -> None:
    on_gpu = DEVICE == "cuda"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--ways", nargs="+", help='as "mezzo O1"; fp32 and torch.amp always run')
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=not on_gpu)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=on_gpu)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results = []
    for net in options.nets:
        result = bench_train(
            net,
            size="small" if options.small else "full",
            dtype=options.dtype,
            device=DEVICE,
            repetitions=options.repetitions,
            ways=options.ways,
            compiled=options.compiled,
        )
        Console(width=160).print(result.table())
        results.append(result.to_json())
        # After each, as the whole may take long.
        print(f"written to {write_dated(options.out, 'train', results)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except MezzoError as error:
        sys.exit(f"benchmarks/train.py: {error}")
