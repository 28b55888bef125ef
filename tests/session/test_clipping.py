"""Clipping of gradients that still carry the loss scale is noticed, and other edits are the user's right."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import MixedPrecision

SCALED = {
    "fp32 gradients": "O1,emulate=true",
    "no autocast": "O0,loss_scale=dynamic",
    "fp16 gradients": "O2,emulate=true",
    "fp16, small scale": "O2,emulate=true,loss_scale=dynamic(init=512)",
}
LIMITS = [0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0]
INF = float("inf")


def network(seed, width=16):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())
        return nn.Sequential(*hidden, nn.Linear(width, 3))


def session(policy, seed=0, width=16, **options):
    model = network(seed, width)
    return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01, **options), policy)


def backward(amp, model, generator, **options):
    x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss, **options)


def run(policy, edit, seed=0, steps=1, micro_batches=1, **options):
    """Return what each step that was taken said of its gradients, ``None`` for nothing."""
    model, amp = session(policy, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    said = []
    while len(said) < steps:
        for _ in range(micro_batches):
            backward(amp, model, generator)
            edit(model, generator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = amp.step()
        amp.zero_grad()
        if not step.skipped:
            said.append(str(caught[0].message) if caught else None)
    return said


# Clipping is noticed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_clipping_by_norm_is_noticed(policy, limit, foreach):
    """At once in nearly every run, and within a few steps in each: a factor can look like a user's choice by chance."""
    runs = [run(policy, lambda m, _: clip_grad_norm_(m.parameters(), limit, foreach=foreach), seed, steps=3)
            for seed in range(4)]  # fmt: skip
    assert all(any(said) for said in runs)
    assert sum(said[0] is not None for said in runs) >= 3
    for text in filter(None, (text for said in runs for text in said)):
        assert f"max_grad_norm={limit:g})" in text or "max_grad_norm=1.0)" in text


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("limit", [*LIMITS, 0.37, 1 / 3])
@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_clipping_by_value_is_noticed(policy, limit, foreach):
    for seed in range(2):
        (text,) = run(policy, lambda m, _: clip_grad_value_(m.parameters(), limit, foreach=foreach), seed)
        assert f"edited in place to {limit:.3g} since" in text


@pytest.mark.parametrize("policy", [policy for name, policy in SCALED.items() if name != "fp16 gradients"])
def test_models_of_many_parameters(policy):
    model = nn.Sequential(nn.Linear(8, 4), *(nn.Linear(4, 4) for _ in range(20)), nn.Linear(4, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.eye(*p.shape) if p.dim() > 1 else torch.zeros_like(p))
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    backward(amp, model, torch.Generator().manual_seed(0))
    clip_grad_norm_(model.parameters(), 2.0)
    with pytest.warns(UserWarning, match="edited in place to 2 since"):
        amp.step()


def test_what_the_warning_says_and_where():
    model, amp = session("O1,emulate=true")
    backward(amp, model, torch.Generator().manual_seed(0))
    clip_grad_norm_(model.parameters(), 0.5)
    with pytest.warns(UserWarning, match="clipped") as caught:
        amp.step()
    assert caught[0].filename == __file__
    assert str(caught[0].message).splitlines() == [
        "gradients were clipped while they still carry the loss scale",
        "  where  step 1, all gradients edited in place to 0.5 since amp.backward()",
        "  why    they are 65536 times too large there, so 0.5 clips them to 7.63e-06",
        "  write  MixedPrecision(…, max_grad_norm=0.5); or amp.unscale_(), and then "
        "torch.nn.utils.clip_grad_…(amp.master_params(), 0.5)",
    ]


def test_fp16_norms_that_overflow_clip_everything_to_zero():
    """torch takes the norm of FP16 gradients in FP16, where a scaled one is soon infinite."""
    (text,) = run("O2,emulate=true", lambda m, _: clip_grad_norm_(m.parameters(), 1.0), width=200)
    assert "edited in place to 0 since" in text
    assert "their float16 norm was infinite, and clipped them to 0" in text


@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_clipping_after_each_micro_batch(policy):
    said = run(policy, lambda m, _: clip_grad_norm_(m.parameters(), 1.0), steps=4, micro_batches=3)
    assert sum(text is not None for text in said) >= 3


def test_clipping_the_gradients_of_one_of_two_optimizers():
    model = network(0)
    pair = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[5])]
    amp = MixedPrecision(model, pair, "O1,emulate=true")
    backward(amp, model, torch.Generator().manual_seed(0), optimizers=pair[0])
    clip_grad_norm_(model[0].parameters(), 1.0)
    with pytest.warns(UserWarning, match="still carry the loss scale"):
        amp.step(pair[0])


def test_sparse_gradients_among_others():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), "O1,emulate=true")
    with amp.autocast():
        loss = model(torch.tensor([[1, 2], [3, 4]])).float().square().sum()
    amp.backward(loss)
    for p in model[2].parameters():
        p.grad.mul_(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.step()


# Other edits are not ------------------------------------------------------------------------------------


def each(edit):
    return lambda model, generator: [edit(p.grad, generator) for p in model.parameters()]


def noise(like, generator):
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def divided_by_tokens(model, generator):
    count = int(torch.randint(20, 200, (), generator=generator))
    for p in model.parameters():
        p.grad.div_(count)


def decayed(model, _):
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.01)


