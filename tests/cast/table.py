"""Walk the op table under O1, each op at sizes beyond 256: ``python -m tests.cast.table bf16``.

Counters of 16 bits break there, in values and in indices. Each op gets low operands in a region, and the same values in
FP32 outside.
"""

import sys

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map, tree_map_only

import mezzo
from mezzo.policy.ops import OPS, VIEWS, callables

from .walked import LOW, off, print_as_json, results, running

SEED = torch.default_generator.manual_seed


def u(*shape):
    """Between 0.1 and 0.9."""
    return torch.rand(shape) * 0.8 + 0.1


def n(*shape):
    return torch.randn(shape)


def ints(high, *shape):
    return torch.randint(high, shape)


def grid(size):
    identity = torch.eye(len(size) - 2, len(size) - 1)[None]
    return functional.affine_grid(identity, size, align_corners=False)


def sparse(*shape):
    return (n(*shape) * (u(*shape) > 0.8)).to_sparse()


def observed():
    on = torch.ones(1, dtype=torch.int32)
    return on, on, torch.tensor(-1.0), torch.tensor(1.0), torch.tensor([1 / 128]), torch.zeros(1, dtype=torch.int32)


def spd(size):
    a = n(size, size)
    return a @ a.mT / size + torch.eye(size)


def pooled(dims, *shape):
    pool = getattr(functional, f"max_pool{dims}d")
    return pool(n(*shape), 2, return_indices=True)


#: What each op is called with: an expression behind its names. Of the functions of a name the first is called.
CALLS = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan square abs angle asinh atan atanh ceil
conj_physical cos deg2rad erf erfc floor frac neg positive rad2deg round sgn sigmoid sign sin sinc sqrt tanh trunc
relu
relu6 elu celu selu gelu silu mish leaky_relu hardshrink hardsigmoid hardswish hardtanh logsigmoid softshrink softsign
tanhshrink softplus exp2 lgamma digamma i0 entr i0e ndtr logit i1 i1e nan_to_num frexp clone
erfcx log_ndtr ndtri airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0:
    u(300, 500)
acosh: 1 + u(300, 500)
glu: n(300, 600)
rrelu: n(300, 500), 0.125, 0.25, False
threshold: n(300, 500), 0.1, 0.5
clamp: n(300, 500), -0.5, 0.5
clamp_max clamp_min: n(300, 500), 0.25
dropout dropout2d alpha_dropout feature_alpha_dropout feature_dropout: n(2, 300, 8, 300), 0.5, False
dropout1d: n(2, 300, 400), 0.5, False
dropout3d: n(2, 300, 8, 8, 8), 0.5, False
mvlgamma polygamma: *((2 + u(300, 500), 2) if name == "mvlgamma" else (2, 1 + u(300, 500)))
add sub rsub mul div maximum minimum fmax fmin copysign hypot logaddexp logaddexp2 xlogy xlog1py atan2 heaviside:
    u(300, 500), u(300, 500)
