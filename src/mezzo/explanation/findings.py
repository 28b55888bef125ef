"""What the tables would hide: rules without effect, composites that no rule enters, measured against decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import nn

from mezzo.explanation.asking import Asked, IntegerRead
from mezzo.explanation.logits import logits
from mezzo.explanation.low_numbers import LowNumbers
from mezzo.explanation.rows import Finding, Product, Row, as_glob, folded, format_text
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import OPS, QUANTISED
from mezzo.policy.rules import both, exact
from mezzo.tensors import LOW
from mezzo.trace.function_calls import LOSS, MODEL, location_text

#: C++ functions made of ops that have names of their own, and that no rule reaches inside.
COMPOSITES: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(parts.split())
    for name, parts in {
        "scaled_dot_product_attention": "matmul bmm softmax dropout mul add",
        "lstm": "linear matmul mm addmm sigmoid tanh mul add dropout lstm_cell",
        "gru": "linear matmul mm addmm sigmoid tanh mul add sub dropout gru_cell",
        "rnn_tanh": "linear matmul mm addmm tanh add dropout rnn_tanh_cell",
        "rnn_relu": "linear matmul mm addmm relu add dropout rnn_relu_cell",
        "lstm_cell": "linear matmul mm addmm sigmoid tanh mul add",
        "gru_cell": "linear matmul mm addmm sigmoid tanh mul add sub",
        "rnn_tanh_cell": "linear matmul mm addmm tanh add",
        "rnn_relu_cell": "linear matmul mm addmm relu add",
        "linear": "matmul mm addmm",
        "matmul": "mm bmm mv dot",
        "einsum": "bmm matmul mul sum",
        "tensordot": "mm",
        "bilinear": "bmm mul sum",
        "linalg_multi_dot": "mm matmul",
        "chain_matmul": "mm matmul",
        "linalg_matrix_power": "matmul mm bmm linalg_inv",
        "cov": "mm matmul sum mul sub div true_divide",
        "corrcoef": "mm matmul cov sqrt div clamp",
        "cross_entropy": "log_softmax nll_loss",
        "binary_cross_entropy_with_logits": "logsigmoid",
        "cosine_similarity": "sum mul linalg_vector_norm",
        "cdist": "matmul norm",
        "logsumexp": "exp sum log",
        "softplus": "exp log1p",
        "_transformer_encoder_layer_fwd": "linear matmul bmm softmax layer_norm gelu relu scaled_dot_product_attention",
        "_native_multi_head_attention": "linear matmul bmm softmax scaled_dot_product_attention",
    }.items()
}


def findings(
    model: nn.Module,
    policy: Policy,
    seen: Asked,
    low_numbers: LowNumbers,
    *,
    has_backward: bool,
) -> tuple[Finding, ...]:
    """Return what a user should know beside the tables.

    Args:
        model: The prepared copy.
        policy: The policy.
        seen: What was measured.
        low_numbers: What sixteen bits have lost.
        has_backward: Whether a backward pass could run.
    """
    integer_reads = [*seen.integers()]
    all_findings = [
        *_disagreements(seen.rows),
        *_without_effect(model, policy, seen),
        *_unreachable(policy, seen),
        *_fp32_products(policy, seen.products),
        *_lost_integers(integer_reads),
        *low_numbers.findings({line or location_text(module, op) for module, op, line, _ in integer_reads}),
        *logits(seen.table),
        *_tied(model, policy, seen.rows),
    ]
    if not has_backward:
        text = "nothing requires a gradient: parameters are frozen, or the output is detached; casts are the forward's"
        all_findings.append(Finding(kind="no backward", where=type(model).__name__, text=text))
    return tuple(dict.fromkeys(all_findings))


def _disagreements(rows: Iterable[Row]) -> Iterator[Finding]:
    for row in rows:
        if row.disagreement:
            by = f"rule {row.rule}" if row.rule else row.source
            text = f"{row.disagreement} (treatment {row.treatment}, {by})"
            yield Finding(kind="disagreement", where=location_text(row.module, row.op, row.line), text=text)


# Rules without effect ---------------------------------------------------------------------------------


def _without_effect(model: nn.Module, policy: Policy, seen: Asked) -> Iterator[Finding]:
    """Yield the rules that decide nothing: behind earlier rules, or in this run alone."""
    modules = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    stored = {path: policy.product_rule(path) or policy.storage(path, path.rpartition(".")[0])[1] for path, _ in named}
    decided = {row.rule for row in seen.rows}
    for number, rule in enumerate(policy.rules):
        if str(rule) in decided and rule not in policy.rules[:number]:
            continue
        if rule.op is None and any(winner is rule for winner in stored.values()):
            continue
        if rule.param is None:
            winners = _winners(rule, policy, modules)
        else:
            winners = [winner for path, winner in stored.items() if winner is not None and rule.matches_param(path)]
        if winners and not any(winner is rule for winner in winners):
            by = ", ".join(dict.fromkeys(map(str, winners)))
            text = f"all that it matches is decided before, by {by}; put it first, or drop it"
            yield Finding(kind="shadowed rule", where=str(rule), text=text)
        else:
            text = f"it decided nothing in this run{_reason(rule, seen)}"
            yield Finding(kind="idle rule", where=str(rule), text=text)


def _winners(rule: Rule, policy: Policy, modules: Iterable[str]) -> list[Rule]:
    """Return the rules that win where a rule matches: for its own ops, or for an op that no rule names."""
    ops = ("any other op",) if rule.op is None else rule.ops
    module_paths = [None, *modules] if rule.module is None else [path for path in modules if rule.matches_module(path)]
    return [
        next(other for other in policy.rules if other.matches(op=op, module=module))
        for op in ops
        for module in module_paths
    ]


def _reason(rule: Rule, seen: Asked) -> str:
    if rule.module is not None and not any(map(rule.matches_module, seen.table.modules_run)):
        return f": no module that {rule.module} matches was called"
    ops = rule.ops if len(rule.ops) == 1 else ()
    if modules := sorted({row.module or MODEL for row in seen.rows if row.op in ops}):
        return f": {rule.op} ran only in {', '.join(modules[:5])}"
    if composites := sorted({row.op for row in seen.rows if COMPOSITES.get(row.op, frozenset()) & {*ops}}):
        return f": {rule.op} ran only inside {', '.join(composites)}"
    return "" if rule.op is None else f": no op that {rule.op} matches was called"


# Where no rule reaches ----------------------------------------------------------------------------------


def _unreachable(policy: Policy, seen: Asked) -> Iterator[Finding]:
    # A rule for products of weights does not reach the products inside attention.
    rules = [rule for rule in policy.rules if rule.op is not None and rule.treatment not in QUANTISED]
    for row in seen.rows:
        inside = COMPOSITES.get(row.op, frozenset()) | seen.inner_ops.get((row.module, row.op), set()) - {row.op}
        for rule in rules:
            if str(rule) == row.rule or rule.treatment == row.treatment:
                continue
            module = row.module or None
            # Ops with a decision of their own under an earlier rule would not be this rule's in any case.
            reached = [
                op for op in sorted(inside)
                if rule.matches(op=op, module=module) and policy.explain(op, module).rule is rule
            ]  # fmt: skip
            if reached:
                text = (
                    f"the rule {rule} does not reach {', '.join(reached)} inside {row.op}, which gets {row.treatment} "
                    f"as a whole; write {both(f'{rule.treatment}={row.op}')}, or call {reached[0]} by itself"
                )
                yield Finding(kind="unreachable", where=location_text(row.module, row.op), text=text)


def _fp32_products(policy: Policy, products: tuple[Product, ...]) -> Iterator[Finding]:
    """Yield the products that a low policy leaves in FP32, those with the largest share first."""
    total = sum(product.flops for product in products)
    if policy.dtype == torch.float32 or not total:
        return
    for product in products:
        if product.dtype == "float32":
            text = f"ran in float32: {100 * product.flops / total:.3g} % of the FLOPs of the forward pass's products"
            text = f"{text}; {product.why}" if product.why else text
            yield Finding(kind="FP32 product", where=location_text(product.module, product.op, product.line), text=text)


# What users ask for: positions, tied weights --------------------------------------------------


def _lost_integers(reads: Iterable[IntegerRead]) -> Iterator[Finding]:
    """Yield the low products that read positions, indices or times which their format does not hold."""
    for fold in folded(reads, lambda read: read[0], lambda read: read[1:]):
        module, op, line, integers = fold.rows[0]
        lost, path = integers.lost, exact(module)
        if len(fold.rows) > 1:
            path = as_glob(exact(fold.path))
        shape = f"{lost.num_changed:,} of {lost.num_all:,} change in {format_text([lost.dtype])}"
        cast = f", by the cast at {integers.line}" if integers.line else ""
        is_buffer = integers.by not in ("policy", "model", "torch")
        if module not in ("", LOSS):
            write = both(f"fp32_param={exact(integers.by)},fp32_module={path}" if is_buffer else f"fp32_module={path}")
        else:
            write = f"{both(f'fp32_param={exact(integers.by)}')}, and " if is_buffer else ""
            write += "a function under @mezzo.fp32 for this product"
        if integers.by == "model":
            write += f", and no cast at {integers.line}" if integers.line else ", and no cast of the model's own"
        what = f" of the buffer {integers.by}" if is_buffer else ""
        text = (
            f"it reads exact integers{what} up to {lost.largest:,}, of which {shape}{cast}: write {write}; or divide "
            "them by their largest first, in FP32"
        )
        yield Finding(
            kind="lost integers", where=location_text(fold.text if len(fold.rows) > 1 else module, op, line), text=text
        )


def _tied(model: nn.Module, policy: Policy, rows: tuple[Row, ...]) -> Iterator[Finding]:
    """Yield weights of two names that a rule keeps in FP32 under one, and that an op is to read low under the other."""
    names: dict[int, list[str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(path)
    for paths in names.values():
        rules = {path: _rule_of(policy, path) for path in paths}
        in_fp32 = [path for path, rule in rules.items() if rule is not None and rule.treatment == "fp32"]
        read_low = [path for path in paths if path not in in_fp32 and _is_low(policy, path, rules[path], rows)]
        if in_fp32 and read_low:
            rule, inside = rules[in_fp32[0]], [path.rpartition(".")[0] for path in (in_fp32[0], read_low[0])]
            text = (
                f"it and {read_low[0]} are one tensor: the rule {rule} keeps it in FP32 in {inside[0] or MODEL}, and "
                f"{inside[1] or MODEL} is to read it low; write "
                f"{both(f'fp32_param={exact(in_fp32[0])}+{exact(read_low[0])}')} for both, or no rule on either"
            )
            yield Finding(kind="tied weights", where=in_fp32[0], text=text)


def _rule_of(policy: Policy, path: str) -> Rule | None:
    """Return the first rule on a parameter or on the module that owns it, wherever it is stored."""
    module = path.rpartition(".")[0]
    return next(
        (
            rule
            for rule in policy.rules
            if rule.matches_param(path)
            or (rule.op is None and rule.treatment in ("low", "fp32") and rule.matches_module(module))
        ),
        None,
    )


def _is_low(policy: Policy, path: str, rule: Rule | None, rows: tuple[Row, ...]) -> bool:
    """Whether a weight is low under one of its names: by a rule, by its storage, or for an op in its module."""
    if rule is not None:
        return rule.treatment == "low"
    module = path.rpartition(".")[0]
    ops = {row.op for row in rows if row.module == module}
    return policy.param_dtype in LOW or any(
        entry is not None and policy.explain(entry.name, module or None).treatment == "low"
        for entry in map(OPS.get, ops)
    )
