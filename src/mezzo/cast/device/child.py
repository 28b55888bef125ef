"""The matrix work that tells whether a device can compute in a format, and a program that tries it on a CPU.

On some machines the work kills the process that tries it. ``probing`` therefore starts this file as a program of its
own, which computes nothing itself: it tries each case in a forked copy. oneDNN reads its limit when it is first used,
so each copy obeys the limit that is set in it. Imported as a module, the file only offers its functions. It imports
nothing of mezzo: it must start in a bare interpreter, and before anything has touched oneDNN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CASES", "ISA_VARIABLE", "PREFIX", "SIZES", "TIMED_CASES", "Status", "Tried", "crashes", "in_copy"]
__all__ += ["run_case", "time_case", "try_case", "try_format"]

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"

#: Begins the line that is meant for the parent; all else on stdout is other people's chatter.
PREFIX = "mezzo-probe "

#: Widths at which the cases run. Kernels differ by size: with AMX a width up to about 64 takes another
#: path and survives where 128 dies.
SIZES = (128, 512)

#: Repeats stop after this much time. A healthy case repeats often enough for a steady minimum; one that
#: is a hundred times slower than FP32 is measured once, which is enough to know it.
TIME_BUDGET_S = 0.1

MAX_REPEATS = 24

#: A case takes some tenths of a second, and seconds where it is slow; on a busy machine many times that.
CASE_TIMEOUT_S = 60.0

#: How torch says that a device has no kernel for a format, or cannot even hold it.
REFUSALS = (RuntimeError, TypeError, AttributeError)

#: How torch says that memory ran out, which says nothing of a format.
NO_MEMORY = ("allocate memory", "out of memory")

#: The signals of a process that the processor refused to go on with.
FAULTS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")

Work = Callable[[], object]
Status = Literal["native", "crashes", "unsupported"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """How one case ended."""

    status: Status
    seconds: float | None = None
    detail: str = ""
    accident: bool = False  # it is no answer: the copy was stopped from outside, or ran out of time or of memory


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a copy of this process ended."""

    by: Literal["itself", "fault", "timer", "accident"]
    trouble: str = ""  # the rest of a sentence; nothing if the work was done


