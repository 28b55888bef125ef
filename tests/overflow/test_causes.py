"""Every kind of fault is told apart, and what the report says to write really cures it."""

import itertools

import pytest
import torch
from torch import nn

import mezzo
from mezzo.overflow import locate
from mezzo.policy.rules import assignment

FP16 = "O1,dtype=float16,emulate=true"


class Apply(nn.Module):
    """An op on a parameter's numbers, so that it has a gradient."""

    def __init__(self, op, numbers):
        super().__init__()
        self.op, self.numbers = op, nn.Parameter(torch.tensor(numbers))

    def forward(self, factor):
        return self.op(self.numbers * factor)


def search(op, numbers, **options):
    model = Apply(op, numbers)
    return locate(lambda: model(torch.ones(())).sum(), model, **options)


def rewritten(overflow, **names):
    """Return the op that the cure's text says to write."""
    return lambda x: eval(overflow.cure, {"torch": torch, "x": x, **names})


# No precision cures these -------------------------------------------------------------------------------


AT_ZERO = {
    "log": (torch.log, "forward", "the logarithm of 0"),
    "log2": (torch.log2, "forward", "the logarithm of 0"),
    "log10": (torch.log10, "forward", "the logarithm of 0"),
    "reciprocal": (torch.reciprocal, "forward", "a division by 0"),
    "rsqrt": (torch.rsqrt, "forward", "a division by the root of 0"),
    "sqrt": (torch.sqrt, "backward", "the derivative of a root is infinite at 0"),
    "pow": (lambda x: x.pow(-1.5), "forward", "a negative power of 0, its own or its derivative's"),
}
SAME = "; float64 gives the same of what it read: no precision of this op cures it"


def test_at_zero():
    for (op, (function, phase, what)), dtype in itertools.product(AT_ZERO.items(), (torch.float32, torch.float16)):
        overflow = search(lambda x: function(x.to(dtype)), [1.0, 0.0, 4.0])  # noqa: B023 - called at once
        assert (overflow.kind, overflow.op, overflow.phase, overflow.module) == ("zero", op, phase, ""), (op, dtype)
        assert overflow.tensor.num_inf == 1
        assert sum(read.num_zeros for read in overflow.inputs) == 1
        assert overflow.cause.startswith(f"{what}{SAME}"), (op, dtype)
        assert ("a number below" in overflow.cause) == (dtype != torch.float32), (op, dtype)
        cure = rewritten(overflow, exponent=-1.5)
        # Near 0 float16 holds neither such a power nor the derivative of 1/x, whatever is added.
        if dtype != torch.float16 or op not in ("pow", "reciprocal"):
            assert search(lambda x: cure(x.to(dtype)).float(), [1.0, 0.0, 4.0]) is None, (op, dtype)  # noqa: B023


def test_at_zero_in_other_words():
    overflow = search(lambda x: x.pow(0.5), [1.0, 0.0])
    assert (overflow.kind, overflow.op, overflow.phase) == ("zero", "pow", "backward")
    assert search(rewritten(overflow, exponent=0.5), [1.0, 0.0]) is None
    y = torch.tensor([1.0, 0.0, 4.0])
    for above in (1.0, 0.0):
        overflow = search(lambda x, above=above: above * x / y, [1.0, 1.0, 1.0])
        assert (overflow.kind, overflow.op) == ("zero", "div")
        assert (overflow.tensor.num_inf, overflow.tensor.num_nan) == ((1, 0) if above else (0, 1))
        assert overflow.cure == "x / (y + torch.finfo(y.dtype).eps)"
        cure = rewritten(overflow, y=y)
        assert search(lambda x: cure(above * x), [1.0, 1.0, 1.0]) is None  # noqa: B023 - called at once
    overflow = search(lambda x: 1 / (x.half() + 1e-8), [1.0, 0.0])  # an epsilon that float16 flushes
    assert (overflow.kind, overflow.op) == ("zero", "reciprocal")
    assert (
        "self is float16, where a number below 3e-08 is 0, be it an epsilon or not; in float32 it may be none"
        in overflow.cause
    )
    assert search(lambda x: 1 / (x + 1e-8), [1.0, 0.0]) is None


