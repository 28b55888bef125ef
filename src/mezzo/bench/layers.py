"""For which layers a format pays: whole training steps of a narrow and of a wide layer, against FP32.

Products alone do not tell: where they are several times faster, casts and launches can still make the step of a small
model slower. The steps run in a process of their own, since what a session does about a device lasts as long as its
process, and a format that kills one must not kill the caller.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.bench.children import ask, tell
from mezzo.bench.timing import Spread, against, nothing, rounds, seconds
from mezzo.errors import MezzoError
from mezzo.session import MixedPrecision
from mezzo.tensors import dtype_name

__all__ = ["WIDTHS", "LayerSteps", "layer_steps", "measured"]

#: A layer of a small model, and one of a large one.
WIDTHS: Final = (128, 2048)
#: Layers of a net, so that what a step costs as a whole is shared by some, and rows of a batch.
_DEPTH: Final = 4
_ROWS: Final = 128
_REPETITIONS: Final = 9
#: Some ten seconds on two cores; many times that on a busy machine.
_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSteps:
    """How fast training steps of one layer are in a format, by width.

    Attributes:
        speeds: Time of FP32 over time of the format under O1, above 1 is faster: median and what 80 % lie between.
        trouble: Why there are none; ``""`` where there are.
    """

    speeds: Mapping[int, Spread]
    trouble: str = ""

    def verdict(self, name: str) -> str:
        """Say in a sentence whether the format pays: where nearly every step was faster than FP32's.

        Args:
            name: Of the format.

        Example:
            >>> slow, fast = Spread(median=0.66, p10=0.6, p90=0.7), Spread(median=2.4, p10=2.1, p90=2.6)
            >>> print(LayerSteps(speeds={128: slow, 2048: fast}).verdict("bfloat16"))
            bfloat16 pays at width 2048 only: training steps 0.66× as fast as in FP32 at width 128, 2.4× at width 2048
        """
        if not self.speeds:
            return f"{name}: no training step could be timed; {self.trouble}"
        times = [f"{speed.median:.2g}× {{}}at width {width}" for width, speed in self.speeds.items()]
        said = ", ".join(text.format("as fast as in FP32 " if number == 0 else "") for number, text in enumerate(times))
        pays = [str(width) for width, speed in self.speeds.items() if speed.p10 > 1]
        unclear = [str(width) for width, speed in self.speeds.items() if speed.p10 <= 1 <= speed.p90]
        words = "pays" if len(pays) == len(self.speeds) else f"pays at width {', '.join(pays)} only"
        doubt = f"; unclear at width {', '.join(unclear)}, where steps were now faster, now slower" if unclear else ""
        return f"{name} {words if pays else 'saves no time here'}: training steps {said}{doubt}"

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {"speeds": {str(width): asdict(speed) for width, speed in self.speeds.items()}, "trouble": self.trouble}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> LayerSteps:
        """Rebuild what :meth:`to_dict` returned."""
        speeds = {int(width): Spread(**speed) for width, speed in stored["speeds"].items()}
        return cls(speeds=speeds, trouble=stored["trouble"])


def layer_steps(device_type: str, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, LayerSteps]:
    """Time training steps of narrow and wide layers in each format, in a process of their own.

    Args:
        device_type: A device that is there.
        dtypes: Low formats that a policy can ask for.

    Returns:
        For each format the speeds, or why there are none.

    **Cost**: some ten seconds in a child process; on a GPU also its context there.
    """
    found: dict[torch.dtype, LayerSteps] = {}
    while left := [dtype for dtype in dtypes if dtype not in found]:
        told, trouble = _ask_child([device_type, *map(dtype_name, left)])
        found |= {dtype: told[dtype_name(dtype)] for dtype in left if dtype_name(dtype) in told}
        if len(told) < len(left):  # the first that it says nothing of ended it; those behind get a child of their own
            found[left[len(told)]] = LayerSteps(speeds={}, trouble=trouble)
    return found


def _ask_child(arguments: list[str]) -> tuple[dict[str, LayerSteps], str]:
    """Start a child; return its answers, in the order of the formats, and how it ended if some are missing."""
    told: dict[str, LayerSteps] = {}

    def take(said: Any) -> None:
        name, steps = said
        told[name] = LayerSteps.from_dict(steps)

    return told, ask(__name__, arguments, take, timeout_s=_TIMEOUT_S)


def main(device_type: str, *names: str) -> None:
    """Be the child process: measure formats, and print a line for each."""
    if device_type == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine hide the arithmetic
    for name in names:
        try:
            steps = LayerSteps(speeds=measured(device_type, getattr(torch, name)))
        except MezzoError as error:
            steps = LayerSteps(speeds={}, trouble=str(error).splitlines()[0])
        tell([name, steps.to_dict()])


def measured(
    device_type: str,
    dtype: torch.dtype,
    *,
    widths: Sequence[int] = WIDTHS,
    repetitions: int = _REPETITIONS,
    clock: Callable[[Callable[[], object]], float] | None = None,
) -> dict[int, Spread]:
    """Time steps in this process, FP32 and the format in turns.

    Args:
        device_type: Where.
        dtype: The format.
        widths: Of the layers.
        repetitions: Steps of each that count.
        clock: Says how long a call takes. On a CPU it counts seconds of the processor when omitted: what other programs
            take of it must not make a format slow.

    Returns:
        By width, time of FP32 over time of the format.
    """
    device = torch.device(device_type)
    clock = clock or (_processor_seconds if device_type == "cpu" else functools.partial(seconds, device=device))
    found = {}
    for width in widths:
        x = torch.randn(_ROWS, width, device=device)
        low = f"O1,dtype={dtype_name(dtype)}"
        steps = {"float32": _plain_step(_net(width, device), x), "low": _session_step(_net(width, device), x, low)}
        taken = rounds({name: (nothing, step) for name, step in steps.items()}, clock, repetitions)
        found[width] = against(taken["float32"], taken["low"])
    return found


def _net(width: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(each for _ in range(_DEPTH) for each in (nn.Linear(width, width), nn.ReLU()))).to(device)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused SGD, with which a session waits for no device."""
    has_fused = next(net.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.SGD(net.parameters(), lr=1e-4, fused=has_fused)


def _plain_step(net: nn.Module, x: Tensor) -> Callable[[], object]:
    optimizer = _optimizer(net)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _session_step(net: nn.Module, x: Tensor, policy: str) -> Callable[[], object]:
    amp = MixedPrecision(net, _optimizer(net), policy)

    def step() -> None:
        with amp.autocast():
            loss = net(x).square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    return step


def _processor_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
