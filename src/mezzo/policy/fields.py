"""The fields of a policy: their vocabulary, their text, each level's values, and what cannot go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, get_args

import torch

from mezzo.errors import MOST_PROBLEMS, PolicyError, nearest, shown
from mezzo.policy.rules import Rule, format_rules, parse_rules, rule_keys
from mezzo.scale import LossScale
from mezzo.tensors import LOW, dtype_name

__all__ = [
    "FIELDS", "LEVELS", "Level", "as_dtype", "coerce", "default_dtype", "impossible_combinations", "level_fields",
    "read", "show", "text_of", "wrong_values",
]  # fmt: skip

Level = Literal["O0", "O1", "O2", "O3"]
#: The optimisation levels, in the field's numbering (apex).
LEVELS: Final[tuple[Level, ...]] = get_args(Level)

_DTYPES: Final[dict[str, torch.dtype]] = {
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
}  # fmt: skip
_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "level": LEVELS,
    "accumulate": ("fp32", "native"),
    "lists": ("portable", "device"),
    "norms": ("fp32", "fp32_math"),
    "emulate": ("auto", True, False),
}
_BOOLEANS: Final = ("autocast", "keep_batchnorm_fp32", "master_weights")

#: Every field but the level, the dtype and the rules, in the order in which a policy's text has them.
FIELDS: Final = (
    "param_dtype", "output_dtype", "autocast", "keep_batchnorm_fp32", "master_weights", "loss_scale", "accumulate",
    "lists", "norms", "emulate",
)  # fmt: skip
#: Of a policy's text, in characters: a real one has hundreds.
_LONGEST_TEXT: Final = 100_000
_NAMES: Final = ("level", "dtype", *FIELDS, "rules")


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


def default_dtype(level: str) -> str:
    """Return the dtype that a level computes in where none is named."""
    return "float32" if level == "O0" else "float16"


def wrong_values(values: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield an error for each field whose value has the wrong type or is outside its vocabulary."""
    return (problem for name, value in values.items() if (problem := _wrong_value(name, value)))


def _wrong_value(name: str, value: Any) -> PolicyError | None:
    """Return the error for one field's value, if it is wrong."""
    if name in ("dtype", "param_dtype", "output_dtype"):
        known = isinstance(value, torch.dtype) and value in _DTYPES.values()
        known = known or (name == "output_dtype" and value is None)
        return None if known else _unknown_dtype(name, value)
    if name == "loss_scale":
        text = f"loss_scale is {shown(value)}, not a LossScale"
        return None if isinstance(value, LossScale) else PolicyError(text, write="policy.evolve(loss_scale=1024)")
    if name == "rules":
        if isinstance(value, tuple) and all(isinstance(rule, Rule) for rule in value):
            return _too_many(value)
        return PolicyError("rules must be a tuple of Rule", write='rules=(Rule("fp32", op="softmax"),)')
    choices = _CHOICES.get(name, (True, False))
    # 1 == True, but a number is no answer to a yes-or-no question.
    known = isinstance(value, str | bool) and value in choices
    return None if known else _unknown_value(name, value, choices)


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
    if level == "O0" and not is_fp32:
        yield PolicyError(f"O0 cannot compute in {name}", why="O0 is the FP32 reference", write=f"O1,dtype={name}")
    if level != "O0" and is_fp32:
        yield PolicyError(
            f"{level} cannot compute in float32", why="nothing would be mixed", write="O0, or dtype=bfloat16"
        )
    if is_fp32 and values["autocast"]:
        yield PolicyError(
            f"{level} with dtype=float32 cannot autocast",
            why="autocast casts to a low-precision dtype",
            write="O1",
        )
    if low and param_dtype != dtype:
        yield PolicyError(
            f"weights cannot be {dtype_name(param_dtype)} while ops compute in {name}",
            why="each use would cast between two 16-bit formats, which is as lossy as both together",
            write=f"param_dtype={name} or param_dtype=float32",
        )
    if level != "O0" and dtype in LOW and not low and not values["autocast"]:
        yield PolicyError(
            f"{level} with float32 weights and no autocast has nothing in {name}",
            why="neither the weights nor the ops would be low precision",
            write=f"autocast=true, or param_dtype={name}",
        )
    if values["master_weights"] and not low:
        yield PolicyError(
            "master weights need low-precision weights",
            why="float32 weights are their own masters",
            write=f"O2,dtype={name if dtype in LOW else 'float16'}, or master_weights=false",
        )
    if not values["keep_batchnorm_fp32"] and not low:
        yield PolicyError(
            "keep_batchnorm_fp32=false has no effect on float32 weights",
            why="only weights stored in low precision can take batch norm with them",
            write="O3, or O2,keep_batchnorm_fp32=false",
        )
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


