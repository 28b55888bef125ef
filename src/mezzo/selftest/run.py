"""All trials on all devices, each device in processes of its own, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from operator import itemgetter
from typing import Any, Final

import torch

from mezzo.bench.children import ask, tell
from mezzo.cast.device.kinds import devices, require_device
from mezzo.documents import built
from mezzo.errors import MezzoError, PolicyError, UnsupportedError, nearest, some_of
from mezzo.selftest.task import digits
from mezzo.selftest.trial import COMPARED, Measured, Reference, Trial, measured, reference
from mezzo.tensors import LOW, dtype_name

__all__ = ["DTYPES", "TRIALS", "SelfTest", "TrialResult", "chosen", "faults", "selftest"]

#: The formats that are tried.
DTYPES: Final = tuple(map(dtype_name, LOW))
TRIALS: Final = tuple(
    Trial(level=level, dtype=dtype, optimizer=optimizer)  # type: ignore[arg-type]
    for dtype, level, optimizer in product(DTYPES, ("O1", "O2"), ("torch", "mezzo"))
)
#: How far the last losses may be from FP32's, as a share of these; from three seeds on both kinds of data at most 0.005
#: were measured.
LOSS_TOLERANCE: Final = 0.03
#: How far the first gradient may be from FP32's, over its norm, in units of the format's relative spacing; in the same
#: runs at most 0.7 were measured.
GRADIENT_TOLERANCE: Final = 4
#: What share of the products' operations must run low: of this network all do.
LOW_ENOUGH: Final = 0.9
#: FP32 must at least halve its loss, or there is nothing to compare with.
_LEARNED: Final = 0.5
#: Some twenty seconds on two cores; many times that on a busy machine.
_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What came of a trial on a device.

    Attributes:
        device: As in ``torch.device``, ``cuda:0``.
        trial: What was tried.
        measured: What was measured; ``None`` where it did not come to that.
        trouble: Why not.
        is_unsupported: Whether mezzo has refused it as something that this device cannot do.
    """

    device: str
    trial: Trial
    measured: Measured | None = None
    trouble: str = ""
    is_unsupported: bool = False

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty for what works and for what is unsupported."""
        if self.measured is None:
            return [] if self.is_unsupported else [self.trouble]
        return faults(self.measured)

    @property
    def works(self) -> bool:
        """Whether it was measured, and nothing is wrong."""
        return self.measured is not None and not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, but for numbers that are not finite."""
        return asdict(self) | {"works": self.works, "faults": self.faults}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What all trials came to.

    Attributes:
        data: What was trained on, in words.
        results: One for each device and trial.
    """

    data: str
    results: tuple[TrialResult, ...]

    @property
    def works(self) -> bool:
        """Whether nothing failed; what a device cannot do has not."""
        return not any(result.faults for result in self.results)

    @property
    def is_supported(self) -> bool:
        """Whether anything could be tried at all."""
        return not all(result.is_unsupported for result in self.results)

    @property
    def verdict(self) -> list[str]:
        """The answer in words: one line for the whole, and one for each device and format."""
        whole = "fails here" if not self.works else "works here" if self.is_supported else "is not supported here"
        return [f"mixed precision {whole}", *self._lines()]

    def _lines(self) -> Iterator[str]:
        for device, dtype in dict.fromkeys((result.device, result.trial.dtype) for result in self.results):
            mine = [each for each in self.results if (each.device, each.trial.dtype) == (device, dtype)]
            yield f"{device}: {dtype} {_said(mine)}"

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, but for numbers that are not finite."""
        return {
            "works": self.works,
            "is_supported": self.is_supported,
            "verdict": self.verdict,
            "data": self.data,
            "results": [result.to_dict() for result in self.results],
        }


def selftest(
    device: str | None = None, dtype: str | None = None, *, told: Callable[[TrialResult], None] | None = None
) -> SelfTest:
    """Train a small network in mixed precision on each device, and hold it against FP32.

    In each format, under O1 and O2, with torch's fused AdamW and with mezzo's: the products' kernels are counted by the
    precision that they read, the first gradient and the last losses are compared with those of plain torch in FP32, a
    step with infinite gradients must write nothing and lower the loss scale, and a run must go on from its checkpoint
    bit for bit. All of it happens in child processes, where a format that kills its process is an answer like others.

    Args:
        device: ``cpu``, ``cuda`` for all GPUs, or ``cuda:1``; every device when omitted.
        dtype: ``float16`` or ``bfloat16``; both when omitted.
        told: Is handed each result as it comes.

    Returns:
        The verdict and the evidence.

    Raises:
        PolicyError: No such device type or format.
        UnsupportedError: The device is not here.

    **Cost**: some twenty seconds a device on two cores, and some more where nothing is cached yet: the probe, and
    optimizer kernels to compile. Nothing in this process changes.

    Example:
        >>> from mezzo.selftest import selftest
        >>> selftest("cpu", "float61")
        Traceback (most recent call last):
        mezzo.errors.PolicyError: unknown format 'float61'
          why    did you mean 'float16'? valid: float16, bfloat16
    """
    data, results = "", list[TrialResult]()
    for each, group in groupby(chosen(device, dtype), key=itemgetter(0)):
        data = _on(each, [trial for _, trial in group], results, told or (lambda result: None)) or data
    return SelfTest(data=data, results=tuple(results))


def chosen(device: str | None = None, dtype: str | None = None) -> list[tuple[str, Trial]]:
    """Return what :func:`selftest` would try, on each device in turn.

    Raises:
        PolicyError: No such device type or format.
        UnsupportedError: The device is not here.

    Example:
        >>> {device for device, _ in chosen("cpu")}, len(chosen("cpu", "float16"))
        ({'cpu'}, 4)
    """
    if dtype is not None and dtype not in DTYPES:
        raise PolicyError(f"unknown format {dtype!r}", why=nearest(dtype, DTYPES))
    trials = [trial for trial in TRIALS if dtype in (None, trial.dtype)]
    return list(product(_devices(device), trials))


