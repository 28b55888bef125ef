"""``grad``: gradients inside the loss, against torch's own in FP32 and against float64."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzo import MixedPrecision, StateError

from .loops import Syncs, assert_same

# A sum's gradient is the scale itself, and FP16 ends at 65504: the usual first scale of 65536 would only fall at once.
LOW = [
    "O1,emulate=true,loss_scale=dynamic(init=256)",
    "O2,emulate=true,loss_scale=dynamic(init=256)",
    "O1,dtype=bfloat16,emulate=true",
    "O2,dtype=bfloat16,emulate=true",
    "O2,dtype=bfloat16,emulate=true,loss_scale=dynamic",
]
FP32 = ["O0", "O0,loss_scale=dynamic", "O0,loss_scale=0.25"]
INF = float("inf")


class Critic(nn.Module):
    """A critic of images, smooth so that second derivatives exist; checkpointed inside if asked."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.SiLU(), nn.Conv2d(6, 8, 3), nn.SiLU())
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(hidden)


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(3, 12, 1, 9, 9, generator=generator)).to(dtype).unbind()


def wgan_gp(critic, region, grad, dtype=torch.float32):
    """The loss of Gulrajani et al. 2017, equation 3; ``grad`` differentiates the critic's output by its input."""
    real, fake, mix = images(dtype)
    mix.requires_grad_()
    with region():
        score = critic(fake).mean() - critic(real).mean()
        out = critic(mix)
    (slope,) = grad(out, mix, grad_outputs=torch.ones_like(out), create_graph=True)
    with region():
        return score + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


def plain(dtype=torch.float32, **options):
    critic = Critic(**options).to(dtype)
    loss = wgan_gp(critic, torch.enable_grad, torch.autograd.grad, dtype)
    loss.backward()
    return loss.detach(), [p.grad for p in critic.parameters()]


def session(policy, **options):
    critic = Critic(**options)
    return critic, MixedPrecision(critic, torch.optim.SGD(critic.parameters(), lr=0.1), policy)


def penalised(policy, **options):
    critic, amp = session(policy, **options)
    loss = wgan_gp(critic, amp.autocast, amp.grad)
    amp.backward(loss)
    amp.unscale_()
    return loss.detach(), [p.grad for p in amp.master_params()], amp


# The penalty --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FP32)
def test_double_backward_in_fp32_is_torch_s_bit_for_bit(policy):
    """Scales are powers of two: what is multiplied in is divided out without a rounding."""
    true_loss, true = plain()
    for checkpointed in (False, True):
        loss, grads, _ = penalised(policy, checkpointed=checkpointed)
        assert torch.equal(loss, true_loss)
        assert_same(grads, true)


@pytest.mark.parametrize("policy", LOW)
def test_double_backward_in_low_precision_is_near_float64(policy):
    """And checkpoints change no bit of it."""
    loss, grads, amp = penalised(policy)
    true_loss, true = plain(torch.float64)
    # Rounding to nearest is wrong by half a unit in the last place at most, and some ten roundings follow one another.
    tolerance = 10 * (2.0**-11 if amp.policy.dtype == torch.float16 else 2.0**-8)
    assert abs(loss.double() - true_loss) < tolerance * true_loss.abs()
    together, reference = (torch.cat([g.double().flatten() for g in tensors]) for tensors in (grads, true))
    assert torch.linalg.vector_norm(together - reference) < tolerance * torch.linalg.vector_norm(reference)
    again = penalised(policy, checkpointed=True)
    assert torch.equal(loss, again[0])
    assert_same(grads, again[1])


# As torch.autograd.grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*FP32, *LOW])
def test_inputs_and_parameters_have_fp32_gradients(policy):
    critic, amp = session(policy)
    model, x = Critic(), images()[0].requires_grad_()
    with amp.autocast():
        out = critic(x).float().sum()
    grads = [
        *amp.grad(out, x, retain_graph=True),
        *amp.grad(out, critic.parameters()),
    ]  # an iterator, as torch takes it
    assert all(p.grad is None for p in critic.parameters())
    for mine, theirs in zip(grads, torch.autograd.grad(model(x).sum(), [x, *model.parameters()]), strict=True):
        assert mine.dtype == torch.float32
        assert not mine.requires_grad
        assert torch.linalg.vector_norm(mine - theirs) <= 0.1 * torch.linalg.vector_norm(theirs)
        assert policy not in FP32 or torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        amp.grad(out, x)


