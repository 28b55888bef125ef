"""The op table: every op mezzo names, what it gets, and why.

It is a risk table, not a device table: the ``portable`` column is what a policy asks for, and gives torch's CUDA
dtypes on every device; the other two say what torch would do by itself, so that a region needs to add only the
difference (:meth:`mezzo.Policy.explain` says for which ops it does not). Both come from the registrations that
torch is asked for below. An op that is not registered itself but that C++ composes of one that is (``square`` of
``pow``) goes by the op it is made of.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from mezzo import dispatch

# Other people's op lists and names: torch's autocast, which is asked; apex, Fleet and Paddle, as they wrote them.
#
# Names are ``name=op`` pairs, each op being a base name of the op table. Facts only: what mezzo makes of them stands in
# the table.

Treatment = Literal["low", "fp32", "fp32_math", "promote", "native", "ban", "fp8", "mxfp8", "nvfp4"]


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
#: paddle.amp's lists, ``python/paddle/amp/amp_lists.py`` (PaddlePaddle/Paddle d40e2b24, where FP16 and BF16 share
#: them), in Paddle's names. O1 has both black lists, O2 the extra one, OD none.
PADDLE: Final = _names({
    "white list": "conv2d einsum matmul matmul_v2 mul max_pool2d_with_index fused_gemm_epilogue flash_attn",
    "black list": """
        tan acos asin sinh cosh atanh tanh_shrink erfinv exp expm1 log log10 log2 reciprocal rsqrt pow square
        reduce_sum mean reduce_mean reduce_prod cumprod cumsum dist pnorm frobenius_norm renorm group_norm layer_norm
        softmax softmin softplus log_softmax softmax_with_cross_entropy sigmoid_cross_entropy_with_logits
        c_softmax_with_cross_entropy cross_entropy cross_entropy2 nll_loss huber_loss triplet_margin_loss log_loss""",
    "extra black list": """
        linear_interp_v2 nearest_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2 lookup_table
        lookup_table_v2 scatter""",
})  # fmt: skip


@functools.cache
def registered(device: Literal["CUDA", "CPU"]) -> frozenset[str]:
    """List the ops that the installed torch's autocast treats on a kind of device, by base name.

    Example:
        >>> "conv2d" in registered("CPU"), "relu" in registered("CPU")
        (True, False)
    """
    overloads = dispatch.registered(f"Autocast{device}")
    return frozenset(name.removeprefix("aten::").split(".")[0] for name in overloads if name.startswith("aten::"))


# Names ------------------------------------------------------------------------------------------------


def _pairs(text: str) -> Mapping[str, str]:
    return types.MappingProxyType(dict(pair.split("=") for pair in text.split()))


#: torch's second names: a rule on the op reaches these callables too.
SYNONYMS: Final = _pairs("""
    absolute=abs arccos=acos arccosh=acosh arcsin=asin arcsinh=asinh arctan=atan arctanh=atanh arctan2=atan2
    multiply=mul subtract=sub divide=div true_divide=div negative=neg clip=clamp fix=trunc concat=cat concatenate=cat
    row_stack=vstack moveaxis=movedim swapaxes=transpose swapdims=transpose ger=outer trapz=trapezoid
    expit=sigmoid psi=digamma gammaln=lgamma multigammaln=mvlgamma gammainc=igamma gammaincc=igammac
    det=linalg_det slogdet=linalg_slogdet inverse=linalg_inv pinverse=linalg_pinv matrix_exp=linalg_matrix_exp
    matrix_power=linalg_matrix_power orgqr=linalg_householder_product linalg_matmul=matmul linalg_diagonal=diagonal
    lu_solve=linalg_lu_solve cross_entropy_loss=cross_entropy _convolution=convolution
    _grouped_mm=grouped_mm
    __add__=add __radd__=add __mul__=mul __rmul__=mul __sub__=sub __rsub__=rsub __truediv__=div __div__=div
    __rtruediv__=reciprocal __rdiv__=reciprocal __floordiv__=floor_divide __rfloordiv__=floor_divide
    __mod__=remainder __rmod__=remainder __pow__=pow __rpow__=pow __matmul__=matmul __neg__=neg __pos__=positive
    __abs__=abs __getitem__=getitem