pow float_power: u(300, 500), 2.5
ldexp: u(300, 500), ints(4, 300, 500)
floor_divide fmod remainder nextafter: u(300, 500), torch.full((300, 500), 2.0)
igamma igammac: u(300, 500), u(300, 500)
zeta: 2 + u(300, 500), u(300, 500)
chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w: u(300, 500), 3
lerp addcdiv addcmul: n(300, 500), u(300, 500), u(300, 500)
where: n(300, 500) > 0, n(300, 500), n(300, 500)
masked_fill: n(300, 500), n(300, 500) > 0, 0.5
conv1d: n(2, 300, 400), n(310, 300, 3)
conv2d: n(1, 8, 300, 320), n(16, 8, 3, 3)
conv3d: n(1, 2, 8, 300, 16), n(4, 2, 3, 3, 3)
conv_tbc: n(300, 2, 40), n(3, 40, 50), n(50), 1
conv_transpose1d: n(2, 300, 400), n(300, 310, 3)
conv_transpose2d: n(1, 8, 300, 320), n(8, 4, 3, 3)
conv_transpose3d: n(1, 2, 8, 300, 16), n(2, 4, 3, 3, 3)
convolution: n(2, 300, 400), n(310, 300, 3), None, [1], [0], [1], False, [0], 1
prelu: n(300, 500), u(500)
addmm: n(300, 400), n(300, 500), n(500, 400)
_addmm_activation: n(400), n(300, 500), n(500, 400)
addmv: n(300), n(300, 500), n(500)
addr: n(300, 500), n(300), n(500)
addbmm: n(300, 40), n(3, 300, 500), n(3, 500, 40)
baddbmm: n(3, 300, 40), n(3, 300, 500), n(3, 500, 40)
bmm: n(3, 300, 500), n(3, 500, 40)
matmul mm: n(300, 500), n(500, 400)
mv: n(300, 500), n(500)
einsum: "ij,kj->ik", n(300, 500), n(400, 500)
linear: n(300, 500), n(400, 500), n(400)
linalg_vecdot inner: n(300, 500), n(300, 500)
linalg_multi_dot: [n(300, 400), n(400, 310), n(310, 40)]
chain_matmul: n(300, 400), n(400, 310), n(310, 40)
scaled_dot_product_attention: n(1, 2, 300, 64), n(1, 2, 400, 64), n(1, 2, 400, 64)
lstm_cell: n(300, 40), (n(300, 20), n(300, 20)), n(80, 40) / 8, n(80, 20) / 8, n(80), n(80)
gru_cell: n(300, 40), n(300, 20), n(60, 40) / 8, n(60, 20) / 8, n(60), n(60)
rnn_tanh_cell rnn_relu_cell: n(300, 40), n(300, 20), n(20, 40) / 8, n(20, 20) / 8, n(20), n(20)
lstm: n(300, 2, 40), (n(1, 2, 20), n(1, 2, 20)), [n(80, 40) / 8, n(80, 20) / 8, n(80), n(80)], True, 1, 0.0, False,
    False, False
gru: n(300, 2, 40), n(1, 2, 20), [n(60, 40) / 8, n(60, 20) / 8, n(60), n(60)], True, 1, 0.0, False, False, False
rnn_tanh rnn_relu: n(300, 2, 40), n(1, 2, 20), [n(20, 40) / 16, n(20, 20) / 16, n(20), n(20)], True, 1, 0.0, False,
    False, False
grouped_mm: n(2, 300, 64), n(2, 64, 80)
softmax log_softmax softmin: n(300, 500), -1
logsumexp amax amin nanmean std std_mean var var_mean cumprod cumsum logcumsumexp cummax cummin softmin: u(300,
    500), -1
