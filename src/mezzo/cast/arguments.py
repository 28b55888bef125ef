"""Calls whose arguments decide, not their name: what a product that contracts nothing gets, and its like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.cast.equations import contracts, in_pairs, is_whole, read, spelt
from mezzo.compiling import is_one
from mezzo.dispatch import is_transformed
from mezzo.policy import Treatment
from mezzo.tensors import LOW


class Instead(NamedTuple):
    """What a call gets instead of its op's own treatment.

    Attributes:
        treatment: The treatment.
        reason: Why, for people.
        parts: Runs the call as several, each of which is asked about by itself.
    """

    treatment: Treatment
    reason: str
    parts: Callable[[], Any] | None = None


#: Says what a call gets instead of its op's own treatment; ``None`` where that holds.
ByArguments: TypeAlias = Callable[[Any, Any], Instead | None]

_ELEMENTWISE: Final = Instead("promote", "it contracts nothing: an elementwise product, in the dtypes it is given")
_SPARSE: Final = Instead("fp32", "an operand is not strided, and low kernels for such are missing or add up in 16 bits")
_OTHER_LAYOUT: Final = Instead("native", "an operand's layout is one that nothing casts")
_COMPLEX: Final = Instead("fp32", "a complex number of a real one is made in FP32")
_RUNNING: Final = Instead("fp32_math", "it adds up element by element, and rounds once")
_RUNNING_GRADIENT: Final = Instead("fp32_math", "its gradient is added up element by element, and rounded once")
_BATCHED: Final = Instead("fp32_math", "under torch.func its arithmetic is written out, and takes one dtype")

STRIDED: Final = torch.strided  # named once: each product asks
SPARSE_LAYOUTS: Final = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)

# Products ------------------------------------------------------------------------------------------------


class AskProducts:
    """What is asked about products: of operands that are not strided, and of those that contract nothing.

    Args:
        contracts: Whether a call sums over products.
    """

    def __init__(self, contracts: Callable[[Any, Any], bool]) -> None:
        self.contracts = contracts

    def __call__(self, args: Any, kwargs: Any) -> Instead | None:
        """Return what a call gets instead of its op's treatment."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if getattr(value, "layout", STRIDED) is not STRIDED and (other := _other(value)) is not None:
                return other
        return None if self.contracts(args, kwargs) else _ELEMENTWISE


def _other(x: Tensor) -> Instead | None:
    """Return what a product gets of an operand that is not strided: ragged ones are as others are."""
    return _SPARSE if x.layout in SPARSE_LAYOUTS else _OTHER_LAYOUT if x.is_mkldnn else None


class _SparseCast(torch.autograd.Function):
    """A cast of a sparse tensor, whose gradient may be dense: that of a product with it is, and no cast takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def cast_sparse(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a sparse tensor that needs a gradient."""
    casted: Tensor = _SparseCast.apply(x, dtype)  # type: ignore[no-untyped-call]
    return casted


def _given(index: int, names: str, args: Any, kwargs: Any) -> Any:
    """Return an argument by its place, or by one of its names; ``None`` where it is not given."""
    if index < len(args):
        return args[index]
    return next((kwargs[name] for name in names.split() if name in kwargs), None)


def _inner(index: int, names: str) -> Callable[[Any, Any], bool]:
    """Whether the last dimension of an operand, over which the product sums, is longer than one."""

    def contracts(args: Any, kwargs: Any) -> bool:
        x = args[index] if index < len(args) else _given(index, names, args, kwargs)
        if not isinstance(x, Tensor):
            return True
        if torch.compiler.is_dynamo_compiling():
            return x.is_nested or len(x.shape) == 0 or not is_one(x.shape[-1])
        return x.is_nested or x.dim() == 0 or x.size(-1) != 1

    return contracts


def _inner_of_vecdot(args: Any, kwargs: Any) -> bool:
    x, dim = _given(0, "x input self", args, kwargs), kwargs.get("dim", -1)
    return not isinstance(x, Tensor) or x.dim() == 0 or not is_one(x.shape[dim])


def _inner_of_many(args: Any, kwargs: Any) -> bool:
    """Whether one of the products of a chain of matrices contracts."""
    operands = _given(0, "tensors", args, kwargs)
    chain = args if isinstance(operands, Tensor) else operands  # chain_matmul takes them one by one
    return any(not is_one(x.shape[-1]) for x in chain[:-1])


def _batched_inner(args: Any, kwargs: Any) -> bool:
    """Whether ``addbmm`` contracts, which sums over the batch as well."""
    x = _given(1, "batch1", args, kwargs)
    return not isinstance(x, Tensor) or x.dim() != 3 or not (is_one(x.shape[-1]) and is_one(x.shape[0]))


