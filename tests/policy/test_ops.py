"""The op table against the installed torch, and the spellings it resolves."""

import pytest
import torch

from mezzo import PolicyError
from mezzo.policy.ops import OPS, functions, matching, resolve

# torch's registrations whose name is not what a user calls, and the row that stands for each.
INTERNAL = {
    "_convolution": "conv2d", "convolution": "conv2d", "_thnn_fused_lstm_cell": "lstm_cell",
    "_thnn_fused_gru_cell": "gru_cell", "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "cudnn_convolution": "conv2d", "cudnn_convolution_transpose": "conv_transpose2d", "_cudnn_rnn": "lstm",
    "nll_loss2d": "nll_loss", "nll_loss_nd": "nll_loss", "mkldnn_rnn_layer": "lstm",
    "cross_entropy_loss": "cross_entropy", "multilabel_margin_loss_forward": "multilabel_margin_loss",
    "grid_sampler_2d": "grid_sampler", "grid_sampler_3d": "grid_sampler",
    "_grid_sampler_2d_cpu_fallback": "grid_sampler",
    **dict.fromkeys(
        """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
        _upsample_lanczos2d_aa""".split(),
        "interpolate",
    ),
}  # fmt: skip

# Registered for a key, and left out of the table on purpose: the reason is the value.
LEFT_OUT = {
    "AutocastCPU": {
        "_addmm_activation": "internal to torch.compile",
        "_native_multi_head_attention": "inference fast path",
        "reflection_pad1d": "called through F.pad, which C++ composes",
        "reflection_pad2d": "called through F.pad, which C++ composes",
        "replication_pad1d": "called through F.pad, which C++ composes",
        "replication_pad2d": "called through F.pad, which C++ composes",
        "replication_pad3d": "called through F.pad, which C++ composes",
        "_lu_with_info": "internal to torch.lu",
        "cholesky": "deprecated",
        "qr": "deprecated",
        "linalg_matrix_sqrth": "newer than torch 2.13",
    },
    "AutocastCUDA": {"linalg_matrix_sqrth": "newer than torch 2.13"},
}


@pytest.mark.parametrize("key, column", [("AutocastCUDA", "cuda"), ("AutocastCPU", "cpu")])
def test_every_autocast_registration_of_torch_has_a_row(key, column):
    names = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    assert len(names) > 80
    unknown = {
        name
        for name in names - LEFT_OUT[key].keys()
        if getattr(OPS.get(INTERNAL.get(name, name)), column, "native") == "native"
    }
    assert unknown == set()


def test_every_row_is_something_a_user_can_call():
    internal = {"native_layer_norm", "cudnn_convolution"}
    assert {name for name in OPS if not functions(name)} - internal == set()


@pytest.mark.parametrize(
    "name, base",
    [
        ("softmax", "softmax"), ("torch.softmax", "softmax"), ("F.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"), ("Tensor.softmax", "softmax"), ("aten::softmax.int", "softmax"),
        ("torch.special.softmax", "softmax"), ("torch.linalg.inv", "linalg_inv"), ("torch.fft.rfft", "fft_rfft"),
        ("softmax_with_cross_entropy", "cross_entropy"), ("cos_sim", "cosine_similarity"),
        ("torch.ops.aten.mm.default", "mm"), ("mylib::fused", "mylib::fused"), ("silu", "silu"), ("tanh", "tanh"),
    ],
)  # fmt: skip
def test_any_spelling_resolves(name, base):
    assert resolve(name) == base


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(PolicyError, match="unknown op 'layer_nrom'") as caught:
        resolve("layer_nrom")
    assert "did you mean 'layer_norm'?" in str(caught.value)


def test_functions_cover_the_places_users_look():
    found = functions("softmax")
    assert {torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax, torch.special.softmax} <= set(found)
    assert torch.Tensor.__matmul__ in functions("matmul")
    assert functions("no_such_function") == ()


def test_globs_expand_over_the_table():
    assert set(matching("conv?d")) == {"conv1d", "conv2d", "conv3d"}