""")

#: Names that only stand for an op in text: kernels behind it, and operators whose operands come the other way round.
SPELLINGS: Final = _pairs("""
    __rmatmul__=matmul _cudnn_rnn=lstm mkldnn_rnn_layer=lstm _thnn_fused_lstm_cell=lstm_cell
    _thnn_fused_gru_cell=gru_cell _scaled_dot_product_flash_attention=scaled_dot_product_attention
    nll_loss2d=nll_loss nll_loss_nd=nll_loss multilabel_margin_loss_forward=multilabel_margin_loss
    _grid_sampler_2d_cpu_fallback=grid_sampler_2d _lu_with_info=linalg_lu_factor _softmax=softmax
    _log_softmax=log_softmax native_group_norm=group_norm native_batch_norm=batch_norm native_dropout=dropout
    _scaled_mm=scaled_mm _scaled_grouped_mm=scaled_grouped_mm
    _sparse_mm=sparse_mm _sparse_addmm=sparse_addmm _sparse_softmax=sparse_softmax sparse_sum=_sparse_sum
    _sparse_log_softmax=sparse_log_softmax col2im=fold
    logsoftmax=log_softmax layernorm=layer_norm batchnorm=batch_norm groupnorm=group_norm rmsnorm=rms_norm
    sdpa=scaled_dot_product_attention attention=scaled_dot_product_attention bce=binary_cross_entropy
    bce_with_logits=binary_cross_entropy_with_logits logsigmoid_forward=logsigmoid log_sigmoid=logsigmoid
""")

#: Classes of torch.nn whose functional form has another name; the others follow by their letters (LayerNorm).
MODULES: Final = _pairs("""
    BCELoss=binary_cross_entropy BCEWithLogitsLoss=binary_cross_entropy_with_logits KLDivLoss=kl_div
    MultiLabelSoftMarginLoss=multilabel_soft_margin_loss MultiLabelMarginLoss=multilabel_margin_loss
    NLLLoss2d=nll_loss MultiheadAttention=multi_head_attention_forward RNN=rnn_tanh RNNCell=rnn_tanh_cell
    BatchNorm1d=batch_norm BatchNorm2d=batch_norm BatchNorm3d=batch_norm SyncBatchNorm=batch_norm
    InstanceNorm1d=instance_norm InstanceNorm2d=instance_norm InstanceNorm3d=instance_norm
    UpsamplingNearest2d=upsample_nearest UpsamplingBilinear2d=upsample_bilinear CrossMapLRN2d=local_response_norm
    ZeroPad1d=pad ZeroPad2d=pad ZeroPad3d=pad ConstantPad1d=pad ConstantPad2d=pad ConstantPad3d=pad
    CircularPad1d=pad CircularPad2d=pad CircularPad3d=pad ReflectionPad3d=pad Softmax2d=softmax
    NonDynamicallyQuantizableLinear=linear
""")

#: Paddle's operators. ``mul`` is its matrix product, so it counts only where Paddle is named: ``paddle:mul``.
PADDLE_ALIASES: Final = _pairs("""
    mul=matmul matmul_v2=matmul fc=linear fused_gemm_epilogue=linear depthwise_conv2d=conv2d
    conv2d_transpose=conv_transpose2d conv3d_transpose=conv_transpose3d conv1d_transpose=conv_transpose1d
    flash_attn=scaled_dot_product_attention
    elementwise_add=add elementwise_sub=sub elementwise_mul=mul elementwise_div=div elementwise_pow=pow
    elementwise_max=maximum elementwise_min=minimum elementwise_mod=remainder elementwise_floordiv=floor_divide
    reduce_sum=sum reduce_mean=mean reduce_prod=prod reduce_max=amax reduce_min=amin scale=mul
    softmax_with_cross_entropy=cross_entropy c_softmax_with_cross_entropy=cross_entropy cross_entropy2=cross_entropy
    sigmoid_cross_entropy_with_logits=binary_cross_entropy_with_logits log_loss=binary_cross_entropy
    bce_loss=binary_cross_entropy kldiv_loss=kl_div warpctc=ctc_loss cos_sim=cosine_similarity
    p_norm=norm pnorm=norm tanh_shrink=tanhshrink hard_swish=hardswish hard_sigmoid=hardsigmoid swish=silu
    hard_shrink=hardshrink lookup_table=embedding lookup_table_v2=embedding max_pool2d_with_index=max_pool2d
    linear_interp_v2=upsample_linear1d nearest_interp_v2=upsample_nearest2d bilinear_interp_v2=upsample_bilinear2d
    bicubic_interp_v2=upsample_bicubic2d trilinear_interp_v2=upsample_trilinear3d sync_batch_norm=batch_norm
    reshape2=reshape transpose2=permute squeeze2=squeeze unsqueeze2=unsqueeze expand_v2=expand top_k_v2=topk
    flatten_contiguous_range=flatten
