"""Backward passes of a plain loop: which of them carry the scale, and which gradients do."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo

from ..loops import batch, network
from .loops import POLICIES, attached, build, loss_of, spoil

SCALE = 2.0**16


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_alike(found, expected, **tolerance):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_a_pass_that_reaches_no_attached_parameter_is_untouched():
    other, twin = network(), network()
    loss_of(twin, 3).backward()
    model, built = build()
    with attached(model, built, "O1,emulate=true") as amp:
        loss_of(other, 3).backward()
        assert all(map(torch.equal, gradients(other), gradients(twin)))
        with torch.no_grad():
            x = model(batch(0)[0])
        loss = other(functional.pad(x, (0, 5))).sum()
        loss.backward()  # through outputs of the model, detached
        assert not any(group.window for group in amp._core.groups)
        leaf = torch.ones(3, requires_grad=True)
        leaf.sum().backward()
        assert torch.equal(leaf.grad, torch.ones(3))


def test_a_pass_that_fails_in_torchs_own_checks_fails_in_its_words():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            model(batch(0)[0]).backward()
        loss = loss_of(model, 0)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        built.step()


def test_leaves_that_are_not_attached_get_gradients_without_the_scale():
    x, y = batch(0)
    whole = network()
    head = nn.Linear(3, 3)
    plain = x.clone().requires_grad_()
    functional.cross_entropy(head(whole(plain)), y).backward()
    expected = [plain.grad, *gradients(head)]
    head.zero_grad()
    model, built = build()
    with attached(model, built, "O0,loss_scale=65536"):
        x.requires_grad_()
        seen = []
        x.register_hook(lambda gradient: seen.append(gradient.clone()))
        functional.cross_entropy(head(model(x)), y).backward()
        assert_alike([x.grad, *gradients(head)], expected)
        assert torch.equal(seen[0], x.grad)
        assert_alike([g / SCALE for g in gradients(model)], gradients(whole))
        assert len(x._backward_hooks) == 1


def test_parameters_of_the_model_that_no_optimizer_has_are_such_leaves():
    model, whole = network(), network()
    built = torch.optim.SGD(model[3].parameters(), lr=0.1)
    loss_of(whole, 0).backward()
    with attached(model, built, "O0,loss_scale=65536"):
        loss_of(model, 0).backward()
        assert_alike(gradients(model[0]), gradients(whole[0]))
        assert_alike([g / SCALE for g in gradients(model[3])], gradients(whole[3]))


@pytest.mark.parametrize("whole", [False, True], ids=["in place", "a new list"])
def test_a_layer_that_takes_the_place_of_another_is_scaled_as_that_was(whole):
    """Powers of two change no bit of BF16's gradients, so the scale must leave no trace."""
    ends = []
    for scale in ("none", "1024.0"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        built = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(model, built, f"O1,dtype=bfloat16,emulate=true,loss_scale={scale}"):
            for number in range(6):
                if number == 2:
                    model[1] = nn.Linear(8, 3)
                    params = built.param_groups[0]["params"]
                    if whole:
                        built.param_groups[0]["params"] = list(model.parameters())
                    else:
                        params[2:] = model[1].parameters()
                built.zero_grad()
                model(torch.randn(4, 8)).square().sum().backward()
                built.step()
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_several_roots_and_any_gradients():
    def run(model):
        one, other = model(batch(0)[0]), model(batch(1)[0]).square().mean()
        torch.autograd.backward([one, other], [torch.full_like(one, 0.25), None])

    whole = network()
    run(whole)
    model, built = build()
    with attached(model, built, "O0,loss_scale=65536") as amp:
        run(model)
        amp.unscale_()
        assert_alike(gradients(model), gradients(whole))


def test_roots_in_half_precision_and_gradients_in_theirs():
    model, built = build()
    with attached(model, built, "O1,emulate=true,output_dtype=float16,loss_scale=64") as amp:
        out = model(batch(0)[0])
        assert out.dtype == torch.float16
        out.backward(torch.full_like(out, 0.125))
        amp.unscale_()
        found = gradients(model)
    whole = network()
    out = whole(batch(0)[0])
    out.backward(torch.full_like(out, 0.125))
    assert_alike(found, gradients(whole), rtol=2e-2, atol=2e-3)


def test_a_root_that_is_part_of_another():
    model, built = build()
    with attached(model, built, "O0,loss_scale=8") as amp:
        first = model(batch(0)[0]).square().mean()
        torch.autograd.backward([first, first * 3])
        amp.unscale_()
        found = gradients(model)
    whole = network()
    (whole(batch(0)[0]).square().mean() * 4).backward()
    assert_alike(found, gradients(whole))


def test_inputs_are_the_callers():
    model, built = build()
    with attached(model, built, "O0,loss_scale=8") as amp:
        first, *_, last = model.parameters()
        loss = loss_of(model, 0)
        loss.backward(inputs=[first], retain_graph=True)
        assert [p.grad is not None for p in model.parameters()] == [True, *([False] * 5)]
        loss.backward(inputs=[last])
        hidden = model[0](batch(0)[0])
        with pytest.raises(mezzo.StateError, match="stops inside of it") as raised:
            model[1:](hidden).sum().backward(inputs=[hidden, last])
        assert "amp.grad(loss, inputs)" in str(raised.value)
        with pytest.raises(mezzo.StateError, match="begins at an edge of its graph"):
            torch.autograd.backward(get_gradient_edge(loss_of(model, 0)))
        amp.unscale_()
        whole = network()
        loss_of(whole, 0).backward()
        assert_alike([first.grad, last.grad], [gradients(whole)[0], gradients(whole)[-1]])


def test_gradients_that_are_only_returned_are_torchs_own():
    model, built = build()
    with attached(model, built, "O1,emulate=true,loss_scale=64") as amp:
        x = batch(0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert slope.abs().max() < 10
        slope.square().sum().backward()
        assert all(group.window for group in amp._core.groups)
        assert not amp.step().skipped


def penalized(model, built):
    """A step of a penalty on ``.grad`` itself."""
    loss_of(model, 0).backward(create_graph=True)
    sum(param.grad.float().square().sum() for param in model.parameters()).backward()
    built.step()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_that_are_differentiated_again_carry_no_scale_or_are_refused():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(mezzo.StateError, match="carry the loss scale would be differentiated again") as refused:
            penalized(model, built)
        assert "torch.autograd.grad(loss, params, create_graph=True)" in str(refused.value)
        assert gradients(model) == [None] * len(before)
        assert all(map(torch.equal, before, model.parameters()))
        loss_of(model, 0).backward()
        built.step()
    ends = []
    for policy in (None, "O0"):
        model, built = build()
        with contextlib.nullcontext() if policy is None else attached(model, built, policy):
            penalized(model, built)
            model.zero_grad()  # torch warns of the cycle otherwise
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_the_sessions_own_calls_work_as_well():
    model, built = build()
    with attached(model, built, "O0,loss_scale=8") as amp:
        amp.backward(loss_of(model, 0))
        assert gradients(model)[0].abs().max() < 8 * 10
        loss_of(model, 0).backward()
        amp.unscale_()
        found = gradients(model)
        amp.step()
        amp.zero_grad()
    whole = network()
    (2 * loss_of(whole, 0)).backward()
    assert_alike(found, gradients(whole))


def test_checkpoints_are_recomputed_with_the_region_and_scaled():
    for reentrant in (True, False):
        for policy in ("O1", "O2, bfloat16"):
            found = []
            for checkpoints in (True, False):
                model, built = build()
                with attached(model, built, POLICIES[policy]):
                    x, y = batch(0)
                    x.requires_grad_()
                    out = checkpoint(model, x, use_reentrant=reentrant) if checkpoints else model(x)
                    functional.cross_entropy(out, y).backward()
                    slope = x.grad
                    built.step()
                    built.zero_grad()
                found.append([slope, *(p.detach().clone() for p in model.parameters())])
            assert all(map(torch.equal, *found)), (reentrant, policy)


def test_a_pass_that_fails_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("a backward function of the user's")

    for policy in POLICIES:
        model, built = build()
        with attached(model, built, POLICIES[policy]) as amp:
            x = batch(0)[0].requires_grad_()
            with pytest.raises(RuntimeError, match="of the user's"):
                Fails.apply(model(x)).sum().backward()
            assert not x._backward_hooks
            built.zero_grad()
            loss_of(model, 0).backward()
            built.step()
            assert amp.stats().steps == 1


def gan():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        nets = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 8), nn.Tanh(),
                                                                                          nn.Linear(8, 1))  # fmt: skip
    return *nets, *(torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4) for net in nets)


