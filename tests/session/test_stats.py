"""What a session counts, logs and gives up on: stats, one line per change of scale, collapse."""

import dataclasses
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import LossScale, MixedPrecision, Policy, ScaleCollapsed

from ..support.tables import thinned
from .counted import INF, NAN, Weights, iterate, session

# The account ---------------------------------------------------------------------------------------------


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
    assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
    for number, event in enumerate(pattern):
        step = iterate(model, amp, event, NAN if number % 2 else INF)
        book.note(event)
        assert bool(step.skipped) == (event != ".")
        assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
        if checkpoint and number == len(pattern) // 2:
            saved = amp.state_dict()
            model, amp = session(rules)
            amp.load_state_dict(saved)
            assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
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


# Log lines -----------------------------------------------------------------------------------------------


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


# Collapse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, fused, read, poison",
    thinned(["O0", "O1,emulate=true", "O2,emulate=true"], [False, True], [False, True], [INF, NAN], every=2),
)
def test_overflows_in_a_row_end_in_scale_collapsed(level, fused, read, poison):
    """Fifteen bring 2**15 to the floor, the others stand there: the patience. The next step, or a reading, raises."""
    patience = 285 if (level, fused, poison) == ("O1,emulate=true", False, INF) else 45
    model = Weights("a", "b", "c", "d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    rules = LossScale.dynamic(init=2.0**15, patience=patience)
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

    for number in range(14 + patience):
        step = overflow()
        if read or number == 13 + patience:
            assert bool(step.skipped)
    last = overflow()
    with pytest.raises(ScaleCollapsed) as caught:
        bool(last.skipped) if read else overflow()
    assert str(caught.value).splitlines()[:2] == [
        f"the loss scale collapsed: {patience} overflows in a row at its floor, 1",
        f"  where  step {patience + 16}, 2 of 4 gradients not finite: of.b, of.d",
    ]
    assert "no scale makes these gradients finite" in str(caught.value)
    assert "on_overflow=" in str(caught.value)
    assert amp.loss_scale.item() == 1.0
    assert amp.stats().skipped == 15 + patience
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
