"""The optimizer step against what else a user could take: contenders, shapes, timing in turns, facts of the machine.

What is timed, how pairs are taken and what the rivals are lives here; networks are in ``training``.
"""

from stepping.bench import StepResult, bench_step

__all__ = ["StepResult", "bench_step"]
