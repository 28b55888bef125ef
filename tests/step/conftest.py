"""The implementations of both passes, one after another."""

import dataclasses

import pytest

from mezzo.step.executors import choose, cpp_source, portable, triton, triton_source

from .executors.implementations import PARAMETERS, prepared


@pytest.fixture(params=PARAMETERS)
def implementation(request, monkeypatch):
    """Every implementation in turn."""
    return prepared(request, monkeypatch)


@pytest.fixture
def lacking(monkeypatch):
    """Take operations out of every table, as if a release of torch traced functions to others; nothing is known yet."""
    caches = (choose._working, choose._shared_on, portable.warn_once)
    caches += (cpp_source.update_source, triton_source.update_source)

    def forget():
        for cached in caches:
            cached.cache_clear()

    def taken_out(*operations):
        for module, name in ((cpp_source, "CPP"), (triton_source, "TRITON"), (triton, "NUMBERS")):
            dialect = getattr(module, name)
            left = {
                operation: line
                for operation, line in dialect.operations.items()
                if not operation.startswith(operations)
            }
            monkeypatch.setattr(module, name, dataclasses.replace(dialect, operations=left))

    forget()
    yield taken_out
    forget()
