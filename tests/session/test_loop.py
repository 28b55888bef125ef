"""The five lines in a training loop: levels × optimizers × formats, against loops that users would keep by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import MixedPrecision, Policy, StateError

from ..support.tables import pairwise, thinned
from .loops import (
    EVERY,
    FP32,
    LOW,
    O3,
    OPTIMIZERS,
    Weights,
    assert_near,
    assert_same,
    backward,
    batch,
    built,
    loss_of,
    network,
    over,
    session,
    train,
    train_plainly,
    weights,
)  # fmt: skip

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TORCHS = {
    **{name: OPTIMIZERS[name] for name in ("SGD", "AdamW", "fused")},
    "foreach": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=True),
    "one by one": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, foreach=False),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
}


def clip_to(norm):
    return None if norm is None else lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


# Against loops kept by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer, clip, parts", pairwise(FP32, list(TORCHS), [None, 0.1], [1, 3]))
def test_o0_is_the_plain_loop(policy, optimizer, clip, parts):
    """Bit for bit, but where a coefficient is multiplied into 1/scale before the gradient is."""
    model, made = built(TORCHS[optimizer])
    amp = MixedPrecision(model, made, policy, max_grad_norm=clip)
    plain, theirs = built(TORCHS[optimizer])
    for number in range(4):
        train(amp, model, number, micro_batches=parts)
        train_plainly(plain, theirs, number, micro_batches=parts, edit=clip_to(clip))
    if clip is None:
        assert_same(model.state_dict(), plain.state_dict())
    for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)


def test_o1_on_device_lists_is_torch_amp():
    """Bit for bit the rival's own loop, with its scaler."""
    model, made = built("SGD")
    policy = "O1,dtype=bfloat16,lists=device,emulate=false,loss_scale=dynamic"
    amp = MixedPrecision(model, made, policy, max_grad_norm=1.0)
    plain, theirs = built("SGD")
    scaler = torch.amp.GradScaler("cpu")
    for number in range(5):
        train(amp, model, number)
        x, y = batch(number)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = plain(x)
        scaler.scale(functional.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype, optimizer, clip, parts", pairwise(list(DTYPES), list(TORCHS), [None, 0.1], [1, 3]))
def test_o2_is_the_recipe_of_the_paper(dtype, optimizer, clip, parts):
    """Micikevicius §3: low copy → forward → scaled backward → FP32 sums → unscale → clip → update of FP32 masters."""
    scale = 1024.0
    policy = Policy.O2(DTYPES[dtype], loss_scale=scale, emulate=False)
    model, made = built(TORCHS[optimizer])
    amp = MixedPrecision(model, made, policy, max_grad_norm=clip)
    wide, theirs = built(TORCHS[optimizer])
    for number in range(4):
        low = copy.deepcopy(wide).to(DTYPES[dtype])
        for part in range(parts):
            x, y = batch(number * parts + part)
            for param in low.parameters():
                param.grad = None
            (functional.cross_entropy(low(x.to(DTYPES[dtype])).float(), y) * scale).backward()
            for param, master in zip(low.parameters(), wide.parameters(), strict=True):
                summed = param.grad.float() / scale
                master.grad = summed if part == 0 else master.grad + summed
        if clip:
            nn.utils.clip_grad_norm_(wide.parameters(), clip)
        theirs.step()
        train(amp, model, number, micro_batches=parts)
    for mine, true in zip(weights(amp), wide.parameters(), strict=True):
        if clip is None:
            assert torch.equal(mine, true)
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)
    for low, master in zip(model.parameters(), weights(amp), strict=True):
        assert torch.equal(low, master.to(low.dtype))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("policy", LOW)
def test_mezzos_optimizer_is_torchs_over_masters_but_for_roundings(policy, parts):
    ends = []
    for optimizer in ("mezzo", "AdamW"):
        model, _, amp = session(policy, optimizer, max_grad_norm=1.0)
        for number in range(8):
            train(amp, model, number, micro_batches=parts)
        amp.close()
        assert all(param.dtype == torch.float32 for param in model.parameters())
        ends.append(list(model.parameters()))
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("policy, optimizer", thinned([*LOW, *O3[1:]], OPTIMIZERS, every=2))
def test_every_way_to_train_stays_near_fp32(policy, optimizer):
    model, _, amp = session(policy, optimizer, max_grad_norm=1.0)
    plain, theirs = built(optimizer)
    start = loss_of(plain, 99).item()
    for number in range(12):
        assert not train(amp, model, number % 3).skipped
        train_plainly(plain, theirs, number % 3, edit=clip_to(1.0))
    with torch.no_grad():
        mine, true = (loss_of(m, 0, a).item() for m, a in ((model, amp), (plain, None)))
    assert abs(mine - true) < 0.1 * abs(start - true)


