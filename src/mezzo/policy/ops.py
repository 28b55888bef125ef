"""The op table: what torch does with each op under autocast, what mezzo makes of it, and why.

This is *the* place where ops are classified. It is a risk table, not a device table: the ``portable``
column is what a policy asks for on every device, and equals torch's CUDA lists; the other two columns
say what torch would do by itself, so that a region needs to add only the difference.

Source of both torch columns: the registrations for the AutocastCUDA and AutocastCPU dispatch keys, torch
2.11 to 2.13 (``torch/include/ATen/autocast_mode.h``); ``tests/policy/test_ops.py`` compares them with
the installed torch.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch.nn import functional

from mezzo.errors import PolicyError, nearest

__all__ = ["OPS", "TREATMENTS", "Op", "Reason", "Treatment", "functions", "resolve"]

Treatment = Literal["low", "fp32", "fp32_math", "promote", "native", "ban"]
Reason = Literal["gemm", "exponential range", "reduction", "loss", "bandwidth-bound", "type-mixing", "no low kernel"]

#: The treatments that a rule may ask for, in the order of DESIGN §4.
TREATMENTS: Final[tuple[Treatment, ...]] = get_args(Treatment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One row of the op table.

    Attributes:
        name: The op's base name, without overload: ``softmax``, ``conv2d``.
        portable: What a policy with ``lists="portable"`` asks for, on every device.
        cuda: What ``torch.autocast("cuda")`` does.
        cpu: What ``torch.autocast("cpu")`` does.
        reason: Why the op is treated so.
        source: Whose list the row comes from.
    """

    name: str
    portable: Treatment
    cuda: Treatment
    cpu: Treatment
    reason: Reason
    source: str

    @property
    def is_norm(self) -> bool:
        """Whether the paper computes this op in FP32 on low-precision storage (softmax, normalisation)."""
        return self.name in NORMS


#: Softmax and the normalisations: read and write low precision, compute in FP32 (Micikevicius 2018, §3.3).
NORMS: Final = frozenset(
    "softmax log_softmax softmin layer_norm native_layer_norm rms_norm group_norm instance_norm".split()
)

# Each block: portable, cuda, cpu, reason, source, names.
_BLOCKS: Final[tuple[tuple[Treatment, Treatment, Treatment, Reason, str, str], ...]] = (
    ("low", "low", "low", "gemm", "torch CUDA and CPU lists", """
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm
        matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention"""),
    ("low", "low", "native", "gemm", "torch CUDA list", """
        addmv addr einsum mv chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"""),
    ("low", "low", "low", "gemm", "torch CUDA list (_cudnn_rnn); made of linear on a CPU", """
        lstm gru rnn_tanh rnn_relu"""),
    ("fp32", "fp32", "native", "exponential range", "torch CUDA list", """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus"""),
    ("fp32", "fp32", "native", "exponential range", "torch CUDA list; Fleet black list", """
        softmax log_softmax"""),
    ("fp32", "fp32", "native", "reduction", "torch CUDA list", """
        layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm dist pdist renorm
        logsumexp cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_norm norm"""),
    ("fp32", "fp32", "native", "reduction", "torch CUDA list; Fleet black list", "sum cosine_similarity"),
    ("fp32", "fp32", "fp32", "reduction", "torch CUDA and CPU lists", "prod cdist"),
    ("fp32", "fp32", "fp32", "loss", "torch CUDA and CPU lists", """
        poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss"""),
    ("fp32", "fp32", "fp32", "loss", "torch CUDA and CPU lists; Fleet black list", """
        binary_cross_entropy_with_logits cross_entropy"""),
    ("ban", "ban", "fp32", "loss", "torch CUDA list", "binary_cross_entropy"),
    ("fp32", "fp32", "native", "bandwidth-bound", "torch CUDA list", "interpolate upsample"),
    ("promote", "promote", "native", "type-mixing", "torch CUDA list", """
        addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"""),
    ("promote", "promote", "fp32", "type-mixing", "torch CUDA and CPU lists", "grid_sampler grid_sample"),
    ("promote", "native", "promote", "type-mixing", "torch CPU list; built-in promotion on CUDA", """
        cat stack index_copy"""),
    ("native", "native", "fp32", "bandwidth-bound", "torch CPU list", """
        avg_pool3d max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d"""),
    ("fp32", "native", "fp32", "no low kernel", "torch CPU list", """
        quantile nanquantile stft ctc_loss polar view_as_complex trace cholesky_inverse cholesky_solve
        inverse lu_solve orgqr ormqr pinverse geqrf svd triangular_solve
        fake_quantize_per_tensor_affine
        fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2
        fft_rfftn fft_irfftn fft_hfft fft_ihfft
        linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky linalg_cholesky_ex linalg_svdvals
        linalg_svd linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex
        linalg_householder_product linalg_tensorinv linalg_tensorsolve linalg_qr linalg_lstsq"""),
    ("native", "native", "native", "exponential range", "Fleet black list; torch leaves it alone", "square"),
    ("native", "native", "native", "reduction", "Fleet black list; torch leaves it alone", "mean"),
    ("native", "native", "native", "reduction", "gray: torch's kernel mixes dtypes", "batch_norm"),
    ("native", "native", "native", "bandwidth-bound", "gray in every list", """
        relu gelu silu dropout max_pool2d avg_pool2d embedding add mul"""),
)  # fmt: skip

