"""The matrix work that tells whether a device can compute in a format, and a program that runs it.

``probe`` starts this file as a program of its own, because on some machines the work kills the
process that tries it. So that a death can be blamed on its case, every case announces itself before it
starts. Imported as a module, the file only offers its functions. It imports nothing of mezzo: it must
start in a bare interpreter, quickly, and before anything has touched oneDNN.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CASES", "PREFIX", "REFUSALS", "SIZES", "TIMED_CASES", "leave_no_core", "run_case", "time_case"]

#: Begins every line that is meant for the parent; all else on stdout is other people's chatter.
PREFIX = "mezzo-probe "

#: Widths at which the cases run. Kernels differ by size: with AMX a width up to about 64 takes another
#: path and survives where 128 dies.
SIZES = (128, 512)

#: Repeats stop after this much time. A healthy case repeats often enough for a steady minimum; one that
#: is a hundred times slower than FP32 is measured once, which is enough to know it.
TIME_BUDGET_S = 0.1

MAX_REPEATS = 24

#: How torch says that a device has no kernel for a format, or cannot even hold it.
REFUSALS = (RuntimeError, TypeError, AttributeError)

Work = Callable[[], object]


def _filled(*shape: int, dtype: torch.dtype, device: str, gradient: bool) -> Tensor:
    # A fixed pattern within ±1: no draw from the user's random state when this runs in process.
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel, dtype=torch.float32, device=device) * 0.618).sin().view(shape)
    return values.to(dtype).requires_grad_(gradient)


def _work(compute: Callable[[], Tensor], inputs: tuple[Tensor, ...], gradient: bool) -> Work:
    def forward_and_backward() -> object:
        output = compute()
        return torch.autograd.grad(output, inputs, torch.ones_like(output))

    return forward_and_backward if gradient else compute


def _storage(size: int, dtype: torch.dtype, device: str, gradient: bool) -> Work:
    values = _filled(size, dtype=torch.float32, device=device, gradient=gradient)
    return lambda: values.to(dtype).to(torch.float32)


def _gemm(size: int, dtype: torch.dtype, device: str, gradient: bool) -> Work:
    x = _filled(size, size, dtype=dtype, device=device, gradient=gradient)
    weight = _filled(size, size, dtype=dtype, device=device, gradient=gradient)
    return _work(lambda: functional.linear(x, weight), (x, weight), gradient)


def _matmul(size: int, dtype: torch.dtype, device: str, gradient: bool) -> Work:
    # No operand is transposed: a CPU takes other kernels here than for `linear`, in FP16 far slower ones.
    a = _filled(size, size, dtype=dtype, device=device, gradient=gradient)
    b = _filled(size, size, dtype=dtype, device=device, gradient=gradient)
    return _work(lambda: a @ b, (a, b), gradient)


def _convolution(size: int, dtype: torch.dtype, device: str, gradient: bool) -> Work:
    channels = size // 8
    x = _filled(4, channels, 28, 28, dtype=dtype, device=device, gradient=gradient)
    weight = _filled(channels, channels, 3, 3, dtype=dtype, device=device, gradient=gradient)
    return _work(lambda: functional.conv2d(x, weight, padding=1), (x, weight), gradient)


def _attention(size: int, dtype: torch.dtype, device: str, gradient: bool) -> Work:
    shape = (1, 2, size, 64)  # (batch, heads, tokens, head_dim)
    q, k, v = (_filled(*shape, dtype=dtype, device=device, gradient=gradient) for _ in range(3))
    attend = functional.scaled_dot_product_attention
    return _work(lambda: attend(q, k, v, is_causal=True), (q, k, v), gradient)


#: case -> (how to build it, whether with a backward pass), in the order in which they run. Convolution
#: comes early because it is what FP8 lacks, and because one missing kernel settles a format: torch's CPU
#: product in FP8 exists, but takes seconds.
CASES: dict[str, tuple[Callable[[int, torch.dtype, str, bool], Work], bool]] = {
    "storage": (_storage, False),
    "convolution": (_convolution, False),
    "convolution_backward": (_convolution, True),
    "attention": (_attention, False),
    "attention_backward": (_attention, True),
    "gemm": (_gemm, False),
    "gemm_backward": (_gemm, True),
    "matmul": (_matmul, False),
    "matmul_backward": (_matmul, True),
}

#: The cases whose time against FP32 decides whether a format is fast: a model uses them all.
TIMED_CASES = tuple(case for case in CASES if not case.startswith(("storage", "attention")))


def run_case(case: str, dtype: torch.dtype, device: str = "cpu", sizes: tuple[int, ...] = SIZES) -> None:
    """Run one case once at every size.

    Args:
        case: A key of ``CASES``.
        dtype: The format to compute in.
        device: Where to compute.
        sizes: The widths to try.

    Raises:
        RuntimeError: As torch does, where there is no kernel for the format.
        TypeError: As torch does, where the device cannot even hold the format.

    Cost:
        Synchronises an accelerator. May kill the process: that is what it is for.

    Example:
        >>> run_case("gemm", torch.float32)
    """
    build, gradient = CASES[case]
    with torch.enable_grad():
        for size in sizes:
            _seconds(build(size, dtype, device, gradient), device)


def time_case(case: str, dtype: torch.dtype, device: str = "cpu", size: int = SIZES[-1]) -> float:
    """Time one case, as the minimum of a few repeats: in seconds of the processor on a CPU, of the clock elsewhere.

    A CPU that other programs share is the same CPU: what they take of its time must not make a format slow.

    Args:
        case: A key of ``CASES``.
        dtype: The format to compute in.
        device: Where to compute.
        size: The width; large enough that the arithmetic outweighs the call.

    Returns:
        Seconds.

    Cost:
        About 0.1 s and two calls more; synchronises an accelerator per repeat.

    Example:
        >>> time_case("gemm", torch.float32, size=128) > 0
        True
    """
    build, gradient = CASES[case]
    with torch.enable_grad():
        work = build(size, dtype, device, gradient)
        times = [_seconds(work, device)]  # it built the kernel too, so it rarely is the minimum
        while len(times) < 2 or (sum(times) < TIME_BUDGET_S and len(times) < MAX_REPEATS):
            times.append(_seconds(work, device))
    return min(times)


def _seconds(work: Work, device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def _say(**facts: object) -> None:
    print(PREFIX + json.dumps(facts), flush=True)


def main(jobs: list[list[str]]) -> None:
    """Run the jobs in order, saying what happens before and after each.

    Args:
        jobs: Pairs of a dtype's name and a case. After one refusal the dtype's other jobs are left out.
    """
    leave_no_core()
    threads = torch.get_num_threads()
    refused: set[str] = set()
    for dtype_name, case in jobs:
        if dtype_name in refused:
            continue
        _say(begin=[dtype_name, case])
        seconds, error = None, ""
        try:
            dtype = getattr(torch, dtype_name)
            run_case(case, dtype)  # with the threads that the user's process would have
            if case in TIMED_CASES:
                # One thread: on a busy machine threads that wait for each other hide the arithmetic, and
                # an FP16 product six times slower than FP32 was measured as equally fast.
                torch.set_num_threads(1)
                seconds = time_case(case, dtype)
        except REFUSALS as refusal:
            error = str(refusal).splitlines()[0]
            refused.add(dtype_name)
        finally:
            torch.set_num_threads(threads)
        _say(end=[dtype_name, case], seconds=seconds, error=error)


def leave_no_core() -> None:
    """Let this process die without a core file: its death is an answer, not an accident to examine."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
