"""What a checkpoint recomputes is under the policy: modules by themselves, functions where one says so."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import mezzo
from mezzo import Policy

POLICIES = [
    "O1,dtype=float16,emulate=true",
    "O1,dtype=bfloat16,emulate=true",
    "O1,dtype=bfloat16,emulate=false",
    "O1,dtype=bfloat16,emulate=false,fp32_math=softmax+exp",  # the dtypes agree without the region, the numbers do not
    "O2,dtype=bfloat16,emulate=true,fp32=softmax",
]
BF16 = Policy.O1("bfloat16", emulate=False)
#: Without and with reentry.
VARIANTS = [False, True]


def through_region(policy):
    """Return a backward pass as a session runs it."""
    return lambda loss: mezzo.autocast(policy, "cpu").run_backward(loss)


def bare(loss):
    loss.backward()


def inner(a, w):
    return (a @ w).softmax(-1)


def body(a, w):
    return inner(a, w).exp()


def data(policy):
    """Inputs and a weight, in what the policy stores weights in."""
    generator = torch.Generator().manual_seed(0)
    dtype = Policy.of(policy).param_dtype
    x, w = (torch.randn(size, generator=generator).to(dtype) for size in ((6, 8), (8, 8)))
    return x, w.requires_grad_()


def gradient(policy, run, backward=bare):
    x, w = data(policy)
    with mezzo.autocast(policy, "cpu"):
        loss = run(x, w).float().square().sum()
    backward(loss)
    return w.grad


def nested(a, w, reentrant):
    """Inside the outer checkpoint no op but the inner one's is treated by the policy."""
    return checkpoint(
        lambda b, v: checkpoint(inner, b, v, use_reentrant=reentrant).relu(), a, w, use_reentrant=reentrant
    )


WAYS = {
    "whole": (body, lambda a, w, reentrant: checkpoint(body, a, w, use_reentrant=reentrant)),
    "nested": (lambda a, w: inner(a, w).relu(), nested),
    "both levels": (
        body,
        lambda a, w, reentrant: checkpoint(
            lambda b, v: checkpoint(inner, b, v, use_reentrant=reentrant).exp(), a, w, use_reentrant=reentrant
        ),
    ),
    "sequential": (
        lambda a, w: torch.log1p(inner(a, w).exp()),
        lambda a, w, reentrant: checkpoint_sequential(
            [lambda b: inner(b, w), torch.exp, torch.log1p], 2, a.requires_grad_(), use_reentrant=reentrant
        ),
    ),
}


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_functions_are_recomputed_under_the_policy_of_the_region_s_backward(policy, way, reentrant):
    plain, recomputed = WAYS[way]
    mine = gradient(policy, lambda a, w: recomputed(a, w, reentrant), through_region(policy))
    assert torch.equal(mine, gradient(policy, plain))


@pytest.mark.parametrize("backward", ["bare", "through region"])
@pytest.mark.parametrize("policy", POLICIES)
def test_contexts_serve_functions_whatever_begins_the_backward_pass(policy, backward):
    def both(a, w):
        inside = checkpoint(inner, a, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts).exp()
        return checkpoint(torch.log1p, inside, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)

    mine = gradient(policy, both, bare if backward == "bare" else through_region(policy))
    assert torch.equal(mine, gradient(policy, lambda a, w: torch.log1p(inner(a, w).exp())))


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_functions_in_a_bare_backward_are_torchs(policy, reentrant):
    """What is documented of it, and what the tests above would not notice if torch restored function modes itself."""
    plain, recomputed = WAYS["whole"]
    try:
        assert not torch.equal(gradient(policy, lambda a, w: recomputed(a, w, reentrant)), gradient(policy, plain))
    except CheckpointError:
        assert not reentrant


# Modules of prepared models -----------------------------------------------------------------------------

MODEL_POLICIES = [
    *POLICIES,
    "O1,dtype=bfloat16,emulate=true,fp32_module=up",
    "O1,dtype=float16,emulate=true,low=softmax+gelu,fp32_module=norm",
    "O2,dtype=bfloat16,emulate=true,fp32_module=up",
    "O2,dtype=float16,emulate=false",
    "O2,dtype=bfloat16,emulate=false,autocast=true",
    "O1,dtype=bfloat16,emulate=true,fp32_param=down.weight",
    "O2,dtype=bfloat16,emulate=true,fp32_param=up.weight",
]


