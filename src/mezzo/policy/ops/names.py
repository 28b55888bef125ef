"""From any spelling of an op to its base name, and from there to torch's callables."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from mezzo.dispatch import INNER_FUNCTIONS
from mezzo.errors import PolicyError, shown
from mezzo.policy.ops.table import MODULES, OPS, PADDLE_ALIASES, SPELLINGS, SYNONYMS, VIEWS, synonyms_of

# The namespaces where a user finds functions, each with the prefix of the op's base name.
_NAMESPACES: Final[tuple[tuple[str, Any], ...]] = (
    *(("", namespace) for namespace in (torch, functional, INNER_FUNCTIONS, torch.Tensor)),
    *(("linalg_", torch.linalg), ("fft_", torch.fft), ("", torch.special)),
    ("sparse_", torch.sparse),
)
# How names begin, the longer first, and the prefix of the base name; None for the classes of torch.nn.
_PREFIXES: Final[tuple[tuple[str, str | None], ...]] = (
    ("torch.nn.functional.", ""), ("nn.functional.", ""), ("functional.", ""), ("F.", ""),
    ("torch.linalg.", "linalg_"), ("linalg.", "linalg_"), ("torch.fft.", "fft_"), ("fft.", "fft_"),
    ("torch.sparse.", "sparse_"), ("sparse.", "sparse_"), ("torch.special.", ""), ("special.", ""),
    ("aten::special_", ""), ("torch.ops.aten.special_", ""),
    ("torch.Tensor.", ""), ("Tensor.", ""), ("torch._C._nn.", ""),
    ("torch.ops.aten.", ""), ("ops.aten.", ""), ("aten::", ""), ("aten.", ""),
    ("torch.nn.modules.", None), ("torch.nn.", None), ("nn.", None), ("torch.", ""),
)  # fmt: skip
_IN_PLACE_OPERATORS: Final = frozenset(
    f"__i{operator}__"
    for operator in "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()
)
_PADDLE_PREFIXES: Final = ("paddle:", "paddle.nn.functional.", "paddle.")


@functools.cache
def functions(name: str) -> tuple[Callable[..., Any], ...]:
    """List the Python callables behind an op's base name that a treatment can reach.

    Args:
        name: A base name, such as ``softmax`` or ``linalg_inv``.

    Returns:
        Each distinct callable once: ``torch.softmax``, ``F.softmax``, ``Tensor.softmax``. Empty for a name
        that torch does not know, for views, which nothing ever casts, and for in-place forms: those of an op are
        :func:`in_place_forms`.

    Example:
        >>> torch.Tensor.__matmul__ in functions("matmul"), functions("exp_"), functions("view")
        (True, (), ())
    """
    return () if name in VIEWS or is_in_place(name) else callables(name)


def callables(name: str) -> tuple[Callable[..., Any], ...]:
    """List every Python callable behind an op's base name, those that nothing casts too."""
    names = (name, *synonyms_of(name))
    attributes = (
        getattr(namespace, candidate.removeprefix(prefix), None)
        for prefix, namespace in _NAMESPACES
        for candidate in names
        if candidate.startswith(prefix)
    )
    return tuple(
        dict.fromkeys(function for function in attributes if callable(function) and not inspect.isclass(function))
    )


@functools.cache
def in_place_forms(name: str) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """List the callables that write in place what an op returns.

    Args:
        name: The op's base name.

    Returns:
        Each with the function that returns a new tensor instead, from the same arguments.

    Example:
        >>> in_place_forms("exp")[torch.Tensor.exp_] is torch.Tensor.exp, in_place_forms("transpose")
        (True, {})
    """
    if name in VIEWS:
        return {}
    forms: dict[Callable[..., Any], Callable[..., Any]] = {}
    for synonym in (name, *synonyms_of(name)):
        form = f"__i{synonym.removeprefix('__')}" if synonym.startswith("__") else f"{synonym}_"
        for _, namespace in _NAMESPACES[:4] if is_in_place(form) else ():
            if (writes := getattr(namespace, form, None)) is not None:
                forms.setdefault(writes, getattr(namespace, synonym, None) or callables(name)[0])
    return forms


