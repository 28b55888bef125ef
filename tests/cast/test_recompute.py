"""What a checkpoint recomputes is under the policy: modules by themselves, functions where one says so."""

import contextlib
import functools
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import mezzo
from mezzo import Policy

from .models import Block, Looped, Tied, assert_same, data, plainly, seeded

POLICIES = [
    "O1,dtype=float16,emulate=true",
    "O1,dtype=bfloat16,emulate=false,fp32_math=softmax+exp",  # the dtypes agree without the region, the numbers do not
    "O2,dtype=bfloat16,emulate=true,fp32=softmax",
]
BF16 = Policy.O1("bfloat16", emulate=False)
#: Without and with reentry.
VARIANTS = [False, True]
CONTEXTS = {"use_reentrant": False, "context_fn": mezzo.checkpoint_contexts}


def through_region(policy):
    """Return a backward pass as a session runs it."""
    return lambda loss: mezzo.autocast(policy, "cpu").run_backward(loss)


def bare(loss):
    loss.backward()


def inner(a, w):
    return (a @ w).softmax(-1)


def body(a, w):
    return inner(a, w).exp()


def operands(policy):
    """Inputs and a weight, in what the policy stores weights in."""
    dtype = Policy.of(policy).param_dtype
    return data(6, 8).to(dtype), data(8, 8, seed=2).to(dtype).requires_grad_()


def gradient(policy, run, backward=bare):
    x, w = operands(policy)
    with mezzo.autocast(policy, "cpu"):
        loss = run(x, w).float().square().sum()
    backward(loss)
    return w.grad


def nested(last):
    def run(a, w, reentrant):
        """With ``relu`` no op inside the outer checkpoint but the inner one's is treated by the policy."""
        again = {"use_reentrant": reentrant}
        return checkpoint(lambda b, v: last(checkpoint(inner, b, v, **again)), a, w, **again)

    return run


def sequential(a, w, reentrant):
    steps = [lambda b: inner(b, w), torch.exp, torch.log1p]
    return checkpoint_sequential(steps, 2, a.requires_grad_(), use_reentrant=reentrant)


