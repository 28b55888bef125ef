"""What ``change()`` refuses, and errors on its way: the former policy is in force, and nothing is half changed."""

import contextlib
import signal
from functools import partial

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MezzoError, MixedPrecision, PolicyError, StateError, UnsupportedError
from mezzo.cast.model import storing
from mezzo.cast.model.prepare import Prepared
from mezzo.session import change
from mezzo.session.engine import Engine

from ..support.refusals import refused
from .loops import assert_same, attached, backward, bound_names, built, loss_of, network, session, train
from .loops import facts as of_run

BF16, FP16 = "O1,bf16,emulate=true", "O1,fp16,emulate=true,loss_scale=dynamic(init=1024)"
HALVES, ROUNDS = "O2,bf16,emulate=true", "O3,bf16,emulate=true"


def between(policy=BF16, optimizer="SGD"):
    """A session between two steps, with gradients that the last one has left."""
    model, made, amp = session(policy, optimizer)
    train(amp, model, 0)
    backward(amp, model, 1)
    amp.step()
    return model, made, amp


def opened():
    model, made, amp = between()
    amp.zero_grad()
    backward(amp, model, 2)
    return model, made, amp


def ended():
    model, made, amp = between()
    amp.close()
    return model, made, amp


def with_large_weights():
    model, made = built()
    with torch.no_grad():
        model[3].weight[0, 0] = 1e6
    return model, made, MixedPrecision(model, made, HALVES)


def with_fused_sgd():
    model, made = built(lambda params: torch.optim.SGD(params, lr=0.1, fused=True))
    return model, made, MixedPrecision(model, made, BF16)


def half_way():
    model, made, amp = between()
    amp._engine.writes.broken = "HalfWay.step()"
    return model, made, amp


def in_region(model, made, amp):
    with amp.autocast():
        amp.change(FP16)


def in_a_pass(model, made, amp):
    amp.zero_grad()
    loss = loss_of(model, 3, amp)
    loss.register_hook(lambda _: amp.change(FP16))
    loss.backward()


def in_a_step(model, made, amp):
    amp.zero_grad()
    backward(amp, model, 3)
    made.register_step_pre_hook(lambda *_: amp.change(FP16))
    amp.step()


