"""What the tables would hide: rules without effect, composites that no rule enters, measured against decided."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import nn

from mezzo.explanation.rows import Finding, Row
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import OPS, resolve
from mezzo.trace.trace import Trace
from mezzo.trace.where import MODEL

__all__ = ["COMPOSITES", "findings"]

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

_FAST_PATHS: Final[tuple[tuple[type[nn.Module], str], ...]] = (
    (nn.TransformerEncoderLayer, "torch._transformer_encoder_layer_fwd"),
    (nn.MultiheadAttention, "torch._native_multi_head_attention"),
)


def findings(
    model: nn.Module, policy: Policy, rows: tuple[Row, ...], seen: Trace, *, has_backward: bool, in_mode: bool
) -> tuple[Finding, ...]:
    """List what a user should know beside the tables.

    Args:
        model: The prepared copy.
        policy: The policy.
        rows: Every op.
        seen: What else was measured.
        has_backward: Whether a backward pass could run.
        in_mode: Whether the region autocasts or has a function mode, either of which keeps torch off its fast paths.
    """
    found = [
        *_disagreements(rows),
        *_without_effect(model, policy, rows, seen),
        *_unreachable(policy, rows, seen),
        *_fp32_products(policy, seen),
        *(() if in_mode else _fast_paths(model, seen)),
    ]
    if not has_backward:
        text = "nothing requires a gradient: parameters are frozen, or the output is detached; casts are the forward's"
        found.append(Finding(kind="no backward", where=type(model).__name__, text=text))
    return tuple(dict.fromkeys(found))


def _disagreements(rows: Iterable[Row]) -> Iterator[Finding]:
    for row in rows:
        if row.disagreement:
            by = f"rule {row.rule}" if row.rule else row.source
            where = " ".join((row.module or MODEL, row.op, *([f"({row.line})"] if row.line else [])))
            yield Finding(
                kind="disagreement", where=where, text=f"{row.disagreement} (treatment {row.treatment}, {by})"
            )


# Rules without effect ---------------------------------------------------------------------------------


def _without_effect(model: nn.Module, policy: Policy, rows: tuple[Row, ...], seen: Trace) -> Iterator[Finding]:
    """Tell rules that earlier ones leave nothing to from rules that this run gave nothing to."""
    modules = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    stored = _deciding_storage(model, policy)
    decided = {row.rule for row in rows}
    ops = frozenset((*OPS, *(row.op for row in rows), *(op for rule in policy.rules for op in rule.ops)))
    matched = {rule: _matched(rule, ops, modules) for rule in policy.rules if rule.param is None}
    shadows: Iterable[str]
    for number, rule in enumerate(policy.rules):
        earlier = policy.rules[:number]
        if str(rule) in decided and rule not in earlier:
            continue
        if rule.param is not None:
            hit = [path for path in stored if rule.matches_param(path)]
            if any(stored[path] is rule for path in hit):
                continue
            shadows = dict.fromkeys(str(winner) for path in hit if (winner := stored[path]) is not None)
        else:
            if rule.op is None and any(winner is rule for winner in stored.values()):
                continue
            shadows = _covering(matched[rule], [(each, matched[each]) for each in earlier if each in matched])
        if shadows:
            text = f"all that it matches is decided before, by {', '.join(shadows)}; put it first, or drop it"
            yield Finding(kind="shadowed rule", where=str(rule), text=text)
        else:
            yield Finding(kind="idle rule", where=str(rule), text=_idle(rule, rows, seen))


def _idle(rule: Rule, rows: tuple[Row, ...], seen: Trace) -> str:
    inside = sorted({module for module in seen.where.modules_run if rule.matches_module(module)}) if rule.module else []
    if rule.module is not None and not inside:
        return f"it decided nothing in this run: no module that {rule.module} matches was called"
    names = [resolve(rule.op)] if rule.op and not any(character in rule.op for character in "*?[") else []
    elsewhere = sorted({row.module or MODEL for row in rows if row.op in names})
    if elsewhere:
        return f"it decided nothing in this run: {rule.op} ran only in {', '.join(elsewhere[:5])}"
    around = sorted({row.op for row in rows if COMPOSITES.get(row.op, frozenset()) & {*names}})
    if around:
        return f"it decided nothing in this run: {rule.op} ran only inside {', '.join(around)}"
    if rule.op is not None:
        return f"it decided nothing in this run: no op that {rule.op} matches was called"
    return "it decided nothing in this run"


def _deciding_storage(model: nn.Module, policy: Policy) -> dict[str, Rule | None]:
    """Return the rule that fixes how each parameter and buffer is stored, by path."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {path: policy.storage(path, path.rpartition(".")[0])[1] for path, _ in named}


