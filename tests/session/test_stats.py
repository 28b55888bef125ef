"""What a session counts and says: its account, kept by hand beside it, and a line for each change of the scale."""

import dataclasses
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import LossScale

from .counted import iterate, session
from .loops import INF, NAN

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
        step, made_with = iterate(model, amp, event, NAN if number % 2 else INF), book.scale
        book.note(event)
        assert bool(step.skipped) == (event != ".")
        assert (float(step.scale), float(step.next_scale)) == (made_with, book.scale)
        assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
        if checkpoint and number == len(pattern) // 2:
            saved = amp.state_dict()
            model, amp = session(rules)
            amp.load_state_dict(saved)
            assert dataclasses.asdict(amp.stats()) == book.stats() | {"ranks": 1}
    assert model.each[0].isfinite().all()


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


def test_lowest_and_highest_begin_again_with_another_scale():
    saved = session("4096")[1].state_dict()
    for scale in (4096.0, 8.0):
        amp = session(f"{scale:g}")[1]
        amp.load_state_dict(saved)
        stats = amp.stats()
        assert (stats.scale, stats.lowest_scale, stats.highest_scale) == (scale,) * 3


# Log lines -----------------------------------------------------------------------------------------------


def test_a_line_for_each_change_of_scale_and_none_for_a_step(caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = session("dynamic(init=4,interval=3,floor=1)")
    for event in "...XX....XXX.":
        iterate(model, amp, event)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    changes = ["4 → 8", "8 → 4", "4 → 2", "2 → 4", "4 → 2", "2 → 1"]
    assert len(lines) == len(changes)
    for line, change, step in zip(lines, changes, (3, 4, 5, 8, 10, 11), strict=True):
        assert change in line
        assert f"step {step}" in line


@pytest.mark.parametrize("rules", ["none", "1024"])
def test_no_lines_where_no_scale_moves(rules, caplog):
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = session(rules)
    for event in "..X.X":
        iterate(model, amp, event)
    assert not [record for record in caplog.records if record.levelname == "INFO"]
