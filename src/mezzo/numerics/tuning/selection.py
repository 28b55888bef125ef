"""From trials to a policy: what needs FP32, with which loss scale, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch

from mezzo.errors import NumericsError, UnsupportedError
from mezzo.explanation.fold import folded
from mezzo.numerics.footprint import MovedBytes, SavedBytes, StepBytes
from mezzo.numerics.tuning.pins import all_low, before, pinned, pins
from mezzo.numerics.tuning.search import shortest, smallest
from mezzo.numerics.tuning.shadow import Shadow
from mezzo.numerics.tuning.survey import SUSPECT_DB, Sensitivity, Spot, sensitivities, survey
from mezzo.numerics.tuning.trial import DEFAULT_SCALE, FAULT_DB, Outcome, Trials, ratio_text
from mezzo.numerics.tuning.tuned import Candidate, Objective, Tuned, TuningEvidence
from mezzo.policy import Policy, Rule
from mezzo.policy.spelling import both
from mezzo.scale import LossScale

__all__ = ["Selection"]

#: What a pin must add to the worst gradient's signal-to-noise ratio, in dB.
_WORTH_DB: Final = 3.0
#: So many of the most suspected are tried alone, and together.
_FIRST: Final = 8
_UNKNOWN: Final = Sensitivity()


class Selection:
    """The search for a policy.

    Args:
        shadow: The FP32 steps.
        dtype: The low dtype.
        objective: What is preferred among ops that lose alike.
    """

    def __init__(self, shadow: Shadow, dtype: str, objective: Objective) -> None:
        self.shadow, self.dtype, self.objective = shadow, dtype, objective
        self.trials = Trials(shadow)
        low = Policy.O1(dtype).dtype
        calls = [call for step in range(len(shadow.batches)) for call in survey(shadow, low, step)]
        numbers: dict[Spot, tuple[int, int]] = {}
        for call in calls:
            if call.spot is not None:
                read, returned = numbers.get(call.spot, (0, 0))
                numbers[call.spot] = read + call.numbers[0], returned + call.numbers[1]
        self._numbers = numbers
        self._kinds = {
            path: (type(module), tuple((name, param.shape) for name, param in module.named_parameters()))
            for path, module in shadow.model.named_modules()
        }
        self._places = {spot: place for place, spot in enumerate(numbers)}
        self._sensitivities: dict[Spot, Sensitivity] = {}
        self.base, self.start, self.no_kernel = self._all_low()

    def _all_low(self) -> tuple[Policy, Outcome, tuple[str, ...]]:
        """Try every op low, but for those that have no low kernel here."""
        base = all_low(self.dtype, self._numbers)
        try:
            return base, self.trials.outcome(base), ()
        except UnsupportedError:
            missing = {str(rule.op) for rule in base.rules}
            self.trials.outcome(all_low(self.dtype, self._numbers, missing))  # raises what is no single op's fault
        for op in tuple(missing):
            with suppress(UnsupportedError):
                self.trials.outcome(all_low(self.dtype, self._numbers, missing - {op}))
                missing.remove(op)
        base = all_low(self.dtype, self._numbers, missing)
        return base, self.trials.outcome(base), tuple(sorted(missing))

    def tuned(self) -> Tuned:
        """Find what to pin, and say why."""
        kept: list[list[Spot]] = []
        if self.start.is_fault:
            self._sensitivities = sensitivities(self.shadow, self.base, self.start.step - 1)
            kept = self._kept()
        chosen = [spot for group in kept for spot in group]
        rules = pins(self.base, chosen, self._numbers)
        plain = before(self.base, rules)
        result = self.trials.outcome(plain)
        rest = self._groups(spot for spot in self._numbers if spot not in chosen)
        without = [self._outcome([spot for spot in chosen if spot not in group]) for group in kept]
        candidates = [self._candidate(group, result, other) for group, other in zip(kept, without, strict=True)]
        candidates += [self._candidate(group, result) for group in rest]
        reasons = (self._reasons(rule, kept, candidates, result) for rule in plain.rules)
        said = (dataclasses.replace(rule, reason=why) for rule, why in zip(plain.rules, reasons, strict=True))
        policy = self._with_scale(plain.evolve(rules=tuple(said)), result)
        return Tuned(policy=policy, evidence=self._evidence(policy, result, candidates))

    # What to pin ------------------------------------------------------------------------------------------

    def _outcome(self, spots: Collection[Spot]) -> Outcome:
        return self.trials.outcome(pinned(self.base, spots, self._numbers))

    def _kept(self) -> list[list[Spot]]:
        """Find what to pin, alike modules together; nothing where no pin adds enough.

        Many small errors may pass 20 dB together with a few pins that cure none of them, so that none is worth it.
        Where ops are suspected of more, what brings the gradients out of all doubt is looked for as well.
        """
        targets = [max(FAULT_DB, self.start.sqnr_db + _WORTH_DB)]
        if any(each.local_db < SUSPECT_DB for each in self._sensitivities.values()):
            targets.append(max(SUSPECT_DB, targets[0]))
        kept: list[list[Spot]] = []
        for target in targets:
            kept = self._worth(self._needed(target))
            if kept and not self._outcome([spot for group in kept for spot in group]).is_fault:
                break
        return kept

    def _needed(self, target: float) -> list[Spot]:
        """Find the fewest spots with which gradients reach a ratio: among alike modules together, then one by one."""

        def passes(groups: Iterable[Iterable[Spot]]) -> bool:
            outcome = self._outcome([spot for group in groups for spot in group])
            return not outcome.is_fault and outcome.sqnr_db >= target

        groups = self._groups(self._numbers)
        if not passes(groups):
            outcome = self._outcome([spot for group in groups for spot in group])
            raise NumericsError(
                f"no rule brings the gradients of {self.dtype} near those of FP32",
                where=str(outcome),
                why="the error is there with every op in FP32 that a rule reaches: what makes it is no op of torch's",
                write=f"{both('O0')}; or @mezzo.fp32 on the function that casts by itself",
            )
        few = smallest(groups, passes)
        if len(few) > 1:  # what cannot be left out of it need not be the fewest: a single one may do as well
            few = next(([group] for group in groups[:_FIRST] if passes([group])), few)
        few = shortest(few, passes, _FIRST)
        spots = sorted((spot for group in few for spot in group), key=self._rank)

        def pass_alone(part: Sequence[Spot]) -> bool:
            return passes([part])

        return shortest(smallest(spots, pass_alone), pass_alone, _FIRST) if len(spots) > len(few) else spots

    def _groups(self, spots: Iterable[Spot]) -> list[list[Spot]]:
        """Put spots in alike modules together, those first that are preferred as pins."""
        found = folded(sorted(spots, key=self._rank), lambda spot: spot[1], lambda s: (s[0], self._kinds.get(s[1])))
        return [list(fold.rows) for fold in found]

    def _rank(self, spot: Spot) -> tuple[float, ...]:
        """Order spots: suspects by what they lose, then others by how near they are to one, the cheap ones first."""
        own = self._sensitivities.get(spot, _UNKNOWN)
        tens = math.floor(own.local_db / 10) if math.isfinite(own.local_db) else own.local_db
        return own.distance, tens, self._num_bytes([spot]), self._places[spot]

    def _num_bytes(self, group: Iterable[Spot]) -> int:
        """Count what operands and results take more in FP32 than in 16 bits; 2 bytes each."""
        counted = [self._numbers[spot] for spot in group]
        return sum(2 * (returned if self.objective == "memory" else read + returned) for read, returned in counted)

    def _worth(self, spots: Sequence[Spot]) -> list[list[Spot]]:
        """Drop pins that add too little, the least first; of what is left each is worth it."""
        groups = self._groups(spots)
        while groups:
            whole = self._outcome([spot for group in groups for spot in group])
            gains = [self._gain(groups, group, whole) for group in groups]
            least = min(range(len(groups)), key=lambda number: (gains[number], -number))
            if gains[least] >= _WORTH_DB:
                break
            del groups[least]
        return groups

    def _gain(self, groups: list[list[Spot]], group: list[Spot], whole: Outcome) -> float:
        without = self._outcome([spot for other in groups if other is not group for spot in other])
        if not without.is_finite:
            return math.inf if whole.is_finite else 0.0
        updates = 0.0
        if whole.updates_db is not None and without.updates_db is not None:
            updates = whole.updates_db - without.updates_db
        return max(whole.sqnr_db - without.sqnr_db, updates)

    # What to say ------------------------------------------------------------------------------------------

    def _candidate(self, group: list[Spot], result: Outcome, without: Outcome | None = None) -> Candidate:
        """Say what is known of some ops; of those that are pinned, what all is without that."""
        own = [self._sensitivities.get(spot, _UNKNOWN) for spot in group]
        return Candidate(
            op=group[0][0],
            modules=tuple(module for _, module in sorted(group, key=lambda spot: self._places[spot])),
            kept=without is not None,
            local_db=min(each.local_db for each in own) if self._sensitivities else None,
            num_bytes=self._num_bytes(group),
            without_db=(without or result).sqnr_db,
            with_db=None if without is None else result.sqnr_db,
            reason="" if without is None else self._reason(own, without, result),
        )

    def _reason(self, own: list[Sensitivity], without: Outcome, result: Outcome) -> str:
        """Say of a pin what its ops lose by themselves, and what all is without it."""
        largest, limit = max(each.largest for each in own), torch.finfo(self.base.dtype).max
        forward, backward = min(each.forward_db for each in own), min(each.backward_db for each in own)
        if without.note and forward == -math.inf:
            alone = f"it fails in {self.dtype}"
        elif largest > limit:
            alone = f"results reach {largest:.3g}, beyond {self.dtype}'s {limit:.6g}"
        elif forward < SUSPECT_DB:
            alone = f"results of operands rounded to {self.dtype}: {ratio_text(forward)}"
        elif backward < SUSPECT_DB:
            alone = f"gradients of operands rounded to {self.dtype}: {ratio_text(backward)}"
        else:
            alone = "what reads its results needs them in FP32"
        return f"{alone}; without this rule {without}, with it the worst gradient has {ratio_text(result.sqnr_db)}"

    def _reasons(self, rule: Rule, kept: list[list[Spot]], candidates: list[Candidate], result: Outcome) -> str:
        """Say why a rule of the result is there."""
        if rule.treatment != "fp32":
            steps = len(self.shadow.batches)
            return f"the worst gradient of {steps} step{'s' * (steps > 1)}: {ratio_text(result.sqnr_db)} against FP32"
        own = (
            candidate.reason
            for group, candidate in zip(kept, candidates, strict=False)
            if any(rule.matches(op=op, module=module or None) for op, module in group)
        )
        return " · ".join(own)

    def _with_scale(self, policy: Policy, result: Outcome) -> Policy:
        """Have the loss scale start where the trial found it, unless it starts there anyway."""
        scale, plain = result.loss_scale, LossScale.dynamic()
        if self.base.dtype != torch.float16 or scale == DEFAULT_SCALE:
            return policy
        highest = scale if result.low_loss else max(scale, plain.ceiling or scale)
        return policy.evolve(loss_scale=LossScale.dynamic(scale, floor=min(plain.floor, scale / 1024), ceiling=highest))

    def _evidence(self, policy: Policy, result: Outcome, candidates: Sequence[Candidate]) -> TuningEvidence:
        judged = {name for names in self.shadow.judged for name in names}
        return TuningEvidence(
            dtype=self.dtype,
            steps=len(self.shadow.batches),
            objective=self.objective,
            num_trials=self.trials.count,
            start=self.start,
            result=result,
            candidates=tuple(candidates),
            unjudged=tuple(name for name in self.shadow.params if name not in judged),
            no_kernel=self.no_kernel,
            bytes=tuple(self._bytes({"result": policy, "O1": Policy.O1(self.dtype), "every op low": self.base})),
        )

    def _bytes(self, policies: Mapping[str, Policy]) -> Iterator[StepBytes]:
        for name, policy in policies.items():
            saved, moved = SavedBytes(self.shadow.model), MovedBytes(policy.dtype)
            with suppress(Exception):  # a forward pass fails in low precision, or has a banned op; outcomes say so
                with moved, self.shadow.forward(policy, 0, inside=saved) as run:
                    run.gradients(1.0)
                yield StepBytes(policy=name, saved=saved.total, moved=moved.total)