def _taps(args: Any, kwargs: Any) -> bool:
    """Whether a convolution adds up more than one value of its input for each of its output."""
    weight = _given(1, "weight", args, kwargs)
    return not isinstance(weight, Tensor) or any(size != 1 for size in weight.shape[1:])


def _taps_of_tbc(args: Any, kwargs: Any) -> bool:
    weight = _given(1, "weight", args, kwargs)  # (width, in, out)
    return any(size != 1 for size in weight.shape[:2])


def _transposed_taps(args: Any, kwargs: Any) -> bool:
    """The same of a transposed one: a kernel no wider than its stride meets each output once."""
    weight, strides = _given(1, "weight", args, kwargs), _given(3, "stride", args, kwargs)
    if weight.shape[0] != (_given(6, "groups", args, kwargs) or 1):
        return True
    widths, dilations = weight.shape[2:], _given(7, "dilation", args, kwargs)
    strides, dilations = (_each(1 if setting is None else setting, len(widths)) for setting in (strides, dilations))
    return any(d * (w - 1) >= s for w, s, d in zip(widths, strides, dilations, strict=True))


def _each(value: Any, count: int) -> Sequence[int]:
    return [value] * count if isinstance(value, int) else [*value] * (count if len(value) == 1 else 1)


def _any_taps(args: Any, kwargs: Any) -> bool:
    """The same of ``convolution``, which is given every option."""
    transposed, groups = _given(6, "transposed", args, kwargs), _given(8, "groups", args, kwargs)
    if not transposed:
        return _taps(args, kwargs)
    named = {"stride": _given(3, "stride", args, kwargs), "dilation": _given(5, "dilation", args, kwargs)}
    return _transposed_taps((None, _given(1, "weight", args, kwargs), None), {"groups": groups, **named})


def _always(args: Any, kwargs: Any) -> bool:
    return True


def _einsum(args: Any, kwargs: Any) -> Instead | None:
    """Cast at the products that an equation reaches: what torch permutes, sums or multiplies by elements stays."""
    equation, operands = spelt(args, kwargs)
    for operand in operands:
        if operand.layout is not torch.strided and (other := _other(operand)) is not None:
            return other
    parsed = read(equation, tuple([x.dim() for x in operands]))
    if parsed is None:
        return None
    if not contracts(parsed, operands):
        return _ELEMENTWISE
    if is_whole(parsed, operands):
        return None

    def run() -> Any:
        return in_pairs(parsed, operands)

    return Instead("native", "each pair of its operands by itself", run)


# Running sums, and gathers, whose gradients are some ----------------------------------------------------


def _adds(name: str, index: int) -> ByArguments:
    """Make what is asked about a mover, one of whose arguments says that it adds up where indices meet."""

    def ask(args: Any, kwargs: Any) -> Instead | None:
        return _RUNNING if _given(index, name, args, kwargs) else None

    return ask


def _trains_low(x: Any) -> bool:
    """Whether a gradient of a low tensor's will be added up. Nobody knows what ``torch.func`` differentiates."""
    if not isinstance(x, Tensor) or x.dtype not in LOW:
        return False
    if x.requires_grad:
        return torch.is_grad_enabled()
    return not torch.compiler.is_compiling() and is_transformed()


def _gathers(args: Any, kwargs: Any) -> Instead | None:
    for value in args if not kwargs else (*args, *kwargs.values()):
        if _trains_low(value):
            return _RUNNING_GRADIENT
    return None


def _looks_up(args: Any, kwargs: Any) -> Instead | None:
    """The same of a table whose rows are not rescaled where they lie, and whose gradient is no sparse one."""
    is_sparse = kwargs.get("sparse") or any(value is True for value in args[4:])
    is_rescaled = kwargs.get("max_norm") is not None or (len(args) > 3 and type(args[3]) is float)
    return None if is_sparse or is_rescaled else _gathers(args, kwargs)


#: How many windows may share an element before its gradient is added up in more than 16 bits.
_FEW: Final = 16


def _slides(args: Any, kwargs: Any) -> Instead | None:
    """Gradients of a pool, or a view, whose windows overlap: those of windows that share an element are added up."""
    x = _given(0, "input self", args, kwargs)
    sizes, strides = _given(1, "kernel_size", args, kwargs), _given(2, "stride", args, kwargs)
    return _RUNNING_GRADIENT if _trains_low(x) and _num_shared(sizes, strides or sizes) > _FEW else None


