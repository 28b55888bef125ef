"""What cannot be captured: a reason for each refusal, and a session that trains on as if nothing had been."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import PolicyError, StateError, UnsupportedError
from mezzo.session.session import engine_of

from ...support.refusals import bits
from .loops import Loop, batch, batches

FIRST = 3

# Sessions -------------------------------------------------------------------------------------------------

SESSIONS = {
    r'(?s)is looked at.*where  on_overflow="locate"': lambda: Loop(on_overflow="locate"),
    r'(?s)is looked at.*where  on_overflow="raise".*on_overflow="skip"': lambda: Loop(on_overflow="raise"),
    "AdamW cannot be captured(?s:.*)group 0, no kernel that skips": lambda: Loop(
        make=lambda groups: torch.optim.AdamW(groups, lr=1e-2)
    ),
    r"RMSprop cannot be captured(?s:.*)no kernel that skips(?s:.*)mezzo\.optim\.AdamW": lambda: Loop(
        make=lambda groups: torch.optim.RMSprop(groups, lr=1e-2)
    ),
    r"AdamW cannot be captured(?s:.*)group 0, capturable=False": lambda: Loop(
        make=lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True)
    ),
    r"AdamW cannot be captured(?s:.*)group 1, lr=0\.01, a Python number(?s:.*)lr=torch\.tensor": lambda: Loop(
        make=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True, capturable=True)
    ),
}


@pytest.mark.parametrize("match", SESSIONS)
def test_sessions_that_need_the_host_are_refused_at_once(match):
    loop = SESSIONS[match]()
    with pytest.raises(UnsupportedError, match=match):
        loop.captured()
    loop.train_step(*batch(0))


def test_what_is_no_train_step_with_its_session_is_refused():
    for given in ((print, 5), (None, Loop().amp)):
        with pytest.raises(PolicyError, match=r"no train step and its session(?s:.*)mezzo\.capture\(train_step, amp\)"):
            mezzo.capture(*given)


def test_a_loop_by_calls_of_its_own_is_refused():
    model = nn.Linear(8, 3)
    amp = mezzo.attach(model, mezzo.optim.AdamW(model.parameters()), "O1,dtype=bfloat16,emulate=true")
    try:
        with pytest.raises(UnsupportedError, match=r"by calls of its own cannot be captured(?s:.*)MixedPrecision\("):
            Loop.captured(type("Attached", (), {"amp": amp, "train_step": print})())
    finally:
        amp.detach()


def test_several_ranks_and_devices_are_refused(monkeypatch):
    loop = Loop()
    loop.model.register_buffer("elsewhere", torch.empty(1, device="meta"))
    monkeypatch.setattr(engine_of(loop.amp).ranks, "size", 2)
    with pytest.raises(UnsupportedError) as caught:
        loop.captured()
    assert "a step of several ranks cannot be captured\n" in str(caught.value)
    assert "loss scale on cpu, parameters on meta too" in str(caught.value)


# Train steps ----------------------------------------------------------------------------------------------


def begin(loop):
    with loop.amp.autocast():
        loss = loop.model(batch(0)[0]).float().square().mean()
    loop.amp.backward(loss)


def closure(loop, *data):
    loop.amp.step(closure=lambda: begin(loop))


def open_window(loop, *data):
    loop.train_step(*data)
    begin(loop)


def scheduler(loop, *data):
    loop.train_step(*data)
    loop.schedule.step()


def other_session(loop, *data):
    loop.train_step(*data)
    Loop().train_step(*data)


def raises(loop, *data):
    raise KeyError("mine")


#: Each at the first call.
STEPS = {
    closure: (UnsupportedError, r"closure= cannot be captured(?s:.*)amp\.backward\(loss\), then amp\.step\(\)"),
    open_window: (StateError, "a captured step begins or ends inside an accumulation window"),
    scheduler: (
        StateError,
        r"changes its optimizer's options(?s:.*)AdamW, group 0: lr 0\.01 → 0\.00(?s:.*)after each call",
    ),
    other_session: (StateError, r"another session takes part(?s:.*)one session for both"),
    raises: (KeyError, "mine"),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_a_train_step_may_not_do_is_refused_by_its_first_call(step):
    error, match = STEPS[step]
    loop = Loop()
    captured = loop.captured(lambda *data: step(loop, *data))
    with pytest.raises(error, match=match):
        captured(*batch(0))
    loop.amp.zero_grad()
    loop.train_step(*batch(1))


@pytest.mark.parametrize("ask", [lambda loss: loss.item(), "{:.3f}".format])
@pytest.mark.parametrize("late", [False, True])
def test_asking_the_device_is_explained_and_the_session_goes_on(ask, late):
    loop, twin = Loop(), Loop()
    calls = []

    def train_step(*data):
        out = loop.train_step(*data)
        calls.append(None)
        if len(calls) > FIRST or not late:
            ask(out["loss"])

    captured = loop.captured(train_step)
    quiet = FIRST if late else FIRST - 1
    for data in batches(range(quiet)):
        captured(*data)
        twin.train_step(*data)
    with pytest.raises(RuntimeError, match=r"synchronizing|capturing") as caught:
        captured(*batch(quiet))
    assert "nothing may wait for the device" in caught.value.__notes__[0]
    if not late:  # a real step, whose last line was refused
        twin.train_step(*batch(quiet))
    assert loop.amp.stats().steps == FIRST
    for data in batches(range(10, 16), bad=(12,)):
        loop.train_step(*data)
        twin.train_step(*data)
    assert bits(loop.state()) == bits(twin.state())
