"""From an origin to the report: what kind of fault it is, which words say so, and what to write to cure it.

Cures are rules, a wider format, a lower loss scale, or other code.
"""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from mezzo.cast.model.places import has_forward
from mezzo.errors import PolicyError, message, printable
from mezzo.files import jsonable
from mezzo.policy import Policy, Rule
from mezzo.policy.fields import FIELDS, level_fields
from mezzo.policy.ops import NORMS, named_for
from mezzo.policy.rules import assignment, exact
from mezzo.scale import LossScale
from mezzo.tensors import dtype_name
from mezzo.trace.function_calls import LOSS, MODEL
from mezzo.trace.measure import Range, Role, numbered, range_of, shape_text

# What a search for the first non-finite tensor finds, as values: the origin, the report of it, changed inputs.

Phase = Literal["forward", "backward"]
Kind = Literal[
    "range", "scale", "zero", "domain", "unbounded", "masked", "written", "input", "parameter", "buffer", "loss"
]  # fmt: skip


#: Kernels that turn -inf into 0, unless a whole row is -inf.
SOFTMAX: Final = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp"})

#: Ops whose results lie in a narrow range however large their arguments are.
BOUNDED: Final = (
    NORMS
    | frozenset(
        """batch_norm native_batch_norm instance_norm normalize cosine_similarity sigmoid logsigmoid tanh erf erfc clamp
    clamp_max clamp_min hardtanh relu6 hardsigmoid softsign atan sin cos sign nan_to_num argmax log log2 log10 log1p
    sqrt""".split()
    )
    | named_for("loss")
)


@dataclass(frozen=True, slots=True)
class Reader:
    """A call that reads an origin's tensor, or what was computed from it and is still out of range."""

    module: str
    op: str
    is_low: bool  # whether its arguments are cast to low precision


