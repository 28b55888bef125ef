"""Recomputed and compiled, a model gives the gradients of the plain eager run, bit for bit."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mezzo

from ..support.tables import pairwise

LEVELS, DTYPES, EMULATE = ("O1", "O2"), ("float16", "bfloat16"), ("true", "false")
POLICIES = [
    f"{level},dtype={dtype},emulate={emulate},loss_scale=128"
    for level in LEVELS
    for dtype in DTYPES
    for emulate in EMULATE
]


class Block(nn.Module):
    """Products, a normalisation, an exponential and a plain function: all kinds of ops a policy treats."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def body(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))).softmax(-1))

    def forward(self, x):
        return x + self.body(x)


class PlainlyCheckpointed(Block):
    """Recomputes a method, outside any module's hooks."""

    use_reentrant = False

    def forward(self, x):
        return x + checkpoint(self.body, x, use_reentrant=self.use_reentrant)


class Net(nn.Module):
    """Two blocks, run as ``how`` says: the model itself is always what is called."""

    def __init__(self, how, block):
        super().__init__()
        self.blocks, self.how = nn.Sequential(block(), block()), how

    def forward(self, x):
        return self.how(self.blocks, x)


def plainly(blocks, x):
    return blocks(x)


def gradients(policy, how=plainly, block=Block, wrap=lambda model: model):
    torch.manual_seed(0)
    model = Net(how, block)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with amp.autocast():
        loss = wrap(model)(x).float().square().mean()
    amp.backward(loss)
    return [x.grad, *(p.grad for p in model.parameters())]


