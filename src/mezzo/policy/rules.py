"""Rules and how they are spelled: which treatment an op, a module or a parameter gets, and which rule decided."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, cast

from mezzo.errors import PolicyError, closest, nearest, shown
from mezzo.policy.ops import QUANTISABLE, QUANTISED, TREATMENTS, Treatment, matching, resolve

# The two spellings of a policy, Python's and the text's: what cures are written in, and what other words mean.

_LEVEL: Final = re.compile("O[0-3]")
_NUMBER: Final = re.compile(r"\d+(\.\d*)?(e[-+]?\d+)?")
_LITERALS: Final = {"true": "True", "false": "False", "none": "None"}


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
    arguments, calls, rules = list[str](), list[str](), list[str]()
    for entry in rest if is_whole else [first, *rest]:
        key, equals, value = entry.partition("=")
        if is_rule(key):
            call = _builder(key, names_in(value))
            calls[:0] = [call] if call else []  # a builder puts its rules first
            rules += [] if call else [_rule(key, name) for name in names_in(value)]
        elif is_whole and (not equals or key == "dtype"):
            arguments.insert(0, _quoted(value or key))
        else:
            word = value.lower()
            literal = value if _NUMBER.fullmatch(value) else _LITERALS.get(word, _quoted(value))
            arguments.append(f"{key}={literal}")
    if rules:
        arguments.append(f"rules=[{', '.join([*rules, *([] if is_whole else ['*policy.rules'])])}]")
    call_arguments = ", ".join(arguments)
    if is_whole:
        return f"Policy.{first}({call_arguments}){''.join(calls)}"
    if call_arguments.startswith("dtype=") and not rest:
        return call_arguments  # of whatever makes the policy: loss scale and weights follow from it
    return f"policy{f'.evolve({call_arguments})' if call_arguments else ''}{''.join(calls)}"


def _builder(key: str, names: Sequence[str]) -> str:
    """Write rules of one key as a call of a builder; empty where there is none for them."""
    globs = ", ".join(map(_quoted, names))
    if key in ("fp32_module", "fp32_param"):
        return f".keep_fp32({key.removeprefix('fp32_')}s=[{globs}])"
    treatment, _, target = key.rpartition("_")
    if treatment in QUANTISED:
        return f".{treatment}({target}s=[{globs}])"
    return f".{key}({globs})" if key in TREATMENTS and not any("@" in name for name in names) else ""


def _rule(key: str, name: str) -> str:
    if key.endswith(("_module", "_param")):
        treatment, _, target = key.rpartition("_")
        return f"Rule({_quoted(treatment)}, {target}={_quoted(name)})"
    op, at, module = name.partition("@")
    named = [f"op={_quoted(op)}", *([f"module={_quoted(module)}"] if at else [])]
    return f"Rule({_quoted(key)}, {', '.join(named)})"


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


def is_rule(key: str) -> bool:
    """Whether a key is a rule's: a treatment, alone or on modules or parameters."""
    return key.removesuffix("_module").removesuffix("_param") in TREATMENTS


# Names in a text. Between square brackets a character stands for itself: ``[*]`` and ``[[]`` in a glob, as in
# ``glob.escape``, and ``[,]`` in a text. Module and parameter names may hold any character but a dot.

_SEPARATING: Final = r",+=@;()#\s"
_SINGLE: Final = re.compile(rf"\[.\]|([{_SEPARATING}])", re.DOTALL)
_SPECIAL: Final = re.compile(rf"([*?\[{_SEPARATING}])")
#: What names one path, whatever it has been made of.
_EXACT: Final = re.compile(rf"(\[[*?\[{_SEPARATING}]\]|[^*?\[])*", re.DOTALL)


def exact(path: str) -> str:
    """Return the glob that matches the path of one module or parameter, and no other.

    Example:
        >>> exact("blocks.0.mlp"), exact("body.[cls]"), exact("a,b=c.*")
        ('blocks.0.mlp', 'body.[[]cls]', 'a[,]b[=]c.[*]')
    """
    return _SPECIAL.sub(r"[\1]", path)


def escaped(glob: str) -> str:
    """Return a glob as a policy's text has it: a character that separates there is put between square brackets.

    Example:
        >>> escaped("a,b.*"), escaped("a[,]b.*")
        ('a[,]b.*', 'a[,]b.*')
    """
    return _SINGLE.sub(lambda match: f"[{match[1]}]" if match[1] else match[0], glob)


