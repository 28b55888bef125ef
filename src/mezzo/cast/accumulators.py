"""The autograd nodes that add up a parameter's gradients, and whether anything but the parameter keeps one."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = ["kept", "marks"]

_MARK: Final = "mezzo.cast.accumulators"


def marks(leaf: Tensor) -> dict[str, Any]:
    """Return what can be noted on a leaf's node; it is gone with the node, which dies at once if nothing keeps it."""
    node: Any = get_gradient_edge(leaf).node  # torch declares metadata as a method, and it is a property
    found: dict[str, Any] = node.metadata
    return found


def kept(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return those leaves whose nodes something keeps: the graph of a loss or an output, or a data-parallel wrapper.

    Args:
        leaves: Parameters; those that do not require a gradient have no such node.
    """
    found = _alive([leaf for leaf in leaves if leaf.requires_grad])
    if found:
        gc.collect()  # what is only part of a cycle is not kept by anything
        found = _alive(found)
    return found


def _alive(leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        marks(leaf)[_MARK] = True
    return [leaf for leaf in leaves if marks(leaf).pop(_MARK, False)]
