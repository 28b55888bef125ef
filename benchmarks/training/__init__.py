"""Whole training steps in each way that a user could take them: networks, ways, what a step asks of the machine.

``benchmarks/train.py`` is the command. Timing and the facts of a machine are those of :mod:`stepping`.
"""

from .result import TrainResult
from .train import bench_train

__all__ = ["TrainResult", "bench_train"]
