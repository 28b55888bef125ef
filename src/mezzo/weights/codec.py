"""Between FP32 values and their halves: for tensors one by one, and for many at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from mezzo.step.executors.choose import update_of
from mezzo.step.gradients import alike
from mezzo.step.storage import READ, SPLIT, Storage, decode, encode_into
from mezzo.step.update import Scalars, States, UpdateRule
from mezzo.step.verdict import Bucket, Verdict

#: From how many elements on kernels of the executors pay for their tables.
_LARGE: Final = 1 << 18
_NAN: Final = float("nan")
#: The device types and dtypes whose kernels were built.
_BUILT: Final[set[tuple[str, torch.dtype]]] = set()
_KIND: Final = attrgetter("device.type", "dtype")


def decoded(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the FP32 values of halves that :func:`store_in` has made, or :func:`mezzo.weights.encode`.

    **Cost**: from 2¹⁸ elements on one launch; below some 5 operations of torch's (BF16). No host sync.
    """
    if not _is_large(hi):
        if hi.dtype == torch.bfloat16:  # of such halves decode() without what guards against others, a fifth of its ops
            return (hi.view(torch.int16).to(torch.int32) << 16).add_(lo).view(torch.float32)
        return decode(hi, lo)
    value = torch.empty_like(hi, dtype=torch.float32)
    Exchange([hi], [lo], [value]).widen()
    return value


def store_in(value: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Store FP32 values in halves that are there; beyond the range of ``hi`` they become infinite. No host sync."""
    if _is_large(hi) and value.stride() == hi.stride():
        Exchange([hi], [lo], [value]).store([value])
    elif hi.dtype == torch.bfloat16:
        bits = torch.where(value == value, value, _NAN).view(torch.int32)
        high = (bits + 0x8000) >> 16
        lo.copy_(bits - (high << 16))
        hi.view(torch.int16).copy_(high)
    else:
        encode_into(value, hi, lo)


def _is_large(hi: Tensor) -> bool:
    """Whether kernels of the executors are to run; builds them where they are new."""
    if not _pays(hi):
        return False
    if _KIND(hi) not in _BUILT:  # it has come from another device or process
        # Kernels are traced, which below torch's dispatcher cannot be done: another thread has a dispatcher's state of
        # its own.
        building = threading.Thread(target=get_ready, args=(hi,))
        building.start()
        building.join()
    return True


def _pays(hi: Tensor) -> bool:
    """Whether a kernel pays for its tables."""
    return type(hi) is Tensor and hi.numel() >= _LARGE and not hi.is_meta


def get_ready(hi: Tensor) -> None:
    """Build the kernels for a high half that is large, where they are new; not to be called below torch's dispatcher.

    torch 2.11 keeps what tracing needs with the first thread that traces, and dies when that has ended.
    """
    if _pays(hi):
        get_all_ready([hi])


def get_all_ready(high: Sequence[Tensor]) -> None:
    """Build the kernels for some high halves, however small, where they are new; see :func:`get_ready`."""
    for device, dtype in alike([*high]):
        if (device.type, dtype) not in _BUILT:
            _build(device, dtype)
            _BUILT.add((device.type, dtype))


def are_ready(high: Sequence[Tensor]) -> bool:
    """Whether the kernels for some high halves are built."""
    return all((device.type, dtype) in _BUILT for device, dtype in alike([*high]))


def _build(device: torch.device, dtype: torch.dtype) -> None:
    value = torch.zeros(8, device=device)
    hi, lo = torch.zeros(8, device=device, dtype=dtype), torch.zeros(8, device=device, dtype=torch.int16)
    exchange = Exchange([hi], [lo], [value])
    exchange.widen()
    exchange.store([value])


# FP32 values in two halves, and as FP32 tensors for code that knows no halves, such as torch's optimizers.
#
# Before such code runs its tensors are *widened*: values become FP32. After it they are *stored*: they become halves
# again. Either is an element-wise rule like an optimizer's, and runs on the same executors.


def _no_numbers(hypers: Scalars, step: Tensor) -> dict[str, Tensor]:
    return {}


def _widen(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    return weight, (weight,)


def _store(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    return gradient, ()


#: Writes the halves of what is given as the gradient.
STORE: Final = UpdateRule(name="store", options=frozenset(), hypers=(), states=(), numbers_of=_no_numbers, apply=_store)
#: Writes the value of the halves, and reads no gradient.
WIDEN: Final = replace(STORE, name="widen", states=("value",), apply=_widen)


class Exchange:
    """FP32 tensors that take turns with the halves of the same values.

    All are plain tensors of one device, the same objects for life. Their memory may change between calls; as long as
    it does not, tables of addresses are kept. What lies in the memory order of its high half goes in one launch for
    each set of dtypes; tensors with gaps, and what lies otherwise, go one by one.

    Args:
        high: bfloat16 or float16: at least one.
        low: The int16 halves beside them.
        values: Where their FP32 values go.

    **Cost**: no host sync on a GPU. On the host less than 1 µs a tensor and call; 8 bytes of memory an element and
    call.

    Example:
        >>> import torch
        >>> from mezzo.step.storage import encode
        >>> high, low = encode(torch.tensor([1.0, 0.1]), torch.bfloat16)
        >>> value = torch.empty(2)
        >>> exchange = Exchange([high], [low], [value])
        >>> exchange.widen()
        >>> value
        tensor([1.0000, 0.1000])
        >>> exchange.store([value.neg_()])
        >>> high, low
        (tensor([-1.0000, -0.1001], dtype=torch.bfloat16), tensor([     0, -13107], dtype=torch.int16))
    """

    def __init__(self, high: Sequence[Tensor], remainders: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        device = high[0].device
        step = torch.zeros((), dtype=torch.int64, device=device)  # which no rule here reads

        def bucket(rule: UpdateRule, storage: Storage, states: Sequence[States]) -> Bucket:
            return Bucket(
                rule=rule,
                storage=storage,
                hypers={},
                step=step,
                weights=high,
                extras=remainders,
                states=states,
                only_move=True,
            )

        self._high = high
        self._widen = update_of(bucket(WIDEN, READ, [(value,) for value in values]))
        self._store = update_of(bucket(STORE, SPLIT, [()] * len(high)))
        self._verdict = Verdict.of_flags(None, None, device)

    def widen(self) -> None:
        """Write the values in FP32; halves stay as they are."""
        self._widen(self._high, self._verdict)

    def store(self, values: Sequence[Tensor]) -> None:
        """Write the halves of FP32 values; what is too large becomes infinite.

        It counts no version of the high halves up: what they are to autograd is known where they are parameters.

        Args:
            values: FP32, in the order and the shapes of the high halves.
        """
        self._store(values, self._verdict)