def test_a_row_of_zeros_that_is_normalised():
    weights = torch.ones(2, 1)
    overflow = search(lambda x: torch._weight_norm(x.reshape(2, 2), weights, 0), [1.0, 2.0, 0.0, 0.0])
    assert (overflow.kind, overflow.op, overflow.tensor.num_nan) == ("zero", "_weight_norm", 2)
    assert overflow.cause.startswith("a division by the norm of a row of zeros")


def test_no_gradient_arrives_where_a_derivative_is_infinite():
    """Of ``where`` the side that is not taken gets a gradient of 0, and 0 / 0 is NaN."""
    for op in ("sqrt", "log"):
        overflow = search(lambda x: torch.where(x > 0, getattr(torch, op)(x), x), [1.0, 0.0])  # noqa: B023
        assert (overflow.kind, overflow.op, overflow.phase, overflow.tensor.num_nan) == ("zero", op, "backward", 1), op
        assert overflow.cause == f"{AT_ZERO[op][2]}{SAME}", op
        cure = rewritten(overflow)
        assert search(lambda x: torch.where(x > 0, cure(x), x), [1.0, 0.0]) is None, op  # noqa: B023


OUTSIDE = {
    "sqrt": (-1.0, "the root of a negative number"),
    "rsqrt": (-1.0, "the root of a negative number"),
    "log": (-1.0, "the logarithm of a negative number"),
    "log2": (-1.0, "the logarithm of a negative number"),
    "log10": (-1.0, "the logarithm of a negative number"),
    "pow": (-1.0, "a fractional power of a negative number"),
    "acos": (2.0, "acos of a number beyond 1"),
    "asin": (2.0, "asin of a number beyond 1"),
    "atanh": (2.0, "atanh of a number beyond 1"),
}


def test_where_an_op_has_no_result():
    for op, (number, what) in OUTSIDE.items():
        function = getattr(torch, op) if op != "pow" else lambda x: x.pow(0.5)
        overflow = search(function, [0.5, number])
        assert (overflow.kind, overflow.op, overflow.phase, overflow.tensor.num_nan) == ("domain", op, "forward", 1)
        assert overflow.cause == f"{what}{SAME}"
        assert search(rewritten(overflow, exponent=0.5), [0.5, number]) is None, op
        if op in ("sqrt", "acos", "asin", "atanh"):  # a zero that does no harm
            overflow = search(function, [0.0, -2.0])
            assert (overflow.kind, overflow.inputs[0].num_zeros) == ("domain", 1), op
    with pytest.warns(UserWarning, match="degrees of freedom"):
        overflow = search(torch.std, [1.0])
    assert (overflow.kind, overflow.op) == ("domain", "std")
    assert bool(rewritten(overflow)(torch.ones(1)).isfinite())


def test_what_no_format_holds():
    for op in ("exp", "expm1", "exp2", "sinh", "cosh"):
        overflow = search(getattr(torch, op), [1.0, 200.0])
        assert (overflow.kind, overflow.op) == ("unbounded", op)
        assert overflow.needed == pytest.approx(float(getattr(torch, op)(torch.tensor(200.0, dtype=torch.float64))))
        cause = f"its largest number would be {overflow.needed:.6g}, beyond the largest float32, 3.40282e+38"
        assert overflow.cause.startswith(cause)
        assert search(rewritten(overflow), [1.0, 200.0]) is None, op
    overflow = search(torch.exp, [1000.0])
    assert (overflow.kind, overflow.needed, overflow.share) == ("unbounded", None, None)
    assert overflow.cause == "the result is infinite in float64 as well"
    overflow = search(lambda x: x * x, [1e30])
    assert (overflow.kind, overflow.op, overflow.needed) == ("unbounded", "mul", pytest.approx(1e60))
    assert overflow.cure == "a lower learning rate, or MixedPrecision(…, max_grad_norm=1.0) from the start"


class Masked(nn.Module):
    """A softmax of scores that two masks are added to: one that is given, and a buffer."""

    def __init__(self, mask):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", mask)

    def forward(self, x, mask):
        return (self.layer(x) + mask + self.mask).softmax(-1)


