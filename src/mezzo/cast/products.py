"""Products of weights below sixteen bits: which operands are written down in which format, forward and backward.

A linear layer has three products, each with a dimension that it sums over: the output (over features in), the gradient
of its input (over features out) and that of its weight (over rows). Operands are quantised before each, summed in FP32
and rounded once to the policy's dtype. What is kept for the backward pass are quantised operands.

A format whose scales do not depend on the dimension (one for the tensor, or for square blocks) is written down once for
both products that an operand is in; else once along each dimension, from the operand itself.

Sources: Micikevicius et al. 2022 (E4M3 forward, E5M2 for gradients); torchao's ``Float8LinearConfig`` (row-wise);
OCP Microscaling Formats 1.0; NVIDIA, *Pretraining Large Language Models with NVFP4*, arXiv 2509.25149.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional

from mezzo.cast.amaxes import ROLES, Amaxes, Role, Slot, drawn
from mezzo.cast.emulate import _emulated as as_emulation
from mezzo.cast.native import Finding, found_on, scaled_mm
from mezzo.cast.notes import LISTENERS, WATCHERS, ProductCall, Quantising, during
from mezzo.errors import UnsupportedError
from mezzo.formats import (
    MXFP8_E4M3,
    NVFP4,
    NVFP4_2D,
    ROWWISE_E4M3,
    TENSORWISE_E4M3,
    TENSORWISE_E5M2,
    BlockFormat,
    Quantized,
    quantized,
)
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import QUANTISED
from mezzo.tensors import is_transformed

# Recipes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the products of a weight are computed.

    Attributes:
        treatment: The policy's word for it.
        activation: The format of what a layer is given.
        weight: That of its weight.
        gradient: That of its output's gradient.
        multiple: What each dimension must be a multiple of.
        delayed: Whether scales come from the steps before.
        stochastic: Whether gradients are rounded at random.
        transformed: Whether what weight gradients are made of is first spread over 16 rows by a random rotation.
        low: Which product stays in the policy's dtype: ``none``, ``wgrad`` or ``forward``.
        emulated: Whether products in that dtype are computed in FP32 from rounded operands.
        native: Whether the device computes products of quantised operands.
        output: What its kernels return, which is rounded to the policy's dtype where that is another.
        key: What compiled code knows it by.
    """

    treatment: Treatment
    activation: BlockFormat
    weight: BlockFormat
    gradient: BlockFormat
    multiple: int = 16
    delayed: bool = False
    stochastic: bool = False
    transformed: bool = False
    low: str = "none"
    emulated: bool = False
    native: bool = False
    output: torch.dtype | None = None
    key: str = ""

    def kept_dim(self, form: BlockFormat) -> int:
        """Return along which dimension an operand is quantised that a backward pass needs."""
        return 0 if self.low == "forward" or depends(form) else 1

    def found_on(self, device_type: str, dtype: torch.dtype) -> Finding:
        """Find out whether a device has all of its products: see :func:`mezzo.cast.native.found_on`."""
        pairs = [(self.gradient, self.weight)]
        pairs += [] if self.low == "forward" else [(self.activation, self.weight)]
        pairs += [] if self.low == "wgrad" else [(self.gradient, self.activation)]
        found = [found_on(device_type, *pair, dtype) for pair in pairs]
        lacking = next((each for each in found if each.lacks), None)
        return lacking or next((each for each in found if each.output != dtype), found[0])

    @property
    def as_note(self) -> Quantising:
        """What it is to those who watch a pass."""
        if self.low == "forward":
            return Quantising((), self.emulated)
        names = dict.fromkeys(form.element.name for form in (self.activation, self.weight))
        return Quantising(tuple(names), not self.native)

    @property
    def remembers(self) -> bool:
        """Whether something is to be known from step to step."""
        return self.delayed or self.stochastic


