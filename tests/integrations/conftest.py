"""The frameworks, imported where a test needs them: that takes seconds, and every process of the suite reads this."""

import importlib
import warnings
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def hf():
    """Accelerate, transformers and mezzo's bridges to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
        transformers = pytest.importorskip("transformers", reason="needs transformers")
        bridges = [importlib.import_module(f"mezzo.integrations.{name}") for name in ("accelerate", "transformers")]
    reset = accelerate.state.AcceleratorState._reset_state
    return SimpleNamespace(
        accelerate=accelerate, of=transformers, attach=bridges[0].attach, plug=bridges[1].plug, ours=bridges[1],
        forget=lambda: reset(reset_partial_state=True),
    )  # fmt: skip


@pytest.fixture
def anew(hf):
    """With no trace of an accelerator of before: all of them share one state."""
    hf.forget()
    yield
    hf.forget()
