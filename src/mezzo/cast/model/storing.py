"""From one storage of a model's tensors to another one: the same tensors, and the same values."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from mezzo.cast.model.checks import Stored
from mezzo.errors import UnsupportedError
from mezzo.sharded import restore_data
from mezzo.weights.models import Form, of_halves, recode, store, try_plainly


@torch.no_grad()
def store_as(stored: Stored, model: nn.Module, undo: ExitStack) -> None:
    """Store the tensors of a model otherwise, where they are; each stays the object that it is.

    Forms that hold each bit come first. Of tensors that lose some the values of before are kept until ``undo`` is
    dropped; all that are moved have no gradient.

    Args:
        stored: How. The caller has checked that no value is beyond a range.
        model: Whose tensors they are.
        undo: Gets what puts back each tensor, bit for bit.

    Raises:
        UnsupportedError: Something in C++ refers to a tensor that would be another one.

    **Cost**: a pass over each tensor that moves, and 4 bytes for each element that loses bits.
    """
    names: dict[Tensor, str] = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    moves = stored.moves()
    for tensor in sorted(moves, key=lambda moved: not moves[moved].is_exact):
        name, before = names.get(tensor, ""), Form.of(tensor)
        undo.callback(_put_back, tensor, before, name, None if moves[tensor].is_exact else tensor.detach())
        _put(tensor, moves[tensor], name)


def _put(tensor: Tensor, form: Form, name: str) -> None:
    """Store one tensor in another form."""
    if form.in_halves and of_halves(tensor):
        recode(tensor, form.dtype)
    elif form.in_halves:
        restore_data(tensor, tensor.data.float())
        store({tensor: form.dtype}, {tensor: name})  # type: ignore[dict-item]
    else:
        if try_plainly([tensor]):
            raise UnsupportedError(
                f"the parameter {name} cannot be stored otherwise now",
                why="something in C++ refers to it, as what torch.profiler has recorded with record_shapes does",
                write="del what was recorded, first",
            )
        restore_data(tensor, tensor.data.to(form.dtype))


@torch.no_grad()
def _put_back(tensor: Tensor, form: Form, name: str, values: Tensor | None) -> None:
    """Store one tensor in the form that it had, with the values that it had."""
    if Form.of(tensor) != form:
        _put(tensor, form, name)
    if values is not None:
        tensor.detach().copy_(values)
