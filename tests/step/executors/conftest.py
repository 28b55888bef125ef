"""What tests of kernels share."""

import importlib

import numpy
import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Let kernels made here run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    language = importlib.import_module("triton.language")
    # If torch has imported Triton before, functions of its library are not the interpreter's.
    monkeypatch.setattr(language, "sum", triton.jit(language.sum.fn))
    # The interpreter patches what the compiler uses too, and does not put all of it back.
    before = [(module, dict(vars(module))) for module in (language, language.core, language.math, language.standard)]
    with numpy.errstate(all="ignore"):  # infinities are part of the arithmetic
        yield
    for module, names in before:
        vars(module).update(names)
