"""Whole training steps against torch.amp's, on networks bound by products, by convolutions and by launching.

Throughput, peak memory, kernels and host syncs of every way to train, each in turns with torch.amp, from the same
weights on the same batch; a way whose loss does not follow that of FP32 is an error. Run with ``make bench``, or:

    python benchmarks/train.py --net 64-tiny
    python benchmarks/train.py --net gpt2-small --ways "mezzo O1, mezzo O2" --json

Writes one dated JSON file. On a GPU in the sizes of the papers and compiled as well, on a CPU in small ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rich.console import Console

from harness import DEVICE, write_dated
from mezzo.errors import MezzoError
from stepping.facts import checked_device
from training import bench_train
from training.nets import NETS
from training.ways import WAYS


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", "--nets", nargs="+", default=list(NETS), help=f"of {', '.join(NETS)}")
    parser.add_argument("--size", help="full, small or least; small on a CPU, full on a GPU")
    parser.add_argument("--ways", nargs="+", help=f"of {', '.join(WAYS)}; fp32 and torch.amp always run")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")
    parser.add_argument("--device", default=DEVICE, help="cpu or cuda")
    parser.add_argument("--repetitions", type=int, default=15, help="rounds in which two take turns")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="torch.compile(model) too; minutes")
    parser.add_argument("--json", action="store_true", help="print JSON for a program")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file")
    return parser.parse_args()


def main() -> None:
    given = options()
    device = checked_device(given.device)
    on_gpu = device.type == "cuda"
    results = []
    for net in given.net:
        result = bench_train(
            net,
            size=given.size or ("full" if on_gpu else "small"),
            dtype=given.dtype,
            device=device,
            repetitions=given.repetitions,
            ways=given.ways and [way.strip() for way in ",".join(given.ways).split(",")],
            compiled=on_gpu if given.compiled is None else given.compiled,
        )
        results.append(result.to_json())
        if not given.json:
            Console(width=160).print(result.table())
        # After each, as the whole may take long.
        print(f"written to {write_dated(given.out, 'train', results)}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(results, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    try:
        main()
    except MezzoError as error:
        sys.exit(f"benchmarks/train.py: {error}")
