"""Equations of ``torch.einsum``: which products stand in one, and a contraction pair by pair."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.compiling import constant_in_graphs, is_one


class Equation(NamedTuple):
    """What an equation says.

    Attributes:
        inputs: The letters of each operand, those in the place of an ellipsis too.
        output: Those of the result, spelt out.
        inner: Of each letter over which a product sums the operands that it stands in, and where.
        sums: Whether a letter is summed over that stands in one operand alone.
    """

    inputs: tuple[str, ...]
    output: str
    inner: tuple[tuple[tuple[int, int], ...], ...]
    sums: bool


#: As torch numbers letters in sublists.
_LETTERS: Final = string.ascii_uppercase + string.ascii_lowercase


def spelt(args: Any, kwargs: Any) -> tuple[str, Sequence[Tensor]]:
    """Return an equation and its operands, in whichever way ``torch.einsum`` is called."""
    args = (kwargs["equation"], *args) if "equation" in kwargs else args
    if isinstance(args[0], str):
        is_list = len(args) == 2 and isinstance(args[1], list | tuple)
        return args[0], args[1] if is_list else args[1:]
    lists = [*args[1::2], *args[-1:]] if len(args) % 2 else args[1::2]
    words = ["".join(["..." if number is Ellipsis else _LETTERS[number] for number in numbers]) for numbers in lists]
    count = len(args) // 2
    return ",".join(words[:count]) + "->" * (len(args) % 2) + "".join(words[count:]), args[: 2 * count : 2]


@constant_in_graphs
def read(equation: str, dims: tuple[int, ...]) -> Equation | None:
    """Read an equation for operands with these many dimensions; ``None`` where torch will say what is wrong with it.

    Example:
        >>> read("...i,ij", (3, 2))
        Equation(inputs=('ABi', 'ij'), output='ABj', inner=(((0, 2), (1, 0)),), sums=False)
    """
    return _read(equation, dims)


@functools.lru_cache(maxsize=1024)
def _read(equation: str, dims: tuple[int, ...]) -> Equation | None:
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = [term.replace("...", "", 1) for term in left.split(",")]
    hidden = [number - len(term) for number, term in zip(dims, terms, strict=False)]
    free = [letter for letter in _LETTERS if letter not in equation]
    if len(terms) != len(dims) or min(hidden) < 0 or max(hidden) > len(free) or not "".join((*terms, "i")).isalpha():
        return None
    hidden_letters = "".join(free[: max(hidden)])
    inputs = [
        term.replace("...", hidden_letters[len(hidden_letters) - number :])
        for term, number in zip(left.split(","), hidden, strict=True)
    ]
    if any(len(term) != number for term, number in zip(inputs, dims, strict=True)):
        return None
    if not arrow:
        letters = "".join(terms)
        output = "..." + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    output = output.replace("...", hidden_letters)
    summed = [letter for letter in dict.fromkeys("".join(inputs)) if letter not in output]
    # For each summed letter the operands that have it, and the dimension in each.
    indices = [tuple((i, term.index(letter)) for i, term in enumerate(inputs) if letter in term) for letter in summed]
    inner = tuple(pairs for pairs in indices if len(pairs) > 1)
    return Equation(tuple(inputs), output, inner, len(inner) < len(indices))


def contracts(equation: Equation, operands: Sequence[Tensor]) -> bool:
    """Whether any letter is summed over that stands in several operands."""
    for indices in equation.inner:
        if len([None for index, dim in indices if not is_one(operands[index].shape[dim])]) > 1:
            return True
    return False


def is_whole(equation: Equation, operands: Sequence[Tensor]) -> bool:
    """Whether it is one product, in which no letter of one operand is summed over by itself."""
    if equation.sums or len(operands) != 2:
        return False
    a, b = (x.shape for x in operands)
    return all(is_one(a[i]) == is_one(b[j]) for (_, i), (_, j) in equation.inner)


def in_pairs(equation: Equation, operands: Sequence[Tensor]) -> Tensor:
    """Contract pair by pair, by einsums of one and of two operands, on the path that torch takes."""
    terms = [*zip(equation.inputs, operands, strict=True)]
    for i, j in _path(equation, operands):
        (a, x), (b, y) = terms[i], terms[j]
        terms = [term for index, term in enumerate(terms) if index not in (i, j)]
        letters_needed = "".join([equation.output, *[letters for letters, _ in terms]])
        # Letters of one operand alone, and those that are broadcast in the other one, are summed first.
        shared = [letter for letter in a if letter in b]
        inner = [letter for letter in shared if is_one(x.shape[a.index(letter)]) == is_one(y.shape[b.index(letter)])]
        (a, x), (b, y) = (_summed(letters, of, letters_needed, inner) for letters, of in ((a, x), (b, y)))
        out = (
            "".join([letter for letter in dict.fromkeys(a + b) if letter in letters_needed])
            if terms
            else equation.output
        )
        terms.append((out, torch.einsum(f"{a},{b}->{out}", x, y)))
    return terms[0][1]


def _summed(letters: str, x: Tensor, needed: str, inner: Sequence[str]) -> tuple[str, Tensor]:
    left = "".join([letter for letter in dict.fromkeys(letters) if letter in needed or letter in inner])
    return left, x if left == letters else torch.einsum(f"{letters}->{left}", x)


def _path(equation: Equation, operands: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return which two terms are multiplied next, of a list to whose end their product goes."""
    count, optimizer = len(operands), torch.backends.opt_einsum
    if count > 2 and not torch.compiler.is_compiling() and optimizer.is_available() and optimizer.enabled:
        text = f"{','.join(equation.inputs)}->{equation.output}"
        pairs: list[tuple[int, int]] = optimizer.get_opt_einsum().contract_path(
            text, *operands, optimize=optimizer.strategy
        )[0]
        return pairs
    return [(0, 1), *[(number - 1, 0) for number in range(count - 1, 1, -1)]]
