"""What writes in place or by ``out=`` in a region, against the same program in plain torch with FP32 parameters."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import Policy, UnsupportedError
from mezzo.policy.ops import MOVES, OPS, VIEWS, in_place_forms
from mezzo.tensors import LOW, tensors

from ..support.refusals import refused

ROWS, MASK, COLUMNS = torch.tensor([2, 0]), torch.tensor([True, False, True, False]), torch.tensor([1, 3, 0])
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # which Dynamo looks at, unless warnings are errors
    pytest.mark.filterwarnings("ignore:index_reduce"),  # is in beta
]
EVERY = pytest.mark.parametrize("policy", ["O1,bf16", "O1,fp16", "O2,bf16", "O2,fp16,emulate=true"])


def to(value, dtype):
    """Cast floating tensors of a call's arguments, and copy the others."""
    return tree_map_only(
        torch.Tensor, lambda x: x.detach().to(dtype, copy=True) if x.is_floating_point() else x.clone(), value
    )


# The whole table ------------------------------------------------------------------------------------------

#: What torch's own database calls otherwise, or not at all.
CALLS = {
    "elu_": (1.0,), "rrelu_": (0.1, 0.3, False), "celu_": (1.0,), "leaky_relu_": (0.1,), "threshold_": (0.1, 2.0),
    "hardtanh_": (-0.5, 0.5),
    **dict.fromkeys("relu_ relu6_ selu_ gelu_ silu_ mish_ hardsigmoid_ hardswish_".split(), ()),
    **dict.fromkeys("dropout_ alpha_dropout_ feature_alpha_dropout_ feature_dropout_".split(), (0.5, False)),
}  # fmt: skip


@functools.cache
def samples():
    """Calls of the in-place forms of each op of the table: what is written to, other arguments, keywords."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = {}
    for info in op_db:
        if torch.float32 in info.dtypes:
            forms = {info.inplace_variant, *(alias.inplace_variant for alias in info.aliases)} - {None}
            known |= {form: info for form in forms if form not in known}
    by_op = {}
    for op in OPS:
        for function in in_place_forms(op):
            if function in known:
                drawn = itertools.islice(known[function].sample_inputs("cpu", torch.float32), 12)
                calls = [(sample.input, sample.args, sample.kwargs) for sample in drawn]
            elif function.__name__ in CALLS:
                calls = [(torch.linspace(-2, 2, 9), CALLS[function.__name__], {})]
            else:
                continue
            by_op.setdefault(op, []).extend((function, *call) for call in calls)
    return by_op


def test_every_in_place_form_of_the_table_is_called():
    assert {op for op in OPS if in_place_forms(op)} == set(samples())
    assert len(samples()) > 100


def attempt(function, x, args, kwargs, dtypes, *, widened=False):
    """Call a function on copies in two dtypes, of what is written to and of what is read; ``None`` where it raises."""
    x, args, kwargs = (to(value, dtype) for value, dtype in zip((x, args, kwargs), (*dtypes, dtypes[1]), strict=True))
    if widened:
        x, args, kwargs = to((x, args, kwargs), torch.float32)
    torch.manual_seed(0)
    try:
        out = function(x, *args, **kwargs)
    except (RuntimeError, IndexError):
        return None
    assert out is x
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["O1,bf16", "O1,fp16"])
def test_each_is_the_fp32_computation_rounded_to_what_it_writes_to(policy):
    """Whatever is FP32 and whatever low of what is written to and what is read; native ones are torch's own."""
    low, wrong = Policy.parse(policy).dtype, set()
    for op, calls in samples().items():
        for call, *dtypes in itertools.product(calls, (torch.float32, low), (torch.float32, low)):
            right = attempt(*call, dtypes, widened=True)
            treatment = Policy.parse(policy).explain(op, device_type="cpu").treatment
            if right is None or right.shape != call[1].shape:
                continue  # a plain program's own error, and addbmm_, which takes another shape
            if treatment == "native":
                right = attempt(*call, dtypes)
            with mezzo.autocast(policy):
                out = attempt(*call, dtypes)
            if out is None or out.dtype != dtypes[0]:
                wrong.add((op, *dtypes, None if out is None else out.dtype))
                continue
            eps = torch.finfo(dtypes[0]).eps
            bound = {"native": 0 * right.abs(), "low": 8 * eps * right.abs().max() if right.numel() else right}
            off = (out.double() - right.double()).abs().nan_to_num(0, 0, 0)
            if (off > bound.get(treatment, eps * right.double().abs() + 1e-7)).any():
                wrong.add((op, *dtypes, float(off.max())))
    assert wrong == set()