linalg_matrix_exp: n(1, 20, 20) / 8
layer_norm: n(300, 500), (500,), u(500), n(500)
native_layer_norm: n(300, 500), (500,), u(500), n(500), 1e-5
rms_norm: n(300, 500), (500,), u(500)
group_norm: n(2, 300, 400), 3, u(300), n(300)
batch_norm: n(300, 310, 4), u(310), n(310), torch.zeros(310), torch.ones(310), True, 0.1, 1e-5, False
instance_norm: n(3, 310, 400), u(310), n(310), None, None, True, 0.1, 1e-5, False
frobenius_norm: n(300, 500), [0, 1]
nuclear_norm linalg_cond linalg_matrix_rank linalg_svdvals linalg_eigvalsh: spd(300)
dist pairwise_distance: n(300, 500), n(300, 500)
pdist: n(40, 500)
cdist: n(300, 500), n(310, 500)
renorm: n(300, 500), 2, 0, 1.0
prod: 1 + u(400) / 100
sum mean nansum norm linalg_vector_norm linalg_norm linalg_matrix_norm trace aminmax max min: n(300, 500)
cosine_similarity: n(300, 500), n(300, 500)
norm_except_dim: n(300, 500), 2, 0
trapezoid cumulative_trapezoid: n(300, 500)
sum_to_size: n(300, 500), (1, 500)
poisson_nll_loss: n(300, 500), u(300, 500), True, False, 1e-8, 1
cosine_embedding_loss: n(300, 500), n(300, 500), torch.ones(300)
nll_loss: torch.log_softmax(n(300, 500), 1), ints(500, 300)
cross_entropy multi_margin_loss: n(300, 500), ints(500, 300)
hinge_embedding_loss soft_margin_loss: n(300, 500), ints(2, 300, 500) * 2.0 - 1
kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits: n(300, 500), u(300, 500)
margin_ranking_loss: n(500), n(500), ints(2, 500) * 2.0 - 1
multilabel_margin_loss: n(300, 400), ints(400, 300, 400)
multilabel_soft_margin_loss: n(300, 400), ints(2, 300, 400) * 1.0
triplet_margin_loss triplet_margin_with_distance_loss: n(300, 500), n(300, 500), n(300, 500)
gaussian_nll_loss: n(300, 500), n(300, 500), u(300, 500)
ctc_loss: torch.log_softmax(n(300, 2, 20), 2), 1 + ints(19, 2, 30), (300, 290), (30, 20)
linear_cross_entropy: n(300, 64), n(500, 64), ints(500, 300)
upsample_nearest1d _upsample_nearest_exact1d: n(2, 3, 300), [600]
upsample_linear1d: n(2, 3, 300), [600], False
upsample_nearest2d _upsample_nearest_exact2d: n(1, 3, 300, 310), [400, 620]
upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa: n(1, 3, 300, 310), [400,
    620], False
upsample_nearest3d _upsample_nearest_exact3d: n(1, 2, 4, 300, 8), [8, 600, 8]
upsample_trilinear3d: n(1, 2, 4, 300, 8), [8, 600, 8], False
interpolate upsample upsample_nearest upsample_bilinear: n(1, 3, 300, 310), [400, 620]
affine_grid: torch.eye(2, 3)[None] + n(1, 2, 3) / 16, [1, 3, 300, 512], False
affine_grid_generator: torch.eye(2, 3)[None] + n(1, 2, 3) / 16, [1, 3, 300, 512], False
grid_sample: n(1, 3, 300, 512), grid([1, 3, 300, 512]), "bilinear", "zeros", False
grid_sampler grid_sampler_2d: n(1, 3, 300, 512), grid([1, 3, 300, 512]), 0, 0, False
grid_sampler_3d: n(1, 2, 4, 300, 8), grid([1, 2, 4, 300, 8]), 0, 0, False
histc: u(3000), 2, 0.0, 1.0
histogram: u(3000), 4
histogramdd: u(3000, 2), [3, 3]
quantile nanquantile: n(300, 500), 0.25, 1
stft: n(4000), 400, 100, 400, torch.hann_window(400), True, "reflect", False, True, True
istft: torch.stft(n(4000), 400, window=torch.hann_window(400), return_complex=True), 400, None, None,
    torch.hann_window(400)
polar complex: u(300, 500), u(300, 500)
view_as_complex: n(300, 500, 2)
cholesky linalg_cholesky linalg_cholesky_ex: spd(300)
cholesky_inverse: torch.linalg.cholesky(spd(40))
cholesky_solve: n(40, 5), torch.linalg.cholesky(spd(40))
qr geqrf linalg_qr svd linalg_svd linalg_pinv linalg_lu_factor linalg_lu_factor_ex linalg_lu lu linalg_inv
linalg_inv_ex
linalg_det linalg_slogdet logdet linalg_ldl_factor linalg_ldl_factor_ex: spd(40)
linalg_eig linalg_eigvals linalg_eigh linalg_matrix_sqrth linalg_polar: torch.diag(torch.arange(1.0, 41.0))
ormqr: *torch.geqrf(n(40, 20)), n(40, 5)
linalg_householder_product: *torch.geqrf(n(40, 20))
triangular_solve: n(40, 5), spd(40).triu()
linalg_solve linalg_solve_ex linalg_lstsq linalg_tensorsolve: spd(40), n(40, 5) if name != "linalg_tensorsolve" else
    n(40)
