"""The cross entropy of a linear layer's outputs, of which a chunk of rows is there at a time."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mezzo.cast.arguments import BY_ARGUMENTS, Instead
from mezzo.cast.region import checkpoint_contexts
from mezzo.compiling import is_scripted
from mezzo.dispatch import is_transformed
from mezzo.errors import PolicyError, StateError, shown, unknown_word
from mezzo.sharded import is_distributed

#: The rows of a chunk, where nobody says how many.
ROWS: Final = 1024
_REDUCTIONS: Final = ("mean", "sum", "none")
#: Chunks have a multiple of so many rows, which products below sixteen bits ask for.
_ALIGNED: Final = 32


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int = ROWS,
) -> Tensor:
    """Return the cross entropy of a linear layer's outputs, without ever holding all of them.

    It is what ``cross_entropy(linear(input, linear_weight, linear_bias), target, …)`` computes, under any policy and
    without one: the same logits, losses of rows and gradients of ``input``. The losses of rows are added in FP32 at
    once, and the gradients of the weight and the bias, a part for each chunk, in the dtypes that these have: FP32 under
    O1 and O2. A chunk's logits are computed in the forward pass, and again in the backward pass: ``retain_graph``,
    ``create_graph`` and a loss scale act as ever. Under ``torch.func``, in forward-mode AD and where ``torch.jit``
    traces, logits are held as a whole.

    Args:
        input: Rows, (…, features).
        linear_weight: The layer's weight, (classes, features).
        target: A class for each row, (…), or probabilities, (…, classes).
        linear_bias: The layer's bias, (classes,).
        weight: A factor for each class, (classes,).
        reduction: ``"mean"`` over the rows that count, by their weights; their ``"sum"``; or ``"none"`` of both.
        ignore_index: The class of rows that do not count.
        label_smoothing: The share of each target that all classes get alike.
        rows: The most rows of a chunk, rounded up to a multiple of 32. Fewer rows altogether are one, computed once.

    Returns:
        The loss, a scalar, or (…) without a reduction; in FP32 where the policy has its losses so. The mean of no row
        is NaN, as torch's.

    Raises:
        PolicyError: Shapes that do not fit, another reduction, or no row in a chunk.
        StateError: A weight that is not gathered.

    **Cost**: memory for ``rows`` × classes logits some three times over, and the layer's product once more. Under O1
    and O2 the gradient of the weight is FP32. No host sync.

    A head that is not called is no module that has run: rules name its weight (``fp32_param=head.weight``), and
    :func:`mezzo.fully_shard` has it whole only where it belongs to the module whose ``forward`` calls this.

    Example:
        >>> import mezzo, torch
        >>> hidden, head = torch.randn(4096, 16, requires_grad=True), torch.nn.Linear(16, 500)
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     loss = mezzo.linear_cross_entropy(hidden, head.weight, torch.arange(4096) % 500, linear_bias=head.bias)
        >>> loss.backward()
        >>> loss.dtype, head.weight.grad.dtype
        (torch.float32, torch.float32)
    """
    _check(input, linear_weight, target, linear_bias, reduction, rows)

    def losses(x: Tensor, targets: Tensor) -> Tensor:  # (rows, features), (rows,) or (rows, classes) → (rows,)
        logits = functional.linear(x, linear_weight, linear_bias)
        return functional.cross_entropy(
            logits, targets, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )

    x, targets = input.reshape(-1, input.shape[-1]), target.flatten(0, input.dim() - 2)
    if input.dim() == 1:
        targets = target[None]
    compiles = torch.compiler.is_compiling()
    is_whole = len(x) <= rows or is_scripted() or (not compiles and is_transformed())
    if is_whole:
        of_rows = losses(x, targets)
    else:
        size = -(-rows // _ALIGNED) * _ALIGNED
        # What is compiled is recomputed as it was traced, with the casts of its region.
        options: dict[str, Any] = {} if compiles else {"context_fn": checkpoint_contexts}
        chunks = zip(torch.split(x, size), torch.split(targets, size), strict=True)
        of_rows = torch.cat(
            [checkpoint(losses, *chunk, use_reentrant=False, preserve_rng_state=False, **options) for chunk in chunks]
        )
    if reduction == "none":
        return of_rows.view(input.shape[:-1])
    total = of_rows.sum(dtype=torch.promote_types(of_rows.dtype, torch.float32))
    if reduction == "mean":
        total = total / _count(targets, weight, ignore_index)
    return total.to(of_rows.dtype)


def _count(targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | int:
    """Return how many rows count; with weights of classes, the sum of theirs."""
    if targets.is_floating_point():
        return len(targets)
    counts = targets != ignore_index
    if weight is None:
        return counts.sum()
    return weight.float()[targets.where(counts, 0)].where(counts, 0).sum()


def _check(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, reduction: str, rows: int
) -> None:
    if reduction not in _REDUCTIONS:
        raise unknown_word("reduction", reduction, _REDUCTIONS)
    if type(rows) is not int or rows < 1:
        raise PolicyError(f"a chunk has {shown(rows)} rows", why="it is a count from 1", write="rows=1024")
    if is_distributed(linear_weight) and not is_distributed(input):
        raise StateError(
            "linear_weight is a part of a weight, and input is whole",
            why="it is gathered while the module that owns it runs",
            write="the same call, in the forward of the module that owns the head",
        )
    shapes = {"input": input.shape, "linear_weight": linear_weight.shape, "target": target.shape}
    *leading, features = input.shape or (None,)
    classes = linear_weight.shape[0] if linear_weight.dim() == 2 else None
    wanted = (*leading, classes) if target.is_floating_point() else (*leading,)
    if linear_bias is not None:
        shapes["linear_bias"] = linear_bias.shape
    if (
        linear_weight.dim() != 2
        or linear_weight.shape[1] != features
        or target.shape != wanted
        or (linear_bias is not None and linear_bias.shape != (classes,))
    ):
        raise PolicyError(
            ", ".join(f"{name} is {tuple(shape)}" for name, shape in shapes.items()),
            why="input is (…, features), linear_weight (classes, features), linear_bias (classes,), and target (…), or "
            "(…, classes) of probabilities",
            write="mezzo.linear_cross_entropy(hidden, head.weight, target)",
        )


# Torch's own function ------------------------------------------------------------------------------------


def _in_chunks(args: Any, kwargs: Any) -> Instead | None:
    """Run torch's chunks as mezzo's: its own kernel makes gradients before a loss scale reaches them.

    Torch's loss is of 16 bits where its rows are, too. What torch computes as a whole, with a warning, stays as it is.
    """
    named = dict(zip(("input", "linear_weight", "target"), args, strict=False)) | kwargs
    options, index = named.pop("options", None), named.pop("ignore_index", None)
    if (
        options is None
        or (named["target"].dtype, named["linear_weight"].dim()) != (torch.int64, 2)
        or named.get("label_smoothing", 0.0) != 0.0
        or named.get("reduction", "mean") not in _REDUCTIONS
    ):
        return None

    def run() -> Any:
        classes, features = named["linear_weight"].shape
        like_input = -(-len(named["input"]) // max(1, classes // max(1, features)))  # torch's: logits as large as rows
        rows = options.batch_chunk_size or max(1, like_input)
        return linear_cross_entropy(**named, ignore_index=-100 if index is None else index, rows=rows)

    return Instead("native", "its chunks of rows are recomputed, each op under the policy", run)


BY_ARGUMENTS["linear_cross_entropy"] = _in_chunks
