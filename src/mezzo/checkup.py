"""What training is like on a device in a format: twenty steps held against FP32, and steps of two widths timed.

Each device and format is the work of a fresh interpreter, which it may kill. Which products work is known before
(``cast/device``); here is what a session makes of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mezzo import optim
from mezzo.cast.device import arithmetic, child, probing
from mezzo.errors import MezzoError, UnsupportedError
from mezzo.files import jsonable
from mezzo.session import MixedPrecision
from mezzo.trace.recording import KernelTeller
from mezzo.trace.table import KernelRecord, flops_by_format, low_share

#: A layer of a small model, and one of a large one.
WIDTHS: Final = (128, 2048)
STEPS: Final = 20
#: The last steps, whose losses are compared.
_COMPARED: Final = 5
#: How far the last losses may be from FP32's, as a share of these: ten times what was measured of right arithmetic.
LOSS_TOLERANCE: Final = 0.03
#: How far the weights may be from FP32's, as a share of the way that these went, in units of the format's relative
#: spacing; right arithmetic comes to 1.
WEIGHTS_TOLERANCE: Final = 5
#: What share of the products' operations must run low: of this network all do. FP32's own losses are perfect, too.
_LOW_ENOUGH: Final = 0.9
_DEPTH, _ROWS, _REPETITIONS = 4, 128, 9
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTraining:
    """Twenty steps under a policy, held against the same ones in FP32.

    Attributes:
        policy: Its text.
        loss: Mean of the last losses.
        fp32_loss: FP32's.
        weights_error: Distance of the weights from FP32's in the end, over the way that FP32's went.
        tolerance: What rounding explains of that.
        low_share: Share of the products' operations that read the format, or were emulated in it.
        is_emulated: Whether any family of products was computed in FP32 from rounded operands.
    """

    policy: str
    loss: float
    fp32_loss: float
    weights_error: float
    tolerance: float
    low_share: float
    is_emulated: bool

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; numbers that are not finite are wrong."""
        wrong = {
            f"only {100 * self.low_share:.2g} % of its products' operations ran low": self.low_share < _LOW_ENOUGH,
            f"its last losses are {self.loss:.4g} in the mean, FP32's {self.fp32_loss:.4g}": not (
                math.isfinite(self.loss) and abs(self.loss - self.fp32_loss) <= LOSS_TOLERANCE * self.fp32_loss
            ),
            f"its weights end {100 * self.weights_error:.2g} % of their way from FP32's; rounding explains "
            f"{100 * self.tolerance:.2g} %": not self.weights_error <= self.tolerance,
        }
        return [f"{self.policy}: {text}" for text, is_so in wrong.items() if is_so]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Time of FP32 over time of the format: the median of pairs, and what 80 % of them lie between."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The result of training in a format on a device.

    Attributes:
        device: As in ``torch.device``, ``cuda:0``.
        dtype: ``float16`` or ``bfloat16``.
        trainings: One under O1, one under O2.
        speeds: By width of the layers; empty where nothing was timed.
        trouble: Why there is no result, in words: the process died, or mezzo refused.
    """

    device: str
    dtype: str
    trainings: tuple[FormatTraining, ...] = ()
    speeds: Mapping[int, Speed] = field(default_factory=dict)
    trouble: str = ""

    @property
    def faults(self) -> list[str]:
        """What is wrong with the numbers of its trainings, in words."""
        return [fault for training in self.trainings for fault in training.faults]

    @property
    def status(self) -> Literal["works", "wrong", "failed"]:
        """``failed``: there are no numbers; ``wrong``: they are not FP32's."""
        return "failed" if self.trouble else "wrong" if self.faults else "works"

    @property
    def verdict(self) -> str:
        """The answer in words: whether it trains as FP32 does, and for which layers it pays."""
        if self.trouble:
            return f"does not train here: {self.trouble}"
        if self.faults:
            return f"trains wrongly here: {self.faults[0]}"
        away = 100 * max(training.weights_error for training in self.trainings)
        words = f"trains as FP32 does (weights within {away:.2g} % of their way)"
        if not self.speeds:
            return words
        pays = [str(width) for width, speed in self.speeds.items() if speed.p10 > 1]
        unclear = [str(width) for width, speed in self.speeds.items() if speed.p10 <= 1 <= speed.p90]
        times = ", ".join(f"{speed.median:.2g}× at width {width}" for width, speed in self.speeds.items())
        only = "" if len(pays) == len(self.speeds) else f" at width {', '.join(pays)} only"
        doubt = f"; unclear at width {', '.join(unclear)}, where steps were now faster, now slower" if unclear else ""
        return f"{words}, and {f'pays{only}' if pays else 'saves no time'}: steps {times} FP32's speed{doubt}"

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        fields: dict[str, Any] = jsonable(asdict(self))
        fields["speeds"] = {str(width): speed for width, speed in fields["speeds"].items()}
        return fields | {"status": self.status, "faults": self.faults}


