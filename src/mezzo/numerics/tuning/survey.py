"""Which calls a model's steps are made of, and what each of them alone would lose in low precision."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.cast.region import autocast
from mezzo.errors import PolicyError
from mezzo.explanation.low_numbers import LowNumbers
from mezzo.explanation.rows import Finding
from mezzo.numerics.tuning.trial import Outcome, Pass, Shadow, attempted, ratio_text, sqnr
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import OPS, functions
from mezzo.policy.rules import parse_rules
from mezzo.tensors import CASTABLE, dtype_name, mapped, tensors, values_of, versions
from mezzo.trace.function_calls import LOSS, Locator, frame_id
from mezzo.trace.recording import PassRecorder
from mezzo.trace.sandbox import RandomStates
from mezzo.trace.table import CallRecord, WatchedPass

#: An op in a module; the model itself and the loss function are the module "".
Spot = tuple[str, str]

#: An op that keeps less than this of its result, or of its gradients, is suspected.
SUSPECT_DB: Final = 30.0


@dataclass(slots=True, eq=False)
class Call:
    """One call of a torch function in an FP32 pass, of which a rule can speak.

    Attributes:
        spot: The op and the module that called it.
        function: The function.
        given: Its arguments, and those with names.
        versions: Those of the tensors among them, when it was called.
        out: The floating tensors that it returned.
        gradients: The gradients of these in the backward pass, by position.
    """

    spot: Spot
    function: Callable[..., Any]
    given: tuple[Any, dict[str, Any]]
    versions: list[int]
    out: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def await_gradients(self) -> None:
        """Register hooks that keep the gradients of the results."""
        for position, result in enumerate(self.out):
            if result.requires_grad:
                result.register_hook(partial(self._arrived, position))  # type: ignore[no-untyped-call]

    def _arrived(self, position: int, gradient: Tensor | None) -> None:
        if gradient is not None:  # there is none for a result that nothing reads, beside one that something does
            self.gradients[position] = gradient.detach()


def _spot(call: CallRecord) -> Spot | None:
    """Return the op and module by which a rule names a call; ``None`` where no rule can."""
    if call.hidden or call.is_backward or call.is_conversion or not _takes_rule(call.op):
        return None
    return call.op, "" if call.module == LOSS else call.module


def everything_fp32(dtype: torch.dtype) -> Policy:
    """Return the policy under which every op that rules reach runs in FP32, functions made of others opened."""
    composites = (Rule("native", op=name) for name, entry in OPS.items() if entry.parts)
    return Policy.O1(dtype).evolve(rules=(*composites, Rule("fp32", op="*")))


def survey(shadow: Shadow, dtype: torch.dtype, step: int, on_call: Callable[[Call], None]) -> Pass:
    """Run the forward pass of a step in FP32; ``on_call`` gets each call on floating numbers when it returns."""
    policy = everything_fp32(dtype)

    def called(record: CallRecord, function: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        spot, given = _spot(record), (args, dict(kwargs))
        if spot is None or not any(x.numel() for x in _castable(given)):
            return None
        call = Call(spot, function, given, versions([*tensors(given)]))

        def returned(out: Any) -> None:
            call.out = list(_castable(out))
            if call.out:
                on_call(call)

        return returned

    recorder = PassRecorder(policy, called=called)
    with recorder.hooked([shadow.model]):
        return shadow.forward(policy, step, inside=recorder.watching())


def bytes_saved_low(shadow: Shadow, dtype: torch.dtype) -> dict[Spot, int]:
    """Return how many bytes more operands and results take in FP32 than in 16 bits, by op and module, in order."""
    num_bytes: dict[Spot, int] = defaultdict(int)

    def add(call: Call) -> None:
        num_bytes[call.spot] += 2 * sum(x.numel() for x in _castable((call.given, call.out)))  # 2 bytes each

    for step in range(len(shadow.batches)):
        survey(shadow, dtype, step, add)
    return dict(num_bytes)


def named(shadow: Shadow, policy: Policy) -> list[Finding]:
    """Return what ``explain`` would find in the first step's forward pass of numbers that sixteen bits do not hold.

    It need not show in a gradient: a filter bank that does not train, integers that are read off low numbers, the sum
    of many losses. What a loss computes low is left out while it is well above its noise, as a gradient is.

    Args:
        shadow: The FP32 steps.
        policy: The policy of the pass. Where it fails, what ran before is looked at.
    """
    low = LowNumbers(shadow.model, lambda: recorder.recorded)
    recorder = PassRecorder(policy, where=Locator(until=frame_id()), probes=low.probes)
    run = partial(shadow.forward, policy, 0, recorder.watching(), on_batch=partial(recorder.learn, shadow.model))
    with recorder.hooked([shadow.model]):
        attempted(run, again=partial(shadow.forward, policy, 0))
    table = recorder.table()
    findings = low.findings()
    return [
        finding
        for finding in findings
        if finding.kind != "criterion" or _noise_db(table, rules_of(finding)) < SUSPECT_DB
    ]


def rules_of(finding: Finding) -> tuple[Rule, ...]:
    """Return the rules that a finding names, each with what was found."""
    key, _, names = finding.rule.partition("=")
    return parse_rules(key, names, f"named by explain: {finding.text}") if finding.rule else ()


def _noise_db(table: WatchedPass, rules: Sequence[Rule]) -> float:
    """Return the worst signal to noise that was measured at the kernels that rules speak about, in dB."""
    measured = ((kernel, kernel.probes["ratio"]) for kernel in table.kernels if "ratio" in kernel.probes)
    ratios = (
        r.whole
        for kernel, r in measured
        if any(rule.matches(op=kernel.call.op, module=kernel.module) for rule in rules)
    )
    return min(ratios, default=math.inf)


def failing(shadow: Shadow, policy: Policy) -> Spot | None:
    """Return the op at which a forward pass fails in low precision; ``None`` where none does.

    Raises:
        Exception: The pass fails once only, or in two ways: precision is not the cause.
    """
    for step in range(len(shadow.batches)):
        recorder = PassRecorder(policy)
        run = partial(shadow.forward, policy, step, recorder.watching())
        with recorder.hooked([shadow.model]):
            attempted(run, again=partial(shadow.forward, policy, step))
        for call in reversed(recorder.recorded.calls):
            if call.argument_dtypes and not call.has_returned and (spot := _spot(call)) is not None:
                return spot
    return None


# What a call alone loses ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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

    def text(self, dtype: torch.dtype) -> str:
        """Return in words what is lost."""
        name, limit = dtype_name(dtype), torch.finfo(dtype).max
        if self.largest > limit:
            return f"results reach {self.largest:.3g}, beyond {name}'s {limit:.6g}"
        if self.forward_db < SUSPECT_DB:
            return f"results of operands rounded to {name}: {ratio_text(self.forward_db)}"
        if self.backward_db < SUSPECT_DB:
            return f"gradients of operands rounded to {name}: {ratio_text(self.backward_db)}"
        return "what reads its results needs them in FP32"


def worst_of(several: Sequence[Sensitivity]) -> Sensitivity:
    """Return the worst of several sensitivities."""
    return Sensitivity(
        forward_db=min(one.forward_db for one in several),
        backward_db=min(one.backward_db for one in several),
        largest=max(one.largest for one in several),
        feeds=any(one.feeds for one in several),
    )


def sensitivities(shadow: Shadow, base: Policy, start: Outcome) -> dict[Spot, Sensitivity]:
    """Run each call of a step again by itself, with operands rounded to low precision, and compare.

    Args:
        shadow: The FP32 steps.
        base: The policy with every op low.
        start: What the trial of that policy came to; its step is run.

    **Cost**: the step's activations are kept; each call runs twice more, forward and backward.
    """
    calls = list[Call]()

    def keep(call: Call) -> None:
        call.await_gradients()
        calls.append(call)

    survey(shadow, base.dtype, start.step - 1, keep).gradients(1.0)
    low, wide = autocast(base, shadow.devices[0].type), autocast(everything_fp32(base.dtype), shadow.devices[0].type)
    failed = failing(shadow, base) if start.note else None
    random = RandomStates.now(shadow.devices)
    by_spot: dict[Spot, Sensitivity] = defaultdict(Sensitivity)
    makers: dict[int, Spot] = {}  # of results, which live as long as their calls
    feeding = set[Spot]()
    for call in calls:
        ratios = (-math.inf, math.inf) if call.spot == failed else _alone(call, base.dtype, random, low, wide)
        alone = Sensitivity(
            *ratios, max((float(x.abs().amax()) for x in map(values_of, call.out) if x.numel()), default=0.0)
        )
        by_spot[call.spot] = worst_of([by_spot[call.spot], alone])
        if alone.local_db < SUSPECT_DB:
            feeding |= {makers[id(x)] for x in _castable(call.given) if id(x) in makers}
        makers.update((id(result), call.spot) for result in call.out)
    return {spot: replace(sensitivity, feeds=spot in feeding) for spot, sensitivity in by_spot.items()}


def _alone(call: Call, dtype: torch.dtype, random: RandomStates, low: autocast, wide: autocast) -> tuple[float, float]:
    """Return the worst ratio of a call's results, and of its operands' gradients."""
    if versions([*tensors(call.given)]) != call.versions:
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

    args, kwargs = mapped(call.given, operand)
    with region:
        results = list(_castable(call.function(*args, **kwargs)))
    seeds = [(r, call.gradients[p]) for p, r in enumerate(results) if p in call.gradients and r.requires_grad]
    detached = [result.detach() for result in results]
    largest = max((float(gradient.abs().amax()) for _, gradient in seeds if gradient.numel()), default=0.0)
    if not largest or not operands:
        return detached, []
    gradients = torch.autograd.grad(
        [result for result, _ in seeds], operands, [(gradient / largest).to(r.dtype) for r, gradient in seeds],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return detached, [gradient.float() for gradient in gradients]


def _castable(value: Any) -> Iterator[Tensor]:
    return (x for x in tensors(value) if x.dtype in CASTABLE)


@cache
def _takes_rule(op: str) -> bool:
    """Whether a rule about an op reaches anything."""
    try:
        return bool(functions(op)) and bool(Rule("fp32", op=op).ops)
    except PolicyError:
        return False