@functools.lru_cache(maxsize=256)
def recipe_of(policy: Policy, treatment: Treatment) -> Recipe:
    """Return how a policy has the products under a treatment computed, whatever the device."""
    recipe = Recipe(
        treatment=treatment, activation=MXFP8_E4M3, weight=MXFP8_E4M3, gradient=MXFP8_E4M3, multiple=32,
        low=policy.low_products,
    )  # fmt: skip
    if treatment == "mxfp8":
        return recipe
    recipe = replace(recipe, multiple=16)
    if treatment == "nvfp4":
        tricks = policy.nvfp4_tricks.split("+")
        return replace(
            recipe, activation=NVFP4, weight=NVFP4_2D if "2d" in tricks else NVFP4, gradient=NVFP4,
            stochastic="stochastic" in tricks, transformed="rht" in tricks,
        )  # fmt: skip
    if policy.fp8_recipe == "rowwise":
        return replace(recipe, activation=ROWWISE_E4M3, weight=ROWWISE_E4M3, gradient=ROWWISE_E4M3)
    return replace(
        recipe, activation=TENSORWISE_E4M3, weight=TENSORWISE_E4M3, gradient=TENSORWISE_E5M2,
        delayed=policy.fp8_recipe == "delayed",
    )  # fmt: skip


def kinds_on(device_type: str, dtype: torch.dtype) -> dict[str, Finding]:
    """Find out which kinds of products below sixteen bits a device has, by what policies call them.

    Args:
        device_type: The device.
        dtype: The policy's.

    **Cost**: on an accelerator some small products the first time.
    """
    policy = Policy.O1(dtype)
    recipes = {f"fp8, {how}": recipe_of(policy.evolve(fp8_recipe=how), "fp8") for how in ("tensorwise", "rowwise")}
    recipes |= {name: recipe_of(policy, name) for name in QUANTISED if name != "fp8"}
    return {name: recipe.found_on(device_type, dtype) for name, recipe in recipes.items()}


#: Every recipe that a region has been given, by its key.
_BY_KEY: Final[dict[str, Recipe]] = {}


@functools.lru_cache(maxsize=256)
def recipe_on(device_type: str, policy: Policy, treatment: Treatment, *, emulated: bool) -> Recipe:
    """Return how the products under a treatment are computed on a device.

    Args:
        device_type: The device.
        policy: The policy.
        treatment: The treatment.
        emulated: Whether products in the policy's dtype are emulated there.

    Raises:
        UnsupportedError: The device lacks such products, and ``emulate=False``.
    """
    recipe = replace(recipe_of(policy, treatment), emulated=emulated)
    if policy.emulate is not True:
        found = recipe.found_on(device_type, policy.dtype)
        if policy.emulate is False and found.lacks:
            kind = f"{treatment} products" + (f" scaled {policy.fp8_recipe}" if treatment == "fp8" else "")
            raise UnsupportedError(
                f"{kind} cannot be computed natively on this {device_type}",
                why=found.lacks,
                write='emulate="auto", the text emulate=auto',
            )
        recipe = replace(recipe, native=not found.lacks, output=found.output)
    key = " ".join(str(getattr(recipe, each.name)) for each in dataclasses.fields(recipe))
    return _BY_KEY.setdefault(key, replace(recipe, key=key))


# Which calls they are --------------------------------------------------------------------------------------


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


def asked(op: str, args: Sequence[Any], kwargs: dict[str, Any], multiple: int) -> Operands | str:
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
    found = _arranged(op, named, is_turned=is_turned)
    sizes = {
        "rows": math.prod(found.x.shape[:-1]), "features in": found.weight.shape[1],
        "features out": found.weight.shape[0],
    }  # fmt: skip
    odd = [f"{size} {name}" for name, size in sizes.items() if size == 0 or size % multiple]
    return f"{' and '.join(odd)}, no multiple of {multiple}" if odd else found