class Block(nn.Module):
    """Products, a norm and an exponential in the forward pass of one module."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))).softmax(-1).exp())


def parts(model, x, how):
    """Each module by itself, between functions that a policy leaves alone."""
    return x + how(model.down, torch.relu(how(model.up, how(model.norm, x))))


CALLS = {
    "whole": (lambda model, x, how: how(model, x)),
    "parts": parts,
    "nested": lambda model, x, how: how(lambda y: torch.relu(how(model, y)), x),
    "sequence": lambda model, x, how: how(nn.Sequential(model, nn.ReLU(), model), x),
}


@pytest.mark.parametrize("call, reentrant", [(call, reentrant) for call in CALLS for reentrant in VARIANTS])
@pytest.mark.parametrize("policy", MODEL_POLICIES)
def test_modules_are_recomputed_under_their_policy_whatever_begins_the_backward_pass(policy, call, reentrant):
    def gradients(how, through_region=False):
        torch.manual_seed(0)
        model, x = Block(), torch.randn(4, 8).requires_grad_()
        with mezzo.prepare(model, policy).autocast() as region:
            loss = CALLS[call](model, x, how).float().square().sum()
        (region.run_backward if through_region else bare)(loss)
        return [x.grad, *(param.grad for param in model.parameters())]

    expected = gradients(lambda part, x: part(x))
    for through_region in (False, True):
        found = gradients(lambda part, x: checkpoint(part, x, use_reentrant=reentrant), through_region)
        for mine, plain in zip(found, expected, strict=True):
            assert (mine is None) == (plain is None)
            assert mine is None or torch.equal(mine, plain)


class Attention(nn.Module):
    """Recomputes a part of its own, for which no rule is but the one for all of it."""

    def __init__(self, how):
        super().__init__()
        self.product, self.softmax, self.how = nn.Linear(8, 8), nn.Softmax(-1), how

    def forward(self, x):
        return self.how(self.softmax, self.product(x)).exp()


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true,low=softmax@1", "O2,dtype=float16,fp32=softmax@1"])
def test_a_part_of_a_module_with_a_rule_is_recomputed_under_that_rule(policy, reentrant):
    def gradients(how, through_region=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Attention(how))
        with mezzo.prepare(model, policy).autocast() as region:
            loss = model(torch.randn(4, 8)).float().square().sum()
        (region.run_backward if through_region else bare)(loss)
        return [param.grad for param in model.parameters()]

    expected = gradients(lambda part, x: part(x))
    for through_region in (False, True):
        found = gradients(lambda part, x: checkpoint(part, x, use_reentrant=reentrant), through_region)
        assert all(map(torch.equal, found, expected)), through_region


class Scaled(nn.Module):
    """Reads a parameter that a rule pins, and nothing else that a policy treats."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def body(self, a):
        return (a * self.scale).sigmoid() * self.scale

    def forward(self, a, how):
        return how(self.body, a)


@pytest.mark.parametrize("emulate", ["true", "false"])
@pytest.mark.parametrize("reentrant", VARIANTS)
def test_rules_on_parameters(reentrant, emulate):
    def gradients(how):
        torch.manual_seed(0)
        model = nn.Sequential(Scaled())
        handle = mezzo.prepare(model, f"O2,dtype=bfloat16,emulate={emulate},fp32_param=*.scale")
        with handle.autocast() as region:
            loss = model[0](torch.ones(2, 8).bfloat16().requires_grad_(), how).float().square().sum()
        region.run_backward(loss)
        return model[0].scale.grad

    recomputed = gradients(lambda f, a: checkpoint(f, a, use_reentrant=reentrant))
    assert torch.equal(recomputed, gradients(lambda f, a: f(a)))


# Where the region ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("outer", [BF16.low("log"), "O1,dtype=bfloat16,emulate=false,lists=device", None])
def test_a_region_inside_the_checkpoint_stays_where_it_is(outer, reentrant):
    """It is entered again by the function itself, and must not reach beyond its own block."""
    seen = []

    def partly(a, w):
        before = a.exp()
        with mezzo.autocast(BF16, "cpu"), torch.no_grad():
            torch.zeros(1)  # a switch of gradients that is not a checkpoint's
        with mezzo.autocast(BF16, "cpu"):
            within = (before @ w).softmax(-1)
        after = (within.bfloat16().softmax(-1), (before @ w).log())
        seen.append([t.dtype for t in (before, within, *after)])
        return after[0].float() + after[1].float()

    x, w = data(BF16)
    with mezzo.autocast(outer, "cpu") if outer else torch.enable_grad():
        loss = checkpoint(
            partly, x.bfloat16().requires_grad_(), w.bfloat16(), use_reentrant=reentrant, **_all(reentrant)
        )
    through_region(outer or "O0")(loss.sum())
    first, again = seen
    assert again == first
    assert first[1] == torch.float32
    assert first[0] == (torch.float32 if isinstance(outer, Policy) else torch.bfloat16)


def _all(reentrant):
    """Arguments that have the whole function recomputed."""
    return {} if reentrant else {"early_stop": False}


def test_the_innermost_of_several_regions_is_brought_back():
    """Alone, whatever else is active in the backward pass."""
    innermost = BF16.low("softmax").native("exp")

    def run(how, backward):
        x, w = data(BF16)
        with mezzo.autocast(BF16, "cpu"), mezzo.autocast(innermost, "cpu"):
            loss = how(x, w).float().square().sum()
        backward(loss)
        return w.grad

    for backward in (bare, through_region(BF16)):
        recomputed = run(
            lambda a, w: checkpoint(body, a, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts), backward
        )
        assert torch.equal(recomputed, run(body, bare))
        assert not torch.equal(recomputed, gradient(BF16, body))