#: family of ops -> (the shapes of its operands at a width, what it computes), in the order in which they are tried.
#: Convolution comes early because it is what FP8 lacks, and because one missing kernel settles a format: torch's CPU
#: product in FP8 exists, but takes seconds. In `matmul` no operand is transposed: a CPU takes other kernels there than
#: for `linear`, in FP16 far slower ones.
FAMILIES: dict[str, tuple[Callable[[int], list[tuple[int, ...]]], Callable[..., Tensor]]] = {
    "storage": (lambda n: [(n,)], lambda x: x.to(torch.float32)),
    "convolution": (lambda n: [(4, n // 8, 28, 28), (n // 8, n // 8, 3, 3)], partial(functional.conv2d, padding=1)),
    "attention": (lambda n: [(1, 2, n, 64)] * 3, partial(functional.scaled_dot_product_attention, is_causal=True)),
    "gemm": (lambda n: [(n, n)] * 2, functional.linear),
    "matmul": (lambda n: [(n, n)] * 2, torch.matmul),
}

#: Each family forward, and but for storage with its backward pass.
CASES = tuple(case for family in FAMILIES for case in (family, f"{family}_backward") if case != "storage_backward")

#: The cases whose time against FP32 decides whether a format is fast: a model uses them all.
TIMED_CASES = tuple(case for case in CASES if not case.startswith(("storage", "attention")))


def _work(case: str, size: int, dtype: torch.dtype, device: str) -> Work:
    family, _, backward = case.partition("_")
    shapes, compute = FAMILIES[family]
    operands = []
    for shape in shapes(size):
        # A fixed pattern within ±1: no draw from the user's random state when this runs in process.
        values = (torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device) * 0.618).sin()
        operands.append(values.view(shape).to(dtype).requires_grad_(bool(backward)))

    def forward_and_backward() -> object:
        output = compute(*operands)
        return torch.autograd.grad(output, operands, torch.ones_like(output))

    return forward_and_backward if backward else lambda: compute(*operands)


def run_case(case: str, dtype: torch.dtype, device: str = "cpu", sizes: tuple[int, ...] = SIZES) -> None:
    """Run one case once at every size.

    Args:
        case: One of ``CASES``.
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
    with torch.enable_grad():
        for size in sizes:
            _seconds(_work(case, size, dtype, device), device)


def time_case(case: str, dtype: torch.dtype, device: str = "cpu", size: int = SIZES[-1]) -> float:
    """Time one case, as the minimum of a few repeats: in seconds of the processor on a CPU, of the clock on others.

    A CPU that other programs share is the same CPU: what they take of its time must not make a format slow.

    Args:
        case: One of ``CASES``.
        dtype: The format to compute in.
        device: Where to compute.
        size: The width; large enough that the arithmetic outweighs the call.

    Returns:
        Seconds.

    Cost:
        About 0.1 s, and one call at least; synchronises an accelerator per repeat.

    Example:
        >>> time_case("gemm", torch.float32, size=128) > 0
        True
    """
    with torch.enable_grad():
        work = _work(case, size, dtype, device)
        times = [_seconds(work, device)]  # it built the kernel too, so it rarely is the minimum
        while sum(times) < TIME_BUDGET_S and len(times) < MAX_REPEATS:
            times.append(_seconds(work, device))
    return min(times)


def _seconds(work: Work, device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def try_case(case: str, dtype: torch.dtype, device: str = "cpu", sizes: tuple[int, ...] = SIZES) -> Tried:
    """Run one case, and time it where it is one of ``TIMED_CASES``.

    Args:
        case: One of ``CASES``.
        dtype: The format to compute in.
        device: Where to compute.
        sizes: The widths to try; the last one is timed.
    """
    threads = torch.get_num_threads()
    try:
        run_case(case, dtype, device, sizes)  # with the threads that the user's process would have
        if case not in TIMED_CASES:
            return Tried("native")
        # One thread: on a busy machine threads that wait for each other hide the arithmetic, and
        # an FP16 product six times slower than FP32 was measured as equally fast.
        torch.set_num_threads(1 if device == "cpu" else threads)
        return Tried("native", time_case(case, dtype, device, sizes[-1]))
    except REFUSALS as refusal:
        detail = str(refusal).splitlines()[0]
        return Tried("unsupported", detail=detail, accident=any(words in detail for words in NO_MEMORY))
    finally:
        torch.set_num_threads(threads)


def try_format(tried: Callable[[str], Tried]) -> dict[str, Tried]:
    """Try the cases of one format, until one settles it: a kernel is missing, or the try itself went wrong.

    Args:
        tried: Tries a case.

    Returns:
        The outcome of each case; without the backward pass of one that kills, which begins with the same work.
    """
    found: dict[str, Tried] = {}
    for case in CASES:
        forward = found.get(case.removesuffix("_backward"))
        if forward is not None and forward.status == "crashes":
            continue
        found[case] = tried(case)
        if found[case].status == "unsupported" or found[case].accident:
            break
    return found


def try_in_copy(dtype: str, setting: str | None, case: str) -> Tried:
    """Try one case in a copy of this process, or in itself where there are no copies.

    Args:
        dtype: The format's name in torch.
        setting: oneDNN's limit, if there is to be one.
        case: One of ``CASES``.
    """

    def work() -> dict[str, Any]:
        if setting is not None:
            os.environ[ISA_VARIABLE] = setting
        return dataclasses.asdict(try_case(case, getattr(torch, dtype)))

    if not hasattr(os, "fork"):
        return Tried(**work())
    told, ended = in_copy(work, CASE_TIMEOUT_S)
    if ended.by == "accident":  # once more: what stopped it from outside may be over
        told, ended = in_copy(work, CASE_TIMEOUT_S)
    if ended.by == "itself":
        return Tried(**told)
    return Tried("crashes", detail=f"the process {ended.trouble}", accident=ended.by != "fault")


def crashes(cases: Mapping[str, Tried]) -> bool:
    """Whether the processor itself refused to go on with one of the cases."""
    return any(outcome.status == "crashes" and not outcome.accident for outcome in cases.values())


def main(dtypes: list[str], setting: str | None, limit: str) -> dict[str, dict[str, dict[str, Tried]]]:
    """Try formats without a limit; with mezzo's own limit, where something crashes; and as they will be used.

    Args:
        dtypes: Their names in torch, float32 among them.
        setting: The limit of the user's environment.
        limit: The one that mezzo would set.

    Returns:
        Under ``"free"``, ``"limited"`` and ``"used"``: for each format the outcome of each case.
    """
    # What a first backward pass imports, half a second of it: once here, not in the copy of each case.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")

    def tried(under: str | None) -> dict[str, dict[str, Tried]]:
        return {dtype: try_format(partial(try_in_copy, dtype, under)) for dtype in dtypes}

    free = tried(None)
    limited = tried(limit) if setting == limit or any(map(crashes, free.values())) else free
    return {"free": free, "limited": limited, "used": limited if setting in (None, limit) else tried(setting)}


# A copy of this process ----------------------------------------------------------------------------


def in_copy(work: Callable[[], Any], timeout_s: float) -> tuple[Any, Ended]:
    """Do in a forked copy of this process what may kill it.

    Args:
        work: What to do; its result must be what JSON can hold, some kilobytes at most.
        timeout_s: After this time the copy is stopped.

    Returns:
        The result, None if there is none, and how the copy ended.

    Raises:
        OSError: This process cannot be copied.
    """
    if not hasattr(os, "fork"):
        raise OSError("this platform copies no processes")
    ours, its = os.pipe()
    with open(ours, "rb", buffering=0) as pipe, open(its, "wb", buffering=0) as end:
        with warnings.catch_warnings():
            # Python warns of threads that a fork leaves behind. The copy needs none of them; should it wait
            # for one all the same, its timer ends it.
            warnings.simplefilter("ignore")
            copy = os.fork()
        if copy == 0:
            _work_and_exit(work, its, timeout_s)
        end.close()
        try:
            ended = _ended(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), timeout_s)
        except ChildProcessError:
            ended = Ended("accident", "has ended, and other code collected its exit status")
        # Only now, and only what has arrived: another fork of this process may hold the pipe open.
        os.set_blocking(ours, False)
        return json.loads(pipe.read(1 << 20) or b"null") if ended.by == "itself" else None, ended


def _work_and_exit(work: Callable[[], Any], pipe: int, timeout_s: float) -> None:
    code = 1
    try:
        import resource  # which is not there on systems that copy no processes

        faulthandler.disable()  # a death here is an answer, not something to report on stderr
        for deadly in (*FAULTS, "SIGALRM"):
            signal.signal(signal.Signals[deadly], signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        # Nor is it an accident to examine.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.write(pipe, json.dumps(work()).encode())
        code = 0
    finally:
        os._exit(code)  # no exit handlers, no flushing of buffers that belong to the parent


def _ended(code: int, timeout_s: float) -> Ended:
    """Say how a copy ended, from its exit code: negative for a signal."""
    if code >= 0:
        return Ended("accident", f"ended with exit code {code}") if code else Ended("itself")
    name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
    if name == "SIGALRM":
        return Ended("timer", f"did not finish in {timeout_s:.3g} s")
    words = "an illegal instruction (SIGILL)" if name == "SIGILL" else name
    return Ended("fault" if name in FAULTS else "accident", f"was killed by {words}")


if __name__ == "__main__":
    print(PREFIX + json.dumps(main(**json.loads(sys.argv[1])), default=dataclasses.asdict), flush=True)