""")


def synonyms_of(op: str) -> tuple[str, ...]:
    """List the second names that torch has for an op.

    Example:
        >>> synonyms_of("abs")
        ('absolute', '__abs__')
    """
    return _BY_OP.get(op, ())


def _inverted(pairs: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for name, op in pairs.items():
        names[op] = (*names.get(op, ()), name)
    return types.MappingProxyType(names)


_BY_OP: Final = _inverted(SYNONYMS)


Reason = Literal[
    "gemm", "exponential range", "reduction", "loss", "bandwidth-bound", "type-mixing", "no low kernel",
    "data movement", "composite",
]  # fmt: skip

#: The treatments that a rule may ask for.
TREATMENTS: Final[tuple[Treatment, ...]] = get_args(Treatment)

#: Those of products whose operands have fewer than sixteen bits, and whose results are low.
QUANTISED: Final[tuple[Treatment, ...]] = ("fp8", "mxfp8", "nvfp4")
#: The products that take them: those of a weight. Attention, recurrent cells and convolutions stay low, as in the
#: published recipes (Micikevicius et al. 2022; NVIDIA, *Pretraining Large Language Models with NVFP4*, 2025).
QUANTISABLE: Final = ("linear", "addmm", "mm", "matmul")

#: Softmax and the normalisations: read and write low precision, compute in FP32 (Micikevicius 2018, §3.3). Batch and
#: instance norm are not among them: their kernels keep FP32 statistics, which they update in place.
NORMS: Final = frozenset("softmax log_softmax softmin layer_norm native_layer_norm rms_norm group_norm".split())


#: Ops that may return their argument's own memory. A cast would make a copy of it, and a write to the result would
#: then be lost, so nothing ever casts them, rules included.
VIEWS: Final = frozenset(
    """
    adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk conj contiguous
    detach diagonal dsplit expand expand_as flatten getitem hsplit imag meshgrid movedim narrow permute
    ravel real reshape reshape_as resolve_conj resolve_neg select split split_with_sizes squeeze t
    tensor_split transpose unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze view view_as view_as_real vsplit
""".split()
)


#: Ops that only move what they are given into a copy of their first operand. What writes so in place takes it in the
#: dtype of what is written to: a cast of all of that, and back, would give the same numbers.
MOVES: Final = frozenset("index_put index_copy scatter masked_scatter put".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One row of the op table.

    Attributes:
        name: The op's base name, without overload: ``softmax``, ``conv2d``.
        portable: What a policy with ``lists="portable"`` asks for, on every device where it is not torch's affair.
        cuda: What ``torch.autocast("cuda")`` does.
        cpu: What ``torch.autocast("cpu")`` does.
        reason: Why the op is treated so.
        source: Whose lists name the op, or what it is made of.
        parts: The ops it is made of, where they decide instead of it.
    """

    name: str
    portable: Treatment
    cuda: Treatment
    cpu: Treatment
    reason: Reason
    source: str
    parts: tuple[str, ...] = ()

    @property
    def is_norm(self) -> bool:
        """Whether the paper computes this op in FP32 on low-precision storage (softmax, normalisation)."""
        return self.name in NORMS

    def by_torch(self, device_type: str) -> Treatment:
        """Return what torch's own autocast does on a device."""
        return self.cpu if device_type == "cpu" else self.cuda


class _Rows(NamedTuple):
    """Ops that share everything but their name.

    ``parts`` are the registered ops they are made of. A column that is given overrides what the lists say.
    """

    portable: Treatment
    reason: Reason
    names: str
    parts: str = ""
    cuda: Treatment | None = None
    cpu: Treatment | None = None
    note: str = ""


