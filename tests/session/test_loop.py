"""MixedPrecision in a training loop: exactness, skipping, accumulation, memory, refusals."""

import copy
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, PolicyError, StateError, UnsupportedError

from ..support.tables import pairwise, thinned
from .loops import Syncs, assert_same

POLICIES = [
    "O0",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),  # 1e-8 is zero in FP16, O3's own trouble
}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(144),
            nn.Linear(144, 5),
        )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def train(amp, model, steps, *, micro_batches=1):
    for step in steps:
        for part in range(micro_batches):
            backward(amp, model, step * micro_batches + part)
        amp.step()
        amp.zero_grad()


def backward(amp, model, number):
    x, y = batch(number)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    return loss


def session(policy, optimizer="sgd", **options):
    model = network()
    built = OPTIMIZERS[optimizer](model.parameters())
    return model, built, MixedPrecision(model, built, policy, **options)


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


# Exactness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_o0_is_the_plain_loop_bit_for_bit(optimizer, clip):
    model, _, amp = session("O0", optimizer, max_grad_norm=clip)
    train(amp, model, range(5))
    plain = network()
    steps = OPTIMIZERS[optimizer](plain.parameters())
    for step in range(5):
        x, y = batch(step)
        functional.cross_entropy(plain(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        steps.step()
        steps.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


def test_o1_on_device_lists_is_torch_amp_bit_for_bit():
    """The rival's own loop, with its scaler, as the oracle."""
    model, _, amp = session("O1,dtype=bfloat16,lists=device,emulate=false,loss_scale=dynamic", max_grad_norm=1.0)
    train(amp, model, range(5))
    plain = network()
    optimizer, scaler = OPTIMIZERS["sgd"](plain.parameters()), torch.amp.GradScaler("cpu")
    for step in range(5):
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(plain(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o2_is_the_recipe_of_the_paper_bit_for_bit(dtype):
    """Micikevicius §3: low copy → forward → scaled backward → FP32 unscale → clip → update of the master."""
    scale, clip = 1024.0, 0.5
    model, _, amp = session(
        Policy.O2(dtype, loss_scale=scale, keep_batchnorm_fp32=False, emulate=False), max_grad_norm=clip
    )
    wide = network()
    optimizer = OPTIMIZERS["sgd"](wide.parameters())
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    low = network()
    for step in range(4):
        with torch.no_grad():
            for name, parameter in low.named_parameters():
                parameter.data = wide.get_parameter(name).to(dtype)
        x, y = batch(step)
        norm = low[1]
        hidden = functional.batch_norm(
            low[0](x.to(dtype)),
            norm.running_mean,
            norm.running_var,
            norm.weight.float(),
            norm.bias.float(),
            True,
        )
        loss = functional.cross_entropy(low[2:](hidden).float(), y)
        low.zero_grad()
        (loss * scale).backward()
        for name, parameter in low.named_parameters():
            wide.get_parameter(name).grad = parameter.grad.float() / scale
        nn.utils.clip_grad_norm_(wide.parameters(), clip)
        optimizer.step()
        backward(amp, model, step)
        amp.step()
        amp.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(dtype)), name
    for mine, theirs in zip(amp.master_params(), wide.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for name in statistics[:2]:
        assert torch.equal(getattr(model[1], name), getattr(low[1], name))


@pytest.mark.parametrize("policy, tolerance", [(policy, 0.1) for policy in POLICIES if not policy.startswith("O3")])
def test_every_way_to_train_stays_near_fp32(policy, tolerance):
    model, _, amp = session(policy, max_grad_norm=1.0)
    reference, _, exact = session("O0", max_grad_norm=1.0)
    train(amp, model, range(10))
    train(exact, reference, range(10))
    x, y = batch(99)
    with torch.no_grad():
        mine = functional.cross_entropy(model.eval()(x).float(), y)
        theirs = functional.cross_entropy(reference.eval()(x), y)
    assert abs(mine - theirs) < tolerance


# Resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer", thinned(POLICIES, OPTIMIZERS, every=2))
def test_resuming_is_bit_exact(policy, optimizer, tmp_path):
    policy = Policy.parse(policy)
    if policy.loss_scale.mode == "dynamic":  # so that growth falls between save and end
        policy = policy.evolve(loss_scale=LossScale.dynamic(init=256.0, interval=7))
    model, steps, amp = session(policy, optimizer, max_grad_norm=1.0)
    train(amp, model, range(10))
    saved = {"model": model.state_dict(), "optimizer": steps.state_dict(), "amp": amp.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(amp, model, range(10, 20))
    for order in list(itertools.permutations(saved))[:: 5 if optimizer == "sgd" else 6]:
        again, fresh, resumed = session(policy, optimizer, max_grad_norm=1.0)
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        for part in order:
            {"model": again, "optimizer": fresh, "amp": resumed}[part].load_state_dict(loaded[part])
        train(resumed, again, range(10, 20))
        assert_same(snapshot(again, fresh), snapshot(model, steps))
        assert_same(resumed.state_dict(), amp.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("parts_before", [1, 2])
def test_resuming_inside_an_accumulation_window_is_bit_exact(policy, parts_before):
    model, optimizer, amp = session(policy, "sgd")
    train(amp, model, range(2), micro_batches=3)
    for part in range(parts_before):
        backward(amp, model, 50 + part)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    again, fresh, resumed = session(policy, "sgd")
    for part, state in zip((again, fresh, resumed), saved, strict=True):
        part.load_state_dict(state)
    for each, net in ((amp, model), (resumed, again)):
        for part in range(parts_before, 3):
            backward(each, net, 50 + part)
        each.step()
        each.zero_grad()
    assert_same(snapshot(again, fresh), snapshot(model, optimizer))


# Overflow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, poison, fused", pairwise(POLICIES, [float("inf"), float("nan")], [False, True]))
def test_a_gradient_that_is_not_finite_skips_the_step(policy, poison, fused):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
    train(amp, model, range(2))
    before = copy.deepcopy(list(amp.master_params())), copy.deepcopy(dict(model.named_parameters()))
    momentum = copy.deepcopy(optimizer.state_dict()["state"])
    backward(amp, model, 3)
    model[5].weight.grad[0, 0] = poison
    step = amp.step()
    amp.zero_grad()
    assert bool(step.skipped)
    assert not torch.isfinite(step.grad_norm)
    assert_same(before, (list(amp.master_params()), dict(model.named_parameters())))
    assert_same(momentum, optimizer.state_dict()["state"])
    if amp.policy.loss_scale.mode == "dynamic":
        assert (step.scale.item(), step.next_scale.item()) == (65536.0, 32768.0)
    else:
        assert step.next_scale.item() == step.scale.item()
    train(amp, model, range(4, 6))  # and goes on
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_infinity_that_unscaling_would_make_is_found():
    """torch checks before it multiplies by 1/scale, and writes the infinity into the weights."""
    model = nn.Linear(2, 1)
    policy = Policy.O1(loss_scale=LossScale.constant(2.0**-126), emulate=True)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    before = model.weight.detach().clone()
    amp.backward(model.weight.sum())
    model.weight.grad.fill_(8.0)  # finite, and 2**129 once it is unscaled
    assert bool(amp.step().skipped)
    assert torch.equal(model.weight, before)


def test_gradients_are_clipped_by_their_unscaled_norm():
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1,emulate=true", max_grad_norm=1.0)
    amp.backward((model.weight * torch.tensor([3.0, 0.0, 4.0])).sum())
    step = amp.step()
    assert step.grad_norm.item() == 5.0
    torch.testing.assert_close(model.weight.detach(), -torch.tensor([[0.6, 0.0, 0.8]]))


@pytest.mark.parametrize("fused, expected", [(False, 1), (True, 0)])
@pytest.mark.parametrize("policy", POLICIES)
def test_host_syncs_of_a_step(policy, fused, expected):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
    train(amp, model, range(1))
    for poison in (False, True):
        with Syncs() as syncs:
            backward(amp, model, 3)
            if poison:
                model[5].weight.grad.mul_(float("inf"))
            amp.step()
            amp.zero_grad()
        assert syncs.count == expected


def test_schedulers_step_only_with_the_weights():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(amp, model, 0)
    amp.step(scheduler=scheduler)
    amp.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.5
    backward(amp, model, 1)
    model[5].weight.grad.fill_(float("nan"))
    amp.step(scheduler=[scheduler])
    assert optimizer.param_groups[0]["lr"] == 0.5


# Accumulation -----------------------------------------------------------------------------------------


def test_micro_batches_are_summed_in_fp32():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    policy = Policy.O2("bfloat16", emulate=True)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), policy)
    for value in [256.0] + [1.0] * 8:  # in BF16 256 + 1 is 256
        amp.backward((model.weight * value).float().sum())
    amp.step()
    assert next(amp.master_params()).item() == -264.0


@pytest.mark.parametrize("policy", [p for p in POLICIES if not p.startswith("O3")])
def test_accumulated_steps_equal_one_large_batch(policy):
    def run(parts):
        model = nn.Linear(16, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        x = torch.linspace(-1, 1, 128).reshape(8, 16)
        for part in x.chunk(parts):
            with amp.autocast():
                loss = model(part).float().square().sum()
            amp.backward(loss)
        amp.step()
        return torch.cat([p.detach().flatten() for p in amp.master_params()])

    dtype = Policy.parse(policy).dtype
    torch.testing.assert_close(run(4), run(1), rtol=0, atol={torch.float32: 1e-5}.get(dtype, 0.05))


def test_habitual_calls_clear_model_and_master_gradients():
    model, optimizer, amp = session("O2,dtype=bfloat16,emulate=true")
    backward(amp, model, 0)
    backward(amp, model, 1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params()))


# Memory -----------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that are alive, and their peak, seen after every op."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes = {}
        self.note(tensors)
        self.start = self.peak = self.now()

    def now(self):
        return sum(self.sizes.values())

    def note(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.now())
        return out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options, temporaries", [({"fused": True}, 0), ({"foreach": False}, 3)])
def test_bytes_of_o2_with_adamw_and_full_masters(dtype, options, temporaries):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    count, largest = 8 * 256 * 256, 256 * 256
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    amp = MixedPrecision(model, optimizer, f"O2,dtype={dtype},emulate=true")
    for last in (False, True):
        with amp.autocast():
            loss = model(torch.ones(1, 256)).square().mean()
        amp.backward(loss)
        del loss
        if not last:
            amp.step()
            amp.zero_grad()
    held = [*model.parameters(), *amp.master_params()]
    held += [tensor.grad for tensor in held if tensor.grad is not None]
    held += [value for state in optimizer.state.values() for value in state.values()]
    live = LiveBytes(held)
    held.clear()
    assert 16 * count <= live.start <= 16 * count + 1024  # 2 + 2 gradient + 4 master + 8 moments; step counters
    with live:
        amp.step()
    # What torch's own single-tensor AdamW allocates for one parameter is the optimizer's, and named here.
    assert 18 * count <= live.peak <= 18 * count + 4 * largest * max(1, temporaries) + 1024
    assert live.now() <= 14 * count + 1024  # the gradients are gone


# Closing ------------------------------------------------------------------------------------------------


def test_close_gives_fp32_weights_with_the_masters_values():
    model, optimizer, amp = session("O2,dtype=bfloat16,emulate=true")
    train(amp, model, range(3))
    masters = [m.detach().clone() for m in amp.master_params()]
    amp.close()
    amp.close()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    for mine, wide in zip(model.parameters(), masters, strict=True):
        assert torch.equal(mine, wide)
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"step\(\) after close\(\)"):
        amp.step()


def test_several_models_and_optimizers():
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)]
    amp = MixedPrecision([first, second], optimizers, "O2,dtype=bfloat16,emulate=true")
    with amp.autocast():
        loss = second(first(torch.ones(2, 4))).square().mean()
    amp.backward(loss)
    before = [p.detach().clone() for p in amp.master_params()]
    amp.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True))
    assert len(list(amp.master_params(optimizers[1]))) == 2


