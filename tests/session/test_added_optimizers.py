"""`amp.add`: optimizers that come after their session has begun are as those that it began with, or nothing changes."""

import copy

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError, StateError, UnsupportedError, optim
from mezzo.session.capture.run import GraphRun
from mezzo.session.core import Core, under_way

from .small_nets import POLICIES, snapshot

KINDS = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, fused=True),
    "mezzo": lambda params: optim.AdamW(params, lr=0.01, eps=1e-4),
}


def network(exactly_in=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(exactly_in))
    return model


def train(amp, model, optimizers, numbers):
    for number in numbers:
        x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6)
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss, optimizers=optimizers)
        amp.step(optimizers)
        amp.zero_grad()


def begun(policy, kind="torch", **options):
    model = network(mezzo.Policy.parse(policy).dtype)
    head, body = KINDS[kind](model[2].parameters()), KINDS[kind](model[0].parameters())
    return model, head, body, MixedPrecision(model, head, policy, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_that_comes_later_is_as_one_that_was_there(policy, kind, bits):
    """Of weights that the policy's dtype holds exactly, nothing is lost before they have masters."""
    if policy.startswith("O3") and kind == "fused":
        pytest.skip("torch has no fused CPU kernel for these weights")
    model, head, body, amp = begun(policy, kind)
    train(amp, model, [head], range(2))
    amp.add(body)
    train(amp, model, None, range(2, 5))

    other = network(mezzo.Policy.parse(policy).dtype)
    first, second = KINDS[kind](other[2].parameters()), KINDS[kind](other[0].parameters())
    both = MixedPrecision(other, [first, second], policy)
    train(both, other, [first], range(2))
    train(both, other, None, range(2, 5))
    assert bits(model.state_dict()) == bits(other.state_dict())
    assert bits(amp.state_dict()["masters"]) == bits(both.state_dict()["masters"])
    assert not torch.equal(model[0].weight.float(), network()[0].weight)

    # What it saves continues in a session that begins with both.
    states = copy.deepcopy((model.state_dict(), head.state_dict(), body.state_dict(), amp.state_dict()))
    for each, state in zip((other, first, second, both), states, strict=True):
        each.load_state_dict(state)
    for session, trained in ((amp, model), (both, other)):
        train(session, trained, None, range(5, 7))
        session.close()
    assert bits(model.state_dict()) == bits(other.state_dict())
    assert model[0].weight.dtype == torch.float32
    assert {id(p) for p in body.param_groups[0]["params"]} == {id(p) for p in model[0].parameters()}
    assert not body._optimizer_step_pre_hooks
    assert not body._optimizer_step_post_hooks


def test_several_are_added_together_and_clipped_with_the_others():
    model, _, body, amp = begun("O1,emulate=true", max_grad_norm=1e-6)
    extra = torch.optim.SGD([model[0].bias], lr=1.0)
    body = torch.optim.SGD([model[0].weight], lr=1.0)
    amp.add(iter([body, extra]))
    before = model[0].weight.detach().clone()
    train(amp, model, None, range(1))
    assert 0 < (model[0].weight - before).norm() <= 1e-6
    assert repr(amp).startswith("MixedPrecision(Sequential, SGD, SGD, SGD,")


def open_window(model, head, body, amp):
    amp.backward(model(torch.ones(4, 6)).float().square().mean())
    return body


@pytest.mark.parametrize(
    "policy, make, error, says",
    [
        ("O0", lambda m, h, b, a: m, PolicyError, "an optimizer must be a torch.optim.Optimizer, not Sequential"),
        ("O0", lambda m, h, b, a: [], PolicyError, "a torch.optim.Optimizer, and there is none"),
        ("O0", lambda m, h, b, a: torch.optim.SGD, PolicyError, "not the class SGD"),
        ("O0", lambda m, h, b, a: [b, b], PolicyError, "an optimizer is listed twice"),
        ("O0", lambda m, h, b, a: [b, h], PolicyError, "the session has this optimizer already\n  where  SGD"),
        (
            "O0",
            lambda m, h, b, a: torch.optim.SGD(network().parameters()),
            PolicyError,
            "parameters that are not the models'\n  where  SGD: group 0, parameter 0 (8, 6)",
        ),
        (
            "O2,emulate=true",
            lambda m, h, b, a: torch.optim.SGD(m[2].parameters()),
            PolicyError,
            "which can have only one master each\n  where  optimizer 1 (SGD)",
        ),
        (
            "O2,emulate=true",
            lambda m, h, b, a: optim.SGD(m[0].parameters(), lr=1, master=None),
            PolicyError,
            "O2 keeps FP32 masters, and the optimizer is told to keep none",
        ),
        ("O0", open_window, StateError, "inside an accumulation window\n  where  after 1 backward pass(es)"),
        (
            "O0",
            lambda m, h, b, a: MixedPrecision(m, b, "O0") and b,
            StateError,
            "the optimizer belongs to a session or to MasterWeights already",
        ),
        ("O0", lambda m, h, b, a: a.close() or b, StateError, "add() after close()"),
    ],
)
def test_what_is_refused_changes_nothing(policy, make, error, says, bits):
    model, head, body, amp = begun(policy)
    given = make(model, head, body, amp)
    before, hooks = snapshot(model, body), len(body._optimizer_step_pre_hooks)
    with pytest.raises(error) as raised:
        amp.add(given)
    assert says in str(raised.value)
    assert bits(snapshot(model, body)) == bits(before)
    assert amp._core.optimizers == [head]
    assert len(body._optimizer_step_pre_hooks) == hooks


def test_low_precision_weights_that_would_train_without_masters_do_not_come_in():
    model, _, body, amp = begun("O1,emulate=true,dtype=bfloat16")
    model[0].bfloat16()
    with pytest.raises(UnsupportedError, match="would train without FP32 masters"):
        amp.add(body)
    model[0].float()
    amp.add(body)
    train(amp, model, None, range(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true", "O2,emulate=true,dtype=bfloat16"])
def test_an_interrupt_on_the_way_leaves_all_as_it_was(policy, kind, bits, monkeypatch):
    model, head, body, amp = begun(policy, kind)
    train(amp, model, [head], range(2))
    before, params = snapshot(model, body), list(model[0].parameters())
    grouped = Core.group_optimizers

    def interrupted(core):
        grouped(core)
        if body in core.optimizers:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Core, "group_optimizers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            amp.add(body)
    assert bits(snapshot(model, body)) == bits(before)
    assert [id(p) for p in body.param_groups[0]["params"]] == [id(p) for p in params]
    assert not body._optimizer_step_pre_hooks
    assert amp._core.optimizers == [head]
    train(amp, model, None, range(2, 3))
    amp.add(body)
    train(amp, model, None, range(3, 4))
    assert not torch.equal(model[0].weight, before[0]["0.weight"])


def test_a_captured_step_takes_them_in_between_two_calls():
    model, _, body, amp = begun("O1,emulate=true")

    def step(x):
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        return loss

    x = torch.ones(4, 6)
    captured = mezzo.capture(step, x)
    captured(x)
    first = model[0].weight.detach().clone()
    amp.add(body)
    captured(x)
    assert not torch.equal(model[0].weight, first)

    with under_way(GraphRun({}, amp._core.device, rehearsing=True)), pytest.raises(StateError) as raised:
        amp.add(torch.optim.SGD([model[0].bias], lr=1.0))
    assert "amp.add() inside a train step that is being captured" in str(raised.value)
    assert "the optimizers that there are when it is made" in str(raised.value)