_ROWS: Final = (
    # Low: matrix products and convolutions.
    _Rows("low", "gemm", """
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
        cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr addbmm baddbmm bmm matmul mm mv einsum
        linear linalg_vecdot linalg_multi_dot chain_matmul scaled_dot_product_attention lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell _addmm_activation _native_multi_head_attention"""),
    _Rows("low", "gemm", "grouped_mm", note="one product for each expert; torch's own lists forget it"),
    _Rows("low", "gemm", "lstm gru rnn_tanh rnn_relu", "_cudnn_rnn", cuda="low",
          note="torch's CPU autocast reaches only the products inside, and leaves states in FP32"),
    # FP32: where 16 bits lack range or precision.
    _Rows("fp32", "exponential range", """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus softmax
        log_softmax"""),
    _Rows("fp32", "exponential range", "square ldexp", "pow"),
    _Rows("fp32", "exponential range", "mvlgamma", "log"),
    _Rows("fp32", "exponential range", "linalg_matrix_exp", note="torch's CUDA autocast: FP32 or failure, by size"),
    _Rows("fp32", "reduction", """
        layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm dist pdist cdist renorm
        logsumexp prod cumprod cumsum sum norm linalg_vector_norm linalg_matrix_norm cosine_similarity"""),
    _Rows("fp32", "reduction", "linalg_norm", "linalg_vector_norm linalg_matrix_norm"),
    _Rows("fp32", "reduction", "pairwise_distance norm_except_dim", "norm"),
    _Rows("fp32", "reduction", "trapezoid sum_to_size", "sum"),
    _Rows("fp32", "reduction", "cumulative_trapezoid", "cumsum"),
    _Rows("fp32", "loss", """
        poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
        mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits"""),
    _Rows("fp32", "loss", "cross_entropy", "cross_entropy_loss log_softmax nll_loss"),
    _Rows("fp32", "loss", "ctc_loss", note="no low kernel"),
    _Rows("ban", "loss", "binary_cross_entropy"),
    _Rows("fp32", "bandwidth-bound", """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa"""),
    _Rows("fp32", "reduction", "var std var_mean std_mean", note="the square of 256 is beyond FP16"),
    _Rows("fp32_math", "reduction", "segment_reduce fold", note="torch's CPU adds up element by element in 16 bits"),
    _Rows("fp32", "bandwidth-bound", "affine_grid affine_grid_generator",
          note="coordinates are no data: of 512 pixels in a row BF16 tells half apart"),
    _Rows("fp32", "reduction", "histc", note="a count in 16 bits stops at 256, or at 2,048"),
    # Torch's CUDA kernels take no low input, or take it only here and there; FP32 runs everywhere.
    _Rows("fp32", "no low kernel", """
        quantile nanquantile stft polar view_as_complex trace cholesky cholesky_inverse cholesky_solve qr ormqr geqrf
        svd triangular_solve complex fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
        fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper
        sparse_mm sparse_addmm sparse_sampled_addmm sparse_softmax sparse_log_softmax _sparse_sum smm sspaddmm hspmm
        fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn
        fft_irfftn fft_hfft fft_ihfft fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn
        linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky linalg_cholesky_ex linalg_svdvals linalg_svd
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_householder_product
        linalg_tensorinv linalg_tensorsolve linalg_qr linalg_lstsq linalg_matrix_sqrth
        linalg_det linalg_slogdet logdet linalg_solve_ex linalg_solve_triangular linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lu_factor_ex linalg_vander linalg_polar histogram histogramdd
        zeta erfcx log_ndtr ndtri airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w"""),
    _Rows("fp32_math", "no low kernel", """
        torchvision::deform_conv2d torchvision::nms torchvision::roi_align torchvision::roi_pool
        torchvision::ps_roi_align torchvision::ps_roi_pool""", cuda="fp32_math",
          note="torchvision's own kernels under torch's CUDA autocast"),
    _Rows("fp32", "no low kernel", "linalg_pinv", "pinverse", cpu="native", note="a product inside it would be low"),
    _Rows("fp32", "no low kernel", "linalg_lu_solve", "lu_solve", cpu="native"),
    _Rows("fp32", "no low kernel", "linalg_lu_factor linalg_lu lu", "_lu_with_info", cpu="native"),
    # Promote: arguments of one dtype, the widest.
    _Rows("promote", "type-mixing", """
        addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot"""),
    _Rows("fp32_math", "type-mixing", "scatter_add", cuda="promote", note="a sum that runs: rounded once, at the end"),
    _Rows("fp32_math", "type-mixing", "index_add index_reduce scatter_reduce",
          note="sums that run: rounded once, at the end"),
    _Rows("promote", "type-mixing", "grid_sampler", cpu="fp32"),
    _Rows("promote", "type-mixing", "grid_sample", "grid_sampler", cpu="fp32"),
    _Rows("promote", "type-mixing", "inner", "tensordot"),
    _Rows("promote", "type-mixing", "cat stack", cuda="promote", note="torch's built-in promotion on CUDA"),
    _Rows("promote", "type-mixing", """
        index_copy scatter masked_scatter put lerp heaviside linalg_cross embedding_bag allclose isclose"""),
    # Native on CUDA; a CPU has no low kernel, so FP32 inside there.
    _Rows("native", "bandwidth-bound", """
        avg_pool3d max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d grid_sampler_2d grid_sampler_3d"""),
    # Left to torch on CUDA, where kernels compute in FP32 inside; on a CPU they are wrong in 16 bits, or missing.
    _Rows("fp32_math", "bandwidth-bound", "rrelu", note="no low kernel: none in FP16"),
    _Rows("fp32_math", "bandwidth-bound", "sinc", note="its gradient in 16 bits is what cancels"),
    _Rows("fp32_math", "exponential range", "i1 i1e", note="no low kernel in the backward pass"),
    _Rows("fp32_math", "exponential range", "polygamma", note="infinite in FP16 before its result is"),
    _Rows("native", "data movement", """
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d"""),
    _Rows("native", "data movement", "pad", "reflection_pad1d replication_pad1d"),
    # Composed in C++ of products, which torch's autocast reaches and no rule does.
    _Rows("native", "composite", "linalg_matrix_power cov corrcoef", "matmul"),
    # Python functions made of ops with rows of their own, which decide: a region opens the function.
    _Rows("native", "composite", "softmin gumbel_softmax", "softmax"),
    _Rows("native", "composite", "multi_head_attention_forward", "linear bmm softmax scaled_dot_product_attention"),
    _Rows("native", "composite", "normalize", "norm"),
    _Rows("native", "composite", "local_response_norm lp_pool1d lp_pool2d lp_pool3d", "pow"),
    _Rows("native", "composite", "max_unpool1d", "max_unpool2d"),
    _Rows("native", "composite", "gaussian_nll_loss", "log"),
    _Rows("native", "composite", "multilabel_soft_margin_loss", "sum"),
    _Rows("native", "composite", "triplet_margin_with_distance_loss", "pairwise_distance"),
    _Rows("native", "composite", "linear_cross_entropy", "linear cross_entropy",
          note="with options, chunks are mezzo's: torch makes gradients before a loss scale reaches them"),
    _Rows("native", "composite", "svd_lowrank pca_lowrank lobpcg", "matmul"),
    _Rows("native", "composite", "interpolate", """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa"""),
    _Rows("native", "composite", "upsample upsample_nearest upsample_bilinear", "interpolate"),
    # Gray: no list of torch's names them, and they run in the dtypes they are given.
    _Rows("native", "bandwidth-bound", """
        abs acosh add angle asinh atan atanh ceil clamp clamp_max clamp_min conj_physical copysign cos deg2rad div
        erf erfc floor floor_divide fmax fmin fmod frac hypot maximum minimum mul nan_to_num neg
        nextafter positive rad2deg remainder round rsub sgn sigmoid sign sin sqrt sub tanh trunc
        relu relu6 elu celu selu gelu glu silu mish leaky_relu threshold hardshrink hardsigmoid hardswish
        hardtanh logsigmoid softshrink softsign tanhshrink
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
        avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d max_pool1d max_pool2d max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
        fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
        embedding where masked_fill outer kron diff gradient vander cartesian_prod"""),
    _Rows("native", "exponential range", """
        exp2 float_power frexp lgamma digamma igamma igammac i0 logaddexp logaddexp2 logit xlogy entr i0e ndtr
        xlog1py"""),
    _Rows("native", "reduction", """
        mean nanmean nansum amax amin aminmax max min median nanmedian mode kthvalue cummax cummin logcumsumexp"""),
    _Rows("native", "reduction", "batch_norm instance_norm", note="torch's kernel mixes dtypes, statistics in FP32"),
    _Rows("native", "type-mixing", """
        hstack vstack dstack column_stack block_diag index_fill select_scatter slice_scatter
        diagonal_scatter as_strided_scatter"""),
    _Rows("native", "no low kernel", """
        lu_unpack istft"""),
    _Rows("native", "gemm", "scaled_mm scaled_grouped_mm", note="the caller chooses the formats"),
    _Rows("native", "data movement", """
        channel_shuffle clone coalesce combinations constant_pad_nd diag diag_embed diagflat flip fliplr flipud
        gather im2col index_select masked_select msort narrow_copy native_channel_shuffle pixel_shuffle pixel_unshuffle
        repeat repeat_interleave roll rot90 slice_inverse sort take take_along_dim tile to_dense topk tril triu unique
        unique_consecutive"""),
    _Rows("native", "data movement", "fft_fftshift fft_ifftshift"),
    _Rows("native", "data movement", " ".join(sorted(VIEWS))),
)  # fmt: skip


