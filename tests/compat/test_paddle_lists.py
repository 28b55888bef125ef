"""Paddle's lists and Fleet's: the dtypes that Paddle's own rule gives each op, and ``amp_configs`` as a policy."""

import pytest
import torch
from torch.nn import functional

import mezzo
from mezzo import LossScale, Policy
from mezzo.compat import fleet
from mezzo.compat.paddle.regions import policy_of, rules
from mezzo.policy.ops import OPS, resolve
from mezzo.policy.ops.table import FLEET, PADDLE

WHITE, BLACK, EXTRA = PADDLE["white list"], PADDLE["black list"], PADDLE["extra black list"]
#: The lists of each level, and what the rest gets: ``white_list()`` and ``black_list()`` of paddle/amp/amp_lists.py.
LEVELS = {
    "OD": (WHITE, frozenset(), "fp32"),
    "O1": (WHITE, BLACK | EXTRA, "promote"),
    "O2": (WHITE, EXTRA, "promote"),
    "O2, use_promote=False": (WHITE, EXTRA, "low"),
    "Fleet": (FLEET["white list"], FLEET["black list"] | EXTRA, "promote"),
}
#: What Fleet's lists mean by names of another version of Paddle, and by what that composes of others.
IN_FLEET = dict.fromkeys(("matmul_v2", "einsum", "flash_attn"), "matmul") | {"reduce_sum": "sum", "reduce_mean": "mean"}

