"""``tune``: assign precision for training, by the error that low precision makes in real gradients and steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.cast.region import autocast
from mezzo.errors import NumericsError, PolicyError, UnsupportedError, nearest, raise_together, shown
from mezzo.explanation.rows import Finding, counted, folded
from mezzo.formats import by_name
from mezzo.numerics.footprint import SavedBytes
from mezzo.numerics.tuning.survey import (
    SUSPECT_DB,
    Sensitivity,
    Spot,
    bytes_saved_low,
    failing,
    named,
    rules_of,
    sensitivities,
    worst_of,
)
from mezzo.numerics.tuning.trial import (
    DEFAULT_SCALE,
    FAULT_DB,
    LossFunction,
    Outcome,
    Shadow,
    Trials,
    attempted,
    ratio_text,
)
from mezzo.numerics.tuning.tuned import Candidate, Tuned, TuningEvidence
from mezzo.policy import Policy, Rule, Treatment
from mezzo.policy.rules import both, exact
from mezzo.scale import LossScale
from mezzo.tensors import LOW, dtype_name
from mezzo.trace.sandbox import devices_of, require_python, untouched

# From trials to a policy: what needs FP32, the rules that say so, with which loss scale, and what that costs.


def all_low(table: Policy, spots: Iterable[Spot], without: Collection[str] = ()) -> Policy:
    """Return a policy with every op low that it would keep in FP32 or refuse by the op table alone, of those that run.

    Args:
        table: Level O1, and rules that are kept.
        spots: The ops that run.
        without: Ops that have no low kernel here.
    """
    rules = []
    for op in dict.fromkeys(op for op, _ in spots):
        decision = table.explain(op)
        if decision.rule is None and decision.treatment in ("fp32", "ban"):
            if op not in without:
                rules.append(Rule("low", op=op))
            elif decision.treatment == "ban":
                rules.append(Rule("fp32", op=op, reason="it has no low kernel here"))
    return table.evolve(rules=(*table.rules, *rules))


def before(base: Policy, rules: Iterable[Rule]) -> Policy:
    """Return a policy with rules before its own; those of its own that can never win again are dropped."""
    first = tuple(rules)
    selectors = {rule.selector for rule in first}
    return base.evolve(rules=(*first, *(rule for rule in base.rules if rule.selector not in selectors)))


def pins(base: Policy, spots: Collection[Spot], running: Collection[Spot]) -> tuple[Rule, ...]:
    """Return the rules that put exactly some of the spots that run into FP32.

    A rule on a module is one on all modules inside it too, and one without a module is one on all: where other spots of
    the op run there, rules before it give them back what they have.

    Args:
        base: The policy that they are put in front of.
        spots: What is pinned.
        running: All that runs.
    """
    modules: dict[str, set[str]] = defaultdict(set)
    for op, module in running:
        modules[op].add(module)
    wanted = {op: {module for name, module in spots if name == op} for op in dict.fromkeys(op for op, _ in spots)}
    return tuple(rule for op, chosen in wanted.items() for rule in _of_op(base, op, chosen, modules[op]))


def _of_op(base: Policy, op: str, chosen: set[str], running: set[str]) -> list[Rule]:
    for rules in sorted((_by_globs(op, chosen), [Rule("fp32", op=op)]), key=len):
        if {path for path in running if any(rule.matches(op=op, module=path or None) for rule in rules)} == chosen:
            return rules
    nested: list[Rule] = []
    # From the outermost in: each rule differs from what those around it say, and stands before them.
    for module in sorted(sorted(running, reverse=True), key=lambda path: path.count(".") if path else -1):
        default = base.explain(op, module or None).treatment
        outer_treatments = (rule.treatment for rule in nested if rule.module is None or rule.matches_module(module))
        outer_treatment = next(outer_treatments, default)
        treatment: Treatment = "fp32" if module in chosen else default
        if treatment != outer_treatment:
            nested.insert(0, Rule(treatment, op=op, module=exact(module) or None))
    return nested


def _by_globs(op: str, chosen: set[str]) -> list[Rule]:
    """Return rules with one glob for alike modules, which may match other modules as well."""
    globs: dict[str, list[str]] = defaultdict(list)
    for module in sorted(chosen - {""}):
        globs[".".join("*" if part.isdigit() else exact(part) for part in module.split("."))].append(module)
    shortest = (
        glob if len(paths) > 1 and glob.strip("*.") else exact(path) for glob, paths in globs.items() for path in paths
    )
    return [Rule("fp32", op=op, module=path) for path in dict.fromkeys(shortest)]


#: What a pin must add to the worst gradient's signal-to-noise ratio, in dB.
_WORTH_DB: Final = 3.0
#: So many of the most suspected are tried alone.
_FIRST: Final = 8
Groups = Sequence[Sequence[Spot]]
T = TypeVar("T")  # Python 3.11 has no `def f[T]`


def smallest(items: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of the items that passes, none of which can be left out; of several such the most preferred.

    Halves are left out first, and then ever smaller segments.

    Args:
        items: All of them, the preferred ones first. Together they pass, and none of them does not.
        passes: Whether a part passes; a part that holds one that passes is taken to pass as well.

    Returns:
        The part, in the order of the items. **Cost**: about ``2k·log2(n/k) + 2k`` tests for k of n items.

    Example:
        >>> smallest(range(100), lambda part: {7, 70} <= {*part})
        [7, 70]

    References:
        Junker, *QuickXplain: Preferred Explanations and Relaxations for Over-Constrained Problems*, AAAI 2004.
    """

    def needed(background: list[T], has_grown: bool, items: list[T]) -> list[T]:
        """Return the items that are needed beside those of ``background``, which may have grown since it was tested."""
        if has_grown and passes(background):
            return []
        if len(items) == 1:
            return items
        first, second = items[: len(items) // 2], items[len(items) // 2 :]
        of_second = needed(background + first, True, second)
        return needed(background + of_second, bool(of_second), first) + of_second

    return needed([], False, list(items))


def flat(groups: Groups) -> list[Spot]:
    """Return the spots of some groups, in order."""
    return [spot for group in groups for spot in group]


class Selection:
    """The search for a policy.

    Args:
        shadow: The FP32 steps.
        table: The level and the rules to keep, in the low dtype.
    """

    def __init__(self, shadow: Shadow, table: Policy) -> None:
        self.shadow, self.table, self.trials = shadow, table, Trials(shadow)
        self.dtype = dtype_name(table.dtype)
        self._bytes = bytes_saved_low(shadow, table.dtype)
        self._kinds = {
            path: (type(module), tuple((name, param.shape) for name, param in module.named_parameters()))
            for path, module in shadow.model.named_modules()
        }
        self._alone: dict[Spot, Sensitivity] = defaultdict(Sensitivity)
        self.low, self.no_kernel = self._all_low()
        self.base, self._named, self._uncured = self._with_named()
        self.start = self.trials.outcome(self.base)

    def _all_low(self) -> tuple[Policy, list[str]]:
        """Return a policy with every op low that has a low kernel here, and the ops that have none."""
        missing: list[str] = []
        while True:
            low = all_low(self.table, self._bytes, missing)
            try:
                self.trials.outcome(low)
                return low, sorted(missing)
            except UnsupportedError:
                spot = failing(self.shadow, low)
                if spot is None or Rule("low", op=spot[0]) not in low.rules[len(self.table.rules) :]:
                    raise  # no op that starts low is at fault
                missing.append(spot[0])

    def _with_named(self) -> tuple[Policy, dict[Spot, Rule], list[Finding]]:
        """Pin the ops that ``explain`` names, behind the user's rules, until it names none that a rule cures.

        Returns:
            The policy; which rule pins which op; and what ``explain`` still finds under it.
        """
        findings: dict[Rule, Finding] = {}
        while True:
            base, _ = self._behind(findings)
            left = named(self.shadow, base)
            new = {pin: finding for finding in left for rule in rules_of(finding) for pin in self._exactly(rule, base)}
            if new.keys() <= findings.keys():
                break
            findings = new | findings
        # A finding that is still there was not cured by the rules that it named.
        remaining = {(finding.kind, finding.where) for finding in left}
        cures = {rule: finding for rule, finding in findings.items() if (finding.kind, finding.where) not in remaining}
        return *self._behind(cures), left

    def _exactly(self, rule: Rule, base: Policy) -> Iterable[Rule]:
        """Return rules that mean, of an op that the model itself or the loss calls, these calls alone."""
        spot = (*rule.ops, "")[0], ""
        if rule.module is not None or spot not in self._bytes:
            return [rule]
        return (replace(pin, reason=rule.reason) for pin in pins(base, [spot], self._bytes))

    def _behind(self, rules: Iterable[Rule]) -> tuple[Policy, dict[Spot, Rule]]:
        """Return the user's policy with rules behind its own and every other op low, and which rule pins which op."""
        users = {rule.selector for rule in self.table.rules}
        added_rules = [rule for rule in rules if rule.selector not in users]
        policy, pinned = self.table.evolve(rules=(*self.table.rules, *added_rules)), dict[Spot, Rule]()
        for op, module in self._bytes:
            decided = policy.explain(op, module or None)
            if decided.rule in added_rules and decided.treatment == "fp32":
                pinned[op, module] = decided.rule
        return all_low(policy, (spot for spot in self._bytes if spot not in pinned), self.no_kernel), pinned

    def tuned(self) -> Tuned:
        """Return the policy with the fewest pins, each with its reason, and the evidence."""
        pinned: list[list[Spot]] = []
        if self.start.is_fault:
            self._alone |= sensitivities(self.shadow, self.base, self.start)
            pinned = self._pinned_groups()
        plain = self._pinning(pinned)
        result = self.trials.outcome(plain)
        candidates = [self._candidate(group, result, self._without(pinned, group)) for group in pinned]
        for rule in dict.fromkeys(self._named.values()):
            for group in self._groups(spot for spot, own in self._named.items() if own == rule):
                candidates.append(self._candidate(group, result, self.trials.outcome(self.low), rule.reason))
        chosen = set(flat(pinned))
        rest = self._groups(spot for spot in self._open if spot not in chosen)
        candidates += [self._candidate(group, result) for group in rest]
        rules = (replace(rule, reason=self._why(rule, pinned, candidates, result)) for rule in plain.rules)
        policy = self._with_scale(plain.evolve(rules=tuple(rules)), result)
        left = named(self.shadow, plain) if self._uncured and pinned else self._uncured
        return Tuned(policy=policy, evidence=self._evidence(policy, result, candidates, left))

    # What to pin ------------------------------------------------------------------------------------------

    @property
    def _open(self) -> list[Spot]:
        """What is searched: all that runs but for what is pinned from the start."""
        return [spot for spot in self._bytes if spot not in self._named]

    def _pinning(self, groups: Groups) -> Policy:
        return before(self.base, pins(self.base, flat(groups), self._bytes))

    def _without(self, groups: Groups, group: list[Spot]) -> Outcome:
        return self.trials.outcome(self._pinning([other for other in groups if other is not group]))

    def _pinned_groups(self) -> list[list[Spot]]:
        """Return the ops to pin, grouped by alike modules; none where no pin adds enough.

        First the fewest groups are searched with which no gradient is a fault, then the fewest ops of these groups.
        As long as the group that adds least adds too little, it is dropped.
        """
        target = max(FAULT_DB, self.start.sqnr_db + _WORTH_DB)

        def passes(groups: Groups) -> bool:
            outcome = self.trials.outcome(self._pinning(groups))
            return not outcome.is_fault and outcome.sqnr_db >= target

        groups = self._groups(self._open)
        if not passes(groups):
            why = "the error is there with every op in FP32 that a rule reaches: what makes it is no op of torch's"
            if self.table.rules:
                why += f", or a rule that is kept: {' '.join(map(str, self.table.rules))}"
            raise NumericsError(
                f"no rule brings the gradients of {self.dtype} near those of FP32",
                where=str(self.trials.outcome(self._pinning(groups))),
                why=why,
                write=f"{both('O0')}; or @mezzo.fp32 on the function that casts by itself",
            )
        # A smallest part of many groups need not have the fewest groups: one alone may pass where two do not.
        suspects = [group for group in groups[:_FIRST] if self._rank(group[0])[0] < 2]
        few = next(([group] for group in suspects if passes([group])), None) or smallest(groups, passes)
        spots = sorted(flat(few), key=self._rank)
        if len(spots) > len(few):
            spots = smallest(spots, lambda part: passes([part]))
        groups = self._groups(spots)
        while groups:
            with_all = self.trials.outcome(self._pinning(groups))
            gains = [with_all.gain(self._without(groups, group)) for group in groups]
            least = min(range(len(groups)), key=lambda number: (gains[number], -number))
            if gains[least] >= _WORTH_DB:
                break
            del groups[least]
        return groups

    def _groups(self, spots: Iterable[Spot]) -> list[list[Spot]]:
        """Return spots grouped by alike modules, those first that are preferred as pins."""
        folds = folded(sorted(spots, key=self._rank), lambda spot: spot[1], lambda s: (s[0], self._kinds.get(s[1])))
        return [list(fold.rows) for fold in folds]

    def _rank(self, spot: Spot) -> tuple[float, ...]:
        """Return a sort key: suspects first, then what suspects read, then others; by loss, then by bytes."""
        lost = self._alone[spot].local_db
        priority = 0 if lost < SUSPECT_DB else 1 if self._alone[spot].feeds else 2
        return priority, math.floor(lost / 10) if math.isfinite(lost) else lost, self._bytes[spot]

    # What to say ------------------------------------------------------------------------------------------

    def _candidate(
        self, group: list[Spot], result: Outcome, without: Outcome | None = None, reason: str = ""
    ) -> Candidate:
        """Return the summary of a group of ops; ``without`` is the trial in which a pinned group was not pinned."""
        alone = worst_of([self._alone[spot] for spot in group])
        if without is not None and not reason:
            fails = without.note and alone.forward_db == -math.inf
            lost = f"it fails in {self.dtype}" if fails else alone.text(self.base.dtype)
            reason = f"{lost}; without this rule {without}, with it the worst gradient has {ratio_text(result.sqnr_db)}"
        return Candidate(
            op=group[0][0],
            modules=tuple(spot[1] for spot in self._bytes if spot in group),
            kept=without is not None,
            local_db=alone.local_db if self.start.is_fault else None,
            num_bytes=sum(self._bytes[spot] for spot in group),
            without_db=(without or result).sqnr_db,
            with_db=None if without is None else result.sqnr_db,
            reason=reason,
        )

    def _why(self, rule: Rule, pinned: Groups, candidates: list[Candidate], result: Outcome) -> str:
        """Return the reason of a rule of the result."""
        if rule.reason or rule in self.table.rules:
            return rule.reason
        if rule.treatment != "fp32":
            steps = len(self.shadow.batches)
            return f"the worst gradient of {counted(steps, 'step')}: {ratio_text(result.sqnr_db)} against FP32"
        # The candidates of the pinned groups come first.
        reaches = (any(rule.matches(op=op, module=module or None) for op, module in group) for group in pinned)
        return " · ".join(
            candidate.reason for candidate, is_meant in zip(candidates, reaches, strict=False) if is_meant
        )

    def _with_scale(self, policy: Policy, result: Outcome) -> Policy:
        """Return a policy whose loss scale starts where the trial found it; unchanged if the user chose one."""
        scale, plain = result.loss_scale, LossScale.dynamic()
        if policy.loss_scale != plain or scale == DEFAULT_SCALE:
            return policy
        highest = scale if result.low_loss else max(scale, plain.ceiling or scale)
        return policy.evolve(loss_scale=LossScale.dynamic(scale, floor=min(plain.floor, scale / 1024), ceiling=highest))

    def _evidence(
        self, policy: Policy, result: Outcome, candidates: list[Candidate], left: list[Finding]
    ) -> TuningEvidence:
        return TuningEvidence(
            dtype=self.dtype,
            steps=len(self.shadow.batches),
            num_trials=self.trials.count,
            start=self.trials.outcome(self.low),
            result=result,
            candidates=tuple(candidates),
            unjudged=self.shadow.unjudged,
            no_kernel=tuple(self.no_kernel),
            uncured=tuple(f"{finding.where}: {finding.text}" for finding in left),
            saved_bytes=self._saved_bytes(found=policy, O1=self.table, low=self.low),
        )

    def _saved_bytes(self, **policies: Policy) -> dict[str, int]:
        totals = {}
        for name, policy in policies.items():
            saved = SavedBytes(self.shadow.model)  # which fails in low precision perhaps, or has a banned op
            if not isinstance(attempted(partial(self.shadow.forward, policy, 0, saved)), Exception):
                totals[name] = saved.total
        return totals


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
    finite, or whose error is more than a tenth of it (signal to noise below 20 dB), is a fault. What
    :func:`mezzo.explain` names in the first step and a rule cures is pinned from the start, whether a gradient shows it
    or not (of what a loss computes, only what has less than 30 dB); what it still finds in the end is told. A loss
    scale is tried first. Where none cures a fault, the smallest set of ops in modules that does is found by bisection,
    those first that lose most by themselves; an op stays pinned only if that raises the worst gradient by 3 dB or makes
    it finite. What an optimizer makes of the gradients is compared as well, where one is given.

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
    One more forward pass is watched as :func:`mezzo.explain` does it, and one each time that it has named a rule.

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
        try:
            iterator = iter(batches)
        except TypeError:
            what = f"batches is {shown(batches)}, nothing to iterate over"
            raise PolicyError(what, write="tune(model, loss_fn, [batch, …])") from None
        taken = list(islice(iterator, steps))
        if not taken:
            raise PolicyError(
                "there is no batch to tune on", why="batches is empty", write="tune(model, loss_fn, [batch, …])"
            )
        of_steps = [taken[number % len(taken)] for number in range(steps)]
        return Selection(Shadow(model, loss_fn, of_steps, optimizer), table).tuned()


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


def tunable(policy: Policy | str) -> Policy:
    """Return a policy whose rules and fields tuning can keep.

    Raises:
        PolicyError: It is no policy, of another level than O1, or not low.
    """
    chosen = Policy.of(policy)
    if chosen.level != "O1" or chosen.dtype not in LOW:
        why = "trials keep FP32 weights and cast op by op, as level O1 does" if chosen.level != "O0" else _REFERENCE
        raise PolicyError(f"nothing can be tuned under {chosen}", why=why, write=both("O1,dtype=bfloat16"))
    return chosen


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
        policy = table()
    except PolicyError as error:
        problems.append(error)
    raise_together(problems)
    require_python(model, "tuned")
    return policy


@contextmanager
def _full_fp32(devices: Iterable[torch.device]) -> Iterator[None]:
    """Compute FP32 as FP32 inside the block: TF32 has no more bits than float16, and regions around it have ended."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings = [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # type: ignore[attr-defined]
    before = [(unit, unit.fp32_precision) for unit in settings if unit.fp32_precision not in ("none", "ieee")]
    try:
        for unit, _ in before:
            unit.fp32_precision = "ieee"
        with ExitStack() as stack:
            for device_type in dict.fromkeys(device.type for device in devices):
                stack.enter_context(autocast("O0", device_type))
            yield
    finally:
        for unit, value in before:
            unit.fp32_precision = value
