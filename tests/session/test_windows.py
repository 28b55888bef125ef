"""What gradients carry between two steps: several losses, scales, optimizers, and the order of calls."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import LossScale, MixedPrecision, NumericsError, Policy, PolicyError, ScaleCollapsed, StateError

from .loops import assert_same

EPS = 2.0**-23
EVERY_STEP = "loss_scale=dynamic(init=256,interval=1)"


class Weights(nn.Module):
    """Parameters whose gradients are whatever a linear loss says: d(c·w)/dw = c."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def loss(self, *coefficients):
        return sum((w * c).sum() for w, c in zip(self.each, coefficients, strict=True))


def session(model, policy=f"O0,{EVERY_STEP}", *, optimizers=None, models=None, **options):
    built = [torch.optim.SGD(model.parameters(), lr=1.0)] if optimizers is None else optimizers
    return MixedPrecision(model if models is None else models, built, policy, **options)


def set_scales(amp, *scales):
    """Through a public door: the state of apex.amp has one scale for each loss."""
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": s, "unskipped": 0} for i, s in enumerate(scales)})


def gradients(amp):
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params()]


def values(count, seed, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Two losses, two scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["01", "10", "0101", "0011", "00110", "011010"])
@pytest.mark.parametrize("scales", [(256.0, 65536.0), (3.0, 7000.0), (0.125, 2.0**20)])
def test_losses_with_different_scales_are_summed_in_fp32(order, scales):
    """Against float64: each scaled gradient is rounded once, and so are 1/scale, the product and each sum."""
    model = Weights(50)
    amp = session(model, num_losses=2)
    set_scales(amp, *scales)
    exact, size = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for number, loss_id in enumerate(order):
        c = values(50, number) * 10.0 ** (number % 3 - 1)
        amp.backward(model.loss(c), loss_id=int(loss_id))
        exact += c.double()
        size += c.double().abs()
    step = amp.step()
    assert not step.skipped
    mine = -next(amp.master_params()).detach().double()
    assert ((mine - exact).abs() <= (3 + len(order)) / 2 * EPS * size).all()
    assert step.grad_norm.item() == pytest.approx(exact.norm().item(), rel=1e-6)
    assert step.scale.tolist() == list(scales)
    assert step.next_scale.tolist() == [2 * scale for scale in scales]  # once, however many backward passes


