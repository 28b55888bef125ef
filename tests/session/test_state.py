"""What begins before a session and outlasts it: states, other systems' scalers, prepared models, what none updates.

Saving and loading in the middle of training, in any order, is ``tests/acceptance``'s.
"""

import copy
import io

import pytest
import torch
from torch import nn

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, StateError
from mezzo.weights import Halves

from ..support.refusals import bits, refused
from .loops import (
    EVERY,
    LOW,
    O3,
    OPTIMIZERS,
    Weights,
    assert_same,
    backward,
    facts,
    network,
    on_disk,
    over,
    session,
    train,
    train_plainly,
    weights,
)  # fmt: skip

BF16 = LOW[3]

# States ---------------------------------------------------------------------------------------------------------------


def test_a_state_is_a_plain_tree_that_shares_no_memory_with_the_session():
    for policy in LOW:
        model, _, amp = session(policy)
        train(amp, model, 0)
        state = amp.state_dict()
        before = copy.deepcopy(state)
        train(amp, model, 1, spoilt=True)
        train(amp, model, 2)
        assert_same(before, state)
        leaves = torch.utils._pytree.tree_leaves(state)
        assert {type(leaf) for leaf in leaves} <= {int, float, bool, str, torch.Tensor, type(None)}


@pytest.mark.parametrize("policy", LOW[2:])
def test_a_state_of_before_with_remainders_loads_whose_values_are_the_models(policy):
    model, _, amp = session(policy, "mezzo")
    for number in range(2):
        train(amp, model, number)
    state = {**amp.state_dict(), "version": 4, "remainders": {"0.weight": torch.ones(16, 8).short()}}
    again, _, fresh = session(policy, "mezzo")
    again.load_state_dict(model.state_dict())
    fresh.load_state_dict(state)
    assert_same(model.state_dict(), again.state_dict())
    assert_same(amp.state_dict(), fresh.state_dict())


KINDS = [("O0", "AdamW"), (LOW[1], "AdamW"), (BF16, "AdamW"), (LOW[2], "AdamW"), (BF16, "mezzo"), (LOW[2], "mezzo")]


@pytest.mark.parametrize("one", KINDS)
def test_fp32_values_survive_a_change_of_policy_or_optimizer(one):
    model, _, amp = session(*one)
    for number in range(2):
        train(amp, model, number)
    saved = on_disk(model, amp)
    for other in KINDS:
        for order in ((0, 1), (1, 0)):
            fresh = session(*other)
            for index in order:
                fresh[2 * index].load_state_dict(saved[index])
            error = 2.0**-40 if other == (LOW[2], "mezzo") else 0.0
            for mine, theirs in zip(weights(amp), weights(fresh[2]), strict=True):
                assert (mine - theirs).abs().max() <= error
        assert not train(fresh[2], fresh[0], 3).skipped


def test_a_repaired_session_goes_on_after_an_update_that_ended_half_way():
    class Raising(torch.optim.SGD):
        armed = False

        @torch.no_grad()
        def step(self, closure=None):
            if self.armed:
                self.param_groups[0]["params"][0].add_(1.0)
                raise RuntimeError("no")
            return super().step(closure)

    for policy in EVERY:
        model, made, amp = session(policy, lambda params: Raising(params, lr=0.01))
        saved = copy.deepcopy([model.state_dict(), made.state_dict(), amp.state_dict()])
        backward(amp, model, 0)
        made.armed = True
        with pytest.raises(RuntimeError, match="no"):
            amp.step()
        made.armed = False
        with pytest.raises(StateError, match=r"(?s)ended half-way.*Raising.*load_state_dict"):
            amp.step()
        made.zero_grad()
        for part, state in zip((model, made, amp), saved, strict=True):
            part.load_state_dict(state)
        assert not train(amp, model, 1).skipped


# stateful -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [EVERY[1], *LOW[1:], O3[1]])
def test_stateful_goes_on_bit_for_bit(policy):
    """From the first step on, whatever the optimizer had made by then; and what was loaded is left as it was."""
    for optimizer, begun in (("AdamW", 0), ("AdamW", 3), ("mezzo", 3)):
        model, _, amp = session(policy, optimizer)
        for number in range(begun):
            train(amp, model, number, spoilt=number == 1)
        saved = copy.deepcopy(amp.stateful().state_dict())
        kept = copy.deepcopy(saved)
        again, _, fresh = session(policy, optimizer)
        fresh.stateful().load_state_dict(saved)
        for number in range(3, 6):
            train(amp, model, number)
            train(fresh, again, number)
        assert_same((weights(amp), amp.stats()), (weights(fresh), fresh.stats()))
        assert_same(saved, kept)


def test_what_fp16_does_not_hold_is_refused_by_stateful_before_anything_is_loaded():
    model, _, amp = session(BF16, "AdamW")
    with torch.no_grad():
        model[0].weight.fill_(1e6)
    saved = amp.stateful().state_dict()
    parts = session(LOW[2], "AdamW")
    with refused(StateError, "0.weight: values beyond 65504 → float16", parts=parts):
        parts[2].stateful().load_state_dict(saved)