OUT = {
    "exp": (torch.exp, [(3, 4)]), "mm": (torch.mm, [(3, 4), (4, 2)]), "addmm": (torch.addmm, [(3, 2), (3, 4), (4, 2)]),
    "cat": (lambda *xs, out: torch.cat(xs, out=out), [(3, 4), (2, 4)]), "softmax": (torch.softmax, [(3, 4), -1]),
    "index_add": (torch.index_add, [(4, 2), 0, ROWS, (2, 2)]), "cumsum": (torch.cumsum, [(300,), 0]),
    "lerp": (torch.lerp, [(3,), (3,), 0.3]), "atan2": (torch.atan2, [(3,), (3,)]), "add": (torch.add, [(3,), (3,)]),
    "scatter": (torch.scatter, [(4,), 0, ROWS, (2,)]), "sum": (torch.sum, [(300, 3), 0]),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["O1,bf16", "O1,fp16"])
@pytest.mark.parametrize("name", OUT)
def test_out_is_the_fp32_computation_rounded_to_its_dtype(name, policy):
    function, shapes = OUT[name]
    low = Policy.parse(policy).dtype
    torch.manual_seed(0)
    drawn = [torch.rand(shape) + 0.5 if isinstance(shape, tuple) else shape for shape in shapes]
    for first, other, into in itertools.product((torch.float32, low), repeat=3):
        operands = [to(x, first if position == 0 else other) for position, x in enumerate(drawn)]
        right = function(*to(operands, torch.float32), out=torch.empty(0))
        for given in (torch.empty(0, dtype=into), torch.empty(right.shape, dtype=into)):
            with mezzo.autocast(policy):
                out = function(*operands, out=given)
            assert out is given
            assert out.dtype == into
            slack, coarse = 8 if OPS[name].portable == "low" else 1.01, torch.finfo(into).eps
            if OPS[name].portable in ("promote", "native"):  # computed in the widest of what is read
                coarse = max(coarse, min(torch.finfo(x.dtype).eps for x in tensors(operands) if x.is_floating_point()))
            torch.testing.assert_close(out.float(), right, rtol=slack * coarse, atol=0)


def test_several_results_are_written_and_gradients_are_refused_in_torch_s_words():
    x = torch.randn(4, 5).bfloat16()
    policy = Policy.O1("bfloat16").fp32("aminmax", "max")
    with mezzo.autocast(policy, "cpu"):
        low, high = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
        extremes = torch.aminmax(x, dim=1, out=(low, high))
        assert extremes.min is low
        assert extremes.max is high
        values, indices = torch.empty(5, dtype=torch.float16), torch.empty(5, dtype=torch.long)
        assert torch.max(x, 0, out=(values, indices)).indices is indices
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.exp(torch.zeros(2, dtype=torch.bfloat16, requires_grad=True), out=torch.empty(2))
    assert torch.equal(low, x.amin(1))
    assert torch.equal(high, x.amax(1).float())
    assert torch.equal(values, x.amax(0).half())
    assert torch.equal(indices, x.float().argmax(0))


# Programs of others ---------------------------------------------------------------------------------------


def masked(model, h):
    x = torch.zeros(4, 4)
    x[MASK] = h[:2]
    x[ROWS] = h[2:] * 2
    x[[1, 3]] = h[:2]
    x[..., MASK] = x[..., MASK] + h[:, :2]
    x[-1, COLUMNS] = h[0, :3]
    x[0] = h[1]
    x[:, None][1:2, :, COLUMNS] = h[:1, None, :3]
    return x