OTHERS = {
    "halved": each(lambda g, _: g.mul_(0.5)),
    "a factor": each(lambda g, _: g.mul_(0.07)),
    "a third": each(lambda g, _: g.div_(3)),
    "micro-batches": each(lambda g, _: g.div_(12)),
    "tokens": divided_by_tokens,
    "twice": each(lambda g, _: g.mul_(0.3).mul_(0.7)),
    "larger": each(lambda g, _: g.mul_(1.0001)),
    "noise": each(lambda g, generator: g.add_(noise(g, generator), alpha=100)),
    "a little noise": each(lambda g, generator: g.add_(noise(g, generator), alpha=1e-4)),
    "halved, then noise": each(lambda g, generator: g.mul_(0.5).add_(noise(g, generator))),
    "dropout": each(lambda g, generator: g.mul_((noise(g, generator) > -1).to(g.dtype))),
    "each by its norm": each(lambda g, _: g.div_(g.norm() + 1)),
    "each clipped alone": lambda model, _: [clip_grad_norm_(p, 1.0) for p in model.parameters()],
    "centred": each(lambda g, _: g.sub_(g.mean())),
    "weight decay": decayed,
    "mended": each(lambda g, _: torch.nan_to_num(g, out=g)),
    "some of them": lambda model, _: clip_grad_norm_(model[0].parameters(), 1.0),
    "nothing to clip": lambda model, _: clip_grad_norm_(model.parameters(), 1e9),
    "replaced": lambda model, _: [setattr(p, "grad", p.grad * (1e-5 / 3)) for p in model.parameters()],
}


@pytest.mark.parametrize("edit", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_other_edits_are_the_user_s_right(policy, edit):
    assert [said for seed in range(3) for said in run(policy, edit, seed, steps=6)] == [None] * 18


@pytest.mark.parametrize("lowest, highest", [(1e-4, 1e-2), (0.5, 1.0)])
@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true"])
def test_factors_drawn_at_each_step_seldom_look_like_clipping(policy, lowest, highest):
    """In FP16 small ones do in 3 of 100: its norms are known to three digits, and round ones are no rarity then."""

    def edit(model, generator):
        factor = lowest * (highest / lowest) ** float(torch.rand((), generator=generator))
        for p in model.parameters():
            p.grad.mul_(factor)

    said = [text for seed in range(4) for text in run(policy, edit, seed, steps=50)]
    assert sum(text is not None for text in said) <= (12 if "O2" in policy and highest < 0.5 else 0)


@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_infinities_that_the_user_replaces_are_not_clipped(policy):
    model, amp = session(policy)
    model[0].weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(0), INF))
    for _ in range(3):
        backward(amp, model, torch.Generator().manual_seed(0))
        for p in model.parameters():
            torch.nan_to_num(p.grad, out=p.grad)
        amp.step()  # warnings are errors here
        amp.zero_grad()


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O0,loss_scale=dynamic"])
def test_zeros_are_not_clipped(policy):
    assert run(policy, each(lambda g, _: g.zero_()), steps=2) == [None] * 2


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_without_a_scale_clipping_is_right(policy):
    assert run(policy, lambda m, _: clip_grad_norm_(m.parameters(), 0.1), steps=3) == [None] * 3


@pytest.mark.parametrize("policy", SCALED.values(), ids=SCALED)
def test_after_unscale_clipping_is_right(policy):
    model, amp = session(policy)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        backward(amp, model, generator)
        amp.unscale_()
        clip_grad_norm_(amp.master_params(), 0.1)
        amp.step()  # warnings are errors here
        amp.zero_grad()


def test_a_skipped_step_says_nothing():
    model, amp = session("O1,emulate=true")
    backward(amp, model, torch.Generator().manual_seed(0))
    model[0].weight.grad[0, 0] = INF
    clip_grad_norm_(model.parameters(), 1.0)
    assert bool(amp.step().skipped)


def test_what_was_cleared_is_forgotten():
    model, amp = session("O1,emulate=true")
    generator = torch.Generator().manual_seed(0)
    backward(amp, model, generator)
    clip_grad_norm_(model.parameters(), 1.0)
    amp.zero_grad()
    backward(amp, model, generator)
    amp.step()


# Costs --------------------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    """Count host syncs, and how much is read of gradients as large as a weight."""

    syncs = copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.syncs += func is torch.ops.aten._local_scalar_dense.default
        self.copies += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("edit", [lambda m: None, lambda m: clip_grad_norm_(m.parameters(), 1.0),
                                  lambda m: clip_grad_value_(m.parameters(), 1.0)])  # fmt: skip
def test_noticing_costs_one_small_copy_and_no_host_sync(edit):
    model, amp = session("O1,emulate=true", fused=True)
    backward(amp, model, torch.Generator().manual_seed(0))
    with Counts() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp._edits.remember(model.parameters())
        assert counts.copies == 1
        edit(model)
        amp.step()
    assert counts.syncs == 0
