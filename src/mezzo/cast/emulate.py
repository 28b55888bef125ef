"""FP16 and BF16 products (matrices, convolutions, attention, recurrent layers) on a device that lacks fast ones.

A tensor core multiplies low-precision operands, accumulates in FP32 and rounds the result once. Here the
same happens in three visible steps: widen the (already rounded) operands to FP32, run torch's FP32 kernel,
round the result. The backward pass does the same, and what it needs is saved in low precision, so that
memory is what it would be on the device.

Source: Micikevicius et al. 2018, §3.3; the error bound is that of an FP32 dot product.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mezzo.cast.device import Family
from mezzo.cast.notes import WATCHERS, during
from mezzo.compiling import is_scripted
from mezzo.dispatch import DisableTorchFunction, is_transformed
from mezzo.tensors import LOW, Frame, mapped, tensors


def emulate(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op of :data:`EMULATED` on low-precision operands, as a device with FP32 accumulation would.

    Args:
        name: The op's base name, a key of :data:`EMULATED`.
        function: The torch function itself, for ops that have no rule of their own here.
        args: Its positional arguments; floating tensors all have the low dtype, and are dense.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns, rounded to the operands' dtype; once, even where it is made of several products.

    **Cost**: two casts for each operand and one for the result; linear, matmul and convolution save exactly
    their low-precision operands, other ops run forward once more in the backward pass. An embedding bag widens the
    whole table.
    """
    if "self" in kwargs:  # what operators of torch.ops.aten call their first argument
        args, kwargs = (kwargs["self"], *args), {key: value for key, value in kwargs.items() if key != "self"}
    if not torch.compiler.is_compiling() and is_transformed():
        return _in_steps(function, args, kwargs)
    return EMULATED[name](function, *args, **kwargs)


@contextlib.contextmanager
def with_autocast(device_types: Iterable[str], enabled: bool) -> Iterator[None]:
    """Switch native autocast on or off where it is not, and back."""
    switched = [device_type for device_type in device_types if torch.is_autocast_enabled(device_type) is not enabled]
    for device_type in switched:
        torch.set_autocast_enabled(device_type, enabled)
    try:
        yield
    finally:
        for device_type in switched:
            torch.set_autocast_enabled(device_type, not enabled)