def mask_tokens(model, h):
    x = h.clone()
    x[MASK] = model.token
    x[0, COLUMNS] = model.token[:3]
    x[3] = model.token
    return x


def packed(model, h):
    x = h.new_zeros(6, 4)
    x.index_copy_(0, torch.tensor([1, 5, 2, 4]), model.scale * h)  # FP32 into low
    y = torch.zeros(6, 4).index_copy_(0, torch.tensor([0, 2, 1, 3]), h)
    y.index_put_((ROWS,), h[:2])
    y.put_(torch.tensor([3, 5]), h[0, :2])
    return x + y.masked_scatter_(torch.eye(6, 4) > 0, h)


def experts(model, h):
    final = torch.zeros(4, 4)
    shares = model.scale.softmax(-1)  # FP32
    for one, rows in enumerate((ROWS, COLUMNS)):
        final.index_add_(0, rows, h[rows] * shares[one])
    low = h.new_zeros(4, 4)
    return low.index_add_(0, COLUMNS, h[COLUMNS] * shares[0]) + final


def graph(model, h):
    sums = torch.zeros(3, 4).index_add_(0, torch.tensor([0, 1, 1, 2]), h)
    index = torch.tensor([0, 1, 1, 2])[:, None].expand(4, 4)
    means = torch.zeros(3, 4).scatter_reduce_(0, index, h, "mean", include_self=False)
    most = h.new_zeros(3, 4).scatter_reduce_(0, index, model.scale * h, "amax", include_self=False)
    counts = torch.zeros(3, 1).scatter_add_(0, index[:, :1], torch.ones_like(h[:, :1]))
    spread = torch.zeros(4, 4).scatter_(1, torch.tensor([[0, 2], [1, 3], [3, 0], [2, 1]]), h[:, :2])
    return (sums / counts + means + most).sum(0) + spread


def blended(model, h):
    average = model.scale.expand(4, 4).clone()
    average.lerp_(h, 0.25).addmm_(h, h.T).addcmul_(h, model.scale)
    low = h.clone().lerp_(model.scale.expand(4, 4), 0.5)
    return low.addmm_(model.scale.expand(4, 4), h, beta=0.5) + average


def returned(model, h):
    x = torch.zeros(4, 4)
    y = x.index_add(0, ROWS, h[:2]).scatter(1, COLUMNS[:1].expand(4, 1), h[:, :1]).index_copy(0, ROWS, h[2:])
    y = y.masked_scatter(MASK[:, None].expand(4, 4), h).put(torch.tensor([1, 2]), h[0, :2]).lerp(h, 0.5)
    y = y.scatter_reduce(0, ROWS[:, None].expand(2, 4), h[:2], "sum").index_reduce(0, ROWS, h[:2] ** 2 + 1, "prod")
    y = y.scatter_add(0, ROWS[:, None].expand(2, 4), h[:2]) + torch.linalg.cross(x[:, :3] + 1, h[:, :3]).sum()
    weights = h[:, 0].detach()  # of samples
    bags = functional.embedding_bag(
        torch.arange(4).view(2, 2), model.table, per_sample_weights=weights.view(2, 2), mode="sum"
    )
    return y + bags.sum(0) + torch.heaviside(x, h.detach())


class Static:
    """The cache of ``generate(cache_implementation="static")``: FP32 memory, keys in the region's dtype."""

    def __init__(self):
        self.keys, self.at = torch.zeros(1, 2, 8, 2), 0

    def update(self, keys):
        places = torch.arange(self.at, self.at + keys.shape[2])
        self.at += keys.shape[2]
        self.keys = self.keys.detach().clone()
        return self.keys.index_copy_(2, places, keys)


def cached(model, h):
    cache = Static()
    split = h.view(1, 4, 2, 2).transpose(1, 2)
    cache.update(split[:, :, :3])
    keys = cache.update(split[:, :, 3:])
    return functional.scaled_dot_product_attention(split, keys, keys).transpose(1, 2).reshape(4, 4)


