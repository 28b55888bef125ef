"""``mezzo.attach``: a plain loop comes to what the same loop in a session's calls comes to, bit for bit."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import mezzo

from .loops import CLIPPING, OPTIMIZERS, POLICIES, attached, build, ends, loss_of, spoil, train, train_with


def both(policy, optimizer="SGD", *, schedule=False, max_grad_norm=None, **options):
    """Return the ends of both loops, and what clipping returned in them."""
    found = []
    for own in (True, False):
        model, built = build(optimizer)
        schedulers = [StepLR(built, 1, gamma=0.5)] if schedule else []
        if own:
            with attached(model, built, POLICIES[policy], max_grad_norm=max_grad_norm) as amp:
                norms = train(model, built, schedulers=schedulers, **options)
                found.append((ends(amp, built), norms))
        else:
            amp = mezzo.MixedPrecision(model, built, POLICIES[policy], max_grad_norm=max_grad_norm)
            norms = train_with(amp, model, built, schedulers=schedulers, **options)
            found.append((ends(amp, built), norms))
            amp.close()
    return found


#: Every option with every other one once, at least.
FEW = [
    ("O0", "SGD", 1, "norm", True, None),
    ("O0, scaled", "fused", 2, "value", False, None),
    ("O1", "SGD", 2, "none", True, 0.5),
    ("O1", "fused", 1, "norm", True, None),
    ("O1", "mezzo", 2, "norm", False, None),
    ("O1, bfloat16", "AdamW", 2, "value", True, None),
    ("O2", "SGD", 2, "norm", True, None),
    ("O2", "AdamW", 1, "value", False, None),
    ("O2", "fused", 1, "none", True, 0.5),
    ("O2", "mezzo", 2, "norm", True, None),
    ("O2, bfloat16", "SGD", 2, "norm", False, None),
    ("O2, bfloat16", "mezzo", 1, "none", True, None),
    ("O3", "SGD", 1, "norm", True, None),
    ("O3, bfloat16", "mezzo", 2, "value", True, None),
]


@pytest.mark.parametrize("policy, optimizer, micro_batches, clip, schedule, max_grad_norm", FEW)
def test_a_loop_is_that_of_a_session(policy, optimizer, micro_batches, clip, schedule, max_grad_norm, bits):
    one, other = both(
        policy, optimizer, micro_batches=micro_batches, clip=CLIPPING[clip], schedule=schedule,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    assert bits(one) == bits(other)
    assert one[0][3].skipped == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy, optimizer", list(itertools.product(POLICIES, OPTIMIZERS)))
def test_every_loop_is_that_of_a_session(policy, optimizer, bits):
    for micro_batches, clip, schedule, norm in itertools.product((1, 2), CLIPPING, (False, True), (None, 0.5)):
        one, other = both(
            policy, optimizer, micro_batches=micro_batches, clip=CLIPPING[clip], schedule=schedule, max_grad_norm=norm
        )
        assert bits(one) == bits(other), (micro_batches, clip, schedule, norm)


def test_names_are_bound_until_it_is_detached():
    places = {
        "engine": (torch.autograd, "_engine_run_backward"),
        "backward": (torch.autograd, "backward"),
        "norm": (nn.utils, "clip_grad_norm_"),
        "its own": (nn.utils.clip_grad, "clip_grad_norm_"),
        "value": (nn.utils, "clip_grad_value_"),
        "total": (nn.utils, "get_total_norm"),
        "StepLR": (torch.optim.lr_scheduler.LRScheduler, "step"),
        "Plateau": (torch.optim.lr_scheduler.ReduceLROnPlateau, "step"),
        "scaler": (torch.amp.GradScaler, "step"),
        "unscaling": (torch.amp.GradScaler, "unscale_"),
        "subclasses": (torch.optim.lr_scheduler.LRScheduler, "__init_subclass__"),
    }
    insides = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.get_total_norm]
    before = {name: vars(place).get(key) for name, (place, key) in places.items()}
    cells = [each.__closure__[0].cell_contents for each in insides]
    model, built = build()
    instance, optimizers = set(vars(model)), dict(vars(built))
    amp = mezzo.attach(model, built, "O2,emulate=true")
    assert torch.autograd._engine_run_backward is not before["engine"]
    train(model, built)
    amp.detach()
    amp.detach()
    assert {name: vars(place).get(key) for name, (place, key) in places.items()} == before
    assert [each.__closure__[0].cell_contents for each in insides] == cells
    assert set(vars(model)) == instance
    assert set(vars(built)) == set(optimizers)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_after_it_was_detached_nothing_is_scaled_or_cast():
    model, built = build()
    amp = mezzo.attach(model, built, "O2,dtype=bfloat16")
    train(model, built)
    amp.detach()
    twin, theirs = build()
    twin.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(built.state_dict()))
    train(model, built, spoilt=())
    train(twin, theirs, spoilt=())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_model_that_is_listed_twice_is_one():
    model, built = build()
    names = vars(model).keys() | set()
    with attached([model, model], built, "O1,emulate=true") as amp:
        train(model, built)
        assert amp.stats().steps == 3
    assert vars(model).keys() == names


def test_a_second_session_is_refused_and_names_what_adds_to_the_first():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        with pytest.raises(mezzo.StateError, match="a session is attached already") as raised:
            mezzo.attach(*build(), "O1,emulate=true")
        assert "amp.add(optimizer)" in str(raised.value)
    with attached(*build(), "O1,emulate=true"):
        pass


def test_what_is_refused_changes_nothing():
    model, built = build()
    with pytest.raises(mezzo.PolicyError, match="hold_schedulers is 'no'\\n  why    it is True or False"):
        mezzo.attach(model, built, "O1", hold_schedulers="no")
    for policy, optimizer, error in (
        ("O7", built, mezzo.PolicyError),
        ("O1", build()[1], mezzo.PolicyError),
        ("O2", built, mezzo.PolicyError),
    ):
        before = vars(model).keys(), vars(built).keys(), torch.autograd._engine_run_backward
        with pytest.raises(error):
            mezzo.attach(model, optimizer, policy, max_grad_norm=-1.0 if policy == "O2" else None)
        assert (vars(model).keys(), vars(built).keys(), torch.autograd._engine_run_backward) == before
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_session_nobody_needs_any_more_gives_the_names_back():
    engine = torch.autograd._engine_run_backward
    mezzo.attach(*build(), "O1,emulate=true")
    gc.collect()
    assert torch.autograd._engine_run_backward is engine
    with attached(*build(), "O1,emulate=true"):
        pass


def test_what_ran_low_ran_low():
    for policy, dtype in (("O1", torch.float16), ("O2", torch.float16), ("O1,dtype=bfloat16", torch.bfloat16)):
        model, built = build()
        with attached(model, built, f"{policy},emulate=true") as amp:
            seen = []
            hook = model[0].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
            out = model(torch.ones(2, 8))
            assert seen == [dtype]
            assert out.dtype == torch.float32
            assert amp.policy.dtype == dtype
            hook.remove()


def test_a_later_optimizer_is_taken_over_too():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    with attached(model, one, "O1,emulate=true") as amp:
        amp.add(other)
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, 0).backward()
        spoil(model[1])
        other.step()
        one.step()
        assert [bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)] == [True] * 2 + [
            False
        ] * 2
        assert "mezzo" in other.state_dict()


def test_the_session_answers_what_the_last_step_did():
    model, built = build()
    with attached(model, built, "O1,emulate=true") as amp:
        assert amp.last_step is None
        train(model, built, steps=range(2))
        assert amp.last_step.skipped
        assert isinstance(amp, mezzo.MixedPrecision)
        assert amp.stats().skipped == 1


def test_schedulers_wait_for_skipped_steps_and_for_no_others():
    for hold, rates in ((True, [0.05, 0.05, 0.025]), (False, [0.05, 0.025, 0.0125])):
        model, built = build()
        before = StepLR(built, 1, gamma=0.5)
        with attached(model, built, "O1,emulate=true", hold_schedulers=hold):
            found = []
            for number in range(3):
                train(model, built, steps=[number], schedulers=[before])
                found += before.get_last_lr()
            assert found == pytest.approx(rates)


def test_a_scheduler_of_epochs_does_not_wait_for_one_skipped_step():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        scheduler = LambdaLR(built, lambda epoch: 0.5**epoch)
        train(model, built)  # the second of three skips
        scheduler.step()
        assert scheduler.last_epoch == 1
        train(model, built, steps=range(1), spoilt=[0])
        scheduler.step()
        assert scheduler.last_epoch == 1
        scheduler.step()  # nothing was stepped since: torch's own
        assert scheduler.last_epoch == 2
