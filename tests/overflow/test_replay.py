"""Replay: what a step did is found again from what was kept of it, in the order in which it happened."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.overflow import Changed, Replay, locate

from ..support.refusals import bits, facts

FP16 = "O1,dtype=float16,emulate=true"


class Loop:
    """A training loop in small: forward and backward passes under a policy, with a replay beside them."""

    def __init__(self, *models, policy=FP16):
        prepared = [mezzo.prepare(model, policy) for model in models]
        self.models = models
        self.region = lambda: prepared[0].autocast(*prepared[1:])
        self.replay = Replay(list(models), region=self.region)

    def forward(self, *args, loss=lambda output: output.float().square().mean(), **kwargs):
        with self.region():
            return loss(self.models[0](*args, **kwargs))

    def step(self, *args, scale=1.0, **kwargs):
        loss = self.forward(*args, **kwargs)
        self.region().run_backward(loss * scale)
        return loss

    def locate(self, scale=1.0):
        return self.replay.locate(scale)


def shown(overflow):
    return None if overflow is None else (overflow.module, overflow.op, overflow.phase, overflow.tensor.name)


def test_a_finite_step_gives_nothing(make):
    policies = (FP16, "O2,emulate=true"), (FP16, "O3,emulate=true"), ("O2,emulate=true", "O1,bf16,emulate=true")
    for name, policy in (
        (n, p) for n, some in zip(("transformer", "conv", "chain"), policies, strict=True) for p in some
    ):
        model, x = make(name)
        loop = Loop(model, policy=policy)
        loop.step(x)
        loop.step(2 * x)
        assert loop.locate() is None, (name, policy)


@pytest.mark.parametrize("policy", [FP16, "O2,emulate=true"])
def test_an_overflow_is_the_one_that_a_search_finds(make, policy):
    model, x = make("transformer", gain=400.0)
    loop = Loop(model, policy=policy)
    state = torch.get_rng_state()
    loop.step(x)
    overflow = loop.locate()
    assert shown(overflow) == ("blocks.1.attn", "matmul", "forward", "output")
    torch.set_rng_state(state)
    assert locate(lambda: loop.forward(x), model, policy=policy) == overflow

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = make("conv")

        def forward(self, x):
            return self.inner(x).float() * 1e-6  # the output's own gradient stays small

    loss = lambda output: output.sum() * 1e6  # noqa: E731
    for scale in (2.0**22, 2.0**30):
        model, (_, x) = Steep(), make("conv")
        loop = Loop(model, policy=policy)
        state = torch.get_rng_state()
        loop.step(x, loss=loss, scale=scale)
        overflow = loop.locate(scale)
        assert (overflow.kind, overflow.phase, overflow.loss_scale) == ("scale", "backward", scale)
        torch.set_rng_state(state)
        search = locate(lambda: loop.forward(x, loss=loss), model, policy=policy, loss_scale=scale)  # noqa: B023
        assert search == overflow


def test_the_same_random_numbers_are_drawn():
    """What overflows is drawn at random, by torch, NumPy and Python: the count of infinities is that of the step."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            y = functional.dropout(self.layer(x), 0.5)
            y = y * torch.tensor(np.random.rand(64) < 0.5) * (1e5 if random.random() < 2 else 1)
            self.seen = int(y.isinf().sum())
            return y.float()

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = Drawn()
    loop = Loop(model)
    for _ in range(3):
        loop.step(torch.randn(8, 64))
        torch.rand(7), np.random.rand(7), random.random()
        seen = model.seen
        overflow = loop.locate()
        assert (overflow.op, overflow.tensor.dtype) == ("mul", "float16")
        assert overflow.tensor.num_inf == seen > 0
        loop.replay.clear()


def test_the_micro_batch_that_overflows(make):
    model, x = make("chain", gain=1e4)
    loop = Loop(model)
    for factor in (1.0, 2.0, 10.0, 20.0):
        loop.step(x * factor)
    overflow = loop.locate()
    assert shown(overflow) == ("first", "linear", "forward", "output")
    assert overflow.inputs[0].largest == float((x * 10).half().abs().max())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_under_a_checkpoint(make, reentrant):
    model, x = make("chain", gain=1e5)
    loop = Loop(model)
    x.requires_grad_()
    with loop.region():
        loss = checkpoint(model, x, use_reentrant=reentrant).float().square().mean()
    loop.region().run_backward(loss)
    assert shown(loop.locate()) == ("first", "linear", "forward", "output")
    assert bool(x.grad.isnan().any())  # as the step left it