def cast_as(asked: Operands, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Operands:
    """Read the same call with cast arguments."""
    return _arranged(op, _named(op, args, kwargs), is_turned=asked.is_turned)


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


# Operands --------------------------------------------------------------------------------------------------

#: An operand as it is multiplied: quantised, or in the policy's dtype.
Operand: TypeAlias = Quantized | Tensor

#: The signs of the random rotation, drawn once and the same in every layer and step, as in Transformer Engine
#: (``transformer_engine/pytorch/tensor/nvfp4_tensor.py``, ``get_wgrad_sign_vector``).
_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


#: By device.
_ROTATIONS: Final[dict[torch.device, Tensor]] = {}


def _rotation(device: torch.device) -> Tensor:
    """Return the 16×16 Hadamard matrix, orthonormal, with signs drawn at random: float32."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return _made_rotation(device)  # without values, which must not outlive the mode
    if device not in _ROTATIONS:
        _ROTATIONS[device] = _made_rotation(device)
    return _ROTATIONS[device]


def _made_rotation(device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / 4 * torch.tensor(_SIGNS, dtype=torch.float32)).to(device)


def rotated(x: Tensor) -> Tensor:
    """Rotate each 16 rows of a matrix among themselves, which changes no sum over rows of two that are rotated.

    Args:
        x: (rows, features).

    Returns:
        float32 of that shape.
    """
    factors = _rotation(x.device), x.float().view(-1, 16, x.shape[1])
    # To those who watch it is a part of the cast, and no product of the model's.
    out: Tensor = during("cast", torch.float32, torch.matmul, *factors) if WATCHERS else torch.matmul(*factors)
    return out.view(x.shape)


@dataclass(slots=True)
class _Writer:
    """Writes the operands of a weight's products down.

    Attributes:
        recipe: How.
        memory: What is known of earlier steps; ``None`` where a region is of no prepared model.
        slot: The weight's part of it, where scales are delayed.
        call: What listeners know the product by; ``None`` where there are none.
        noted: The largest values that operands had, by their roles.
    """

    recipe: Recipe
    memory: Amaxes | None
    slot: Slot | None
    call: ProductCall | None = None
    noted: dict[str, Tensor] = field(default_factory=dict)

    def along(self, role: Role, x: Tensor, *dims: int | None) -> list[Any]:
        """Return a matrix as it is multiplied, for each product that sums over one of its dimensions.

        Args:
            role: Which operand it is.
            x: The matrix, in the policy's dtype.
            *dims: What each product sums over; ``None`` for one that is not computed from it.
        """
        form: BlockFormat = getattr(self.recipe, role)
        made: list[Quantized | None] = []
        for dim in dims:
            like = next((each for each in made if each is not None), None)
            if dim is not None and (like is None or depends(form)):
                like = self._along(role, x, form, dim)
            made.append(None if dim is None else like)
        return made

    def _along(self, role: Role, x: Tensor, form: BlockFormat, dim: int) -> Quantized:
        key = amax = None
        if self.recipe.stochastic and role == "gradient":
            key = drawn(x.device) if self.memory is None else self.memory.draw()
        if self.slot is not None:
            low, high = torch.aminmax(x)  # on a CPU 25 times as fast as a norm
            now = torch.maximum(-low, high).float()
            self.noted[role], amax = now, self.slot.amax(role, now)
        is_rotated = self.recipe.transformed and role != "weight" and dim == 0
        operand = rotated(x) if is_rotated else x
        made = quantized(operand, form, dim, key=key, amax=amax)
        if self.call is not None:
            for listener in LISTENERS:
                listener.quantised(self.call, role, operand, made)
        return made


def depends(form: BlockFormat) -> bool:
    """Whether what a format makes of a matrix depends on the dimension that is summed over."""
    return isinstance(form.block, int)


# Products --------------------------------------------------------------------------------------------------


def multiplied(
    a: Operand, b: Operand, dims: tuple[int, int], bias: Tensor | None, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """Multiply two matrices, each along one of its dimensions; sum in FP32 and round once.

    Args:
        a: (n, k) or (k, n).
        b: (m, k) or (k, m).
        dims: Which dimension of each is k.
        bias: What is added before the rounding; it broadcasts with (n, m).
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
        found = scaled_mm(a, b, dims, bias if fits else None, output)
        return (found if fits or bias is None else found + bias).to(dtype)
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


class Kept(NamedTuple):
    """What a backward pass needs: the input along its rows, and the weight along its features out."""

    x: Operand | None
    weight: Operand | None

    def taken_apart(self) -> list[Tensor | None]:
        """Return three tensors for each: values as bytes where they are quantised, their scales, and the tensor's."""
        flat: list[Tensor | None] = []
        for each in self:
            if isinstance(each, Quantized):
                flat += [each.values.view(torch.uint8), each.scales, each.tensor_scale]
            else:
                flat += [each, None, None]
        return flat

    @staticmethod
    def put_together(
        flat: Sequence[Tensor | None], recipe: Recipe, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> Kept:
        """Undo :meth:`taken_apart`, of a product of matrices of two shapes."""
        made: list[Operand | None] = []
        for at, form in enumerate((recipe.activation, recipe.weight)):
            values, scales, tensor_scale = flat[3 * at : 3 * at + 3]
            if values is None or scales is None:
                made.append(values)
                continue
            values, dim = values.view(form.element.dtype or torch.float4_e2m1fn_x2), recipe.kept_dim(form)
            rest = {"tensor_scale": tensor_scale, "format": form, "dim": dim, "shape": shapes[at], "dtype": dtype}
            made.append(Quantized(values=values, scales=scales, **rest))  # type: ignore[arg-type]
        return Kept(*made)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, writer: _Writer, needs: tuple[bool, bool]
) -> tuple[Tensor, Kept]:
    """Compute a linear layer.

    Args:
        x: (rows, in).
        weight: (out, in).
        bias: What broadcasts with (rows, out).
        writer: It.
        needs: Whether the gradients of the input and of the weight will be asked for.
    """
    recipe, (needs_x, needs_weight) = writer.recipe, needs
    over_in = None if recipe.low == "forward" else 1
    is_low = recipe.low == "wgrad"
    x_out, x_kept = writer.along("activation", x, over_in, 0 if needs_weight and not is_low else None)
    w_out, w_kept = writer.along("weight", weight, over_in, 0 if needs_x else None)
    left, right = (x, weight) if over_in is None else (x_out, w_out)
    out = multiplied(left, right, (1, 1), bias, x.dtype, recipe)
    return out, Kept(x if needs_weight and is_low else x_kept, w_kept)


def backward(
    gradient: Tensor, kept: Kept, writer: _Writer, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a linear layer's input and weight.

    Args:
        gradient: (rows, out).
        kept: From :func:`forward`.
        writer: It.
        needs: Which of the two are asked for.
    """
    recipe, dtype, (needs_x, needs_weight) = writer.recipe, gradient.dtype, needs
    is_low = recipe.low == "wgrad"
    for_x, for_weight = writer.along(
        "gradient", gradient, 1 if needs_x else None, 0 if needs_weight and not is_low else None
    )
    grad_x = grad_weight = None
    if needs_x and kept.weight is not None:
        grad_x = multiplied(for_x, kept.weight, (1, 0), None, dtype, recipe)
    if needs_weight and kept.x is not None:
        grad_weight = multiplied(gradient if is_low else for_weight, kept.x, (0, 0), None, dtype, recipe)
    if writer.call is not None:
        for listener in LISTENERS:
            listener.differentiated(writer.call, kept.x if needs_weight and not is_low else None)
    return grad_x, grad_weight


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
    """Let a backward pass be differentiated no further: what asks for it raises."""

    def run(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch._C._functorch.is_batchedtensor(gradient) or torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise _not_transformed(ctx.recipe)
        with torch.no_grad():
            grads: tuple[Any, ...] = backward(ctx, gradient)
        if not torch.is_grad_enabled():
            return grads
        wrap: Any = _Undifferentiable.apply
        treatment = ctx.recipe.treatment
        return tuple([None if each is None else wrap(each.requires_grad_(), treatment) for each in grads])

    return run


def _not_transformed(recipe: Recipe) -> UnsupportedError:
    return UnsupportedError(
        f"products in {recipe.treatment} are not transformed by torch.func",
        why="torch.func sees into no autograd function of Python's",
        write='policy.low("linear"), the text low=linear, for what torch.func differentiates',
    )


class _Product(torch.autograd.Function):
    """A linear layer on quantised operands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        memory: Amaxes | None,
        slot: Slot | None,
        call: ProductCall | None,
    ) -> Tensor:
        writer = _Writer(recipe, memory, slot, call)
        out, kept = forward(x, weight, bias, writer, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*kept.taken_apart(), *(writer.noted.get(role) for role in ROLES[:2]))
        ctx.recipe, ctx.memory, ctx.slot, ctx.call = recipe, memory, slot, call
        ctx.shapes, ctx.bias_shape = (x.shape, weight.shape), None if bias is None else bias.shape
        return out

    @staticmethod
    @_differentiated_once
    @as_emulation
    def backward(ctx: Any, saved: Any, gradient: Tensor) -> tuple[Any, ...]:
        writer = _Writer(ctx.recipe, ctx.memory, ctx.slot, ctx.call)
        kept = Kept.put_together(saved[:6], ctx.recipe, ctx.shapes, gradient.dtype)
        grads = backward(gradient, kept, writer, ctx.needs_input_grad[:2])
        if ctx.slot is not None and ctx.memory.counts:
            writer.noted.update(zip(ROLES[:2], saved[6:], strict=True))
            for role, now in writer.noted.items():
                if now is not None:
                    ctx.slot.note(role, now)
        grad_bias = _of_bias(gradient, ctx.bias_shape) if ctx.needs_input_grad[2] else None
        return (*grads, grad_bias, None, None, None, None)


def _of_bias(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.float().sum_to_size(shape).to(gradient.dtype)


# The same in compiled code, where it is one op for each pass: what it computes, eager code computes bit for bit.


@torch.library.custom_op("mezzo::product", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    out, kept = forward(x, weight, bias, _Writer(_BY_KEY[recipe], None, None), (needs_x, needs_weight))
    return [out, *(x.new_empty(0) if each is None or each is x else each for each in kept.taken_apart())]


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, needs_x: bool, needs_weight: bool) -> list[Tensor]:
    how = _BY_KEY[recipe]
    is_kept = needs_weight and how.low != "wgrad"  # else it is an argument
    flat = _fake(x, how.activation, how) if is_kept else [None] * 3
    flat += _fake(weight, how.weight, how) if needs_x else [None] * 3
    return [x.new_empty(x.shape[0], weight.shape[0]), *(x.new_empty(0) if each is None else each for each in flat)]


def _fake(x: Tensor, form: BlockFormat, recipe: Recipe) -> list[Tensor | None]:
    """Return tensors without values, as :meth:`Kept.taken_apart` has them of a matrix."""
    dim, block, dtype = recipe.kept_dim(form), form.block, form.scale.dtype
    lines, length = x.shape[1 - dim], x.shape[dim]
    values = x.new_empty(lines, length * form.element.num_bits // 8, dtype=torch.uint8)
    scales = x.new_empty((), dtype=dtype)
    if block is not None:
        down, across = block if isinstance(block, tuple) else (1, length if block == -1 else block)
        scales = x.new_empty(lines // down, length // across, dtype=dtype)
    made = [each.mT if dim == 0 and each.dim() else each for each in (values, scales)]
    return [*made, x.new_empty((), dtype=torch.float32) if form.tensor_scale else None]


@torch.library.custom_op("mezzo::product_backward", mutates_args=())
def _backward_op(
    gradient: Tensor, kept: list[Tensor], recipe: str, features: int, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    (rows, out), how = gradient.shape, _BY_KEY[recipe]
    shapes = torch.Size((rows, features)), torch.Size((out, features))
    flat = [None if each.numel() == 0 else each for each in kept]
    made = Kept.put_together(flat, how, shapes, gradient.dtype)
    grads = backward(gradient, made, _Writer(how, None, None), (needs_x, needs_weight))
    return [gradient.new_empty(0) if each is None else each for each in grads]


@_backward_op.register_fake
def _(
    gradient: Tensor, kept: list[Tensor], recipe: str, features: int, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    rows, out = gradient.shape
    sizes = (rows, features) if needs_x else (0,), (out, features) if needs_weight else (0,)
    return [gradient.new_empty(size) for size in sizes]


def _setup_op(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, bias, ctx.recipe, ctx.needs_x, ctx.needs_weight = inputs
    ctx.features, ctx.bias_shape = x.shape[1], None if bias is None else bias.shape
    ctx.save_for_backward(x if ctx.needs_weight and _BY_KEY[ctx.recipe].low == "wgrad" else output[1], *output[2:])


def _differentiated_op(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    gradient, needs = gradients[0], (ctx.needs_x, ctx.needs_weight)
    found = torch.ops.mezzo.product_backward(gradient, list(ctx.saved_tensors), ctx.recipe, ctx.features, *needs)
    grad_x, grad_weight = (each if need else None for each, need in zip(found, needs, strict=True))
    grad_bias = None if ctx.bias_shape is None else _of_bias(gradient, ctx.bias_shape)
    return grad_x, grad_weight, grad_bias, None, None, None


_forward_op.register_autograd(_differentiated_op, setup_context=_setup_op)


# A call -----------------------------------------------------------------------------------------------------


def product(found: Operands, recipe: Recipe, memories: Sequence[Amaxes], weight: Tensor) -> Tensor:
    """Compute a product of a weight, forward and, when asked, backward.

    Args:
        found: The operands, in the policy's dtype.
        recipe: How.
        memories: What is known of earlier steps, of each model.
        weight: The weight as the program has it.

    Returns:
        What the call is to return.

    **Cost**: for the backward pass one byte is kept for each element of the input, and of the weight (half of that, and
    a scale for each block, in NVFP4). No host sync.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        raise _not_transformed(recipe)
    if torch.compiler.is_compiling() and not (memories and (recipe.delayed or recipe.stochastic)):
        return _by_op(found, recipe.key)
    rows = found.x.reshape(-1, found.x.shape[-1])
    return _returned(_run(rows, found.weight, found.bias, recipe, memories, weight), found)


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


def _by_op(found: Operands, key: str) -> Tensor:
    rows, grads = found.x.reshape(-1, found.x.shape[-1]), torch.is_grad_enabled()
    needs = grads and rows.requires_grad, grads and found.weight.requires_grad
    out: Tensor = torch.ops.mezzo.product(rows, found.weight, found.bias, key, *needs)[0]
    return _returned(out, found)


def _returned(out: Tensor, found: Operands) -> Tensor:
    return out.mT if found.is_turned else out.view(*found.x.shape[:-1], found.weight.shape[0])


@_disable_dynamo
def _run(
    rows: Tensor, low_weight: Tensor, bias: Tensor | None, recipe: Recipe, memories: Sequence[Amaxes], weight: Tensor
) -> Tensor:
    """Run in Python, and out of graphs where something is known of earlier steps."""
    with torch._C.DisableTorchFunction():  # a mode is asked about every attribute that is read, and there are many
        memory, slot = None, None
        if recipe.remembers:
            first = memories[0] if memories else None  # for weights that are computed, as those of adapters
            memory = next((each for each in memories if each.knows(weight)), first)
            slot = memory.slot(weight) if memory is not None and recipe.delayed else None
        call = ProductCall(weight) if LISTENERS else None
        if not torch.is_grad_enabled():  # else a weight that trains would be written down for a backward pass as well
            return forward(rows, low_weight, bias, _Writer(recipe, memory, slot, call), (False, False))[0]
        out: Tensor = _Product.apply(rows, low_weight, bias, recipe, memory, slot, call)  # type: ignore[no-untyped-call]
    return out
