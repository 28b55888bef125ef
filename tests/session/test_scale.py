"""The loss scale of a session: how it begins, moves and gives up; its account, kept by hand beside it, and its log."""

import contextlib
import dataclasses
import logging
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mezzo
from mezzo import LossScale, MixedPrecision, NumericsError, Policy, ScaleCollapsed
from mezzo.compat.torch import GradScaler

from .loops import INF, NAN, Weights, assert_same, counted, iterate, over


@pytest.mark.parametrize("struck", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("first, hysteresis", [(0, 1), (1, 2)])
def test_one_loss_that_two_optimizers_step_from_counts_once(first, struck, hysteresis):
    """Whichever steps first, and with a budget of overflows too: a step is an iteration."""
    rules = LossScale.dynamic(init=256.0, interval=2, hysteresis=hysteresis, floor=64.0)
    model = Weights(1, 1)
    pair, amp = over(model, Policy.O0(loss_scale=rules), [model.vectors[0]], [model.vectors[1]])
    scale, clean, budget = 256.0, 0, hysteresis
    for step in range(12):
        overflow = bool(struck) and step not in (0, 3, 4)
        amp.backward(model.loss(1, 1))
        for number in struck if overflow else ():
            model.vectors[number].grad.fill_(NAN)
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


# Giving up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, fused, poison", [("O0", True, INF), ("O1,emulate=true", False, NAN), ("O2,emulate=true", True, NAN)]
)
def test_overflows_in_a_row_end_in_scale_collapsed(level, fused, poison):
    """Fifteen bring 2**15 to the floor, the others stand there: the patience. The next step raises."""
    patience, model = 20, Weights(2, 2, 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    rules = LossScale.dynamic(init=2.0**15, floor=1.0, patience=patience)
    amp = MixedPrecision(model, optimizer, Policy.parse(level).evolve(loss_scale=rules))

    def step(spoils=True):
        amp.backward(model.loss(1, 1, 1, 1))
        if spoils:
            model.vectors[1].grad[1] = poison
            model.vectors[3].grad[0] = -poison
        try:
            return amp.step()
        finally:
            amp.zero_grad()

    step(spoils=False)
    before = [param.detach().clone() for param in amp.master_params()]
    for number in range(15 + patience):
        is_told = pytest.warns(UserWarning, match="20 steps in a row") if number == 19 else contextlib.nullcontext()
        with is_told:
            assert bool(step().skipped)
    with pytest.raises(ScaleCollapsed) as caught:
        step()
    text = str(caught.value)
    assert text.startswith(f"the loss scale collapsed: {patience} overflows in a row at its floor")
    assert f"step {patience + 16}" in text
    assert "vectors.1" in text
    assert "vectors.3" in text
    assert "vectors.0" not in text
    assert "  write  " in text
    assert amp.loss_scale.item() == 1.0
    assert_same(before, [param.detach() for param in amp.master_params()])


@pytest.mark.parametrize(
    "rules, pattern",
    [
        ("constant(1024,patience=3)", "X.XX.XXX"),
        ("constant(1,patience=2)", "X.XX"),
        ("dynamic(init=4,floor=1,patience=2)", "XXXX"),
        ("dynamic(init=4,interval=1,floor=1,patience=2)", "XXX.XXX"),
        ("dynamic(init=2**-10,floor=2**-12,patience=3)", "XXXXX"),
        ("dynamic(init=2**-22,patience=3)", "XXXXX"),
        ("dynamic(init=2,floor=1,hysteresis=2,refill=growth,patience=2)", "XXXX"),
        ("dynamic(init=1,floor=1,hysteresis=3,refill=clean,patience=1)", "XX.XXX"),
    ],
)
def test_patience_is_for_overflows_in_a_row_at_the_floor(rules, pattern):
    """Exactly the last event of each pattern is one too many."""
    model, amp = counted(rules)
    for event in pattern:
        assert bool(iterate(model, amp, event).skipped) == (event == "X")
    with pytest.raises(ScaleCollapsed, match=r"vectors\.0"):
        iterate(model, amp)
    assert model.vectors[0].isfinite().all()


def test_failing_losses_are_no_overflows_at_the_floor_and_end_the_run_by_themselves():
    for pattern in ("XXFX", "XX.XX"):
        model, amp = counted("dynamic(init=1,floor=1,patience=3)")
        for event in pattern:
            iterate(model, amp, event)
        if "F" in pattern:
            with pytest.raises(ScaleCollapsed):
                iterate(model, amp)
    model, amp = counted("dynamic(init=256,patience=2)")
    for number, event in enumerate("F.F.F.FF"):
        assert bool(iterate(model, amp, event, NAN if number % 2 else INF).skipped) == (event != ".")
    with pytest.raises(NumericsError, match="the loss was not finite for 2 steps in a row"):
        iterate(model, amp)


def test_loading_begins_anew_after_a_collapse():
    """The session's own state, or another library's scale."""
    rules = "dynamic(init=1,floor=1,patience=2)"
    for state in (counted(rules)[1].state_dict(), torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()):
        model, amp = counted(rules)
        for _ in range(2):
            iterate(model, amp, "X")
        with pytest.raises(ScaleCollapsed):
            iterate(model, amp)
        amp.load_state_dict(state)
        assert not iterate(model, amp).skipped


# A scale that stands still --------------------------------------------------------------------------------------------


def told_in(style, rules, events):
    """Skips and warnings of a loop, with an overflow at each X, and at each F a loss that is not finite itself."""
    model = Weights(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", enabled=style == "scaler")
    policy = Policy.O0(loss_scale=LossScale.parse(rules))
    amp = {"five lines": MixedPrecision, "attach": mezzo.attach}.get(style, lambda *_: None)(model, optimizer, policy)
    skips, messages = "", []
    with contextlib.nullcontext() if amp is None else contextlib.closing(amp):
        for event in events:
            before = model.vectors[0].detach().clone()
            loss = model.loss(1.0) * (NAN if event == "F" else 1.0)
            amp.backward(loss) if style == "five lines" else scaler.scale(loss).backward()
            if event == "X":
                model.vectors[0].grad[0] = INF
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                amp.step() if style == "five lines" else scaler.step(optimizer)
            messages.append([str(warning.message) for warning in caught if "in a row" in str(warning.message)])
            scaler.update()
            optimizer.zero_grad()
            skips += "X" if torch.equal(before, model.vectors[0]) else "."
    return skips, messages


@pytest.mark.parametrize("style", ["five lines", "attach", "scaler"])
@pytest.mark.parametrize("event", ["X", "F"])
def test_twenty_skipped_in_a_row_are_warned_of_once(style, event):
    events = "." + event * 19 + "." + event * 45 + "." + event * 30
    skips, messages = told_in(style, "dynamic", events)
    assert skips == events.replace("F", "X")
    assert [number for number, texts in enumerate(messages) if texts] == [40]
    (text,) = messages[40]
    is_loss = event == "F" and style != "scaler"  # a scaler has seen no loss
    backoffs = 38 if style == "scaler" else 39  # whose scale moves in update()
    scale, why = (2.0**16, "the loss itself is not") if is_loss else (2.0 ** (16 - backoffs), "the gradients are not")
    for words in ("20 steps in a row were skipped: nothing is learnt", "step 41", f"loss scale {scale:.6g}", why):
        assert words in text


@pytest.mark.parametrize(
    "rules, words",
    [
        ("none", "no loss scale"),
        ("1024", "LossScale.dynamic()"),
        ("dynamic(init=1,floor=1)", "floor=2**-126"),
        ("dynamic(init=1,floor=1)", "dtype=bfloat16"),
        ("dynamic", "docs/nan.md"),
    ],
)
def test_the_warning_says_what_to_write(rules, words):
    _, messages = told_in("five lines", rules, "X" * 20)
    assert words in messages[-1][0]


def test_a_loss_that_is_a_sum_trains_below_a_scale_of_one_as_under_torch_amp():
    """512 × 64 targets of 10 to 255, whose gradients overflow FP16 at a scale of 1."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 64, generator=generator), torch.randint(10, 256, (512, 64), generator=generator).float()
    ends = []
    for style in ("five lines", "attach", "torch"):
        model = torch.nn.Linear(64, 64)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
        scaler = torch.amp.GradScaler("cpu", enabled=style == "torch")
        amp = {"five lines": MixedPrecision, "attach": mezzo.attach}.get(style, lambda *_: None)(
            model, optimizer, "O1,dtype=float16,emulate=true"
        )
        for _ in range(24):
            with torch.autocast("cpu", torch.float16) if amp is None else amp.autocast():
                out = model(x)
            loss = (out.float() - y).square().sum()
            amp.backward(loss) if style == "five lines" else scaler.scale(loss).backward()
            amp.step() if style == "five lines" else scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append((float(amp.loss_scale) if amp else scaler.get_scale(), bool(model.weight.any())))
        if amp:
            amp.close()
    assert ends == [(0.25, True)] * 3


# The account ----------------------------------------------------------------------------------------------------------


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
        return {
            "steps": len(self.skips),
            "skipped": sum(self.skips),
            "growths": self.growths,
            "backoffs": self.backoffs,
            "scale": self.scale,
            "lowest_scale": self.lowest,
            "highest_scale": self.highest,
        }


@settings(max_examples=40)
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
    model, amp = counted(rules)
    book = Book(init, interval, hysteresis, floor, ceiling)
    assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
    for number, event in enumerate(pattern):
        step, made_with = iterate(model, amp, event, NAN if number % 2 else INF), book.scale
        book.note(event)
        assert bool(step.skipped) == (event != ".")
        assert (float(step.scale), float(step.next_scale)) == (made_with, book.scale)
        assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
        if checkpoint and number == len(pattern) // 2:
            saved = amp.state_dict()
            model, amp = counted(rules)
            amp.load_state_dict(saved)
            assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
    assert model.vectors[0].isfinite().all()


def test_a_saved_scale_stays_within_this_sessions_bounds_and_extremes_begin_again_with_another():
    saved = counted("dynamic(init=4096)")[1].state_dict()
    for rules, scale in (
        ("dynamic(init=4)", 4096.0),
        ("dynamic(init=4,ceiling=64)", 64.0),
        ("dynamic(init=2**16,floor=8192)", 8192.0),
        ("8", 8.0),
        ("4096", 4096.0),
    ):
        amp = counted(rules)[1]
        amp.load_state_dict(saved)
        stats = amp.stats()
        assert (float(amp.loss_scale), stats.scale, stats.lowest_scale, stats.highest_scale) == (scale,) * 4, rules


# Log lines -----------------------------------------------------------------------------------------------


def test_a_line_for_each_change_of_scale_and_none_for_a_step(caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = counted("dynamic(init=4,interval=3,floor=1)")
    for event in "...XX....XXX.":
        iterate(model, amp, event)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    changes = ["4 → 8", "8 → 4", "4 → 2", "2 → 4", "4 → 2", "2 → 1"]
    assert len(lines) == len(changes)
    for line, change, step in zip(lines, changes, (3, 4, 5, 8, 10, 11), strict=True):
        assert change in line
        assert f"step {step}" in line