def assert_equal(mine, theirs):
    assert all(gradient.isfinite().all() for gradient in theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


RECOMPUTED = {
    "whole": lambda blocks, x, reentrant: checkpoint(blocks, x, use_reentrant=reentrant),
    "sequential": lambda blocks, x, reentrant: checkpoint_sequential(blocks, 2, x, use_reentrant=reentrant),
    "nested": lambda blocks, x, reentrant: checkpoint(
        lambda y: blocks[1](checkpoint(blocks[0], y, use_reentrant=reentrant)), x, use_reentrant=reentrant
    ),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", RECOMPUTED)
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_activations(policy, how, reentrant):
    recomputed = gradients(policy, lambda blocks, x: RECOMPUTED[how](blocks, x, reentrant))
    assert_equal(recomputed, gradients(policy))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_plain_functions(policy, reentrant, monkeypatch):
    monkeypatch.setattr(PlainlyCheckpointed, "use_reentrant", reentrant)
    assert_equal(gradients(policy, block=PlainlyCheckpointed), gradients(policy))


@pytest.mark.filterwarnings("ignore:Dynamo")  # what it cannot trace it runs in Python
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of tensors at a graph break, read by Dynamo itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("level, dtype, emulate, backend", pairwise(LEVELS, DTYPES, EMULATE, ["eager", "aot_eager"]))
def test_compiled_models(level, dtype, emulate, backend):
    policy = f"{level},dtype={dtype},emulate={emulate},loss_scale=128"
    torch.compiler.reset()
    compiled = gradients(policy, wrap=lambda model: torch.compile(model, backend=backend))
    assert_equal(compiled, gradients(policy))


def test_backward_functions_of_the_user_s_own_see_no_autocast():
    """The mode that serves recomputation must not reach into a custom backward."""
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            seen.append((gradient.float() @ w.float().T).dtype)
            return seen and (gradient.float() @ w.float().T), x.float().T @ gradient.float()

    model = nn.Linear(4, 4)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,dtype=bfloat16,emulate=true")
    with amp.autocast():
        loss = Product.apply(torch.ones(2, 4), model.weight).float().sum()
    amp.backward(loss)
    assert seen == [torch.float32]


WHOLE_GRAPH = [
    "O1,dtype=bfloat16",
    "O1,dtype=float16,emulate=true",
    "O1,dtype=bfloat16,lists=device",
    "O1,dtype=bfloat16,low=softmax,fp32=gelu",
]


def whole_graph(policy, where, backend):
    """Compile with the region outside or inside; return the output, the eager one, and the counter of frames."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8)
    counter = CompileCounterWithBackend(backend)

    def inside(y):
        with mezzo.autocast(policy, "cpu"):
            return model(y)

    compiled = torch.compile(model if where == "outside" else inside, backend=counter, fullgraph=True)
    with mezzo.autocast(policy, "cpu"):
        expected = model(x)
        out = compiled(x)
    return out, expected, counter, compiled, x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports
@pytest.mark.parametrize(
    "policy, where, backend",
    [
        *pairwise(WHOLE_GRAPH, ["outside", "inside"], ["eager", "aot_eager"]),
        # Inductor's first compilation takes ten seconds where it has kept none yet.
        *(
            pytest.param(policy, where, "inductor", marks=pytest.mark.slow)
            for policy, where in itertools.product(WHOLE_GRAPH, ["outside", "inside"])
        ),
    ],
)
def test_one_graph_with_the_region_outside_or_inside(policy, where, backend):
    out, expected, counter, *_ = whole_graph(mezzo.Policy.parse(policy), where, backend)
    assert counter.frame_count == 1
    assert out.dtype == expected.dtype
    # inductor fuses: 4 units in the last place of the compute dtype, at values up to 4
    eps = torch.finfo(mezzo.Policy.parse(policy).dtype).eps
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=16 * eps if backend == "inductor" else 0)


def test_a_changed_policy_recompiles_and_an_equal_one_does_not():
    policy = mezzo.Policy.parse("O1,dtype=bfloat16,low=softmax")
    _, _, counter, compiled, x = whole_graph(policy, "outside", "eager")
    with mezzo.autocast(mezzo.Policy.parse(str(policy)), "cpu"):
        compiled(x)
    assert counter.frame_count == 1
    with mezzo.autocast(policy.fp32("gelu"), "cpu"):
        compiled(x)
    assert counter.frame_count == 2
    with mezzo.autocast(policy, "cpu"):
        compiled(x)
    assert counter.frame_count == 2


def test_a_policy_inside_compiled_code_is_read_anew_and_an_equal_one_compiles_nothing():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    x, counter, low = torch.randn(4, 8), CompileCounterWithBackend("eager"), mezzo.Policy.O1("bfloat16").low("exp")

    @torch.compile(backend=counter, fullgraph=True)
    def inside(y):
        with mezzo.autocast(policy, "cpu"):
            return torch.exp(y)

    seen = []
    for policy in (low, mezzo.Policy.parse(str(low)), low.fp32("exp"), low):  # noqa: B007 - inside reads it
        seen.append((inside(x).dtype, counter.frame_count))
    assert seen == [(torch.bfloat16, 1), (torch.bfloat16, 1), (torch.float32, 2), (torch.bfloat16, 2)]


@pytest.mark.parametrize("reason", ["it overflows", "it is slow"])
def test_equal_policies_keep_their_own_reasons(reason):
    policy = mezzo.Policy.O1("bfloat16", rules=[mezzo.Rule("ban", op="exp", reason=reason)])
    with mezzo.autocast(policy, "cpu"), pytest.raises(mezzo.UnsupportedError, match=rf"why +{reason}\n"):
        torch.exp(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it in frames that start with an activation
@pytest.mark.parametrize(
    "policy, pinned",
    [
        pytest.param(policy, pinned, marks=() if pinned is (number % 2 == 0) else pytest.mark.slow)
        for number, policy in enumerate([*WHOLE_GRAPH, "O2,dtype=bfloat16", "O2,dtype=float16,emulate=true", "O3"])
        for pinned in (False, True)
    ],
)
def test_new_tensors_compile_nothing_anew(policy, pinned):
    """Each batch is another tensor: nothing compiled may depend on which one it is."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    policy = mezzo.Policy.parse(policy)
    model = Block()
    handle = mezzo.prepare(
        model, policy.keep_fp32(modules=[next(iter(dict(model.named_children())))]) if pinned else policy
    )
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    counts = []
    for _ in range(4):
        with handle.autocast():
            compiled(torch.randn(4, 8)).float().sum().backward()
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[0]] * 3