def buffers(model, h):
    with torch.no_grad():
        model.queue[:, 2:6] = h.T  # of momentum contrast
        model.queue[:, torch.tensor([0, 7])] = h.T[:, :2]
        model.codes.lerp_(torch.zeros(3, 4).index_add_(0, torch.tensor([0, 1, 1, 2]), h), 0.1)  # of a VQ-VAE
        model.codes.T[COLUMNS] = model.codes.T[COLUMNS] + h.T[:3, :3]  # a view that is not contiguous
    return h @ model.queue + model.codes.sum()


PROGRAMS = [masked, mask_tokens, packed, experts, graph, blended, returned, cached, buffers]


class Writer(nn.Module):
    def __init__(self, program):
        super().__init__()
        torch.manual_seed(1)
        self.program, self.layer = program, nn.Linear(4, 4)
        self.token, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4) + 0.5)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("queue", torch.zeros(4, 8))
        self.register_buffer("codes", torch.ones(3, 4))

    def forward(self, x):
        return self.program(self, self.layer(x))


def close(result, right, dtype, name=""):
    """Within the rounding of a few operations in a dtype."""
    off = (result.double() - right.double()).norm() / right.double().norm().clamp(min=1e-3)
    assert off < 8 * torch.finfo(dtype).eps, (name, float(off))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "policy",
    [
        "O0",
        "O1,bf16",
        "O1,fp16,loss_scale=64",
        "O2,bf16",
        "O2,fp16,loss_scale=64",
        "O1,bf16,emulate=true",
        "O2,bf16,fp32_param=token+queue",
    ],
)
def test_a_program_trains_as_with_fp32_parameters(policy, program):
    plain, x = Writer(program), torch.randn(4, 4)
    model, dtype = copy.deepcopy(plain), Policy.parse(policy).dtype
    right = plain(x)
    right.square().mean().backward()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    with amp.autocast():
        out = model(x)
        loss = out.float().square().mean()
    amp.backward(loss)
    amp.unscale_()
    close(out, right, dtype)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            close(mine.grad, theirs.grad, dtype, name)
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert mine.dtype == torch.float32
        close(mine, theirs, dtype, name)
    amp.close()


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program is not buffers])
@pytest.mark.parametrize("policy", ["O1,bf16", "O2,fp16,loss_scale=64"])
def test_a_program_is_recomputed_and_compiled_bit_for_bit(policy, program):
    def run(call):
        model = Writer(program)
        amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with amp.autocast():
            out = call(model)(x)
        amp.backward(out.float().square().mean())
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        amp.close()
        return [out, x.grad, *grads]

    plain = run(lambda model: model)
    ways = [functools.partial(functools.partial, checkpoint, use_reentrant=again) for again in (False, True)]
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    if program in (masked, mask_tokens) and torch.__version__ >= (2, 14):  # which asks no mode about x[i] = y
        with pytest.raises(RuntimeError, match="dtypes match"):
            run(compiled)
    else:
        ways.append(compiled)
    for way in ways:
        for mine, theirs in zip(run(way), plain, strict=True):
            assert torch.equal(mine, theirs)


# Sums that run ----------------------------------------------------------------------------------------------