# Who trains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_parameters_that_are_frozen_thawed_unused_or_added_later(policy):
    model, made, amp = session(policy, lambda p: torch.optim.SGD(list(p)[:4], lr=0.1, momentum=0.9, weight_decay=0.1))
    plain, theirs = built(lambda p: torch.optim.SGD(list(p)[:4], lr=0.1, momentum=0.9, weight_decay=0.1))
    start = copy.deepcopy(list(plain.parameters()))
    for number in range(8):
        for net, optimizer in ((model, made), (plain, theirs)):
            net[0].requires_grad_(number not in (2, 3))
            if number == 5:
                optimizer.add_param_group({"params": net[3].parameters(), "lr": 0.05})
        before = model[0].weight.detach().clone(), model[3].weight.detach().clone()
        train(amp, model, number)
        train_plainly(plain, theirs, number)
        plain.zero_grad()
        moved = [not torch.equal(was, now) for was, now in zip(before, (model[0].weight, model[3].weight), strict=True)]
        assert moved == [number not in (2, 3), number >= 5]
    if policy in FP32:
        assert_same(model.state_dict(), plain.state_dict())
    assert_near(weights(amp), list(plain.parameters()), start)


def test_parameters_without_gradients_are_left_alone():
    model = Weights(2, 2, 2, value=1.0)
    model.each[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true", max_grad_norm=1.0)
    amp.backward(model.each[0].sum())
    amp.step()
    assert model.each[1].tolist() == model.each[2].tolist() == [1.0, 1.0]
    assert len(optimizer.state) == 1


@pytest.mark.parametrize("policy", [*EVERY, O3[1]])
def test_several_models_and_optimizers_tied_and_empty_parameters(policy):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    second.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), mezzo.optim.AdamW([second.bias, second.nothing], lr=0.1)]
    amp = MixedPrecision([first, second], optimizers, policy, max_grad_norm=1.0)
    assert second.weight is first.weight
    for _ in range(2):
        before = [p.detach().clone() for p in (first.weight, first.bias, second.bias)]
        with amp.autocast():
            loss = second(first(torch.ones(2, 4))).float().square().mean() + second.nothing.float().sum()
        amp.backward(loss)
        assert torch.isfinite(amp.step().grad_norm)
        amp.zero_grad()
        now = (first.weight, first.bias, second.bias)
        assert not any(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    amp.close()
    assert second.weight is first.weight
    assert first.weight.dtype == torch.float32


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 8, sparse=sparse)
            self.head = nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


@pytest.mark.parametrize("policy, clip, parts", pairwise(EVERY, [None, 0.1], [1, 3]))
def test_sparse_embeddings_train_as_dense_ones(policy, clip, parts):
    runs = []
    for sparse in (True, False):
        model = Words(sparse)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.5), policy, max_grad_norm=clip)
        norms = []
        for number in range(5):
            for part in range(parts):
                generator = torch.Generator().manual_seed(10 * number + part)
                words = torch.randint(0, 20, (4, 6), generator=generator)  # some twice in a sentence
                with amp.autocast():
                    loss = functional.cross_entropy(model(words).float(), words[:, 0] % 3)
                amp.backward(loss)
            if number == 3:
                (model.table.weight.grad._values() if sparse else model.table.weight.grad)[0] = float("inf")
            step = amp.step()
            assert bool(step.skipped) == (number == 3)
            norms.append(step.grad_norm.item())
            amp.zero_grad()
        runs.append((weights(amp), norms))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=2e-2)
    for mine, dense in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-5 if policy in FP32 else 5e-3)


