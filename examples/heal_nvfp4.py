"""Train docs_lm in NVFP4, and heal it in BF16 for its last tenth: how much of the gap to BF16 closes.

``python examples/heal_nvfp4.py --steps 200 --seeds 3`` takes some minutes. Each run is what
``mezzo run --policy "O1,bf16,nvfp4_module=blocks.*@0; O1,bf16@180" examples/families/docs_lm.py`` does.
"""

import argparse
import contextlib
import io
import re
import statistics
from pathlib import Path

from mezzo.script import Program, run

SCRIPT = Path(__file__).parent / "families" / "docs_lm.py"
BF16, NVFP4 = "O1,bf16", "O1,bf16,nvfp4_module=blocks.*"


def schedules(steps):
    """Name what is compared. The last changes after the last step: it tells healing from an evaluation in BF16."""
    return {
        "BF16": BF16,
        "NVFP4": NVFP4,
        "NVFP4, healed": f"{NVFP4}@0; {BF16}@{steps - steps // 10}",
        "NVFP4, evaluated in BF16": f"{NVFP4}@0; {BF16}@{steps}",
    }


def bits_per_byte(schedule, steps, seed):
    """Run the script under a schedule, and return what it prints last."""
    program = Program(name=str(SCRIPT), arguments=("--steps", str(steps), "--seed", str(seed)))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ended = run(program, schedule)
    if ended.failure is not None:
        raise ended.failure
    return float(re.findall(r"test loss ([\d.]+)", printed.getvalue())[-1])


def main():
    parser = argparse.ArgumentParser(description="Train docs_lm in NVFP4, and heal it in BF16 for its last tenth.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    means = {}
    for name, schedule in schedules(args.steps).items():
        losses = [bits_per_byte(schedule, args.steps, seed) for seed in range(args.seeds)]
        means[name] = statistics.fmean(losses)
        print(f"{name:<24}  test loss {means[name]:.4f} bits/byte, over {args.seeds} seed(s)", flush=True)
    gap = means["NVFP4"] - means["BF16"]
    print(f"{(means['NVFP4'] - means['NVFP4, healed']) / gap:.0%} of the gap of {gap:.4f} closes")


if __name__ == "__main__":
    main()
