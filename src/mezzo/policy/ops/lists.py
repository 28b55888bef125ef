"""Other people's op lists, as they wrote them: torch's autocast registrations, apex, Fleet and Paddle.

Facts only. What mezzo makes of them stands in :mod:`mezzo.policy.ops.table`; ``tests/policy/test_ops.py`` compares
torch's lists with what the installed torch has registered, overload by overload.

A name may carry the torch versions that have it: ``rms_norm>=2.12``, ``qr<2.14``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Final, Literal

import torch

__all__ = ["APEX", "CUDA_BUILD_ONLY", "FLEET", "PADDLE", "Treatment", "base_names", "registered", "torch_version"]

Treatment = Literal["low", "fp32", "fp32_math", "promote", "native", "ban"]

#: AutocastCUDA: ``torch/include/ATen/autocast_mode.h`` of torch 2.11 to 2.15, and the two kernels beside its macros
#: (binary_cross_entropy, _cudnn_rnn). torch's fp32, fp32_set_opt_dtype and fp32_append_dtype are one treatment here.
_CUDA: Final[dict[Treatment, str]] = {
    "low": """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
        _scaled_dot_product_flash_attention scaled_dot_product_attention""",
    "fp32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm>=2.12 group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss
        nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp linalg_matrix_sqrth>=2.14
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
        cumprod.dimname<2.13 cumsum.dimname<2.13 log_softmax.Dimname<2.13 norm.names_ScalarOpt_dim<2.13
        prod.dim_Dimname<2.13 softmax.Dimname<2.13 sum.dim_DimnameList<2.13""",
    "promote": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""",
    "ban": "binary_cross_entropy",
}
#: AutocastCPU: ``aten/src/ATen/autocast_mode.cpp`` of torch 2.11 to 2.15.
_CPU: Final[dict[Treatment, str]] = {
    "low": """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm
        _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
        _native_multi_head_attention""",
    "promote": "stack cat index_copy index_copy.dimname<2.13",
    "fp32": """
        avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int prod.dim_Dimname<2.13 quantile
        quantile.scalar nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d
        _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky<2.14 cholesky_inverse
        cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d mse_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss smooth_l1_loss
        cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss
        multilabel_margin_loss_forward binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn
        fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond
        linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky linalg_cholesky_ex linalg_svdvals linalg_svd
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_householder_product
        linalg_tensorinv linalg_tensorsolve linalg_qr linalg_lstsq linalg_matrix_sqrth>=2.14
        fake_quantize_per_tensor_affine geqrf _lu_with_info qr<2.14 svd triangular_solve fractional_max_pool2d
        fractional_max_pool3d adaptive_max_pool3d""",
}
#: Registered only where torch itself was built with CUDA.
CUDA_BUILD_ONLY: Final = frozenset({"_cudnn_rnn"})


def _names(lists: Mapping[str, str]) -> Mapping[str, frozenset[str]]:
    return types.MappingProxyType({treatment: frozenset(names.split()) for treatment, names in lists.items()})


#: apex.amp O1, ``apex/amp/lists/{torch,functional,tensor}_overrides.py`` (NVIDIA/apex e13873de, the last with amp).
APEX: Final = _names({
    "half list": """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu linear addmm addmv addr
        matmul mm mv addbmm baddbmm bmm""",
    "float list": """
        acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std
        sum var renorm interpolate softplus softmin log_softmax softmax layer_norm group_norm local_response_norm
        normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div
        l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss
        nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    "promote list": "addcdiv addcmul atan2 cross bilinear dot add div mul sub cat stack",
    "ban": "binary_cross_entropy",
})  # fmt: skip
#: Paddle Fleet's defaults (white = conv2d, matmul, mul; black in three kinds), in Paddle's names.
FLEET: Final = _names({
    "white list": "conv2d matmul mul",
    "black list": """
        exp square log mean sum cos_sim softmax softmax_with_cross_entropy sigmoid_cross_entropy_with_logits
        cross_entropy cross_entropy2""",
})  # fmt: skip
#: paddle.amp's FP16 lists for O1, ``python/paddle/amp/amp_lists.py`` (PaddlePaddle/Paddle 05296e15), Paddle's names.
PADDLE: Final = _names({
    "white list": "conv2d einsum matmul matmul_v2 mul max_pool2d_with_index fused_gemm_epilogue",
    "black list": """
        tan acos asin sinh cosh atanh tanh_shrink cos_sim erfinv exp expm1 log log10 log2 reciprocal rsqrt pow square
        reduce_sum mean reduce_mean reduce_prod cumprod cumsum dist pnorm frobenius_norm renorm group_norm layer_norm
        softmax softmin softplus log_softmax softmax_with_cross_entropy sigmoid_cross_entropy_with_logits
        c_softmax_with_cross_entropy cross_entropy cross_entropy2 nll_loss huber_loss triplet_margin_loss log_loss
        linear_interp_v2 nearest_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2 lookup_table
        lookup_table_v2 scatter""",
})  # fmt: skip


def torch_version(text: str | None = None) -> tuple[int, int]:
    """Return the major and minor version of torch.

    Args:
        text: A version to read instead of the installed one's.

    Example:
        >>> torch_version("2.13.0+cpu")
        (2, 13)
    """
    major, minor = (text or str(torch.__version__)).split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


@functools.cache
def registered(device: Literal["cuda", "cpu"], version: tuple[int, int] | None = None) -> Mapping[str, Treatment]:
    """List what one version of torch registers for autocast, by overload name.

    Args:
        device: ``cuda`` or ``cpu``.
        version: Major and minor version; the installed torch's when omitted.

    Example:
        >>> registered("cuda", (2, 12))["softmax.int"]
        'fp32'
        >>> "rms_norm" in registered("cuda", (2, 11)), "rms_norm" in registered("cuda", (2, 12))
        (False, True)
    """
    version = version or torch_version()
    found: dict[str, Treatment] = {}
    for treatment, entries in (_CUDA if device == "cuda" else _CPU).items():
        for entry in entries.split():
            name, _, since = entry.partition(">=")
            name, _, until = name.partition("<")
            if (not since or version >= torch_version(since)) and (not until or version < torch_version(until)):
                found[name] = treatment
    return types.MappingProxyType(found)


@functools.cache
def base_names(device: Literal["cuda", "cpu"]) -> Mapping[str, Treatment]:
    """List what the installed torch registers, by op instead of by overload.

    Example:
        >>> base_names("cpu")["conv2d"]
        'low'
    """
    return types.MappingProxyType({name.split(".")[0]: treatment for name, treatment in registered(device).items()})
