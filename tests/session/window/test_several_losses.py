"""Several losses in one window, each with a scale of its own: sums in FP32, overflows of the guilty one alone."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import LossScale, MixedPrecision, Policy, ScaleCollapsed

from .weights import EPS, EVERY_STEP, Weights, session, set_scales, values

# Two losses, two scales ----------------------------------------------------------------------------------


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


# What need not be set aside ------------------------------------------------------------------------------


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
