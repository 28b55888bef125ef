"""Other people's op lists and names: torch's autocast, which is asked; apex, Fleet and Paddle, as they wrote them.

Names are ``name=op`` pairs, each op being a base name of the op table. Facts only: what mezzo makes of them stands in
:mod:`mezzo.policy.ops.table`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Final, Literal

import torch

__all__ = ["APEX", "FLEET", "MODULES", "PADDLE", "PADDLE_ALIASES", "SPELLINGS", "SYNONYMS", "Treatment", "registered"]
__all__ += ["synonyms_of"]

Treatment = Literal["low", "fp32", "fp32_math", "promote", "native", "ban"]


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
    overloads = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
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
    found: dict[str, tuple[str, ...]] = {}
    for name, op in pairs.items():
        found[op] = (*found.get(op, ()), name)
    return types.MappingProxyType(found)


_BY_OP: Final = _inverted(SYNONYMS)
