"""The fields of a policy: their vocabulary, their text, each level's values, and what cannot go together."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, get_args

import torch

from mezzo import files
from mezzo.errors import MOST_PROBLEMS, PolicyError, closest, nearest, printable, shown
from mezzo.policy.ops import QUANTISED
from mezzo.policy.rules import (
    RULE_KEYS,
    Rule,
    both,
    format_rules,
    is_open,
    is_rule,
    parse_rules,
    separated,
    split,
)
from mezzo.scale import LossScale
from mezzo.tensors import DTYPES, LOW, dtype_name, dtype_of

Level = Literal["O0", "O1", "O2", "O3"]
#: The optimisation levels, in the field's numbering (apex).
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
#: The words that a policy's text may begin with, in lower case: the level that each stands for, and the dtype where it
#: says one. A dtype alone is O1 in it; the words with a dash are Lightning's.
OPENINGS: Final[dict[str, tuple[Level, torch.dtype | None]]] = {
    **{level.lower(): (level, None) for level in LEVELS},
    **{word: ("O1" if dtype in LOW else "O0", dtype) for word, dtype in DTYPES.items()},
    "bf16-mixed": ("O1", torch.bfloat16), "bf16-true": ("O3", torch.bfloat16),
    "16": ("O1", torch.float16), "16-mixed": ("O1", torch.float16), "16-true": ("O3", torch.float16),
    "32": ("O0", torch.float32), "32-true": ("O0", torch.float32),
}  # fmt: skip

#: What the published recipe of NVFP4 adds to its formats: random Hadamard transforms of what weight gradients are made
#: of, gradients rounded at random, and weights in blocks of two dimensions.
_TRICKS: Final = ("rht", "stochastic", "2d")
_BOOLEANS: Final[dict[str, Any]] = {"true": True, "false": False}
#: What each field can be, by the words for it.
WORDS: Final[dict[str, dict[str, Any]]] = {
    "level": {level.lower(): level for level in LEVELS},
    **dict.fromkeys(("dtype", "param_dtype"), DTYPES),
    "output_dtype": {**DTYPES, "none": None},
    "keep_batchnorm_fp32": _BOOLEANS,
    "lists": {"portable": "portable", "device": "device"},
    "norms": {"fp32": "fp32", "fp32_math": "fp32_math"},
    "emulate": {"auto": "auto", **_BOOLEANS},
    "fp8_recipe": {"tensorwise": "tensorwise", "rowwise": "rowwise", "delayed": "delayed"},
    "fp8_amax": {"max": "max", "latest": "latest"},
    "low_products": {"none": "none", "wgrad": "wgrad", "forward": "forward"},
    "nvfp4_tricks": {
        "+".join(words): "+".join(trick for trick in _TRICKS if trick in words) or "none"
        for count in range(4) for words in itertools.permutations(_TRICKS, count)
    },
}  # fmt: skip
WORDS["nvfp4_tricks"] = {word or "none": tricks for word, tricks in WORDS["nvfp4_tricks"].items()}
_LONGEST_HISTORY: Final = 100_000
#: Of a policy's text, in characters, without reasons: a real one has hundreds.
LONGEST_TEXT: Final = 100_000


def level_fields(level: Level, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields that a level sets."""
    scale: LossScale = LossScale.none()
    if dtype == torch.float16 and level != "O0":
        scale = LossScale.constant(1.0) if level == "O3" else LossScale.dynamic()
    return {
        "level": level,
        "dtype": dtype,
        "param_dtype": dtype if level == "O3" else torch.float32,
        "output_dtype": torch.float32 if level == "O3" else None,
        "keep_batchnorm_fp32": level != "O3",
        "loss_scale": scale,
        "lists": "portable",
        "norms": "fp32",
        "emulate": "auto",
        "fp8_recipe": "tensorwise",
        "fp8_history": 1024,
        "fp8_amax": "max",
        "low_products": "none",
        "nvfp4_tricks": "+".join(_TRICKS),
    }


#: Every field but the level, the dtype and the rules, in the order in which a policy's text has them.
FIELDS: Final = tuple(level_fields("O0", torch.float32))[2:]
#: The builder whose name is most often taken for a key.
_KEEP: Final = "keep_fp32"
_STORED: Final = (
    "levels differ in where weights live: O1 has FP32 weights, O2 stores FP32 weights in two halves, O3's are low"
)
#: What has weights that a user wants stored in 16 bits.
_STORING: Final = "O2,dtype={low} O3,dtype={low}"


