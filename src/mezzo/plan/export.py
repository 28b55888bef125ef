"""From a placement to rules of a policy that give it, as far as rules can."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mezzo.plan.graph import Graph, GraphOp
from mezzo.policy import Rule, Treatment
from mezzo.policy.ops import functions
from mezzo.policy.rules import exact, lies_in, matches

#: An op and the module in which it runs: what a rule can name.
Group = tuple[str, str]


def rules_for(graph: Graph, low: Sequence[bool]) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Find the fewest rules under which a region gives a placement.

    A region runs what no rule names in the widest dtype that it reads. Only ops for which that is another precision
    than the placement's need a rule.

    Args:
        graph: The graph.
        low: Whether each of its ops is low.

    Returns:
        The rules, to stand behind the policy's own; and in words, the ops about which no rule can say it.
    """
    chosen = [op for op in graph.ops if op.kind in ("free", "follow")]
    planned: dict[Group, set[bool]] = {}
    for op in chosen:
        planned.setdefault((op.name, op.module), set()).add(low[op.index])
    # Of rules on one op the policy's own is the first that matches; and a region casts no views.
    silent = {(op.name, op.module) for op in chosen if (op.decision and op.decision.rule) or not functions(op.name)}
    sayable = {group: next(iter(each)) for group, each in planned.items() if len(each) == 1 and group not in silent}
    ruled = set[Group]()
    while True:
        flows = _flows(graph, low, {group: sayable[group] for group in ruled})
        wrong = {(op.name, op.module) for op in chosen if flows[op.index] != low[op.index]}
        if not (more := (wrong & set(sayable)) - ruled):
            break
        ruled |= more
    names = dict.fromkeys(name for name, _ in sayable if any(name == each for each, _ in ruled))
    rules = [rule for name in names for rule in _rules_on(name, planned, sayable, ruled)]
    unsaid = [
        _unsaid(group, [op for op in chosen if (op.name, op.module) == group], low)
        for group in planned
        if group in wrong and group not in sayable
    ]
    return tuple(rules), tuple(unsaid)


def _flows(graph: Graph, low: Sequence[bool], ruled: dict[Group, bool]) -> list[bool]:
    """Return what is low in a region with rules: what it reads decides about all else."""
    flows = list[bool]()
    for op in graph.ops:
        if op.kind not in ("free", "follow"):
            flows.append(low[op.index])
        elif (said := ruled.get((op.name, op.module))) is not None:
            flows.append(said)
        else:
            makers = [graph.makers[node].index for node in graph.promoting(op)]
            read = [flows[each] if each < len(flows) else low[each] for each in makers if each != op.index]
            flows.append(bool(read) and all(read))
    return flows


def _rules_on(
    name: str, planned: dict[Group, set[bool]], sayable: dict[Group, bool], ruled: Collection[Group]
) -> Iterable[Rule]:
    """Write the rules on one op: one for all of the model where all agree, else for modules, inner ones first."""
    groups = {module: each for (op, module), each in planned.items() if op == name}
    if len(set.union(*groups.values())) == 1:
        return [_rule(name, None, sayable[name, next(iter(groups))])]
    said = {module: sayable[op, module] for op, module in ruled if op == name}
    # A rule on a module is about all that lies in it: what differs there needs one of its own, and goes first.
    for module in groups:
        if (
            module not in said
            and (name, module) in sayable
            and any(not each or lies_in(module, exact(each)) for each in said)
        ):
            said[module] = sayable[name, module]
    inner_first = sorted(said, key=lambda module: (module == "", -module.count("."), module))
    found: dict[tuple[str, bool], None] = {}
    for module in inner_first:
        glob = ".".join("*" if part.isdecimal() else exact(part) for part in module.split("."))
        alike = [each for each in groups if each and matches(each, glob)]
        folds = all(each in said and said[each] == said[module] for each in alike) and not any(
            lies_in(each, glob) for each in groups if each not in alike
        )
        found[glob if folds and module else exact(module), said[module]] = None
    return [_rule(name, module or None, is_low) for module, is_low in found]


def _rule(name: str, module: str | None, is_low: bool) -> Rule:
    treatment: Treatment = "low" if is_low else "fp32"
    return Rule(treatment, op=name, module=module)


def _unsaid(group: Group, ops: Sequence[GraphOp], low: Sequence[bool]) -> str:
    name, module = group
    num_low = sum(low[op.index] for op in ops)
    lines = ", ".join(dict.fromkeys(op.line.rpartition("/")[2] for op in ops if op.line))
    where = module or "the model itself"
    times = {True: f"{_times(num_low)} low", False: f"{_times(len(ops) - num_low)} in FP32"}
    runs = " and ".join(text for is_low, text in times.items() if any(low[op.index] == is_low for op in ops))
    return f"{name} in {where} runs {runs} ({lines})"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
