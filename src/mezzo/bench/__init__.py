"""Benchmarks that users run on their own machine: ``mezzo bench``.

What is timed, how pairs are taken and what the rivals are lives here; figures of this repository are the JSON files
under ``benchmarks/results``. No networks but stacks of one layer, with which ``mezzo doctor`` says for which widths a
format pays: whole training steps are timed by ``benchmarks/train.py``.
"""

from mezzo.bench.layers import LayerSteps, layer_steps
from mezzo.bench.step import StepResult, bench_step

__all__ = ["LayerSteps", "StepResult", "bench_step", "layer_steps"]