def test_a_scale_that_the_output_s_gradient_does_not_hold(make, cured):
    model, x = make("chain")
    policy = mezzo.Policy.parse(FP16)
    loop = Loop(model, policy=policy)
    loop.step(x, loss=lambda output: output.float().sum(), scale=2.0**16)
    overflow = loop.locate(2.0**16)
    assert (overflow.kind, overflow.tensor.num_inf, overflow.tensor.dtype) == ("loss", 2 * 5 * 8, "float16")
    python, _, text = overflow.cure.partition("   # the text ")
    assert python == 'policy = policy.evolve(loss_scale="dynamic(init=32768)")'
    assert text == "loss_scale=dynamic(init=32768); or lower"
    scale = cured(overflow, policy).loss_scale.init
    loop.replay.clear()
    loop.step(x, loss=lambda output: output.float().sum(), scale=scale)
    assert shown(loop.locate(scale)) != ("(loss)", "", "backward", "gradient of output 0")


def test_an_infinity_whose_gradient_is_finite_is_reported_last(make):
    """The mean of an infinite output has a finite gradient: nothing was skipped, and yet the loss is infinite."""
    model, x = make("chain", gain=1e5)
    model.second = nn.Identity()
    loop = Loop(model)
    loss = loop.step(x, loss=torch.mean)
    assert bool(loss.isinf())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert shown(loop.locate()) == ("first", "linear", "forward", "output")
    loop.step(x / 1e5, scale=2.0**44)
    assert loop.locate(2.0**44).phase == "backward"


def test_what_happened_first_is_reported(make):
    for order in ("forward", "backward"):
        model, x = make("chain", gain=1e4)
        loop = Loop(model)
        calls = [lambda: loop.step(x * 20), lambda: loop.step(x, scale=2.0**40)]  # noqa: B023 - called at once
        for call in calls if order == "forward" else reversed(calls):
            call()
        assert loop.locate(2.0**40).phase == order
    model, x = make("chain", gain=1e4)
    loop = Loop(model)
    first, second = loop.forward(x), loop.forward(x * 20)
    loop.region().run_backward(first * 2.0**40)
    loop.region().run_backward(second)
    assert loop.locate(2.0**40).phase == "forward"  # of the second call, before the first one's backward pass