def checked(device: str, dtype: str, *, timed: bool = True) -> Checkup:
    """Train and time in a format on a device, in a process of its own.

    Args:
        device: ``cpu``, ``cuda:1``.
        dtype: ``float16`` or ``bfloat16``.
        timed: Whether steps of two widths are timed, too.

    Returns:
        The result, also of a process that died.

    **Cost**: some seconds in the child; nothing in this process changes.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, device, dtype, "timed" if timed else ""]
    answer, trouble, _ = probing.answered(command, os.environ, _TIMEOUT_S)
    if answer is None:
        return Checkup(device=device, dtype=dtype, trouble=trouble)
    if "trouble" in answer:
        return Checkup(device=device, dtype=dtype, trouble=answer["trouble"])
    numbers = ("loss", "fp32_loss", "weights_error", "tolerance", "low_share")
    trainings = tuple(
        FormatTraining(**row | {name: float(row[name]) for name in numbers}) for row in answer["trainings"]
    )
    times = {int(width): Speed(**speed) for width, speed in answer["speeds"].items()}
    return Checkup(device=device, dtype=dtype, trainings=trainings, speeds=times)


def main(name: str, dtype: str, timed: str) -> None:
    """Run the child process: train and time, and print one line for the parent."""
    child.die_quietly()
    # Threads that wait for each other on a busy machine hide the arithmetic.
    torch.set_num_threads(1)
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
        arithmetic(getattr(torch, dtype), device.type)  # as a program would: before FP32 uses oneDNN
        fp32 = _trained("O0", device)
        answer = {
            "trainings": [asdict(train(f"{level},dtype={dtype}", device, fp32)) for level in ("O1", "O2")],
            "speeds": {width: asdict(speed) for width, speed in speeds(device, dtype).items()} if timed else {},
        }
    except UnsupportedError as error:
        answer = {"trouble": f"mezzo refuses it: {str(error).splitlines()[0]}"}
    except Exception as error:  # an answer of this format on this device, as a death would be
        text = str(error).partition("\n")[0]
        answer = {"trouble": text if isinstance(error, MezzoError) else f"{type(error).__name__}: {text}"}
    print(child.PREFIX + json.dumps(jsonable(answer), allow_nan=False), flush=True)


# Twenty steps -------------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    """A convolution, attention, linear layers and norms, over images of 8×8."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.LayerNorm(64)
        self.qkv, self.up, self.down, self.head = (nn.Linear(64, n) for n in (192, 64, 64, 16))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) images to (batch, 16) scores."""
        x = self.patches(images).flatten(2).mT  # (batch, 16 tokens, 64)
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.up(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        scores: Tensor = self.head(functional.gelu(self.down(x)).mean(1))
        return scores


@dataclass(frozen=True, slots=True)
class _Run:
    losses: list[float]
    start: Tensor
    end: Tensor
    low_share: float = 1.0
    is_emulated: bool = False

    @property
    def loss(self) -> float:
        return sum(self.losses[-_COMPARED:]) / _COMPARED


def train(policy: str, device: torch.device, fp32: _Run) -> FormatTraining:
    """Train under a policy, and return how its losses and weights differ from FP32's."""
    run = _trained(policy, device)
    way = (fp32.end - fp32.start).norm()
    dtype = getattr(torch, policy.partition("dtype=")[2])
    return FormatTraining(
        policy=policy,
        loss=run.loss,
        fp32_loss=fp32.loss,
        weights_error=float((run.end - fp32.end).norm() / way),
        tolerance=WEIGHTS_TOLERANCE * torch.finfo(dtype).eps,
        low_share=run.low_share,
        is_emulated=run.is_emulated,
    )