def test_sparse_gradients():
    model = nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        model.weight.zero_()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1,emulate=true", max_grad_norm=100.0)
    amp.backward(model(torch.tensor([1, 1, 4])).sum())
    step = amp.step()
    assert step.grad_norm.item() == pytest.approx((3 * 4 + 3) ** 0.5)
    assert model.weight[1].tolist() == [-2.0] * 3


# Refusals -----------------------------------------------------------------------------------------------


def fresh():
    model = network()
    return model, OPTIMIZERS["adamw"](model.parameters())


def foreign_optimizer():
    return network(), OPTIMIZERS["sgd"](network().parameters())


def stepped(level):
    model, optimizer = fresh()
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def in_session():
    model, optimizer, _ = session("O1,emulate=true")
    return model, optimizer


def lazy():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    return model, torch.optim.SGD(model[0].parameters(), lr=1.0)


def huge():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e5)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def half_model():
    model = network().half()
    return model, OPTIMIZERS["sgd"](model.parameters())


def double_model():
    model = network().double()
    return model, OPTIMIZERS["sgd"](model.parameters())


@pytest.mark.parametrize(
    "build, policy, error, says",
    [
        (fresh, "O4", PolicyError, "unknown level 'O4'"),
        (foreign_optimizer, "O1", PolicyError, "updates parameters that are not the models'"),
        (lambda: (network(), "adamw"), "O1", PolicyError, "must be a torch.optim.Optimizer, not str"),
        (lambda: ("net", fresh()[1]), "O1", PolicyError, "a model must be an nn.Module, not str"),
        (lambda: (m := network(), [o := OPTIMIZERS["sgd"](m.parameters()), o]), "O1", PolicyError, "listed twice"),
        (lambda: (network(), torch.optim.SGD([{"params": []}])), "O1", PolicyError, "updates no parameter"),
        (lambda: in_session(), "O1", StateError, "belongs to a session"),
        (lambda: lazy(), "O2", UnsupportedError, "lazy parameters have no values yet"),
        (lambda: huge(), "O2", UnsupportedError, "values do not fit float16"),
        (lambda: stepped("O3"), "O3,dtype=bfloat16", StateError, "holds FP32 state"),
        (half_model, "O1", UnsupportedError, "fp16 gradients cannot be unscaled in fp16"),
        (double_model, "O2", UnsupportedError, "float64 parameters"),
        (fresh, "O2,fp32_module=nowhere", PolicyError, "matches no module"),
    ],
)
def test_refused_sessions_leave_everything_as_it_was(build, policy, error, says):
    model, optimizer = build()
    real = isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    real = real and "lazy" not in says and "belongs" not in says  # those are not as they were built
    before = snapshot(model, optimizer) if real else None
    groups = list(optimizer.param_groups[0]["params"]) if real else None
    with pytest.raises(error, match=says) as caught:
        MixedPrecision(model, optimizer, policy)
    assert "\n  write  " in str(caught.value) or "did you mean" in str(caught.value) or "why" in str(caught.value)
    if real:
        assert_same(before, snapshot(model, optimizer))
        assert all(a is b for a, b in zip(groups, optimizer.param_groups[0]["params"], strict=True))
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert vars(optimizer).keys() & {"zero_grad", "add_param_group"} == set()


