"""The two spellings of a policy, Python's and the text's: what cures are written in, and what other words mean."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from mezzo.errors import PolicyError
from mezzo.policy.ops import TREATMENTS, matching, resolve

__all__ = ["assignment", "both", "is_rule", "meant", "split", "treatment_of"]

_LEVEL: Final = re.compile("O[0-3]")
_NUMBER: Final = re.compile(r"\d+(\.\d*)?(e[-+]?\d+)?")
_LITERALS: Final = {"true": "True", "false": "False", "none": "None"}
#: Treatments and kinds of things by the words in which other libraries, or mezzo's own builders, have them.
_TREATED: Final = {
    **dict.fromkeys("low half fp16 float16 f16 bf16 bfloat16 white allow".split(), "low"),
    **dict.fromkeys("fp32 float32 f32 float full single keep black deny".split(), "fp32"),
}
_KINDS: Final = {
    **dict.fromkeys("module modules layer layers block blocks".split(), "module"),
    **dict.fromkeys("param params parameter parameters buffer buffers".split(), "param"),
    **dict.fromkeys("op ops function functions".split(), "op"),
}
_NOISE: Final = frozenset("in as to list custom names".split())
#: What a parameter's path most often ends with.
_PARAMETERS: Final = (".weight", ".bias", ".scale")


def both(text: str) -> str:
    """Write a cure in both spellings.

    Args:
        text: A policy's text, or entries of one: fields and rules, as a user would add them to what they have.

    Example:
        >>> both("fp32_module=head+tail")
        'policy.keep_fp32(modules=["head", "tail"]), the text fp32_module=head+tail'
        >>> both("O2,dtype=bfloat16,lists=device")
        'Policy.O2("bfloat16", lists="device"), the text O2,dtype=bfloat16,lists=device'
        >>> both("dtype=bfloat16")
        'dtype="bfloat16", the text dtype=bfloat16'
    """
    return f"{_python(text)}, the text {text}"


def assignment(text: str, remark: str = "") -> str:
    """Write a cure as a line of Python to paste, with the text behind it.

    Args:
        text: As of :func:`both`.
        remark: What else is to be said.

    Example:
        >>> assignment("fp32_module=head")
        'policy = policy.keep_fp32(modules=["head"])   # the text fp32_module=head'
    """
    return f"policy = {_python(text)}   # the text {text}{f'; {remark}' if remark else ''}"


def _python(text: str) -> str:
    first, *rest = split(text)
    is_whole = _LEVEL.fullmatch(first) is not None
    arguments, calls, others = list[str](), list[str](), list[str]()
    for entry in rest if is_whole else [first, *rest]:
        key, equals, value = entry.partition("=")
        if is_rule(key):
            call = _builder(key, value.split("+"))
            calls[:0] = [call] if call else []  # a builder puts its rules first
            others += [] if call else [_rule(key, name) for name in value.split("+")]
        elif is_whole and (not equals or key == "dtype"):
            arguments.insert(0, _quoted(value or key))
        else:
            word = value.lower()
            literal = value if _NUMBER.fullmatch(value) else _LITERALS.get(word, _quoted(value))
            arguments.append(f"{key}={literal}")
    if others:
        arguments.append(f"rules=[{', '.join([*others, *([] if is_whole else ['*policy.rules'])])}]")
    given = ", ".join(arguments)
    if is_whole:
        return f"Policy.{first}({given}){''.join(calls)}"
    if given.startswith("dtype=") and not rest:
        return given  # of whatever makes the policy: loss scale and weights follow from it
    return f"policy{f'.evolve({given})' if given else ''}{''.join(calls)}"


def _builder(key: str, names: Sequence[str]) -> str:
    """Write rules of one key as a call of a builder; empty where there is none for them."""
    globs = ", ".join(map(_quoted, names))
    if key in ("fp32_module", "fp32_param"):
        return f".keep_fp32({key.removeprefix('fp32_')}s=[{globs}])"
    return f".{key}({globs})" if key in TREATMENTS and not any("@" in name for name in names) else ""


def _rule(key: str, name: str) -> str:
    treatment, _, kind = key.rpartition("_") if key.endswith(("_module", "_param")) else (key, "", "op")
    op, at, module = name.partition("@")
    named = [f"{kind}={_quoted(op)}", *([f"module={_quoted(module)}"] if at else [])]
    return f"Rule({_quoted(treatment)}, {', '.join(named)})"


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


def is_rule(key: str) -> bool:
    """Whether a key is a rule's: a treatment, alone or on modules or parameters."""
    return key.removesuffix("_module").removesuffix("_param") in TREATMENTS


def treatment_of(word: str) -> str:
    """Return the treatment that another library, or a dtype, has another word for; empty where it is none."""
    return _TREATED.get(word.lower(), "")


def split(text: str) -> list[str]:
    """Split a text at commas outside brackets: a loss scale's own text may hold some."""
    parts, begin, depth = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def meant(key: str, names: str) -> list[str]:
    """Return what is meant by a key that no policy has, and that is a builder's name or another library's word.

    Args:
        key: The key, such as ``keep_fp32``, ``modules``, ``half`` or ``float32_module``.
        names: Globs, joined by ``+``.

    Returns:
        Entries of a text, the likeliest first; none where the key says nothing of rules.

    Example:
        >>> meant("keep_fp32", "head"), meant("half", "softmax"), meant("params", "a+b")
        (['fp32_module=head'], ['low=softmax'], ['fp32_param=a+b'])
    """
    words = [word for word in re.split("[_-]", key.lower()) if word and word not in _NOISE]
    if not words or not all(word in _TREATED or word in _KINDS for word in words):
        return []
    treatment = next((_TREATED[word] for word in words if word in _TREATED and word != "keep"), "fp32")
    globs = (names or "…").split("+")
    if kind := next((_KINDS[word] for word in words if word in _KINDS), ""):
        return [_entry(treatment, kind, globs)]
    ops = [glob for glob in globs if _is_op(glob)]
    params = [glob for glob in globs if glob.endswith(_PARAMETERS)]
    modules = [glob for glob in globs if glob not in params and ("keep" in words or glob not in ops)]
    ops = ops if "keep" not in words else []
    of = (("op", ops), ("module", modules), ("param", params))
    found = [",".join(_entry(treatment, kind, some) for kind, some in of if some)]
    return found + [_entry(treatment, "op", globs)] * ("keep" in words and all(map(_is_op, globs)))


def _entry(treatment: str, kind: str, globs: Sequence[str]) -> str:
    return f"{treatment}{'' if kind == 'op' else f'_{kind}'}={'+'.join(globs)}"


def _is_op(name: str) -> bool:
    op = name.partition("@")[0]
    try:
        return bool(resolve(op))
    except PolicyError:
        return any(character in op for character in "*?[") and next(matching(op), None) is not None