def _by_op(lists: Mapping[str, frozenset[str]], aliases: Mapping[str, str]) -> dict[str, str]:
    """Turn another system's lists into the list that names each op."""
    ops = ((aliases.get(name, name), title) for title, names in lists.items() for name in names)
    return {SYNONYMS.get(op, op): title for op, title in ops}


_OTHERS: Final = {
    "apex": _by_op(APEX, {}),
    "Fleet": _by_op(FLEET, PADDLE_ALIASES),
    "Paddle": _by_op(PADDLE, PADDLE_ALIASES),
}


def _row(name: str, rows: _Rows) -> Op:
    """Build an op's row from torch's lists, which name the op or the parts that it is composed of."""
    synonyms, parts = (name, *synonyms_of(name)), tuple(rows.parts.split())
    columns: dict[str, Treatment] = {"CUDA": "native", "CPU": "native"}
    listed: list[tuple[str, str]] = []
    through: list[tuple[str, str]] = []
    for title in ("CUDA", "CPU") if rows.reason != "composite" else ():
        if (
            part := next((candidate for candidate in (*synonyms, *parts) if candidate in registered(title)), None)
        ) is not None:
            # Portable is what CUDA does. A CPU computes in FP32 what CUDA leaves alone or bans.
            differs = title == "CPU" and rows.portable in ("native", "ban")
            columns[title] = "fp32" if differs else rows.portable
            (listed if part in synonyms else through).append((title, part))
    notes = [f"torch {' and '.join(title for title, _ in listed)} list{'s' * (len(listed) > 1)}"] if listed else []
    notes += [f"made of {part}, on torch's {title} list" for title, part in through]
    notes += [f"made of {', '.join(parts)}"] if rows.reason == "composite" else []
    notes += [f"{system} {titles[name]}" for system, titles in _OTHERS.items() if name in titles]
    notes += [rows.note] if rows.note else []
    return Op(
        name=name, portable=rows.portable, cuda=rows.cuda or columns["CUDA"], cpu=rows.cpu or columns["CPU"],
        reason=rows.reason, source="; ".join(notes) or "no list names it",
        parts=parts if rows.reason == "composite" else (),
    )  # fmt: skip


class _Ops(Mapping[str, Op]):
    """Every classified op, by base name; torch is asked for its lists when the first one is looked up."""

    def __init__(self) -> None:
        self._rows = {name: rows for rows in _ROWS for name in rows.names.split()}
        self._made: dict[str, Op] = {}

    def __getitem__(self, name: str) -> Op:
        if name not in self._made:
            self._made[name] = _row(name, self._rows[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


#: Every classified op, by base name.
OPS: Final[Mapping[str, Op]] = _Ops()


def named_for(reason: Reason) -> frozenset[str]:
    """Return the ops that are treated so for a reason."""
    return frozenset(name for rows in _ROWS if rows.reason == reason for name in rows.names.split())