def _unfolds(args: Any, kwargs: Any) -> Instead | None:
    """The same of ``x.unfold(dimension, size, step)``; ``functional.unfold`` of images has the name, too."""
    x, dim = _given(0, "self input", args, kwargs), _given(1, "dimension", args, kwargs)
    if not _trains_low(x):
        return None
    if len(args) + len(kwargs) != 4 or type(dim) is not int or not -x.dim() <= dim < x.dim():
        return _RUNNING_GRADIENT
    size, step = _given(2, "size", args, kwargs), _given(3, "step", args, kwargs)
    return _RUNNING_GRADIENT if step and _num_shared(size, step) > _FEW else None


def _num_shared(sizes: Any, strides: Any) -> int:
    """Return how many windows share an element."""
    dims = max(len(lengths) if isinstance(lengths, Sequence) else 1 for lengths in (sizes, strides))
    return math.prod(-(-k // s) for k, s in zip(_each(sizes, dims), _each(strides, dims), strict=True))


def _adds_duplicates(args: Any, kwargs: Any) -> Instead | None:
    """A sparse tensor that may name an element several times: its values there are added up."""
    x = _given(0, "input self", args, kwargs)
    is_sum = isinstance(x, Tensor) and x.layout is torch.sparse_coo and x.dtype in LOW and not x.is_coalesced()
    return _RUNNING if is_sum else None


#: Indices that give a view.
_SLICES: Final = frozenset({int, slice, NoneType, EllipsisType, bool})


def _indexes(args: Any, kwargs: Any) -> Instead | None:
    """Gradients of ``x[index]``: integers in a tensor or a list gather; slices are views, and no mask reads twice."""
    x, index = args
    if type(index) in _SLICES or x.dtype not in LOW:
        return None
    of = index if type(index) is tuple else (index,)
    return _RUNNING_GRADIENT if any(_repeats(part) for part in of) and _trains_low(x) else None


def _repeats(index: Any) -> bool:
    if type(index) in _SLICES:
        return False
    if isinstance(index, Tensor):
        return index.dim() > 0 and index.dtype not in (torch.bool, torch.uint8)
    return isinstance(index, list | range) or getattr(index, "ndim", 0) > 0


# Complex numbers, and what is written out ---------------------------------------------------------------


def _if_complex(args: Any, kwargs: Any) -> Instead | None:
    """A complex number beside a real tensor: in half the width hardly an op has a kernel."""
    if kwargs.get("out") is not None:
        return None  # what is written to a real tensor torch refuses
    for value in args:
        if type(value) is complex or (isinstance(value, Tensor) and value.dtype is torch.complex64):
            return _COMPLEX
    return _COMPLEX if kwargs and any(type(value) is complex for value in kwargs.values()) else None


def _written_out(args: Any, kwargs: Any) -> Instead | None:
    return None if torch.compiler.is_compiling() or not is_transformed() else _BATCHED


#: What is asked about complex numbers, where torch would make one of half the width: BF16 has such since 2.14.
MAKES_COMPLEX: Final = tuple("mul add sub rsub div where addcmul addcdiv".split())


#: By the op's base name. A rule on the op is about all of its calls, and these are not asked. What runs inside regions
#: of its own, as the chunks of a loss, adds itself.
BY_ARGUMENTS: Final[dict[str, ByArguments]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv"), AskProducts(_inner(0, "input self mat1"))),
    # An outer product added to a matrix is low on torch's CUDA list, by its name.
    **dict.fromkeys(("dot", "vdot", "inner", "tensordot", "addr"), AskProducts(_always)),
    **dict.fromkeys(("addmm", "_addmm_activation", "addmv", "baddbmm"), AskProducts(_inner(1, "mat1 mat batch1"))),
    "addbmm": AskProducts(_batched_inner),
    "linalg_vecdot": AskProducts(_inner_of_vecdot),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot"), AskProducts(_inner_of_many)),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), AskProducts(_taps)),
    **{f"conv_transpose{dims}d": AskProducts(_transposed_taps) for dims in (1, 2, 3)},
    "convolution": AskProducts(_any_taps),
    "conv_tbc": AskProducts(_taps_of_tbc),
    "index_put": _adds("accumulate", 3),
    "put": _adds("accumulate", 3),
    "scatter": _adds("reduce", 4),
    "getitem": _indexes,
    **dict.fromkeys("index_select gather take take_along_dim repeat_interleave im2col".split(), _gathers),
    **dict.fromkeys(("embedding", "embedding_bag"), _looks_up),
    **dict.fromkeys("avg_pool1d avg_pool2d max_pool1d max_pool2d".split(), _slides),
    **{f"max_pool{dims}d_with_indices": _slides for dims in (1, 2, 3)},
    "unfold": _unfolds,
    **dict.fromkeys(("coalesce", "to_dense"), _adds_duplicates),
    **dict.fromkeys(MAKES_COMPLEX, _if_complex),
    **dict.fromkeys(("batch_norm", "instance_norm"), _written_out),
}
