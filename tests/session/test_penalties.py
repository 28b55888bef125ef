"""``grad``: gradients inside the loss, against torch's own in FP32 and against float64."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzo import MixedPrecision

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


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("policy", FP32)
def test_double_backward_in_fp32_is_torch_s_bit_for_bit(policy, checkpointed):
    """Scales are powers of two: what is multiplied in is divided out without a rounding."""
    loss, found, _ = penalised(policy, checkpointed=checkpointed)
    true_loss, true = plain()
    assert torch.equal(loss, true_loss)
    assert_same(found, true)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("policy", LOW)
def test_double_backward_in_low_precision_is_near_float64(policy, checkpointed):
    loss, found, amp = penalised(policy, checkpointed=checkpointed)
    true_loss, true = plain(torch.float64)
    # Rounding to nearest is wrong by half a unit in the last place at most, and some ten roundings follow one another.
    tolerance = 10 * (2.0**-11 if amp.policy.dtype == torch.float16 else 2.0**-8)
    assert abs(loss.double() - true_loss) < tolerance * true_loss.abs()
    together, reference = (torch.cat([g.double().flatten() for g in each]) for each in (found, true))
    assert torch.linalg.vector_norm(together - reference) < tolerance * torch.linalg.vector_norm(reference)


@pytest.mark.parametrize("policy", LOW)
def test_checkpoints_change_no_bit(policy):
    one, two = penalised(policy), penalised(policy, checkpointed=True)
    assert torch.equal(one[0], two[0])
    assert_same(one[1], two[1])


def test_a_tiny_slope_survives_fp16_through_the_scale():
    """Unscaled, these gradients are below FP16's smallest number on their way, and the penalty would not see them."""
    x = torch.randn(4, 8, requires_grad=True)
    layer = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(2.0**-10)
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "O1,emulate=true")
    with amp.autocast():
        out = layer(x)
    (slope,) = amp.grad(out.float().sum() * 2.0**-18, x)
    assert (slope == 2.0**-28).all()
    with amp.autocast():
        out = layer(x)
    (lost,) = torch.autograd.grad(out.float().sum() * 2.0**-18, x)
    assert (lost != 2.0**-28).all()


@pytest.mark.parametrize("policy", LOW)
def test_training_with_a_penalty_stays_near_fp32(policy):
    (critic, amp), (other, exact) = session(policy), session("O0")
    for _ in range(5):
        for model, each in ((critic, amp), (other, exact)):
            loss = wgan_gp(model, each.autocast, each.grad)
            each.backward(loss * 0.1)
            each.step()
            each.zero_grad()
    reference, mine = (wgan_gp(m, a.autocast, a.grad).item() for m, a in ((other, exact), (critic, amp)))
    start = plain()[0].item()
    assert abs(mine - reference) < 0.1 * abs(start - reference)


# As torch.autograd.grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*FP32, *LOW])
def test_without_a_graph(policy):
    critic, amp = session(policy)
    x = images()[0].requires_grad_()
    with amp.autocast():
        out = critic(x).float().sum()
    (slope,) = amp.grad(out, x)
    assert slope.dtype == torch.float32
    assert not slope.requires_grad
    (true,) = torch.autograd.grad(Critic()(x).sum(), x)
    assert torch.linalg.vector_norm(slope - true) <= 0.1 * torch.linalg.vector_norm(true)
    if policy in FP32:
        assert torch.equal(slope, true)
    assert all(p.grad is None for p in critic.parameters())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        amp.grad(out, x)


@pytest.mark.parametrize("policy", [*FP32, *LOW])
def test_parameters_as_inputs_have_fp32_gradients(policy):
    critic, amp = session(policy)
    with amp.autocast():
        out = critic(images()[0]).float().sum()
    found = amp.grad(out, critic.parameters())  # an iterator, as torch takes it
    assert {g.dtype for g in found} == {torch.float32}
    true = torch.autograd.grad(Critic()(images()[0]).sum(), list(Critic().parameters()), allow_unused=True)
    assert true[0] is None  # another model's: what follows compares with the right one
    model = Critic()
    true = torch.autograd.grad(model(images()[0]).sum(), list(model.parameters()))
    for mine, theirs in zip(found, true, strict=True):
        assert torch.linalg.vector_norm(mine - theirs) <= 0.1 * torch.linalg.vector_norm(theirs)


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
def test_a_penalty_that_overflowed_lowers_the_scale_though_the_loss_is_infinite(policy):
    """Elsewhere a loss that is not finite leaves the scale alone; here the scale itself made it so."""
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.01), policy)
    x = torch.ones(4, 1, requires_grad=True)
    factor = 1e34 if policy.startswith("O0") else 4.0  # times 65536: beyond the format, and finite without it
    skipped = 0
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
        if finite:
            break
        skipped += 1
        assert step.next_scale == step.scale / 2
    assert finite
    assert skipped >= 1


@pytest.mark.parametrize("factors", [(INF, 1.0), (1.0, INF), (1.0, 1.0)])
def test_any_of_several_counts(factors):
    layer = nn.Linear(2, 1)
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "O1,emulate=true")
    for factor in factors:
        amp.grad((layer.weight * factor).sum(), layer.weight)
    amp.backward(layer.weight.sum())
    step = amp.step()
    assert step.next_scale == step.scale * (0.5 if INF in factors else 1)


def test_what_is_cleared_counts_no_more():
    layer = nn.Linear(2, 1)
    amp = MixedPrecision(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "O1,emulate=true")
    amp.grad((layer.weight * INF).sum(), layer.weight)
    amp.zero_grad()
    amp.backward(layer.weight.sum())
    step = amp.step()
    assert not step.skipped
    assert step.next_scale == step.scale


# Costs and mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*FP32, *LOW])
def test_a_penalty_costs_no_host_sync(policy):
    critic, amp = session(policy)
    with Syncs() as syncs:
        amp.backward(wgan_gp(critic, amp.autocast, amp.grad))
        amp.unscale_()
    assert syncs.count == 0


def test_calls_that_are_refused():
    critic, amp = session("O1,emulate=true")
    out = critic(images()[0]).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        amp.grad(out, images()[0])