linalg_solve_triangular: spd(40).triu(), n(40, 5), {"upper": True}
linalg_tensorinv: spd(40).reshape(40, 5, 8), 1
linalg_ldl_solve: *torch.linalg.ldl_factor(spd(40)), n(40, 5)
linalg_lu_solve: *((n(40, 5), *torch.linalg.lu_factor(spd(40))) if not is_linalg else
    (*torch.linalg.lu_factor(spd(40)), n(40, 5)))
lu_unpack: *torch.linalg.lu_factor(spd(40))
linalg_vander: u(300), {"N": 5}
vander: u(300), 5
fake_quantize_per_tensor_affine: n(300, 500), 0.0625, 0, -128, 127
fake_quantize_per_channel_affine: n(300, 500), torch.full((300,), 0.0625), torch.zeros(300, dtype=torch.int32), 0,
    -128, 127
fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn
fft_hfft
fft_ihfft fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift: n(300, 500)
bilinear: n(300, 40), n(300, 50), n(30, 40, 50)
cross linalg_cross: n(500, 3), n(500, 3), {"dim": 1}
dot vdot: n(600), n(600)
index_put: n(300, 500), (ints(300, 600),), n(600, 500)
tensordot: n(300, 500), n(500, 40), 1
scatter_add: torch.zeros(3, 400), 0, ints(3, 3000, 400), u(3000, 400)
scatter_reduce: torch.zeros(3, 400), 0, ints(3, 3000, 400), u(3000, 400), "sum"
scatter: torch.zeros(300, 500), 0, torch.randperm(300)[:, None].expand(300, 500), n(300, 500)
index_add: torch.zeros(3, 400), 0, ints(3, 3000), u(3000, 400)
index_reduce: torch.zeros(3, 400), 0, ints(3, 3000), u(3000, 400), "amax"
index_copy: n(300, 500), 0, torch.randperm(300), n(300, 500)
index_fill: n(300, 500), 0, ints(300, 20), 0.5
put: n(300, 500), torch.randperm(600), n(600)
masked_scatter: n(300, 500), n(300, 500) > 0, n(300, 500)
select_scatter: n(300, 500), n(500), 0, 290
slice_scatter: n(300, 500), n(20, 500), 0, 270, 290
diagonal_scatter: n(300, 500), n(300)
as_strided_scatter: n(300, 500), n(20, 20), [20, 20], [500, 1], 300
cat stack hstack vstack dstack column_stack: [n(300, 500), n(300, 500)]
block_diag: n(300, 50), n(50, 300)
cartesian_prod: n(300), n(300)
combinations: n(300)
avg_pool1d max_pool1d lp_pool1d: *((n(2, 300, 600), 280) if name != "lp_pool1d" else (u(2, 300, 600), 2, 3))
avg_pool2d max_pool2d: n(1, 3, 300, 310), 20
lp_pool2d: u(1, 3, 300, 310), 2, 3
lp_pool3d: u(1, 2, 8, 300, 8), 2, 2
avg_pool3d: n(1, 2, 8, 300, 8), (8, 40, 8)
max_pool3d: n(1, 2, 8, 300, 8), 2
max_pool1d_with_indices: n(2, 300, 600), 3
max_pool2d_with_indices: n(1, 3, 300, 310), 3
max_pool3d_with_indices: n(1, 2, 8, 300, 8), 2
adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool1d_with_indices: n(2, 300, 600), 2
adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices: n(1, 3, 300, 310), 2
adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices: n(1, 2, 8, 300, 8), 2
fractional_max_pool2d fractional_max_pool2d_with_indices: n(1, 3, 300, 310), 2, 20, None, False, u(1, 3, 2)
fractional_max_pool3d fractional_max_pool3d_with_indices: n(1, 2, 8, 300, 8), 2, 4, None, False, u(1, 2, 3)
max_unpool1d: *pooled(1, 2, 300, 600), 2
max_unpool2d: *pooled(2, 1, 3, 300, 310), 2
max_unpool3d: *pooled(3, 1, 2, 8, 300, 8), 2
reflection_pad1d replication_pad1d: n(2, 3, 300), [20, 290]
reflection_pad2d replication_pad2d: n(1, 3, 300, 310), [20, 290, 3, 4]
replication_pad3d: n(1, 2, 8, 300, 8), [1, 2, 20, 290, 3, 4]
pad constant_pad_nd: n(1, 3, 300, 310), [20, 290, 3, 4]
linalg_matrix_power: n(40, 40) / 8, 3
cov corrcoef: n(40, 500)
gumbel_softmax: n(300, 500)
multi_head_attention_forward: n(300, 2, 64), n(300, 2, 64), n(300, 2, 64), 64, 4, n(192, 64) / 8, n(192), None,
    None, False, 0.0, n(64, 64) / 8, n(64)
