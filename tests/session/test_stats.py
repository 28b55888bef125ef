"""What a session counts, logs and gives up on: stats, one line per change of scale, collapse, losses that fail."""

import dataclasses
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo import LossScale, MixedPrecision, NumericsError, Policy, ScaleCollapsed

INF, NAN = float("inf"), float("nan")


class Weights(nn.Module):
    """Parameters whose gradients are all ones."""

    def __init__(self, *names):
        super().__init__()
        self.of = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names or ("w",)})

    def loss(self):
        return sum(param.float().sum() for param in self.of.values())


def session(rules="none", *, level="O0", names=(), **options):
    model = Weights(*names)
    policy = Policy.parse(level).evolve(loss_scale=rules if isinstance(rules, LossScale) else LossScale.parse(rules))
    return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **options)


def iterate(model, amp, event=".", poison=INF, where="w"):
    """One step: clean, with an overflow (X), or with a loss that is not finite itself (F)."""
    loss = model.loss()
    amp.backward(loss * poison if event == "F" else loss)
    if event == "X":
        model.of[where].grad[0] = poison
    try:
        return amp.step()
    finally:
        amp.zero_grad()


# The account ----------------------------------------------------------------------------------------------


class Book:
    """A dynamic scale and its account, kept by hand."""

    def __init__(self, init, interval, hysteresis, floor, ceiling):
        self.scale = self.lowest = self.highest = init
        self.interval, self.hysteresis, self.floor, self.ceiling = interval, hysteresis, floor, ceiling
        self.clean, self.budget, self.growths, self.backoffs, self.skips = 0, hysteresis, 0, 0, []

    def note(self, event):
        self.skips.append(event != ".")
        before = self.scale
        if event == "X":
            self.clean, self.budget = 0, self.budget - 1
            if self.budget == 0:
                self.scale, self.budget = max(self.scale / 2, self.floor), self.hysteresis
        elif event == ".":
            self.clean += 1
            if self.clean == self.interval:
                self.scale, self.clean = min(self.scale * 2, self.ceiling), 0
        self.growths += self.scale > before
        self.backoffs += self.scale < before
        self.lowest, self.highest = min(self.lowest, self.scale), max(self.highest, self.scale)

    def stats(self):
        recent = self.skips[-self.interval :]
        return {
            "steps": len(self.skips),
            "skipped": sum(self.skips),
            "skip_rate": sum(recent) / len(recent) if recent else 0.0,
            "growths": self.growths,
            "backoffs": self.backoffs,
            "scale": self.scale,
            "lowest_scale": self.lowest,
            "highest_scale": self.highest,
        }


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from("..XF"), max_size=25),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(16.0, 4.0, 64.0), (0.25, 2.0**-6, 0.5), (1.0, 1.0, 2.0)]),
    st.booleans(),
)
def test_stats_are_what_a_book_kept_by_hand_says(pattern, interval, hysteresis, bounds, checkpoint):
    init, floor, ceiling = bounds
    rules = LossScale.dynamic(init=init, interval=interval, hysteresis=hysteresis, floor=floor, ceiling=ceiling)
    model, amp = session(rules)
    book = Book(init, interval, hysteresis, floor, ceiling)
    assert dataclasses.asdict(amp.stats()) == book.stats()
    for number, event in enumerate(pattern):
        step = iterate(model, amp, event, NAN if number % 2 else INF)
        book.note(event)
        assert bool(step.skipped) == (event != ".")
        assert dataclasses.asdict(amp.stats()) == book.stats()
        if checkpoint and number == len(pattern) // 2:
            saved = amp.state_dict()
            model, amp = session(rules)
            amp.load_state_dict(saved)
            assert dataclasses.asdict(amp.stats()) == book.stats()
    assert model.of["w"].isfinite().all()


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_stats_without_a_dynamic_scale(level):
    """Skipped steps are counted whatever the policy; the scale does not move."""
    for rules, scale in (("none", 1.0), ("1024", 1024.0)):
        model, amp = session(rules, level=level)
        for event in ".X..XF":
            iterate(model, amp, event)
        stats = amp.stats()
        assert (stats.steps, stats.skipped, stats.skip_rate) == (6, 3, 0.5)
        assert (stats.growths, stats.backoffs) == (0, 0)
        assert (stats.scale, stats.lowest_scale, stats.highest_scale) == (scale,) * 3
        assert torch.equal(next(amp.master_params()).detach(), torch.full((2,), -3.0))