image, kernel = torch.rand(1, 2, 6, 6), torch.rand(3, 2, 3, 3)
volume, kernel3 = torch.rand(1, 2, 4, 4, 4), torch.rand(3, 2, 3, 3, 3)
matrix, square = torch.rand(4, 4) + 0.1, torch.rand(4, 4) + 0.1
batch = torch.rand(2, 3, 4)
labels, row = torch.tensor([0, 1, 2, 3]), torch.rand(4)
#: Paddle's name of an op, torch's function, and what it is called with; tensors of numbers with a fraction vary.
CALLS = [
    ("conv2d", functional.conv2d, (image, kernel)),
    ("conv2d", functional.conv1d, (image[:, :, 0], kernel[..., 0])),
    ("matmul_v2", torch.matmul, (matrix, square)),
    ("matmul_v2", torch.Tensor.__matmul__, (matrix, square)),
    ("matmul_v2", torch.mm, (matrix, square)),
    ("matmul_v2", functional.linear, (matrix, square)),
    ("einsum", torch.einsum, ("ij,jk->ik", matrix, square)),
    ("max_pool2d_with_index", functional.max_pool2d, (image, 2)),
    ("flash_attn", functional.scaled_dot_product_attention, (batch, batch.clone(), batch.clone())),
    *(
        (name, getattr(torch, op), (matrix / 3,))
        for name, op in [(op, op) for op in "tan acos asin sinh cosh atanh erfinv exp expm1 log log10 log2".split()]
        + [("reciprocal", "reciprocal"), ("rsqrt", "rsqrt"), ("square", "square"), ("reduce_sum", "sum")]
        + [("mean", "mean"), ("reduce_mean", "mean"), ("reduce_prod", "prod"), ("pnorm", "norm")]
        + [("sqrt", "sqrt"), ("sigmoid", "sigmoid"), ("tanh", "tanh"), ("abs", "abs"), ("sin", "sin")]
        + [("reduce_max", "amax"), ("floor", "floor"), ("log1p", "log1p")]
    ),
    ("pow", torch.pow, (matrix, 2.0)),
    ("cumprod", torch.cumprod, (matrix, 0)),
    ("cumsum", torch.cumsum, (matrix, 0)),
    ("logsumexp", torch.logsumexp, (matrix, 0)),
    ("frobenius_norm", torch.linalg.matrix_norm, (matrix,)),
    ("renorm", torch.renorm, (matrix, 2, 0, 1.0)),
    ("dist", torch.dist, (matrix, square)),
    ("tanh_shrink", functional.tanhshrink, (matrix,)),
    ("softmax", functional.softmax, (matrix, 1)),
    ("softmax", torch.Tensor.softmax, (matrix, 1)),
    ("log_softmax", functional.log_softmax, (matrix, 1)),
    ("softplus", functional.softplus, (matrix,)),
    ("softmax_with_cross_entropy", functional.cross_entropy, (matrix, labels)),
    ("cross_entropy2", functional.cross_entropy, (matrix, labels)),
    ("nll_loss", functional.nll_loss, (matrix, labels)),
    ("sigmoid_cross_entropy_with_logits", functional.binary_cross_entropy_with_logits, (matrix, square)),
    ("log_loss", functional.binary_cross_entropy, (matrix.clamp(0, 1), square.clamp(0, 1))),
    ("huber_loss", functional.smooth_l1_loss, (matrix, square)),
    ("triplet_margin_loss", functional.triplet_margin_loss, (matrix, square, square + 1)),
    ("lookup_table_v2", functional.embedding, (labels, matrix)),
    ("scatter", torch.scatter, (matrix, 0, labels[None], square)),
    ("nearest_interp_v2", lambda x: functional.interpolate(x, scale_factor=2), (image,)),
    ("bilinear_interp_v2", lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), (image,)),
    *((name, getattr(functional, name), (matrix,)) for name in "relu gelu silu elu softsign".split()),
    ("dropout", functional.dropout, (matrix, 0.5)),
    ("elementwise_add", torch.add, (matrix, square)),
    ("elementwise_add", torch.Tensor.__add__, (matrix, square)),
    ("elementwise_sub", torch.sub, (matrix, square)),
    ("elementwise_mul", torch.mul, (matrix, square)),
    ("elementwise_div", torch.Tensor.__truediv__, (matrix, square)),
    ("elementwise_max", torch.maximum, (matrix, square)),
    ("concat", lambda *xs: torch.cat(xs), (matrix, square)),
    ("stack", lambda *xs: torch.stack(xs), (matrix, square)),
    ("conv3d", functional.conv3d, (volume, kernel3)),
    ("conv2d_transpose", functional.conv_transpose2d, (image, kernel.transpose(0, 1).contiguous())),
    ("bmm", torch.bmm, (batch, batch.transpose(1, 2).contiguous())),
    ("addmm", torch.addmm, (matrix, square, matrix + 1)),
    ("mv", torch.mv, (matrix, row)),
    ("prelu", functional.prelu, (matrix, row[:1])),
    ("pool2d", functional.avg_pool2d, (image, 2)),
]  # fmt: skip
#: Ops of which Paddle's rule asks for the first input alone, and casts no other: ``GetPromoteType``.
BY_INPUT = [
    ("layer_norm", lambda x, w, b: functional.layer_norm(x, (4,), w, b), (matrix, row, row + 1)),
    (
        "batch_norm",
        lambda x, m, v, w, b: functional.batch_norm(x, m, v, w, b, training=True),
        (matrix, row, row, row, row),
    ),
]


def paddles(name, level, low, given, custom_white=(), custom_black=()):
    """The dtype that ``GetAmpDestDtype`` of paddle/fluid/imperative/amp_utils.h has an op computed in."""
    white, black, gray = LEVELS[level]
    name = IN_FLEET.get(name, name) if level == "Fleet" else name
    white, black = (white - set(custom_black)) | set(custom_white), (black - set(custom_white)) | set(custom_black)
    if name in black:
        return torch.float32
    if gray == "low" or name in white:
        return low
    return torch.float32 if gray == "fp32" or torch.float32 in given else low


def region(level, low, **custom):
    white, black, gray = LEVELS[level]
    return mezzo.autocast(Policy.O1(low, rules=rules(white, black, gray, **custom)), "cpu")


def cast(args, dtypes):
    kinds = iter(dtypes)
    return [x.to(next(kinds)) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]


def numbers(args):
    return sum(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args)


