"""Which calls a model's steps are made of, and what each of them alone would lose in low precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.cast.region import autocast
from mezzo.errors import PolicyError
from mezzo.explanation.low_numbers import LowNumbers
from mezzo.numerics.tuning.trial import Outcome, Shadow, attempted, sqnr
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import OPS, functions
from mezzo.policy.rules import parse_rules
from mezzo.tensors import CASTABLE, mapped, tensors, values_of, versions
from mezzo.trace.function_calls import LOSS, Where, here
from mezzo.trace.recording import PassRecorder
from mezzo.trace.sandbox import RandomStates
from mezzo.trace.table import CallRecord

#: An op in a module; the model itself and the loss function are the module "".
Spot = tuple[str, str]

#: An op that keeps less than this of its result, or of its gradients, is suspected.
SUSPECT_DB: Final = 30.0


@dataclass(slots=True, eq=False)
class Call:
    """One call of a torch function in an FP32 pass.

    Attributes:
        spot: The op and the module that called it; ``None`` where no rule can be about it.
        numbers: How many floating numbers it reads, and how many it returns.
        function: The function, with its arguments and result, where they are kept.
        versions: Of the tensors among the arguments, when it was called.
        gradients: What arrived at its results in the backward pass, by their position.
    """

    spot: Spot | None
    numbers: tuple[int, int]
    function: Callable[..., Any] | None = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    out: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def keep(self, function: Any, args: Any, kwargs: Any) -> None:
        """Keep what is called, before it is."""
        self.function, self.args, self.kwargs = function, args, dict(kwargs)
        self.versions = versions([*tensors((args, kwargs))])

    def returned(self, results: list[Tensor]) -> None:
        """Keep what was returned, and the gradients that will arrive there."""
        self.out = results
        for position, result in enumerate(results):
            if result.requires_grad:
                result.register_hook(partial(self.arrived, position))  # type: ignore[no-untyped-call]

    def arrived(self, position: int, gradient: Tensor | None) -> None:
        """Take note of a gradient; there is none for a result that nothing reads, beside one that something does."""
        if gradient is not None:
            self.gradients[position] = gradient.detach()


def _spot(call: CallRecord) -> Spot | None:
    """Return what a rule about a call names."""
    if call.hidden or call.is_backward or call.is_conversion or not _takes_rule(call.op):
        return None
    return call.op, "" if call.module == LOSS else call.module


def everything_fp32(dtype: torch.dtype) -> Policy:
    """Return the policy under which every op that rules reach runs in FP32, functions made of others opened."""
    composites = (Rule("native", op=name) for name, entry in OPS.items() if entry.parts)
    return Policy.O1(dtype).evolve(rules=(*composites, Rule("fp32", op="*")))


def survey(shadow: Shadow, dtype: torch.dtype, step: int, *, keeps: bool = False) -> list[Call]:
    """List the calls of a step that handle floating numbers, in their order.

    Args:
        shadow: The FP32 steps.
        dtype: The low dtype.
        step: Which of them.
        keeps: Whether arguments, results and gradients are kept with them.
    """
    policy, calls = everything_fp32(dtype), list[Call]()

    def called(record: CallRecord, function: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        num_read = sum(x.numel() for x in _castable((args, kwargs)))
        if not num_read or record.hidden or record.is_backward:
            return None
        call = Call(_spot(record), (num_read, 0))
        if keeps:
            call.keep(function, args, kwargs)

        def returned(out: Any) -> None:
            if results := list(_castable(out)):
                call.numbers = num_read, sum(x.numel() for x in results)
                calls.append(call)
                if keeps:
                    call.returned(results)

        return returned

    recorder = PassRecorder(policy, called=called)
    with recorder.hooked([shadow.model]):
        run = shadow.forward(policy, step, inside=recorder.watching())
        if keeps:
            run.gradients(1.0)
    return calls


def named(shadow: Shadow, policy: Policy) -> list[Rule]:
    """Return the rules that ``explain`` would name for the first step's forward pass, each with what was found.

    What sixteen bits do not hold need not show in a gradient: a filter bank that does not train, integers that are read
    off low numbers, the sum of many losses.

    Args:
        shadow: The FP32 steps.
        policy: The policy of the pass. Where it fails, what ran before is looked at.
    """
    low = LowNumbers(shadow.model, lambda: recorder.recorded)
    recorder = PassRecorder(policy, where=Where(until=here()), probes=low.probes)
    run = partial(shadow.forward, policy, 0, recorder.watching(), given=partial(recorder.learn, shadow.model))
    with recorder.hooked([shadow.model]):
        attempted(run, again=partial(shadow.forward, policy, 0))
    recorder.table()
    rules = list[Rule]()
    for finding in low.findings():
        if finding.rule and finding.kind != "criterion":  # what a loss is off by, gradients show
            key, _, names = finding.rule.partition("=")
            rules += parse_rules(key, names, f"named by explain: {finding.text}")
    return list(dict.fromkeys(rules))


def failing(shadow: Shadow, policy: Policy, step: int) -> Spot | None:
    """Return the op at which the forward pass of a step fails in low precision; ``None`` where none does.

    Raises:
        Exception: It fails once, or in two ways: that is no matter of precision.
    """
    recorder = PassRecorder(policy)
    with recorder.hooked([shadow.model]):
        run = partial(shadow.forward, policy, step, recorder.watching())
        if not isinstance(attempted(run, again=partial(shadow.forward, policy, step)), Exception):
            return None
    failed = (call for call in reversed(recorder.recorded.calls) if call.given and not call.has_returned)
    return next((spot for call in failed if (spot := _spot(call)) is not None), None)


# What a call alone loses ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What the calls of an op in a module would lose, each by itself, in low precision.

    Attributes:
        forward_db: Signal to noise of the worst result, from FP32 operands rounded to the low dtype, in dB; −inf where
            it is not finite, or the call fails.
        backward_db: The same of the operands' gradients.
        largest: The largest magnitude that they return in FP32.
        feeds: Whether an op that is suspected reads what they return, and needs it in FP32 perhaps.
    """

    forward_db: float = math.inf
    backward_db: float = math.inf
    largest: float = 0.0
    feeds: bool = False

    @property
    def local_db(self) -> float:
        """The worse of both."""
        return min(self.forward_db, self.backward_db)


