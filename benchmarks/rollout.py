"""Trainer and engine: how far their log-probabilities are apart under each policy, over three seeds.

``examples/rollout_parity.py``, each pair of policy and format with a process that samples; and each engine against
itself, all positions at once. ``OMP_NUM_THREADS=1 python benchmarks/rollout.py`` takes some minutes, and writes one
dated JSON file.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import mezzo
from harness import write_dated
from mezzo.numerics import LogProbs
from stepping.facts import facts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "rollout_parity.py"
#: What the row of an engine against itself is called, in place of a policy.
ITSELF = "the engine"


def measured(seeds: int, steps: int, pairs: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each pair: means over seeds, and of the largest distance the largest.

    Args:
        seeds: Of training and sampling.
        steps: Of each training.
        pairs: How many of the example's; all when omitted.
    """
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    apart = defaultdict[tuple[str, str], list[LogProbs]](list)
    for seed in range(seeds):
        model, prompts = example.train(seed, steps)
        for policy, dtype in [*example.PAIRS.items()][:pairs]:
            trainer_rows = apart[policy, dtype]
            texts, drawn_by, log_probs = example.compare(model, prompts, policy, dtype, seed)
            trainer_rows.append(LogProbs.of(log_probs, drawn_by))
            if policy.startswith("O2") and "module" not in policy:
                apart[ITSELF, dtype].append(LogProbs.of(_itself(example, model, texts, dtype), drawn_by))
    return [
        {
            "policy": policy, "engine": dtype, "tokens": sum(one.count for one in several),
            "mean": statistics.fmean(one.mean for one in several), "largest": max(one.largest for one in several),
            "kl": statistics.fmean(one.kl for one in several),
            "ratio_p95": statistics.fmean(one.ratio[2] for one in several),
        }
        for (policy, dtype), several in apart.items()
    ]  # fmt: skip


@torch.no_grad()
def _itself(example: Any, model: torch.nn.Module, texts: torch.Tensor, dtype: str) -> torch.Tensor:
    engine = example.engine_of(mezzo.weights.export(model, dtype), getattr(torch, dtype))
    return example.log_probs(engine(texts[:, :-1]), texts[:, 1:])[:, example.PROMPT - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--pairs", type=int, help="how many of the example's; all when omitted")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    result = {**facts(torch.device("cpu")), "mezzo": mezzo.__version__, "seeds": options.seeds, "steps": options.steps}
    result["rows"] = measured(options.seeds, options.steps, options.pairs)
    print(f"written to {write_dated(options.out, 'rollout', result)}")


if __name__ == "__main__":
    main()