_native_multi_head_attention: n(2, 300, 64), n(2, 300, 64), n(2, 300, 64), 64, 4, n(192, 64) / 8, n(192), n(64, 64)
    / 8, n(64), None, False
normalize: n(300, 500)
local_response_norm: n(2, 300, 400), 5
svd_lowrank pca_lowrank: spd(300), 3
embedding: n(600, 40), ints(600, 4000)
embedding_bag: n(600, 40), ints(600, 4000), torch.tensor([0, 2000])
outer: n(300), n(500)
kron: n(20, 30), n(20, 25)
diff gradient: n(300, 500)
median nanmedian: n(300, 500), 1
mode: n(300, 500), 1
kthvalue: n(300, 500), 290, 1
segment_reduce: u(3000, 40), "sum", {"lengths": torch.tensor([2000, 1000])}
channel_shuffle native_channel_shuffle: n(2, 300, 8, 8), 3
diag diag_embed diagflat: n(300)
flip: n(300, 500), [0, 1]
fliplr flipud msort: n(300, 500)
fold: n(2, 9, 298 * 308), (300, 310), 3
gather: n(300, 500), 0, ints(300, 400, 500)
index_select: n(300, 500), 0, ints(300, 4000)
masked_select: n(300, 500), n(300, 500) > 0
narrow_copy: n(300, 500), 0, 270, 20
pixel_shuffle: n(1, 36, 50, 300), 6
pixel_unshuffle: n(1, 3, 300, 310), 2
repeat tile: n(300, 50), (2, 3)
repeat_interleave: n(300, 50), 300, 0
roll: n(300, 500), 290, 1
rot90 tril triu: n(300, 500)
slice_inverse: n(300, 500), n(300, 500), 0, 0, 300
sort: n(300, 500), 1
topk: n(300, 500), 290, 1
take: n(300, 500), ints(150000, 4000)
take_along_dim: n(300, 500), ints(300, 300, 500), 0
unique unique_consecutive: ints(300, 3000) * 1.0
coalesce to_dense: sparse(300, 500)
allclose isclose: n(300, 500), n(300, 500)
sparse_mm smm hspmm: sparse(300, 500), n(500, 40)
sparse_addmm: n(300, 40), sparse(300, 500), n(500, 40)
sspaddmm: sparse(300, 40), sparse(300, 500), n(500, 40)
sparse_sampled_addmm: sparse(300, 310).to_sparse_csr(), n(300, 40), n(40, 310)
sparse_softmax sparse_log_softmax: sparse(300, 500), 1
_sparse_sum: sparse(300, 500)
fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper: n(300, 500), *observed(), 0.01, 0, 255, -1
im2col: n(1, 9, 300, 310), 3, 1, 0, 1
"""

#: What is not called, and why.
UNCALLED = {
    "binary_cross_entropy": "banned", "cudnn_convolution": "of CUDA's", "cudnn_convolution_transpose": "of CUDA's",
    "lobpcg": "Python that no mode sees, with a table of dtypes that has no 16 bits",
    "scaled_mm": "of FP8", "scaled_grouped_mm": "of FP8",
    **{name: "of a library with tests of its own" for name in OPS if "::" in name},
}  # fmt: skip
#: Ops whose integer results say where, among equals, or that count them.
AMONG_EQUALS = frozenset(
    """sort topk mode median nanmedian kthvalue max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices cummax cummin
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices index_reduce""".split()
)


def calls():
    """Return for each op the expression that makes its arguments."""
    expressions, names = {}, []
    for line in CALLS.strip().replace("\n    ", " ").splitlines():
        head, colon, expression = line.partition(": ")
        names += head.split()
        if colon:
            expressions.update(dict.fromkeys(names, expression))
            names = []
    return expressions


def made(name, expression):
    """Make an op's arguments, and those with names, in FP32."""
    SEED(0)
    function = callables(name)[0]
    is_linalg = function is getattr(torch.linalg, name.removeprefix("linalg_"), None)
    *args, last = eval(f"({expression},)", {**globals(), "name": name, "is_linalg": is_linalg})
    return function, ((*args, last), {}) if not isinstance(last, dict) else (tuple(args), last)