def sensitivities(shadow: Shadow, base: Policy, start: Outcome) -> dict[Spot, Sensitivity]:
    """Run each call of a step again by itself, with operands rounded to low precision, and compare.

    Args:
        shadow: The FP32 steps.
        base: The policy with every op low.
        start: What the trial of that policy came to; its step is run.

    **Cost**: the step's activations are kept; each call runs twice more, forward and backward.
    """
    calls = survey(shadow, base.dtype, start.step - 1, keeps=True)
    low, wide = autocast(base, shadow.devices[0].type), autocast(everything_fp32(base.dtype), shadow.devices[0].type)
    failed = failing(shadow, base, start.step - 1) if start.note else None
    random = RandomStates.now(shadow.devices)
    found: dict[Spot, Sensitivity] = {}
    makers: dict[int, Spot] = {}  # of results, which live as long as their calls
    feeding = set[Spot]()
    for call in calls:
        if call.spot is not None:
            before = found.setdefault(call.spot, Sensitivity())
            is_failed = call.spot == failed
            forward, backward = (-math.inf, math.inf) if is_failed else _alone(call, base.dtype, random, low, wide)
            found[call.spot] = Sensitivity(
                forward_db=min(before.forward_db, forward),
                backward_db=min(before.backward_db, backward),
                largest=max([before.largest, *(float(x.abs().amax()) for x in map(values_of, call.out) if x.numel())]),
            )
            if min(forward, backward) < SUSPECT_DB:
                feeding |= {makers[id(x)] for x in _castable((call.args, call.kwargs)) if id(x) in makers}
            makers.update((id(result), call.spot) for result in call.out)
    return {spot: replace(each, feeds=spot in feeding) for spot, each in found.items()}


def _alone(call: Call, dtype: torch.dtype, random: RandomStates, low: autocast, wide: autocast) -> tuple[float, float]:
    """Return the worst ratio of a call's results, and of its operands' gradients."""
    if versions([*tensors((call.args, call.kwargs))]) != call.versions:
        return math.inf, math.inf  # written to since: what it was given is gone
    replayed = []
    for region, to in ((wide, torch.float32), (low, dtype)):
        random.restore()
        try:
            replayed.append(_replayed(call, region, to))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # no such kernel, or a constant beyond the format
            return -math.inf, math.inf
    (wide_results, wide_gradients), (results, gradients) = replayed
    return _least(wide_results, results), _least(wide_gradients, gradients)


def _least(references: list[Tensor], values: list[Tensor]) -> float:
    pairs = ((values_of(one), values_of(other)) for one, other in zip(references, values, strict=True))
    ratios = [sqnr(reference, value.float()) for reference, value in pairs if reference.shape == value.shape]
    return min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.inf)


def _replayed(call: Call, region: autocast, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Run a call on operands of a dtype, and return its results and its operands' gradients.

    The gradients that arrive are scaled to a largest of 1: how large all of them are is the loss scale's business.
    """
    operands: list[Tensor] = []

    def operand(value: Tensor) -> Tensor:
        if value.dtype not in CASTABLE:
            return value
        own = value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)
        if value.requires_grad:
            operands.append(own)
        return own

    args, kwargs = mapped((call.args, call.kwargs), operand)
    assert call.function is not None
    with region:
        results = list(_castable(call.function(*args, **kwargs)))
    seeds = [(r, call.gradients[p]) for p, r in enumerate(results) if p in call.gradients and r.requires_grad]
    found = [result.detach() for result in results]
    largest = max((float(gradient.abs().amax()) for _, gradient in seeds if gradient.numel()), default=0.0)
    if not largest or not operands:
        return found, []
    gradients = torch.autograd.grad(
        [result for result, _ in seeds], operands, [(gradient / largest).to(r.dtype) for r, gradient in seeds],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return found, [gradient.float() for gradient in gradients]


def _castable(value: Any) -> Iterator[Tensor]:
    return (x for x in tensors(value) if x.dtype in CASTABLE)


@cache
def _takes_rule(op: str) -> bool:
    """Whether a rule about an op reaches anything."""
    try:
        return bool(functions(op)) and bool(Rule("fp32", op=op).ops)
    except PolicyError:
        return False
