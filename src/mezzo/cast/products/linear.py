"""Both passes of a linear layer on quantised operands: as an autograd function, and as two ops of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mezzo.cast.emulate import as_emulation
from mezzo.cast.products.native import scaled_mm
from mezzo.cast.products.operands import Operand, Quantiser
from mezzo.cast.products.recipes import BY_KEY, Recipe
from mezzo.dispatch import is_batch_of_gradients
from mezzo.errors import UnsupportedError
from mezzo.formats import BlockFormat, Quantized
from mezzo.policy import Treatment


def multiplied(
    a: Operand, b: Operand, dims: tuple[int, int], bias: Tensor | None, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """Multiply two matrices, each along one of its dimensions; sum in FP32 and round once.

    Args:
        a: (n, k) or (k, n).
        b: (m, k) or (k, m).
        dims: Which dimension of each is k.
        bias: What is added before the rounding; it broadcasts with (n, m). A device's kernel takes a vector in the
            dtype that it returns; another is added to the rounded sum.
        dtype: What the sum is rounded to.
        recipe: Whether the device has the product.

    Returns:
        (n, m).
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not recipe.emulated:
        return functional.linear(_rows(a, dims[0]), _rows(b, dims[1]), bias)
    if isinstance(a, Quantized) and isinstance(b, Quantized) and recipe.native:
        output = recipe.output or dtype
        fits = bias is None or (bias.dim() == 1 and bias.dtype == output)
        product = scaled_mm(a, b, dims, bias if fits else None, output)
        return (product if fits or bias is None else product + bias).to(dtype)
    (left, by_left), (right, by_right) = _wide(a, dims[0]), _wide(b, dims[1])
    out = left @ right.mT
    if by_left is not None and by_right is not None:
        out *= by_left * by_right.mT
    if bias is not None:
        out += bias.float()
    return out.to(dtype)


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.mT if dim == 0 else x


def _wide(operand: Operand, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return an operand in FP32, (n, k), and what its rows are to be multiplied by after the sum, (n, 1) or (1, 1).

    Values under one scale for a whole row are summed as they are, exact in FP32, and scaled afterwards, as on a device.
    """
    if isinstance(operand, Tensor):
        return _rows(operand, dim).float(), None
    if operand.format.block not in (None, -1):
        return _rows(operand.wide(), dim), None
    scale = operand.scales
    return _rows(operand.elements(), dim), scale.view(1, 1) if scale.dim() == 0 else _rows(scale, dim)


class Saved(NamedTuple):
    """What a backward pass needs: the input along its rows, and the weight along its features out."""

    x: Operand | None
    weight: Operand | None

    def taken_apart(self) -> list[Tensor | None]:
        """Return three tensors for each: values as bytes where they are quantised, their scales, and the tensor's."""
        flat: list[Tensor | None] = []
        for operand in self:
            if isinstance(operand, Quantized):
                flat += [operand.values.view(torch.uint8), operand.scales, operand.tensor_scale]
            else:
                flat += [operand, None, None]
        return flat

    @staticmethod
    def put_together(
        flat: Sequence[Tensor | None], recipe: Recipe, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> Saved:
        """Undo :meth:`taken_apart`, of a product of matrices of two shapes."""
        operands: list[Operand | None] = []
        for at, form in enumerate((recipe.activation, recipe.weight)):
            values, scales, tensor_scale = flat[3 * at : 3 * at + 3]
            if values is None or scales is None:
                operands.append(values)
                continue
            values, dim = values.view(form.element.dtype or torch.float4_e2m1fn_x2), recipe.kept_dim(form)
            rest = {"tensor_scale": tensor_scale, "format": form, "dim": dim, "shape": shapes[at], "dtype": dtype}
            operands.append(Quantized(values=values, scales=scales, **rest))  # type: ignore[arg-type]
        return Saved(*operands)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, quantiser: Quantiser, needs: tuple[bool, bool]
) -> tuple[Tensor, Saved]:
    """Compute a linear layer.

    Args:
        x: (rows, in).
        weight: (out, in).
        bias: What broadcasts with (rows, out).
        quantiser: Of this call alone.
        needs: Whether the gradients of the input and of the weight will be asked for.
    """
    recipe, (needs_x, needs_weight) = quantiser.recipe, needs
    over_in = None if recipe.low == "forward" else 1
    is_low = recipe.low == "wgrad"
    x_out, x_saved = quantiser.along("activation", x, over_in, 0 if needs_weight and not is_low else None)
    w_out, w_saved = quantiser.along("weight", weight, over_in, 0 if needs_x else None)
    left, right = (x, weight) if over_in is None else (x_out, w_out)
    out = multiplied(left, right, (1, 1), bias, x.dtype, recipe)
    return out, Saved(x if needs_weight and is_low else x_saved, w_saved)


def backward(
    gradient: Tensor, saved: Saved, quantiser: Quantiser, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a linear layer's input and weight.

    Args:
        gradient: (rows, out).
        saved: From :func:`forward`.
        quantiser: That of the forward pass.
        needs: Which of the two are asked for.
    """
    recipe, dtype, (needs_x, needs_weight) = quantiser.recipe, gradient.dtype, needs
    is_low = recipe.low == "wgrad"
    for_x, for_weight = quantiser.along(
        "gradient", gradient, 1 if needs_x else None, 0 if needs_weight and not is_low else None
    )
    grad_x = grad_weight = None
    if needs_x and saved.weight is not None:
        grad_x = multiplied(for_x, saved.weight, (1, 0), None, dtype, recipe)
    if needs_weight and saved.x is not None:
        grad_weight = multiplied(gradient if is_low else for_weight, saved.x, (0, 0), None, dtype, recipe)
    for listener in quantiser.listeners:
        listener.differentiated(saved.x if needs_weight and not is_low else None)
    return grad_x, grad_weight


# Autograd ---------------------------------------------------------------------------------------------------


class _Undifferentiable(torch.autograd.Function):
    """A gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, treatment: Treatment) -> Tensor:
        ctx.treatment = treatment
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            f"gradients of products in {ctx.treatment} cannot be differentiated again",
            why="what is rounded to so few bits has no second derivative",
            write='policy.low("linear"), the text low=linear, for what is differentiated twice',
        )


