"""What the tests of a session's state compare."""

import struct

import pytest
import torch
from torch.utils._pytree import tree_flatten


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
