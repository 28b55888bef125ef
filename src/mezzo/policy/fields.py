"""The fields of a policy: their vocabulary, their text, each level's values, and what cannot go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

import torch

from mezzo.errors import MOST_PROBLEMS, PolicyError, closest, nearest, shown
from mezzo.policy.rules import RULE_KEYS, Rule, format_rules, parse_rules
from mezzo.scale import LossScale
from mezzo.tensors import LOW, dtype_name

__all__ = ["FIELDS", "LEVELS", "WORDS", "Level", "impossible_combinations", "level_fields", "read", "replaced",
           "resolved", "text_of", "wrong_values"]  # fmt: skip

Level = Literal["O0", "O1", "O2", "O3"]
#: The optimisation levels, in the field's numbering (apex).
LEVELS: Final[tuple[Level, ...]] = get_args(Level)

_DTYPES: Final[dict[str, Any]] = {
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
}  # fmt: skip
_BOOLEANS: Final[dict[str, Any]] = {"true": True, "false": False}
#: What each field can be, by the words for it.
WORDS: Final[dict[str, dict[str, Any]]] = {
    "level": {level: level for level in LEVELS},
    **dict.fromkeys(("dtype", "param_dtype"), _DTYPES),
    "output_dtype": {**_DTYPES, "none": None},
    **dict.fromkeys(("autocast", "keep_batchnorm_fp32", "master_weights"), _BOOLEANS),
    "accumulate": {"fp32": "fp32", "native": "native"},
    "lists": {"portable": "portable", "device": "device"},
    "norms": {"fp32": "fp32", "fp32_math": "fp32_math"},
    "emulate": {"auto": "auto", **_BOOLEANS},
}  # fmt: skip
#: Of a policy's text, in characters: a real one has hundreds.
_LONGEST_TEXT: Final = 100_000


def level_fields(level: Level, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a level sets."""
    low = level in ("O2", "O3")
    scale: LossScale = LossScale.none()
    if dtype == torch.float16 and level != "O0":
        scale = LossScale.constant(1.0) if level == "O3" else LossScale.dynamic()
    return {
        "level": level,
        "dtype": dtype,
        "param_dtype": dtype if low else torch.float32,
        "output_dtype": torch.float32 if low else None,
        "autocast": level == "O1",
        "keep_batchnorm_fp32": level != "O3",
        "master_weights": level == "O2",
        "loss_scale": scale,
        "accumulate": "fp32",
        "lists": "portable",
        "norms": "fp32",
        "emulate": "auto",
    }


#: Every field but the level, the dtype and the rules, in the order in which a policy's text has them.
FIELDS: Final = tuple(level_fields("O0", torch.float32))[2:]