ROWS = {
    "a window": (opened, lambda m, o, amp: amp.change(FP16), StateError, "change() inside an accumulation window",
                 "after 1 backward pass", "amp.step() or amp.zero_grad() first"),
    "a region": (between, in_region, StateError, "change() inside a region", "outside of amp.autocast()"),
    "half an update": (half_way, lambda m, o, amp: amp.change(FP16), StateError, "an update was ended half-way"),
    "after the end": (ended, lambda m, o, amp: amp.change(FP16), StateError, "change() after close()"),
    "no policy": (between, lambda m, o, amp: amp.change("O7"), PolicyError, "O7"),
    "a rule for nothing": (between, lambda m, o, amp: amp.change(f"{HALVES},fp32_module=nowhere"), PolicyError,
                           "the module glob 'nowhere' matches no module"),
    "beyond FP16": (with_large_weights, lambda m, o, amp: amp.change("O2,fp16,emulate=true"), UnsupportedError,
                    "values do not fit float16", "3.weight"),
    "beyond FP16 without FP32": (with_large_weights, lambda m, o, amp: amp.change("O3,fp16,emulate=true"),
                                 MezzoError, "values do not fit float16", "3.weight"),
    "FP32 state": (partial(between, BF16, "AdamW"), lambda m, o, amp: amp.change(ROUNDS), StateError,
                   "the optimizer holds FP32 state", "AdamW"),
    "eps": (lambda: session(BF16, lambda params: torch.optim.AdamW(params, eps=1e-8)),
            lambda m, o, amp: amp.change("O3,fp16,emulate=true"), UnsupportedError, "eps=1e-08 is zero in float16"),
    "another format of state": (lambda: between(ROUNDS, "AdamW"), lambda m, o, amp: amp.change("O3,fp16,emulate=true"),
                                StateError, "the optimizer holds"),
    "a format that the device lacks": (between, lambda m, o, amp: amp.change("O1,bf16,emulate=false,fp8_module=*"),
                                       UnsupportedError, "emulate"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_is_refused_leaves_everything_as_it_was(name):
    build, call, error, *words = ROWS[name]
    parts = build()
    names = bound_names()
    with refused(error, *words, parts=parts):
        call(*parts)
    assert bound_names() == names


@pytest.mark.parametrize("call, where", [(in_a_pass, "a backward pass"), (in_a_step, "a step")])
def test_what_is_under_way_goes_on_under_the_policy_that_it_began_with(call, where):
    parts = between()
    with pytest.raises(StateError, match=f"change\\(\\) inside {where}"):
        call(*parts)
    assert str(parts[2].policy) == str(mezzo.Policy.of(BF16))


# Errors on the way ----------------------------------------------------------------------------------------------


class PlantedError(MemoryError):
    pass


def failing_at(number, monkeypatch, owner, name):
    plain, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise PlantedError
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


PAIRS = ((BF16, HALVES), (HALVES, BF16), (HALVES, "O2,fp16,emulate=true"), (HALVES, ROUNDS), (ROUNDS, HALVES),
         (BF16, ROUNDS), (BF16, "O2,fp16,emulate=true"), (FP16, BF16))  # fmt: skip
PLACES = [(storing, "_put", 1), (storing, "_put", 2), (Prepared, "_enter", 1), (change, "one_pass", 1),
          (change, "_carry_scale", 1), (Engine, "plan_anew", 1)]  # fmt: skip


@pytest.mark.parametrize("style", ["five lines", "attached"])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_an_error_on_the_way_is_walked_back(pair, style, monkeypatch):
    before, after = pair

    def run(attempts):
        model, made = built("mezzo")
        with attached(model, made, before) if style == "attached" else contextlib.nullcontext() as amp:
            amp = amp or MixedPrecision(model, made, before)
            steps(amp, model, made, style, 0)
            for owner, name, number in PLACES if attempts else ():
                if name == "_put" and pair == (FP16, BF16):
                    continue  # nothing is stored otherwise
                # Calls of an attached model hook its parts as they go.
                looked_at = [model] if style == "five lines" else model.parameters()
                with monkeypatch.context() as patches, refused(PlantedError, parts=(*looked_at, made, amp)):
                    failing_at(number, patches, owner, name)
                    amp.change(after)
            steps(amp, model, made, style, 2)
            return of_run(model, made, amp=amp)

    assert_same(run(True), run(False))


def steps(amp, model, made, style, first):
    for number in range(first, first + 2):
        if style == "attached":
            made.zero_grad()
            loss_of(model, number).backward()
            made.step()
        else:
            train(amp, model, number)


def test_a_signal_waits_until_the_change_is_made(monkeypatch):
    model, _, amp = between(HALVES, "mezzo")
    plain = storing._put

    def put(*args):
        signal.raise_signal(signal.SIGINT)
        return plain(*args)

    monkeypatch.setattr(storing, "_put", put)
    with pytest.raises(KeyboardInterrupt):
        amp.change(BF16)
    assert str(amp.policy) == str(mezzo.Policy.of(BF16))
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_two_models_that_share_a_module_change_together():
    first, second = network(), network()
    second[0] = first[0]
    params = list({id(param): param for model in (first, second) for param in model.parameters()}.values())
    made = mezzo.optim.AdamW(params, lr=1e-2)
    amp = MixedPrecision([first, second], made, BF16)
    for policy in (HALVES, ROUNDS, BF16, ROUNDS, HALVES, "O0"):
        amp.change(policy)
        amp.backward(loss_of(first, 0, amp) + loss_of(second, 1, amp))
        assert not amp.step().skipped
        amp.zero_grad()
    amp.close()
    assert all(type(param) is nn.Parameter and param.dtype == torch.float32 for param in params)


def test_what_a_model_came_as_is_known_through_all_changes():
    model = network().to(torch.bfloat16)
    made = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
    handle = mezzo.prepare(model, ROUNDS)
    amp = MixedPrecision(handle, made)
    amp.change(HALVES)  # from here on weights have more bits
    assert all(param.dtype == torch.float32 for param in model.parameters())
    amp.change(ROUNDS)
    amp.close()
    handle.remove()
    assert all(param.dtype == torch.float32 for param in model.parameters())