def without_autocast(device_types: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Switch native autocast off where it is on, for a backward pass.

    Under it C++ would cast FP32 operands of the backward pass to low precision: those of products that a policy keeps
    in FP32, and those of emulated ones.
    """
    return with_autocast(device_types, False)


def as_emulation(backward: Callable[..., Any], *, runs_again: bool = False) -> Callable[..., Any]:
    """Make an autograd function's backward pass of one that is given the unpacked tensors as well.

    It runs without native autocast, which is still on where it begins inside a region. To unpack the tensors a
    checkpoint may run code of the model's, which is no emulation.

    Args:
        backward: It.
        runs_again: Whether it runs the forward pass again, which function modes are to see as they saw the first one.
            Of other arithmetic they see nothing, as of what C++ does in a backward pass.
    """

    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code is differentiated without autocast already
            return backward(ctx, ctx.saved_tensors, *gradients)
        device_type = None
        for gradient in gradients:
            if gradient is not None:
                with DisableTorchFunction():  # a region's mode would handle reading an attribute, too
                    device_type = gradient.device.type
                break
        if device_type is None:
            return backward(ctx, ctx.saved_tensors, *gradients)
        if is_on := torch.is_autocast_enabled(device_type):
            torch.set_autocast_enabled(device_type, False)
        try:
            saved = ctx.saved_tensors
            with contextlib.nullcontext() if runs_again else DisableTorchFunction():
                if WATCHERS:
                    return during("emulation", ctx, backward, ctx, saved, *gradients)
                return backward(ctx, saved, *gradients)
        finally:
            if is_on:
                torch.set_autocast_enabled(device_type, True)

    return run


class _MatMul(torch.autograd.Function):
    """``round(float(a) @ float(b))`` for operands of two or more dimensions."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)  # (..., n, k), (..., k, m)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    @as_emulation
    def backward(ctx: Any, saved: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = saved
        gradient = gradients[0].float()  # (..., n, m)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = (gradient @ b.float().mT).sum_to_size(a.shape).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = (a.float().mT @ gradient).sum_to_size(b.shape).to(b.dtype)
        return grad_a, grad_b


def _linear_once(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _Linear(torch.autograd.Function):
    """``round(float(x) @ float(w).T + float(b))``: the bias is added before the one rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # (..., in), (out, in)
        return _linear_once(x, weight, bias)

    @staticmethod
    @as_emulation
    def backward(ctx: Any, saved: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = saved
        gradient = gradients[0].float()  # (..., out)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ weight.float()).to(x.dtype)
        rows = _rows(gradient)  # (rows, out)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.mT @ _rows(x.float())).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(x.dtype)
        return grad_x, grad_weight, grad_bias


def _rows(x: Tensor) -> Tensor:
    """View all but the last dimension as one, also where there are no numbers at all."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Convolution(torch.autograd.Function):
    """A batched convolution, transposed or not, on the arguments of ``aten::convolution``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.bias_sizes = options, None if bias is None else list(bias.shape)
        wide_bias = None if bias is None else bias.float()
        out: Tensor = torch.ops.aten.convolution(x.float(), weight.float(), wide_bias, *options)
        return out.to(x.dtype)

    @staticmethod
    @as_emulation
    def backward(ctx: Any, saved: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight = saved
        mask = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        wide = torch.ops.aten.convolution_backward(
            gradients[0].float(), x.float(), weight.float(), ctx.bias_sizes, *ctx.options, mask
        )
        rounded = (grad.to(x.dtype) if needed else None for grad, needed in zip(wide, mask, strict=True))
        return (*rounded, *(None for _ in ctx.options))


class _RandomState(NamedTuple):
    """What random numbers begin from: the CPU's, and those of the device that computes."""

    cpu: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> _RandomState:
        if device.type == "cpu":
            return cls(torch.get_rng_state(), device, None)
        return cls(torch.get_rng_state(), device, torch.get_device_module(device).get_rng_state(device))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more; what is drawn afterwards is what would have been."""
        device_type = self.device.type
        options = {} if self.own is None else {"devices": [self.device], "device_type": device_type}
        with torch.random.fork_rng(**(options or {"devices": []})):
            torch.set_rng_state(self.cpu)
            if self.own is not None:
                torch.get_device_module(device_type).set_rng_state(self.own, self.device)
            yield


class _Recomputed(torch.autograd.Function):
    """Any function of tensors, run in FP32; the backward pass runs it again from the saved low operands."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., list[Any]], state: _RandomState | None, dtype: torch.dtype, *operands: Tensor
    ) -> tuple[Any, ...]:
        ctx.save_for_backward(*operands)
        ctx.run, ctx.state = run, state
        rounded = tuple(_narrow(output, dtype) for output in run(*(_widen(operand) for operand in operands)))
        ctx.mark_non_differentiable(
            *(out for out in rounded if isinstance(out, Tensor) and not out.is_floating_point())
        )
        return rounded

    @staticmethod
    @functools.partial(as_emulation, runs_again=True)
    def backward(ctx: Any, saved: Any, *gradients: Any) -> tuple[Any, ...]:
        needed = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
        # Under create_graph the saved tensors stay connected, so that the result can be differentiated again. Else the
        # wide operands are what is differentiated by: torch casts no sparse gradient of a table back.
        again = torch.is_grad_enabled()
        operands = (
            list(saved) if again else [_widen(x.detach()).requires_grad_(i in needed) for i, x in enumerate(saved)]
        )
        with torch.enable_grad(), contextlib.nullcontext() if ctx.state is None else ctx.state.again():
            outputs = ctx.run(*(_widen(operand) for operand in operands))
            pairs = [
                (out, gradient.to(out.dtype))
                for out, gradient in zip(outputs, gradients, strict=True)
                if isinstance(out, Tensor) and out.requires_grad and gradient is not None
            ]
            grads = torch.autograd.grad(
                [out for out, _ in pairs], [operands[i] for i in needed], [gradient for _, gradient in pairs],
                create_graph=again, allow_unused=True,
            )  # fmt: skip
        by_index = {
            i: None if gradient is None else gradient.to(saved[i].dtype)
            for i, gradient in zip(needed, grads, strict=True)
        }
        return (None, None, None, *(by_index.get(i) for i in range(len(operands))))


def _widen(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _linear(function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dtype != weight.dtype:
        return _rerun(function, input, weight, bias)
    if not torch.is_grad_enabled() and not is_scripted():  # whose checks compare the traces of both
        return _linear_once(input, weight, bias)
    return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


def _matmul(function: Any, input: Tensor, other: Tensor) -> Any:
    if input.dtype != other.dtype:
        return function(input, other)  # which refuses them
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    if b is a:
        b = a.view_as(a)  # torch.compile takes no tensor twice
    out: Tensor = _MatMul.apply(a, b)  # type: ignore[no-untyped-call]
    out = out.squeeze(-1) if other.dim() == 1 else out
    return out.squeeze(-1 if other.dim() == 1 else -2) if input.dim() == 1 else out


def _mm(*dims: int) -> Callable[..., Any]:
    """Make mm, bmm or mv: special cases of matmul, of operands with these dimensions."""

    def run(function: Any, input: Tensor, mat2: Tensor, *rest: Any, **kwargs: Any) -> Any:
        if rest or kwargs:  # another dtype of the result
            return _rerun(function, input, mat2, *rest, **kwargs)
        if (input.dim(), mat2.dim()) != dims or (dims == (3, 3) and input.shape[0] != mat2.shape[0]):
            return function(input, mat2)  # which refuses them
        return _matmul(function, input, mat2)

    return run


def _mv(function: Any, input: Tensor, vec: Tensor) -> Any:
    return _mm(2, 1)(function, input, vec)


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _convolution(dims: int, *, transposed: bool = False) -> Callable[..., Tensor]:
    names = "stride padding output_padding groups dilation" if transposed else "stride padding dilation groups"

    def run(
        function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **keywords: Any
    ) -> Any:
        usual = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}
        options: dict[str, Any] = {**usual, **dict(zip(names.split(), rest, strict=False)), **keywords}
        strides = _each(options["stride"], dims)
        is_right = input.dim() - dims in (1, 2) and weight.dim() == dims + 2 and input.dtype == weight.dtype
        padding = options["padding"]
        is_right &= not isinstance(padding, str) or padding == "valid" or (padding == "same" and set(strides) == {1})
        if not is_right:
            return function(input, weight, bias, *rest, **keywords)  # which refuses them
        if padding == "same":
            # Torch pads the odd element on the right, where convolution itself cannot.
            dilations = _each(options["dilation"], dims)
            total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
            if any(amount % 2 for amount in total):
                sides = [side for amount in reversed(total) for side in (0, amount % 2)]
                input = functional.pad(input, sides)
            options["padding"] = [amount // 2 for amount in total]
        elif padding == "valid":
            options["padding"] = 0
        lists = [_each(options[name], dims) for name in ("stride", "padding", "dilation", "output_padding")]
        return _batched(dims, input, weight, bias, (*lists[:3], transposed, lists[3], options["groups"]))

    return run


def _any_convolution(
    _: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *backend: bool,
) -> Tensor:  # fmt: skip
    """What conv2d and its like call, with every option spelt out, and ``_convolution`` which also chooses a backend."""
    dims = weight.dim() - 2
    lists = [_each(list(value), dims) for value in (stride, padding, dilation)]
    return _batched(dims, input, weight, bias, (*lists, transposed, _each(list(output_padding), dims), groups))


def _batched(dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    single = x.dim() == dims + 1
    out: Tensor = _Convolution.apply(x.unsqueeze(0) if single else x, weight, bias, *options)  # type: ignore[no-untyped-call]
    return out.squeeze(0) if single else out


def _in_steps(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Widen, compute, round: for torch.func and torch.compile, which differentiate and save as they see fit."""
    args, kwargs, dtype = _result_dtype(args, kwargs)
    wide_args, wide_kwargs = mapped((args, kwargs), _widen)
    return mapped(function(*wide_args, **wide_kwargs), lambda x: _narrow(x, dtype))


def _result_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], torch.dtype]:
    """Return arguments without ``out_dtype``, and the dtype to round to: that one, or else the operands'."""
    out_dtypes = [value for value in (*args, kwargs.get("out_dtype")) if isinstance(value, torch.dtype)]
    if not out_dtypes:
        return args, kwargs, next(x.dtype for x in tensors((args, kwargs)) if x.dtype in LOW)
    options = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    return tuple(value for value in args if not isinstance(value, torch.dtype)), options, out_dtypes[0]


def _rerun(function: Callable[..., Any], *args: Any, draws: bool = False, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _in_steps(function, args, kwargs)
    args, kwargs, dtype = _result_dtype(args, kwargs)
    operands = list(tensors((args, kwargs)))
    state = _RandomState.now(operands[0].device) if draws and _drops(args, kwargs) else None
    call, returned = Frame((args, kwargs)), list[Frame]()  # only the autograd node keeps operands alive
    del args, kwargs

    def run(*operands: Tensor) -> list[Tensor]:
        now_args, now_kwargs = call.filled(operands)
        out = function(*now_args, **now_kwargs)
        returned[:] = [Frame(out)]
        return list(tensors(out))

    outputs = _Recomputed.apply(run, state, dtype, *operands)  # type: ignore[no-untyped-call]
    return returned[0].filled(outputs)


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention or a recurrent layer may use random numbers: of its floats only the scale is no probability."""
    values = (value for name, value in kwargs.items() if name != "scale")
    return any(isinstance(value, float) and 0.0 < value <= 1.0 for value in (*args, *values))


def _embedding_bag(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sum rows of a table in FP32; what ``max_norm`` asks for is done to the table itself before."""
    if function is not functional.embedding_bag:
        return _rerun(function, *args, **kwargs)
    names = ("input", "weight", "offsets", "max_norm", "norm_type")
    named = dict(zip(names, args, strict=False)) | kwargs
    if named.get("max_norm") is None:
        return _rerun(function, *args, **kwargs)
    rest = args[len(names) :]
    with torch.no_grad():
        torch.embedding_renorm_(
            named["weight"].detach(), named["input"], named.pop("max_norm"), named.get("norm_type", 2.0)
        )
    first = [named.pop(name) for name in ("input", "weight")]
    return _rerun(function, *first, named.pop("offsets", None), None, named.pop("norm_type", 2.0), *rest, **named)


def _rerun_drawing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _rerun(function, *args, draws=True, **kwargs)


#: What torch runs as one recurrent function, made of products and element-wise steps.
RECURRENT: Final = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())

#: How each op is emulated, by family and base name.
_BY_FAMILY: Final[dict[Family, dict[str, Callable[..., Any]]]] = {
    "products": {
        "linear": _linear,
        "matmul": _matmul,
        "mm": _mm(2, 2),
        "bmm": _mm(3, 3),
        "mv": _mv,
        "embedding_bag": _embedding_bag,
        **dict.fromkeys(
            """addmm addmv addr addbmm baddbmm _addmm_activation dot vdot linalg_vecdot inner tensordot einsum
            chain_matmul grouped_mm linalg_multi_dot linalg_matrix_power linalg_matrix_exp cov corrcoef
            bilinear""".split(),
            _rerun,
        ),
    },
    "convolution": {
        "convolution": _any_convolution,
        **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
        **{f"conv_transpose{dims}d": _convolution(dims, transposed=True) for dims in (1, 2, 3)},
        "conv_tbc": _rerun,
    },
    "attention": dict.fromkeys(("scaled_dot_product_attention", "_native_multi_head_attention"), _rerun_drawing),
    "recurrent": dict.fromkeys(sorted(RECURRENT), _rerun_drawing),
}

#: How each op is emulated, by base name. An outer or Kronecker product and a cross product add up nothing that a
#: device would keep in FP32, and torch has no low kernel for distances: none of them is here.
EMULATED: Final[dict[str, Callable[..., Any]]] = {name: run for ops in _BY_FAMILY.values() for name, run in ops.items()}


def family_of(op: str) -> Family:
    """Return the family with which an op is emulated: what belongs to none goes with the products.

    Example:
        >>> family_of("conv_tbc"), family_of("einsum")
        ('convolution', 'products')
    """
    return next((family for family, ops in _BY_FAMILY.items() if op in ops), "products")


#: What C++ composes of products that nothing reaches one by one.
COMPOSED: Final = frozenset({"linalg_matrix_power", "cov", "corrcoef"})

#: What C++ composes of products that torch's CPU autocast casts, while its lists do not name the whole.
REACHED: Final = frozenset("einsum tensordot inner chain_matmul linalg_multi_dot".split())


def with_dtypes_of_states(op: str, args: tuple[Any, ...], out: Any, low_dtype: torch.dtype) -> Any:
    """Return the outputs of a recurrent op in the dtypes that they have under torch's CPU autocast.

    Only products are low there. A state that enters in FP32 stays FP32 where it is added to: in gated cells, but not
    in plain ones, whose state is a function of products. An LSTM over one block of data is one kernel, all low, unless
    it projects its hidden state.

    Args:
        op: Its base name.
        args: The arguments as the caller gave them: input, states, weights; lengths after the input of a packed one.
        out: Its outputs, in the low dtype.
        low_dtype: The low dtype.
    """
    packed = not op.endswith("_cell") and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    states = args[2 if packed else 1]
    states = [states] if isinstance(states, Tensor) else list(states)
    if op.startswith("rnn") or states[-1].dtype != torch.float32:
        return out
    if op == "lstm" and not packed:
        projects = states[0].shape[-1] != states[1].shape[-1]
        return (*out[:-1], out[-1].float()) if projects else out
    return mapped(out, lambda x: x.float() if x.dtype == low_dtype else x)