def wrong_values(values: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield an error for each field whose value has the wrong type or is outside its vocabulary."""
    return (problem for name, value in values.items() if (problem := wrong_value(name, value)))


def wrong_value(name: str, value: Any) -> PolicyError | None:
    """Return the error for one field's value, if it is wrong."""
    if name == "loss_scale":
        text = f"loss_scale is {shown(value)}, not a LossScale"
        return None if isinstance(value, LossScale) else PolicyError(text, write=both("loss_scale=1024"))
    if name == "rules":
        if isinstance(value, tuple) and all(isinstance(rule, Rule) for rule in value):
            return _too_many(value)
        write = 'rules=[Rule("fp32", op="softmax")], the text fp32=softmax'
        return PolicyError("rules must be a tuple of Rule", write=write)
    if name == "fp8_history":
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LONGEST_HISTORY:
            return None
        problem = f"fp8_history is {shown(value)}, and no number of steps from 1 to {_LONGEST_HISTORY:,}"
        return PolicyError(problem, write=both("fp8_history=1024"))
    valid = WORDS[name].values()
    is_word = isinstance(value, str | torch.dtype | bool | None)  # 1 == True, and answers no yes-or-no question
    if is_word and value in valid:
        return None
    words = list(dict.fromkeys(map(text_of, valid)))
    word = text_of(value) if is_word else shown(value)
    misspelt = "" if isinstance(value, torch.dtype) else word  # a dtype is no misspelt word
    write = both(f"{name}={closest(misspelt, words) or words[0]}")
    return PolicyError(f"unknown {name} {shown(word)}", why=nearest(misspelt, words), write=write)


def _too_many(rules: tuple[Rule, ...]) -> PolicyError | None:
    """Refuse rules that no text could hold: a session's state has its policy as text."""
    length = len(format_rules(rules)) + 1000  # the other fields take less
    if length <= LONGEST_TEXT:
        return None
    return PolicyError(
        f"{len(rules):,} rules are too many",
        why=f"their text has {length:,} characters, and a policy's at most {LONGEST_TEXT:,}",
        write=f"globs in place of names: {both('fp32_module=blocks.*')}",
    )


def impossible_combinations(values: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield an error, with its reason, for each combination that cannot be carried out.

    Args:
        values: The value of every field; none is wrong by itself.
    """
    level, dtype, param_dtype, scale = (values[name] for name in ("level", "dtype", "param_dtype", "loss_scale"))
    is_fp32, is_low = dtype == torch.float32, param_dtype in LOW
    name, stored = dtype_name(dtype), dtype_name(param_dtype)
    problems = (  # whether it applies, the problem, why, the texts to write
        (level == "O0" and not is_fp32,
         f"O0 cannot compute in {name}", "O0 is the FP32 reference", f"O1,dtype={name}"),
        (level != "O0" and is_fp32,
         f"{level} cannot compute in float32", "nothing would be mixed", f"{level},dtype=bfloat16 O0"),
        (level != "O3" and is_low, f"{level} has no {stored} parameters", _STORED, _STORING.format(low=stored)),
        (level == "O3" and is_low and not is_fp32 and param_dtype != dtype,
         f"weights cannot be {stored} while ops compute in {name}",
         "each use would cast between two 16-bit formats, which is as lossy as both together",
         f"O3,dtype={stored} O3,dtype={name}"),
        (level == "O3" and not is_low and not is_fp32,
         f"O3 with {stored} weights has nothing in {name}", "it casts no op: its weights alone are low",
         f"O1,dtype={name} O2,dtype={name}"),
        (level in ("O0", "O1") and not values["keep_batchnorm_fp32"],
         f"keep_batchnorm_fp32=false has no effect in {level}", "its weights are FP32, batch norm's too",
         f"O3,dtype={'bfloat16' if is_fp32 else name}"),
    )  # fmt: skip
    for applies, problem, why, write in problems:
        if applies:
            yield PolicyError(problem, why=why, write=_cures(write))
    if level == "O0" and (rule := next((rule for rule in values["rules"] if rule.treatment in QUANTISED), None)):
        yield PolicyError(
            f"O0 has no {rule.treatment} products",
            where=str(rule),
            why="O0 is the FP32 reference",
            write=both(f"O1,dtype=bfloat16,{rule}"),
        )
    yield from _contradictions(values["rules"])
    changes_gradients = scale.mode == "dynamic" or (scale.mode == "constant" and scale.init != 1.0)
    if param_dtype == torch.float16 and level == "O3" and changes_gradients:
        yield PolicyError(
            "fp16 gradients cannot be unscaled in fp16",
            where=f"O3,dtype=float16,loss_scale={scale}",
            why="dividing them by the scale in float16 flushes small ones to zero; those of FP32 weights are FP32",
            write=f"{both('O2,dtype=float16')}, whose weights are FP32;\n{both('loss_scale=1')}",
        )


def _cures(texts: str) -> str:
    """Write cures with spaces between them, each in both spellings."""
    return ";\nor ".join(map(both, texts.split()))


def _contradictions(rules: tuple[Rule, ...]) -> Iterator[PolicyError]:
    """Yield an error for each op, module or parameter that is named twice with different treatments."""
    seen: dict[object, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.selector, rule)
        if first.treatment != rule.treatment:
            yield PolicyError(
                f"{rule.name!r} is named twice, with different treatments",
                where=f"{first} and {rule}",
                why="the first match wins, so the second would never decide",
                write=f"one of the two: {both(str(first))}",
            )


# Values and their text ----------------------------------------------------------------------------


def resolved(level: Level, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field: the overrides, by their words or shorthands, and the level's of the others.

    Raises:
        PolicyError: A field is unknown, the dtype or the loss scale cannot be read.
    """
    dtype = _value("dtype", overrides.get("dtype", "float32" if level == "O0" else "float16"))
    if problem := wrong_value("dtype", dtype):
        raise problem
    return level_fields(level, dtype) | replaced(overrides)


def replaced(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of overrides, which may be words or shorthands.

    Raises:
        PolicyError: As :func:`resolved`.
    """
    for name in overrides:
        if name not in ("level", "dtype", *FIELDS, "rules"):
            raise unknown_key(name, overrides[name])
    return {name: _value(name, value) for name, value in overrides.items()}


def _value(name: str, value: Any) -> Any:
    """Read the value of a field; an unknown word is returned as it is, for :func:`wrong_values` to refuse."""
    if name == "loss_scale":
        return LossScale.parse(value)
    if name == "rules":
        return tuple(value) if isinstance(value, list) else value
    if name == "fp8_history":
        is_number = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10
        return int(value) if is_number else value
    return WORDS[name].get(_bare(value), value) if isinstance(value, str) else value


def _bare(word: str) -> str:
    return word.removeprefix("torch.").lower()


def text_of(value: Any) -> str:
    """Write one value as a policy's text has it."""
    if isinstance(value, tuple):
        return format_rules(value) or "no rules"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def unknown_key(key: str, value: Any) -> PolicyError:
    """Build the error for a key that no policy has, with the nearest one.

    Args:
        key: The key.
        value: Its value.
    """
    words = ("dtype", *FIELDS, *RULE_KEYS)
    nearest_key, text = "fp32_module" if key == _KEEP else closest(key, words, least=0.75), _as_text(value)
    write = f"the policy without {key}={text}"
    if nearest_key:
        try:
            read(f"O1,{nearest_key}={text}")
        except PolicyError:
            text = _example(nearest_key)
        write = both(f"{nearest_key}={text}")
    return PolicyError(f"unknown policy key {shown(key)}", why=nearest(nearest_key, words), write=write)


def _as_text(value: Any) -> str:
    """Write a value of an unknown key as a policy's text would have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return "+".join(value)
    if isinstance(value, int | float | torch.dtype | None):
        return text_of(value) if isinstance(value, bool | torch.dtype | None) else shown(value)
    return "…"


# A policy's text: one line, or a file with one entry a line and reasons behind ``#``.
#
# ::
#
#     O2                      # the level, and then what differs from it
#     dtype=bfloat16
#     fp32_module=head        # its logits pass 65504

#: What the name of a policy's file ends with, so that it is told from a text.
SUFFIX: Final = ".policy"
_MOST_BYTES: Final = 1_000_000
_LINE_END: Final = "(?:\r\n|\r|\n)"
#: Spaces that do not count: those around what separates words.
_AROUND: Final = re.compile(r"\s*([,=+*()])\s*")
#: The end of a part of a schedule's text: how many steps there are before it.
STEP: Final = re.compile(r"(.*)@\s*(\d{1,18})\s*", re.DOTALL | re.ASCII)
#: What only policy files of releases that wrote TOML have.
_TOML: Final = re.compile(r"^\s*(version\s*=|level\s*=\s*[\"']|\[)", re.MULTILINE)


def is_opening(word: str) -> bool:
    """Whether a policy's text may begin with a word: a level, a dtype, or one of Lightning's."""
    return _bare(word) in OPENINGS


def parts_of(text: str) -> list[str]:
    """Return the parts that a text has, with semicolons between."""
    return [part for entry in separated(text, ";") if (part := entry.strip())]


def is_schedule(text: str) -> bool:
    """Whether a text is a schedule's, where it is no policy's: several parts, and one of them says its step."""
    parts = parts_of(text)
    return len(parts) > 1 and any(map(STEP.fullmatch, parts))


def read(text: str, path: str = "") -> tuple[Any, dict[str, Any]]:
    """Read a policy's text; see :meth:`mezzo.Policy.parse`.

    Args:
        text: The text.
        path: The file that it is from, for errors.

    Returns:
        The level, and the fields that the text has.

    Raises:
        PolicyError: With every wrong entry, and its line where there are several, or where it is from a file.
    """
    subject = f"policy file {shown(path)}" if path else f"policy {shown(text)}"
    if path and _TOML.search(text):
        raise PolicyError(
            f"{subject} is TOML",
            why="a policy file is the policy's text: one entry a line, and reasons behind #",
            write="O2\ndtype=bfloat16\nfp32_module=head   # a reason\n"
            f"or {both('O2,dtype=bfloat16,fp32_module=head')}, and policy.save(path)",
        )
    has_lines = bool(path) or len(separated(text.strip(), _LINE_END, 1)) > 1
    level, field_texts, rules, problems = "", dict[str, Any](), list[Rule](), list[PolicyError]()
    for line, entry, reason in _entries(text, subject):
        if len(problems) == MOST_PROBLEMS:
            break  # each takes a look through a vocabulary
        try:
            if isinstance(entry, PolicyError):
                raise entry
            is_first, level = not level, level or "O1"  # where no level stands, as in `dtype=bf16,low=gelu`, it is O1
            if is_first and not _is_pair(entry):
                level, dtype = OPENINGS.get(_bare(entry), ("O1", None))  # as O1 the rest of a wrong text is read
                if not is_opening(entry):
                    raise _wrong_level(entry)
                if dtype is not None:
                    field_texts["dtype"] = dtype_name(dtype)
            elif is_rule((words := entry.partition("="))[0]) and words[2]:
                rules += parse_rules(words[0], words[2], reason)
            else:
                _read_field(entry, field_texts)
        except PolicyError as problem:
            problems.append(PolicyError(f"line {line}: {problem}") if has_lines else problem)
    if not level and not problems:
        problems.append(_wrong_level(""))
    if problems and is_schedule(text):
        raise PolicyError(
            f"{subject} is a schedule",
            why="one policy is asked for here, for all steps",
            write="one of its parts, without its step; mezzo run takes the whole, and mezzo.Schedule.of(text)",
        )
    if problems:
        raise PolicyError(f"{subject}: {PolicyError.together(problems)}")
    return level, {**field_texts, "rules": tuple(rules)}


def _entries(text: str, subject: str) -> Iterator[tuple[int, str | PolicyError, str]]:
    """Yield each entry, its line and the reason behind it; a comma that ends a line does not count."""
    size = 0
    for number, line in enumerate(separated(text, _LINE_END), start=1):
        entries, *reason = separated(line, "#", 1)
        entries = _AROUND.sub(r"\1", entries).strip().removesuffix(",")
        size += len(entries)
        if size > LONGEST_TEXT:
            raise PolicyError(
                f"{subject} is too long",
                why=f"a policy's text has at most {LONGEST_TEXT:,} characters",
                write=f"globs in place of names: {both('fp32_module=blocks.*')}",
            )
        if is_open(entries):
            problem = PolicyError("a bracket is not closed", write=both("loss_scale=dynamic(init=1024)"))
            yield number, problem, ""
        elif entries:
            yield from ((number, entry, "".join(reason).strip()) for entry in split(entries))


def _read_field(entry: str, field_texts: dict[str, Any]) -> None:
    """Read one entry that is no rule into the fields read so far."""
    key, equals, value = entry.partition("=")
    if _is_dtype(entry):  # a bare word for one, as in O1,bf16
        key, equals, value = "dtype", "=", entry
    if not equals or not value:
        raise _no_pair(entry, key)
    if key in field_texts:
        raise PolicyError(f"the key {key!r} stands twice", write=f"one of the two: {both(f'{key}={field_texts[key]}')}")
    if key not in ("dtype", *FIELDS):
        raise unknown_key(key, value)
    for problem in wrong_values(replaced({key: value})):
        raise problem
    field_texts[key] = value


def _is_key(word: str) -> bool:
    return word in ("dtype", *FIELDS) or is_rule(word)


def _is_pair(entry: str) -> bool:
    """Whether an entry is a key with a value, and no level and no word for one."""
    key, _, value = entry.partition("=")
    return bool(value) and _is_key(key)


def _is_dtype(word: str) -> bool:
    return isinstance(dtype_of(word), torch.dtype)


def _wrong_level(entry: str) -> PolicyError:
    key, _, value = entry.partition("=")
    if os.sep in entry or entry.endswith((SUFFIX, ".txt", ".toml")):
        return PolicyError(f"unknown level {shown(entry)}",
                           why=f"there is no such file, and a text begins with {', '.join(LEVELS)}",
                           write=f"Policy.load(path) of a file, whose name may end with {SUFFIX}")  # fmt: skip
    if _is_key(key):
        return PolicyError(
            f"unknown level {shown(entry)}", why=f"{key} takes a value", write=both(f"O1,{key}={_example(key)}")
        )
    first, *words = re.findall(r"[\w.-]+", value or entry) or ("O1",)  # another separator, or level=O1
    nearest_opening = first if is_opening(first) else closest(first, OPENINGS, least=0.75)
    level, dtype = OPENINGS.get(_bare(nearest_opening), ("O1", None))
    word = next(filter(_is_dtype, words), dtype_name(dtype or torch.bfloat16))
    return PolicyError(
        f"unknown level {shown(entry)}" if entry else "there is no level",
        why=nearest(entry, LEVELS),
        write=both(level if level == "O0" else f"{level},dtype={word}"),
    )


def _example(key: str) -> str:
    """Return a valid value of a key."""
    path = "head" if key.endswith("_module") else "head.weight" if key.endswith("_param") else ""
    example = path or ("linear" if key in QUANTISED else "softmax")
    return "1024" if key in ("loss_scale", "fp8_history") else next(iter(WORDS[key])) if key in WORDS else example


def _no_pair(entry: str, key: str) -> PolicyError:
    """Build the error for an entry without a value: a key, or a word that is not even a dtype's."""
    keys = ["dtype", *FIELDS, *RULE_KEYS]
    if (level := entry.upper()) in LEVELS:
        cure = both(level if level == "O0" else f"{level},dtype=bfloat16")
        return PolicyError(f"the level {level} does not stand first", write=cure)
    if key in keys:
        return PolicyError(f"{shown(entry)} is not key=value", write=both(f"{key}={_example(key)}"))
    dtype = closest(key, (word for word, value in DTYPES.items() if value in LOW)) or "bfloat16"
    problem = f"{shown(entry)} is neither a dtype nor key=value" if entry else "there is nothing between two commas"
    return PolicyError(problem, why=nearest(key, [*DTYPES, *keys]), write=both(f"dtype={dtype}"))


# Files ------------------------------------------------------------------------------------------------


def save(entries: Iterable[str], rules: Iterable[Rule], path: str | os.PathLike[str]) -> None:
    """Write a policy's level and fields, and its rules with their reasons; see :meth:`mezzo.Policy.save`."""
    lines = ["# A mezzo policy: what precision each op, module and parameter gets.", *entries]
    reasons = ((rule, printable(" ".join(rule.reason.split()))) for rule in rules)
    lines += [f"{rule}   # {reason}" if reason else str(rule) for rule, reason in reasons]
    try:
        data = "\n".join([*lines, ""]).encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"its file would have {len(data):,} bytes, of at most {_MOST_BYTES:,}")
        with files.atomic_file(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # also of a null byte in the path
        is_bare = isinstance(error, OSError) and "\n" not in str(error)
        write = f'policy.save("mine{SUFFIX}"), in a folder that you may write to' if is_bare else ""
        raise PolicyError(f"the policy cannot be written to {shown(os.fspath(path))}: {error}", write=write) from error


def load(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """Read a policy file; see :meth:`mezzo.Policy.load`.

    Returns:
        The level, and the fields that the file has.
    """
    name = os.fspath(path)
    try:
        with files.opened(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        write = f'policy.save("mine{SUFFIX}"); mezzo tune and mezzo inspect write such files, too'
        raise PolicyError(f"there is no policy file {shown(name)}", write=write) from None
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        write = f'Policy.load(path) of a file as policy.save("mine{SUFFIX}") writes it'
        raise PolicyError(f"{shown(name)} is not a policy file", why=why, write=write) from None
    return read(text, name)
