"""Benchmarks that users run on their own machine: ``mezzo bench``.

What is timed, how pairs are taken and what the rivals are lives here; figures of this repository are the JSON files
under ``benchmarks/results``. No networks: whole training steps are timed by ``benchmarks/train.py``.
"""

from mezzo.bench.step import StepResult, bench_step

__all__ = ["StepResult", "bench_step"]
