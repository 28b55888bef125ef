"""What an update divides by: optimizers of torch's whose ``eps``, added in FP16, is zero there."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError, some_of

__all__ = ["lost_eps"]

_SMALLEST_NORMAL: Final = torch.finfo(torch.float16).smallest_normal


def lost_eps(optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> Iterator[UnsupportedError]:
    """Yield an error where FP16 weights would become NaN whose gradients are zero: 0 / (0 + eps).

    Whether they would is seen by trying torch's own class: its kernels differ in what they compute in FP32. What is no
    class of torch's cannot be tried, and is not refused; neither is an ``eps`` of 0, which is NaN in every format.

    Args:
        optimizer: The optimizer.
        name_of: Gives a parameter's name.

    **Cost**: nothing for an ``eps`` from 6.1e-5 on. Each way of torch's to step is tried once in a process.
    """
    found, smallest, name = list[str](), 1.0, type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        if not (isinstance(eps, int | float) and 0 < eps < _SMALLEST_NORMAL):
            continue
        low = [param for param in group["params"] if param.dtype == torch.float16 and param.requires_grad]
        if low and (kind := _kind_of(optimizer)) is not None and _is_lost(kind, low[0].device, eps, _switches(group)):
            smallest = min(smallest, eps)
            found.append(f"{name}(…, eps={eps:g}), group {number}: {some_of([name_of(param) for param in low], 2)}")
    if found:
        yield UnsupportedError(
            f"an eps of {smallest:g} is zero in float16, and weights whose gradients are zero become nan",
            where="\n".join(found),
            why=f"torch {torch.__version__} adds it in the weights' dtype, and 0 / (0 + eps) is 0 / 0; "
            "float16 has nothing between 0 and 6e-08",
            write=f"{name}(…, eps=1e-4); or dtype=bfloat16, which holds {smallest:g};\n"
            'or policy="O2", whose updates are FP32, or mezzo.optim, whose always are',
        )


def _switches(group: dict[str, Any]) -> tuple[tuple[str, bool | None], ...]:
    """Return the options of a group that choose between kernels."""
    return tuple((name, value) for name, value in group.items() if value is None or isinstance(value, bool))


def _kind_of(optimizer: Optimizer) -> Any:
    """Return the class of torch's whose step an optimizer takes; ``None`` where it is its own."""
    kinds: Iterator[Any] = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    kind = next(kinds, Optimizer)
    steps_alike = inspect.unwrap(optimizer.__class__.step) is inspect.unwrap(kind.step)
    return kind if kind is not Optimizer and steps_alike else None


@lru_cache
def _is_lost(kind: Any, device: torch.device, eps: float, switches: tuple[tuple[str, bool | None], ...]) -> bool:
    """Whether weights in FP16 do not stay finite over some steps with gradients of zero: RAdam divides from the sixth.

    Args:
        kind: A class of torch's.
        device: Where its kernels run.
        eps: What is added to the divisor.
        switches: The options of a group that choose between kernels; others have their defaults.
    """
    param = nn.Parameter(torch.ones(8, 8, dtype=torch.float16, device=device))
    param.grad = torch.zeros_like(param)
    options = {name: each.default for name, each in inspect.signature(kind).parameters.items() if name != "params"}
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    if issubclass(kind, torch.optim.Adagrad):  # which makes it when it is built
        state[param] = {"step": torch.zeros(()), "sum": torch.zeros_like(param)}
    # As unpickling makes one, and without hooks: those that a program has for all optimizers are not for this one.
    tried = kind.__new__(kind)
    group = {**options, **dict(switches), "eps": eps, "params": [param]}
    tried.__setstate__({"defaults": {}, "state": state, "param_groups": [group]})
    step = inspect.unwrap(kind.step)
    try:
        with torch.no_grad():
            for _ in range(8):
                step(tried)
    except (RuntimeError, AssertionError):
        return False  # such a step is refused by torch itself
    return not bool(param.isfinite().all())
