"""Rules: which treatment an op, a module or a parameter gets, and which rule decided."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, cast

from mezzo.errors import PolicyError, closest, nearest, shown
from mezzo.policy.ops import TREATMENTS, Treatment, matching, resolve
from mezzo.policy.spelling import both, treatment_of

__all__ = ["RULE_KEYS", "Decision", "Rule", "format_rules", "parse_rules"]

_TEXT_CHARACTERS = ",+=@;()#"
_STORAGE_TREATMENTS: Final[tuple[Treatment, ...]] = ("low", "fp32")
#: What stands for rules in a policy's text: a treatment, and what it is given to where that is no op.
RULE_KEYS: Final = (
    *TREATMENTS,
    *(f"{treatment}_{kind}" for kind in ("module", "param") for treatment in _STORAGE_TREATMENTS),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Give one treatment to the ops, modules or parameters that match.

    In a policy rules are ordered and the first match wins. A module glob also covers everything inside
    the modules it matches.

    Attributes:
        treatment: ``low``, ``fp32``, ``fp32_math``, ``promote``, ``native`` or ``ban``.
        op: Glob on the op's base name (any spelling that :func:`mezzo.policy.ops.resolve` knows).
        module: Glob on the module's path in the model. With ``op`` both must match; alone it takes ``low`` and
            ``fp32``.
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
            near = treatment_of(word) or closest(word, TREATMENTS) or "fp32"
            raise PolicyError(
                f"unknown treatment {shown(self.treatment)}",
                where=f"Rule({shown(self.treatment)}, …)",
                why=nearest(shown(self.treatment), TREATMENTS),
                write=_example(near, next((kind for kind in ("module", "param") if getattr(self, kind)), "op")),
            )
        if not isinstance(self.reason, str):
            raise PolicyError(f"the reason is {shown(self.reason)}, not text", write='reason="…"')
        globs = {"op": self.op, "module": self.module, "param": self.param}
        for kind, glob in globs.items():
            if not isinstance(glob, str | None):
                raise PolicyError(f"the {kind} glob is {shown(glob)}, not text", write=_example(self.treatment, kind))
        rule = f"Rule({self.treatment!r}"
        if not any(globs.values()):
            write = ";\nor ".join(_example(self.treatment, kind) for kind in globs)
            raise PolicyError("a rule must match something", where=f"{rule})", write=write)
        for kind, glob in globs.items():
            if glob is not None and (not glob or any(c in _TEXT_CHARACTERS or c.isspace() for c in glob)):
                raise PolicyError(
                    f"the {kind} glob {shown(glob)} cannot be written in a policy's text",
                    why="a glob is not empty and has no space and none of , + = @ ; ( ) #",
                    write=f"one name for each {kind}: {_example(self.treatment, kind)}",
                )
        if self.param is not None and (self.op is not None or self.module is not None):
            raise PolicyError(
                f"the rule on parameter {self.param!r} also names an op or a module",
                why="a parameter's path already contains its module's, and its rule covers every op that reads it",
                write=f'{rule}, param="{self.module or "block"}.{self.param}")',
            )
        if self.op is None and self.treatment not in _STORAGE_TREATMENTS:
            kind, glob = ("module", self.module) if self.param is None else ("parameter", self.param)
            raise PolicyError(
                f"a {kind} cannot be treated as {self.treatment!r}",
                where=f"{kind} {glob!r}",
                why=f"a {kind} takes low and fp32, and its weights are stored so; {self.treatment} is of ops",
                write=both(f"{self.treatment}=*@{glob}" if self.param is None else f"fp32_param={glob}"),
            )
        if self.op is not None and not _is_glob(self.op):
            resolve(self.op, treatment=self.treatment)

    def matches(self, *, op: str, module: str | None) -> bool:
        """Say whether this rule decides about an op.

        Args:
            op: The op's base name.
            module: Path of the module it runs in; ``None`` outside any prepared module.
        """
        if self.param is not None:
            return False
        return (self.op is None or _matches_op(self.op, op)) and (
            self.module is None or (module is not None and self.matches_module(module))
        )

    def matches_module(self, path: str) -> bool:
        """Say whether the module glob matches a module or one that contains it."""
        return self.module is not None and any(fnmatch.fnmatchcase(part, self.module) for part in _ancestry(path))

    def matches_param(self, path: str) -> bool:
        """Say whether the parameter glob matches a parameter's or buffer's path."""
        return self.param is not None and fnmatch.fnmatchcase(path, self.param)

    @property
    def ops(self) -> tuple[str, ...]:
        """The classified ops it names: one, or those that its glob matches, or none."""
        if self.op is None:
            return ()
        return tuple(matching(self.op)) if _is_glob(self.op) else (resolve(self.op),)

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
        return self.treatment if self.op is not None else f"{self.treatment}_module"

    @property
    def name(self) -> str:
        """What stands for this rule behind its key: the glob, or ``op@module``."""
        if self.op is not None and self.module is not None:
            return f"{self.op}@{self.module}"
        return self.op or self.module or self.param or ""

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an op gets, and why.

    Attributes:
        treatment: The treatment.
        rule: The rule that decided; ``None`` when the level or the op table did.
        reason: Why, in words.
        source: Who decided: ``policy`` (one of its rules), ``op table``, ``level O2`` (it casts no single op), a field
            such as ``lists=device``, or ``torch``, to which the op is left. Whose lists name the op, which decides
            nothing, is in the table (``mezzo show ops``).
    """

    treatment: Treatment
    rule: Rule | None
    reason: str
    source: str


def _example(treatment: Treatment | str, kind: str) -> str:
    """Write a cure that gives a treatment to things of a kind, in both spellings."""
    if kind == "op":
        return both(f"{treatment}=softmax+gelu")
    treated = treatment if treatment in _STORAGE_TREATMENTS else "fp32"
    return both(f"{treated}_{kind}={'head+blocks.*' if kind == 'module' else '*.scale+*.bias'}")


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
    treatment, _, kind = key.rpartition("_") if key not in TREATMENTS else (key, "", "")
    if kind:
        return tuple(Rule(cast(Any, treatment), **{kind: name}, reason=reason) for name in names.split("+"))
    scoped = (name.partition("@") for name in names.split("+"))
    made = ((op, module if at else None) for op, at, module in scoped)
    return tuple(Rule(cast(Any, treatment), op=op, module=module, reason=reason) for op, module in made)


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