def test_a_second_model_that_fails_undoes_the_first():
    good, bad = network(), network().double()
    optimizer = OPTIMIZERS["sgd"](good.parameters())
    before = snapshot(good, optimizer)
    with pytest.raises(UnsupportedError):
        MixedPrecision([good, bad], optimizer, "O2")
    assert_same(before, snapshot(good, optimizer))


def test_fp32_state_is_carried_over_exactly_where_there_are_masters():
    model, optimizer = stepped("O2")
    reference, plain = copy.deepcopy(model), None
    plain = OPTIMIZERS["adamw"](reference.parameters())
    plain.load_state_dict(optimizer.state_dict())
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    for p, q in zip(amp.master_params(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])


def test_calls_in_the_wrong_order():
    model, _, amp = session("O1,emulate=true")
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()
    backward(amp, model, 0)
    amp.zero_grad()
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()
    backward(amp, model, 0)
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(StateError, match="no parameter has a gradient"):
        amp.step()


@pytest.mark.parametrize(
    "loss, error, says",
    [
        (lambda m: m(batch(0)[0]), PolicyError, r"one floating number(.|\n)*shape \(8, 5\)"),
        (lambda m: torch.tensor(3), PolicyError, r"one floating number(.|\n)*torch.int64"),
        (lambda m: 3.0, PolicyError, "the loss is a float, not a tensor"),
        (lambda m: m(batch(0)[0]).sum().detach(), StateError, "depends on no parameter"),
    ],
)
def test_losses_that_cannot_be_differentiated(loss, error, says):
    model, _, amp = session("O1,emulate=true")
    with pytest.raises(error, match=says):
        amp.backward(loss(model))
    assert all(p.grad is None for p in model.parameters())