def test_each_loss_has_an_account_of_its_scale():
    model, amp = session("dynamic(init=64,interval=1)", num_losses=2)
    for struck in (None, 1, 1):
        for loss_id in (0, 1):
            amp.backward(model.loss(), loss_id=loss_id)
            if loss_id == struck:
                model.of["w"].grad.fill_(INF)
        amp.step()
        amp.zero_grad()
    first, second = amp.stats(), amp.stats(loss_id=1)
    assert (first.scale, first.growths, first.backoffs) == (512.0, 3, 0)
    assert (second.scale, second.growths, second.backoffs) == (32.0, 1, 2)
    assert (second.lowest_scale, second.highest_scale) == (32.0, 128.0)
    assert first.skipped == second.skipped == 2


# Log lines ------------------------------------------------------------------------------------------------


def test_a_line_for_each_change_of_scale_and_none_for_a_step(caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = session("dynamic(init=4,interval=3,floor=1)")
    for event in "...XX....XXX.":
        iterate(model, amp, event)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "loss scale 4 → 8 after step 3"),
        ("INFO", "loss scale 8 → 4 after step 4, which overflowed"),
        ("INFO", "loss scale 4 → 2 after step 5, which overflowed"),
        ("INFO", "loss scale 2 → 4 after step 8"),
        ("INFO", "loss scale 4 → 2 after step 10, which overflowed"),
        ("INFO", "loss scale 2 → 1 after step 11, which overflowed; this is its floor"),
    ]