def noise(number):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(number))


def sides(net, critic, number, region):
    """The critic's two losses and the generator's."""
    with region():
        fake = net(noise(number))
    real = batch(number)[0]
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)

    def critical(x, target):
        with region():
            out = critic(x)
        return functional.binary_cross_entropy_with_logits(out.float(), target)

    fake = fake.float()
    yield lambda: critical(real, ones)
    yield lambda: critical(fake.detach(), zeros)
    yield lambda: critical(fake, ones)


@pytest.mark.parametrize("policy", ["O0, scaled", "O1", "O1, bfloat16", "O2", "O2, bfloat16"])
@pytest.mark.parametrize("clears_first", [True, False])
def test_gans_of_the_usual_form(policy, clears_first, bits):
    """DCGAN clears the critic's gradients only before its next losses: the generator's pass finds those of its step."""
    ends = []
    for own in (True, False):
        net, critic, for_net, for_critic = gan()
        if own:
            amp = mezzo.attach([net, critic], [for_net, for_critic], POLICIES[policy])
            region, backward = contextlib.nullcontext, lambda loss: loss.backward()
            step = lambda optimizer: optimizer.step()  # noqa: E731
        else:
            amp = mezzo.MixedPrecision([net, critic], [for_net, for_critic], POLICIES[policy])
            region, backward, step = amp.autocast, amp.backward, amp.step
        for number in range(4):
            real, fake, fooled = sides(net, critic, number, region)
            critic.zero_grad() if own else amp.zero_grad()
            backward(real())
            backward(fake())
            if number == 1:
                spoil(critic)
            step(for_critic)
            if not own:
                amp.zero_grad()
            elif not clears_first:
                critic.zero_grad()
            net.zero_grad()
            backward(fooled())
            if number == 2:
                spoil(net)
            step(for_net)
        ends.append(([p.detach().clone() for p in amp.master_params()], amp.loss_scale, amp.stats().skipped))
        amp.close()
    assert bits(ends[0]) == bits(ends[1])
    assert ends[0][2] == 2
