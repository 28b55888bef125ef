"""Checkpoints that began in a region are recomputed under it, in a bare ``loss.backward()`` too."""

import functools
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torchs
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
from mezzo.cast import recompute

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


def gradient(policy, run, backward=lambda loss: loss.backward()):
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
def test_a_bare_backward_gives_the_gradients_of_the_plain_run(policy, way, reentrant):
    plain, recomputed = WAYS[way]
    assert torch.equal(gradient(policy, lambda a, w: recomputed(a, w, reentrant)), gradient(policy, plain))


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_region_the_gradients_would_be_others(policy, reentrant, monkeypatch):
    """What the test above would not notice if torch did restore function modes by itself."""
    monkeypatch.setattr(recompute, "_run", lambda again, function, *args: function(*args))
    plain, recomputed = WAYS["whole"]
    try:
        assert not torch.equal(gradient(policy, lambda a, w: recomputed(a, w, reentrant)), gradient(policy, plain))
    except CheckpointError:
        assert not reentrant


@pytest.mark.parametrize("reentrant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_session_s_backward_takes_nothing_twice(policy, reentrant):
    """It keeps a mode of its own active, which must not act on top of the region that the checkpoint brings back."""

    def through_region(loss):
        mezzo.autocast(policy, "cpu").run_backward(loss)

    plain, recomputed = WAYS["both levels"]
    mine = gradient(policy, lambda a, w: recomputed(a, w, reentrant), through_region)
    assert torch.equal(mine, gradient(policy, plain))


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
        with handle.autocast():
            loss = model[0](torch.ones(2, 8).bfloat16().requires_grad_(), how).float().square().sum()
        loss.backward()
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
    loss.sum().backward()
    first, again = seen
    assert again == first
    assert first[1] == torch.float32
    assert first[0] == (torch.float32 if isinstance(outer, Policy) else torch.bfloat16)


def _all(reentrant):
    """Arguments that have the whole function recomputed."""
    return {} if reentrant else {"early_stop": False}


@pytest.mark.parametrize("backward", [torch.Tensor.backward, mezzo.autocast(BF16, "cpu").run_backward])
@pytest.mark.parametrize("reentrant", VARIANTS)
def test_the_innermost_of_several_regions_is_brought_back(reentrant, backward):
    """Alone, whatever else is active in the backward pass."""

    def run(how):
        x, w = data(BF16)
        with mezzo.autocast(BF16, "cpu"), mezzo.autocast(BF16.low("softmax").native("exp"), "cpu"):
            loss = how(x, w).float().square().sum()
        backward(loss)
        return w.grad

    recomputed = run(lambda a, w: checkpoint(body, a, w, use_reentrant=reentrant))
    assert torch.equal(recomputed, run(body))
    assert not torch.equal(recomputed, gradient(BF16, body))


def test_autocast_switched_off_inside_a_checkpoint_stays_off():
    def guarded(a, w):
        with torch.autocast("cpu", enabled=False):
            low = (a.bfloat16() @ w.bfloat16()).softmax(-1)
        return low.exp()

    plain = gradient(BF16, guarded)
    for reentrant in VARIANTS:
        again = gradient(BF16, lambda a, w, r=reentrant: checkpoint(guarded, a, w, use_reentrant=r))
        assert torch.equal(again, plain)


@pytest.mark.parametrize("reentrant", VARIANTS)
def test_nothing_is_left_behind(reentrant):
    """Neither a mode, nor a hook, nor, once the graph is gone, the memory of a checkpoint."""

    def run(region):
        x, w = data(BF16)
        hidden = (x @ w).detach().requires_grad_()
        gone = weakref.ref(hidden)
        with region:
            loss = checkpoint(body, hidden, w, use_reentrant=reentrant).sum()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        loss.backward()
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


def test_one_note_for_a_checkpoint_and_none_without_differences():
    records = []
    original = torchs._CheckpointFrame

    class Frame(original):
        def __init__(self, *args):
            super().__init__(*args)
            records.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_CheckpointFrame", Frame)
        x, w = data(BF16)
        for policy in (BF16.evolve(lists="device"), BF16):
            with mezzo.autocast(policy, "cpu"):
                checkpoint(body, x, w, use_reentrant=False)
    plain, noted = (record.recompute_fn for record in records)
    assert not isinstance(plain, functools.partial)
    assert noted.func is recompute._run
    assert not isinstance(noted.args[1], functools.partial)


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
    assert torch.equal(gradient(policy, OPTIONS[option]), gradient(policy, body))


def test_debug_once_in_a_process():
    """A second time torch's own logging mode makes ``a @ b`` raise under pytest, without any region."""
    debugged = gradient(BF16, lambda a, w: checkpoint(body, a, w, use_reentrant=False, debug=True))
    assert torch.equal(debugged, gradient(BF16, body))


@pytest.mark.parametrize("contexts", [torchs.noop_context_fn, mezzo.checkpoint_contexts])
def test_a_graph_that_is_kept_is_recomputed_each_time(contexts):
    x, w = data(BF16)
    with mezzo.autocast(BF16, "cpu"):
        loss = checkpoint(body, x, w, use_reentrant=False, context_fn=contexts).float().square().sum()
    first, second = (torch.autograd.grad(loss, w, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, gradient(BF16, body))
    assert torch.equal(first, second)


def test_early_stop_switched_off_for_all():
    with set_checkpoint_early_stop(False):
        recomputed = gradient(BF16, lambda a, w: checkpoint(body, a, w, use_reentrant=False))
    assert torch.equal(recomputed, gradient(BF16, body))


def test_a_mode_of_the_user_s_own_on_top():
    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for reentrant in VARIANTS:

        def watched(a, w, r=reentrant):
            with Watch():
                return checkpoint(body, a, w, use_reentrant=r)

        assert torch.equal(gradient(BF16, watched), gradient(BF16, body))


def test_gradients_switched_off_need_no_checkpoint():
    x, w = data(BF16)
    with mezzo.autocast(BF16, "cpu"), torch.no_grad():
        assert torch.equal(checkpoint(body, x, w, use_reentrant=False), body(x, w))


# What torch keeps where ----------------------------------------------------------------------------------


def test_torch_keeps_what_to_run_again_where_we_look():
    """If this fails, torch has changed: read its torch/utils/checkpoint.py, and then mezzo/cast/recompute.py."""
    record = torchs._CheckpointFrame(body, True, None, None)
    assert recompute._record_of(torchs._checkpoint_hook(record).pack_hook) is record
    forward = torchs.CheckpointFunction.forward.__code__
    assert (forward.co_qualname, forward.co_varnames[0]) == (recompute._REENTRANT, "ctx")
    assert recompute._record_of(save_on_cpu().pack_hook) is None


@pytest.fixture
def unknown_torch(caplog):
    """What is said about a torch that nobody here knows: once, in the log."""
    recompute._report_unknown_torch.cache_clear()
    caplog.set_level(logging.WARNING, "mezzo.cast.recompute")
    yield lambda: [record.getMessage() for record in caplog.records]
    recompute._report_unknown_torch.cache_clear()


def assert_says_what_to_write(messages):
    (text,) = messages
    assert text.startswith("activation checkpoints will not see the policy in a bare loss.backward()\n")
    assert f"torch {torch.__version__}" in text
    assert "write  amp.backward(loss); or" in text
    assert "checkpoint(fn, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)" in text


def test_a_torch_that_keeps_it_elsewhere_is_left_to_itself(monkeypatch, unknown_torch):
    known = torchs._checkpoint_hook

    class _checkpoint_hook(known):  # noqa: N801 - torch's name
        def __init__(self, record):
            super().__init__(record)
            pack = self.pack_hook

            def pack_hook(x):
                return pack(x)

            pack_hook.__module__, pack_hook.__qualname__ = pack.__module__, pack.__qualname__
            self.pack_hook = pack_hook

    monkeypatch.setattr(torchs, "_checkpoint_hook", _checkpoint_hook)
    recomputed = functools.partial(checkpoint, body, use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        gradient(BF16, recomputed)
    assert_says_what_to_write(unknown_torch())
    with_contexts = functools.partial(recomputed, context_fn=mezzo.checkpoint_contexts)
    assert torch.equal(gradient(BF16, with_contexts), gradient(BF16, body))
    with_session = gradient(BF16, recomputed, mezzo.autocast(BF16, "cpu").run_backward)
    assert torch.equal(with_session, gradient(BF16, body))
    assert len(unknown_torch()) == 1


def test_a_reentrant_checkpoint_without_a_record_is_left_to_itself(unknown_torch):
    lines = (
        "class CheckpointFunction:\n  def forward(self):\n    with torch.no_grad():\n      return torch.ones(2).exp()"
    )
    place = {"__name__": "torch.utils.checkpoint", "torch": torch}
    exec(lines, place)
    with mezzo.autocast(BF16, "cpu"):
        assert torch.equal(place["CheckpointFunction"]().forward(), torch.ones(2).exp())
    assert_says_what_to_write(unknown_torch())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose backward pass runs in another thread")
@pytest.mark.parametrize("reentrant", VARIANTS)
def test_a_backward_pass_in_a_thread_of_autograd_s(reentrant):
    policy = Policy.O1("bfloat16").low("softmax").fp32("mm")

    def run(how):
        x, w = (t.detach().cuda() for t in data(policy))
        with mezzo.autocast(policy):
            loss = how(x, w.requires_grad_()).float().square().sum()
        loss.backward()
        return w.grad

    assert torch.equal(run(lambda a, w: checkpoint(body, a, w, use_reentrant=reentrant)), run(body))
