"""Tables of tests whose whole product takes minutes."""

from itertools import combinations, product

import pytest


def pairwise(*factors):
    """Return all combinations as parameters; a few run by default, in which any two values meet, and the rest are slow.

    What the factors do to each other two at a time is where faults lie; ``make test-all`` runs the whole product.
    """
    rows = list(product(*(range(len(values)) for values in factors)))
    left = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    chosen = set()
    while left:
        best = max(rows, key=lambda row: len(left & {*combinations(enumerate(row), 2)}))
        chosen.add(best)
        left -= {*combinations(enumerate(best), 2)}
    return [
        pytest.param(
            *(values[number] for values, number in zip(factors, row, strict=True)),
            marks=() if row in chosen else pytest.mark.slow,
        )
        for row in rows
    ]
