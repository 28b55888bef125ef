"""The one loss scale of a session: how it begins, moves and gives up, and whose gradients carry which."""

import pytest
import torch

from mezzo import LossScale, MixedPrecision, Policy, ScaleCollapsed

from ..support.tables import thinned
from .counted import iterate, session
from .loops import INF, NAN, Weights, assert_same, attached, over

EVERY_STEP = "loss_scale=dynamic(init=256,interval=1)"


@pytest.mark.parametrize(
    "policy, scale, moves",
    [
        ("O0", 1.0, False), ("O1,dtype=bfloat16", 1.0, False), ("O2,dtype=bfloat16", 1.0, False), ("O3", 1.0, False),
        ("O1", 2.0**16, True), ("O2", 2.0**16, True), ("O2,loss_scale=1024", 1024.0, False),
        ("O1,loss_scale=none", 1.0, False),
    ],
)  # fmt: skip
def test_what_a_level_begins_with(policy, scale, moves):
    model = Weights(2)
    _, amp = over(model, f"{policy},emulate=true")
    assert amp.loss_scale.item() == amp.stats().scale == scale
    amp.backward(model.loss(1.0) * 2.0**-12)
    model.each[0].grad[0] = INF
    step = amp.step()
    assert (step.scale.item(), step.next_scale.item()) == (scale, scale / 2 if moves else scale)


def test_gradients_keep_the_scale_that_they_were_made_with():
    """A scale that grows is committed by the next loss, at the latest; a step has said so before."""
    model = Weights(1)
    _, amp = over(model, f"O0,{EVERY_STEP}")
    for number in range(4):
        amp.backward(model.loss(1.0))
        assert model.each[0].grad.item() == 256.0 * 2**number
        step = amp.step()
        assert (step.scale.item(), step.next_scale.item()) == (256.0 * 2**number, 512.0 * 2**number)
        amp.zero_grad()
    assert model.each[0].tolist() == [-4.0]


