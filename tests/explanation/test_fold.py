"""Alike modules in one row: every fold is spelled out again, and gives the rows that went in."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.explanation.fold import folded


def texts(paths):
    return [fold.text for fold in folded(paths, str, lambda path: None)]


def spelled_out(pattern):
    """``a.{0..2,5}.b`` → every path that it stands for."""
    parts = []
    for part in re.split(r"\.(?![.\d,]*\})", pattern):
        found = re.fullmatch(r"\{(.*)\}", part)
        indices = []
        for run in found[1].split(",") if found else ():
            first, _, last = run.partition("..")
            indices += map(str, range(int(first), int(last or first) + 1))
        parts.append(indices or [part])
    return {".".join(each) for each in itertools.product(*parts)}


@pytest.mark.parametrize(
    "paths, expected",
    [
        ([f"blocks.{i}.norm1" for i in range(12)], ["blocks.{0..11}.norm1 ×12"]),
        (["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1"], ["blocks.{0,1}.norm1 ×2", "blocks.0.norm2"]),
        ([f"a.{i}" for i in (0, 2, 3, 4, 9)], ["a.{0,2..4,9} ×5"]),
        ([f"a.{i}.b.{j}" for i in range(3) for j in range(4)], ["a.{0..2}.b.{0..3} ×12"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0,1} ×2", "a.1.b.0"]),
        ([str(i) for i in range(3)], ["{0..2} ×3"]),
        (["layer1.0.conv", "layer2.0.conv"], ["layer1.0.conv", "layer2.0.conv"]),  # a digit in a name is no index
        (["a.01", "a.1", "a.²", "a.٣"], ["a.01", "a.1", "a.²", "a.٣"]),
        (["", "head"], ["", "head"]),
        (["a.0", "a.0", "a.1", "a.1"], ["a.{0,1} ×2", "a.{0,1} ×2"]),  # two calls in each: two rows
        ([], []),
    ],
)
def test_folds(paths, expected):
    assert texts(paths) == expected


def test_rows_that_differ_in_anything_else_stay_apart():
    rows = [("a.0", "x"), ("a.1", "y"), ("a.2", "x")]
    assert [fold.text for fold in folded(rows, lambda row: row[0], lambda row: row[1])] == ["a.{0,2} ×2", "a.1"]


PART = st.sampled_from(["a", "b", "0", "1", "2", "3", "7"])


@given(st.lists(st.lists(PART, min_size=1, max_size=4).map(".".join), unique=True, max_size=30))
def test_what_a_fold_says_is_what_went_in(paths):
    folds = folded(paths, str, lambda path: None)
    assert sorted(row for fold in folds for row in fold.rows) == sorted(paths)
    for fold in folds:
        assert spelled_out(fold.path) == set(fold.rows)
        assert list(fold.rows) == sorted(fold.rows, key=paths.index)
    assert [fold.rows[0] for fold in folds] == sorted((fold.rows[0] for fold in folds), key=paths.index)
