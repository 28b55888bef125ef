"""The allow list of a Transformer encoder: ``examples/allow_list.py`` with more rounds, written as a dated JSON.

``OMP_NUM_THREADS=1 python benchmarks/allow_list.py`` on a machine that has other work: threads that wait for each
other would be measured too.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import torch

from harness import DEVICE, write_dated
from stepping.facts import facts

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument(
        "--repetitions", type=int, default=40, help="rounds, in each of which every policy takes a step"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    example = runpy.run_path(str(ROOT / "examples" / "allow_list.py"))
    rows = example["measured"](arguments.tokens, arguments.repetitions)
    sizes = {name.lower(): example[name] for name in ("WIDTH", "HEADS", "LAYERS", "WORDS", "BATCH")}
    head = {**facts(torch.device(DEVICE)), **sizes, "tokens": arguments.tokens, "repetitions": arguments.repetitions}
    print(write_dated(arguments.out, "allow-list", {**head, "rows": rows}))


if __name__ == "__main__":
    main()