def test_stateful_refuses_what_has_no_place_by_the_names_of_parameters():
    """LBFGS tells what it keeps only to a closure, and keeps lists of tensors then."""
    model, _, amp = session("O0", lambda params: torch.optim.LBFGS(params, max_iter=8))
    with refused(mezzo.UnsupportedError, "before its first step", "LBFGS", "one step of the session"):
        amp.stateful().state_dict()

    def closure():
        amp.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        amp.backward(loss)
        return loss

    amp.step(closure=closure)
    with refused(mezzo.UnsupportedError, "LBFGS keeps tensors in nested containers", "old_dirs"):
        amp.stateful().state_dict()


# Other systems --------------------------------------------------------------------------------------------------------

SCALERS = {
    "torch": lambda scale: (
        torch.amp.GradScaler("cpu", init_scale=scale).state_dict() | {"scale": scale, "_growth_tracker": 3}
    ),
    "apex": lambda scale: {"loss_scaler0": {"loss_scale": scale, "unskipped": 3}},
    "paddle": lambda scale: {
        "scale": torch.tensor([scale]), "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1, "incr_count": 3, "decr_count": 0, "use_dynamic_loss_scaling": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("system", SCALERS)
def test_scalers_of_other_systems_give_their_scale_and_their_count(system):
    for make in (MixedPrecision, mezzo.attach):
        model = Weights(1)
        amp = make(model, torch.optim.SGD(model.parameters(), lr=1.0), "O0,loss_scale=dynamic(interval=5)")
        amp.load_state_dict(SCALERS[system](512.0))
        assert amp.loss_scale.item() == 512.0
        for scale in (512.0, 1024.0):
            amp.backward(model.loss(1.0))
            assert amp.step().next_scale.item() == scale
            amp.zero_grad()
        amp.close()
    for policy in ("O0", "O0,loss_scale=8"):  # where the scale does not move, a scaler's stays out
        _, amp = over(Weights(1), policy)
        before = amp.state_dict()
        amp.load_state_dict(SCALERS[system](512.0))
        assert_same(before, amp.state_dict())


def test_a_scale_that_counts_from_below_zero_is_saved_and_loaded():
    """DeepSpeed's first growth comes a step late: its count begins at -1."""
    saved, loaded = (over(Weights(1), f"O0,loss_scale={LossScale.like('deepspeed')}")[1] for _ in range(2))
    assert saved.state_dict()["loss_scale"]["clean_steps"] == -1
    loaded.load_state_dict(saved.state_dict())
    assert_same(saved.state_dict(), loaded.state_dict())


# Models that are prepared first ---------------------------------------------------------------------------------------


def steps(model, amp, numbers=range(3)):
    for number in numbers:
        train(amp, model, number, spoilt=number == 1)


@pytest.mark.parametrize("policy", ["O0", *LOW[1:], O3[1]])
def test_a_session_over_a_prepared_model_is_the_one_that_prepares_it_itself(policy):
    """Of an optimizer from before or after; and one session after another goes on with every bit."""
    for optimizer in ("AdamW", "mezzo"):
        one, first, amp_one = session(policy, optimizer)
        steps(one, amp_one)
        expected = facts(one, first, amp=amp_one)
        steps(one, amp_one, range(3, 5))
        amp_one.close()
        for is_early in (True, False):
            two = network()
            made = OPTIMIZERS[optimizer](two.parameters()) if is_early else None
            handle = mezzo.prepare(two, policy)
            made = made or OPTIMIZERS[optimizer](two.parameters())
            amp = MixedPrecision(handle, made)
            assert amp.policy == Policy.parse(policy)
            steps(two, amp)
            assert_same(expected, facts(two, made, amp=amp))
            low = copy.deepcopy(two.state_dict())
            amp.close()
            assert_same(low, two.state_dict())  # a wrapper around it may rely on its dtypes
            again = MixedPrecision(handle, made)
            if "loss_scale" not in policy:  # which would begin anew
                steps(two, again, range(3, 5))
                again.close()
                handle.remove()
                assert_same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("policy", LOW)
def test_without_a_session_removing_restores_every_bit(policy):
    model = network()
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([1.00390625, -0.0, 1e-40, 3.0e-8])  # a tie in BF16; subnormal numbers
    before = copy.deepcopy(model.state_dict())
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        model(torch.ones(2, 8)).float().sum().backward()
    for _ in range(2):
        handle.remove()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) or "bfloat16" not in policy
            assert ((value - before[name]).abs() <= 2.0**-40).all(), name
            assert torch.equal(value.signbit(), before[name].signbit()), name


def test_what_is_written_or_loaded_in_between_counts():
    """With all its bits, however it is written."""
    model, fresh = network(), network()
    nn.init.normal_(fresh[3].weight)
    twin = copy.deepcopy(fresh)
    handle = mezzo.prepare(model, BF16)
    model.load_state_dict(fresh.state_dict())
    for net in (model, twin):
        net[0].weight.data[0, :2] = torch.tensor([2.1, -3.3])  # as programs initialise: no version counts this
        with torch.no_grad():
            net[0].weight[1] *= 1.7
    params = MixedPrecision(handle, OPTIMIZERS["SGD"](model.parameters())).master_params()
    assert_same(list(params), list(twin.parameters()))


def test_wrappers_around_a_prepared_model_are_known(alone):
    one, _, first = session(BF16, "AdamW")
    steps(one, first)
    for wrap in (
        lambda model: torch.compile(model, backend="eager"),
        nn.Sequential,
        nn.parallel.DistributedDataParallel,
    ):
        two = network()
        handle = mezzo.prepare(two, BF16)
        wrapper = wrap(two)
        argument = handle if isinstance(wrapper, nn.parallel.DistributedDataParallel) else wrapper
        amp = MixedPrecision(argument, OPTIMIZERS["AdamW"](two.parameters()))
        assert amp.policy == Policy.parse(BF16)
        steps(getattr(wrapper, "_orig_mod", wrapper), amp)  # to compile is tests/cast's
        assert_same(weights(first), weights(amp))
        amp.close()


@pytest.mark.parametrize("is_tied", [False, True])
def test_several_models_train_in_one_session_prepared_or_not(is_tied):
    """Tied ones stay tied, and empty parameters are no case."""
    ends = []
    for early in (0, 1, 2):
        models = [network(), network()]
        models[0].register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
        if is_tied:
            models[1][0].weight = models[0][0].weight
        made = OPTIMIZERS["AdamW"](dict.fromkeys(param for model in models for param in model.parameters()))
        handles = [mezzo.prepare(model, BF16) for model in models[:early]]
        amp = MixedPrecision([*handles, *models[early:]], made, BF16, max_grad_norm=1.0)
        for number in range(2):
            with amp.autocast():
                loss = (models[0](torch.ones(4, 8)) * models[1](torch.ones(4, 8) * number)).float().square().mean()
            amp.backward(loss + models[0].nothing.float().sum())
            assert torch.isfinite(amp.step().grad_norm)
            amp.zero_grad()
        ends.append([model.state_dict() for model in models])
        amp.close()
        assert is_tied or [isinstance(m[0].weight, Halves) for m in models] == [True] * early + [False] * (2 - early)
        assert not is_tied or models[1][0].weight is models[0][0].weight
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_a_copy_or_a_pickled_model_leads_to_no_handle():
    model = network()
    mezzo.prepare(model, LOW[0])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        steps(other, MixedPrecision(other, OPTIMIZERS["SGD"](other.parameters()), LOW[1]))


def test_values_that_do_not_fit_are_refused_while_they_load():
    for begin in (
        mezzo.prepare,
        lambda model, policy: MixedPrecision(model, OPTIMIZERS["SGD"](model[3:].parameters()), policy),
    ):
        model = network()
        begun = begin(model, "O2,emulate=true")
        large = network().state_dict()
        large["0.weight"] *= 1e6
        with refused(mezzo.NumericsError, "beyond the range of the model's halves", "0.weight", parts=(model, begun)):
            model.load_state_dict(large)


# What no optimizer updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", LOW[2:])
@pytest.mark.parametrize("begin", [MixedPrecision, mezzo.attach])
def test_what_no_optimizer_updates_is_given_back_as_it_was(policy, begin):
    """A frozen part with batch norm and a buffer, in any copy and checkpoint of the model's, and for any policy."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), network()[3])
    model[:3].requires_grad_(False).eval()
    nn.init.normal_(model[1].weight)
    model.register_buffer("shift", torch.randn(6, generator=torch.Generator().manual_seed(0)))

    def frozen(net):
        return bits({name: value for name, value in net.state_dict().items() if not name.startswith("3.")})

    before, head = frozen(model), model[3].weight.detach().clone()
    optimizer = OPTIMIZERS["AdamW"](model[3].parameters())
    amp = begin(model, optimizer, policy)
    assert model[0].weight.hi.dtype == amp.policy.dtype
    for number in range(3):
        if begin is MixedPrecision:
            train(amp, model, number)
        else:
            train_plainly(model, optimizer, number)
        assert frozen(model) == frozen(copy.deepcopy(model)) == before
    saved = copy.deepcopy(amp.stateful().state_dict())
    amp.close()
    assert frozen(model) == before
    assert not torch.equal(model[3].weight, head)
    for level in ("O1,emulate=true", policy):
        other = copy.deepcopy(model)
        for param in other.parameters():
            nn.init.ones_(param)
        again = MixedPrecision(other, OPTIMIZERS["AdamW"](other[3].parameters()), level)
        again.stateful().load_state_dict(copy.deepcopy(saved))
        again.close()
        assert frozen(other) == before
