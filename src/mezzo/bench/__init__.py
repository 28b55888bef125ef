"""Benchmarks that users run on their own machine: ``mezzo bench``.

What is timed, how pairs are taken and what the rivals are lives here; figures of this repository are the JSON files
under ``benchmarks/results``.
"""

from mezzo.bench.step import StepResult, bench_step
from mezzo.bench.train import bench_train
from mezzo.bench.train_result import TrainResult

__all__ = ["StepResult", "TrainResult", "bench_step", "bench_train"]
