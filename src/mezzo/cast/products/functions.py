"""Calls of torch's functions that are products of a weight, and what they return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.cast.notes import listeners
from mezzo.cast.products.linear import differentiable, not_transformed
from mezzo.cast.products.memory import Memory
from mezzo.cast.products.operands import Quantiser
from mezzo.cast.products.recipes import Recipe
from mezzo.compiling import never_compiled
from mezzo.dispatch import DisableTorchFunction, is_transformed
from mezzo.sharded import is_distributed


class Operands(NamedTuple):
    """A product of a weight, as ``linear`` has it."""

    x: Tensor  # (..., in)
    weight: Tensor  # (out, in)
    bias: Tensor | None
    is_turned: bool = False  # the result is the transpose of what was asked for


#: The arguments of each op by name, and which of them are multiplied.
_NAMES: Final = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "mm": ("input", "mat2"),
    "matmul": ("input", "other"),
}
_FACTORS: Final = {op: names[-2:] if op != "linear" else names[:2] for op, names in _NAMES.items()}


def operands_or_reason(op: str, args: Sequence[Any], kwargs: dict[str, Any], multiple: int) -> Operands | str:
    """Read a call as a product of a weight.

    Args:
        op: Its base name, one of ``QUANTISABLE``.
        args: As the program calls it: a weight is its parameter there.
        kwargs: As the program calls it.
        multiple: What each dimension must be a multiple of.

    Returns:
        The operands, or why the product stays in the policy's dtype.
    """
    named = _named(op, args, kwargs)
    if len(args) > 3 or named.get("beta", 1) != 1 or named.get("alpha", 1) != 1 or named.get("out_dtype") is not None:
        return "it scales its operands, or names another dtype"
    first, second = (named[name] for name in _FACTORS[op])
    is_turned = op != "linear" and _is_parameter(first) and not _is_parameter(second)
    if op == "matmul" and not (is_turned or _is_parameter(second)):
        return "no operand is a parameter"
    if second.dim() != 2 or first.dim() < 1 or (is_turned and (first.dim() != 2 or op == "addmm")):
        return "it is no product of a matrix with a weight"
    if is_distributed(first) or is_distributed(second):
        return "tensor parallelism has cut an operand"
    operands = _arranged(op, named, is_turned=is_turned)
    sizes = {
        "rows": math.prod(operands.x.shape[:-1]), "features in": operands.weight.shape[1],
        "features out": operands.weight.shape[0],
    }  # fmt: skip
    odd = [f"{size} {name}" for name, size in sizes.items() if size == 0 or size % multiple]
    return f"{' and '.join(odd)}, no multiple of {multiple}" if odd else operands


def cast_as(operands: Operands, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Operands:
    """Read the same call with cast arguments."""
    return _arranged(op, _named(op, args, kwargs), is_turned=operands.is_turned)


def _named(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if "self" in kwargs:  # what operators of torch.ops.aten call their first argument
        args, kwargs = (kwargs["self"], *args), {key: value for key, value in kwargs.items() if key != "self"}
    return {**dict(zip(_NAMES[op], args, strict=False)), **kwargs}


def _arranged(op: str, named: dict[str, Any], *, is_turned: bool) -> Operands:
    first, second = (named[name] for name in _FACTORS[op])
    if op == "linear":
        return Operands(first, second, named.get("bias"))
    if is_turned:
        return Operands(second.mT, first, None, is_turned=True)
    return Operands(first, second.mT, named["input"] if op == "addmm" else None)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def product(operands: Operands, recipe: Recipe, memories: Sequence[Memory], weight: Tensor) -> Tensor:
    """Compute a product of a weight, forward and, when asked, backward.

    Args:
        operands: In the policy's dtype.
        recipe: The formats and scales of the product.
        memories: The histories of earlier steps, of each model.
        weight: The weight as the program has it.

    Returns:
        The call's result.

    **Cost**: for the backward pass one byte is kept for each element of the input, and of the weight (half of that, and
    a scale for each block, in NVFP4). No host sync.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        raise not_transformed(recipe)
    if torch.compiler.is_compiling() and not (memories and recipe.remembers):
        return _by_op(operands, recipe.key)
    rows = operands.x.reshape(-1, operands.x.shape[-1])
    return _returned(_run(rows, operands.weight, operands.bias, recipe, memories, weight), operands)


def placed(op: str, key: str, is_turned: bool, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a call as a product below sixteen bits, in a graph.

    Args:
        op: Its base name.
        key: The recipe's.
        is_turned: As of :class:`Operands`.
        *args: In the policy's dtype.
        **kwargs: As the call has them.
    """
    return _by_op(_arranged(op, _named(op, args, kwargs), is_turned=is_turned), key)


def _by_op(operands: Operands, key: str) -> Tensor:
    rows, grads = operands.x.reshape(-1, operands.x.shape[-1]), torch.is_grad_enabled()
    needs = grads and rows.requires_grad, grads and operands.weight.requires_grad
    out: Tensor = torch.ops.mezzo.product(rows, operands.weight, operands.bias, key, *needs)[0]
    return _returned(out, operands)


def _returned(out: Tensor, operands: Operands) -> Tensor:
    return out.mT if operands.is_turned else out.view(*operands.x.shape[:-1], operands.weight.shape[0])


@never_compiled
def _run(
    rows: Tensor, low_weight: Tensor, bias: Tensor | None, recipe: Recipe, memories: Sequence[Memory], weight: Tensor
) -> Tensor:
    """Run in Python, and out of graphs where something is known of earlier steps."""
    with DisableTorchFunction():  # a mode is asked about every attribute that is read, and there are many
        memory, slot = None, None
        if recipe.remembers:
            first = memories[0] if memories else None  # for weights that are computed, as those of adapters
            memory = next((candidate for candidate in memories if candidate.knows(weight)), first)
            slot = memory.slot(weight) if memory is not None and recipe.delayed else None
        return differentiable(rows, low_weight, bias, Quantiser(recipe, memory, slot, listeners(weight)))