def test_the_scale_cannot_change_inside_a_window():
    model, _, amp = session("O1,emulate=true")
    other = session("O1,emulate=true")[2].state_dict()
    backward(amp, model, 0)
    with pytest.raises(StateError, match="inside an accumulation window"):
        amp.load_state_dict(other)
    amp.loss_scale.mul_(2)
    for call in (lambda: backward(amp, model, 1), amp.step):
        with pytest.raises(StateError, match="scale was changed inside an accumulation window"):
            call()
    amp.zero_grad()
    backward(amp, model, 1)
    amp.step()


def test_states_of_another_session_list_every_difference():
    _, _, amp = session("O1,emulate=true")
    model = nn.Linear(3, 2)
    other = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O2,emulate=true").state_dict()
    before = copy.deepcopy(amp.state_dict())
    with pytest.raises(StateError) as caught:
        amp.load_state_dict(other)
    for line in (
        "policy level: O2 → O1",
        "parameter weight: float16 [2, 3] → missing",
        "parameter 0.weight: missing → float32 [4, 1, 3, 3]",
    ):
        assert line in str(caught.value)
    assert_same(before, amp.state_dict())
    for wrong in ({}, {"version": 2}, 7):
        with pytest.raises(StateError, match="not the state of a MixedPrecision session"):
            amp.load_state_dict(wrong)
    with pytest.raises(StateError, match="version 99"):
        amp.load_state_dict(before | {"version": 99})


