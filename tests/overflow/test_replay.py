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


# As locate finds it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FP16, "O2,emulate=true", "O3,emulate=true", "O1,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("name", ["transformer", "conv", "chain"])
def test_a_finite_step_gives_nothing(make, name, policy):
    model, x = make(name)
    loop = Loop(model, policy=policy)
    loop.step(x)
    loop.step(2 * x)
    assert loop.locate() is None


@pytest.mark.parametrize("policy", [FP16, "O2,emulate=true"])
def test_a_forward_overflow(make, policy):
    model, x = make("transformer", gain=400.0)
    loop = Loop(model, policy=policy)
    state = torch.get_rng_state()
    loop.step(x)
    overflow = loop.locate()
    assert shown(overflow) == ("blocks.1.attn", "matmul", "forward", "output")
    torch.set_rng_state(state)
    assert locate(lambda: loop.forward(x), model, policy=policy) == overflow


@pytest.mark.parametrize("policy", [FP16, "O2,emulate=true"])
@pytest.mark.parametrize("scale", [2.0**22, 2.0**30])
def test_a_backward_overflow_inside_the_model(make, policy, scale):
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = make("conv")

        def forward(self, x):
            return self.inner(x).float() * 1e-6  # the output's own gradient stays small

    model, (_, x) = Steep(), make("conv")
    loop = Loop(model, policy=policy)
    state = torch.get_rng_state()
    loop.step(x, loss=lambda output: output.sum() * 1e6, scale=scale)
    overflow = loop.locate(scale)
    assert (overflow.kind, overflow.phase, overflow.loss_scale) == ("scale", "backward", scale)
    torch.set_rng_state(state)
    same = locate(
        lambda: loop.forward(x, loss=lambda output: output.sum() * 1e6), model, policy=policy, loss_scale=scale
    )
    assert same == overflow


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


def test_the_user_s_line_is_that_of_the_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    nn.init.constant_(model[0].weight, 6e4)
    loop = Loop(model)
    with loop.region():
        output = model(torch.ones(2, 4))  # here
    output.sum().backward()
    assert loop.locate().code == "output = model(torch.ones(2, 4))  # here"


# Several calls ----------------------------------------------------------------------------------------


def test_the_micro_batch_that_overflows(make):
    model, x = make("chain", gain=1e4)
    loop = Loop(model)
    for factor in (1.0, 2.0, 10.0, 20.0):
        loop.step(x * factor)
    overflow = loop.locate()
    assert shown(overflow) == ("first", "linear", "forward", "output")
    assert overflow.inputs[0].largest == float((x * 10).half().abs().max())


@pytest.mark.parametrize("order", ["forward first", "backward first"])
def test_what_happened_first_is_reported(make, order):
    model, x = make("chain", gain=1e4)
    loop = Loop(model)
    calls = [lambda: loop.step(x * 20), lambda: loop.step(x, scale=2.0**40)]
    for call in calls if order == "forward first" else reversed(calls):
        call()
    overflow = loop.locate(2.0**40)
    assert overflow.phase == order.split()[0]


def test_forward_passes_before_both_backward_passes(make):
    model, x = make("chain", gain=1e4)
    loop = Loop(model)
    first, second = loop.forward(x), loop.forward(x * 20)
    loop.region().run_backward(first * 2.0**40)
    loop.region().run_backward(second)
    assert loop.locate(2.0**40).phase == "forward"  # of the second call, before the first one's backward pass


def pair():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return generator, discriminator, torch.randn(8, 4)


