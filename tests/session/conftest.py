"""What the tests of a session's state compare, and what no test leaves to the next."""

import struct
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from mezzo.session.attach import attached_now


def _bits(tree):
    """Everything in nested containers, down to the bit: NaN equals itself, and −0 is not 0."""
    leaves, structure = tree_flatten(tree)
    return str(structure), [_leaf(leaf) for leaf in leaves]


def _leaf(leaf):
    if isinstance(leaf, torch.Tensor):
        if leaf.is_sparse:
            return "sparse", _leaf(leaf._indices()), _leaf(leaf._values())
        return leaf.dtype, tuple(leaf.shape), leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (type(leaf), struct.pack("d", leaf)) if isinstance(leaf, float) else (type(leaf), leaf)


@pytest.fixture(scope="session")
def bits():
    return _bits


def pytest_collection_modifyitems(items):
    """Tests write infinities into scaled gradients, of which sessions warn; tests of that warning see it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:(?s).*carry the loss scale"))


@pytest.fixture(autouse=True)
def nothing_attached():
    """One failing test leaves no session attached for those that follow."""
    yield
    if (amp := attached_now()) is not None:
        amp.detach()
