"""The table of faults stays true: each text stands in the source once, and the tests that catch it are there."""

import ast
from functools import cache
from pathlib import Path

import pytest

from .table import FAULTS

ROOT = Path(__file__).parents[2]


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_somebody_is_to_catch_it(fault):
    source = (ROOT / "src" / "mezzo" / fault.file).read_text()
    assert source.count(fault.text) == 1, f"{fault.text!r} in {fault.file}: plant the fault where the rule stands now"
    assert fault.planted != fault.text
    ast.parse(source.replace(fault.text, fault.planted))
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), f"{file} is gone: name the test that catches the fault now"
        assert not function or function.partition("[")[0] in functions(file), f"{test} is gone"


def test_names_and_places_are_not_taken_twice():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.text, fault.planted) for fault in FAULTS}) == len(FAULTS)