def is_in_place(name: str) -> bool:
    """Whether a bare name is that of an in-place variant: ``exp_``, ``__iadd__``.

    Example:
        >>> is_in_place("exp_"), is_in_place("__imul__"), is_in_place("__matmul__")
        (True, True, False)
    """
    if name.startswith("__"):
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_") and any(hasattr(namespace, name) for _, namespace in _NAMESPACES[:4])


def written_form(spelling: str, name: str) -> Literal["in-place", "out="] | None:
    """Return whether an op writes in place or to ``out=``; ``None`` where it writes to no argument.

    Args:
        spelling: The op as the caller spells it; an overload in it tells ``out=`` forms.
        name: Its name by :func:`resolve`.

    Example:
        >>> written_form("torch.exp_", "exp_"), written_form("aten::sum.IntList_out", "sum"), written_form("exp", "exp")
        ('in-place', 'out=', None)
    """
    if is_in_place(name):
        return "in-place"
    overload = spelling.rpartition(".")[2] if "." in spelling else ""
    return "out=" if overload == "out" or overload.endswith("_out") else None


def out_of_place(name: str) -> str | None:
    """Return the op that returns a new tensor instead of writing in place; ``None`` where there is none.

    Example:
        >>> out_of_place("exp_"), out_of_place("__ipow__"), out_of_place("zero_")
        ('exp', 'pow', None)
    """
    bare = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    return _known_as(bare)


def resolve(name: str, *, in_place: bool = False, treatment: str = "") -> str:
    """Return the base name for any spelling of an op.

    Args:
        name: ``softmax``, ``torch.softmax``, ``F.softmax``, ``Tensor.softmax``, ``aten::softmax.int``,
            ``torch.ops.aten.softmax.int``, ``nn.Softmax``, ``__matmul__``, or a name of Paddle's such as
            ``softmax_with_cross_entropy``. Names of custom ops (``mylib::op``) are kept. Where two systems use one word
            it is torch's: ``mul`` is element-wise, and ``paddle:mul`` the matrix product that Paddle calls so.
        in_place: Whether in-place forms are allowed. They keep their own name. A rule names the op itself, and holds
            for its in-place and ``out=`` forms.
        treatment: Of the rule that names it, for the error; empty where no rule does.

    Returns:
        The base name.

    Raises:
        PolicyError: Neither the op table nor torch knows the name, or it is that of an in-place form.

    Example:
        >>> resolve("aten::softmax.int"), resolve("torch.linalg.inv"), resolve("nn.LayerNorm")
        ('softmax', 'linalg_inv', 'layer_norm')
        >>> resolve("mul"), resolve("paddle:mul")
        ('mul', 'matmul')
    """
    if not isinstance(name, str):
        raise PolicyError(f"an op's name is {shown(name)}, not text", write='"softmax"')
    # The casting plan asks for hundreds of base names.
    return name if name in OPS else _resolve(name, in_place, treatment)


def matching(pattern: str) -> Iterator[str]:
    """Yield the classified ops whose base name matches a glob.

    Example:
        >>> list(matching("conv?d"))
        ['conv1d', 'conv2d', 'conv3d']
    """
    matches = re.compile(fnmatch.translate(pattern)).match
    return (name for name in OPS if matches(name))