def ran(name, function, call, form, low, word=None):
    """Run one form of an op: in FP32 outside of any region, or, with a policy's dtype, from low operands in one."""
    wide = torch.float32 if word is None else low

    def operand(x):
        if x.dtype != torch.float32:
            return x.clone()
        kept = x.to(low).to(wide)
        return kept.requires_grad_() if form == "backward" else kept

    args, kwargs = tree_map_only(torch.Tensor, operand, call)
    if form == "sparse":
        args = (args[0].to_sparse(), *args[1:])
    if form == "in place":
        function = getattr(torch.Tensor, f"{name}_")
    if form == "out=":
        outputs = function(*call[0], **call[1])
        low_or_wide = lambda x: torch.zeros_like(x, dtype=wide if x.dtype == torch.float32 else x.dtype)  # noqa: E731
        kwargs = {**kwargs, "out": tree_map(low_or_wide, tuple(outputs) if isinstance(outputs, tuple) else outputs)}
    SEED(0)
    if word is None:
        out = function(*args, **kwargs)
    else:
        with mezzo.autocast(f"O1,{word}", "cpu"):
            out = function(*args, **kwargs)
    outputs = results(out)
    if form != "backward":
        return [x for x in outputs if name not in AMONG_EQUALS or x.is_floating_point()]
    given = [x for x in results((args, kwargs)) if x.requires_grad]
    outputs = [x for x in outputs if x.requires_grad]
    if not given or not outputs:
        return []
    SEED(1)
    cotangents = [torch.rand(x.shape).to(low).to(x.dtype) for x in outputs]
    return [x for x in torch.autograd.grad(outputs, given, cotangents, allow_unused=True) if x is not None]


def walked(word, names=()):
    low, fell = LOW[word], []
    for name, expression in calls().items():
        if (names and name not in names) or not callables(name):
            continue
        running(name)
        function, call = made(name, expression)
        for form in ("forward", "backward", "in place", "out=", "sparse"):
            try:
                want = ran(name, function, call, form, low)
            except Exception as error:
                if form == "forward" and "is now removed" not in str(error):  # torch keeps the name a while
                    fell.append((name, "arguments", f"{type(error).__name__}: {error}"))
                continue
            try:
                got = ran(name, function, call, form, low, word)
            except Exception as error:
                fell.append((name, form, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
                continue
            if words := [*filter(None, (off(*pair, low) for pair in zip(got, want, strict=True)))]:
                fell.append((name, form, max(words, key=len)))
    return fell


def unnamed():
    """List the rows without arguments here."""
    return sorted({*OPS} - {*calls(), *UNCALLED, *VIEWS})


if __name__ == "__main__":
    print_as_json(walked(sys.argv[1], sys.argv[2:]))
