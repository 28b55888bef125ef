"""What lists of Paddle's ops come to: the treatment of each op of torch's, and the policy that has them as rules.

The names themselves stand in :mod:`mezzo.policy.ops`, where every policy understands them; here is how far each
reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import torch

from mezzo.errors import PolicyError, nearest, raise_together, shown
from mezzo.policy.ops import OPS, VIEWS, Op, Treatment, resolve
from mezzo.policy.ops.lists import PADDLE, PADDLE_ALIASES
from mezzo.policy.policy import Policy
from mezzo.policy.rules import Rule

__all__ = ["PADDLES_LEVELS", "Gray", "checked_names", "policy_of", "rules"]

#: What an op on neither list gets: the widest of its inputs' dtypes, FP32, or the low dtype.
Gray = Literal["promote", "fp32", "low"]

_LINES: Final = "1d 2d 3d".split()
_POOLS: Final = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_NEAREST: Final = ("upsample_nearest", "_upsample_nearest_exact")
_PRODUCTS: Final = ("matmul", "mm", "linear")
#: Where one op of Paddle's is several of torch's.
_SEVERAL: Final[Mapping[str, tuple[str, ...]]] = {
    "conv2d": ("conv2d", "conv1d"),  # Paddle's conv1d is its conv2d on an image of one line
    "matmul": _PRODUCTS, "matmul_v2": _PRODUCTS, "mul": _PRODUCTS,
    "pool2d": tuple(f"{pool}{line}" for pool in _POOLS for line in _LINES[:2]),
    "pool3d": tuple(f"{pool}3d" for pool in _POOLS),
    "rnn": ("lstm", "gru", "rnn_tanh", "rnn_relu"),
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "frobenius_norm": ("frobenius_norm", "linalg_matrix_norm"),
    "huber_loss": ("huber_loss", "smooth_l1_loss"),
    "nearest_interp_v2": tuple(f"{kind}{line}" for kind in _NEAREST for line in _LINES),
    "bilinear_interp_v2": ("upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    "bicubic_interp_v2": ("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
}  # fmt: skip
#: What Paddle composes of other ops, by the one that its lists may name: it decides for the whole.
_MADE_OF: Final[Mapping[str, str]] = {
    op: part
    for part, ops in {
        "matmul": "einsum scaled_dot_product_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        "mean": """
            l1_loss mse_loss poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div margin_ranking_loss
            multilabel_margin_loss soft_margin_loss multi_margin_loss""",
        "sum": "cosine_similarity trapezoid cumulative_trapezoid sum_to_size nuclear_norm linalg_vecdot",
        "norm": "pairwise_distance norm_except_dim linalg_norm linalg_vector_norm cdist pdist",
        "pow": "ldexp",
        "log": "mvlgamma",
    }.items()
    for op in ops.split()
}
_NEITHER: Final = "on neither of Paddle's lists"
#: On neither list these follow their input alone, whatever their weights are; Paddle's kernels compute them in FP32.
_INPUT_ALONE: Final = frozenset({"layer_norm", "native_layer_norm", "cross_entropy"})

_EXTRA: Final = PADDLE["extra black list"]
#: What is computed in FP32 at each of Paddle's levels, and what ops on neither list get; nothing is cast in O0.
_LISTS: Final[Mapping[str, tuple[frozenset[str], Gray]]] = {
    "O1": (PADDLE["black list"] | _EXTRA, "promote"), "O2": (_EXTRA, "promote"), "OD": (frozenset(), "fp32"),
    "O0": (frozenset(), "promote"),
}  # fmt: skip
#: What a misspelt name may have meant.
_WORDS: Final = (*PADDLE_ALIASES, *_SEVERAL, *OPS)
PADDLES_LEVELS: Final = tuple(_LISTS)


def policy_of(level: str, dtype: torch.dtype, *, use_promote: bool = True, **custom: Any) -> Policy:
    """Return the policy that gives each op what a region of ``paddle.amp.auto_cast`` gives it.

    Args:
        level: ``O0``, ``OD``, ``O1`` or ``O2``.
        dtype: The low one.
        use_promote: Whether, in O2, an op with an FP32 input computes in FP32.
        **custom: The user's lists, as of :func:`rules`.

    Raises:
        PolicyError: As :func:`rules` does.

    Example:
        >>> policy_of("O1", torch.bfloat16, custom_white_list=["softmax"]).explain("softmax").treatment
        'low'
    """
    black, gray = _LISTS[level]
    made = rules(PADDLE["white list"], black, "low" if level == "O2" and not use_promote else gray, **custom)
    return Policy.O0() if level == "O0" else Policy.O1(dtype, rules=made)


def rules(
    white: Iterable[str],
    black: Iterable[str],
    gray: Gray,
    *,
    level: Literal["O1", "O2"] = "O1",
    custom_white_list: Any = None,
    custom_black_list: Any = None,
) -> tuple[Rule, ...]:
    """Return the rules that give each op what Paddle's lists give it.

    Args:
        white: The system's own list of ops to compute in low precision, in Paddle's names.
        black: That of ops to compute in FP32.
        gray: What ops on neither get.
        level: The level of the policy that the rules are for: O1 casts by the op table, O2 not one op by itself.
        custom_white_list: The user's additions, before which the system's lists give way.
        custom_black_list: Likewise.

    Returns:
        The rules, the user's first. With ``gray="promote"`` only ops that the level would treat otherwise have one;
        else one for all ops comes last.

    Raises:
        PolicyError: A name that no op has, or an op in both of the user's lists; all of them at once.
    """
    own = _by_user(custom_white_list, custom_black_list)
    listed: dict[str, Treatment] = {op: "low" for name in white for op in _reached(name)}
    listed |= {op: "fp32" for name in black for op in _reached(name)}
    decided = listed | {op: treatment for op, (treatment, _) in own.items()}
    made = [Rule(treatment, op=op, reason=why) for op, (treatment, why) in own.items()]
    for op in OPS.values():
        usual = gray if gray != "promote" else op.portable if level == "O1" else "native"
        if op.name not in own and op.name not in VIEWS and (wanted := _treatment(op, decided, gray)) != usual:
            made.append(Rule(wanted, op=op.name, reason=_why(op, listed)))
    made.sort(key=lambda rule: (rule.op not in own, rule.treatment))
    return (*made, *([] if gray == "promote" else [Rule(gray, op="*", reason=_NEITHER)]))


def _treatment(op: Op, decided: Mapping[str, Treatment], gray: Gray) -> Treatment:
    part = op.name if op.name in decided else _MADE_OF.get(op.name, op.name)
    if part in decided:
        return decided[part]
    if op.parts:
        return "native"  # its parts decide
    if gray == "fp32":
        return "fp32"
    if "no low kernel" in f"{op.reason} {op.source}":
        return op.portable  # as Paddle, which computes in FP32 what has no other kernel
    if gray == "low":
        return "low"
    if op.name in _INPUT_ALONE:
        return "fp32_math"
    return op.portable if op.portable in ("native", "promote") or op.name.startswith("_") else "promote"


def _why(op: Op, listed: Mapping[str, Treatment]) -> str:
    part = op.name if op.name in listed else _MADE_OF.get(op.name, op.name)
    if part not in listed:
        return _NEITHER
    made = f": Paddle computes it with {part}" if part != op.name else ""
    return f"on Paddle's {'white' if listed[part] == 'low' else 'black'} list{made}"


# The user's lists -------------------------------------------------------------------------------------


def checked_names(key: str, names: Any) -> tuple[str, ...]:
    """Return a list of names that a user gave, or nothing for ``None``.

    Args:
        key: What the list is called.
        names: The list.

    Raises:
        PolicyError: It is no list, tuple or set of texts.
    """
    if names is None:
        return ()
    if isinstance(names, list | tuple | set | frozenset) and all(isinstance(name, str) for name in names):
        return tuple(names) if isinstance(names, list | tuple) else tuple(sorted(names))
    write = f"{key}=[{names!r}]" if isinstance(names, str) else f'{key}=["softmax"]'
    raise PolicyError(f"{key} is {shown(names)}, not a list of names", write=write)


def _by_user(white: Any, black: Any) -> dict[str, tuple[Treatment, str]]:
    """Return what the user's lists say of each op, and which list it was."""
    found: dict[str, tuple[Treatment, str]] = {}
    called: dict[str, str] = {}
    problems: list[PolicyError] = []
    for key, treatment, names in (("custom_white_list", "low", white), ("custom_black_list", "fp32", black)):
        for name in checked_names(key, names):
            try:
                ops = tuple(_reached(name))
            except PolicyError as problem:
                problems.append(PolicyError(f"{key}: {problem}"))
                continue
            for op in ops:
                if found.setdefault(op, (treatment, key))[1] != key:  # type: ignore[arg-type]
                    problems.append(_in_both(called[op], name, op))
                    break
                called.setdefault(op, name)
    raise_together(problems)
    return found


def _in_both(first: str, second: str, op: str) -> PolicyError:
    same = "" if first == second else f"; {second!r} in custom_black_list is the same op of torch's, {op}"
    return PolicyError(
        f"{first!r} is in both lists",
        where=f"custom_white_list and custom_black_list{same}",
        why="an op is computed either in low precision or in FP32",
        write=f'one of the two; in mezzo\'s words policy.low("{op}") or policy.fp32("{op}")',
    )


def _reached(name: str) -> Iterator[str]:
    """Yield the ops of torch's behind a name of Paddle's."""
    if name in _SEVERAL:
        yield from _SEVERAL[name]
        return
    try:
        yield resolve(name if ":" in name else f"paddle:{name}")
    except PolicyError as problem:
        if not str(problem).startswith("unknown op"):
            raise PolicyError(str(problem).replace("'paddle:", "'")) from None
        question, _, _ = nearest(name, _WORDS).partition("valid:")  # all of them would be too long to read
        raise PolicyError(
            f"unknown op {shown(name)}",
            why=f"{question}neither Paddle's names nor torch's have it",
            write="the name of an op in Paddle's spelling, or in torch's",
        ) from None
