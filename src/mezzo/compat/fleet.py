"""Paddle Fleet's ``DistributedStrategy.amp_configs``, read as a policy.

What ran with ``strategy.amp = True`` is a session of mezzo's here::

    policy = fleet.policy({"init_loss_scaling": 32768, "custom_white_list": ["softmax", "gelu"]})
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mezzo.errors import PolicyError, nearest, not_switches, raise_together, shown
from mezzo.policy import Policy, Rule
from mezzo.policy.ops.lists import FLEET, PADDLE
from mezzo.policy.paddle import checked_names, rules
from mezzo.scale import LossScale
from mezzo.scale.words import PADDLES_WORDS, from_paddles_words

__all__ = ["policy"]

_LISTS: Final = ("custom_white_list", "custom_black_list")
_SWITCHES: Final = (
    "use_dynamic_loss_scaling", "use_pure_fp16", "use_pure_bf16", "use_fp16_guard", "use_optimizer_fp16",
)  # fmt: skip
_KEYS: Final = (*PADDLES_WORDS, *_LISTS, "custom_black_varnames", *_SWITCHES)
#: Keys of Paddle's other configurations, and what says the same here.
_ELSEWHERE: Final = {
    "level": '"use_pure_fp16": True is Fleet\'s O2, and without it there is O1',
    "dtype": '"use_pure_bf16": True; or policy.evolve(dtype="bfloat16", loss_scale=None)',
}


def policy(amp_configs: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy that Fleet's ``amp_configs`` stands for.

    White-listed ops run in FP16, black-listed ones in FP32, and the rest in FP16 only if all their inputs are. The loss
    scale follows Fleet's rule with Fleet's defaults. The optimizer is whatever the session gets.

    Args:
        amp_configs: Any of Fleet's keys; what is left out has Fleet's default.

            - ``init_loss_scaling`` (32768), ``incr_every_n_steps`` (1000), ``decr_every_n_nan_or_inf`` (2),
              ``incr_ratio`` (2.0), ``decr_ratio`` (0.5), ``use_dynamic_loss_scaling`` (True): the loss scale.
            - ``custom_white_list``, ``custom_black_list``: ops, in Paddle's names.
            - ``custom_black_varnames``: parameters to keep in FP32, with every op that reads one; paths in the model,
              such as ``"head.weight"``, or globs. Paddle's own names (``linear_0.w_0``) say nothing here.
            - ``use_pure_fp16``, ``use_pure_bf16`` (False): O2. Weights are stored in 16 bits, with FP32 masters, and
              every op of the model computes in that format but those of ``custom_black_list`` and of Paddle's extra
              black list. What the model returns is FP32, and so is the loss.
            - ``use_fp16_guard``, ``use_optimizer_fp16``: accepted where they ask for nothing.

    Returns:
        A policy of the level O1, or O2 if pure.

    Raises:
        PolicyError: Every problem of the configuration: unknown keys and ops with the nearest known one, values that
            are impossible, an op in both lists.

    Example:
        >>> from mezzo.compat import fleet
        >>> policy = fleet.policy({"custom_white_list": ["softmax"], "custom_black_varnames": ["head.weight"]})
        >>> policy.explain("softmax").treatment, policy.explain("mean").treatment, str(policy.loss_scale)
        ('low', 'fp32', 'dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,ceiling=none)')
    """
    given = {} if amp_configs is None else amp_configs
    if not isinstance(given, Mapping):
        raise PolicyError(f"amp_configs is {shown(given)}, not a mapping", write='fleet.policy({"incr_ratio": 2})')
    raise_together([*_problems(given)])
    pure = "float16" if given.get("use_pure_fp16") else "bfloat16" if given.get("use_pure_bf16") else None
    black = PADDLE["extra black list"] | (set() if pure else FLEET["black list"])
    custom = {key: given.get(key) for key in _LISTS}
    ops = rules(FLEET["white list"], black, "promote", level="O2" if pure else "O1", **custom)
    scale = None if pure == "bfloat16" else _scale(given)
    return (Policy.O2 if pure else Policy.O1)(pure or "float16", loss_scale=scale, rules=(*_kept(given), *ops))


def _problems(given: Mapping[str, Any]) -> Iterator[PolicyError]:
    for key in (key for key in given if key not in _KEYS):
        word = key if isinstance(key, str) else shown(key)
        what = f"unknown key {shown(key)} in amp_configs"
        yield PolicyError(what, why=nearest(word, _KEYS), write=_ELSEWHERE.get(word, ""))
    yield from not_switches(**{key: given[key] for key in _SWITCHES if key in given})
    yield from from_paddles_words("fleet", given, "amp_configs")[1]
    is_pure, guard = given.get("use_pure_fp16"), given.get("use_fp16_guard")
    for is_there, what, why, write in (
        (is_pure and given.get("use_pure_bf16"), "use_pure_fp16 and use_pure_bf16 are both True",
         "weights are stored in one of the two formats", "one of them"),
        (is_pure and guard, "use_fp16_guard has no meaning here",
         "it confines FP16 to what a static program builds under fp16_guard(); there is no program here",
         'nothing: "with amp.autocast():" is where FP16 is; or custom_black_varnames for what stays FP32'),
        (given.get("use_optimizer_fp16"), "use_optimizer_fp16 has no meaning here",
         "the optimizer decides what its own state is kept in", 'mezzo.optim.AdamW(…, state_dtype="bfloat16")'),
    ):  # fmt: skip
        if is_there:
            yield PolicyError(what, where="amp_configs", why=why, write=write)
    for of in (_kept, lambda given: rules((), (), "promote", **{key: given.get(key) for key in _LISTS})):
        try:
            of(given)
        except PolicyError as problem:
            yield problem


def _kept(given: Mapping[str, Any]) -> tuple[Rule, ...]:
    key = "custom_black_varnames"
    return tuple(Rule("fp32", param=name, reason=key) for name in checked_names(key, given.get(key)))


def _scale(given: Mapping[str, Any]) -> LossScale:
    scale, _ = from_paddles_words("fleet", given, "amp_configs")
    return LossScale.constant(scale.init) if given.get("use_dynamic_loss_scaling") is False else scale