def _matched(rule: Rule, ops: Iterable[str], modules: Iterable[str]) -> tuple[frozenset[str], frozenset[str | None]]:
    """Return the ops and the modules of a rule, ``None`` standing for outside any module."""
    if rule.op is None:
        own_ops = frozenset(ops)
    elif any(character in rule.op for character in "*?["):
        own_ops = frozenset(op for op in ops if fnmatch.fnmatchcase(op, rule.op))
    else:
        own_ops = frozenset((resolve(rule.op),))
    if rule.module is None:
        return own_ops, frozenset((None, *modules))
    return own_ops, frozenset(path for path in modules if rule.matches_module(path))


Matched = tuple[frozenset[str], frozenset[str | None]]


def _covering(mine: Matched, earlier: list[tuple[Rule, Matched]]) -> list[str]:
    """Return the earlier rules that together match all that a rule matches; none where something is left."""
    ops, modules = mine
    used: dict[str, None] = {}
    for module in modules:
        left = ops
        for rule, (its_ops, its_modules) in earlier:
            if module in its_modules and left & its_ops:
                left -= its_ops
                used[str(rule)] = None
        if left:
            return []
    return list(used)


# Where no rule reaches ----------------------------------------------------------------------------------


def _unreachable(policy: Policy, rows: tuple[Row, ...], seen: Trace) -> Iterator[Finding]:
    rules = [rule for rule in policy.rules if rule.op is not None]
    for row in rows:
        inside = COMPOSITES.get(row.op, frozenset()) | seen.inner_ops.get((row.module, row.op), set()) - {row.op}
        for rule in rules:
            if str(rule) == row.rule or rule.treatment == row.treatment:
                continue
            named = sorted(op for op in inside if rule.matches(op=op, module=row.module or None))
            # Ops with a decision of their own under an earlier rule would not be this rule's in any case.
            reached = [op for op in named if policy.explain(op, row.module or None).rule is rule]
            if reached:
                where = f"{row.module or MODEL} {row.op}"
                text = (
                    f"the rule {rule} does not reach {', '.join(reached)} inside {row.op}, which gets {row.treatment} "
                    f"as a whole; write {rule.treatment}={row.op}, or call {reached[0]} by itself"
                )
                yield Finding(kind="unreachable", where=where, text=text)


def _fp32_products(policy: Policy, seen: Trace) -> Iterator[Finding]:
    """Name the products that a low policy leaves in FP32, those with the largest share first."""
    total = seen.flops.total()
    if policy.dtype == torch.float32 or not total:
        return
    for (module, op, line, dtype, why), amount in seen.flops.most_common():
        if dtype == "float32":
            where = " ".join((module or MODEL, op, *([f"({line})"] if line else [])))
            text = f"ran in float32: {100 * amount / total:.3g} % of the FLOPs of the forward pass's products"
            yield Finding(kind="FP32 product", where=where, text=f"{text}; {why}" if why else text)


def _fast_paths(model: nn.Module, seen: Trace) -> Iterator[Finding]:
    inside: list[str] = []
    for path, module in model.named_modules():
        function = next((name for kind, name in _FAST_PATHS if isinstance(module, kind)), None)
        if function is None or module.training or path not in seen.where.modules_run:
            continue
        if not any(not outer or path.startswith(f"{outer}.") for outer in inside):
            text = (
                f"in eval() and under no_grad it may run as {function}, one C++ function which no op rule enters; this "
                "trace has gradients on, as training has, and shows its parts"
            )
            yield Finding(kind="fast path", where=path or MODEL, text=text)
        inside.append(path)