def wrong_values(values: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield an error for each field whose value has the wrong type or is outside its vocabulary."""
    return (problem for name, value in values.items() if (problem := _wrong_value(name, value)))


def _wrong_value(name: str, value: Any) -> PolicyError | None:
    """Return the error for one field's value, if it is wrong."""
    if name == "loss_scale":
        text = f"loss_scale is {shown(value)}, not a LossScale"
        return None if isinstance(value, LossScale) else PolicyError(text, write="policy.evolve(loss_scale=1024)")
    if name == "rules":
        if isinstance(value, tuple) and all(isinstance(rule, Rule) for rule in value):
            return _too_many(value)
        return PolicyError("rules must be a tuple of Rule", write='rules=(Rule("fp32", op="softmax"),)')
    known = WORDS[name].values()
    is_word = isinstance(value, str | torch.dtype | bool | None)  # 1 == True, and answers no yes-or-no question
    if is_word and value in known:
        return None
    words = list(dict.fromkeys(map(text_of, known)))
    word = text_of(value) if is_word else shown(value)
    given = "" if isinstance(value, torch.dtype) else word  # a dtype is no misspelt word
    write = f"{name}={closest(given, words) or words[0]}"
    return PolicyError(f"unknown {name} {shown(word)}", why=nearest(given, words), write=write)


def _too_many(rules: tuple[Rule, ...]) -> PolicyError | None:
    """Refuse rules that no text could hold: a session's state has its policy as text."""
    length = len(format_rules(rules)) + 1000  # the other fields take less
    if length <= _LONGEST_TEXT:
        return None
    return PolicyError(
        f"{len(rules):,} rules are too many",
        why=f"their text has {length:,} characters, and a policy's at most {_LONGEST_TEXT:,}",
        write="globs, such as modules=['blocks.*'], in place of names",
    )


def impossible_combinations(values: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield an error, with its reason, for each combination that cannot be carried out.

    Args:
        values: The value of every field; none is wrong by itself.
    """
    level, dtype, param_dtype, scale = (values[name] for name in ("level", "dtype", "param_dtype", "loss_scale"))
    low, is_fp32, name = param_dtype in LOW, dtype == torch.float32, dtype_name(dtype)
    problems = (  # whether it is there, what, why, what to write
        (level == "O0" and not is_fp32,
         f"O0 cannot compute in {name}", "O0 is the FP32 reference", f"O1,dtype={name}"),
        (level != "O0" and is_fp32,
         f"{level} cannot compute in float32", "nothing would be mixed", "O0, or dtype=bfloat16"),
        (is_fp32 and values["autocast"],
         f"{level} with dtype=float32 cannot autocast", "autocast casts to a low-precision dtype", "O1"),
        (low and param_dtype != dtype,
         f"weights cannot be {dtype_name(param_dtype)} while ops compute in {name}",
         "each use would cast between two 16-bit formats, which is as lossy as both together",
         f"param_dtype={name} or param_dtype=float32"),
        (level != "O0" and dtype in LOW and not low and not values["autocast"],
         f"{level} with float32 weights and no autocast has nothing in {name}",
         "neither the weights nor the ops would be low precision", f"autocast=true, or param_dtype={name}"),
        (values["master_weights"] and not low,
         "master weights need low-precision weights", "float32 weights are their own masters",
         f"O2,dtype={name if dtype in LOW else 'float16'}, or master_weights=false"),
        (not values["keep_batchnorm_fp32"] and not low,
         "keep_batchnorm_fp32=false has no effect on float32 weights",
         "only weights stored in low precision can take batch norm with them", "O3, or O2,keep_batchnorm_fp32=false"),
    )  # fmt: skip
    yield from (PolicyError(what, why=why, write=write) for is_there, what, why, write in problems if is_there)
    yield from _contradictions(values["rules"])
    changes_gradients = scale.mode == "dynamic" or (scale.mode == "constant" and scale.init != 1.0)
    if param_dtype == torch.float16 and not values["master_weights"] and changes_gradients:
        yield PolicyError(
            "fp16 gradients cannot be unscaled in fp16",
            where=f"{level},dtype=float16,master_weights=false,loss_scale={scale}",
            why="dividing them by the scale in float16 flushes small ones to zero; FP32 masters take them in FP32",
            write="O2,dtype=float16   # keeps FP32 masters; or loss_scale=1",
        )


def _contradictions(rules: tuple[Rule, ...]) -> Iterator[PolicyError]:
    """Yield an error for each thing that is named twice with different treatments."""
    seen: dict[object, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.selector, rule)
        if first.treatment != rule.treatment:
            yield PolicyError(
                f"{rule.name!r} is named twice, with different treatments",
                where=f"{first} and {rule}",
                why="the first match wins, so the second would never decide",
                write=f"one of the two, such as {first}",
            )


# Values and their text ----------------------------------------------------------------------------


def resolved(level: Level, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field: what is given, by its word or shorthand, and what the level says of the others.

    Raises:
        PolicyError: A field is unknown, the dtype or the loss scale cannot be read.
    """
    dtype = _value("dtype", given.get("dtype", "float32" if level == "O0" else "float16"))
    if problem := _wrong_value("dtype", dtype):
        raise problem
    return level_fields(level, dtype) | replaced(given)


def replaced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are given, by their words or shorthands.

    Raises:
        PolicyError: As :func:`resolved`.
    """
    for name in given:
        if name not in ("level", "dtype", *FIELDS, "rules"):
            raise _unknown_key(name)
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    """Read the value of a field; what is no word of the field's is left to be refused."""
    if name == "loss_scale":
        return LossScale.parse(value)
    if name == "rules":
        return tuple(value) if isinstance(value, list) else value
    return WORDS[name].get(value.removeprefix("torch.").lower(), value) if isinstance(value, str) else value


def text_of(value: Any) -> str:
    """Write one value as a policy's text has it."""
    if isinstance(value, tuple):
        return format_rules(value) or "no rules"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def read(text: str) -> tuple[Level, dict[str, Any]]:
    """Read a policy's text; see :meth:`mezzo.Policy.parse`.

    Returns:
        The level, and the fields that the text has.
    """
    if len(text) > _LONGEST_TEXT:
        raise PolicyError(
            f"policy {shown(text)} is too long",
            why=f"a policy's text has at most {_LONGEST_TEXT:,} characters",
            write="globs, such as fp32_module=blocks.*, in place of names; or Policy.load(path)",
        )
    level, *items = _split(text)
    if level not in LEVELS:
        is_path = "/" in level or level.endswith(".toml")
        write = "Policy.load(path)   # of a file" if is_path else 'a level first, such as "O1,dtype=bfloat16"'
        what = f"policy {shown(text)}: unknown level {shown(level)}"
        raise PolicyError(what, why=nearest(level, LEVELS), write=write)
    problems: list[PolicyError] = []
    fields: dict[str, Any] = {}
    rules: list[Rule] = []
    for item in items:
        if len(problems) == MOST_PROBLEMS:
            break  # each takes a look through a vocabulary
        key, equals, value = item.partition("=")
        if item in _DTYPES:  # a bare word for one, as in O1,bf16
            key, equals, value = "dtype", "=", item
        try:
            if not equals or not value:
                raise _no_pair(item, key)
            if key in fields:
                raise PolicyError(f"the key {key!r} stands twice", write=f"one {key}=…")
            if key in RULE_KEYS:
                rules += parse_rules(key, value)
            elif key not in ("dtype", *FIELDS):
                raise _unknown_key(key)
            elif problem := _wrong_value(key, _value(key, value)):
                raise problem
            else:
                fields[key] = value
        except PolicyError as problem:
            problems.append(problem)
    if problems:
        raise PolicyError(f"policy {shown(text)}: {PolicyError.together(problems)}")
    return level, {**fields, "rules": tuple(rules)}


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses, so that a loss scale's text can hold some."""
    parts, begin, depth = [], 0, 0
    text = "".join(text.split())
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    if depth > 0:
        raise PolicyError(f"policy {shown(text)}: a bracket is not closed", write="O1,loss_scale=dynamic(init=1024)")
    return [*parts, text[begin:]]


def _no_pair(item: str, key: str) -> PolicyError:
    """Build the error for an item without a value: a key, or a word that is not even a dtype's."""
    keys = ["dtype", *FIELDS, *RULE_KEYS]
    if key in keys:
        return PolicyError(f"{shown(item)} is not key=value", write=f"{key}=…")
    return PolicyError(f"{shown(item)} is neither a dtype nor key=value", why=nearest(key, [*_DTYPES, *keys]))


def _unknown_key(key: str) -> PolicyError:
    """Build the error for a key that no policy has."""
    words = ("dtype", *FIELDS, *RULE_KEYS)
    why = nearest(key, words)
    return PolicyError(f"unknown policy key {shown(key)}", why=why, write="O1,dtype=bfloat16,fp32=softmax")