@pytest.mark.parametrize("holder", [list, nn.ModuleList])
@pytest.mark.parametrize("which, phase", [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")])
def test_one_model_feeds_another(which, phase, holder):
    """Be they two models, or the parts of one that is never called itself."""
    *models, x = pair()
    with torch.no_grad():
        match which, phase:
            case 0, "forward":
                models[0][0].weight.fill_(6e4)
                models[0][1] = nn.Softmax(-1)  # tanh would bring inf back into range
            case 1, "forward":
                models[0][0].weight.fill_(1.0)
                models[1][0].weight.fill_(6e4)
                x = torch.full_like(x, 10.0)
            case 0, "backward":
                models[0][0].weight.fill_(1e-5)
                models[1][0].weight.fill_(1.0)
                models[1][2].weight.fill_(1.0)
                x = torch.full_like(x, 1e4)
            case 1, "backward":
                models[1][2].weight.fill_(1e3)
    loop = Loop(*models) if holder is list else Loop(nn.ModuleList(models))
    with loop.region():
        loss = models[1](models[0](x)).float().mean()
    scale = 1.0 if phase == "forward" else 2.0**12
    loop.region().run_backward(loss * scale)
    overflow = loop.locate(scale)
    assert overflow.phase == phase
    assert overflow.module.startswith(f"{which}.")


def test_a_gradient_between_two_models():
    """The second model's gradient of its input is what overflows, though no parameter's does."""
    *models, x = pair()
    for parameter in models[1].parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        models[1][0].weight.fill_(1e4)
        models[1][0].bias.fill_(1e4)
        models[1][2].weight.fill_(1.0)
    loop = Loop(*models)
    with loop.region():
        loss = models[1](models[0](x)).float().mean()
    loop.region().run_backward(loss * 2.0**8)
    overflow = loop.locate(2.0**8)
    assert (overflow.module, overflow.phase, overflow.tensor.name) == (
        "1.0",
        "backward",
        "gradient of input 0 of model 1",
    )


def test_a_model_that_calls_another_is_kept_once():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    inner = nn.Linear(2, 2)
    outer = Outer(inner)
    replay = Replay([outer, inner], region=lambda: mezzo.autocast("O0"))
    outer(torch.ones(1, 2)).sum().backward()
    assert [(event.call.module, event.task is None) for event in replay.events] == [
        (outer, True),
        (outer, False),
    ]


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_structured_outputs_with_a_gradient_for_some(kind):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, *, batch):
            a, b = self.one(batch["x"]), self.two(batch["x"]) * torch.tensor(1e30)
            return (
                {"ids": torch.arange(2), "a": a, "b": b * 1e30} if kind == "dict" else (torch.arange(2), [a, b * 1e30])
            )

    loop = Loop(Heads(), policy="O0")
    # "b" is infinite, and no gradient comes to it.
    loop.step(batch={"x": torch.ones(1, 2)}, loss=lambda out: (out["a"] if kind == "dict" else out[1][0]).sum())
    assert loop.locate() is None
    loop.replay.clear()
    loop.step(
        batch={"x": torch.ones(1, 2)}, loss=lambda out: (out["b"] if kind == "dict" else out[1][1]).square().sum()
    )
    assert shown(loop.locate()) == ("", "mul", "forward", "output")


def test_gradients_of_several_outputs_arrive_together():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(2, 2)

        def forward(self, x):
            y = self.trunk(x)
            return y.float(), y.float()

    loop = Loop(Fork())
    loop.step(torch.ones(1, 2), loss=lambda out: (out[0] + out[1]).sum(), scale=2.0**15)
    overflow = loop.locate(2.0**15)
    assert (overflow.tensor.name, overflow.needed) == ("sum of gradients", 2.0**16)


def test_two_backward_passes_through_one_call():
    model = nn.Linear(2, 2, bias=False)
    loop = Loop(model)
    loss = loop.forward(torch.ones(1, 2), loss=torch.sum)
    loop.region().run_backward(loss, retain_graph=True)
    loop.region().run_backward(loss * 2.0**14, retain_graph=True)
    assert loop.locate() is None
    loop.region().run_backward(loss * 2.0**16)
    assert shown(loop.locate(2.0**16)) == ("(loss)", "", "backward", "gradient of output 0")


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


# Outside the models -----------------------------------------------------------------------------------


def test_a_loss_that_makes_nan(make):
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


def test_a_gradient_that_is_infinite_in_float32(make):
    model, x = make("conv")
    loop = Loop(model, policy="O2,emulate=true")
    loop.step(x, loss=lambda output: output.sum() * 1e30 * 1e30, scale=4.0)
    overflow = loop.locate(4.0)
    assert (overflow.kind, overflow.tensor.dtype, overflow.tensor.num_inf) == ("loss", "float32", 16)
    assert overflow.cure.startswith("mezzo.overflow.locate(fn, model, loss_scale=4)")


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


def test_a_constant_scale_that_the_output_s_gradient_does_not_hold(make, cured):
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


# Inputs that have changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "storage", "a view", "the model itself"])
def test_inputs_changed_meanwhile_are_reported(how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch):
            y = self.layer(batch["x"])
            if how == "the model itself":
                batch["x"].add_(1)
            return y

    loop, x = Loop(Model()), torch.ones(2, 4)
    loop.step({"x": x}, scale=2.0**40)
    match how:
        case "in place":
            x.mul_(2)
        case "storage":
            x.data = torch.zeros(2, 4)
        case "a view":
            x[0].zero_()
    changed = loop.locate(2.0**40)
    assert changed == Changed(tensors=("input 0['x'] (float32, 2×4)",))
    assert str(changed) == (
        "the overflow cannot be located: what the step was computed from has changed since\n"
        "  where  input 0['x'] (float32, 2×4)\n"
        "  why    changed in place after the model had used it, so that a replay would compute another step\n"
        "  write  x = x + 1 in place of x += 1, until amp.step(); or mezzo.overflow.locate(fn, model)"
    )


def test_calls_whose_inputs_are_intact_are_still_looked_at(make):
    model, x = make("chain", gain=1e5)
    loop, other = Loop(model), x.clone()
    loop.step(other)
    loop.step(x)
    other.zero_()
    assert shown(loop.locate()) == ("first", "linear", "forward", "output")


def test_a_dict_that_is_changed_meanwhile_is_no_matter(make):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            nn.init.constant_(self.layer.weight, 6e4)

        def forward(self, batch):
            return self.layer(batch["x"])

    loop, batch = Loop(Model()), {"x": torch.ones(2, 4)}
    loop.step(batch)
    batch.clear()
    assert loop.locate().op == "linear"


# Nothing is left behind -------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0, 400.0])
def test_the_step_s_own_state_is_untouched(make, gain):
    model, x = make("transformer", gain=gain)
    model.extra = nn.BatchNorm1d(4)
    model.head.register_forward_hook(lambda module, args, output: model.extra(output.transpose(1, 2)).transpose(1, 2))
    x.requires_grad_()
    loop = Loop(model)
    loop.step(x, scale=2.0**10)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), x)}.values()
    before = [(t.clone(), t._version, t.grad, None if t.grad is None else t.grad.clone()) for t in tensors]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert (loop.locate(2.0**10) is None) == (gain == 1.0)
    for tensor, (value, version, gradient, numbers) in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0, equal_nan=True)
        assert tensor._version == version or not isinstance(tensor, nn.Parameter)
        assert tensor.grad is gradient
        torch.testing.assert_close(gradient, numbers, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert loop.locate(2.0**10) == loop.locate(2.0**10)


def test_removed_it_leaves_no_hook(make):
    model, x = make("conv")
    replay = Replay(model, region=lambda: mezzo.autocast("O0"))
    model(x).sum().backward()
    replay.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(x).sum().backward()
    assert replay.locate() is None
    assert not replay.events


def test_no_model():
    with pytest.raises(mezzo.PolicyError, match=r"a model must be an nn.Module, not str"):
        Replay(["model"], region=lambda: mezzo.autocast("O0"))