def test_masks_and_what_the_code_writes():
    mask = torch.tensor([[False, True], [True, True]])
    numbers = [[1.0, 2.0], [3.0, 4.0]]
    overflow = search(lambda scores: scores.masked_fill(mask, float("-inf")).softmax(-1).square(), numbers)
    assert (overflow.kind, overflow.op, overflow.tensor.num_nan) == ("masked", "softmax", 2)
    assert overflow.cause == "softmax over a row that holds -inf alone: where all is masked there is no result"
    names = {"torch": torch, "mask": mask}
    cured = lambda scores: eval(overflow.cure, {**names, "scores": scores}).softmax(-1).square()  # noqa: E731
    assert search(cured, numbers) is None
    wide = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    for given, own in ((wide, 0 * mask), (0, wide)):
        model = Masked(own)
        overflow = locate(lambda: model(torch.ones(2, 2), given).square().sum(), model)  # noqa: B023 - called at once
        assert (overflow.kind, overflow.op, overflow.tensor.num_nan) == ("masked", "softmax", 2)
    overflow = search(lambda x: x.masked_fill(mask, float("-inf")) * 0, numbers)
    assert (overflow.kind, overflow.op, overflow.phase) == ("written", "masked_fill", "forward")
    assert "it reaches the end of the pass; mul (" in overflow.cause
    assert overflow.cause.endswith("makes nan of it")
    assert search(lambda x: eval(overflow.cure, {**names, "scores": x}) * 0, numbers) is None
    overflow = search(lambda x: torch.where(x > 1.5, x, float("nan")), [1.0, 2.0])
    assert (overflow.kind, overflow.op) == ("written", "where")


# What was there before ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0", "O2,dtype=float16,emulate=true"])
def test_what_was_not_finite_before(make, step, tmp_path, monkeypatch, policy):
    monkeypatch.chdir(tmp_path)
    for value in (torch.nan, torch.inf, -torch.inf):
        model, x = make("conv")
        x[0, 0, 0, 0] = value
        overflow = locate(step(model, policy, x), model, policy=policy)
        assert (overflow.kind, overflow.tensor.name, overflow.phase) == ("input", "input 0", "forward")
        assert overflow.tensor.num_inf + overflow.tensor.num_nan == 1
        begin = "input 0 was not finite before the model saw it: the data, or what prepares it"
        assert overflow.cause.startswith(begin)
        names = {"torch": torch, "x": x}
        exec(overflow.cure, names)
        if policy == "O0":  # nan_to_num writes float32's largest number, which float16 lacks
            model, _ = make("conv")
            names["x"].clamp_(-1, 1)
            assert locate(step(model, policy, names["x"]), model, policy=policy) is None, value
    for role, path in (("parameter", "head.weight"), ("buffer", "norm.running_mean")):
        model, x = make("conv")
        model.eval()
        torch.save(model.state_dict(), "checkpoint.pt")
        model.state_dict()[path].view(-1)[0] = torch.nan
        overflow = locate(step(model, policy, x), model, policy=policy)
        assert (overflow.kind, overflow.tensor.name) == (role, path)
        assert overflow.cause.startswith(f"the {role} {path} was not finite before the pass: ")
        exec(overflow.cure, {"mezzo": mezzo, "model": model})
        assert locate(lambda: model(x.to(model.conv.weight.dtype)).square().mean(), model) is None  # noqa: B023


def test_an_argument_by_name_and_inside_a_dict():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, *, scale):
            return self.layer(batch["pixels"]) * scale

    model, bad, good = Model(), torch.tensor([1.0, torch.nan]), torch.ones(2)
    assert locate(lambda: model({"pixels": bad}, scale=good).sum(), model).tensor.name == "input 0['pixels']"
    assert locate(lambda: model({"pixels": good}, scale=bad).sum(), model).tensor.name == "input scale"
    both = locate(lambda: model({"pixels": bad}, scale=good).sum(), [model, nn.Linear(1, 1)])
    assert both.tensor.name == "input 0['pixels'] of model 0"


# Beyond sixteen bits ------------------------------------------------------------------------------------