def test_lines_name_the_loss_where_there_are_several(caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = session("dynamic(init=0.3,backoff=0.5,floor=0.1,interval=9)", num_losses=2)
    for _ in range(2):
        amp.backward(model.loss(), loss_id=1)
        model.of["w"].grad.fill_(INF)
        amp.step()
        amp.zero_grad()
    assert [record.getMessage() for record in caplog.records] == [
        "loss scale of loss 1 0.3 → 0.15 after step 1, which overflowed",
        "loss scale of loss 1 0.15 → 0.1 after step 2, which overflowed; this is its floor",
    ]


@pytest.mark.parametrize("rules", ["none", "1024"])
def test_no_lines_where_no_scale_moves(rules, caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = session(rules)
    for event in "..X.X":
        iterate(model, amp, event)
    assert caplog.records == []


# Collapse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("poison", [INF, NAN])
def test_300_overflows_in_a_row_end_in_scale_collapsed(level, fused, read, poison):
    """Fifteen bring 2**15 to the floor, 285 stand there: the patience. The next step, or a reading, raises."""
    model = Weights("a", "b", "c", "d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    rules = LossScale.dynamic(init=2.0**15, patience=285)
    amp = MixedPrecision(model, optimizer, Policy.parse(level).evolve(loss_scale=rules))
    iterate(model, amp)
    before = [param.clone() for param in amp.master_params()]

    def overflow():
        amp.backward(model.loss())
        model.of["b"].grad[1] = poison
        model.of["d"].grad[0] = -poison
        try:
            return amp.step()
        finally:
            amp.zero_grad()

    for number in range(299):
        step = overflow()
        if read or number == 298:
            assert bool(step.skipped)
    last = overflow()
    with pytest.raises(ScaleCollapsed) as caught:
        bool(last.skipped) if read else overflow()
    assert str(caught.value).splitlines()[:2] == [
        "the loss scale collapsed: 285 overflows in a row at its floor, 1",
        "  where  step 301, 2 of 4 gradients not finite: of.b, of.d",
    ]
    assert "no scale makes these gradients finite" in str(caught.value)
    assert "on_overflow=" in str(caught.value)
    assert amp.loss_scale.item() == 1.0
    assert amp.stats().skipped == 300
    for mine, theirs in zip(amp.master_params(), before, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


def test_all_that_a_step_says_raises_and_its_repr_does_not():
    model, amp = session("dynamic(init=1,patience=1)")
    step = iterate(model, amp, "X")
    for name in ("skipped", "scale", "next_scale", "grad_norm"):
        with pytest.raises(ScaleCollapsed):
            getattr(step, name)
    assert step.overflow is None
    assert "skipped=" in repr(step)


def test_a_session_s_repr_says_what_it_trains_and_how():
    _, amp = session(level="O1,dtype=bfloat16,emulate=true")
    policy = "O1,dtype=bfloat16,emulate=true"
    assert repr(amp) == str(amp) == f"MixedPrecision(Weights, SGD, policy='{policy}')"
    amp.close()
    assert repr(amp) == "MixedPrecision(closed)"


@pytest.mark.parametrize(
    "rules, pattern",
    [
        ("constant(1024,patience=3)", "X.XX.XXX"),
        ("constant(0.5,patience=2)", "X.X.XX"),
        ("constant(1,patience=2)", "X.XX"),
        ("dynamic(init=4,patience=2)", "XXXX"),
        ("dynamic(init=4,interval=1,patience=2)", "XXX.XXX"),
        ("dynamic(init=2**-10,floor=2**-12,patience=3)", "XXXXX"),
    ],
)
def test_patience_is_for_overflows_in_a_row_at_the_floor(rules, pattern):
    """Exactly the last event of each pattern is one too many."""
    model, amp = session(rules)
    for event in pattern[:-1]:
        step = iterate(model, amp, event)
        assert bool(step.skipped) == (event == "X")
    step = iterate(model, amp, pattern[-1])
    with pytest.raises(ScaleCollapsed, match=r"gradients not finite: of\.w"):
        bool(step.skipped)
    with pytest.raises(ScaleCollapsed):
        iterate(model, amp)
    assert model.of["w"].isfinite().all()


def test_a_collapse_that_only_unscaling_shows_names_no_gradient():
    model, amp = session("constant(2**-126,patience=1)")
    amp.backward(model.loss())
    model.of["w"].grad.fill_(8.0)  # finite, and 2**129 once it is unscaled
    step = amp.step()
    with pytest.raises(ScaleCollapsed, match=r"step 1, finite as they stand, infinite once unscaled"):
        bool(step.skipped)
    assert not model.of["w"].any()


def test_without_patience_the_scale_stands_at_its_floor_for_ever():
    model, amp = session("dynamic(init=4,interval=2)")
    for _ in range(30):
        assert bool(iterate(model, amp, "X").skipped)
    assert amp.loss_scale.item() == 1.0
    for _ in range(2):
        iterate(model, amp)
    assert amp.loss_scale.item() == 2.0


def test_loading_begins_anew_after_a_collapse():
    """The session's own state, or another library's scale."""
    torch_state = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    rules = "dynamic(init=1,patience=2)"
    for state in (session(rules)[1].state_dict(), torch_state):
        model, amp = session(rules)
        for _ in range(2):
            iterate(model, amp, "X")
        with pytest.raises(ScaleCollapsed):
            iterate(model, amp)
        amp.load_state_dict(state)
        assert not iterate(model, amp).skipped
        assert amp.stats().steps == (1 if state is not torch_state else 3)


def test_a_scale_below_one_trains_exactly():
    model, amp = session("dynamic(init=2**-8,floor=2**-20,interval=2)")
    for event in "..X.XXX..":
        step = iterate(model, amp, event)
    assert step.scale.item() == 2.0**-11
    assert amp.loss_scale.item() == 2.0**-10
    assert model.of["w"].tolist() == [-5.0, -5.0]


# Losses that fail by themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [INF, -INF, NAN])
@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true"])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale(level, poison, caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session("dynamic(init=64,interval=3,hysteresis=2,skip_rate_limit=0.9)", level=level)
    iterate(model, amp)
    before = [scaler["scale"] for scaler in amp.state_dict()["loss_scales"]], amp.state_dict()["loss_scales"]
    for _ in range(5):
        step = iterate(model, amp, "F", poison)
        assert bool(step.skipped)
        assert step.next_scale.item() == step.scale.item() == 64.0
    assert before == ([64.0], amp.state_dict()["loss_scales"])  # the counters stand still as well
    assert amp.stats().skipped == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the loss of step 2 is not finite: skipped, and the loss scale stays"
    ]
    for event in ".FX.F":
        iterate(model, amp, event, poison)
    assert [record.getMessage()[:35] for record in caplog.records[1:]] == [
        "the loss of step 8 is not finite: s",
        "the loss of step 11 is not finite: ",
    ]


@pytest.mark.parametrize("rules", ["none", "1024"])
def test_a_failing_loss_is_told_without_a_dynamic_scale_too(rules, caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session(rules)
    assert bool(iterate(model, amp, "F").skipped)
    assert [record.getMessage() for record in caplog.records] == ["the loss of step 1 is not finite: skipped"]


@pytest.mark.parametrize("rules", ["dynamic(init=64,patience=3)", "constant(64,patience=3)", "constant(1,patience=3)"])
def test_patience_with_a_failing_loss(rules):
    """Not a collapse: no scale can cure it. And not while it recovers in between."""
    model, amp = session(rules)
    for event in "FF.FFXFF":
        assert bool(iterate(model, amp, event).skipped) == (event != ".")
    step = iterate(model, amp, "F")
    with pytest.raises(NumericsError, match=r"the loss was not finite for 3 steps in a row\n  where  step 9") as caught:
        bool(step.skipped)
    assert not isinstance(caught.value, ScaleCollapsed)
    assert "no loss scale can cure" in str(caught.value)
    with pytest.raises(NumericsError, match="3 steps in a row"):
        iterate(model, amp)


def test_failing_losses_in_a_row_are_told_once(caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session("constant(1,patience=2)", names=("a", "b"))
    for _ in range(2):
        step = iterate(model, amp, "F")
    with pytest.raises(NumericsError, match="where  step 2\n"):
        bool(step.skipped)
    assert len(caplog.records) == 1


def test_a_failing_loss_is_no_overflow_at_the_floor():
    """Neither counted among those in a row, nor the end of the row."""
    model, amp = session("dynamic(init=1,patience=3)")
    for event in "XFXF":
        assert bool(iterate(model, amp, event).skipped)
    step = iterate(model, amp, "X")
    with pytest.raises(ScaleCollapsed, match="3 overflows in a row"):
        bool(step.skipped)


def test_one_failing_micro_batch_excuses_the_others():
    model, amp = session("dynamic(init=64,interval=1)")
    for poison in (1.0, INF, 1.0):
        amp.backward(model.loss() * poison)
    assert bool(amp.step().skipped)
    assert amp.loss_scale.item() == 64.0


@pytest.mark.parametrize("num_losses", [1, 2])
def test_the_other_loss_s_scale_moves_as_ever(num_losses):
    """One loss fails, the other one is clean or overflows."""
    for overflow, scales in ((False, [64.0, 128.0]), (True, [64.0, 32.0])):
        model, amp = session("dynamic(init=64,interval=1)", num_losses=2)
        amp.backward(model.loss() * NAN, loss_id=0)
        amp.backward(model.loss(), loss_id=1)
        if overflow:
            model.of["w"].grad.fill_(INF)
        assert bool(amp.step().skipped)
        assert amp.loss_scale.tolist() == scales


# Gradients on the way to a loss ---------------------------------------------------------------------------------


def penalty_session(**options):
    model, amp = session("dynamic(init=2**12,interval=4,patience=2)", level="O1,emulate=true", **options)
    with torch.no_grad():
        model.of["w"].fill_(2.0**4)
    return model, amp


def penalise(model, amp, loss_id=0):
    """A gradient penalty: in FP16 w·scale = 2**(4 + 12) is infinite, and so is the loss that is made of it."""
    x = torch.ones(1, 2, requires_grad=True)
    with amp.autocast():
        out = nn.functional.linear(x, model.of["w"][None])
        (gradient,) = amp.grad(out.float().sum(), x, create_graph=True, loss_id=loss_id)
        amp.backward(gradient.square().sum() + model.loss(), loss_id=loss_id)


def test_an_overflow_on_the_way_to_a_loss_counts_for_the_scale(caplog):
    """2**12 is too large on the way, 2**11 for the penalty's own gradient 2·w·scale, and 2**10 for nothing."""
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = penalty_session()
    steps = []
    for _ in range(3):
        penalise(model, amp)
        steps.append(amp.step())
        amp.zero_grad()
    assert [bool(step.skipped) for step in steps] == [True, True, False]
    assert [step.scale.item() for step in steps] == [2.0**12, 2.0**11, 2.0**10]
    assert model.of["w"].tolist() == [16.0 - (2 * 16 + 1)] * 2
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_overflow_on_the_way_counts_once_for_two_optimizers(order):
    """The second step knows it too: its loss is not finite, but not by itself."""
    models = [Weights(), Weights()]
    pair = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    rules = LossScale.dynamic(init=2.0**12, interval=4)
    amp = MixedPrecision(models, pair, Policy.O1(emulate=True, loss_scale=rules))
    with torch.no_grad():
        models[0].of["w"].fill_(2.0**4)
        models[1].of["w"].fill_(1.0)
    x = torch.ones(1, 2, requires_grad=True)
    with amp.autocast():
        out = nn.functional.linear(x, models[0].of["w"][None] * models[1].of["w"])
        (gradient,) = amp.grad(out.float().sum(), x, create_graph=True)
        amp.backward(gradient.square().sum())
    for number in order:
        assert bool(amp.step(pair[number]).skipped)
    assert amp.loss_scale.item() == 2.0**11


def test_an_overflow_on_the_way_counts_for_its_own_loss_only():
    model, amp = penalty_session(num_losses=2)
    penalise(model, amp, loss_id=1)
    amp.backward(model.loss(), loss_id=0)
    assert bool(amp.step().skipped)
    assert amp.loss_scale.tolist() == [2.0**12, 2.0**11]


def test_an_overflow_on_the_way_is_spent_with_the_step():
    """Whoever clears gradients with the optimizer's own zero_grad."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true,loss_scale=dynamic(init=2**12)")
    with torch.no_grad():
        model.of["w"].fill_(2.0**4)
    penalise(model, amp)
    for scale in (2.0**11, 2.0**11):
        amp.step()
        assert amp.loss_scale.item() == scale
        optimizer.zero_grad()
        amp.backward(model.loss())


def test_an_overflow_on_the_way_is_forgotten_with_the_gradients():
    model, amp = penalty_session()
    penalise(model, amp)
    amp.zero_grad()
    assert not iterate(model, amp).skipped
    assert amp.loss_scale.item() == 2.0**12


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("rules", ["none", "3", "dynamic(init=1024)"])
def test_results_of_grad_are_unscaled_in_fp32(level, rules):
    """By a low-precision parameter too, with and without a scale; None where an input was not used."""
    model, amp = session(rules, level=level)
    weight = model.of["w"]
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    unused = torch.ones(1, requires_grad=True)
    out = (weight * x).float().sum()
    by_weight, by_x, by_nothing = amp.grad(out, [weight, x, unused], allow_unused=True)
    assert by_weight.dtype == by_x.dtype == torch.float32
    torch.testing.assert_close(by_weight, torch.tensor([1.0, 3.0]), rtol=2e-3 if "O2" in level else 1e-6, atol=0)
    assert by_x.tolist() == [0.0, 0.0]
    assert by_nothing is None
    assert weight.grad is None


# Raising ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2,emulate=true"])
def test_on_overflow_raise_names_the_gradients_and_goes_on(level, fused):
    model = Weights("a", "b", "c")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    policy = Policy.parse(level).evolve(loss_scale=LossScale.dynamic(init=64.0, interval=2))
    amp = MixedPrecision(model, optimizer, policy, on_overflow="raise")
    for event in ".X..":
        if event == "X":
            with pytest.raises(NumericsError, match=r"where  1 of 3: of.b\n  why .*under the loss scale 64"):
                iterate(model, amp, event, where="b")
            assert amp.loss_scale.item() == 32.0
        else:
            assert not iterate(model, amp, event).skipped
    assert all(torch.equal(p.detach(), torch.full((2,), -3.0)) for p in amp.master_params())
    assert amp.loss_scale.item() == 64.0
    assert (amp.stats().steps, amp.stats().skipped) == (4, 1)
