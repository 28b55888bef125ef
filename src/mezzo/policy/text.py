"""A policy's text: one line, or a file with one entry a line and reasons behind ``#``.

::

    O2                      # the level, and then what differs from it
    dtype=bfloat16
    fp32_module=head        # its logits pass 65504
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from mezzo import files
from mezzo.errors import MOST_PROBLEMS, PolicyError, closest, nearest, printable, shown
from mezzo.policy import fields
from mezzo.policy.fields import FIELDS, LEVELS, LONGEST_TEXT, WORDS
from mezzo.policy.rules import RULE_KEYS, Rule, parse_rules
from mezzo.policy.spelling import both, is_rule, split
from mezzo.tensors import DTYPES, LOW, dtype_of

__all__ = ["SUFFIX", "load", "read", "save"]

#: What the name of a policy's file ends with, so that it is told from a text.
SUFFIX: Final = ".policy"
_MOST_BYTES: Final = 1_000_000
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
#: Spaces that do not count: those around what separates words.
_AROUND: Final = re.compile(r"\s*([,=+*()])\s*")
#: What only policy files of releases that wrote TOML have.
_TOML: Final = re.compile(r"^\s*(version\s*=|level\s*=\s*[\"']|\[)", re.MULTILINE)


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
    has_lines = bool(path) or _LINE_END.search(text.strip()) is not None
    level, given, rules, problems = "", dict[str, Any](), list[Rule](), list[PolicyError]()
    for line, entry, reason in _entries(text, subject):
        if len(problems) == MOST_PROBLEMS:
            break  # each takes a look through a vocabulary
        try:
            if isinstance(entry, PolicyError):
                raise entry
            if not level:
                level = entry if entry in LEVELS else "O1"  # as which the rest is read
                if level != entry:
                    raise _wrong_level(entry)
            elif is_rule((words := entry.partition("="))[0]) and words[2]:
                rules += parse_rules(words[0], words[2], reason)
            else:
                _read_field(entry, level, given)
        except PolicyError as problem:
            problems.append(PolicyError(f"line {line}: {problem}") if has_lines else problem)
    if not level and not problems:
        problems.append(_wrong_level(""))
    if problems:
        raise PolicyError(f"{subject}: {PolicyError.together(problems)}")
    return level, {**given, "rules": tuple(rules)}


def _entries(text: str, subject: str) -> Iterator[tuple[int, str | PolicyError, str]]:
    """Yield each entry, its line and the reason behind it; a comma that ends a line does not count."""
    size = 0
    for number, line in enumerate(_LINE_END.split(text), start=1):
        entries, _, reason = line.partition("#")
        entries = _AROUND.sub(r"\1", entries).strip().removesuffix(",")
        size += len(entries)
        if size > LONGEST_TEXT:
            raise PolicyError(
                f"{subject} is too long",
                why=f"a policy's text has at most {LONGEST_TEXT:,} characters",
                write=f"globs in place of names: {both('fp32_module=blocks.*')}",
            )
        if entries.count("(") > entries.count(")"):
            problem = PolicyError("a bracket is not closed", write=both("loss_scale=dynamic(init=1024)"))
            yield number, problem, ""
        elif entries:
            yield from ((number, entry, reason.strip()) for entry in split(entries))


def _read_field(entry: str, level: str, given: dict[str, Any]) -> None:
    """Read one entry that is no rule into the fields that are known."""
    key, equals, value = entry.partition("=")
    if _is_dtype(entry):  # a bare word for one, as in O1,bf16
        key, equals, value = "dtype", "=", entry
    if not equals or not value:
        raise _no_pair(entry, key)
    if key in given:
        raise PolicyError(f"the key {key!r} stands twice", write=f"one of the two: {both(f'{key}={given[key]}')}")
    if key not in ("dtype", *FIELDS):
        raise fields.unknown_key(key, value, level, given.get("dtype", "float16"))
    for problem in fields.wrong_values(fields.replaced({key: value}, level, None)):
        raise problem
    given[key] = value


def _is_dtype(word: str) -> bool:
    return isinstance(dtype_of(word), torch.dtype)


def _wrong_level(entry: str) -> PolicyError:
    key, _, value = entry.partition("=")
    if os.sep in entry or entry.endswith((SUFFIX, ".txt", ".toml")):
        return PolicyError(f"unknown level {shown(entry)}",
                           why=f"there is no such file, and a text begins with {', '.join(LEVELS)}",
                           write=f"Policy.load(path) of a file, whose name may end with {SUFFIX}")  # fmt: skip
    is_entry = _is_dtype(entry) or key in ("dtype", *FIELDS) or is_rule(key)
    why = "a level stands first" if is_entry else nearest(entry, LEVELS)
    first, *others = re.findall(r"[\w.]+", value or entry) or ("O1",)  # another separator, or level=O1
    level = first.upper() if first.upper() in LEVELS else "O1"
    dtype = next(filter(_is_dtype, others), "bfloat16")
    written = f"O1,{entry}" if is_entry else level if level == "O0" else f"{level},dtype={dtype}"
    return PolicyError(f"unknown level {shown(entry)}" if entry else "there is no level", why=why, write=both(written))


def _no_pair(entry: str, key: str) -> PolicyError:
    """Build the error for an entry without a value: a key, or a word that is not even a dtype's."""
    keys = ["dtype", *FIELDS, *RULE_KEYS]
    if entry in LEVELS:
        return PolicyError(f"the level {entry} does not stand first", write=both(f"{entry},dtype=bfloat16"))
    if key in keys:
        example = "head" if key.endswith("_module") else "head.weight" if key.endswith("_param") else "softmax"
        value = "1024" if key == "loss_scale" else next(iter(WORDS[key])) if key in WORDS else example
        return PolicyError(f"{shown(entry)} is not key=value", write=both(f"{key}={value}"))
    dtype = closest(key, (word for word, each in DTYPES.items() if each in LOW)) or "bfloat16"
    what = f"{shown(entry)} is neither a dtype nor key=value" if entry else "there is nothing between two commas"
    return PolicyError(what, why=nearest(key, [*DTYPES, *keys]), write=both(f"dtype={dtype}"))


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
        with files.whole(path) as file:
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
