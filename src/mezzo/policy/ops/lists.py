"""Other people's op lists: torch's autocast, which is asked; apex, Fleet and Paddle, as they wrote them.

Facts only. What mezzo makes of them stands in :mod:`mezzo.policy.ops.table`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Final, Literal

import torch

__all__ = ["APEX", "FLEET", "PADDLE", "Treatment", "registered"]

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


@functools.cache
def registered(device: Literal["CUDA", "CPU"]) -> frozenset[str]:
    """List the ops that the installed torch's autocast treats on a kind of device, by base name.

    Example:
        >>> "conv2d" in registered("CPU"), "relu" in registered("CPU")
        (True, False)
    """
    overloads = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
    return frozenset(name.removeprefix("aten::").split(".")[0] for name in overloads if name.startswith("aten::"))
