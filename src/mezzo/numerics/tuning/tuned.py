"""The result of tuning: a policy and the evidence for it, as values that print the answer first."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from mezzo.errors import printable, some_of
from mezzo.explanation.rows import byte_text, counted, folded, scale_text
from mezzo.numerics.tuning.trial import Outcome, ratio_text
from mezzo.policy import Policy
from mezzo.trace.function_calls import MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An op in a module, or in alike modules, that a rule could keep in FP32.

    Attributes:
        op: The op's base name.
        modules: The modules' paths; ``""`` is the model itself and the loss function.
        kept: Whether the policy pins it.
        local_db: What the op alone keeps of its results and gradients, from rounded operands, in dB: the worst call's
            signal to noise; ``None`` where that was not looked at, since no op needs FP32.
        num_bytes: How many bytes more its operands and results take in FP32.
        without_db: Signal to noise of the worst gradient without the pin, in dB; of what is not pinned, in the result.
        with_db: The same with the pin; ``None`` of what is not pinned.
        reason: In words, why it is pinned: what it is worth, or as what it was named by explain.
    """

    op: str
    modules: tuple[str, ...]
    kept: bool
    local_db: float | None
    num_bytes: int
    without_db: float
    with_db: float | None
    reason: str

    @property
    def name(self) -> str:
        """The op and its modules in words: ``linear in blocks.{0..11}.fc ×12``."""
        return f"{self.op} in {' and '.join(f.text or MODEL for f in folded(self.modules, str, lambda path: None))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEvidence:
    """What a policy was chosen by.

    Attributes:
        dtype: The low dtype.
        steps: Training steps of each trial.
        num_trials: How many policies were run.
        start: With every op low, those too that :func:`mezzo.explain` names.
        result: With the policy that was chosen.
        candidates: What could have been pinned, pins first.
        unjudged: Parameters whose gradient is zero or FP32's own rounding noise, so that nothing is judged by it.
        no_kernel: Ops that the table keeps in FP32 and that have no low kernel here.
        uncured: What :func:`mezzo.explain` still finds under the policy: where, and what to write.
        saved_bytes: What a step keeps for its backward pass with the policy that was chosen (``found``), under the
            level O1 and with every op low (``low``), but for those whose forward pass fails.
    """

    dtype: str
    steps: int
    num_trials: int
    start: Outcome
    result: Outcome
    candidates: tuple[Candidate, ...]
    unjudged: tuple[str, ...]
    no_kernel: tuple[str, ...]
    uncured: tuple[str, ...]
    saved_bytes: Mapping[str, int]

    @property
    def pins(self) -> tuple[Candidate, ...]:
        """What the policy keeps in FP32."""
        return tuple(candidate for candidate in self.candidates if candidate.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A policy for training, and why: what :func:`mezzo.numerics.tune` returns. It prints the answer first.

    Attributes:
        policy: The policy. Its ``fp32`` rules are the pins; each says its reason, in a saved file too.
        evidence: What it was chosen by.
    """

    policy: Policy
    evidence: TuningEvidence

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy file, with the evidence as its rules' reasons; see :meth:`mezzo.Policy.save`."""
        self.policy.save(path)

    def __str__(self) -> str:
        own = self.evidence
        before = f"; with every op low: {own.start}" if own.pins or own.start.is_fault else ""
        lines = [("", self.verdict)]
        for reason in dict.fromkeys(pin.reason for pin in own.pins):  # the ops of one module share a reason
            lines.append(("pinned", f"{', '.join(pin.name for pin in own.pins if pin.reason == reason)}: {reason}"))
        lines += [("left", f"explain still finds in {finding}") for finding in own.uncured]
        lines.append(("worst", f"{own.result}{before}"))
        if "found" in own.saved_bytes:
            chosen, *rest = (f"{name} {byte_text(count)}" for name, count in own.saved_bytes.items())
            comparison = f" ({', '.join(rest)})" if rest else ""
            lines.append(("bytes", f"{chosen.removeprefix('found ')} kept for the backward pass{comparison}"))
        if own.unjudged:
            unjudged = f"nothing is judged by {some_of(own.unjudged, 5)}: zero, or even in FP32 rounding noise"
            lines.append(("unsure", unjudged))
        lines.append(("trials", f"{counted(own.num_trials, 'policy', 'policies')}, {counted(own.steps, 'step')} each"))
        text = "\n".join(_folded(label, printable(line)) for label, line in lines)
        return f'{text}\n  write   mezzo.MixedPrecision(model, optimizer, "{self.policy}")'

    @property
    def rows(self) -> list[str]:
        """A line for each op that could have been pinned, pins first."""
        rows = []
        for candidate in self.evidence.candidates:
            alone = "" if candidate.local_db is None else f", alone {ratio_text(candidate.local_db)}"
            precision = "fp32" if candidate.kept else "low"
            rows.append(
                printable(f"  {precision:<6}  {candidate.name}{alone}, {byte_text(candidate.num_bytes)} more in FP32")
            )
        return rows

    @property
    def verdict(self) -> str:
        """The answer, in one line."""
        own, scale = self.evidence, self.policy.loss_scale
        answer = f"all {len(own.candidates)} ops run low"
        if own.pins:
            names = ", ".join(pin.name for pin in own.pins)
            answer = f"{len(own.pins)} of {len(own.candidates)} ops need FP32: {names}"
        if own.result.is_fault:
            answer += (
                f", though the worst gradient stays at {ratio_text(own.result.sqnr_db)}: no rule raises it by 3 dB"
            )
        elif not own.pins:
            answer += ", nothing needs FP32"
        if scale != Policy.O1(self.policy.dtype).loss_scale:
            answer += f"; the loss scale starts at {scale_text(scale.init)}"
        return f"{own.dtype}: {answer}"


def _folded(label: str, line: str) -> str:
    """Return a line behind its label, folded into 120 columns."""
    first, rest = (f"  {label:<6}  ", " " * 10) if label else ("", "  ")
    return textwrap.fill(
        line, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
