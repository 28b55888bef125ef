"""Threads that open, train in and close sessions beside others that train by themselves: none is in another's way."""

import functools
import sys
import threading

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

import mezzo
from mezzo.errors import StateError

from .loops import LOW, built, loss_of

ROUNDS = 100


@pytest.fixture
def switching():
    """With threads that take turns at nearly every line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*calls):
    """Run each call in a thread of its own, again and again until the first has done its rounds; raise their errors."""
    raised, is_over = [], threading.Event()

    def body(number):
        rounds = ROUNDS
        try:
            while rounds and not is_over.is_set() and not raised:
                calls[number]()
                rounds -= not number
        except BaseException as error:
            raised.append(error)
        finally:
            if not number:
                is_over.set()

    threads = [threading.Thread(target=body, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def opens(policy, begin=mezzo.MixedPrecision, optimizer="SGD"):
    """Open a session over a model of its own, take a step, and close it."""
    model, made = built(optimizer)
    before = model[0].weight.detach().clone()
    amp = begin(model, made, policy)
    if begin is mezzo.attach:
        loss_of(model, 0).backward()
        made.step()
    else:
        amp.backward(loss_of(model, 0, amp))
        amp.step()
    amp.close()
    assert not torch.equal(before, model[0].weight)


def plain(optimizer="SGD"):
    """What a thread that has nothing to do with sessions does: a step that changes weights, and a scheduler."""
    model, made = built(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)

    def call():
        model.zero_grad()
        before, rate = model[0].weight.detach().clone(), made.param_groups[0]["lr"]
        loss_of(model, 1).backward()
        made.step()
        scheduler.step()
        assert not torch.equal(before, model[0].weight)
        assert made.param_groups[0]["lr"] == pytest.approx(rate / 2)
        made.param_groups[0]["lr"] = 0.1
        scheduler.base_lrs, scheduler.last_epoch = [0.1], 0

    return call


NAMES = (
    (torch.autograd, "_engine_run_backward"), (GradScaler, "step"), (GradScaler, "unscale_"), (LRScheduler, "step"),
)  # fmt: skip


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("policy", ["O0", LOW[2]])
def test_sessions_come_and_go_while_other_threads_step(policy):
    names = [vars(owner)[name] for owner, name in NAMES]
    together(functools.partial(opens, policy, mezzo.attach), functools.partial(opens, policy), plain())
    assert [vars(owner)[name] for owner, name in NAMES] == names


@pytest.mark.usefixtures("switching")
def test_a_step_asks_the_sessions_that_there_are_while_others_begin_and_end():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-6, foreach=False)
    weight.grad = torch.ones(1)
    alive = [mezzo.MixedPrecision(*built(), "O0") for _ in range(40)]  # each of which it asks

    def begins():
        mezzo.MixedPrecision(*built(), "O0").close()

    together(begins, begins, optimizer.step)
    for amp in alive:
        amp.close()


@pytest.mark.usefixtures("switching")
def test_one_session_is_attached_at_a_time_whichever_thread_asks():
    counts = {"attached": 0, "refused": 0, "now": 0}

    def asks():
        model, made = built()
        try:
            amp = mezzo.attach(model, made, "O0,loss_scale=1024.0")
        except StateError:
            counts["refused"] += 1
            return
        counts["now"] += 1
        assert counts["now"] == 1
        counts["attached"] += 1
        loss_of(model, 0).backward()
        expected = torch.autograd.grad(loss_of(model, 0), model[0].weight)[0]
        torch.testing.assert_close(model[0].weight.grad, expected)
        counts["now"] -= 1
        amp.close()

    together(asks, asks, asks)
    assert counts["attached"] > 0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_of_another_thread_that_is_under_way_holds_no_other_up():
    model, made = built()
    other = built()[1]
    begun, go_on = threading.Event(), threading.Event()

    class Waiting(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args):
            if getattr(self, "is_made", False):
                begun.set()
                assert go_on.wait(60)
            super().step(*args)

    waiting = Waiting(other, lambda _: 1.0)
    waiting.is_made = True  # its construction steps, too
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    amp = mezzo.attach(model, made, "O0,loss_scale=dynamic(init=1024)")
    thread = threading.Thread(target=waiting.step)
    thread.start()
    assert begun.wait(60)
    loss_of(model, 0).backward()
    model[0].weight.grad[0, 0] = torch.inf
    made.step()
    scheduler.step()  # the step was skipped: it is to wait
    go_on.set()
    thread.join()
    assert amp.last_step.skipped
    assert made.param_groups[0]["lr"] == 0.1
    amp.detach()