def _trained(policy: str, device: torch.device) -> _Run:
    """Train on noisy drawings of ten patterns; SGD, as Adam divides gradients by their size and hides a wrong scale."""
    drawn = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _Net().to(device)
    patterns = torch.rand(10, 1, 8, 8, generator=drawn)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = MixedPrecision(model, optimizer, policy)
    start, losses, kernels = _flat(model), list[float](), list[KernelRecord]()
    for number in range(STEPS):
        labels = torch.randint(10, (64,), generator=drawn)
        noise = torch.randn(64, 1, 8, 8, generator=drawn)
        images, wanted = (patterns[labels] + 0.3 * noise).to(device), labels.to(device)
        while True:
            with KernelTeller(kernels.append) if number == 0 else nullcontext():
                with amp.autocast():
                    loss = functional.cross_entropy(model(images).float(), wanted)
                amp.backward(loss)
            step = amp.step()
            amp.zero_grad()
            # One that overflows is taken again at the next scale: then FP32 has taken the same ones.
            if not step.skipped or step.next_scale == step.scale:
                break
        losses.append(loss.item())
    flops = flops_by_format(kernels)
    share = low_share(flops, [amp.policy.dtype]) if policy != "O0" else 1.0
    run = _Run(losses, start, _flat(model), share, amp.emulated)
    amp.close()
    return run


def _flat(model: nn.Module) -> Tensor:
    """Copy the FP32 weights, as a state dict has them."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in model.state_dict().values()])


# Speed --------------------------------------------------------------------------------------------------------------


def speeds(
    device: torch.device,
    dtype: str,
    *,
    widths: Sequence[int] = WIDTHS,
    repetitions: int = _REPETITIONS,
    clock: Callable[[Callable[[], object]], float] | None = None,
) -> dict[int, Speed]:
    """Return the speed of steps under O1, measured in this process, FP32 and the format in turns.

    Args:
        device: The device.
        dtype: The format.
        widths: Of the layers.
        repetitions: Timed steps of each, after three that warm up.
        clock: Returns how long a call takes; when omitted the processor's seconds on a CPU, so that other programs do
            not make a format look slow.
    """
    speed_of, taken = {}, clock or (lambda step: _seconds(step, device))
    for width in widths:
        x = torch.randn(_ROWS, width, device=device)
        fp32_step, low_step = _step(None, width, x), _step(f"O1,dtype={dtype}", width, x)
        ratios = sorted([taken(fp32_step) / taken(low_step) for _ in range(3 + repetitions)][3:])
        tenth = repetitions // 10
        speed_of[width] = Speed(median=statistics.median(ratios), p10=ratios[tenth], p90=ratios[-1 - tenth])
    return speed_of


def _step(policy: str | None, width: int, x: Tensor) -> Callable[[], object]:
    layers = (layer for _ in range(_DEPTH) for layer in (nn.Linear(width, width), nn.ReLU()))
    net = nn.Sequential(*layers).to(x.device)
    # With torch's fused optimizers a session waits for no device.
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=x.device.type in ("cpu", "cuda"))

    def plain() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if policy is None:
        return plain
    amp = MixedPrecision(net, optimizer, policy)

    def step() -> None:
        with amp.autocast():
            loss = net(x).square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    return step


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
