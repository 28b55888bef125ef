"""``tune``: assign precision for training, by the error that low precision makes in real gradients and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, nearest, raise_together, shown
from mezzo.formats import by_name
from mezzo.numerics.tuning.selection import Selection
from mezzo.numerics.tuning.shadow import LossFunction, Shadow
from mezzo.numerics.tuning.tuned import Tuned
from mezzo.policy import Policy
from mezzo.policy.spelling import both
from mezzo.tensors import LOW, dtype_name
from mezzo.trace.sandbox import devices_of, require_python, untouched

_DTYPES: Final = tuple(map(dtype_name, LOW))
_REFERENCE: Final = "that is what low precision is compared with"


def tune(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    dtype: str | torch.dtype = "float16",
    optimizer: Callable[[Any], Optimizer] | None = None,
    steps: int = 3,
    policy: Policy | str | None = None,
) -> Tuned:
    """Find the fewest ops that need FP32 in training, and the loss scale, by running the model.

    The search starts with every op low, those too that the op table keeps in FP32. Each policy is run on the same
    batches, weights and random numbers as FP32 training steps, and judged by its gradients: a gradient that is not
    finite, or whose error is more than a tenth of it (signal to noise below 20 dB), is a fault. A loss scale is tried
    first. Where none cures it, the smallest set of ops in modules that does is found by bisection, those first that
    lose most by themselves; an op stays pinned only if that raises the worst gradient by 3 dB or makes it finite. What
    an optimizer makes of the gradients is compared as well, where one is given.

    The model is left as it is; all of this happens on a copy that drops nothing, though its hooks and ``forward`` do
    run. What is found holds for the weights and batches it was found with: tune on weights that have trained a little.

    Args:
        model: The model, FP32, in the mode it trains in, and not prepared yet.
        loss_fn: From the model and a batch to a scalar loss; run inside the policy's region, as in a training step.
        batches: At least one; the first ``steps`` are used, in turn where there are fewer.
        dtype: ``float16`` or ``bfloat16``, by any of their names.
        optimizer: From parameters to an optimizer, which takes the FP32 steps; when omitted, every batch meets the
            weights as they are.
        steps: How many steps each trial takes.
        policy: Level O1 with the rules and fields to keep, in place of ``dtype``; its ops that have no rule start low.

    Returns:
        The policy, level O1 with rules, and the evidence.

    Raises:
        PolicyError: An argument that cannot be used, or a loss that is no scalar.
        UnsupportedError: The model cannot be copied, or the device cannot compute in ``dtype``.
        NumericsError: The model is not finite in FP32, which the error explains; or no rule cures what low precision
            does to it.

    **Cost**: a copy of the model and, for each step, one of its weights and two of its gradients; ``steps`` passes for
    each policy that is tried, and some more backward passes for a loss scale. A healthy model takes one trial, one pin
    about four, k pins among n ops about ``2k·log2(n/k) + 3k``. Where a fault is found, one step's activations are kept.

    Example:
        >>> import torch
        >>> from mezzo.numerics import tune
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> _ = torch.nn.init.normal_(model[0].weight, std=1e5)  # its products pass 65504
        >>> tuned = tune(model, lambda model, batch: model(batch).square().mean(), [torch.randn(32, 8)])
        >>> print(*tuned.policy.rules)
        fp32=linear@0 low=square
    """
    table = _checked(model, loss_fn, optimizer, steps, partial(_of_dtype, dtype, policy))
    with untouched([model]), _full_fp32(devices_of([model])):
        taken = list(islice(_iterated(batches), steps))
        if not taken:
            raise PolicyError(
                "there is no batch to tune on", why="batches is empty", write="tune(model, loss_fn, [batch, …])"
            )
        own = [taken[number % len(taken)] for number in range(steps)]
        return Selection(Shadow(model, loss_fn, own, optimizer), table).tuned()


def _of_dtype(dtype: Any, policy: Policy | str | None) -> Policy:
    if policy is not None:
        return tunable(policy)
    name = dtype
    with suppress(PolicyError):  # which names formats that are not for training as well
        name = by_name(dtype).name
    if name not in _DTYPES:
        why = nearest(str(name), _DTYPES) if name != "float32" else _REFERENCE
        raise PolicyError(f"nothing can be tuned in {shown(name)}", why=why, write='dtype="float16"')
    return Policy.O1(name)


def tunable(given: Policy | str) -> Policy:
    """Return a policy whose rules and fields tuning can keep.

    Raises:
        PolicyError: It is none, of another level than O1, or not low.
    """
    policy = Policy.of(given)
    if policy.level != "O1" or policy.dtype not in LOW:
        why = "trials keep FP32 weights and cast op by op, as level O1 does" if policy.level != "O0" else _REFERENCE
        raise PolicyError(f"nothing can be tuned under {policy}", why=why, write=both("O1,dtype=bfloat16"))
    return policy


def _checked(model: Any, loss_fn: Any, optimizer: Any, steps: Any, table: Callable[[], Policy]) -> Policy:
    anew = "it is made anew for each trial, for parameters of a copy"
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    rows = (
        (isinstance(model, nn.Module), f"a model must be an nn.Module, not {type(model).__name__}", "",
         "tune(model, loss_fn, batches)"),
        (callable(loss_fn), f"loss_fn is a {type(loss_fn).__name__}, no function", "",
         "def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])"),
        (is_count, f"steps must be a positive integer, not {shown(steps)}", "", "steps=3"),
        (optimizer is None or callable(optimizer), f"optimizer= is a {type(optimizer).__name__}, no function", anew,
         "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"),
    )  # fmt: skip
    problems = [PolicyError(what, why=why, write=write) for is_well, what, why, write in rows if not is_well]
    try:
        found = table()
    except PolicyError as error:
        problems.append(error)
    raise_together(problems)
    require_python(model, "tuned")
    return found


def _iterated(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise PolicyError(
            f"batches is {shown(batches)}, nothing to iterate over", write="tune(model, loss_fn, [batch, …])"
        ) from None


@contextmanager
def _full_fp32(devices: Iterable[torch.device]) -> Iterator[None]:
    """Compute FP32 as FP32 inside the block: TF32 has no more bits than float16, and regions around it have ended."""
    own = torch.backends
    kinds = [*(own.cuda.matmul, own.cudnn.conv, own.cudnn.rnn), *(own.mkldnn.matmul, own.mkldnn.conv, own.mkldnn.rnn)]  # type: ignore[attr-defined]
    before = [(each, each.fp32_precision) for each in kinds if each.fp32_precision not in ("none", "ieee")]
    try:
        for each, _ in before:
            each.fp32_precision = "ieee"
        with ExitStack() as stack:
            for kind in dict.fromkeys(device.type for device in devices):
                stack.enter_context(autocast("O0", kind))
            yield
    finally:
        for each, value in before:
            each.fp32_precision = value
