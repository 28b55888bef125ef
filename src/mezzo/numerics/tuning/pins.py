"""From ops in modules to rules: pins that mean exactly them, and alike modules in one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from mezzo.numerics.tuning.survey import Spot
from mezzo.policy import Policy, Rule, Treatment

_UNWRITABLE = re.compile(r"[*?\[\],+=@;()\s]")


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
    """Return a policy with rules before its own, without those of its own that can never win again."""
    first = tuple(rules)
    said = {rule.selector for rule in first}
    return base.evolve(rules=(*first, *(rule for rule in base.rules if rule.selector not in said)))


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
    folded = _folded(op, chosen, running)
    if chosen == running and (folded is None or len(folded) > 1):
        return [Rule("fp32", op=op)]
    if folded is not None:
        return folded
    given = base.explain(op).treatment
    rules: list[Rule] = []
    # From the outermost in: each rule differs from what those around it say, and stands before them.
    for module in sorted(sorted(running, reverse=True), key=lambda path: path.count(".") if path else -1):
        said = next((rule.treatment for rule in rules if rule.module is None or rule.matches_module(module)), given)
        treatment: Treatment = "fp32" if module in chosen else given
        if treatment != said:
            rules.insert(0, Rule(treatment, op=op, module=_glob(module)))
    return rules


def _folded(op: str, chosen: set[str], running: set[str]) -> list[Rule] | None:
    """Write alike modules as one glob each, if the globs mean exactly what is chosen."""
    if "" in chosen:
        return None
    globs: dict[str, list[str]] = defaultdict(list)
    for module in sorted(chosen):
        parts = ("*" if part.isdigit() else _UNWRITABLE.sub("?", part) for part in module.split("."))
        globs[".".join(parts)].append(module)
    written = [
        (glob if len(own) > 1 and glob.strip("*.") else _glob(path)) for glob, own in globs.items() for path in own
    ]
    rules = [Rule("fp32", op=op, module=path) for path in dict.fromkeys(written)]
    reached = {module for module in running if any(rule.matches_module(module) for rule in rules)}
    return rules if reached == chosen else None


def _glob(module: str) -> str | None:
    """Write a module's path as a glob; what a policy's text has another use for stands for any character."""
    return _UNWRITABLE.sub("?", module) or None