def mixtures(low, args):
    """Which dtypes the inputs are called with: each alike, and the first unlike the others."""
    count = numbers(args)
    pure = [(low,) * count, (torch.float32,) * count]
    return [*pure, (low, *(torch.float32,) * (count - 1)), (torch.float32, *(low,) * (count - 1))][: 2 * min(count, 2)]


@pytest.mark.parametrize("level", LEVELS)
def test_each_op_runs_in_the_dtype_that_paddle_gives_it(level, emulating):
    low = torch.bfloat16 if level == "Fleet" else torch.float16
    wrong, here = [], region(level, low)
    for name, function, args in CALLS:
        for dtypes in mixtures(low, args):
            with here:
                out = function(*cast(args, dtypes)).dtype
            if out != (expected := paddles(name, level, low, dtypes)):
                wrong.append((name, dtypes, out, expected))
    assert wrong == []


@pytest.mark.parametrize("level", LEVELS)
def test_normalisations_follow_their_input_where_no_list_names_them(level):
    low = torch.float16
    for name, function, args in BY_INPUT:
        for first in (low, torch.float32):
            with region(level, low):
                out = function(args[0].to(first), *args[1:])
            assert (name, first, out.dtype) == (name, first, paddles(name, level, low, (first,)))
    running = [torch.zeros(4), torch.ones(4)]
    with region(level, low):
        functional.batch_norm(matrix.to(low), *running, row, row, training=True)
    assert (running[0] != 0).all()
    assert running[0].dtype == torch.float32


@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O2, use_promote=False"])
def test_the_users_lists_win_over_the_systems(level, emulating):
    """``_update_list`` takes a name from the one and puts it in the other."""
    low, wrong, ops = torch.float16, [], {}
    for name in sorted({name for name, *_ in CALLS} - {"pool2d"}):  # which names max_pool2d too
        ops.setdefault(resolve(f"paddle:{name}"), name)  # one name for each: an op is in one of the user's lists only
    names = sorted(ops.values())
    for white, black in ((names[::2], names[1::2]), (names[1::2], names[::2])):
        here = region(level, low, custom_white_list=white, custom_black_list=black)
        for name, function, args in CALLS:
            dtypes = (torch.float32,) * numbers(args)
            with here:
                out = function(*args).dtype
            if name in names and out != (expected := paddles(name, level, low, dtypes, white, black)):
                wrong.append((name, out, expected))
    assert wrong == []


def test_names_of_paddles_with_several_ops_of_torchs_reach_them_all():
    expected = {"pool2d": 8, "pool3d": 4, "rnn": 4, "conv2d": 2, "matmul": 3, "nearest_interp_v2": 6, "huber_loss": 2}
    for name, count in expected.items():
        every = rules((), (), "promote", custom_black_list=[name])
        made = [rule for rule in every if rule.reason == "custom_black_list"]
        assert (name, len(made)) == (name, count)
        assert all(rule.op in OPS and rule.treatment == "fp32" for rule in made)
    for names in (*PADDLE.values(), *FLEET.values()):
        assert all(resolve(f"paddle:{name}") in OPS for name in names)


def test_losses_that_paddle_composes_of_listed_ops_run_as_those_do():
    for name in ("mse_loss", "l1_loss", "kl_div", "soft_margin_loss"):
        assert Policy.O1(rules=rules(WHITE, BLACK, "promote")).explain(name).treatment == "fp32"
        assert Policy.O1(rules=rules(WHITE, EXTRA, "promote")).explain(name).treatment == "promote"
    decision = Policy.O1(rules=rules(WHITE, BLACK, "promote", custom_white_list=["mean"])).explain("mse_loss")
    assert decision.treatment == "low"


def test_attention_is_open_to_the_lists_under_every_level():
    """A rule for all ops does not take composites whole: what they are made of is listed."""
    attention = torch.nn.MultiheadAttention(4, 2)
    for level in ("OD", "O2, use_promote=False"):
        policy = region(level, torch.bfloat16).policy
        assert policy.explain("multi_head_attention_forward").treatment == "native"
        with region(level, torch.bfloat16):
            out, _ = attention(batch, batch, batch)
        assert out.dtype == torch.bfloat16


