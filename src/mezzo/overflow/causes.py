"""From an origin to the report: what kind of fault it is, and which words say so."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from mezzo.overflow import cures
from mezzo.overflow.cures import Context
from mezzo.overflow.origins import Origin
from mezzo.overflow.report import Kind, Overflow
from mezzo.tensors import dtype_name
from mezzo.trace.measure import range_of
from mezzo.trace.trace import LOSS

__all__ = ["arrived", "diagnose", "summed"]

_EPS: Final = "torch.finfo(x.dtype).eps"

#: What is infinite where a number is 0, and what to write instead.
_AT_ZERO: Final[Mapping[str, tuple[str, str]]] = {
    "div": ("a division by 0", "x / (y + torch.finfo(y.dtype).eps)"),
    "reciprocal": ("a division by 0", f"(x + {_EPS}).reciprocal()"),
    "rsqrt": ("a division by the root of 0", f"(x + {_EPS}).rsqrt()"),
    "sqrt": ("the derivative of a root is infinite at 0", f"(x + {_EPS}).sqrt()"),
    "pow": ("a negative power of 0, its own or its derivative's", f"(x + {_EPS}).pow(exponent)"),
    **{name: ("the logarithm of 0", f"x.clamp_min({_EPS}).{name}()") for name in ("log", "log2", "log10")},
}

#: Where an op has no result, and what to write instead.
_OUTSIDE: Final[Mapping[str, tuple[str, str]]] = {
    "pow": ("a fractional power of a negative number", f"x.clamp_min({_EPS}).pow(exponent)"),
    **{name: ("the root of a negative number", f"x.clamp_min({_EPS}).{name}()") for name in ("sqrt", "rsqrt")},
    **{name: ("the logarithm of a negative number", f"x.clamp_min({_EPS}).{name}()") for name in
       ("log", "log2", "log10")},
    **{name: (f"{name} of a number beyond 1", f"x.clamp({_EPS} - 1, 1 - {_EPS}).{name}()") for name in
       ("acos", "asin", "atanh")},
    **{name: (f"{name} of a single number", f"x.{name}(correction=0)") for name in ("std", "var")},
}  # fmt: skip


def diagnose(origin: Origin, context: Context) -> Overflow:
    """Say of an origin what it is, why, and what would cure it."""
    if origin.source == "made":
        return _made(origin, context)
    if origin.source == "masked":
        cause = f"{origin.op} over a row that holds -inf alone: where all is masked there is no result"
        return _overflow(origin, context, "masked", cause, _FINITE_MASK)
    if origin.source == "written":
        spoiled = f"; {origin.spoiled_by} makes nan of it" if origin.spoiled_by else ""
        cause = f"the code itself names inf or nan there, and it reaches the end of the pass{spoiled}"
        return _overflow(origin, context, "written", cause, _FINITE_MASK)
    return _given(origin, context)


_FINITE_MASK: Final = 'scores.masked_fill(mask, torch.finfo(scores.dtype).min)   # in place of float("-inf")'


def _overflow(origin: Origin, context: Context, kind: Kind, cause: str, cure: str) -> Overflow:
    """Make the report of an origin."""
    file, _, number = (origin.line or "").rpartition(":")
    needed = origin.needed if origin.needed is not None and math.isfinite(origin.needed) else None
    return Overflow(
        kind=kind,
        module=origin.module,
        op=origin.op,
        kernel=origin.kernel,
        phase=origin.phase,
        tensor=origin.tensor,
        inputs=origin.inputs,
        needed=needed,
        share=None if needed is None else needed / torch.finfo(origin.dtype).max,
        line=origin.line,
        code=linecache.getline(file, int(number)).strip() or None if file else None,
        loss_scale=context.loss_scale,
        cause=cause,
        cure=cure,
    )


def arrived(gradient: Tensor, number: int, output: Tensor, line: str | None, context: Context) -> Overflow:
    """Report a gradient that was non-finite when it arrived at a model's finite output.

    Args:
        gradient: The gradient.
        number: The output's number.
        output: The output.
        line: The user's line that called the model.
        context: What else is known.
    """
    range_ = range_of(gradient, f"gradient of output {number}")
    origin = Origin(
        number=0, source="made", phase="backward", module=LOSS, op="", kernel="", line=line, dtype=gradient.dtype,
        tensor=range_, inputs=(range_of(output, f"output {number}"),),
    )  # fmt: skip
    cause = "the models' outputs are finite: it was made after them, in the loss or in what leads to it"
    if range_.dtype == "float16" and not range_.num_nan and context.loss_scale > 1:
        lowered = dataclasses.replace(context, lowered=context.loss_scale / 2)
        cause += (
            f"\nas inf in float16, most likely by the loss scale {context.loss_scale:g}, by how much is not known here"
        )
        return _overflow(origin, context, "loss", cause, f"{cures.scale(lowered)}   # or lower")
    cure = f"mezzo.numerics.locate(fn, model, loss_scale={context.loss_scale:g})   # fn: the forward pass and the loss"
    return _overflow(origin, context, "loss", cause, cure)


def summed(name: str, total: Tensor, dtype: torch.dtype, num_passes: int, context: Context) -> Overflow | None:
    """Report a parameter whose gradients are finite one by one, while their sum is not.

    Args:
        name: The parameter's path.
        total: The sum in FP32.
        dtype: The format in which it is accumulated.
        num_passes: How many backward passes there were.
        context: What else is known.
    """
    needed = range_of(total, "").largest
    if needed <= torch.finfo(dtype).max:
        return None
    origin = Origin(
        number=0, source="made", phase="backward", module=name.rpartition(".")[0], op="", kernel="", line=None,
        dtype=dtype, tensor=range_of(total.to(dtype), f"gradient of {name}"), inputs=(), needed=needed,
        holds=total.dtype,
    )  # fmt: skip
    exponent = math.floor(math.log2(context.loss_scale * torch.finfo(dtype).max / needed))
    context = dataclasses.replace(context, lowered=2.0**exponent)
    cause = f"{num_passes} backward passes since the last step add up: {_needs(origin)}"
    return _overflow(origin, context, "accumulation", cause, cures.scale(context))


def _made(origin: Origin, context: Context) -> Overflow:
    if context.lowered is not None:
        return _overflow(origin, context, "scale", _of_scale(origin, context), cures.scale(context))
    if origin.dtype.itemsize < 4 and (origin.needed is None or origin.holds == torch.float32):
        cause, cure = cures.wider(origin, context)
        return _overflow(origin, context, "range", f"{_needs(origin)}{cause}", cure)
    zeros = [each for each in origin.inputs if each.num_zeros]
    op = origin.op if origin.op in _AT_ZERO or origin.op in _OUTSIDE else origin.kernel.removeprefix("aten::")
    if origin.holds is not None:
        cause = f"{_needs(origin)}: it grows without bound, and no format to train in holds it"
        return _overflow(origin, context, "unbounded", cause, _bound(op))
    at_any = "; float64 gives the same, so that no precision cures it" if origin.needed is not None else ""
    if zeros and (origin.tensor.num_inf or op == "div"):
        what, cure = _AT_ZERO.get(op, ("a division by 0, or an infinite derivative", f"x + {_EPS}, where it is 0"))
        return _overflow(origin, context, "zero", f"{what}{at_any}{_flushed(origin)}", cure)
    if origin.tensor.num_nan:
        what, cure = _OUTSIDE.get(op, (f"{op} has no result for these numbers", f"arguments that {op} is defined for"))
        return _overflow(origin, context, "domain", f"{what}{at_any}", cure)
    cause = f"the result is infinite{' in float64 as well' if origin.needed is not None else ''}{_flushed(origin)}"
    return _overflow(origin, context, "unbounded", cause, _bound(op))


def _needs(origin: Origin) -> str:
    limit = torch.finfo(origin.dtype).max
    if origin.needed is None:
        return f"its largest number is beyond the largest {dtype_name(origin.dtype)}, {limit:.6g}"
    factor = origin.needed / limit
    what = "a number that is cast to it is" if origin.cast_by else "its largest number would be"
    text = f"{what} {origin.needed:.6g}, beyond the largest {dtype_name(origin.dtype)}, {limit:.6g}"
    return text if factor < 1.05 else f"{text}, by a factor of {factor:.3g}"


def _of_scale(origin: Origin, context: Context) -> str:
    assert context.lowered is not None
    needs = f"{_needs(origin)}, " if origin.needed is not None and math.isfinite(origin.needed) else ""
    lowered = cures.power(context.lowered)
    text = f"{needs}with the loss scale {context.loss_scale:g}; with {lowered} every gradient is finite"
    if context.policy is not None and context.policy.loss_scale.mode == "dynamic":
        text += "\nwhere the scale is dynamic it backs off to that by itself, one skipped step for each power of two"
    return text


def _bound(op: str) -> str:
    if op in ("exp", "expm1", "exp2", "sinh", "cosh"):
        return f"x.clamp(max=80).{op}()"
    return "a lower learning rate, or MixedPrecision(…, max_grad_norm=1.0) from the start"


def _flushed(origin: Origin) -> str:
    low = next((each for each in origin.inputs if each.num_zeros and each.dtype in ("float16", "bfloat16")), None)
    if low is None:
        return ""
    info = torch.finfo(getattr(torch, low.dtype))
    lost = info.smallest_normal * info.eps / 2
    return f"\n{low.name} is {low.dtype}, where a number below {lost:.2g} is 0, be it an epsilon or not"


def _given(origin: Origin, context: Context) -> Overflow:
    name = origin.tensor.name
    match origin.role:
        case "parameter":
            cause = f"the parameter {name} was not finite before the pass: an earlier update or load made it so"
            cure = 'model.load_state_dict(mezzo.load("checkpoint.pt"))   # one from before'
        case "buffer":
            cause = f"the buffer {name} was not finite before the pass: running statistics keep what one bad batch left"
            cure = 'model.load_state_dict(mezzo.load("checkpoint.pt"))   # one from before'
        case _:
            cause = f"{name} was not finite before the model saw it: the data, or what prepares it"
            cure = "x = torch.nan_to_num(x)   # or leave the batch out"
    if origin.spoiled_by:
        cause += f"; {origin.spoiled_by} makes nan of it"
    return _overflow(origin, context, origin.role or "input", cause, cure)