@functools.lru_cache(maxsize=4096)
def _resolve(name: str, in_place: bool, treatment: str) -> str:
    prefix = next((candidate for candidate in _PADDLE_PREFIXES if name.startswith(candidate)), "")
    bare = name.removeprefix(prefix)
    if prefix and bare in PADDLE_ALIASES:
        return PADDLE_ALIASES[bare]
    if (custom := _custom(bare)) is not None:
        return custom
    bare = _without_prefix(bare)
    if is_in_place(bare):
        if in_place:
            return bare
        instead = out_of_place(bare)
        raise PolicyError(
            f"{name!r} is the in-place form of an op" if instead else f"the in-place op {name!r} is never cast",
            why=f"a rule on {instead} holds for it too" if instead else "what it writes to keeps its dtype",
            write=_rule_text(instead, treatment) if instead else "",
        )
    if (known_op := _known_as(bare)) is not None:
        return known_op
    if inspect.isclass(getattr(torch.nn, bare, None)):
        raise PolicyError(
            f"{name!r} is a module, not an op",
            why="it runs several ops, or none",
            write='a rule on its path in the model: policy.keep_fp32(modules=["head"]), the text fp32_module=head',
        )
    nearest_op = _near(bare)
    cures = [_rule_text(nearest_op, treatment)] if nearest_op else []
    if treatment in ("low", "fp32"):
        low_rule = f'policy.evolve(rules=[Rule("low", module="{bare}"), *policy.rules])'
        rule = f'policy.keep_fp32(modules=["{bare}"])' if treatment == "fp32" else low_rule
        cures.append(f"for a module {rule}, the text {treatment}_module={bare}")
    raise PolicyError(
        f"unknown op {name!r}",
        why=(f"did you mean {nearest_op!r}? " if nearest_op else "") + "neither the op table nor torch has it",
        write=";\n".join(cures) or "the name of a function in torch, torch.nn.functional or torch.Tensor",
    )


def _rule_text(op: str, treatment: str) -> str:
    """Write a rule on an op in both spellings; the op's name where no rule is asked about."""
    return f'policy.{treatment}("{op}"), the text {treatment}={op}' if treatment else repr(op)


def _custom(name: str) -> str | None:
    """Return the qualified name of an op outside aten."""
    if name.startswith(("torch.ops.", "ops.")) and not name.startswith(("torch.ops.aten.", "ops.aten.")):
        library, _, op = name.removeprefix("torch.").removeprefix("ops.").partition(".")
        return f"{library}::{op.split('.')[0]}"
    return name if "::" in name and not name.startswith("aten::") else None


def _without_prefix(name: str) -> str:
    """Return a name without its namespace and overload; the base name keeps a family such as ``linalg_``."""
    for prefix, family in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest.rsplit(".", 1)[-1] if family is None else family + rest.split(".")[0]
    base, dot, overload = name.partition(".")
    return base if dot and overload and base in OPS else name


def _known_as(bare: str) -> str | None:
    """Find the op that a bare name stands for."""
    bare = SYNONYMS.get(bare, SPELLINGS.get(bare, bare))
    if bare in OPS:
        return bare
    if bare.removeprefix("special_") in OPS:
        return bare.removeprefix("special_")
    if callables(bare):
        return bare
    for family in ("linalg_", "fft_"):
        if family + bare in OPS:
            return family + bare
    if bare in PADDLE_ALIASES:
        return PADDLE_ALIASES[bare]
    return MODULES.get(bare) or _module(bare)


def _module(name: str) -> str | None:
    """Find the functional form of a torch.nn class by its letters: LayerNorm, LazyLinear, CrossEntropyLoss."""
    if not inspect.isclass(getattr(torch.nn, name, None)):
        return None
    name = name.removeprefix("Lazy")
    letters, by_letters = name.lower(), _by_letters()
    return MODULES.get(name) or by_letters.get(letters) or by_letters.get(letters.removesuffix("loss"))


@functools.cache
def _by_letters() -> Mapping[str, str]:
    return {name.replace("_", ""): op for name, op in ({op: op for op in OPS} | dict(SYNONYMS)).items()}


def _near(bare: str) -> str:
    """Return the nearest known name, whatever its case; the list itself would be too long to read."""
    lowered = {word.lower(): word for word in _vocabulary()}
    matches = difflib.get_close_matches(bare.lower(), lowered, n=1, cutoff=0.7)
    return lowered[matches[0]] if matches else ""


@functools.cache
def _vocabulary() -> tuple[str, ...]:
    """List the names that a misspelt op may have meant; of two spelt alike the later wins."""
    public = (name for name in (*dir(torch.Tensor), *dir(functional), *dir(torch)) if not name.startswith("_"))
    callable_names = (name for name in public if callables(name))
    return tuple(dict.fromkeys((*callable_names, *PADDLE_ALIASES, *SYNONYMS, *MODULES, *OPS)))