WAYS = {
    "whole": (body, lambda a, w, reentrant: checkpoint(body, a, w, use_reentrant=reentrant)),
    "nested": (lambda a, w: inner(a, w).relu(), nested(torch.relu)),
    "both levels": (body, nested(torch.exp)),
    "sequential": (lambda a, w: torch.log1p(inner(a, w).exp()), sequential),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_functions_are_recomputed_under_the_policy_of_the_region_s_backward(policy):
    for (way, (plain, recomputed)), reentrant in itertools.product(WAYS.items(), VARIANTS):
        mine = gradient(policy, lambda a, w: recomputed(a, w, reentrant), through_region(policy))  # noqa: B023
        assert torch.equal(mine, gradient(policy, plain)), (way, reentrant)


@pytest.mark.parametrize("policy", POLICIES)
def test_contexts_serve_functions_whatever_begins_the_backward_pass(policy):
    def both(a, w):
        return checkpoint(torch.log1p, checkpoint(inner, a, w, **CONTEXTS).exp(), **CONTEXTS)

    for backward in (bare, through_region(policy)):
        mine = gradient(policy, both, backward)
        assert torch.equal(mine, gradient(policy, lambda a, w: torch.log1p(inner(a, w).exp())))


# Modules of prepared models -----------------------------------------------------------------------------


MODEL_POLICIES = [
    "O1,dtype=bfloat16,emulate=false,fp32_math=softmax+exp",  # the dtypes agree without the region, the numbers do not
    "O1,dtype=float16,emulate=true,low=softmax+gelu,fp32_module=norm",
    "O2,dtype=bfloat16,emulate=true,fp32_module=up",
    "O2,dtype=float16,emulate=false",
    "O1,dtype=bfloat16,emulate=true,fp32_param=down.weight",
    "O2,dtype=bfloat16,emulate=true,fp32_param=up.weight",
]


#: Whole, by parts between functions that a policy leaves alone, nested, and twice in a sequence.
CALLS = {
    "whole": lambda model, x, how: how(model, x),
    "parts": lambda model, x, how: x + how(model.down, torch.relu(how(model.up, how(model.norm, x)))),
    "nested": lambda model, x, how: how(lambda y: torch.relu(how(model, y)), x),
    "sequence": lambda model, x, how: how(nn.Sequential(model, nn.ReLU(), model), x),
}


@pytest.mark.parametrize("policy", MODEL_POLICIES)
def test_modules_are_recomputed_under_their_policy_whatever_begins_the_backward_pass(policy):
    def gradients(call, how, begin):
        model, x = seeded(Block), data(4, 8).requires_grad_()
        with mezzo.prepare(model, policy).autocast() as region:
            loss = CALLS[call](model, x, how).float().square().sum()
            if begin == "inside":
                loss.backward()
        if begin != "inside":
            (region.run_backward if begin == "through region" else bare)(loss)
        return [grad for tensor in (x, *model.parameters()) if (grad := tensor.grad) is not None]

    for call in CALLS:
        expected = gradients(call, lambda part, x: part(x), "bare")
        for begin, reentrant in itertools.product(("bare", "through region", "inside"), VARIANTS):
            recomputed = gradients(call, lambda part, x: checkpoint(part, x, use_reentrant=reentrant), begin)  # noqa: B023
            assert_same(recomputed, expected)


class Attention(nn.Module):
    """Recomputes a part of its own, for which no rule is but the one for all of it."""

    def __init__(self, how):
        super().__init__()
        self.product, self.softmax, self.how = nn.Linear(8, 8), nn.Softmax(-1), how

    def forward(self, x):
        return self.how(self.softmax, self.product(x)).exp()


class Scaled(nn.Module):
    """Reads a parameter that a rule pins in a method of its own."""

    def __init__(self, how):
        super().__init__()
        self.scale, self.how = nn.Parameter(torch.rand(8)), how

    def body(self, a):
        return (a * self.scale).sigmoid() * self.scale

    def forward(self, a):
        return self.how(self.body, a)


RULES = [
    (Attention, "O1,dtype=bfloat16,emulate=true,low=softmax@1", True),
    (Attention, "O2,dtype=float16,fp32=softmax@1", True),
    (Scaled, "O2,dtype=bfloat16,emulate=true,fp32_param=*.scale", False),  # of a method no module's hook speaks
    (Scaled, "O2,dtype=bfloat16,emulate=false,fp32_param=*.scale", False),
]


@pytest.mark.parametrize("build, policy, bare_too", RULES)
def test_a_part_of_a_module_with_a_rule_is_recomputed_under_that_rule(build, policy, bare_too):
    def gradients(how, is_bare=False):
        model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), build(how)))
        with mezzo.prepare(model, policy).autocast() as region:
            loss = model(data(4, 8)).float().square().sum()
        (bare if is_bare else region.run_backward)(loss)
        return [param.grad for param in model.parameters()]

    expected = gradients(lambda part, x: part(x))
    for reentrant, is_bare in itertools.product(VARIANTS, (False, True) if bare_too else (False,)):
        recomputed = gradients(lambda part, x: checkpoint(part, x, use_reentrant=reentrant), is_bare)  # noqa: B023
        assert all(map(torch.equal, recomputed, expected)), (reentrant, is_bare)


# Sessions -----------------------------------------------------------------------------------------------


def in_another_thread(amp, loss):
    raised = []

    def run():
        try:
            amp.backward(loss)
        except BaseException as error:  # threading would only print it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == []


def session_gradients(policy, build, how, *, whole, backward):
    model = seeded(lambda: build(plainly if whole else how))
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    x = data(4, build.width).requires_grad_()
    with amp.autocast():
        loss = (how(model, x) if whole else model(x)).float().square().mean()
    backward(amp, loss)
    return [x.grad, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize(
    "policy",
    ["O1,dtype=float16,emulate=true,loss_scale=16,fp32_math=matmul,low=softmax", "O2,dtype=bfloat16,emulate=true"],
)
def test_a_session_s_gradients_are_those_of_the_plain_run(policy):
    """Where a weight is used several times, too: but for reentry around some of a weight's uses, which torch adds in
    another order, in FP32 as well."""
    run = mezzo.MixedPrecision.backward
    for build, whole, reentrant in itertools.product((Block, Looped, Tied), (True, False), VARIANTS):
        if (build, whole, reentrant) == (Tied, False, True):
            continue
        expected = session_gradients(policy, build, plainly, whole=False, backward=run)
        for backward in (run, in_another_thread):
            again = lambda function, x: checkpoint(function, x, use_reentrant=reentrant)  # noqa: E731, B023
            assert_same(session_gradients(policy, build, again, whole=whole, backward=backward), expected)


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

    x, w = operands(BF16)
    whole = {} if reentrant else {"early_stop": False}
    with mezzo.autocast(outer, "cpu") if outer else torch.enable_grad():
        loss = checkpoint(partly, x.bfloat16().requires_grad_(), w.bfloat16(), use_reentrant=reentrant, **whole)
    through_region(outer or "O0")(loss.sum())
    first, again = seen
    assert again == first
    assert first[1] == torch.float32
    assert first[0] == (torch.float32 if isinstance(outer, Policy) else torch.bfloat16)


def test_the_innermost_of_several_regions_is_brought_back():
    """Alone, whatever else is active in the backward pass."""
    innermost = BF16.low("softmax").native("exp")

    def run(how, backward):
        x, w = operands(BF16)
        with mezzo.autocast(BF16, "cpu"), mezzo.autocast(innermost, "cpu"):
            loss = how(x, w).float().square().sum()
        backward(loss)
        return w.grad

    for backward in (bare, through_region(BF16)):
        recomputed = run(lambda a, w: checkpoint(body, a, w, **CONTEXTS), backward)
        assert torch.equal(recomputed, run(body, bare))
        assert not torch.equal(recomputed, gradient(BF16, body))


def test_autocast_switched_off_inside_a_checkpoint_stays_off():
    def guarded(a, w):
        with torch.autocast("cpu", enabled=False):
            low = (a.bfloat16() @ w.bfloat16()).softmax(-1)
        return low.exp()

    plain = gradient(BF16, guarded)
    for given, backward in (({"use_reentrant": False}, through_region(BF16)), (CONTEXTS, bare),
                            ({"use_reentrant": True}, through_region(BF16))):  # fmt: skip
        again = gradient(BF16, lambda a, w: checkpoint(guarded, a, w, **given), backward)  # noqa: B023
        assert torch.equal(again, plain)


@pytest.mark.parametrize("contexts", [{}, {"context_fn": mezzo.checkpoint_contexts}])
def test_nothing_is_left_behind(contexts):
    """Neither a mode, nor a hook, nor, once the graph is gone, the memory of a checkpoint."""

    def run(region):
        x, w = operands(BF16)
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


# Other options of torch's -------------------------------------------------------------------------------


OPTIONS = {
    "no early stop": lambda a, w: checkpoint(body, a, w, use_reentrant=False, early_stop=False),
    "no tensor argument": lambda a, w: checkpoint(lambda: body(a, w), use_reentrant=False),
    "keyword arguments": lambda a, w: checkpoint(lambda a, w: body(a, w), use_reentrant=False, a=a, w=w),
    "contexts as well": lambda a, w: checkpoint(body, a, w, **CONTEXTS),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_options_of_checkpoints(policy):
    expected = gradient(policy, body)
    for option, run in OPTIONS.items():
        assert torch.equal(gradient(policy, run, through_region(policy)), expected), option


def test_a_graph_that_is_kept_is_recomputed_each_time():
    x, w = operands(BF16)
    with mezzo.autocast(BF16, "cpu") as region:
        loss = checkpoint(body, x, w, **CONTEXTS).float().square().sum()
        other = checkpoint(body, x, w, use_reentrant=False).float().square().sum()
    expected = gradient(BF16, body)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, w, retain_graph=True)[0], expected)
        assert torch.equal(region.run_grad(other, [w], retain_graph=True)[0], expected)