@pytest.mark.parametrize("policy", ["O0,loss_scale=dynamic", LOW[0], LOW[2]])
def test_several_inputs_unused_ones_and_grad_outputs(policy):
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.1), policy)
    one, two, unused = (torch.ones(1, 2, requires_grad=True) for _ in range(3))
    with amp.autocast():
        out = layer(one) + layer(two) * 2
    weights = torch.tensor([[1.0, 10.0]]).to(out.dtype)
    first, second, none = amp.grad(out, (one, two, unused), grad_outputs=weights, allow_unused=True, retain_graph=True)
    assert first.tolist() == [[31.0, 42.0]]
    assert second.tolist() == [[62.0, 84.0]]
    assert none is None
    zeros = amp.grad(out, [unused], grad_outputs=weights, materialize_grads=True, retain_graph=True)
    assert zeros[0].tolist() == [[0.0, 0.0]]
    rows = torch.eye(2).reshape(2, 1, 2).to(out.dtype)
    (jacobian,) = amp.grad(out, one, grad_outputs=rows, is_grads_batched=True, retain_graph=True)
    assert jacobian.tolist() == [[[1.0, 2.0]], [[3.0, 4.0]]]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        amp.grad(out, [unused], grad_outputs=weights, retain_graph=True)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        amp.grad(out, one)


# Overflows on the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0,loss_scale=dynamic", "O1,emulate=true", "O2,emulate=true"])
def test_a_penalty_that_overflowed_skips_a_step_and_lowers_its_own_scale_alone(policy):
    width = 1 if policy.startswith("O0") else 2  # a product that sums over one value is not cast
    layer = nn.Linear(width, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width)[:1])
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.01), policy)
    x = torch.ones(4, width, requires_grad=True)
    factor = 1e35 if policy.startswith("O0") else 20.0  # times 2**15: beyond the format, and finite without it
    skipped = []
    for _ in range(30):
        with amp.autocast():
            out = layer(x)
        (slope,) = amp.grad(out, x, grad_outputs=torch.full_like(out, factor), create_graph=True)
        loss = (slope.norm(dim=1) / factor - 1).square().mean()
        finite = bool(torch.isfinite(loss))
        amp.backward(loss)
        step = amp.step()
        amp.zero_grad()
        assert bool(step.skipped) != finite
        assert step.next_scale == step.scale
        skipped.append(not finite)
    assert skipped == [True] + [False] * 29


@pytest.mark.parametrize("factors, cleared", [((INF, 1.0), False), ((1.0, INF), False), ((1.0, INF), True)])
def test_any_of_several_counts_and_what_is_cleared_does_not(factors, cleared):
    layer = nn.Linear(2, 1)
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "O1,emulate=true")
    for factor in factors:
        amp.grad((layer.weight * factor).sum(), layer.weight)
    if cleared:
        amp.zero_grad()
    amp.backward(layer.weight.sum())
    step = amp.step()
    assert bool(step.skipped) is not cleared
    assert step.next_scale == step.scale


