"""From an origin to the report: what kind of fault it is, and which words say so."""

from __future__ import annotations

import linecache
import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from mezzo.overflow.cures import Context, lower_scale, power, wider_format
from mezzo.overflow.origins import Origin
from mezzo.overflow.report import Kind, Overflow
from mezzo.tensors import dtype_name
from mezzo.trace.measure import range_of
from mezzo.trace.where import LOSS

__all__ = ["diagnose", "outside_models"]

_EPS: Final = "torch.finfo(x.dtype).eps"
_FINITE_MASK: Final = 'scores.masked_fill(mask, torch.finfo(scores.dtype).min)   # in place of float("-inf")'
_RELOAD: Final = 'model.load_state_dict(mezzo.load("checkpoint.pt"))   # one from before'

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


def diagnose(origin: Origin, context: Context, lowered: float | None = None) -> Overflow:
    """Say of an origin what it is, why, and what would cure it.

    Args:
        origin: The origin.
        context: What else is known.
        lowered: The highest scale below the loss scale with which every gradient is finite, if there is one.
    """
    kind, cause, cure = _judged(origin, context, lowered)
    if origin.made_nan_by and origin.source in ("given", "written"):
        cause += f"; {origin.made_nan_by} makes nan of it"
    return _overflow(origin, context, kind, cause, cure)


def _judged(origin: Origin, context: Context, lowered: float | None) -> tuple[Kind, str, str]:
    """Return the kind of fault, the cause and the cure."""
    name = origin.tensor.name
    match origin.source, origin.role:
        case "made", _:
            return _made(origin, context, lowered)
        case "masked", _:
            where = f"{origin.op} over a row that holds -inf alone"
            return "masked", f"{where}: where all is masked there is no result", _FINITE_MASK
        case "written", _:
            return "written", "the code itself names inf or nan there, and it reaches the end of the pass", _FINITE_MASK
        case _, "parameter":
            cause = f"the parameter {name} was not finite before the pass: an earlier update or load made it so"
            return "parameter", cause, _RELOAD
        case _, "buffer":
            cause = f"the buffer {name} was not finite before the pass: running statistics keep what one bad batch left"
            return "buffer", cause, _RELOAD
        case _:
            cause = f"{name} was not finite before the model saw it: the data, or what prepares it"
            return "input", cause, "x = torch.nan_to_num(x)   # or leave the batch out"


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


# Made of finite numbers -------------------------------------------------------------------------------


def _made(origin: Origin, context: Context, lowered: float | None) -> tuple[Kind, str, str]:
    if lowered is not None:
        return "scale", _of_scale(origin, context, lowered), lower_scale(context, lowered)
    if origin.dtype.itemsize < 4 and (origin.needed is None or origin.holds == torch.float32):
        remark, cure = wider_format(origin, context)
        return "range", f"{_needs(origin)}{remark}", cure
    op = origin.op if origin.op in _AT_ZERO or origin.op in _OUTSIDE else origin.kernel.removeprefix("aten::")
    if origin.holds is not None:
        cause = f"{_needs(origin)}: it grows without bound, and no format to train in holds it"
        return "unbounded", cause, _bound(op)
    at_any = "; float64 gives the same, so that no precision cures it" if origin.needed is not None else ""
    if any(each.num_zeros for each in origin.inputs) and (origin.tensor.num_inf or op == "div"):
        what, cure = _AT_ZERO.get(op, ("a division by 0, or an infinite derivative", f"x + {_EPS}, where it is 0"))
        return "zero", f"{what}{at_any}{_flushed(origin)}", cure
    if origin.tensor.num_nan:
        what, cure = _OUTSIDE.get(op, (f"{op} has no result for these numbers", f"arguments that {op} is defined for"))
        return "domain", f"{what}{at_any}", cure
    at_any = " in float64 as well" if origin.needed is not None else ""
    return "unbounded", f"the result is infinite{at_any}{_flushed(origin)}", _bound(op)


def _needs(origin: Origin) -> str:
    limit = torch.finfo(origin.dtype).max
    beyond = f"beyond the largest {dtype_name(origin.dtype)}, {limit:.6g}"
    if origin.needed is None:
        return f"its largest number is {beyond}"
    what = "a number that is cast to it is" if origin.cast_by else "its largest number would be"
    factor = origin.needed / limit
    return f"{what} {origin.needed:.6g}, {beyond}{'' if factor < 1.05 else f', by a factor of {factor:.3g}'}"


def _of_scale(origin: Origin, context: Context, lowered: float) -> str:
    needs = f"{_needs(origin)}, " if origin.needed is not None and math.isfinite(origin.needed) else ""
    text = f"{needs}with the loss scale {context.loss_scale:g}; with {power(lowered)} every gradient is finite"
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


# What no kernel of the models made --------------------------------------------------------------------


def outside_models(gradient: Tensor, number: int, output: Tensor, line: str | None, context: Context) -> Overflow:
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
    scale = context.loss_scale
    cause = "the models' outputs are finite: it was made after them, in the loss or in what leads to it"
    cure = f"mezzo.numerics.locate(fn, model, loss_scale={scale:g})   # fn: the forward pass and the loss"
    if range_.dtype == "float16" and not range_.num_nan and scale > 1:
        cause += f"\nas inf in float16, most likely by the loss scale {scale:g}, by how much is not known here"
        cure = f"{lower_scale(context, scale / 2)}   # or lower"
    return _overflow(origin, context, "loss", cause, cure)