@pytest.mark.parametrize(
    "which, phase, holder",
    [(0, "forward", list), (1, "forward", nn.ModuleList), (1, "backward", list), (0, "backward", nn.ModuleList)],
)
def test_one_model_feeds_another(which, phase, holder):
    """Be they two models, or the parts of one that is never called itself."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    with torch.no_grad():
        match which, phase:
            case 0, "forward":
                generator[0].weight.fill_(6e4)
                generator[1] = nn.Softmax(-1)  # tanh would bring inf back into range
            case 1, "forward":
                generator[0].weight.fill_(1.0)
                discriminator[0].weight.fill_(6e4)
                x = torch.full_like(x, 10.0)
            case 0, "backward":
                generator[0].weight.fill_(1e-5)
                discriminator[0].weight.fill_(1.0)
                discriminator[2].weight.fill_(1.0)
                x = torch.full_like(x, 1e4)
            case 1, "backward":
                discriminator[2].weight.fill_(1e3)
    models = generator, discriminator
    loop = Loop(*models) if holder is list else Loop(nn.ModuleList(models))
    with loop.region():
        loss = discriminator(generator(x)).float().mean()  # here
    scale = 1.0 if phase == "forward" else 2.0**12
    loop.region().run_backward(loss * scale)
    overflow = loop.locate(scale)
    assert overflow.phase == phase
    assert overflow.module.startswith(f"{which}.")
    assert phase == "backward" or overflow.code.endswith("# here")  # the user's line is that of the call


@pytest.mark.parametrize("container", ["dict", "tuple"])
def test_several_outputs_and_several_backward_passes(container):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, *, batch):
            a, b = self.one(batch["x"]), self.two(batch["x"]) * torch.tensor(1e30)
            return (
                {"ids": torch.arange(2), "a": a, "b": b * 1e30}
                if container == "dict"
                else (torch.arange(2), [a, b * 1e30])
            )

    loop, batch = Loop(Heads(), policy="O0"), {"x": torch.ones(1, 2)}
    # "b" is infinite, and no gradient comes to it.
    loop.step(batch=batch, loss=lambda out: (out["a"] if container == "dict" else out[1][0]).sum())
    assert loop.locate() is None
    loop.replay.clear()
    loop.step(batch=batch, loss=lambda out: (out["b"] if container == "dict" else out[1][1]).square().sum())
    batch.clear()  # the user's own dict is no matter
    assert shown(loop.locate()) == ("", "mul", "forward", "output")
    model = nn.Linear(2, 2, bias=False)
    loop = Loop(model)
    loss = loop.forward(torch.ones(1, 2), loss=torch.sum)
    loop.region().run_backward(loss, retain_graph=True)
    loop.region().run_backward(loss * 2.0**14, retain_graph=True)
    assert loop.locate() is None
    loop.region().run_backward(loss * 2.0**16)
    assert shown(loop.locate(2.0**16)) == ("(loss)", "", "backward", "gradient of output 0")


def test_gradients_of_several_outputs_arrive_together():
    class Fork(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.float(), y.float()

    loop = Loop(Fork(2, 2))
    loop.step(torch.ones(1, 2), loss=lambda out: (out[0] + out[1]).sum(), scale=2.0**15)
    overflow = loop.locate(2.0**15)
    assert (overflow.tensor.name, overflow.needed) == ("sum of gradients", 2.0**16)


def test_what_is_made_in_the_loss(make, cured):
    model, x = make("conv")
    loop = Loop(model)
    loop.step(x, loss=lambda output: (output.float() * 0).sum().log())
    overflow = loop.locate(4.0)
    assert (overflow.kind, overflow.module, overflow.tensor.name) == ("loss", "(loss)", "gradient of output 0")
    assert (
        overflow.cause == "the models' outputs are finite: it was made after them, in the loss or in what leads to it"
    )
    assert overflow.cure == "mezzo.overflow.locate(fn, model, loss_scale=4)   # fn: the forward pass and the loss"
    names = {"mezzo": mezzo, "model": model, "fn": lambda: (model(x) * 0).sum().log()}
    assert eval(overflow.cure, names).op == "log"
    model, x = make("chain")
    policy = mezzo.Policy.parse(f"{FP16},loss_scale=2**40")
    loop = Loop(model, policy=policy)
    loop.step(x, loss=lambda output: output.float().sum(), scale=2.0**40)
    overflow = loop.locate(2.0**40)
    assert (
        overflow.cure
        == 'policy = policy.evolve(loss_scale="dynamic")   # the text loss_scale=dynamic; it finds the one that fits'
    )
    assert cured(overflow, policy).loss_scale == mezzo.LossScale.dynamic()


def test_inputs_changed_meanwhile_are_reported(make):
    class Model(nn.Linear):
        def forward(self, batch):
            y = super().forward(batch["x"])
            if how == "the model itself":
                batch["x"].add_(1)
            return y

    for how in ("in place", "storage", "a view", "the model itself"):
        loop, x = Loop(Model(4, 4)), torch.ones(2, 4)
        loop.step({"x": x}, scale=2.0**40)
        match how:
            case "in place":
                x.mul_(2)
            case "storage":
                x.data = torch.zeros(2, 4)
            case "a view":
                x[0].zero_()
        changed = loop.locate(2.0**40)
        assert changed == Changed(tensors=("input 0['x'] (float32, 2×4)",)), how
    assert str(changed) == (
        "the overflow cannot be located: what the step was computed from has changed since\n"
        "  where  input 0['x'] (float32, 2×4)\n"
        "  why    changed in place after the model had used it, so that a replay would compute another step\n"
        "  write  x = x + 1 in place of x += 1, until amp.step(); or mezzo.overflow.locate(fn, model)"
    )
    # Calls whose inputs are intact are still looked at.
    model, x = make("chain", gain=1e5)
    loop, other = Loop(model), x.clone()
    loop.step(other)
    loop.step(x)
    other.zero_()
    assert shown(loop.locate()) == ("first", "linear", "forward", "output")


@pytest.mark.parametrize("gain", [1.0, 400.0])
def test_the_step_s_own_state_is_untouched(make, gain):
    model, x = make("transformer", gain=gain)
    model.extra = nn.BatchNorm1d(4)
    model.head.register_forward_hook(lambda module, args, output: model.extra(output.transpose(1, 2)).transpose(1, 2))
    x.requires_grad_()
    loop = Loop(model)
    loop.step(x, scale=2.0**10)

    def everything():
        return facts(model, x), bits([torch.get_rng_state()]), random.getstate(), str(np.random.get_state())

    before = everything()
    assert (loop.locate(2.0**10) is None) == (gain == 1.0)
    assert everything() == before
    assert loop.locate(2.0**10) == loop.locate(2.0**10)
    loop.replay.remove()
    loop.step(x)
    assert not loop.replay.events
    assert loop.locate() is None