def test_several_losses_share_it():
    model = Weights(1, 1)
    _, amp = over(model, f"O0,{EVERY_STEP}")
    for struck in (None, 0, 1):
        for number in (0, 1):
            amp.backward(model.each[number].sum())
            if number == struck:
                model.each[number].grad.fill_(INF)
        assert bool(amp.step().skipped) == (struck is not None)
        amp.zero_grad()
    assert amp.loss_scale.item() == 128.0
    assert [p.tolist() for p in model.each] == [[-1.0], [-1.0]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("struck", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_one_loss_that_two_optimizers_step_from_counts_once(first, struck, hysteresis):
    """Whichever steps first, and with a budget of overflows too: a step is an iteration."""
    rules = LossScale.dynamic(init=256.0, interval=2, hysteresis=hysteresis, floor=64.0)
    model = Weights(1, 1)
    pair, amp = over(model, Policy.O0(loss_scale=rules), [model.each[0]], [model.each[1]])
    scale, clean, budget = 256.0, 0, hysteresis
    for step in range(12):
        overflow = bool(struck) and step not in (0, 3, 4)
        amp.backward(model.loss(1, 1))
        for number in struck if overflow else ():
            model.each[number].grad.fill_(NAN)
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


def test_a_scale_below_one_trains_exactly():
    model, amp = session("dynamic(init=2**-8,floor=2**-20,interval=2)")
    for event in "..X.XXX..":
        step = iterate(model, amp, event)
    assert step.scale.item() == 2.0**-11
    assert amp.loss_scale.item() == 2.0**-10
    assert model.each[0].tolist() == [-5.0, -5.0]


@pytest.mark.parametrize("style", ["five lines", "attached"])
def test_the_ceiling_and_the_floor(style):
    model = Weights(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = "O0,loss_scale=dynamic(init=8,interval=1,floor=2,ceiling=16)"
    if style == "attached":
        with attached(model, optimizer, policy) as amp:
            for factor, scale in ((1.0, 16), (1.0, 16), (NAN, 8), (NAN, 4), (NAN, 2), (NAN, 2), (1.0, 4)):
                model.loss(1.0).backward()
                model.each[0].grad.mul_(factor)
                optimizer.step()
                optimizer.zero_grad()
                assert float(amp.last_step.next_scale) == scale
        return
    amp = MixedPrecision(model, optimizer, policy)
    for event, scale in zip("..XXXX.", (16, 16, 8, 4, 2, 2, 4), strict=True):
        assert float(iterate(model, amp, event).next_scale) == scale


# Giving up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, fused, poison",
    thinned(["O0", "O1,emulate=true", "O2,emulate=true"], [False, True], [INF, NAN], every=2),
)
def test_overflows_in_a_row_end_in_scale_collapsed(level, fused, poison):
    """Fifteen bring 2**15 to the floor, the others stand there: the patience. The next step raises."""
    patience, model = 20, Weights(2, 2, 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    rules = LossScale.dynamic(init=2.0**15, patience=patience)
    amp = MixedPrecision(model, optimizer, Policy.parse(level).evolve(loss_scale=rules))

    def step(spoils=True):
        amp.backward(model.loss(1, 1, 1, 1))
        if spoils:
            model.each[1].grad[1] = poison
            model.each[3].grad[0] = -poison
        try:
            return amp.step()
        finally:
            amp.zero_grad()

    step(spoils=False)
    before = [param.detach().clone() for param in amp.master_params()]
    for _ in range(15 + patience):
        assert bool(step().skipped)
    with pytest.raises(ScaleCollapsed) as caught:
        step()
    text = str(caught.value)
    assert text.startswith(f"the loss scale collapsed: {patience} overflows in a row at its floor")
    assert f"step {patience + 16}" in text
    assert "each.1" in text
    assert "each.3" in text
    assert "each.0" not in text
    assert "  write  " in text
    assert amp.loss_scale.item() == 1.0
    assert_same(before, [param.detach() for param in amp.master_params()])


@pytest.mark.parametrize(
    "rules, pattern",
    [
        ("constant(1024,patience=3)", "X.XX.XXX"),
        ("constant(1,patience=2)", "X.XX"),
        ("dynamic(init=4,patience=2)", "XXXX"),
        ("dynamic(init=4,interval=1,patience=2)", "XXX.XXX"),
        ("dynamic(init=2**-10,floor=2**-12,patience=3)", "XXXXX"),
    ],
)
def test_patience_is_for_overflows_in_a_row_at_the_floor(rules, pattern):
    """Exactly the last event of each pattern is one too many."""
    model, amp = session(rules)
    for event in pattern:
        assert bool(iterate(model, amp, event).skipped) == (event == "X")
    with pytest.raises(ScaleCollapsed, match=r"each\.0"):
        iterate(model, amp)
    assert model.each[0].isfinite().all()


def test_without_patience_the_scale_stands_at_its_floor_for_ever():
    model, amp = session("dynamic(init=4,interval=2)")
    for _ in range(30):
        assert bool(iterate(model, amp, "X").skipped)
    assert amp.loss_scale.item() == 1.0
    for _ in range(2):
        iterate(model, amp)
    assert amp.loss_scale.item() == 2.0


def test_failing_losses_are_no_overflows_at_the_floor():
    model, amp = session("dynamic(init=1,patience=3)")
    for event in "XXFX":
        iterate(model, amp, event)
    with pytest.raises(ScaleCollapsed):
        iterate(model, amp)
    model, amp = session("dynamic(init=1,patience=3)")
    for event in "XX.XX":
        assert bool(iterate(model, amp, event).skipped) == (event == "X")


def test_loading_begins_anew_after_a_collapse():
    """The session's own state, or another library's scale."""
    rules = "dynamic(init=1,patience=2)"
    for state in (session(rules)[1].state_dict(), torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()):
        model, amp = session(rules)
        for _ in range(2):
            iterate(model, amp, "X")
        with pytest.raises(ScaleCollapsed):
            iterate(model, amp)
        amp.load_state_dict(state)
        assert not iterate(model, amp).skipped