def test_each_rule_says_why():
    reasons = {rule.op: rule.reason for rule in rules(WHITE, BLACK | EXTRA, "promote", custom_white_list=["softmax"])}
    assert reasons["softmax"] == "custom_white_list"
    assert reasons["mean"] == "on Paddle's black list"
    assert reasons["max_pool2d"] == "on Paddle's white list"
    assert reasons["conv3d"] == "on neither of Paddle's lists"
    assert reasons["linalg_vecdot"] == "on Paddle's black list: Paddle computes it with sum"
    policy = region("Fleet", torch.float16, custom_white_list=["gelu"]).policy
    assert Policy.parse(str(policy)) == policy


def test_paddles_o2_is_o2_with_fp32_outputs():
    policy = policy_of("O2", torch.bfloat16, custom_black_list=["relu"])
    assert (policy.level, policy.halves, policy.output_dtype) == ("O2", True, torch.float32)
    assert [policy.explain(op).treatment for op in ("relu", "exp", "linear")] == ["fp32", "promote", "low"]


# Fleet's amp_configs ------------------------------------------------------------------------------------------


def test_fleets_defaults():
    policy = fleet.policy()
    assert policy == fleet.policy({})
    assert (policy.level, policy.dtype, policy.param_dtype) == ("O1", torch.float16, torch.float32)
    assert policy.loss_scale == LossScale.like("fleet")
    scale = policy.loss_scale
    assert (scale.init, scale.interval, scale.hysteresis) == (32768, 1000, 2)
    assert (scale.growth, scale.backoff) == (2.0, 0.5)
    for op in ("conv2d", "matmul", "linear", "mm"):
        assert policy.explain(op).treatment == "low"
    black = "exp square log mean sum cosine_similarity softmax cross_entropy binary_cross_entropy_with_logits"
    for op in black.split():
        assert policy.explain(op).treatment == "fp32"
    for op in ("relu", "batch_norm", "avg_pool2d", "add", "gelu", "pow", "layer_norm", "conv3d"):
        assert policy.explain(op).treatment in ("native", "promote", "fp32_math")


def test_each_knob_of_the_loss_scale():
    knobs = {
        "init_loss_scaling": ("init", 1024), "incr_every_n_steps": ("interval", 7), "incr_ratio": ("growth", 4.0),
        "decr_every_n_nan_or_inf": ("hysteresis", 3), "decr_ratio": ("backoff", 0.8),
    }  # fmt: skip
    for key, (field, value) in knobs.items():
        assert fleet.policy({key: value}).loss_scale == LossScale.like("fleet", **{field: value})
        assert fleet.policy({key: value, "use_dynamic_loss_scaling": True}).loss_scale.mode == "dynamic"
        constant = fleet.policy({key: value, "use_dynamic_loss_scaling": False}).loss_scale
        assert constant == LossScale.constant(1024 if field == "init" else 32768)


@pytest.mark.parametrize("key, dtype", [("use_pure_fp16", torch.float16), ("use_pure_bf16", torch.bfloat16)])
def test_pure_is_o2(key, dtype):
    policy = fleet.policy({key: True, "custom_black_list": ["softmax"], "custom_black_varnames": ["head.*"]})
    assert (policy.level, policy.dtype, policy.halves, policy.output_dtype) == ("O2", dtype, True, torch.float32)
    assert policy.loss_scale == (LossScale.like("fleet") if dtype == torch.float16 else LossScale.none())
    assert policy.explain("softmax").treatment == "fp32"
    # Fleet's own black list says nothing in O2.
    assert [policy.explain(op).treatment for op in ("mean", "exp", "linear")] == ["native", "promote", "low"]
    assert policy.storage("head.weight", "head")[0] == torch.float32
    off = {"use_pure_fp16": False, "use_pure_bf16": False, "use_fp16_guard": True, "use_optimizer_fp16": False}
    assert fleet.policy(off) == fleet.policy()
    assert fleet.policy({key: True, "use_fp16_guard": False}) == fleet.policy({key: True})