def test_optimizers_may_share_parameters_without_masters():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    pair = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(model.parameters(), lr=1.0)]
    amp = MixedPrecision(model, pair, "O1,emulate=true,loss_scale=64", max_grad_norm=10.0)
    amp.backward((model.weight * torch.tensor([3.0, 4.0])).sum())
    assert amp.step().grad_norm.item() == 5.0
    assert model.weight.tolist() == [[-6.0, -8.0]]


def test_a_step_that_fails_cannot_unscale_twice():
    model, optimizer, amp = session("O1,emulate=true")
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(amp, model, 0)
    with pytest.raises(ZeroDivisionError):
        amp.step()
    failing.remove()
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()


def test_forgetting_zero_grad_is_noticed_before_gradients_mix():
    model, optimizer, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    amp.step()
    with pytest.raises(StateError, match="the last step's gradients are still there"):
        backward(amp, model, 1)
    optimizer.zero_grad(set_to_none=False)  # zeros are no leftovers
    backward(amp, model, 1)
    amp.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_behind_the_session_s_back_is_refused_before_anything_is_written(policy):
    model, optimizer, amp = session(policy)
    backward(amp, model, 0)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(StateError, match=r"behind the session's back(.|\n)*write  amp.step\(\)"):
        optimizer.step()
    assert_same(before, list(model.parameters()))
    amp.step()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_fused_sgd_makes_its_momentum_in_a_real_step():
    """torch's kernel allocates the buffer and, when told to skip, leaves it as it found it."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    amp.backward((model.weight * float("inf")).sum())
    assert bool(amp.step().skipped)
    amp.zero_grad()
    assert not optimizer.state
    before = model.weight.detach().clone()
    amp.backward(model.weight.sum())
    amp.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_masters_are_saved_by_name():
    def build(order):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        params = [p for i in order for p in model[i].parameters()]
        return model, MixedPrecision(model, torch.optim.SGD(params, lr=0.1), "O2,dtype=bfloat16,emulate=true")

    model, amp = build([0, 1])
    again, other = build([1, 0])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(amp.state_dict())
    assert_same(model.state_dict(), again.state_dict())
    assert_same(amp.state_dict()["masters"], other.state_dict()["masters"])


def test_two_models_may_share_a_parameter():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    amp = MixedPrecision([first, second], torch.optim.SGD(first.parameters(), lr=0.1), "O2,dtype=bfloat16,emulate=true")
    assert first.weight.dtype == torch.bfloat16
    amp.close()
    assert first.weight.dtype == torch.float32


def test_sessions_are_neither_copied_nor_pickled():
    _, _, amp = session("O2,emulate=true")
    with pytest.raises(StateError, match=r"cannot be copied(.|\n)*copy.deepcopy\(model\)"):
        copy.deepcopy(amp)
    with pytest.raises(StateError, match=r"cannot be pickled(.|\n)*amp.state_dict\(\)"):
        pickle.dumps(amp)


@pytest.mark.parametrize(
    "scheduler, says",
    [
        (3, "a scheduler has a step"),
        (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau needs a metric"),
    ],
)
def test_schedulers_are_checked_before_anything_is_written(scheduler, says):
    model, optimizer, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(PolicyError, match=says):
        amp.step(scheduler=scheduler(optimizer) if callable(scheduler) else scheduler)
    assert_same(before, list(model.parameters()))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), "1"])
def test_a_norm_to_clip_to_is_positive(wrong):
    with pytest.raises(PolicyError, match="max_grad_norm is"):
        session("O0", max_grad_norm=wrong)


def test_fp16_emulation_is_reported():
    assert session("O1,dtype=float16,emulate=true")[2].emulated
    assert not session("O0")[2].emulated


def test_policy_may_be_a_file(tmp_path):
    Policy.O2("bfloat16").save(tmp_path / "policy.toml")
    assert session(tmp_path / "policy.toml")[2].policy == Policy.O2("bfloat16")


def test_import_is_light():
    """Beside torch, which takes seconds, nothing but mezzo's own files and parts of the standard library is loaded."""
    import os
    import subprocess
    import sys

    code = (
        "import os, sys, torch; before, modules = dict(os.environ), set(sys.modules); state = torch.get_rng_state(); "
        "import mezzo; assert dict(os.environ) == before and torch.equal(state, torch.get_rng_state()); "
        "print(*(set(sys.modules) - modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ)
    added = set(done.stdout.split())
    packages = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
    assert packages <= {"mezzo", "torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch._export", "torch.export", "torch.onnx", "torch.distributed")
    assert not [name for name in added if name.startswith(heavy)]
    assert mezzo.__version__
