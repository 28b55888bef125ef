"""Tables of the pages that say what the code takes: a policy's fields, rules and loss scales, levels."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from mezzo import LossScale, Policy
from mezzo.policy import fields
from mezzo.policy.ops import OPS, TREATMENTS

__all__ = [
    "TREATED",
    "described",
    "levels",
    "policy_fields",
    "scale_fields",
    "treatments",
]

#: What a treatment does, for a table; an op's entry in the op table says which one it gets without a rule.
TREATED: Final[Mapping[str, str]] = {
    "low": "inputs are cast to `dtype`; it runs and returns low",
    "fp32": "inputs are cast to FP32; it runs and returns FP32",
    "fp32_math": "FP32 inside, and the dtype of its input out",
    "promote": "floating inputs are cast to the widest among them",
    "fp8": "products of weights: operands in FP8; runs and returns low",
    "mxfp8": "products of weights: operands in MXFP8; runs and returns low",
    "nvfp4": "products of weights: operands in NVFP4; runs and returns low",
    "native": "left to torch, in the dtypes that it is given",
    "ban": "refused with an error that says what to use",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def described(cls: type, section: str) -> dict[str, str]:
    """What a class's docstring says of each of its fields, on one line, as markdown."""
    text = (inspect.getdoc(cls) or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w+: )", text, flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        name, _, said = entry.partition(": ")
        said = re.sub(r":\w+:`[.\w]*?(\w+(?:\.none)?)`", r"`\1`", " ".join(said.split()))
        found[name] = said.replace("``", "`").replace("|", "\\|")
    return found


def levels() -> str:
    """A row for each field, a column for each level: what it is in FP16, and in BF16 where that is another."""
    made = {level: _both(level) for level in fields.LEVELS}
    names = [name for name in fields.FIELDS if len({each[name] for each in made.values()}) > 1]
    rows = [(f"`{name}`", *(made[level][name] for level in fields.LEVELS)) for name in names]
    return table(("", *(f"`{level}`" for level in fields.LEVELS)), rows)


def _both(level: fields.Level) -> dict[str, str]:
    kinds = (torch.float32,) if level == "O0" else (torch.float16, torch.bfloat16)
    values = [fields.level_fields(level, dtype) for dtype in kinds]
    return {name: " / ".join(dict.fromkeys(fields.text_of(each[name]) for each in values)) for name in fields.FIELDS}


def policy_fields() -> str:
    """A row for each field of a policy that its text has by name: the words for it, and what it says."""
    said = described(Policy, "Attributes")
    rows = [(f"`{name}`", _words(name), said[name]) for name in ("dtype", *fields.FIELDS)]
    return table(("field", "words", "what it says"), rows)


def _words(name: str) -> str:
    if name == "fp8_history":
        return "a number of steps"
    if name not in fields.WORDS:
        return "[below](#the-loss-scale)"
    return ", ".join(f"`{fields.text_of(value)}`" for value in dict.fromkeys(fields.WORDS[name].values()))


def treatments() -> str:
    """A row for each treatment: what it does, and ops that have it without a rule."""
    rows = []
    for treatment in TREATMENTS:
        having = sorted(name for name, op in OPS.items() if op.portable == treatment and not name.startswith("_"))
        known = [name for name in ("linear", "conv2d", "softmax", "layer_norm", "cat", "relu", "add") if name in having]
        shown = ", ".join(f"`{name}`" for name in known or having[:1]) or "–"
        rows.append((f"`{treatment}`", TREATED[treatment], f"{shown}; {len(having)} in all" if having else "–"))
    return table(("treatment", "what the op does", "has it without a rule"), rows)


def scale_fields() -> str:
    """A row for each field of a dynamic loss scale, with its default."""
    said = described(LossScale, "Args")
    default = {each.name: getattr(LossScale.dynamic(), each.name) for each in dataclasses.fields(LossScale)}
    rows = [(f"`{name}`", f"`{_number(default[name])}`", text) for name, text in said.items() if name != "mode"]
    return table(("field", "by default", "what it says"), rows)


def _number(value: Any) -> str:
    if isinstance(value, float) and (value >= 2**16 or value < 2**-10):
        return f"2**{int(value.hex().partition('p')[2])}"
    return str(value).lower() if value is None else f"{value:g}" if isinstance(value, float) else str(value)
