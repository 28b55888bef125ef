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
    chosen = [op for op in graph.ops if op.role in ("free", "follow")]
    planned: dict[Group, set[bool]] = {}
    for op in chosen:
        planned.setdefault((op.name, op.module), set()).add(low[op.index])
    # Of several rules on an op the policy's own comes first, and holds; and a region casts no views.
    silent = {(op.name, op.module) for op in chosen if (op.decision and op.decision.rule) or not functions(op.name)}
    sayable = {
        group: True in choices for group, choices in planned.items() if len(choices) == 1 and group not in silent
    }
    ruled = set[Group]()
    while True:
        flows = _flows(graph, low, {group: sayable[group] for group in ruled})
        wrong = {(op.name, op.module) for op in chosen if flows[op.index] != low[op.index]}
        if not (more := (wrong & set(sayable)) - ruled):
            break
        ruled |= more
    ruled_ops = {name for name, _ in ruled}
    names = dict.fromkeys(name for name, _ in sayable if name in ruled_ops)
    rules = [rule for name in names for rule in _rules_on(name, planned, sayable, ruled)]
    unsaid = [
        _unsaid(group, [op for op in chosen if (op.name, op.module) == group], low)
        for group in planned
        if group in wrong and group not in sayable
    ]
    return tuple(rules), tuple(unsaid)


def _flows(graph: Graph, low: Sequence[bool], ruled: dict[Group, bool]) -> list[bool]:
    """Return which ops run low in a region with rules: an op without a rule does if all that it reads is low."""
    flows = list[bool]()
    for op in graph.ops:
        if op.role not in ("free", "follow"):
            flows.append(low[op.index])
        elif (is_low := ruled.get((op.name, op.module))) is not None:
            flows.append(is_low)
        else:
            makers = [graph.makers[node].index for node in graph.promoting(op)]
            reads = [flows[maker] if maker < len(flows) else low[maker] for maker in makers if maker != op.index]
            flows.append(bool(reads) and all(reads))
    return flows


def _rules_on(
    name: str, planned: dict[Group, set[bool]], sayable: dict[Group, bool], ruled: Collection[Group]
) -> Iterable[Rule]:
    """Return the rules on one op: one for the whole model where all agree, else one for each module, inner ones first.

    Modules that differ in an index alone, as ``layers.0`` and ``layers.1``, share a rule on ``layers.*`` if they agree.
    """
    choices = {module: choice for (op, module), choice in planned.items() if op == name}
    if len(set.union(*choices.values())) == 1:
        return [_rule(name, None, sayable[name, next(iter(choices))])]
    is_low = {module: sayable[op, module] for op, module in ruled if op == name}
    # A rule on a module holds for all modules inside: one that differs needs a rule of its own, which goes first.
    for module in choices:
        is_inside = any(not outer or lies_in(module, exact(outer)) for outer in is_low)
        if module not in is_low and (name, module) in sayable and is_inside:
            is_low[module] = sayable[name, module]
    inner_first = sorted(is_low, key=lambda module: (module == "", -module.count("."), module))
    rules: dict[tuple[str, bool], None] = {}
    for module in inner_first:
        glob = ".".join("*" if part.isdecimal() else exact(part) for part in module.split("."))
        matched = [other for other in choices if other and matches(other, glob)]
        agree = all(other in is_low and is_low[other] == is_low[module] for other in matched)
        has_more = any(lies_in(other, glob) for other in choices if other not in matched)
        rules[glob if module and agree and not has_more else exact(module), is_low[module]] = None
    return [_rule(name, module or None, low) for module, low in rules]


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
