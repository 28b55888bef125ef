"""Policies as TOML files: every field resolved, and rules with their reasons."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo import files
from mezzo.errors import PolicyError, nearest

if TYPE_CHECKING:
    from mezzo.policy.policy import Policy

__all__ = ["load", "save"]

_VERSION = 1
_RULE_KEYS = ("treatment", "op", "module", "param", "reason")


def save(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Write a policy; see :meth:`mezzo.Policy.save`."""
    from mezzo.policy.fields import FIELDS, text_of

    lines = ["# A mezzo policy: what precision each op, module and parameter gets.", f"version = {_VERSION}"]
    for name in ("level", "dtype", *FIELDS):
        value = getattr(policy, name)
        lines.append(f"{name} = {text_of(value) if isinstance(value, bool) else _quoted(text_of(value))}")
    for rule in policy.rules:
        lines += ["", "[[rules]]"]
        lines += [f"{key} = {_quoted(getattr(rule, key))}" for key in _RULE_KEYS if getattr(rule, key)]
    try:
        with files.whole(path) as file:
            file.write("\n".join([*lines, ""]).encode())
    except OSError as error:
        raise PolicyError(f"the policy cannot be written to {os.fspath(path)!r}", why=str(error)) from error


def load(path: str | os.PathLike[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Read a policy file; see :meth:`mezzo.Policy.load`.

    Returns:
        The level, the dtype, and the other fields.
    """
    from mezzo.policy.fields import FIELDS, LEVELS
    from mezzo.policy.rules import Rule

    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PolicyError(f"there is no policy file {os.fspath(path)!r}", write="policy.save(path) first") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{os.fspath(path)!r} is not a policy file", why=str(error)) from error

    problems = []
    for key in table:
        if key not in (words := ("version", "level", "dtype", *FIELDS, "rules")):
            problems.append(PolicyError(f"unknown key {key!r}", where=os.fspath(path), why=nearest(key, words)))
    rules = table.pop("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise PolicyError("rules is not an array of tables", where=os.fspath(path), write="[[rules]]")
    for number, rule in enumerate(rules, start=1):
        where = f"{os.fspath(path)}, rule {number}"
        for key in rule:
            if key not in _RULE_KEYS:
                problems.append(PolicyError(f"unknown key {key!r}", where=where, why=nearest(key, _RULE_KEYS)))
        if "treatment" not in rule:
            problems.append(PolicyError("the rule has no treatment", where=where, write='treatment = "fp32"'))
    if table.get("level") not in LEVELS:
        why = nearest(str(table.get("level", "")), LEVELS)
        problems.append(PolicyError("the file names no valid level", where=os.fspath(path), why=why))
    if (version := table.pop("version", _VERSION)) != _VERSION:
        problems.append(PolicyError(f"version {version!r} of policy files is unknown", where=os.fspath(path)))
    if problems:
        raise PolicyError.together(problems)
    level = table.pop("level")
    dtype = table.pop("dtype", "float32" if level == "O0" else "float16")
    return level, dtype, table | {"rules": tuple(Rule(**rule) for rule in rules)}


def _quoted(text: str) -> str:
    """Write a TOML basic string; JSON's escapes are a subset of TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
