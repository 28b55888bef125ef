"""Policies as TOML files: every field resolved, and rules with their reasons."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from mezzo import files
from mezzo.errors import MOST_PROBLEMS, PolicyError, nearest, raise_together, shown
from mezzo.policy.fields import FIELDS, LEVELS, text_of
from mezzo.policy.rules import Rule

__all__ = ["load", "save"]

_VERSION = 1
_MOST_BYTES = 1_000_000
_MOST_DOTS = 30
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_RULE_KEYS = ("treatment", "op", "module", "param", "reason")


def save(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the fields of a policy; see :meth:`mezzo.Policy.save`."""
    lines = ["# A mezzo policy: what precision each op, module and parameter gets.", f"version = {_VERSION}"]
    for name in ("level", "dtype", *FIELDS):
        value = values[name]
        lines.append(f"{name} = {text_of(value) if isinstance(value, bool) else _quoted(text_of(value))}")
    for rule in values["rules"]:
        lines += ["", "[[rules]]"]
        lines += [f"{key} = {_quoted(getattr(rule, key))}" for key in _RULE_KEYS if getattr(rule, key)]
    try:
        data = "\n".join([*lines, ""]).encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"its file would have {len(data):,} bytes, of at most {_MOST_BYTES:,}")
        with files.whole(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # also of half a character, in a reason
        raise PolicyError(f"the policy cannot be written to {shown(os.fspath(path))}", why=str(error)) from error


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
        table = tomllib.loads(_with_short_keys(data.decode()))
    except FileNotFoundError:
        write = "policy.save(path); mezzo tune and mezzo inspect write such files, too"
        raise PolicyError(f"there is no policy file {shown(name)}", write=write) from None
    except (OSError, ValueError, RecursionError) as error:
        why = "its values are nested hundreds deep" if isinstance(error, RecursionError) else str(error)
        raise PolicyError(f"{shown(name)} is not a policy file", why=why) from None
    problems = _unknown_keys(table, ("version", "level", "dtype", *FIELDS, "rules"), where=name)
    rules = table.pop("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise PolicyError("rules is not an array of tables", where=name, write="[[rules]]")
    for number, rule in enumerate(rules, start=1):
        where = f"{name}, rule {number}"
        if len(problems) < MOST_PROBLEMS:
            problems += _unknown_keys(rule, _RULE_KEYS, where)
        if "treatment" not in rule:
            problems.append(PolicyError("the rule has no treatment", where=where, write='treatment = "fp32"'))
    if table.get("level") not in LEVELS:
        why = nearest(shown(table.get("level", "")), LEVELS)
        problems.append(PolicyError("the file names no valid level", where=name, why=why))
    if (version := table.pop("version", _VERSION)) != _VERSION:
        problems.append(PolicyError(f"version {shown(version)} of policy files is unknown", where=name))
    raise_together(problems)
    return table.pop("level"), table | {"rules": tuple(Rule(**rule) for rule in rules)}


def _unknown_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> list[PolicyError]:
    unknown = [key for key in table if key not in known][:MOST_PROBLEMS]  # each takes a look through a vocabulary
    return [PolicyError(f"unknown key {shown(key)}", where=where, why=nearest(key, known)) for key in unknown]


def _with_short_keys(text: str) -> str:
    """Refuse dotted keys of many parts, over which tomllib takes hours; a policy's keys have one."""
    for line in _STRING.sub("", text).splitlines():
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"a key has more than {_MOST_DOTS} parts")
    return text


def _quoted(text: str) -> str:
    """Write a TOML basic string; JSON's escapes are a subset of TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