@dataclass(slots=True, kw_only=True, eq=False)
class Origin:
    """A tensor that is the first on its path to be non-finite.

    Attributes:
        number: Its place in the order of execution.
        source: ``made`` of finite numbers; ``masked``, made of -inf alone; ``written`` as a constant by the code;
            ``given``, there before the pass.
        may_be_meant: Whether it is an infinity that is often meant, as in an attention mask, and is an origin only if
            it reaches the end.
        phase: ``forward`` or ``backward``.
        module: Path of the module.
        op: The op.
        kernel: The kernel.
        line: The user's line.
        rule: The user's rule that decided the op's precision.
        dtype: Format of the tensor.
        tensor: Its range.
        inputs: What the kernel read.
        needed: The largest magnitude that it should hold; inf or NaN where no format tells another, ``None`` where no
            other format could be tried.
        holds: The format that holds ``needed``.
        role: What it is, where it is a parameter, buffer or input, or a cast of one.
        path: The name of that.
        cast_by: Whose cast overflowed: the ``policy``'s or the ``model``'s own code's; ``None`` for other ops.
        is_low_by_model: Whether the model's own code has cast all that the kernel read of the tensor's format.
        made_nan_by: Where it may be meant: op and line that first made NaN of it.
        readers: The calls that read it while it is as large, in order.
    """

    number: int
    source: Literal["made", "masked", "written", "given"]
    may_be_meant: bool = False
    phase: Phase
    module: str
    op: str
    kernel: str
    line: str | None
    rule: Rule | None = None
    dtype: torch.dtype
    tensor: Range
    inputs: tuple[Range, ...]
    needed: float | None = None
    holds: torch.dtype | None = None
    role: Role | None = None
    path: str = ""
    cast_by: Literal["policy", "model"] | None = None
    is_low_by_model: bool = False
    made_nan_by: str = ""
    readers: list[Reader] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, int]:
        """The order in which origins are blamed: what is often meant comes last."""
        return self.may_be_meant, self.number

    def rename(self, name: str) -> None:
        """Call the tensor by another name."""
        self.tensor = dataclasses.replace(self.tensor, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """The first non-finite tensor of a training step that led on, why it arose, and what to change.

    It prints as an error does, and compares by value.

    Attributes:
        kind: ``range``: a number beyond a format that a wider one holds. ``scale``: a gradient that a lower loss scale
            keeps finite. ``zero``: a division by zero, a logarithm or an infinite derivative at zero. ``domain``: no
            number at all, such as the root of -1. ``unbounded``: beyond float32 too. ``masked``: a softmax over -inf
            alone. ``written``: the code's own ``inf`` or ``nan``. ``input``, ``parameter``, ``buffer``: non-finite
            before the step. ``loss``: made outside the models, between their outputs and the loss.
        module: Path of the module; ``""`` is the model itself, ``(loss)`` what runs outside of it. With several models
            paths begin with the model's number.
        op: Base name of the op; in the backward phase of the op whose gradient it is.
        kernel: Name of the kernel that wrote the tensor.
        phase: ``forward`` or ``backward``.
        tensor: The tensor, what is finite of it.
        inputs: What that kernel read.
        needed: The magnitude that the tensor should have held, where a wider format tells.
        share: ``needed`` as a share of the format's largest number.
        line: ``file:line`` of the user's code that called the op.
        code: That line.
        loss_scale: The scale that the gradients carried.
        cause: Why, in words.
        cure: What to write instead, as text to paste.
    """

    kind: Kind
    module: str
    op: str
    kernel: str
    phase: Phase
    tensor: Range
    inputs: tuple[Range, ...]
    needed: float | None
    share: float | None
    line: str | None
    code: str | None
    loss_scale: float
    cause: str
    cure: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        document: dict[str, Any] = jsonable(dataclasses.asdict(self))
        return document

    def __str__(self) -> str:
        location = " ".join(filter(None, (self.module or MODEL, self.op)))
        tensor = f"{self.tensor.name} ({self.tensor.dtype}, {shape_text(self.tensor.shape)})"
        lines = [
            f"{location}{f' ({self.kernel})' if self.kernel else ''}, {tensor}: {' and '.join(self.tensor.not_finite)}",
            *([f"{self.line}  {self.code or ''}".rstrip()] if self.line else []),
            *(f"reads {read}" for read in self.inputs),
        ]
        what = printable(f"the first non-finite tensor: {self.tensor.name}, in the {self.phase} pass of {location}")
        return message(what, where="\n".join(map(printable, lines)), why=self.cause, write=self.cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Tensors that a replay would need, and that were changed in place since they were used: nothing was located.

    Attributes:
        tensors: What each is: ``input 0 of the model``, with its dtype and shape.
    """

    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return message(
            "the overflow cannot be located: what the step was computed from has changed since",
            where="\n".join(map(printable, self.tensors)),
            why="changed in place after the model had used it, so that a replay would compute another step",
            write="x = x + 1 in place of x += 1, until amp.step(); or mezzo.overflow.locate(fn, model)",
        )


#: More modules than these in FP32 are better served by another format.
_MANY: Final = 3
_CLIPPED: Final = "MixedPrecision(…, max_grad_norm=1.0)"
_FINITE_MASK: Final = 'scores.masked_fill(mask, torch.finfo(scores.dtype).min)   # in place of float("-inf")'
_RELOAD: Final = 'model.load_state_dict(mezzo.load("checkpoint.pt"))   # one from before'

#: Ops, what is wrong where no format would help, the cause, and what to write instead.
_FAULTS: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("div", "zero", "a division by 0", "x / (y + torch.finfo(y.dtype).eps)"),
    ("reciprocal", "zero", "a division by 0", "(x + {eps}).reciprocal()"),
    ("rsqrt", "zero", "a division by the root of 0", "(x + {eps}).rsqrt()"),
    ("sqrt", "zero", "the derivative of a root is infinite at 0", "(x + {eps}).sqrt()"),
    ("pow", "zero", "a negative power of 0, its own or its derivative's", "(x + {eps}).pow(exponent)"),
    ("log log2 log10", "zero", "the logarithm of 0", "x.clamp_min({eps}).{op}()"),
    ("_weight_norm", "zero", "a division by the norm of a row of zeros", "a weight without such a row, at first too"),
    ("", "zero", "a division by 0, or an infinite derivative", "x + {eps}, where it is 0"),
    ("pow", "domain", "a fractional power of a negative number", "x.clamp_min({eps}).pow(exponent)"),
    ("sqrt rsqrt", "domain", "the root of a negative number", "x.clamp_min({eps}).{op}()"),
    ("log log2 log10", "domain", "the logarithm of a negative number", "x.clamp_min({eps}).{op}()"),
    ("acos asin atanh", "domain", "{op} of a number beyond 1", "x.clamp({eps} - 1, 1 - {eps}).{op}()"),
    ("std var", "domain", "{op} of a single number", "x.{op}(correction=0)"),
    ("", "domain", "{op} has no result for these numbers", "arguments that {op} is defined for"),
    ("exp expm1 exp2 sinh cosh", "unbounded", "the result is infinite", "x.clamp(max=80).{op}()"),
    ("", "unbounded", "the result is infinite", f"a lower learning rate, or {_CLIPPED} from the start"),
)
#: Causes and cures by kind and op; "" stands for other ops.
_CURES: Final = {(fault, op): (cause, cure) for ops, fault, cause, cure in _FAULTS for op in ops.split() or [""]}


@dataclass(slots=True)
class Context:
    """The step in which an origin was found.

    Attributes:
        models: The models.
        policy: Their policy, where it is known.
        loss_scale: What the loss was multiplied by.
        autocasts: Whether ops are cast one by one, as far as has been seen.
    """

    models: Sequence[nn.Module]
    policy: Policy | None
    loss_scale: float = 1.0
    autocasts: bool = False

    def __post_init__(self) -> None:
        self.autocasts = self.policy is not None and self.policy.casts


def diagnose(origin: Origin, context: Context, lowered: float | None = None) -> Overflow:
    """Return the report of an origin: its kind, its cause and its cure.

    Args:
        origin: The origin.
        context: The models, the policy and the loss scale.
        lowered: The highest scale below the loss scale with which every gradient is finite, if there is one.
    """
    fault, cause, cure = _judged(origin, context, lowered)
    if origin.made_nan_by and origin.source in ("given", "written"):
        cause += f"; {origin.made_nan_by} makes nan of it"
    return _reported(origin, context, fault, cause, cure)


def _judged(origin: Origin, context: Context, lowered: float | None) -> tuple[Kind, str, str]:
    """Return the kind of fault, the cause and the cure."""
    if origin.source == "made":
        return _made(origin, context, lowered)
    if origin.source == "masked":
        where = f"{origin.op} over a row that holds -inf alone"
        return "masked", f"{where}: where all is masked there is no result", _FINITE_MASK
    if origin.source == "written":
        return "written", "the code itself names inf or nan there, and it reaches the end of the pass", _FINITE_MASK
    name, before = origin.tensor.name, "was not finite before the"
    if origin.role == "parameter":
        cause = f"the parameter {name} {before} pass: an earlier update or load made it so"
        if origin.tensor.dtype == "float16":
            cause += "\nof weights in float16 alone an optimizer computes in it, where Adam's eps of 1e-8 is 0"
        return "parameter", cause, _RELOAD
    if origin.role == "buffer":
        return "buffer", f"the buffer {name} {before} pass: running statistics keep what one bad batch left", _RELOAD
    cure = "x = torch.nan_to_num(x)   # or leave the batch out"
    return "input", f"{name} {before} model saw it: the data, or what prepares it", cure


def _reported(origin: Origin, context: Context, fault: Kind, cause: str, cure: str) -> Overflow:
    """Return the report of an origin with this cause and cure."""
    file, _, number = (origin.line or "").rpartition(":")
    needed = origin.needed if origin.needed is not None and math.isfinite(origin.needed) else None
    same = ("module", "op", "kernel", "phase", "tensor", "inputs", "line")
    return Overflow(
        **{name: getattr(origin, name) for name in same},
        kind=fault,
        needed=needed,
        share=None if needed is None else needed / torch.finfo(origin.dtype).max,
        code=linecache.getline(file, int(number)).strip() or None if file else None,
        loss_scale=context.loss_scale,
        cause=cause,
        cure=cure,
    )


# Made of finite numbers -------------------------------------------------------------------------------


def _made(origin: Origin, context: Context, lowered: float | None) -> tuple[Kind, str, str]:
    if lowered is not None:
        return "scale", _scale_text(origin, context, lowered), _lower_scale(context, lowered)
    if origin.dtype.itemsize < 4 and (origin.needed is None or origin.holds == torch.float32):
        remark, cure = _wider_format(origin, context)
        return "range", f"{_needed_text(origin)}{remark}", cure
    op = origin.op if any(op == origin.op for _, op in _CURES) else origin.kernel.removeprefix("aten::")
    if origin.holds is not None:
        cause = f"{_needed_text(origin)}: it grows without bound, and no format to train in holds it"
        return "unbounded", cause, _words("unbounded", op)[1]
    # Derivatives divide as well: that of a root at 0.
    is_divided = origin.kernel == "aten::div" and origin.inputs[-1].num_zeros > 0
    does_only_divide = ("zero", op) in _CURES and ("domain", op) not in _CURES
    fault: Kind = "domain" if origin.tensor.num_nan else "unbounded"
    if any(read.num_zeros for read in origin.inputs) and (origin.tensor.num_inf or is_divided or does_only_divide):
        fault = "zero"
    cause, cure = _words(fault, op)
    if origin.needed is not None:
        same = "; float64 gives the same of what it read: no precision of this op cures it"
        cause += " in float64 as well" if fault == "unbounded" else same
    return fault, cause + ("" if fault == "domain" else _flushed_text(origin)), cure


def _words(fault: Kind, op: str) -> tuple[str, str]:
    """Return cause and cure where no format helps: those of the op, or else those of the kind."""
    cause, cure = _CURES.get((fault, op)) or _CURES[fault, ""]
    eps = "torch.finfo(x.dtype).eps"
    return cause.format(op=op), cure.format(op=op, eps=eps)


def _needed_text(origin: Origin) -> str:
    limit = torch.finfo(origin.dtype).max
    beyond = f"beyond the largest {dtype_name(origin.dtype)}, {limit:.6g}"
    if origin.needed is None:
        return f"its largest number is {beyond}"
    what = "a number that is cast to it is" if origin.cast_by else "its largest number would be"
    factor = origin.needed / limit
    return f"{what} {origin.needed:.6g}, {beyond}{'' if factor < 1.05 else f', by a factor of {factor:.3g}'}"


def _scale_text(origin: Origin, context: Context, lowered: float) -> str:
    needs = f"{_needed_text(origin)}, " if origin.needed is not None and math.isfinite(origin.needed) else ""
    text = (
        f"{needs}with the loss scale {context.loss_scale:g}; with 2**{int(math.log2(lowered))} every gradient is finite"
    )
    scale = None if context.policy is None else context.policy.loss_scale
    if scale is not None and scale.mode == "dynamic" and scale.floor > lowered:
        text += f"\nthe scale is dynamic, and stops at its floor, {scale.floor:g}"
    elif scale is not None and scale.mode == "dynamic":
        text += "\nwhere the scale is dynamic it backs off to that by itself, one skipped step for each power of two"
    return text


def _flushed_text(origin: Origin) -> str:
    zeroed = next((read for read in origin.inputs if read.num_zeros and read.dtype in ("float16", "bfloat16")), None)
    if zeroed is None:
        return ""
    info = torch.finfo(getattr(torch, zeroed.dtype))
    lost = info.smallest_normal * info.eps / 2
    is_zero = f"{zeroed.name} is {zeroed.dtype}, where a number below {lost:.2g} is 0, be it an epsilon or not"
    return f"\n{is_zero}; in float32 it may be none"


# What no kernel of the models made --------------------------------------------------------------------


def report_outside_models(
    gradient: Tensor, number: int, output: Tensor, line: str | None, context: Context
) -> Overflow:
    """Report a gradient that was non-finite when it arrived at a model's finite output.

    Args:
        gradient: The gradient.
        number: The output's number.
        output: The output.
        line: The user's line that called the model.
        context: The models, the policy and the loss scale.
    """
    range_ = range_of(gradient, f"gradient of output {number}")
    origin = Origin(
        number=0, source="made", phase="backward", module=LOSS, op="", kernel="", line=line, dtype=gradient.dtype,
        tensor=range_, inputs=(range_of(output, f"output {number}"),),
    )  # fmt: skip
    scale = context.loss_scale
    cause = "the models' outputs are finite: it was made after them, in the loss or in what leads to it"
    cure = f"mezzo.overflow.locate(fn, model, loss_scale={scale:g})   # fn: the forward pass and the loss"
    if range_.dtype == "float16" and not range_.num_nan and scale > 1:
        cause += f"\nas inf in float16, most likely by the loss scale {scale:g}, by how much is not known here"
        cure = _lower_scale(context, scale / 2, "or lower")
        if context.policy is not None and context.policy.loss_scale.mode == "constant":
            cure = assignment("loss_scale=dynamic", "it finds the one that fits")
    return _reported(origin, context, "loss", cause, cure)


# Cures ------------------------------------------------------------------------------------------------


def _wider_format(origin: Origin, context: Context) -> tuple[str, str]:
    """Return a cure for a number beyond 16 bits: a remark, and the text to paste.

    An FP32 rule cures only what nothing casts back: where a low-precision op reads the number before another one has
    brought it back into range, that op's module must be FP32 as well; where that spreads, BF16 has the range. Trying
    a rule would tell as much, but a user's function runs once, and in the region that it enters itself.
    """
    policy, low_readers = context.policy, [reader for reader in origin.readers if reader.is_low]
    if origin.cast_by == "model":
        return ", and the model's own code casts it", "x.bfloat16() in place of x.half(), or no cast"
    if policy is not None and policy.dtype != origin.dtype:
        return f", which {policy} does not ask for: the model's own code casts", "x.float() before it"
    if origin.is_low_by_model:
        return "; the model's own code casts what is read", "x.float() before it"
    if origin.phase == "backward":
        return "; other gradients are not finite with a lower loss scale either", _bfloat16(context)
    if _is_scripted(origin.module, context):
        return "; no rule reaches inside TorchScript", _bfloat16(context)
    if origin.role == "parameter" and (path := _as_in_rules(origin.path, context)):
        return "", assignment(f"fp32_param={path}")
    op_rule = assignment(f"fp32={origin.op}")
    is_op_enough = (
        all(reader.op == origin.op for reader in low_readers)
        and len({reader.module for reader in low_readers}) <= _MANY
    )
    if origin.rule is not None and origin.rule.op is not None and is_op_enough:
        return f", under the rule {origin.rule}", op_rule
    if modules := _modules(origin, context):
        return "", assignment(f"fp32_module={'+'.join(modules)}")
    if context.autocasts and is_op_enough and _takes_rule(origin.op):
        return "", op_rule
    names = ", ".join(dict.fromkeys(f"{reader.op} in {reader.module or MODEL}" for reader in low_readers[:_MANY]))
    return f"; FP32 there would not do, since {names} would cast it again" if names else "", _bfloat16(context)


def _is_scripted(path: str, context: Context) -> bool:
    """Whether ``torch.jit`` has compiled a module."""
    named = (model.named_modules(prefix=prefix[:-1]) for prefix, model in numbered(context.models))
    modules = (module for modules_of in named for name, module in modules_of if name == path)
    return isinstance(next(modules, None), torch.jit.ScriptModule)


def _modules(origin: Origin, context: Context) -> list[str]:
    """Return the modules that together keep the number in FP32 until it is back in range; few, or none."""
    # With autocast what is FP32 stays FP32 until an op casts it low. Without, a module's results are cast back, so that
    # one module must hold all that reads the number.
    modules = [origin.module, *(reader.module for reader in origin.readers if reader.is_low or not context.autocasts)]
    if not context.autocasts:
        common = takewhile(lambda parts: len({*parts}) == 1, zip(*(path.split(".") for path in modules), strict=False))
        modules = [".".join(parts[0] for parts in common)]
    paths = [_as_in_rules(path, context) for path in dict.fromkeys(modules)]
    return paths if all(paths) and len(paths) <= _MANY else []


def _as_in_rules(path: str, context: Context) -> str:
    """Return a path as rules write it; empty unless every model has a parameter or a module with ``forward`` there."""
    if len(context.models) > 1:
        path = path.partition(".")[2]
    if path == LOSS:
        return ""
    for model in context.models:
        module = dict(model.named_modules(remove_duplicate=False)).get(path)
        is_called = module is not None and has_forward(module)
        if not is_called and path not in dict(model.named_parameters(remove_duplicate=False)):
            return ""
    return exact(path)


def _takes_rule(op: str) -> bool:
    try:
        return bool(Rule("fp32", op=op).ops)
    except PolicyError:
        return False


def _bfloat16(context: Context) -> str:
    policy = context.policy
    if policy is None:
        return f'policy = mezzo.Policy.parse("{"O1" if context.autocasts else "O2"},dtype=bfloat16")'
    before = level_fields(policy.level, policy.dtype)
    # The format and the loss scale follow from the new one.
    changed = {name: getattr(policy, name) for name in FIELDS if getattr(policy, name) != before[name]}
    changed = {name: value for name, value in changed.items() if value != policy.dtype and name != "loss_scale"}
    other: Policy = getattr(Policy, policy.level)("bfloat16", rules=policy.rules, **changed)
    return f'policy = mezzo.Policy.parse("{other}")'


def highest_scale(
    scale: float, needed: float | None, limit: float, is_finite_at: Callable[[float], bool]
) -> float | None:
    """Return the largest power of two below a loss scale with which a backward pass stays finite.

    Args:
        scale: The scale that is too large.
        needed: The magnitude that did not fit, from which the first guess is made.
        limit: The largest number of its format.
        is_finite_at: Runs the backward pass with another scale.

    Returns:
        The scale; ``None`` where none of 2^40 times less does, so that the scale is not what is wrong.
    """
    high = math.ceil(math.log2(scale))  # the exponent of a scale that is too large
    lowest = high - 41
    if not is_finite_at(2.0**lowest):
        return None
    guess = high - 1
    if needed and math.isfinite(needed):
        guess = math.floor(math.log2(scale * limit / needed))
    while high - lowest > 1:
        middle = guess if lowest < guess < high else (lowest + high) // 2
        if is_finite_at(2.0**middle):
            lowest, guess = middle, middle + 1
        else:
            high, guess = middle, middle - 1
    return 2.0**lowest


def _lower_scale(context: Context, scale: float, remark: str = "") -> str:
    """Return the text that lowers the loss scale, or where a policy has none, the format that needs none."""
    policy = context.policy or Policy.O1()
    before, after = policy.loss_scale, LossScale.constant(scale)
    if before.mode == "dynamic" and scale <= (before.ceiling or math.inf):
        # If one batch needs a scale below the floor, others may need an even lower one.
        floor = before.floor if before.floor <= scale else 2.0**-126
        after = dataclasses.replace(before, init=scale, floor=floor)
    try:
        policy.evolve(loss_scale=after)
    except PolicyError:  # O3 in float16 cannot unscale
        return _bfloat16(context)
    return assignment(f"loss_scale={after}", remark)