class Lion(torch.optim.Optimizer):
    """An optimizer from elsewhere, with no closure and no foreach."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    average.lerp_(p.grad, 0.01)


@pytest.mark.parametrize("policy", EVERY)
def test_an_optimizer_from_elsewhere(policy):
    model, _, amp = session(policy, lambda p: Lion(p, lr=2.0**-7))
    plain, theirs = built(lambda p: Lion(p, lr=2.0**-7))
    for number in range(5):
        train(amp, model, number)
        train_plainly(plain, theirs, number)
    same = [
        torch.isclose(a, b, atol=1e-4).float().mean() for a, b in zip(weights(amp), plain.parameters(), strict=True)
    ]
    assert min(same) == 1.0 if policy in FP32 else min(same) > 0.8  # signs flip where a gradient is about zero


def test_an_optimizer_that_has_trained_before_keeps_its_state():
    for policy in ("O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"):
        for optimizer in ("AdamW", "mezzo"):
            model, made = built(optimizer)
            train_plainly(model, made, 0)
            before = copy.deepcopy([list(model.parameters()), made.state_dict()])
            amp = MixedPrecision(model, made, policy)
            assert_same(weights(amp), before[0])
            train(amp, model, 1)
            assert {int(state["step"]) for state in made.state_dict()["state"].values()} == {2}


# The end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer", thinned([*EVERY, *O3], OPTIMIZERS, every=4))
def test_after_close_model_and_optimizer_are_plain(policy, optimizer):
    model, made, amp = session(policy, optimizer)
    for number in range(3):
        train(amp, model, number)
    kept = weights(amp)
    backward(amp, model, 3)
    amp.close()
    amp.close()
    assert repr(amp) == "MixedPrecision(closed)"
    assert made.param_groups[0]["params"] == list(model.parameters())
    for mine, exact in zip(model.parameters(), kept, strict=True):
        assert torch.equal(mine, exact.float())
        assert mine.dtype == torch.float32
        assert mine.grad is None
    twin, theirs = built(optimizer)
    twin.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(made.state_dict()))
    for number in range(3):
        train_plainly(model, made, number)
        train_plainly(twin, theirs, number)
    assert_same(model.state_dict(), twin.state_dict())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("policy", LOW[2:])
@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_not_a_bit_of_the_initialisation_is_lost(policy, optimizer):
    plain = network()
    model, _, amp = session(policy, optimizer)
    error = 2.0**-40 if optimizer == "mezzo" and "bfloat16" not in policy else 0.0  # FP16's halves below 2**-16
    for before, after in zip(plain.parameters(), weights(amp), strict=True):
        assert (before - after).abs().max() <= error
    amp.close()
    for before, after in zip(plain.parameters(), model.parameters(), strict=True):
        assert (before - after).abs().max() <= error


def test_weights_that_users_write_between_steps_are_those_that_are_trained():
    for policy in EVERY:
        for optimizer in OPTIMIZERS:
            model, _, amp = session(policy, optimizer)
            train(amp, model, 0)
            with torch.no_grad():
                model[0].weight.clamp_(-0.125, 0.125)
            train(amp, model, 1)
            assert weights(amp)[0].abs().max() < 0.125 + 0.05, (policy, optimizer)


def test_a_session_says_what_it_trains_and_how():
    policy = "O1,dtype=bfloat16,emulate=true"
    _, _, amp = session(policy)
    assert repr(amp) == f"MixedPrecision(Sequential, SGD, policy={policy!r})"
    assert str(amp.policy) == policy
    assert session(Policy.O2("bfloat16"))[2].policy == Policy.O2("bfloat16")
    assert session(None)[2].policy.level == "O1"


def test_a_norm_can_be_set_between_steps_and_is_that_of_unscaled_gradients():
    model = Weights(3)
    _, amp = over(model, "O1,emulate=true", max_grad_norm=1.0)
    for norm, moved in ((1.0, [0.6, 0.0, 0.8]), (None, [3.0, 0.0, 4.0])):
        before, amp.max_grad_norm = model.each[0].detach().clone(), norm
        amp.backward(model.loss(torch.tensor([3.0, 0.0, 4.0])))
        assert amp.step().grad_norm.item() == 5.0
        amp.zero_grad()
        torch.testing.assert_close(before - model.each[0].detach(), torch.tensor(moved))


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_an_optimizer_that_the_session_does_not_know_is_refused_and_changes_nothing(policy):
    """Its gradients would be unchecked, and low weights without a remainder."""
    model, _, amp = session(policy)
    stranger = torch.optim.SGD(model.parameters(), lr=1.0)
    elsewhere = torch.nn.Linear(2, 1)
    free = torch.optim.SGD(elsewhere.parameters(), lr=1.0)
    with amp.autocast():
        loss = model(batch(0)[0]).float().square().mean()
    amp.backward(loss)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(StateError, match=r"does not know(.|\n)*MixedPrecision\(model, \[optimizer, other\], policy\)"):
        stranger.step()
    assert_same(before, [param.detach() for param in model.parameters()])
    elsewhere(torch.ones(1, 2)).sum().backward()
    free.step()
    amp.step()
    amp.close()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    stranger.step()