HUB, SOME = torch.zeros(4000, dtype=torch.long), torch.tensor([1, 0, 2, 0])
SUMS = {
    "index_add": lambda x, y: (0, HUB, y), "scatter_add": lambda x, y: (0, HUB, y),
    "scatter_reduce": lambda x, y: (0, HUB, y, "sum"), "index_put": lambda x, y: ((HUB,), y, True),
    "put": lambda x, y: (HUB, y, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_thousands_are_rounded_once(name, dtype):
    """In place, too: counts stopped at 256 in BF16 and at 2,048 in FP16."""
    leaves = torch.rand(4000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for source, read in itertools.product((torch.ones(4000, dtype=dtype), leaves), (dtype, torch.float32)):
        right = source.double().sum()
        with mezzo.autocast(Policy.O1(dtype)):
            x = torch.zeros(3, dtype=dtype)
            written = getattr(x, f"{name}_")(*SUMS[name](x, source.to(read)))
            made = getattr(torch.zeros(3, dtype=dtype), name)(*SUMS[name](x, source))
        assert written is x
        assert made.dtype == dtype
        for sums in (x, made):
            assert sums[1:].abs().max() == 0
            assert abs(sums[0].double() - right) <= torch.finfo(dtype).eps * right


# Rules --------------------------------------------------------------------------------------------------------


def written(policy, function, x, *args, **kwargs):
    x = x.clone()
    with mezzo.autocast(policy, "cpu"):
        out = function(x, *args, **kwargs)
    assert out is x
    return x


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_rule_holds_for_the_in_place_and_out_forms(level):
    base = Policy.O0() if level == "O0" else Policy.parse(f"{level},bf16")
    low = base.dtype
    wide, x = torch.linspace(0.1, 2, 50), torch.linspace(0.1, 2, 50).bfloat16()
    assert torch.equal(written(base.fp32("exp"), torch.exp_, x), x.float().exp().bfloat16())
    assert torch.equal(written(base.low("exp"), torch.Tensor.exp_, wide), wide.to(low).exp().float())
    assert torch.equal(written(base.low("add"), torch.Tensor.__iadd__, wide, wide), (2 * wide.to(low)).float())
    assert torch.equal(written(base.fp32_math("log"), torch.ops.aten.log_, x), x.float().log().bfloat16()) or level in (
        "O0",
        "O3",
    )
    assert torch.equal(
        written(base.promote("lerp"), torch.Tensor.lerp_, x, wide, 0.5), x.float().lerp(wide, 0.5).bfloat16()
    )
    assert torch.equal(written(base.low("relu"), torch.relu_, wide - 1), (wide - 1).to(low).relu().float())
    with mezzo.autocast(base.ban("exp"), "cpu"):
        for call in (x.exp_, lambda: torch.exp_(x), lambda: torch.exp(x)):
            with refused(UnsupportedError, "exp is banned under this policy"):
                call()
        assert torch.equal(x.log(), x.log())
    given = torch.zeros(50)
    with mezzo.autocast(base.low("exp"), "cpu"):
        torch.exp(wide, out=given)
    treated = wide.to(low).exp().float() if base.casts else wide.exp()  # where compiled code cannot be told
    assert torch.equal(given, treated)
    assert ("is idle there" in base.low("exp").explain("aten::exp.out").reason) is not base.casts


def test_a_rule_on_an_op_in_a_module_holds_for_its_in_place_form_there():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ReLU(inplace=True), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.a(x.clone()), self.b(x.clone())

    model, x = Two(), torch.linspace(-1, 1, 9)
    handle = mezzo.prepare(model, "O1,bf16,low=relu@a")
    with handle.autocast():
        a, b = model(x)
    assert a.dtype == b.dtype == torch.float32
    assert torch.equal(a, x.bfloat16().relu().float())
    assert torch.equal(b, x.relu())
    handle.remove()


#: What is told to write in place, with other arguments.
TOLD = {
    functional.relu: (), functional.leaky_relu: (0.1,), functional.elu: (), functional.silu: (), functional.mish: (),
    functional.dropout: (1.0, True), functional.threshold: (0.1, 2.0), functional.hardtanh: (), functional.celu: (),
}  # fmt: skip


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("treatment", ["low", "fp32"])
def test_what_is_told_to_write_in_place_writes_into_what_it_is_given(treatment, way):
    """Not into a cast of it, though the result is all that most programs read."""
    for function, args in TOLD.items():
        op = function.__name__.strip("_")
        policy = Policy.parse(f"O1,bf16,{treatment}={op}")
        given = torch.linspace(-1, 1, 9).to(torch.float32 if treatment == "low" else torch.bfloat16)
        right = function(given.to(torch.bfloat16 if treatment == "low" else torch.float32), *args).to(given.dtype)

        def run(x, function=function, args=args):
            function(x, *args, inplace=True)
            return x

        call = run if way == "eager" else torch.compile(run, backend=way, fullgraph=True)
        with mezzo.autocast(policy, "cpu"):
            x = given.clone()
            torch.compiler.reset()
            call(x)
        assert torch.equal(x, right), op


def test_the_sums_of_a_rule_are_its_own():
    ones = torch.ones(600).bfloat16()
    index = torch.zeros(600, dtype=torch.long)
    for rule, count in (("fp32", 600.0), ("native", 256.0), ("low", 256.0)):
        policy = Policy.parse(f"O1,bf16,{rule}=index_add")
        sums = written(policy, torch.Tensor.index_add_, torch.zeros(2).bfloat16(), 0, index, ones)
        assert sums.tolist() == [count, 0.0], rule


def test_torch_s_own_lists_and_levels_without_regions_leave_writers_alone():
    for policy in ("O1,bf16,lists=device", "O3,bf16", "O0"):
        with mezzo.autocast(policy, "cpu"):
            with pytest.raises(RuntimeError, match="same scalar type"):
                torch.zeros(4).index_add_(0, ROWS, torch.ones(2).bfloat16())
            with pytest.raises(RuntimeError, match="source and destination dtypes match"):
                torch.zeros(4)[MASK] = torch.ones(2).bfloat16()
    for device_type in ("cuda", "xpu"):
        assert Policy.O1("bfloat16").explain("index_add_", device_type=device_type).treatment == "native"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports
def test_what_compiled_code_writes_by_out_is_no_program_s(backend):
    """Inductor calls ``torch.mm(a, b, out=…)`` at run time, under the region around."""
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for policy in ("O1,bf16,ban=mm+addmm", "O1,bf16,fp32=linear,low=mm+addmm"):
        with mezzo.autocast(policy, "cpu"):
            assert torch.allclose(compiled(x).float(), layer(x).float(), atol=2e-2 if "ban" in policy else 1e-6)


# Autograd, views and other tensors ------------------------------------------------------------------------------


@EVERY
def test_what_torch_refuses_is_refused_in_its_words(policy):
    leaf, low = torch.zeros(4, requires_grad=True), Policy.parse(policy).dtype
    source = torch.ones(2, dtype=low)
    with mezzo.autocast(policy, "cpu"):
        for write in (lambda: leaf.index_add_(0, ROWS, source), lambda: leaf.index_put_((ROWS,), source)):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                write()
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.zeros(1, dtype=low).expand(4).index_add_(0, ROWS, source)
        with pytest.raises(IndexError):
            torch.zeros(4)[torch.tensor([7])] = source[:1]
        y = torch.ones(4, requires_grad=True).to(low)
        out = (y * y).sum()
        y.index_add_(0, ROWS, source.float())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@EVERY
def test_views_versions_and_derivatives_are_those_of_the_plain_program(policy):
    low = Policy.parse(policy).dtype

    def program(a, b, dtype):
        x = a.to(dtype) * 1
        view = x[:, 1:].T
        before = x._version
        view.index_add_(0, torch.tensor([0, 0]), b.T[:2])
        x[torch.tensor([1])] = b[:1, :3]
        x.diagonal().lerp_(b.diagonal()[:3], 0.25)
        assert x._version > before
        return x

    a, b = (torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    right = torch.autograd.functional.jacobian(lambda a, b: program(a, b, torch.float64).sin(), (a, b))
    a, b = (x.float().requires_grad_() for x in (a, b))
    for dtype, other in itertools.product((torch.float32, low), repeat=2):

        def run(a, b, dtype=dtype, other=other):
            return program(a, b.to(other), dtype)

        with mezzo.autocast(policy, "cpu"):
            out = run(a, b)
            assert out.dtype == dtype
            blocks = torch.autograd.functional.jacobian(lambda a, b: run(a, b).float().sin(), (a, b))
            for mine, theirs in zip(blocks, right, strict=True):
                torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=8 * torch.finfo(low).eps)
            (first,) = torch.autograd.grad(out.float().sin().sum(), a, create_graph=True)
            first.square().sum().backward()
            assert a.grad.isfinite().all()


@pytest.mark.parametrize("policy", ["O1,bf16", "O1,fp16"])
def test_transforms_and_inference_mode(policy):
    low = Policy.parse(policy).dtype

    def program(x, y):
        x = x.clone()
        x.index_add_(0, ROWS, y)
        x[ROWS] = x[ROWS] + y
        return x.index_copy(0, ROWS, y * 2).sum() + x.exp_().sum()

    x, y = torch.randn(3, 4), torch.randn(3, 2)
    right = torch.func.vmap(torch.func.grad(program, argnums=(0, 1)))(x, y)
    with mezzo.autocast(policy, "cpu"):
        for dtypes in itertools.product((torch.float32, low), repeat=2):
            args = [operand.to(dtype) for operand, dtype in zip((x, y), dtypes, strict=True)]
            gradients = torch.func.vmap(torch.func.grad(program, argnums=(0, 1)))(*args)
            for mine, theirs in zip(gradients, right, strict=True):
                close(mine, theirs, low)
            close(torch.func.functionalize(program)(args[0][0], args[1][0]), program(x[0], y[0]), low)
            with torch.inference_mode():
                copied = args[0][0].clone()
                copied[ROWS] = args[1][0]
                close(copied, x[0].index_copy(0, ROWS, y[0]), low)
    assert torch.equal(right[0], right[0])


def test_of_other_dtypes_nothing_is_cast():
    source = torch.ones(2, dtype=torch.bfloat16)
    with mezzo.autocast("O1,bf16", "cpu"):
        double = torch.zeros(4, dtype=torch.float64)
        double[ROWS] = source
        assert double.index_add_(0, ROWS, source.double()).tolist() == [2, 0, 2, 0]
        half = torch.zeros(4, dtype=torch.bfloat16)
        half[ROWS] = torch.full((2,), 3.0, dtype=torch.float64)  # as copy_ and slices take it
        assert half.tolist() == [3, 0, 3, 0]
        counts = torch.zeros(4, dtype=torch.long)
        counts[ROWS] = torch.tensor([5, 6])
        counts.pow_(2)
        assert counts.tolist() == [36, 0, 25, 0]
        with pytest.raises(RuntimeError, match="dtypes match"):
            counts[ROWS] = source
        waves = torch.zeros(4, dtype=torch.complex64)
        waves[0] = source[0]
        waves.exp_()
        assert waves.real.sum().isclose(torch.tensor(3 + 2.7182818))


@pytest.mark.parametrize("policy", ["O1,bf16,fp32_param=token", "O2,bf16,fp32_param=token", "O3,bf16,fp32_param=token"])
def test_what_reads_a_parameter_under_a_rule_writes_into_what_it_is_given(policy):
    """Not into a copy, in which the write would be lost."""
    writes = {
        "mask": lambda h, p: h.__setitem__(MASK, p), "row": lambda h, p: h.__setitem__(1, p), "add": torch.Tensor.add_,
        "copy": torch.Tensor.copy_, "put": lambda h, p: h.index_put_((ROWS,), p.expand(2, 4)),
        "lerp": lambda h, p: h.lerp_(p.expand(4, 4), 0.5),
        "out": lambda h, p: torch.add(h.detach(), p.detach(), out=h.detach()),
        "sum": lambda h, p: h.index_add_(0, ROWS, p.expand(2, 4)), "aten": lambda h, p: torch.ops.aten.add_(h, p),
    }  # fmt: skip
    for name, write in writes.items():

        def program(model, h, write=write):
            h = h.clone()
            kept = h.view(4, 4)
            write(h, model.token)
            return kept

        model, x = Writer(program), torch.randn(4, 4)
        right = copy.deepcopy(model)(x)
        handle = mezzo.prepare(model, policy)
        with handle.autocast():
            out = model(x.bfloat16() if policy.startswith("O3") else x)
        close(out, right, torch.bfloat16, name)
        handle.remove()


def test_movers_are_ops_that_have_an_in_place_form():
    assert all(in_place_forms(op) for op in MOVES)
    assert not MOVES & VIEWS