def _differentiated_once(backward: Any) -> Any:
    """Forbid differentiating a backward pass: doing so raises."""

    def run(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if is_batch_of_gradients(gradient):
            raise not_transformed(ctx.recipe)
        with torch.no_grad():
            grads: tuple[Any, ...] = backward(ctx, gradient)
        if not torch.is_grad_enabled():
            return grads
        wrap: Any = _Undifferentiable.apply
        treatment = ctx.recipe.treatment
        return tuple([None if grad is None else wrap(grad.requires_grad_(), treatment) for grad in grads])

    return run


class _Product(torch.autograd.Function):
    """A linear layer on quantised operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantiser: Quantiser) -> Tensor:
        out, saved = forward(x, weight, bias, quantiser, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*saved.taken_apart())
        ctx.quantiser, ctx.recipe = quantiser, quantiser.recipe
        ctx.shapes, ctx.bias_shape = (x.shape, weight.shape), None if bias is None else bias.shape
        return out

    @staticmethod
    @_differentiated_once
    @as_emulation
    def backward(ctx: Any, tensors: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = Saved.put_together(tensors, ctx.recipe, ctx.shapes, gradient.dtype)
        grads = backward(gradient, saved, ctx.quantiser, ctx.needs_input_grad[:2])
        ctx.quantiser.record()
        return (*grads, _of_bias(gradient, ctx.bias_shape) if ctx.needs_input_grad[2] else None, None)


def differentiable(x: Tensor, weight: Tensor, bias: Tensor | None, quantiser: Quantiser) -> Tensor:
    """Compute a linear layer, of whose operands is saved what a backward pass needs; nothing without gradients.

    Args:
        x: (rows, in).
        weight: (out, in).
        bias: What broadcasts with (rows, out).
        quantiser: Of this call alone.
    """
    if not torch.is_grad_enabled():  # else a weight that trains would be quantised for a backward pass as well
        return forward(x, weight, bias, quantiser, (False, False))[0]
    out: Tensor = _Product.apply(x, weight, bias, quantiser)  # type: ignore[no-untyped-call]
    return out


def not_transformed(recipe: Recipe) -> UnsupportedError:
    """Build the error of what torch.func would transform."""
    return UnsupportedError(
        f"products in {recipe.treatment} are not transformed by torch.func",
        why="torch.func sees into no autograd function of Python's",
        write='policy.low("linear"), the text low=linear, for what torch.func differentiates',
    )


def _of_bias(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.float().sum_to_size(shape).to(gradient.dtype)


# The same in compiled code, where it is one op for each pass: what it computes, eager code computes bit for bit.


@torch.library.custom_op("mezzo::product", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    out, saved = forward(x, weight, bias, Quantiser(BY_KEY[recipe], None, None), (needs_x, needs_weight))
    return [out, *(x.new_empty(0) if tensor is None or tensor is x else tensor for tensor in saved.taken_apart())]


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, needs_x: bool, needs_weight: bool) -> list[Tensor]:
    how = BY_KEY[recipe]
    is_kept = needs_weight and how.low != "wgrad"  # else it is an argument
    flat = _fake(x, how.activation, how) if is_kept else [None] * 3
    flat += _fake(weight, how.weight, how) if needs_x else [None] * 3
    return [
        x.new_empty(x.shape[0], weight.shape[0]),
        *(x.new_empty(0) if tensor is None else tensor for tensor in flat),
    ]


def _fake(x: Tensor, form: BlockFormat, recipe: Recipe) -> list[Tensor | None]:
    """Return tensors without values, as :meth:`Saved.taken_apart` has them of a matrix."""
    dim, block, dtype = recipe.kept_dim(form), form.block, form.scale.dtype
    lines, length = x.shape[1 - dim], x.shape[dim]
    values = x.new_empty(lines, length * form.element.num_bits // 8, dtype=torch.uint8)
    scales = x.new_empty((), dtype=dtype)
    if block is not None:
        down, across = block if isinstance(block, tuple) else (1, length if block == -1 else block)
        scales = x.new_empty(lines // down, length // across, dtype=dtype)
    turned = [tensor.mT if dim == 0 and tensor.dim() else tensor for tensor in (values, scales)]
    return [*turned, x.new_empty((), dtype=torch.float32) if form.tensor_scale else None]


@torch.library.custom_op("mezzo::product_backward", mutates_args=())
def _backward_op(
    gradient: Tensor, saved: list[Tensor], recipe: str, features: int, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    (rows, out), how = gradient.shape, BY_KEY[recipe]
    shapes = torch.Size((rows, features)), torch.Size((out, features))
    flat = [None if tensor.numel() == 0 else tensor for tensor in saved]
    operands = Saved.put_together(flat, how, shapes, gradient.dtype)
    grads = backward(gradient, operands, Quantiser(how, None, None), (needs_x, needs_weight))
    return [gradient.new_empty(0) if tensor is None else tensor for tensor in grads]


@_backward_op.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], recipe: str, features: int, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    rows, out = gradient.shape
    sizes = (rows, features) if needs_x else (0,), (out, features) if needs_weight else (0,)
    return [gradient.new_empty(size) for size in sizes]


def _setup_op(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, bias, ctx.recipe, ctx.needs_x, ctx.needs_weight = inputs
    ctx.features, ctx.bias_shape = x.shape[1], None if bias is None else bias.shape
    ctx.save_for_backward(x if ctx.needs_weight and BY_KEY[ctx.recipe].low == "wgrad" else output[1], *output[2:])


def _differentiated_op(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    gradient, needs = gradients[0], (ctx.needs_x, ctx.needs_weight)
    gradients = torch.ops.mezzo.product_backward(gradient, list(ctx.saved_tensors), ctx.recipe, ctx.features, *needs)
    grad_x, grad_weight = (grad if need else None for grad, need in zip(gradients, needs, strict=True))
    grad_bias = None if ctx.bias_shape is None else _of_bias(gradient, ctx.bias_shape)
    return grad_x, grad_weight, grad_bias, None, None, None


_forward_op.register_autograd(_differentiated_op, setup_context=_setup_op)
