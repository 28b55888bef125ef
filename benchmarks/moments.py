"""Moments in 8 bits: which curve, rounding and group keep AdamW's update, and what training scripts come to with them.

Two parts, both of small models on the CPU:

- *curves*: a language model is trained once in FP32, and the gradients of each step go to moments that are kept in
  many forms, each beside the same moments in float64; and so do random gradients whose neighbours are of uneven size;
- *scripts*: two of ``examples/families`` run under a policy with mezzo's optimizers in the place of torch's, and their
  moments in FP32, BF16, int8, and in linear codes rounded to nearest, which mezzo does not have.

``OMP_NUM_THREADS=1 python benchmarks/moments.py`` takes a quarter of an hour, and writes one dated JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import runpy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import mezzo
from forms import FORMS, Form, in_fp32, rounded_up
from harness import write_dated
from mezzo.files import jsonable
from mezzo.optim import optimizer as optimizer_room
from mezzo.report.verdict import rows
from mezzo.script.comparison import Comparison, Run
from mezzo.script.metric import Metric, better_of, printed_last
from mezzo.script.program import Program, Seams, StepRecord
from mezzo.script.runner import run
from mezzo.step import moments
from mezzo.step.executors.portable import Portable
from stepping.facts import facts

ROOT: Final = Path(__file__).parents[1]
FAMILIES: Final = ROOT / "examples" / "families"
BETA1, EPS = 0.9, 1e-8
#: Groups of every size up to this one divide what stands for a parameter.
LARGEST_GROUP: Final = 128

# Curves ---------------------------------------------------------------------------------------------------------


def gradients(steps: int, stride: int) -> Iterator[Tensor]:
    """Train the language model in FP32, and yield the clipped gradients of each step as one vector.

    Each parameter fills whole blocks of :data:`LARGEST_GROUP` elements, with zeros at its end; of all blocks every
    ``stride``-th one is taken.
    """
    script = runpy.run_path(str(FAMILIES / "docs_lm.py"))
    torch.manual_seed(0)
    text = torch.tensor(list(script["divide"](script["topics"])[0].encode()), dtype=torch.uint8)
    model = script["ByteGPT"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: script["warmup_cosine"](at, steps, 1 / 15))
    for given, following in islice(script["batches"](text, 0), steps):
        loss = nn.functional.cross_entropy(model(given).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        flat = [param.grad.flatten() for param in model.parameters()]
        padded = torch.cat([nn.functional.pad(each, (0, -len(each) % LARGEST_GROUP)) for each in flat])
        yield padded.view(-1, LARGEST_GROUP)[::stride].flatten()


def uneven(steps: int, ratio: float, count: int = 1 << 13) -> Iterator[Tensor]:
    """Yield random gradients: of neighbours, the largest are up to ``ratio`` times as large as the smallest."""
    generator = torch.Generator().manual_seed(1)
    size = ratio ** -torch.rand(count, generator=generator)
    mean = 0.3 * torch.randn(count, generator=generator)
    for _ in range(steps):
        yield size * (mean + torch.randn(count, generator=generator))


class Moments:
    """AdamW's two moments in one form, and what became of them."""

    def __init__(self, form: Form, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.form = form
        self.kept = [torch.zeros(count, dtype=dtype) for _ in range(2)]
        self.errors: list[float] = []
        self.swallowed: list[list[float]] = [[], []]
        self.largest = self.farthest = 0.0

    def step(self, gradient: Tensor, beta2: float, number: int, chances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Take in a gradient.

        Returns:
            The update, which comes of the moments before they are rounded; and whether each moment that is kept has
            changed, (2, elements).
        """
        mean = self.kept[0] * BETA1 + (1 - BETA1) * gradient
        square = self.kept[1] * beta2 + (1 - beta2) * gradient * gradient
        update = mean / (1 - BETA1**number) / ((square / (1 - beta2**number)).sqrt() + EPS)
        groups = [each.view(-1, self.form.group or LARGEST_GROUP) for each in (mean, square, *chances)]
        kept = [self.form.keep(groups[at], at == 1, groups[2 + at]).flatten() for at in range(2)]
        changed = torch.stack([new != old for new, old in zip(kept, self.kept, strict=True)])
        self.kept = kept
        return update, changed

    def compare(self, mine: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
        """Take down how an update differs from the exact one, and which changes were swallowed."""
        self.errors.append(float((mine[0] - exact[0]).norm() / exact[0].norm()))
        self.largest = max(self.largest, float(mine[0].abs().max()))
        self.farthest = max(self.farthest, float((mine[0] - exact[0]).abs().max()))
        for at, shares in enumerate(self.swallowed):
            shares.append(float((exact[1][at] & ~mine[1][at]).sum() / exact[1][at].sum()))

    def row(self, exact: Moments) -> dict[str, Any]:
        """Return what the form came to; errors are relative, and medians over steps."""
        alive = exact.kept[1] > 0
        return {
            "form": self.form.name,
            "group": self.form.group,
            "bytes": self.form.bytes,
            "error": statistics.median(self.errors),
            "error_first_20": statistics.median(self.errors[:20]),
            "error_last_50": statistics.median(self.errors[-50:]),
            "largest_error": max(self.errors),
            "largest_update": self.largest,
            "largest_difference": self.farthest,
            "swallowed_first": statistics.fmean(self.swallowed[0]),
            "swallowed_second": statistics.fmean(self.swallowed[1]),
            # Where rounding leans to one side, the roots do after some hundred steps.
            "root_of_second_kept": float((self.kept[1].double() / exact.kept[1])[alive].sqrt().median()),
        }


def curves(stream: Iterator[Tensor], beta2s: Sequence[float]) -> list[dict[str, Any]]:
    """Feed gradients to moments in every form, beside float64 ones, and return a row for each."""
    generator = torch.Generator().manual_seed(0)
    kept: dict[float, list[Moments]] = {}
    for number, gradient in enumerate(stream, 1):
        chances = torch.rand(2, len(gradient), generator=generator)
        for beta2 in beta2s:
            if beta2 not in kept:
                exact = Moments(Form(name="float64", keep=in_fp32), len(gradient), torch.float64)
                kept[beta2] = [exact, *(Moments(form, len(gradient)) for form in FORMS)]
            exact, *others = kept[beta2]
            found = exact.step(gradient.double(), beta2, number, chances)
            exact.compare(found, found)
            for each in others:
                each.compare(each.step(gradient, beta2, number, chances), found)
    return [{"beta2": beta2, **each.row(exact)} for beta2, (exact, *_) in kept.items() for each in kept[beta2]]


# Scripts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Family:
    """A script, the optimizer of torch's that it has, and the margin of its docstring."""

    script: str
    optimizer: str
    margin: float


SCRIPTS: Final = (
    Family(script="docs_lm.py", optimizer="AdamW", margin=0.03),
    Family(script="digits_cnn.py", optimizer="SGD", margin=1.0),
)
POLICY: Final = "O2,bf16"
#: How much larger the largest of neighbouring gradients are than the smallest.
RATIOS: Final = (10, 100, 1000)
LINEAR: Final = "linear codes, to nearest"
#: By name: what mezzo's optimizers take.
KINDS: Final = {"FP32": "float32", "BF16": "bfloat16", "int8": "int8", LINEAR: "int8"}
SHOWN: Final = (1, 10, 20, 50, 100)


def naive_coded(values: Tensor, dtype: torch.dtype, bits: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Round to evenly spaced codes, the nearest ones: in the place of the library's ``coded``."""
    scales = rounded_up(values.abs().amax(-1, keepdim=True))
    codes = torch.where(scales > 0, values / scales * torch.iinfo(dtype).max, 0.0)
    return codes.round().to(torch.int32), scales


def naive_valued(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of such codes."""
    return codes.to(torch.float32) * (scales.to(torch.float32) / torch.iinfo(codes.dtype).max)


def replaced(family: Family, kind: str, seams: Seams) -> None:
    """Give a script mezzo's optimizer in the place of torch's, with moments of a kind."""
    plain, mine = getattr(torch.optim, family.optimizer), getattr(mezzo.optim, family.optimizer)

    class Replaced(plain):  # still a class, of which what it makes is no instance
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return mine(*args, **options, state_dtype=KINDS[kind])

    seams.replace(torch.optim, family.optimizer, Replaced)
    if kind == LINEAR:
        seams.replace(moments, "coded", naive_coded)
        seams.replace(moments, "valued", naive_valued)
        seams.replace(optimizer_room, "executor_for", lambda device: Portable())


def trained(family: Family, kind: str, seed: int, arguments: Sequence[str]) -> tuple[str, list[StepRecord]]:
    """Run a script in this process, and return what it printed and its steps."""
    told: list[StepRecord] = []
    program = Program(name=str(FAMILIES / family.script), arguments=("--seed", str(seed), *arguments))
    with Seams() as seams, contextlib.redirect_stdout(io.StringIO()) as out:
        replaced(family, kind, seams)
        ended = run(program, POLICY, on_step=told.append)
    if ended.failure is not None:
        raise ended.failure
    return out.getvalue(), told


def scripts(family: Family, seeds: int, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a script with moments of each kind, each judged against FP32 ones as policies are."""
    runs, told, words, unit = [], {}, "", ""
    for kind in KINDS:
        for seed in range(seeds):
            printed, told[kind, seed] = trained(family, kind, seed, arguments)
            words, metric, unit = printed_last(printed) or (words, None, unit)
            print(f"{family.script}, moments in {kind}, seed {seed}: {words} {metric} {unit}", flush=True)
            runs.append(finished("O0" if kind == "FP32" else kind, seed, metric, told[kind, seed]))
    metric = Metric(name=words, unit=unit, better=better_of(words))
    comparison = Comparison(
        script=family.script, metric=metric, margin=family.margin, policies=("O0", *list(KINDS)[1:]), seeds=seeds,
        steps=None, date="", machine={}, runs=tuple(runs), interrupted=False,
    )  # fmt: skip
    found = []
    for kind, row in zip(KINDS, rows(comparison), strict=True):
        steps = [step for seed in range(seeds) for step in told[kind, seed]]
        losses = {number: [step.loss for step in steps if step.step == number] for number in SHOWN}
        found.append({
            "moments": kind, "metrics": [each.metric for each in comparison.of(row.policy)], "mean": row.metric,
            "difference": row.difference, "interval": row.interval, "verdict": row.verdict,
            "losses": {str(number): statistics.fmean(each) for number, each in losses.items() if each},
        })  # fmt: skip
    return {"script": family.script, "metric": asdict(metric), "margin": family.margin, "rows": found}


def finished(policy: str, seed: int, metric: float | None, steps: list[StepRecord]) -> Run:
    """Return a run as comparisons have it: what is not looked at is left empty."""
    return Run(
        policy=policy, seed=seed, code=0, metric=metric, loss=steps[-1].loss, steps=len(steps),
        skipped=sum(step.skipped for step in steps), nonfinite=sum(not math.isfinite(step.loss) for step in steps),
        step_ms=None, held_bytes=None, saved_bytes=None, peak_bytes=None, scale=None, low_share=None, emulated=False,
        folder=Path(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of the model whose gradients are taken")
    parser.add_argument("--stride", type=int, default=8, help="of the blocks of 128 gradients that are taken")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.999, 0.99], help="decay of second moments")
    parser.add_argument("--seeds", type=int, default=3, help="of each script and kind of moments; 0 runs none")
    parser.add_argument("--script-steps", type=int, help="of each script; as many as it takes when omitted")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    head = {"mezzo": mezzo.__version__, "steps": options.steps, "stride": options.stride, "policy": POLICY}
    result = {**facts(torch.device("cpu")), **head}
    result["curves"] = curves(gradients(options.steps, options.stride), options.beta2)
    result["uneven"] = [
        {"ratio": ratio, **row} for ratio in RATIOS for row in curves(uneven(options.steps, ratio), options.beta2)
    ]
    arguments = [] if options.script_steps is None else ["--steps", str(options.script_steps)]
    result["scripts"] = [scripts(each, options.seeds, arguments) for each in SCRIPTS if options.seeds]
    print(f"written to {write_dated(options.out, 'moments', jsonable(result))}")


if __name__ == "__main__":
    main()