def test_autocast_switched_off_inside_a_checkpoint_stays_off():
    def guarded(a, w):
        with torch.autocast("cpu", enabled=False):
            low = (a.bfloat16() @ w.bfloat16()).softmax(-1)
        return low.exp()

    plain = gradient(BF16, guarded)
    for reentrant in VARIANTS:
        again = gradient(
            BF16, lambda a, w, r=reentrant: checkpoint(guarded, a, w, use_reentrant=r), through_region(BF16)
        )
        assert torch.equal(again, plain)
    told = gradient(
        BF16, lambda a, w: checkpoint(guarded, a, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)
    )
    assert torch.equal(told, plain)


@pytest.mark.parametrize("contexts", [{}, {"context_fn": mezzo.checkpoint_contexts}])
def test_nothing_is_left_behind(contexts):
    """Neither a mode, nor a hook, nor, once the graph is gone, the memory of a checkpoint."""

    def run(region):
        x, w = data(BF16)
        hidden = (x @ w).detach().requires_grad_()
        gone = weakref.ref(hidden)
        with region:
            loss = checkpoint(body, hidden, w, use_reentrant=False, **contexts).sum()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        (through_region(BF16) if isinstance(region, mezzo.autocast) else bare)(loss)
        assert torch.overrides._get_current_function_mode_stack() == []
        del loss, hidden
        return gone

    gc.collect()
    gc.disable()
    try:
        assert run(torch.autocast("cpu", dtype=torch.bfloat16))() is None  # torch's own
        assert run(mezzo.autocast(BF16, "cpu"))() is None
    finally:
        gc.enable()


# Other options of torch's --------------------------------------------------------------------------------


OPTIONS = {
    "no early stop": lambda a, w: checkpoint(body, a, w, use_reentrant=False, early_stop=False),
    "no tensor argument": lambda a, w: checkpoint(lambda: body(a, w), use_reentrant=False),
    "keyword arguments": lambda a, w: checkpoint(lambda a, w: body(a, w), use_reentrant=False, a=a, w=w),
    "no determinism check": lambda a, w: checkpoint(body, a, w, use_reentrant=False, determinism_check="none"),
    "contexts as well": lambda a, w: checkpoint(
        body, a, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts
    ),
    "saved on the CPU inside": lambda a, w: checkpoint(on_cpu, a, w, use_reentrant=False),
    "selective": lambda a, w: checkpoint(body, a, w, use_reentrant=False, context_fn=selective),
}  # fmt: skip


def on_cpu(a, w):
    with save_on_cpu():
        hidden = inner(a, w)
    return hidden.exp()


def selective():
    def keep_products(ctx, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep_products)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_options_of_checkpoints(policy, option):
    assert torch.equal(gradient(policy, OPTIONS[option], through_region(policy)), gradient(policy, body))


def test_debug_once_in_a_process():
    """A second time torch's own logging mode makes ``a @ b`` raise under pytest, without any region."""
    debugged = gradient(
        BF16, lambda a, w: checkpoint(body, a, w, use_reentrant=False, debug=True), through_region(BF16)
    )
    assert torch.equal(debugged, gradient(BF16, body))


def test_a_graph_that_is_kept_is_recomputed_each_time():
    x, w = data(BF16)
    with mezzo.autocast(BF16, "cpu") as region:
        loss = checkpoint(body, x, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts).float().square().sum()
        other = checkpoint(body, x, w, use_reentrant=False).float().square().sum()
    expected = gradient(BF16, body)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, w, retain_graph=True)[0], expected)
        assert torch.equal(region.run_grad(other, [w], retain_graph=True)[0], expected)


def test_early_stop_switched_off_for_all():
    with set_checkpoint_early_stop(False):
        recomputed = gradient(BF16, lambda a, w: checkpoint(body, a, w, use_reentrant=False), through_region(BF16))
    assert torch.equal(recomputed, gradient(BF16, body))


def test_gradients_switched_off_need_no_checkpoint():
    x, w = data(BF16)
    with mezzo.autocast(BF16, "cpu"), torch.no_grad():
        assert torch.equal(checkpoint(body, x, w, use_reentrant=False), body(x, w))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose backward pass runs in another thread")
@pytest.mark.parametrize("reentrant", VARIANTS)
def test_a_backward_pass_in_a_thread_of_autograd_s(reentrant):
    policy = Policy.O1("bfloat16").low("softmax").fp32("mm")

    def run(how):
        x, w = (t.detach().cuda() for t in data(policy))
        with mezzo.autocast(policy) as region:
            loss = how(x, w.requires_grad_()).float().square().sum()
        region.run_backward(loss)
        return w.grad

    assert torch.equal(run(lambda a, w: checkpoint(body, a, w, use_reentrant=reentrant)), run(body))