def matches(path: str, glob: str) -> bool:
    """Whether a glob matches a path, or is that path's own text.

    Example:
        >>> matches("body.[cls]", "body.[cls]"), matches("body.c", "body.[cls]"), matches("body.c", "body.[[]cls]")
        (True, True, False)
    """
    return fnmatch.fnmatchcase(path, glob) or ("[" in glob and not _EXACT.fullmatch(glob) and _spells(glob, path))


def _spells(glob: str, path: str) -> bool:
    """Whether a glob is a path's own text, letter by letter."""
    return escaped(path) == escaped(glob)


def as_named(glob: str, paths: Iterable[str]) -> str:
    """Return the exact glob of the path that a glob spells but, read as a pattern, would miss; else the glob itself.

    Example:
        >>> as_named("body.[cls]", ["body.[cls]", "body.c"]), as_named("body.[cls]", ["body.c"])
        ('body.[[]cls]', 'body.[cls]')
    """
    candidates = [*paths] if "[" in glob else []
    named = next((path for path in candidates if _spells(glob, path)), None)
    if named is None or fnmatch.fnmatchcase(named, glob) or any(exact(path) == glob for path in candidates):
        return glob
    return exact(named)


def lies_in(path: str, glob: str) -> bool:
    """Whether a glob matches a module's path, or that of a module around it."""
    return any(matches(part, glob) for part in _ancestry(path))


def separated(text: str, separator: str, most: int = 0) -> list[str]:
    """Split a text at a separator, but not where the separator is between square brackets.

    Args:
        text: The text.
        separator: A regular expression that matches one character.
        most: The largest number of splits; 0 for all.

    Example:
        >>> separated("a[+]b+c", "[+]")
        ['a[+]b', 'c']
    """
    return re.split(rf"(?!(?<=\[).\]){separator}", text, maxsplit=most, flags=re.DOTALL)


def names_in(value: str) -> list[str]:
    """Return the names in a rule's value, such as ``a+b``."""
    return separated(value, "[+]")


def split(text: str) -> list[str]:
    """Split a text at commas outside brackets: a loss scale's own text may hold some."""
    parts = list[str]()
    for part in separated(text, ","):
        if parts and is_open(parts[-1]):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def is_open(text: str) -> bool:
    """Whether a text has a bracket that is not closed."""
    return len(separated(text, "[(]")) > len(separated(text, "[)]"))


