"""FP32 values in two halves, and as FP32 tensors for code that knows no halves, such as torch's optimizers.

Before such code runs its tensors are *widened*: value and gradient become FP32. After it they are *stored*: the value
becomes halves again. Either is an element-wise rule like an optimizer's, and runs on the same executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from mezzo.step.executors.choose import update_of
from mezzo.step.passes import Bucket, Verdict
from mezzo.step.storage import READ, SPLIT, Storage
from mezzo.step.update import Scalars, States, UpdateRule
from mezzo.tensors import moved

__all__ = ["STORE", "WIDEN", "WIDEN_ALONE", "Exchange"]


def _no_numbers(hypers: Scalars, step: Tensor) -> dict[str, Tensor]:
    return {}


def _widen(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    return weight, (weight, gradient)


def _widen_alone(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    return weight, (weight,)


def _store(gradient: Tensor, weight: Tensor, states: States, numbers: Scalars) -> tuple[Tensor, States]:
    return gradient, ()


_NOTHING: Final = UpdateRule(
    name="store", options=frozenset(), hypers=(), states=(), numbers_of=_no_numbers, apply=_store
)
#: Writes the value of the halves, and the gradient times the multiplier.
WIDEN: Final = replace(_NOTHING, name="widen", states=("value", "gradient"), apply=_widen)
#: Writes the value of the halves, and reads no gradient.
WIDEN_ALONE: Final = replace(_NOTHING, name="widen_alone", states=("value",), apply=_widen_alone)
#: Writes the halves of what is given as the gradient.
STORE: Final = _NOTHING


class Exchange:
    """FP32 tensors that take turns with the halves of the same values.

    All are plain tensors of one device, the same objects for life. Their memory may change between calls; as long as
    it does not, tables of addresses are kept. What lies in the memory order of its high half goes in one launch for
    each set of dtypes; tensors with gaps, and what lies otherwise, go one by one.

    Args:
        high: The model's tensors, bfloat16 or float16: at least one.
        rest: The int16 halves beside them.
        values: Where their FP32 values go.
        gradients: Where their gradients go in FP32; None where there are none.

    **Cost**: no host sync on a GPU. On the host less than 1 µs a tensor and call; of memory, for each element 14 bytes
    to widen with a low gradient, 8 without one, and 8 to store.

    Example:
        >>> import torch
        >>> from mezzo.step.split import encode
        >>> high, rest = encode(torch.tensor([1.0, 0.1]), torch.bfloat16)
        >>> value, gradient = torch.empty(2), torch.empty(2)
        >>> exchange = Exchange([high], [rest], [value], [gradient])
        >>> exchange.widen([torch.tensor([4.0, 8.0]).half()], torch.tensor(0.25))
        >>> value, gradient
        (tensor([1.0000, 0.1000]), tensor([1., 2.]))
        >>> exchange.store([value.neg_()])
        >>> high, rest
        (tensor([-1.0000, -0.1001], dtype=torch.bfloat16), tensor([     0, -13107], dtype=torch.int16))
    """

    def __init__(
        self,
        high: Sequence[Tensor],
        rest: Sequence[Tensor],
        values: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        device = high[0].device
        step = torch.zeros((), dtype=torch.int64, device=device)  # which no rule here reads

        def bucket(rule: UpdateRule, storage: Storage, states: Sequence[States]) -> Bucket:
            return Bucket(rule=rule, storage=storage, hypers={}, step=step, weights=high, extras=rest, states=states)

        widened = [(value,) for value in values] if gradients is None else [*zip(values, gradients, strict=True)]
        self._high = high
        self._widen = update_of(bucket(WIDEN_ALONE if gradients is None else WIDEN, READ, widened))
        self._store = update_of(bucket(STORE, SPLIT, [()] * len(high)))
        self._verdict = Verdict.of_flags(None, None, device)

    def widen(
        self, given: Sequence[Tensor] | None, multiplier: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Write values and gradients in FP32; halves and the given gradients stay as they are.

        Args:
            given: The gradients, of any floating dtype and layout; None for an exchange without gradients.
            multiplier: 0-d: what to multiply gradients by; None for 1.
            found_inf: 0-d: not zero to write nothing; None to write.
        """
        self._widen(self._high if given is None else given, self._verdict_of(multiplier, found_inf))

    def store(self, values: Sequence[Tensor], found_inf: Tensor | None = None) -> None:
        """Write the halves of FP32 values; what is too large becomes infinite.

        It counts no version of the high halves up: what they are to autograd is known where they are parameters.

        Args:
            values: FP32, in the order and the shapes of the high halves.
            found_inf: 0-d: not zero to write nothing; None to write.
        """
        self._store(values, self._verdict_of(None, found_inf))

    def _verdict_of(self, multiplier: Tensor | None, found_inf: Tensor | None) -> Verdict:
        verdict = self._verdict
        if multiplier is None and found_inf is None:
            return verdict
        device = verdict.found_inf.device
        return replace(
            verdict,
            multiplier=verdict.multiplier if multiplier is None else moved(multiplier, device, torch.float32),
            found_inf=verdict.found_inf if found_inf is None else moved(found_inf, device, torch.bool).reshape(()),
            is_one=multiplier is None,
        )
