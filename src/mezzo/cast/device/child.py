"""A few products in a format, and whether they are right: on a CPU the work of a fresh interpreter, which it may kill.

How fast they are is measured to inform a user; it decides only what lies far from any doubt (``probing.FAR``).

``probing`` starts this file as a program of its own. It imports nothing of mezzo: it must run in a bare interpreter, in
which nothing has used oneDNN before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

#: Begins the line that is meant for the parent; all else on stdout is other people's chatter.
PREFIX: Final = "mezzo-probe "
#: The signals by which a processor refuses to go on.
FAULTS: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")

#: Kernels differ by width: with AMX one up to about 64 takes another path, and survives where 128 dies. The last is
#: timed.
WIDTHS: Final = (128, 512)
#: How far a result may be from FP32's, in the format's ``eps`` and relative to its norm. One rounding comes to 0.21,
#: what attention's backward pass rounds on its way to 0.6, eight steps of a recurrent layer to 1.2; sums of 512 in the
#: format itself to 5.
TOLERANCE: Final = 4
#: FP32 and the format are timed by turns: so often at least, and as long as the budget lasts.
MIN_TURNS: Final = 5
MAX_TURNS: Final = 24
TIME_BUDGET_S: Final = 0.2
#: A format that takes so many times FP32's time is known after the first turn.
HOPELESS: Final = 100

#: What torch raises where a device has no kernel for a format, or cannot even hold it.
_REFUSALS: Final = (RuntimeError, TypeError, AttributeError)

#: What is examined and decided apart, since kernels of one kind may be missing, wrong or slow where others are not.
Family = Literal["products", "convolution", "attention", "recurrent"]
FAMILIES: Final[tuple[Family, ...]] = get_args(Family)

#: Steps of a recurrent layer, and the sequences in its batch.
_STEPS, _BATCH = 8, 16


def _recurrent(layer: Callable[..., Any], states: int) -> Callable[..., Tensor]:
    def run(x: Tensor, of_input: Tensor, of_state: Tensor) -> Tensor:
        state = x.new_zeros(1, *x.shape[1:])
        weights = [of_input / 16, of_state / 16]  # a power of two, which every format divides by: gates saturate else
        out: Tensor = layer(x, (state,) * states if states > 1 else state, weights, False, 1, 0.0, True, False, False)[
            0
        ]
        return out

    return run


#: What a model multiplies by: the family, the shapes of the operands at a width, and the product. In ``matmul`` no
#: operand is transposed: a CPU takes other kernels there than for ``linear``, in FP16 far slower ones. A CPU runs an
#: LSTM as one kernel, and composes a GRU of products.
PRODUCTS: dict[str, tuple[Family, Callable[[int], list[tuple[int, ...]]], Callable[..., Tensor]]] = {
    "linear": ("products", lambda n: [(n, n)] * 2, functional.linear),
    "matmul": ("products", lambda n: [(n, n)] * 2, torch.matmul),
    "convolution": (
        "convolution",
        lambda n: [(4, n // 8, 28, 28), (n // 8, n // 8, 3, 3)],
        partial(functional.conv2d, padding=1),
    ),
    "attention": (
        "attention",
        lambda n: [(1, 2, n, 64)] * 3,
        partial(functional.scaled_dot_product_attention, is_causal=True),
    ),
    "lstm": ("recurrent", lambda n: [(_STEPS, _BATCH, n), (4 * n, n), (4 * n, n)], _recurrent(torch.lstm, 2)),
    "gru": ("recurrent", lambda n: [(_STEPS, _BATCH, n), (3 * n, n), (3 * n, n)], _recurrent(torch.gru, 1)),
}

#: What is said of a family: a status, a ratio of speeds or None, and a phrase.
Answer = dict[str, Any]


def examined(dtype: torch.dtype, device: str = "cpu") -> dict[Family, Answer]:
    """Compute each product forward and backward in a format, compare it with FP32's, and time both.

    Args:
        dtype: The format.
        device: Where.

    Returns:
        For each family ``status``: ``"right"`` where all agree with FP32's from the same rounded operands, ``"wrong"``,
        or ``"unsupported"`` where torch has no kernel. ``speed_ratio``: the time of FP32 over that of the format in the
        slowest product; None but for ``"right"``, and where a clock is too coarse. ``detail``: a phrase that says why.

    Cost:
        Two seconds on a CPU, and four where the format is slow; synchronises an accelerator.
    """
    with _plainly(device), torch.enable_grad():
        return {
            family: _of_family([name for name, (of, *_) in PRODUCTS.items() if of == family], dtype, device)
            for family in FAMILIES
        }


def _of_family(names: list[str], dtype: torch.dtype, device: str) -> Answer:
    speeds: dict[str, float] = {}
    for name in names:
        for width in WIDTHS:
            _, shapes, product = PRODUCTS[name]
            operands = _drawn(shapes(width), dtype)
            (slope,) = _drawn([product(*operands).shape], dtype)
            in_fp32 = partial(_forward_and_backward, name, operands, slope, torch.float32, device)
            in_format = partial(_forward_and_backward, name, operands, slope, dtype, device)
            wanted = in_fp32()
            try:
                result = in_format()
            except _REFUSALS as refusal:
                return {
                    "status": "unsupported",
                    "speed_ratio": None,
                    "detail": f"{name}: {str(refusal).splitlines()[0]}",
                }
            for got, want in zip(result, wanted, strict=True):
                off = float((got.float() - want).norm() / want.norm())
                if not off <= TOLERANCE * torch.finfo(dtype).eps:  # nor is a NaN
                    detail = f"{name} at width {width} is off by {off:.2g} of its norm"
                    return {"status": "wrong", "speed_ratio": None, "detail": detail}
        if (ratio := _speed_ratio(in_fp32, in_format, device)) is not None:
            speeds[name] = ratio
    if not speeds:
        return {"status": "right", "speed_ratio": None, "detail": "too short for this clock"}
    slowest = min(speeds, key=speeds.__getitem__)
    return {"status": "right", "speed_ratio": speeds[slowest], "detail": f"slowest: {slowest}"}


def products(dtype: torch.dtype) -> None:
    """Compute each product once on the CPU, forward: backward passes take the same kernels.

    Cost:
        Some 20 ms. May kill the process: that is what it is for.
    """
    with _plainly("cpu"), torch.no_grad():
        for _, shapes, compute in PRODUCTS.values():
            compute(*(operand.to(dtype) for operand in _drawn(shapes(WIDTHS[0]), dtype)))


def die_quietly() -> None:
    """Switch off handlers, reports on stderr and core files: this process may die of an instruction."""
    faulthandler.disable()
    if sys.platform == "win32":
        return
    import resource

    for deadly in (*FAULTS, "SIGALRM"):
        signal.signal(signal.Signals[deadly], signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


@contextlib.contextmanager
def _plainly(device: str) -> Iterator[None]:
    """Compute by torch alone, whatever autocast or inference mode is around."""
    with torch.autocast(device, enabled=False), torch.inference_mode(False):
        yield


def _drawn(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Draw tensors whose values a format has, on the CPU and in FP32; the user's random state stays."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes)
    return [tensor.to(dtype).float() for tensor in drawn]


def _forward_and_backward(
    name: str, operands: list[Tensor], slope: Tensor, dtype: torch.dtype, device: str
) -> list[Tensor]:
    leaves = [operand.to(device, dtype, copy=True).requires_grad_() for operand in operands]
    output = PRODUCTS[name][2](*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, slope.to(device, dtype))]


def _speed_ratio(in_fp32: Callable[[], object], in_format: Callable[[], object], device: str) -> float | None:
    """Return the time of FP32 over that of the format: of each the least of some, taken by turns.

    By turns, what slows the machine for a while slows both; and of several times the least is nearest to the work.
    """
    times: tuple[list[float], list[float]] = [], []
    for turn in range(MAX_TURNS):
        for work, taken in zip((in_fp32, in_format), times, strict=True):
            taken.append(_seconds(work, device))
        fp32_time, low_time = (min((seconds for seconds in taken if seconds > 0), default=None) for taken in times)
        if fp32_time is not None and low_time is not None and low_time > HOPELESS * fp32_time:
            break
        if turn + 1 >= MIN_TURNS and sum(map(sum, times)) > TIME_BUDGET_S:
            break
    return fp32_time / low_time if fp32_time is not None and low_time is not None else None


def _seconds(work: Callable[[], object], device: str) -> float:
    """Time some work: in seconds of the processor on a CPU, as what other programs take of it makes no format slow."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def main(name: str) -> None:
    """Run the child process: examine a format, and print one line for the parent."""
    die_quietly()
    # One thread: on a busy machine threads that wait for each other hide the arithmetic, and an FP16 product six times
    # slower than FP32 was measured as equally fast.
    torch.set_num_threads(1)
    print(PREFIX + json.dumps(examined(getattr(torch, name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