_STORAGE_TREATMENTS: Final[tuple[Treatment, ...]] = ("low", "fp32")
#: The treatments of a module or a parameter: of its storage and all its ops, or of its products alone.
_PLACED: Final = (*_STORAGE_TREATMENTS, *QUANTISED)
#: The keys of rules in a policy's text: a treatment, and its target where that is no op.
RULE_KEYS: Final = (
    *TREATMENTS,
    *(f"{treatment}_{target}" for target in ("module", "param") for treatment in _PLACED),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A treatment, and the ops, modules or parameters that it is for.

    In a policy rules are ordered and the first match wins. A module glob also covers everything inside
    the modules it matches.

    Attributes:
        treatment: ``low``, ``fp32``, ``fp32_math``, ``promote``, ``native`` or ``ban``; for products of weights also
            ``fp8``, ``mxfp8`` or ``nvfp4``, whatever else the glob matches.
        op: Glob on the op's base name (any spelling that :func:`mezzo.policy.ops.resolve` knows).
        module: Glob on the module's path in the model. With ``op`` both must match; alone it takes ``low`` and
            ``fp32``, and what is for products: then ``op`` is ``*``. In both globs ``[*]`` is a character that stands
            for itself, and a glob that is the very name of a module or parameter means that one.
        param: Glob on the parameter's (or buffer's) path; stands alone.
        reason: For people; it takes no part in comparison.

    Raises:
        PolicyError: An unknown treatment or op, nothing to match, or a combination without a meaning.

    Example:
        >>> Rule("fp32", module="head.*").matches(op="linear", module="head.fc.0")
        True
    """

    treatment: Treatment
    _: KW_ONLY
    op: str | None = None
    module: str | None = None
    param: str | None = None
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.treatment, str) or self.treatment not in TREATMENTS:
            word = self.treatment if isinstance(self.treatment, str) else ""
            nearest_treatment = closest(word, TREATMENTS) or "fp32"
            raise PolicyError(
                f"unknown treatment {shown(self.treatment)}",
                where=f"Rule({shown(self.treatment)}, …)",
                why=nearest(shown(self.treatment), TREATMENTS),
                write=_example(
                    nearest_treatment, next((target for target in ("module", "param") if getattr(self, target)), "op")
                ),
            )
        if not isinstance(self.reason, str):
            raise PolicyError(f"the reason is {shown(self.reason)}, not text", write='reason="…"')
        globs = {"op": self.op, "module": self.module, "param": self.param}
        for target, glob in globs.items():
            if not isinstance(glob, str | None):
                raise PolicyError(
                    f"the {target} glob is {shown(glob)}, not text", write=_example(self.treatment, target)
                )
        rule = f"Rule({self.treatment!r}"
        if not any(globs.values()):
            write = ";\nor ".join(_example(self.treatment, target) for target in globs)
            raise PolicyError("a rule must match something", where=f"{rule})", write=write)
        for target, glob in globs.items():
            if glob == "" or (target == "op" and glob is not None and escaped(glob) != glob):
                raise _unwritable_error(self.treatment, target, glob)
            if glob is not None:
                object.__setattr__(self, target, escaped(glob))
        if self.param is not None and (self.op is not None or self.module is not None):
            raise PolicyError(
                f"the rule on parameter {self.param!r} also names an op or a module",
                why="a parameter's path already contains its module's, and its rule covers every op that reads it",
                write=f'{rule}, param="{self.module or "block"}.{self.param}")',
            )
        if self.op is None and self.treatment not in _PLACED:
            target, glob = ("module", self.module) if self.param is None else ("parameter", self.param)
            raise PolicyError(
                f"a {target} cannot be treated as {self.treatment!r}",
                where=f"{target} {glob!r}",
                why=f"a {target} takes low and fp32, and its weights are stored so, or fp8, mxfp8 and nvfp4 for its "
                f"products; {self.treatment} is of ops",
                write=both(f"{self.treatment}=*@{glob}" if self.param is None else f"fp32_param={glob}"),
            )
        if self.op is None and self.module is not None and self.treatment in QUANTISED:
            object.__setattr__(self, "op", "*")  # it is of products, and says nothing of the module as a whole
        if self.op is not None and not _is_glob(self.op):
            resolve(self.op, treatment=self.treatment)
        if self.op is not None and self.treatment in QUANTISED and not self.ops:
            raise PolicyError(
                f"{self.op} is not computed in {self.treatment}",
                where=str(self),
                why=f"{self.treatment} is for products of weights, {', '.join(QUANTISABLE)}; attention, recurrent "
                "cells and convolutions stay low, as in the published recipes",
                write=both(f"{self.treatment}=linear{f'@{self.module}' if self.module else ''}"),
            )

    def matches(self, *, op: str, module: str | None) -> bool:
        """Whether this rule decides about an op.

        Args:
            op: The op's base name.
            module: Path of the module it runs in; ``None`` outside any prepared module.
        """
        if self.param is not None:
            return False
        if self.treatment in QUANTISED and op not in QUANTISABLE:
            return False
        return (self.op is None or _matches_op(self.op, op)) and (
            self.module is None or (module is not None and self.matches_module(module))
        )

    def matches_module(self, path: str) -> bool:
        """Whether the module glob matches a module or one that contains it."""
        return self.module is not None and lies_in(path, self.module)

    def matches_param(self, path: str) -> bool:
        """Whether the parameter glob matches a parameter's or buffer's path."""
        return self.param is not None and matches(path, self.param)

    def as_named(self, modules: Iterable[str], params: Iterable[str]) -> Rule:
        """Return the rule with its globs :func:`as_named`."""
        if self.module is not None:
            return replace(self, module=as_named(self.module, modules))
        return self if self.param is None else replace(self, param=as_named(self.param, params))

    @property
    def ops(self) -> tuple[str, ...]:
        """The classified ops it names: one, or those that its glob matches, or none."""
        if self.op is None:
            return ()
        named = tuple(matching(self.op)) if _is_glob(self.op) else (resolve(self.op),)
        return tuple(op for op in named if op in QUANTISABLE) if self.treatment in QUANTISED else named

    @property
    def selector(self) -> tuple[str | None, str | None, str | None]:
        """What it matches, in one form for every spelling: op, module, parameter."""
        ops = self.ops
        return (ops[0] if len(ops) == 1 else self.op), self.module, self.param

    @property
    def key(self) -> str:
        """The key of this rule in a policy's text: ``low``, ``fp32_module``, ``fp32_param``."""
        if self.param is not None:
            return f"{self.treatment}_param"
        return f"{self.treatment}_module" if self._names_module else self.treatment

    @property
    def name(self) -> str:
        """What stands for this rule behind its key: the glob, or ``op@module``."""
        if self.op is not None and self.module is not None and not self._names_module:
            return f"{self.op}@{self.module}"
        return (self.module if self._names_module else self.op) or self.param or ""

    @property
    def _names_module(self) -> bool:
        """Whether it is written by its module alone."""
        is_every_op = self.op is None or (self.treatment in QUANTISED and self.op == "*")
        return is_every_op and self.module is not None

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an op gets, and why.

    Attributes:
        treatment: The treatment.
        rule: The rule that decided; ``None`` when the level or the op table did.
        reason: Why, in words.
        source: Who decided: ``policy`` (one of its rules), ``op table``, ``level O3`` (it casts no op), a field
            such as ``lists=device``, or ``torch``, to which the op is left. Whose lists name the op, which decides
            nothing, is in the table (``mezzo show ops``).
    """

    treatment: Treatment
    rule: Rule | None
    reason: str
    source: str


def _unwritable_error(treatment: Treatment | str, target: str, glob: str, entry: str = "") -> PolicyError:
    """Build the error of a name that a text would cut in two; the entry has it whole."""
    write = f"one name for each {target}: {_example(treatment, target)}"
    if entry and not re.search(r"\s", glob):  # which is a slip
        write += f";\nor for the one of this name {both(entry)}"
    return PolicyError(
        f"the {target} glob {shown(glob)} cannot be written in a policy's text",
        why="a glob is not empty, and a space and , + = @ ; ( ) # separate globs",
        write=write,
    )


def _example(treatment: Treatment | str, target: str) -> str:
    """Write a cure that gives a treatment to things of a kind, in both spellings."""
    if target == "op":
        return both(f"{treatment}={'linear' if treatment in QUANTISED else 'softmax+gelu'}")
    treated = treatment if treatment in _PLACED else "fp32"
    return both(f"{treated}_{target}={'head+blocks.*' if target == 'module' else '*.scale+*.bias'}")


def format_rules(rules: Iterable[Rule]) -> str:
    """Write rules as text, neighbours with one key joined by ``+``.

    Example:
        >>> format_rules([Rule("low", op="softmax"), Rule("low", op="gelu"), Rule("fp32", module="head")])
        'low=softmax+gelu,fp32_module=head'
    """
    groups = groupby(rules, key=lambda rule: rule.key)
    return ",".join(f"{key}={'+'.join(rule.name for rule in group)}" for key, group in groups)


def parse_rules(key: str, names: str, reason: str = "") -> tuple[Rule, ...]:
    """Read what :func:`format_rules` writes for one key.

    Args:
        key: A treatment, alone or with ``_module`` or ``_param`` behind it.
        names: Names joined by ``+``.
        reason: Why, for all of them.

    Raises:
        PolicyError: As :class:`Rule` does.
    """
    treatment, _, target = key.rpartition("_") if key not in TREATMENTS else (key, "", "")
    scoped = [("", "", name) if target else name.partition("@") for name in names_in(names)]
    for op, at, glob in scoped:
        if (name := escaped(glob)) != glob:
            raise _unwritable_error(treatment, target or "module", glob, f"{key}={op}{at}{name}")
    if target:
        return tuple(Rule(cast(Any, treatment), **{target: glob}, reason=reason) for *_, glob in scoped)
    selectors = ((op, module if at else None) for op, at, module in scoped)
    return tuple(Rule(cast(Any, treatment), op=op, module=module, reason=reason) for op, module in selectors)


@lru_cache(maxsize=4096)  # a region of a policy that is new asks it of each rule for each op
def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def _matches_op(pattern: str, op: str) -> bool:
    return fnmatch.fnmatchcase(op, pattern) if _is_glob(pattern) else op == resolve(pattern)


def _ancestry(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