def trained(program, session, grad=None):
    """Twenty steps of a program; how many were skipped, and the weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer, skipped = torch.optim.AdamW(model.parameters(), lr=1e-3), 0
    amp = session(model, optimizer)
    grad = grad or amp.grad
    for number in range(20):
        x = torch.randn(3, 32, 8, generator=torch.Generator().manual_seed(number))
        loss = program(model, amp, grad, *x.unbind())
        amp.backward(loss)
        skipped += bool(amp.step().skipped)
        amp.zero_grad()
    return skipped, torch.cat([param.detach().flatten() for param in model.parameters()]), amp


def second(model, amp, grad, x, *_, factor=100.0):
    """As networks that solve differential equations do: u_xx, of a large u."""
    x.requires_grad_()
    with amp.autocast():
        u = model(x).float() * factor
    (slope,) = grad(u.sum(), x, create_graph=True)
    (curve,) = grad(slope[:, 0].sum(), x, create_graph=True)
    return (curve[:, 0] / factor - 1).square().mean()


def third(model, amp, grad, x, *_):
    x.requires_grad_()
    with amp.autocast():
        u = model(x).float() * 10
    for _ in range(3):
        (u,) = grad(u.sum(), x, create_graph=True)
    return (u[:, 0] - 1).square().mean()


def penalty(model, amp, grad, real, fake, mix):
    mix.requires_grad_()
    with amp.autocast():
        score, out = model(fake).float().mean() - model(real).float().mean(), model(mix)
    (slope,) = grad(out, mix, grad_outputs=torch.ones_like(out), create_graph=True)
    return score + 10 * (slope.norm(dim=1) - 1).square().mean()


def r1(model, amp, grad, real, fake, _):
    real.requires_grad_()
    with amp.autocast():
        out, other = model(real).float(), model(fake).float()
    (slope,) = grad(out.sum(), real, create_graph=True)
    return nn.functional.softplus(-out).mean() + nn.functional.softplus(other).mean() + 5 * slope.square().sum(1).mean()


@pytest.mark.parametrize("program", [second, third, penalty, r1])
def test_each_call_has_a_scale_of_its_own_so_that_steps_are_taken(program):
    """At most three more are skipped than with torch's own, unscaled; the loss's scale is not lower than there."""

    def session(policy):
        return lambda model, optimizer: MixedPrecision(model, optimizer, policy)

    _, true, _ = trained(program, session("O0"))
    for level in ("O1", "O2"):
        skipped, weights, amp = trained(program, session(f"{level},fp16,emulate=true"))
        bare, other, plain = trained(program, session(f"{level},fp16,emulate=true"), torch.autograd.grad)
        assert skipped <= bare + 3
        assert amp.loss_scale >= plain.loss_scale
        assert torch.linalg.vector_norm(weights - true) < torch.linalg.vector_norm(other - true) + 0.2


@pytest.mark.parametrize("policy", ["O1,fp16,emulate=true", "O2,fp16,emulate=true"])
def test_a_small_output_is_not_flushed_at_the_first_call(policy):
    critic, amp = session(policy)
    model, x = Critic(), images()[0].requires_grad_()
    with amp.autocast():
        out = critic(x)
    grads = amp.grad(out.float().mean() * 1e-5, [x, *critic.parameters()])
    true = torch.autograd.grad(model(x).mean() * 1e-5, [x, *model.parameters()])
    for mine, theirs in zip(grads, true, strict=True):
        assert torch.linalg.vector_norm(mine - theirs) <= 2.0**-7 * torch.linalg.vector_norm(theirs)


def test_scales_of_their_own_go_on_from_a_state():
    def run(amp, model, times):
        for _ in range(times):
            x = torch.ones(4, 2, requires_grad=True)
            with amp.autocast():
                out = model(x)
            (slope,) = amp.grad(out, x, grad_outputs=torch.full_like(out, 50.0), create_graph=True)
            amp.backward(slope.square().mean() * 1e-3)
            amp.step()
            amp.zero_grad()
        return amp.state_dict()

    def made():
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), "O1,fp16,emulate=true")

    model, amp = made()
    state = run(amp, model, 3)
    expected = run(amp, model, 3)
    other, same = made()
    same.load_state_dict(state)
    assert run(same, other, 3) == expected
    assert expected["inner_scales"][0][0] < 2.0**15
    with pytest.raises(StateError, match="inner_scales"):
        same.load_state_dict({**state, "inner_scales": [[0.0, 1.0]]})


@pytest.mark.parametrize("policy", [FP32[1], LOW[1], LOW[2]])
def test_a_penalty_costs_no_host_sync(policy):
    critic, amp = session(policy)
    with Syncs() as syncs:
        amp.backward(wgan_gp(critic, amp.autocast, amp.grad))
        amp.unscale_()
    assert syncs.count == 0