def coerce(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn text and shorthand into the fields' own types; unknown fields are errors."""
    for name in fields:
        if name not in _NAMES:
            raise _unknown_key(name)
    converters: dict[str, Callable[[Any], Any]] = {
        "dtype": lambda value: as_dtype("dtype", value),
        "param_dtype": lambda value: as_dtype("param_dtype", value),
        "output_dtype": lambda value: None if value is None or _is(value, "none") else as_dtype("output_dtype", value),
        "loss_scale": LossScale.parse,
        "rules": lambda value: tuple(value) if isinstance(value, list) else value,
        **dict.fromkeys((*_BOOLEANS, "emulate"), _as_boolean),
    }
    return {name: converters.get(name, lambda value: value)(value) for name, value in fields.items()}


def _is(value: Any, word: str) -> bool:
    return isinstance(value, str) and value == word


def as_dtype(name: str, value: Any) -> torch.dtype:
    """Read a dtype from its name; the field is named in the error."""
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
        return _DTYPES[value.removeprefix("torch.")]
    raise _unknown_dtype(name, value)


def _as_boolean(value: Any) -> Any:
    """Read ``true`` and ``false``; anything else is left for the check of the field's vocabulary."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def text_of(value: Any) -> str:
    """Write one value as a policy's text has it."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def show(value: Any) -> str:
    """Write one value for people: rules as text, too."""
    return (format_rules(value) or "no rules") if isinstance(value, tuple) else text_of(value)


def read(text: str) -> tuple[Level, str, dict[str, Any]]:
    """Read a policy's text; see :meth:`mezzo.Policy.parse`.

    Returns:
        The level, the dtype, and the other fields that the text has.
    """
    if len(text) > _LONGEST_TEXT:
        raise PolicyError(
            f"policy {shown(text)} is too long",
            why=f"a policy's text has at most {_LONGEST_TEXT:,} characters",
            write="globs, such as fp32_module=blocks.*, in place of names; or Policy.load(path)",
        )
    level, *items = _split(text)
    if level not in LEVELS:
        raise PolicyError(
            f"policy {shown(text)}: unknown level {shown(level)}",
            why=nearest(level, LEVELS),
            write='a level first, such as "O1,dtype=bfloat16"',
        )
    problems: list[PolicyError] = []
    fields: dict[str, Any] = {}
    rules: list[Rule] = []
    for item in items:
        if len(problems) == MOST_PROBLEMS:
            break  # each takes a look through a vocabulary
        key, equals, value = item.partition("=")
        try:
            if not equals or not value:
                raise PolicyError(f"{shown(item)} is not key=value", write=f"{key}=…")
            if key in fields:
                raise PolicyError(f"the key {key!r} stands twice", write=f"one {key}=…")
            if key in rule_keys():
                rules += parse_rules(key, value)
            elif key not in ("dtype", *FIELDS):
                raise _unknown_key(key)
            elif problem := _wrong_value(key, coerce({key: value})[key]):
                raise problem
            else:
                fields[key] = value
        except PolicyError as problem:
            problems.append(problem)
    if problems:
        raise PolicyError(f"policy {shown(text)}: {PolicyError.together(problems)}")
    dtype = fields.pop("dtype", default_dtype(level))
    return level, dtype, {**fields, "rules": tuple(rules)}


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses, so that a loss scale's text can hold some."""
    parts, begin, depth = [], 0, 0
    text = "".join(text.split())
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _unknown_key(key: str) -> PolicyError:
    """Build the error for a key that no policy has."""
    words = ("dtype", *FIELDS, *rule_keys())
    why = nearest(key, words)
    return PolicyError(f"unknown policy key {shown(key)}", why=why, write="O1,dtype=bfloat16,fp32=softmax")


def _unknown_dtype(name: str, value: Any) -> PolicyError:
    words = ("float16", "bfloat16", "float32")
    return PolicyError(
        f"unknown {name} {shown(_word(value))}", why=nearest(_word(value), words), write=f'{name}="bfloat16"'
    )


def _unknown_value(name: str, value: Any, choices: tuple[Any, ...]) -> PolicyError:
    words = [text_of(choice) for choice in choices]
    why = nearest(_word(value), words)
    return PolicyError(f"unknown {name} {shown(_word(value))}", why=why, write=f"{name}={words[0]}")


def _word(value: Any) -> str:
    """Return what to compare with a vocabulary."""
    return text_of(value) if isinstance(value, str | torch.dtype | bool | None) else shown(value)