# Selective checkpoints ------------------------------------------------------------------------------------

ATEN = torch.ops.aten
PRODUCTS = [ATEN.mm.default, ATEN.addmm.default]
#: What is saved: the rest is recomputed, beside what was saved.
SAVED = {
    "products": PRODUCTS,
    "casts and products": [*PRODUCTS, ATEN._to_copy.default, ATEN._lazy_clone.default],
    "all but products": lambda _, op, *args, **kwargs: (
        CheckpointPolicy.PREFER_RECOMPUTE if op in PRODUCTS else CheckpointPolicy.MUST_SAVE
    ),
    "all": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
}
#: Where a weight is used that the checkpointed body uses: a cast of it may be there already when the body runs.
USES = ["inside", "before", "twice inside", "before and after"]


class Shared(nn.Module):
    """Uses one weight inside of a checkpointed body, and outside of it."""

    def __init__(self, use, how):
        super().__init__()
        self.use, self.how = use, how
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def body(self, x):
        hidden = self.first(x).sin()
        hidden = self.first(hidden).sin() if self.use == "twice inside" else hidden
        return (self.second(hidden) * 0.1).exp()

    def forward(self, x):
        hidden = self.first(x).tanh() if self.use.startswith("before") else x
        hidden = self.how(self.body, hidden)
        return self.first(hidden) if self.use.endswith("after") else hidden


@pytest.mark.parametrize("begin", ["region", "session"])
@pytest.mark.parametrize(
    "policy",
    ["O1,bf16,emulate=true", "O1,fp16,emulate=true", "O2,bf16,emulate=true", "O1,bf16,emulate=false,fp32=exp",
     "O2,fp16,emulate=true,fp32_param=second.weight"],
)  # fmt: skip
def test_no_cast_of_a_weight_is_an_operation_of_a_selective_checkpoint(policy, begin):
    """Its body and the recomputation are the same operations, whether the weight was cast before or not."""

    def gradients(use, how):
        model, x = seeded(lambda: Shared(use, how)), data(4, 8)
        if begin == "region":
            with mezzo.prepare(model, policy).autocast() as region:
                loss = model(x).float().square().mean()
            region.run_backward(loss)
        else:
            amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{policy},loss_scale=8")
            with amp.autocast():
                loss = model(x).float().square().mean()
            amp.backward(loss)
        return [param.grad.clone() for param in model.parameters()]

    for use in USES:
        expected = gradients(use, lambda body, x: body(x))
        for saved in SAVED.values():
            contexts = functools.partial(create_selective_checkpoint_contexts, saved)
            how = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
            assert_same(gradients(use, how), expected)


@pytest.mark.parametrize("is_inside", [False, True])
def test_other_modes_see_the_casts_of_weights_inside_a_selective_checkpoint(is_inside):
    model, seen = seeded(lambda: Shared("inside", None)), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend([args[0].shape] if func is ATEN._to_copy.default and isinstance(args[0], nn.Parameter) else [])
            return func(*args, **(kwargs or {}))

    def body(x):
        with Watch() if is_inside else contextlib.nullcontext():
            return model.body(x)

    contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    around = contextlib.nullcontext() if is_inside else Watch()
    with mezzo.prepare(model, "O1,bf16,emulate=true").autocast(), around:
        checkpoint(body, data(4, 8), use_reentrant=False, context_fn=contexts)
    assert seen == [model.first.weight.shape, model.first.bias.shape] * 2