class Rooted(nn.Module):
    """The overflow is in the model's own forward, no submodule's."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        y = self.proj(x) * 400
        return (y @ y.transpose(-1, -2)).softmax(-1)


class Ruled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return (self.proj(x) * 10).exp().sum().log()


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8))


class LargeWeight(Normed):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self[0].weight[0, 0] = 1e5


CURES = [
    # the model, its policy, how large its inputs are, the culprit, and the text
    ("transformer", FP16, 1, "blocks.1.attn matmul output", "fp32_module=blocks.1.attn"),
    ("chain", FP16, 1, "first linear output", "fp32_module=first+second"),
    ("chain", "O2,emulate=true", 1, "first linear output", "fp32_module=first+second"),
    ("chain", "O3,emulate=true,lists=device,output_dtype=float16", 1, "first linear output",
     'policy = mezzo.Policy.parse("O3,dtype=bfloat16,lists=device,emulate=true")'),
    (Rooted, FP16, 1, " matmul output", "fp32=matmul"),
    (Rooted, "O2,emulate=true", 1, " matmul output", "fp32=matmul"),
    (Rooted, "O3,emulate=true", 1, " matmul output", 'policy = mezzo.Policy.parse("O3,dtype=bfloat16,emulate=true")'),
    (Ruled, FP16 + ",low=exp", 1, " exp output", "fp32=exp"),
    (LargeWeight, FP16, 1, "0 linear 0.weight cast to float16", "fp32_param=0.weight"),
    (Normed, FP16, 1e5, "0 linear input 0 cast to float16", "fp32_module=0"),
    (Normed, "O2,emulate=true", 1e5, "0 linear input 0 cast to float16", "fp32_module=0"),
    (Normed, "O3,emulate=true", 1e5, "0 to input 0 cast to float16",
     'policy = mezzo.Policy.parse("O3,dtype=bfloat16,emulate=true")'),
]  # fmt: skip


def test_the_cure_of_a_forward_overflow(make, step, cured):
    def build(network):
        if isinstance(network, str):
            return make(network, gain={"transformer": 400.0, "chain": 1e5}[network])
        torch.manual_seed(0)
        return network(), torch.randn(2, 5, 8)

    for row in CURES:
        network, policy, size, culprit, cure = row
        policy = mezzo.Policy.parse(policy)
        model, x = build(network)
        overflow = locate(step(model, policy, x * size), model, policy=policy)
        assert (overflow.kind, overflow.phase, overflow.tensor.dtype) == ("range", "forward", "float16"), row
        assert f"{overflow.module} {overflow.op} {overflow.tensor.name}" == culprit, row
        assert 1 < overflow.share == overflow.needed / 65504, row
        assert overflow.cure == (cure if cure.startswith("policy") else assignment(cure)), row
        policy = cured(overflow, policy)
        model, x = build(network)
        assert locate(step(model, policy, x * size), model, policy=policy) is None, row


def test_a_cast_of_a_weight_from_before_the_search():
    """A region keeps casts of weights until its end, and a search may run inside of it."""
    model = LargeWeight()
    prepared = mezzo.prepare(model, FP16)

    def fn():
        with prepared.autocast():
            return model(torch.ones(2, 8)).square().sum()

    with prepared.autocast():
        fn()
        overflow = locate(fn, model, policy=FP16)
    assert (overflow.kind, overflow.tensor.name, overflow.needed) == ("range", "0.weight cast to float16", 1e5)
    assert overflow.cure == 'policy = policy.keep_fp32(params=["0.weight"])   # the text fp32_param=0.weight'


def test_the_cure_of_a_scale(make, step, cured):
    scales = ("dynamic", "dynamic(interval=100)", "dynamic(ceiling=2**20)", "constant(2**30)")
    for level, scale in zip(("O1", "O2", "O2", "O1"), scales, strict=True):
        policy = mezzo.Policy.parse(f"{level},dtype=float16,emulate=true,loss_scale={scale}")
        model, x = make("conv")
        model.eval()
        overflow = locate(step(model, policy, x), model, policy=policy, loss_scale=2.0**30)
        assert (overflow.kind, overflow.phase) == ("scale", "backward"), policy
        after = cured(overflow, policy)
        assert after.evolve(loss_scale=policy.loss_scale) == policy  # nothing else
        assert after.loss_scale.interval == policy.loss_scale.interval or after.loss_scale.mode == "constant"
        model, x = make("conv")
        model.eval()
        assert locate(step(model, after, x), model, policy=after, loss_scale=after.loss_scale.init) is None, policy


@pytest.mark.parametrize("policy, text", [
    ("O2", 'policy.evolve(loss_scale="dynamic(init=0.5)")'),
    ("O2,loss_scale=dynamic(floor=1)", 'policy.evolve(loss_scale="dynamic(init=0.5,floor=2**-126)")'),
    ("O3", 'mezzo.Policy.parse("O3,dtype=bfloat16,emulate=true")'),
])  # fmt: skip
def test_a_scale_below_one(step, cured, policy, text):
    """O3 in FP16 cannot unscale, so that its policy takes no scale."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1, bias=False)

        def forward(self, x):
            return self.layer(x) * 100

    given, policy = policy, mezzo.Policy.parse(f"{policy},emulate=true")
    torch.manual_seed(0)
    model, x = Steep(), torch.full((2, 4), 500.0)
    overflow = locate(step(model, policy, x, loss=torch.sum), model, policy=policy, loss_scale=1.0)
    assert (overflow.kind, overflow.tensor.name, overflow.needed) == ("scale", "gradient of layer.weight", 1e5)
    assert overflow.cure.partition("   #")[0] == f"policy = {text}"
    # A dynamic scale may not come down to it; that of O3 is constant.
    assert ("stops at its floor, 1" in overflow.cause) == ("floor" in given)
    assert ("backs off to that by itself" in overflow.cause) == (given == "O2")
    policy, model = cured(overflow, policy), Steep()
    scale = policy.loss_scale.init
    assert locate(step(model, policy, x, loss=torch.sum), model, policy=policy, loss_scale=scale) is None