def _devices(device: str | None) -> list[str]:
    """List the devices that a word means, one by one."""
    kind, _, number = (device or "").partition(":")
    if device is not None:
        require_device(kind)
    here = [name for present in devices() if kind in ("", present) for name in _each(present)]
    if number and device not in here:
        raise UnsupportedError(f"there is no device {device} here", why=f"torch finds {some_of(here)}", write=here[0])
    return here if device in (None, kind) else [str(device)]


def _each(kind: str) -> list[str]:
    return [kind] if kind == "cpu" else [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]


def _on(device: str, trials: Sequence[Trial], results: list[TrialResult], told: Callable[[TrialResult], None]) -> str:
    """Carry trials out on a device, in as many processes as it takes; return what was trained on."""
    left, data = list(trials), ""

    def take(said: Any) -> None:
        nonlocal data
        if "data" in said:
            data = said["data"]
        else:
            keep(built(TrialResult, {"device": device, "trial": asdict(left[0]), **said}))

    def keep(result: TrialResult) -> None:
        left.remove(result.trial)
        results.append(result)
        told(result)

    while left:
        data, before = "", len(left)
        words = [f"{trial.level},{trial.dtype},{trial.optimizer}" for trial in left]
        trouble = ask(
            __name__, [device, *words], take, timeout_s=_TIMEOUT_S, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        )
        # A child that ends before FP32 has trained will do so again; behind a trial that ended one, the next goes on.
        for trial in left[:1] if data and left else list(left):
            keep(
                TrialResult(
                    device=device, trial=trial, trouble=trouble or "the process that tried it said nothing of it"
                )
            )
        assert len(left) < before
    return data


def main(device: str, *words: str) -> None:
    """Be the child process: train in FP32, then carry trials out, and tell of each."""
    where = torch.device(device)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine make minutes of seconds
    if where.type != "cpu":
        torch.accelerator.set_device_index(where.index)
        torch.use_deterministic_algorithms(True, warn_only=True)  # resumed runs are compared bit by bit
    data = digits().to(where)
    fp32 = reference(data)
    _require_learned(fp32)
    tell({"data": data.source})
    for word in words:
        level, dtype, optimizer = word.split(",")
        found, trouble, is_unsupported = None, "", False
        try:
            found = asdict(measured(Trial(level=level, dtype=dtype, optimizer=optimizer), data, fp32))  # type: ignore[arg-type]
        except Exception as error:  # whatever it is, the trials behind this one go on
            trouble = (
                str(error).partition("\n")[0] if isinstance(error, MezzoError) else f"{type(error).__name__}: {error}"
            )
            is_unsupported = isinstance(error, UnsupportedError)
        tell({"measured": found, "trouble": trouble, "is_unsupported": is_unsupported})


def _require_learned(fp32: Reference) -> None:
    last = sum(fp32.losses[-COMPARED:]) / COMPARED
    if not last < _LEARNED * fp32.losses[0]:
        raise SystemExit(f"FP32 itself does not learn here: its loss goes from {fp32.losses[0]:.4g} to {last:.4g}")


# Words --------------------------------------------------------------------------------------------------------------


def faults(found: Measured) -> list[str]:
    """Say what is wrong with what was measured.

    Args:
        found: The measurements; numbers that are not finite are wrong.
    """
    dtype = found.trial.dtype
    spacing = torch.finfo(getattr(torch, dtype)).eps
    next_scale = found.scale if found.backoff is None else found.scale * found.backoff
    wrong = {
        f"only {100 * found.low_share:.2g} % of its products' operations ran in {dtype}": found.low_share < LOW_ENOUGH,
        f"its first gradient is {100 * found.gradient_error:.2g} % of its norm away from FP32's; rounding explains "
        f"{100 * GRADIENT_TOLERANCE * spacing:.2g} %": not found.gradient_error <= GRADIENT_TOLERANCE * spacing,
        f"its last losses are {found.loss:.4g} in the mean, FP32's {found.fp32_loss:.4g}": not (
            math.isfinite(found.loss) and abs(found.loss - found.fp32_loss) <= LOSS_TOLERANCE * found.fp32_loss
        ),
        "a step with infinite gradients was not skipped, or wrote something": not found.skipped,
        f"after an overflow the loss scale went from {found.scale:.6g} to {found.next_scale:.6g}, not to "
        f"{next_scale:.6g}": found.next_scale != next_scale,
        "a run that is resumed from its checkpoint goes on otherwise": found.resumed == "otherwise",
    }
    return [text for text, is_so in wrong.items() if is_so]


def _said(results: Sequence[TrialResult]) -> str:
    """Say of one format on one device whether it works, and how it was computed."""
    failing = [result for result in results if result.faults]
    if failing:
        first = failing[0]
        name = f"{first.trial.level} with {first.trial.optimizer}'s optimizer"
        return f"fails in {len(failing)} of {len(results)} trainings; {name}: {first.faults[0]}"
    refused = next((result for result in results if result.measured is None), None)
    if refused is not None:
        return f"is not supported: {refused.trouble}"
    done = [result.measured for result in results if result.measured is not None]
    is_native = all(each.arithmetic == "native" for each in done)
    how = "natively" if is_native else "emulated in FP32, which saves no time"
    share = 100 * min(each.low_share for each in done)
    away = 100 * max(abs(each.loss / each.fp32_loss - 1) for each in done)
    return f"works, {how}: {share:.3g} % of the products' operations ran low, losses within {away:.2g} % of FP32's"