@pytest.mark.parametrize("policy", [f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
@pytest.mark.parametrize("order", ["01", "0101", "0011"])
def test_a_large_and_a_small_gradient_keep_all_their_bits_in_fp32(policy, order):
    """2⁰ + 2⁻²⁰ in FP16 would be 1: the sum is FP32's, under O2 in the masters."""
    model = Weights(1)
    amp = session(model, policy, num_losses=2)
    set_scales(amp, 1024.0, 2.0**16)
    for loss_id in map(int, order):
        amp.backward(model.loss(torch.tensor([(1.0, 2.0**-20)[loss_id]])).float(), loss_id=loss_id)
    amp.step()
    assert -next(amp.master_params()).item() == (1.0 + 2.0**-20) * len(order) / 2


@pytest.mark.parametrize("order", ["01", "10", "0101", "1100"])
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(
    "policy", [f"O0,{EVERY_STEP}", f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"]
)
def test_only_the_guilty_loss_s_scale_falls(policy, guilty, order):
    for struck in [place for place, loss_id in enumerate(order) if int(loss_id) == guilty]:
        model = Weights(3, 2)
        amp = session(model, policy, num_losses=2)
        for place, loss_id in enumerate(order):
            amp.backward(model.loss(torch.ones(3), torch.ones(2)).float(), loss_id=int(loss_id))
            if place == struck:
                model.each[1].grad[0] = float("nan")
        step = amp.step()
        assert bool(step.skipped)
        assert not torch.cat(list(map(torch.flatten, amp.master_params()))).any()
        assert amp.loss_scale.tolist() == [128.0 if number == guilty else 512.0 for number in (0, 1)]


def test_a_loss_that_takes_no_part_keeps_its_scale():
    model = Weights(2)
    amp = session(model, num_losses=3)
    amp.backward(model.loss(torch.ones(2)), loss_id=2)
    step = amp.step()
    amp.zero_grad()
    assert amp.loss_scale.tolist() == [256.0, 256.0, 512.0]
    assert step.scale.item() == 256.0
    assert step.next_scale.item() == 512.0


def test_losses_that_reach_different_parameters():
    model = Weights(2, 2)
    amp = session(model, num_losses=2)
    set_scales(amp, 4.0, 1024.0)
    amp.backward((model.each[0] * 3).sum(), loss_id=0)
    amp.backward((model.each[1] * 5).sum(), loss_id=1)
    amp.step()
    assert [p.tolist() for p in amp.master_params()] == [[-3.0, -3.0], [-5.0, -5.0]]
    assert amp.loss_scale.tolist() == [8.0, 2048.0]


def test_an_infinity_that_unscaling_makes_belongs_to_its_loss():
    """Finite as it stands, infinite over a scale below 1."""
    tiny = "O0,loss_scale=dynamic(init=1,interval=1,floor=2**-126)"
    model = Weights(1)
    amp = session(model, tiny, num_losses=2)
    set_scales(amp, 2.0**-120, 1.0)
    amp.backward(model.loss(torch.tensor([1.0])), loss_id=0)
    model.each[0].grad.fill_(2.0**10)  # 2**130 once unscaled
    amp.backward(model.loss(torch.tensor([1.0])), loss_id=1)
    assert bool(amp.step().skipped)
    assert amp.loss_scale.tolist() == [2.0**-121, 2.0]
    assert model.each[0].item() == 0.0


@pytest.mark.parametrize("first, second", list(itertools.product(["sparse", "dense"], repeat=2)))
def test_sparse_gradients_are_set_aside(first, second):
    """An embedding that two losses read, one of them as a matrix too (weight tying)."""
    table = nn.Embedding(6, 2, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    amp = session(table, num_losses=2)
    set_scales(amp, 8.0, 1024.0)
    wanted = torch.zeros(6, 2)
    for loss_id, kind in enumerate((first, second)):
        rows = torch.tensor([1, 1, 4 + loss_id])
        if kind == "sparse":
            amp.backward(table(rows).sum() * (loss_id + 1), loss_id=loss_id)
            wanted.index_add_(0, rows, torch.full((3, 2), loss_id + 1.0))
        else:
            amp.backward(table.weight.sum() * 10, loss_id=loss_id)
            wanted += 10
    step = amp.step()
    assert torch.equal(table.weight.detach(), -wanted)
    assert step.grad_norm.item() == pytest.approx(wanted.norm().item(), rel=1e-6)
    assert amp.loss_scale.tolist() == [16.0, 2048.0]


@pytest.mark.parametrize("policy", ["O0,loss_scale=3", f"O0,{EVERY_STEP}"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float32])
@pytest.mark.parametrize("losses", [1, 2])
def test_gradients_of_every_dtype(dtype, losses, policy):
    """Beside FP32 ones, in a group that joins later: so that one step has gradients of two kinds."""
    other, plain = nn.Parameter(torch.zeros(4, dtype=dtype)), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([plain], lr=1.0)
    amp = session(nn.ParameterList([plain]), policy, optimizers=[optimizer], num_losses=losses, max_grad_norm=1e3)
    optimizer.add_param_group({"params": [other]})
    if "dynamic" in policy:
        set_scales(amp, *(256.0, 2.0**14)[:losses])
    real = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(4, dtype=torch.complex128)
    for loss_id in range(losses):
        c = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=real) * (loss_id + 1)
        loss = (torch.view_as_real(other) * c[:, None]).sum() if dtype.is_complex else (other.to(real) * c).sum()
        amp.backward(loss + plain.sum(), loss_id=loss_id)
        total += c * (1 + 1j) if dtype.is_complex else c
    step = amp.step()
    exact = total if dtype.is_complex else total.real
    assert other.dtype == dtype
    tolerance = torch.finfo(dtype).eps if dtype != torch.float64 else EPS  # the scale itself is FP32
    torch.testing.assert_close(-other.detach().to(exact.dtype), exact, rtol=2 * tolerance, atol=0)
    torch.testing.assert_close(plain.detach(), torch.full((4,), -float(losses)), rtol=2 * EPS, atol=0)
    norm = (total.abs().square().sum() + 4 * losses**2).sqrt().item()
    assert step.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    with torch.no_grad():
        before = other.clone()
    amp.zero_grad()
    amp.backward((other * 1).abs().sum() + plain.sum())
    other.grad[2] = complex(0, float("inf")) if dtype.is_complex else float("inf")
    assert bool(amp.step().skipped)
    assert torch.equal(before, other)


def test_float64_gradients_keep_their_precision_and_their_losses_their_range():
    model, plain = Weights(1, dtype=torch.float64), Weights(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    amp = session(plain, optimizers=[optimizer], num_losses=2)
    optimizer.add_param_group({"params": list(model.parameters())})
    set_scales(amp, 256.0, 1024.0)
    c = torch.tensor([1.0 + 2.0**-50], dtype=torch.float64)
    amp.backward(model.loss(c), loss_id=0)
    amp.backward(model.loss(c) + 1e300, loss_id=1)  # a value beyond FP32's range, with an ordinary gradient
    amp.backward(model.loss(c) + 1e300, loss_id=1)
    amp.step()
    amp.zero_grad()
    assert model.each[0].item() == -3 * c.item()
    amp.backward(model.loss(c) + 1e300, loss_id=1)
    amp.backward(model.loss(c) + 1e300, loss_id=1)
    model.each[0].grad.fill_(float("inf"))
    amp.step()
    assert amp.loss_scale.tolist()[1] == 1024.0  # grew, and fell: these losses were finite


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices: a CUDA device beside the CPU")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_losses_and_models_on_two_devices(where):
    near, far = Weights(3), Weights(3).cuda()
    amp = MixedPrecision(
        [near, far], torch.optim.SGD([*near.parameters(), *far.parameters()], lr=1.0), f"O0,{EVERY_STEP}",
        num_losses=2, device=where, max_grad_norm=100.0,
    )  # fmt: skip
    set_scales(amp, 8.0, 1024.0)
    amp.backward(near.loss(torch.ones(3)), loss_id=0)
    amp.backward(far.loss(torch.ones(3).cuda()) + near.loss(torch.ones(3)).cuda(), loss_id=1)
    step = amp.step()
    assert near.each[0].tolist() == [-2.0] * 3
    assert far.each[0].tolist() == [-1.0] * 3
    assert step.skipped.device.type == where
    amp.zero_grad()
    amp.backward(near.loss(torch.ones(3)), loss_id=0)
    amp.backward(far.loss(torch.ones(3).cuda()), loss_id=1)
    far.each[0].grad[0] = float("inf")
    assert bool(amp.step().skipped)
    assert amp.loss_scale.tolist() == [32.0, 1024.0]


# What need not be set aside ---------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Every op on more than single numbers, and the bytes of the tensors that they allocate."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.storages = {}

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.dim() for tensor in tensors):
            self.names.append(str(func))
            made = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.storages.update({t.untyped_storage()._cdata: t.untyped_storage() for t in made})
        return out


def calls_of_two_losses(policy, loss_ids):
    model = nn.Linear(64, 64)
    amp = session(model, policy, num_losses=max(loss_ids) + 1)
    with amp.autocast():
        losses = [model(torch.ones(1, 64)).float().square().mean() for _ in loss_ids]
    with Calls() as calls:
        for loss, loss_id in zip(losses, loss_ids, strict=True):
            amp.backward(loss, loss_id=loss_id)
        assert not amp.step().skipped
    return calls


@pytest.mark.parametrize(
    "policy",
    [
        "O0",
        "O1,dtype=bfloat16,emulate=true",
        "O2,dtype=bfloat16,emulate=true",
        "O3,dtype=bfloat16,emulate=true",
        "O1,emulate=true,loss_scale=1024",
        "O2,emulate=true,loss_scale=1024",
    ],
)
def test_losses_that_share_one_scale_set_nothing_aside(policy):
    """Without a scale, or with a constant one, two losses cost what two micro-batches do: the same ops and bytes."""
    calls_of_two_losses(policy, (0, 0))  # the executor's tables are made once a process
    one, two = calls_of_two_losses(policy, (0, 0)), calls_of_two_losses(policy, (0, 1))
    assert two.names == one.names
    assert two.bytes == one.bytes


@pytest.mark.parametrize("policy", [f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_losses_with_scales_of_their_own_cost_four_bytes_a_parameter(policy):
    """The instrument of the test above does see what is set aside: unscaled gradients in FP32, twice under way."""
    one, two = calls_of_two_losses(policy, (0, 0)), calls_of_two_losses(policy, (0, 1))
    count = 64 * 64 + 64
    assert 4 * count <= two.bytes - one.bytes <= 16 * count + 1024


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_constant_scale_with_patience_counts_each_loss_s_overflows(guilty):
    model = Weights(2)
    policy = Policy.O0(loss_scale=LossScale.constant(1024.0, patience=2))
    amp = session(model, policy, num_losses=2)
    for _ in range(2):
        for loss_id in (0, 1):
            amp.backward(model.loss(torch.ones(2)), loss_id=loss_id)
            if loss_id == guilty:
                model.each[0].grad[0] = float("inf")
        step = amp.step()
        amp.zero_grad()
    with pytest.raises(ScaleCollapsed, match=f"2 overflows in a row(.|\n)*loss {guilty}, step 2"):
        bool(step.skipped)


# Micro-batches and unscale_ -----------------------------------------------------------------------------------


def test_what_a_user_clears_is_cleared_beside_as_well():
    """optimizer.zero_grad() and model.zero_grad() know nothing of what was set aside."""
    for clear in (lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad()):
        for policy in (f"O0,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"):
            model = Weights(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            amp = session(model, policy, optimizers=[optimizer], num_losses=2)
            for again in ((0,), (1,), (1, 0), (0, 1)):
                with torch.no_grad():
                    next(amp.master_params()).zero_()
                amp.backward(model.loss(torch.full((2,), 100.0)).float(), loss_id=0)
                amp.backward(model.loss(torch.full((2,), 10.0)).float(), loss_id=1)
                clear(model, optimizer)
                for loss_id in again:
                    amp.backward(model.loss(torch.ones(2)).float(), loss_id=loss_id)
                amp.step()
                assert next(amp.master_params()).tolist() == [-float(len(again))] * 2
                amp.zero_grad()


@pytest.mark.parametrize("clear", [lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad()])
@pytest.mark.parametrize("policy", ["O2,emulate=true", "O2,dtype=bfloat16,emulate=true", "O1,emulate=true"])
def test_what_a_user_clears_is_cleared_in_the_masters_as_well(policy, clear):
    """Earlier micro-batches are summed there, where model.zero_grad() does not reach."""
    for batches in (1, 2, 3):
        for later in (0, 1, 2):
            model = Weights(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            amp = session(model, policy, optimizers=[optimizer])
            for _ in range(batches):
                amp.backward(model.loss(torch.full((2,), 0.25)).float())
            clear(model, optimizer)
            for _ in range(later):
                amp.backward(model.loss(torch.full((2,), 0.5)).float())
            if later:
                amp.step()
                assert next(amp.master_params()).tolist() == [-0.5 * later] * 2
            else:
                with pytest.raises(StateError, match="no parameter has a gradient"):
                    amp.step()


@pytest.mark.parametrize("policy", ["O0", "O2,dtype=bfloat16,emulate=true"])
def test_a_micro_batch_that_leaves_a_parameter_alone_does_not_clear_it(policy):
    model = Weights(2, 2)
    amp = session(model, policy)
    amp.backward(model.loss(1, 1).float())
    for _ in range(2):
        amp.backward((model.each[0] * 2).sum().float())
    amp.step()
    assert [p.tolist() for p in amp.master_params()] == [[-5.0, -5.0], [-1.0, -1.0]]


def test_a_loss_that_leaves_a_parameter_alone_does_not_clear_it():
    model = Weights(2, 2)
    amp = session(model, num_losses=2)
    amp.backward(model.loss(torch.ones(2), torch.ones(2)), loss_id=0)
    amp.backward((model.each[0] * 2).sum(), loss_id=1)
    amp.backward((model.each[0] * 4).sum(), loss_id=0)
    amp.step()
    assert [p.tolist() for p in amp.master_params()] == [[-7.0, -7.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    "policy", [f"O0,{EVERY_STEP}", f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"]
)
@pytest.mark.parametrize("pattern", ["0u", "01u", "0u1", "0u0", "0u1u0", "u0u1"])
def test_unscale_shows_the_sum_and_further_passes_add_to_it(policy, pattern):
    model = Weights(3)
    amp = session(model, policy, num_losses=2)
    set_scales(amp, 64.0, 4096.0)
    total = torch.zeros(3)
    for number, call in enumerate(pattern):
        if call == "u" and number == 0:
            with pytest.raises(StateError, match=r"unscale_\(\) before backward\(\)"):
                amp.unscale_()
        elif call == "u":
            amp.unscale_()
            (shown,) = gradients(amp)
            assert shown.dtype == torch.float32
            assert torch.equal(shown, total)
        else:
            c = torch.tensor([1.0, 0.5, 2.0]) * (number + 1)
            amp.backward(model.loss(c).float(), loss_id=int(call))
            total += c
    step = amp.step()
    assert torch.equal(next(amp.master_params()).detach(), -total)
    assert step.grad_norm.item() == pytest.approx(total.norm().item(), rel=1e-6)
    took_part = sorted(set(map(int, pattern.replace("u", ""))))
    assert step.next_scale.flatten().tolist() == [(128.0, 8192.0)[i] for i in took_part]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [f"O0,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_edits_after_unscale_are_honoured(policy, fused):
    model = Weights(2)
    amp = session(model, policy, optimizers=[torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)])
    amp.backward(model.loss(torch.tensor([3.0, 4.0])).float())
    amp.unscale_()
    amp.unscale_()  # says the same
    next(amp.master_params()).grad.mul_(0.5)
    step = amp.step()
    assert step.grad_norm.item() == 2.5
    assert next(amp.master_params()).tolist() == [-1.5, -2.0]
    assert amp.loss_scale.item() == 512.0


@pytest.mark.parametrize("poison, scale", [(False, 512.0), (True, 128.0)])
def test_an_overflow_found_by_unscale_counts_once_whatever_is_edited(poison, scale):
    """Repaired gradients are used; a broken edit skips the step, and says nothing of the scale."""
    model = Weights(2)
    amp = session(model)
    amp.backward(model.loss(torch.ones(2)))
    if poison:
        model.each[0].grad[0] = float("inf")
    amp.unscale_()
    if poison:
        torch.nan_to_num_(model.each[0].grad, posinf=0.0)
    else:
        model.each[0].grad[0] = float("inf")
    assert bool(amp.step().skipped) != poison
    assert amp.loss_scale.item() == scale


def test_gradients_that_no_backward_pass_made_are_refused():
    model = Weights(2, 2)
    model.each[1].requires_grad_(False)
    amp = session(model)
    amp.backward((torch.ones(2, requires_grad=True) * 1).sum() + model.each[0].sum() * 0)
    model.zero_grad()
    amp.unscale_()
    model.each[0].grad = torch.ones(2)
    with pytest.raises(StateError, match=r"gradients that no amp.backward\(\) made"):
        amp.step()
    assert not model.each[0].any()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("policy", [f"O0,{EVERY_STEP}", "O0", "O0,loss_scale=64"])
def test_a_second_derivative_may_be_taken_of_gradients(policy):
    """create_graph=True leaves gradients that require a gradient themselves."""
    model = Weights(2)
    amp = session(model, policy, num_losses=2)
    with torch.no_grad():
        model.each[0].fill_(3.0)
    amp.backward(model.each[0].square().sum(), create_graph=True)
    amp.backward(model.each[0].sum(), loss_id=1)
    amp.step()
    assert model.each[0].tolist() == [3.0 - 7.0] * 2
    amp.zero_grad()


# Several optimizers ---------------------------------------------------------------------------------------


class Adversaries:
    """A generator and a discriminator, with everything that a GAN's step needs."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.models = [self.discriminator, self.generator]
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]

    def loss(self, number, step):
        noise, real = values(15, step).reshape(5, 3), values(10, step + 100).reshape(5, 2)
        fake = self.generator(noise)
        if number == 0:
            return (self.discriminator(real) - 1).square().mean() + self.discriminator(fake.detach()).square().mean()
        return (self.discriminator(fake) - 1).square().mean()

    def weights(self):
        return [p.detach().clone() for model in self.models for p in model.parameters()]


@pytest.mark.parametrize("strike", [None, (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_adversaries_that_take_turns(num_losses, named, strike):
    """Bit for bit what plain FP32 does that leaves the struck steps out: powers of two round nothing in FP32."""
    gan, plain = Adversaries(), Adversaries()
    amp = MixedPrecision(
        gan.models, gan.optimizers, "O0,loss_scale=dynamic(init=256,interval=3)", num_losses=num_losses
    )
    scales, clean = [256.0] * num_losses, [0] * num_losses
    for step in range(5):
        for number in (0, 1):
            loss_id = number % num_losses
            amp.zero_grad()
            with amp.autocast():
                loss = gan.loss(number, step)
            amp.backward(loss, loss_id=loss_id, optimizers=gan.optimizers[number] if named else None)
            struck = strike == (step, number)
            if struck:
                next(gan.models[number].parameters()).grad[0, 0] = float("inf")
            result = amp.step(gan.optimizers[number])
            assert bool(result.skipped) == struck
            clean[loss_id] = 0 if struck else clean[loss_id] + 1
            if struck or clean[loss_id] == 3:
                scales[loss_id] *= 0.5 if struck else 2
                clean[loss_id] = 0
            assert amp.loss_scale.flatten().tolist() == scales
            for optimizer in plain.optimizers:
                optimizer.zero_grad()
            plain.loss(number, step).backward()
            if not struck:
                plain.optimizers[number].step()
    for mine, theirs in zip(gan.weights(), plain.weights(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["O0", f"O0,{EVERY_STEP}", f"O2,dtype=bfloat16,emulate=true,{EVERY_STEP}"])
def test_only_the_chosen_optimizers_parameters_get_gradients(policy):
    """The gradients that ``inputs=`` of torch's own backward gives, and none anywhere else."""
    gan = Adversaries()
    amp = session(None, policy, optimizers=gan.optimizers, models=gan.models)
    with amp.autocast():
        loss = gan.loss(1, 0)
    amp.backward(loss, optimizers=gan.optimizers[1])
    assert all(p.grad is None for p in gan.discriminator.parameters())
    if "O2" not in policy:
        exact = Adversaries()
        exact.loss(1, 0).backward(inputs=list(exact.generator.parameters()))
        amp.unscale_(gan.optimizers[1])
        for mine, theirs in zip(gan.generator.parameters(), exact.generator.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step(gan.optimizers[0])
    before = gan.weights()
    amp.step()  # all that have gradients
    moved = [not torch.equal(a, b) for a, b in zip(before, gan.weights(), strict=True)]
    assert moved == [False] * 4 + [True] * 4


def test_optimizers_that_share_parameters_are_told_apart_by_what_is_their_own():
    """``inputs=`` are the chosen one's parameters, though its neighbour shares one of them."""
    model = Weights(2, 2, 2)
    mine, shared, theirs = model.each
    pair = [torch.optim.SGD([mine, shared], lr=1.0), torch.optim.SGD([shared, theirs], lr=1.0)]
    amp = session(model, optimizers=pair)
    amp.backward(model.loss(1, 2, 3), optimizers=pair[0])
    assert theirs.grad is None
    assert mine.grad is not None
    amp.step(pair[0])
    assert [p.tolist() for p in model.each] == [[-1.0, -1.0], [-2.0, -2.0], [0.0, 0.0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizers_that_share_parameters_step_together_and_by_turns(fused, clip):
    """Together: each from the same gradients, unscaled and clipped once. By turns: with a backward pass for each."""
    for turns in (False, True):
        model, plain = Weights(2), Weights(2)
        pair = [torch.optim.SGD(model.parameters(), lr=lr, fused=fused) for lr in (0.5, 0.25)]
        ours = session(model, optimizers=pair, max_grad_norm=clip)
        theirs = [torch.optim.SGD(plain.parameters(), lr=lr) for lr in (0.5, 0.25)]
        for number in range(4):
            c = torch.tensor([3.0, 4.0]) * (number + 1)
            chosen = [number % 2] if turns else [0, 1]
            ours.backward(model.loss(c))
            ours.step([pair[i] for i in chosen])
            ours.zero_grad()
            plain.zero_grad()
            plain.loss(c).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for i in chosen:
                theirs[i].step()
        # 1/scale, coefficient and product each round once.
        torch.testing.assert_close(model.each[0], plain.each[0], rtol=4 * EPS if clip else 0, atol=0)


def test_an_optimizer_that_shares_gradients_with_one_that_stepped_says_so():
    model = Weights(2)
    pair = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.Adagrad(model.parameters(), lr=1.0)]
    amp = session(model, optimizers=pair)
    amp.backward(model.loss(1))
    amp.step(pair[0])
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)(.|\n)*shares parameters with"):
        amp.step(pair[1])
    assert model.each[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("struck", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_one_loss_that_two_optimizers_step_from_counts_once(first, struck, hysteresis):
    """Whichever steps first, and with a budget of overflows too: a step is an iteration."""
    rules = LossScale.dynamic(init=256.0, interval=2, hysteresis=hysteresis, floor=64.0)
    model = Weights(1, 1)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, Policy.O0(loss_scale=rules), optimizers=pair)
    scale, clean, budget = 256.0, 0, hysteresis
    for step in range(12):
        overflow = bool(struck) and step not in (0, 3, 4)
        amp.backward(model.loss(1, 1))
        for number in struck if overflow else ():
            model.each[number].grad.fill_(float("nan"))
        for number in (first, 1 - first):
            assert bool(amp.step(pair[number]).skipped) == (overflow and number in struck)
        amp.zero_grad()
        clean = 0 if overflow else clean + 1
        budget -= overflow
        if budget == 0:
            scale, budget = max(scale / 2, 64.0), hysteresis
        if clean == 2:
            scale, clean = scale * 2, 0
        assert amp.loss_scale.item() == scale


@pytest.mark.parametrize("rules", [LossScale.dynamic(init=1.0, patience=3), LossScale.constant(8.0, patience=3)])
@pytest.mark.parametrize("first", [0, 1])
def test_patience_counts_iterations_not_steps(rules, first):
    """The clean half of a step does not make up for the half that overflowed, and two bad halves are one overflow."""
    for struck in ([0], [0, 1]):
        model = Weights(1, 1)
        pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
        amp = session(model, Policy.O0(loss_scale=rules), optimizers=pair)
        for _ in range(2):
            iterate(amp, pair, struck, first)
        with pytest.raises(ScaleCollapsed, match="3 overflows in a row"):
            bool(iterate(amp, pair, struck, first).skipped)


def iterate(amp, pair, struck, first):
    """One loss, a step of each optimizer, and infinities in the gradients of some."""
    params = [optimizer.param_groups[0]["params"][0] for optimizer in pair]
    amp.backward(sum(param.sum() for param in params))
    for number in struck:
        params[number].grad.fill_(float("nan"))
    amp.step(pair[first])
    last = amp.step(pair[1 - first])
    amp.zero_grad()
    return last


def test_gradients_of_an_older_scale_count_only_where_it_has_not_fallen_yet():
    """A window that stays open while another optimizer's steps move the scale twice."""
    for struck, scale in ((False, 64.0), (True, 64.0)):
        model = Weights(1, 1)
        pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
        amp = session(model, optimizers=pair)  # 256
        amp.backward(model.loss(1, 1))
        if struck:
            model.each[1].grad.fill_(float("inf"))
        for number in range(2):
            if number:
                amp.backward(model.each[0].sum(), optimizers=pair[0])
            model.each[0].grad.fill_(float("inf"))
            amp.step(pair[0])
            pair[0].zero_grad()
        assert amp.loss_scale.item() == 64.0
        assert bool(amp.step(pair[1]).skipped) == struck
        assert amp.loss_scale.item() == scale


def test_a_window_may_stay_open_while_others_step():
    """One accumulates over three iterations, the other steps at each; scales grow in between."""
    model = Weights(2, 2)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, optimizers=pair)
    for step in range(3):
        amp.backward(model.loss(1, 10.0**step))
        assert amp.step(pair[0]).scale.item() == 256.0 * 2**step
        pair[0].zero_grad()
    slow = amp.step(pair[1])
    assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-111.0, -111.0]]
    assert slow.next_scale.item() == 2048.0  # each iteration has counted already
    assert slow.grad_norm.item() == pytest.approx(111.0 * 2**0.5)


def test_parameters_without_gradients_are_left_alone():
    model = Weights(2, 2, 2)
    model.each[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    amp = session(model, optimizers=[optimizer], max_grad_norm=1.0)
    amp.backward(model.each[0].sum())
    amp.step()
    assert model.each[1].tolist() == model.each[2].tolist() == [1.0, 1.0]
    assert len(optimizer.state) == 1
    amp.zero_grad()


def test_optimizers_of_frozen_parameters_only_are_refused():
    model, frozen = Weights(2), Weights(2).requires_grad_(False)
    pair = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, frozen)]
    amp = session(None, models=[model, frozen], optimizers=pair)
    with pytest.raises(StateError, match=r"update no parameter that requires a gradient(.|\n)*requires_grad_\(True\)"):
        amp.backward(model.loss(1), optimizers=pair[1])
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_groups_that_join_in_mid_training(policy, fused):
    model = Weights(2, 2)
    optimizer = torch.optim.SGD([model.each[0]], lr=1.0, fused=fused)
    amp = session(model, policy, optimizers=[optimizer])
    c = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    def iteration(skipped=False):
        amp.backward(model.loss(*c).float())
        if skipped:
            model.each[1].grad[0] = float("inf")
        assert bool(amp.step().skipped) == skipped
        amp.zero_grad()

    iteration()
    assert model.each[1].tolist() == [0.0, 0.0]
    optimizer.add_param_group({"params": [model.each[1]], "lr": 0.5})
    iteration()
    iteration(skipped=True)
    assert [p.tolist() for p in model.parameters()] == [[-2.0, -4.0], [-1.5, -2.0]]
    assert [p.dtype for p in amp.master_params()] == [torch.float32] * 2
    assert amp.loss_scale.item() == 512.0


@pytest.mark.parametrize("fused", [(True, False), (False, True), (True, True), (False, False)])
def test_a_group_that_joins_may_share_parameters_from_then_on(fused):
    """Then neither optimizer may unscale these gradients by itself: the other one would see them twice unscaled."""
    model = Weights(2, 2)
    pair = [torch.optim.SGD([p], lr=1.0, fused=flag) for p, flag in zip(model.each, fused, strict=True)]
    amp = session(model, optimizers=pair)
    for together in (False, True, True):
        amp.backward(model.loss(1, 1))
        amp.step()
        if not together:
            with pytest.raises(StateError, match="the last step's gradients are still there"):
                amp.backward(model.loss(1, 1))
            pair[0].add_param_group({"params": [model.each[1]], "lr": 2.0})
            with pytest.raises(StateError, match="the last step's gradients are still there"):
                amp.backward(model.loss(1, 1))
        amp.zero_grad()
    assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-7.0, -7.0]]


def test_two_masters_of_one_parameter_are_refused_later_too():
    model = Weights(2, 2)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, f"O2,emulate=true,{EVERY_STEP}", optimizers=pair)
    pair[0].add_param_group({"params": [model.each[1]]})
    with pytest.raises(StateError, match="two optimizers update the same parameters"):
        amp.backward(model.loss(1, 1).float())


# Wrong calls leave everything as it was -------------------------------------------------------------------------


def snapshot(model, amp):
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((model.state_dict(), grads, amp.state_dict()))


FOREIGN = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda amp, loss: amp.backward(loss, loss_id=2), PolicyError, "there is no loss 2(.|\n)*num_losses=3"),
        (lambda amp, loss: amp.backward(loss, loss_id=-1), PolicyError, "there is no loss -1(.|\n)*from 0 to 1"),
        (lambda amp, loss: amp.backward(loss, loss_id=True), PolicyError, "there is no loss True"),
        (lambda amp, loss: amp.backward(loss, loss_id="G"), PolicyError, "there is no loss 'G'"),
        (lambda amp, loss: amp.grad(loss, loss, loss_id=2), PolicyError, "there is no loss 2"),
        (lambda amp, loss: amp.stats(2), PolicyError, "there is no loss 2"),
        (lambda amp, loss: amp.backward(loss, optimizers=FOREIGN), PolicyError, "not an optimizer of(.|\n)*SGD"),
        (lambda amp, loss: amp.backward(loss, optimizers=[]), PolicyError, "not an optimizer of(.|\n)*empty list"),
        (lambda amp, loss: amp.backward(loss, optimizers="sgd"), PolicyError, "not an optimizer of(.|\n)*str"),
        (lambda amp, loss: amp.step(FOREIGN), PolicyError, "not an optimizer of this session"),
        (lambda amp, loss: amp.unscale_([FOREIGN]), PolicyError, "not an optimizer of this session"),
        (lambda amp, loss: amp.step(scheduler=7), PolicyError, "a scheduler has a step"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("open_window", [False, True])
def test_wrong_calls_change_nothing(call, error, says, open_window):
    model = Weights(2)
    amp = session(model, num_losses=2)
    if open_window:
        amp.backward(model.loss(1))
        amp.backward(model.loss(2), loss_id=1)
    before = snapshot(model, amp)
    with pytest.raises(error, match=says):
        call(amp, model.loss(1))
    assert_same(before, snapshot(model, amp))
    if open_window:
        amp.step()
        assert model.each[0].tolist() == [-3.0, -3.0]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"num_losses": 0}, "num_losses is 0"),
        ({"num_losses": True}, "num_losses is True"),
        ({"num_losses": 1.0}, "num_losses is 1.0"),
        ({"on_overflow": "explode"}, "unknown on_overflow 'explode'(.|\n)*did you mean 'explain'"),
        ({"on_overflow": None}, "unknown on_overflow None"),
        ({"num_losses": -1, "on_overflow": "x", "max_grad_norm": -1.0}, "3 problems"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_changed(options, says):
    model = Weights(2)
    with pytest.raises(PolicyError, match=says):
        session(model, "O2,emulate=true", **options)
    assert model.each[0].dtype == torch.float32
    amp = session(model, "O2,emulate=true")
    amp.backward(model.loss(1).float())
    amp.step()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_without_a_backward_pass(fused):
    model = Weights(2)
    amp = session(model, optimizers=[torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)])
    for _ in range(2):
        before = snapshot(model, amp)
        with pytest.raises(StateError, match=r"step\(\) before backward\(\)(.|\n)*write  amp.backward\(loss\)"):
            amp.step()
        assert_same(before, snapshot(model, amp))
        amp.backward(model.loss(1))
        amp.step()  # and the next round begins with a second step
        amp_grads = gradients(amp)
        with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
            amp.step()
        assert_same(amp_grads, gradients(amp))
        amp.zero_grad()
    assert model.each[0].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("before", [(0,), (0, 1), (1, 0, 1)])
def test_a_backward_pass_that_fails_may_be_tried_again(before):
    """What was set aside for it is still there."""
    model = Weights(2)
    amp = session(model, num_losses=2)
    spent = model.loss(1).square()
    spent.backward()
    model.zero_grad()
    for loss_id in before:
        amp.backward(model.loss(1), loss_id=loss_id)
    other = 1 - before[-1]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        amp.backward(spent, loss_id=other)
    amp.backward(model.loss(2), loss_id=other)
    amp.step()
    assert model.each[0].tolist() == [-2.0 - len(before)] * 2
    assert amp.loss_scale.tolist() == [512.0, 512.0]


def test_raising_on_overflow_leaves_the_loop_able_to_go_on():
    model = Weights(2, 2)
    amp = session(model, on_overflow="raise", num_losses=2)
    for struck in (True, False):
        amp.backward(model.loss(1, 1))
        if struck:
            model.each[1].grad[0] = float("inf")
            with pytest.raises(
                NumericsError, match=r"not finite\n  where  1 of 2: each.1\n  why .*under the loss scale 256"
            ):
                amp.step()
            assert not any(p.any() for p in model.parameters())
        else:
            amp.step()
        amp.zero_grad()
    assert [p.tolist() for p in model.each] == [[-1.0, -1.0]] * 2
    assert amp.loss_scale.tolist() == [256.0, 256.0]  # fell, and grew again
    assert amp.stats().skipped == 1


def test_raising_says_whether_the_loss_itself_was_not_finite():
    model = Weights(2)
    amp = session(model, on_overflow="raise")
    amp.backward(model.loss(float("inf")))  # 0 · inf
    with pytest.raises(NumericsError, match=r"why +the loss itself is not finite, which no loss scale cures; nothing"):
        amp.step()


def test_new_gradients_in_the_memory_of_freed_ones_are_no_old_ones():
    """torch's fused optimizers do not write gradients: a new tensor at a freed address has the same version, too."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), fused=True), "O1,emulate=true")
    for _ in range(4):
        amp.backward(model(torch.randn(3, 64)).square().mean())
        amp.step()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