#: Every classified op, by base name.
OPS: Final[dict[str, Op]] = {
    name: Op(name=name, portable=portable, cuda=cuda, cpu=cpu, reason=reason, source=source)
    for portable, cuda, cpu, reason, source, names in _BLOCKS
    for name in names.split()
}

#: Other systems' names for the same op.
_ALIASES: Final[dict[str, str]] = {
    "cos_sim": "cosine_similarity",
    "softmax_with_cross_entropy": "cross_entropy",
    "cross_entropy2": "cross_entropy",
    "cross_entropy_loss": "cross_entropy",
    "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "logsoftmax": "log_softmax",
    "layernorm": "layer_norm",
}

# Where a user finds functions, with the prefix that the op's base name has for each place.
_NAMESPACES: Final[tuple[tuple[str, Any], ...]] = (
    ("", torch),
    ("", functional),
    ("", torch._C._nn),
    ("", torch.Tensor),
    ("linalg_", torch.linalg),
    ("fft_", torch.fft),
    ("", torch.special),
)
_PREFIXES: Final = (
    "torch.nn.functional.", "nn.functional.", "torch.linalg.", "torch.fft.", "torch.special.",
    "torch.Tensor.", "Tensor.", "torch.ops.aten.", "torch.", "aten::", "F.",
)  # fmt: skip


@functools.cache
def functions(name: str) -> tuple[Callable[..., Any], ...]:
    """List the Python callables behind an op's base name.

    Args:
        name: A base name, such as ``softmax`` or ``linalg_inv``.

    Returns:
        Each distinct callable once: ``torch.softmax``, ``F.softmax``, ``Tensor.softmax``. Empty for a name
        that torch does not know.
    """
    names = (name, *(alias for alias, target in _ALIASES.items() if target == name))
    found = (
        getattr(place, candidate.removeprefix(prefix), None)
        for prefix, place in _NAMESPACES
        for candidate in names
        if candidate.startswith(prefix)
    )
    return tuple(dict.fromkeys(function for function in found if callable(function)))


def resolve(name: str) -> str:
    """Return the base name for any spelling of an op.

    Args:
        name: ``softmax``, ``torch.softmax``, ``F.softmax``, ``Tensor.softmax``, ``aten::softmax.int``, or
            Paddle's ``softmax_with_cross_entropy``. Names of custom ops (``mylib::op``) are kept.

    Returns:
        The base name.

    Raises:
        PolicyError: Neither the op table nor torch knows the name.

    Example:
        >>> resolve("aten::softmax.int"), resolve("torch.linalg.inv"), resolve("Tensor.__matmul__")
        ('softmax', 'linalg_inv', 'matmul')
    """
    bare = name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            family = f"{prefix.split('.')[1]}_" if prefix in ("torch.linalg.", "torch.fft.") else ""
            bare = family + name.removeprefix(prefix).split(".")[0]
            break
    bare = _ALIASES.get(bare, bare)
    if bare in OPS or "::" in bare or functions(bare):
        return bare
    raise PolicyError(
        f"unknown op {name!r}",
        why=nearest(bare, _known()).split("valid:")[0] + "neither the op table nor torch has it",
        write="the name of a function in torch, torch.nn.functional or torch.Tensor, or a glob such as conv*",
    )


def matching(pattern: str) -> Iterator[str]:
    """Yield the classified ops whose base name matches a glob."""
    return (name for name in OPS if fnmatch.fnmatchcase(name, pattern))


@functools.cache
def _known() -> tuple[str, ...]:
    """List the names that a misspelt op may have meant."""
    public = (name for name in (*dir(functional), *dir(torch)) if not name.startswith("_"))
    return tuple(dict.fromkeys((*OPS, *public)))