@pytest.mark.parametrize("first", ["root", "layer"])
def test_a_gradient_that_no_scale_makes_finite(step, first):
    """The scale is too large for one gradient, and another one is infinite with any; what runs last goes back first."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.root = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            before = self.root.sqrt() if first == "layer" else 0
            y = (self.layer(x) * 100).float().sum()
            return y + (before if first == "layer" else self.root.sqrt())

    torch.manual_seed(0)
    model = Both()
    fn = step(model, FP16, torch.full((2, 4), 500.0), loss=torch.sum)
    overflow = locate(fn, model, policy=FP16, loss_scale=2.0)
    if first == "root":
        assert (overflow.kind, overflow.phase, overflow.tensor.name) == ("zero", "backward", "gradient of root")
    else:
        assert (overflow.kind, overflow.phase, overflow.op) == ("range", "backward", "linear")
        assert overflow.cause.endswith("; other gradients are not finite with a lower loss scale either")
        assert overflow.cure == 'policy = mezzo.Policy.parse("O1,dtype=bfloat16,emulate=true")'
    model.root.requires_grad_(False)
    assert locate(fn, model, policy=FP16, loss_scale=2.0).kind == "scale"


def test_a_cast_of_the_model_s_own():
    overflow = search(lambda x: x.half().float(), [1e5])
    assert (overflow.kind, overflow.op, overflow.tensor.name, overflow.needed) == ("range", "half", "output", 1e5)
    assert overflow.cause.endswith(", and the model's own code casts it")
    assert overflow.cure == "x.bfloat16() in place of x.half(), or no cast"
    overflow = search(lambda x: x.half() * 2, [5e4], policy="O1,dtype=bfloat16,emulate=true")
    assert (overflow.op, overflow.cure) == ("mul", "x.float() before it")
    assert "which O1,dtype=bfloat16,emulate=true does not ask for" in overflow.cause
    overflow = search(lambda x: x.half() * 2, [5e4], policy=FP16)  # whose own format it is, and yet no policy casts it
    assert (overflow.op, overflow.cure) == ("mul", "x.float() before it")
    assert overflow.cause.endswith("; the model's own code casts what is read")


def test_two_models_that_lack_each_other_s_modules(step):
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), nn.Linear(8, 8)
    with torch.no_grad():
        first[0].weight.mul_(1e5)
    x = torch.randn(2, 8)

    def fn():
        with mezzo.autocast(FP16):
            return (second(x) * first(x)).sum()

    # The rule on module "0" would match nothing in the second model, which a session refuses.
    assert locate(fn, [first, second], policy=FP16).cure == 'policy = policy.fp32("linear")   # the text fp32=linear'
