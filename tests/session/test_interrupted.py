"""Exceptions at any line of mezzo's while sessions are made and closed: everything is as it was, or can be finished."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, optim

#: What changes models and optimizers; the rest only computes.
WRITING = [f"mezzo/{name}.py" for name in (
    "cast/model/prepare", "cast/model/boundaries", "cast/model/originals", "optim/halves", "optim/masters",
    "optim/gathering", "optim/optimizer", "session/session", "session/core", "session/weights/weights",
    "session/weights/untrained", "session/window/group", "session/window/wide",
)]  # fmt: skip
CASES = {
    "masters": ("O2,dtype=bfloat16,emulate=true", lambda params: torch.optim.SGD(params, lr=0.1)),
    "halves": ("O2,emulate=true", lambda params: optim.AdamW(params, lr=0.1)),
    "low": ("O3,dtype=bfloat16,emulate=true", lambda params: optim.SGD(params, lr=0.1, momentum=0.9)),
    "full": ("O1,emulate=true", lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)),
}


class InjectedError(Exception):
    """Not one of mezzo's."""


def lines(call, at=0):
    """Make a call and raise at one of the lines of mezzo's in it; return how many there were, and whether it raised."""
    seen = 0

    def in_frame(frame, event, _):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == at:
                raise InjectedError
        return in_frame

    def in_call(frame, *_):
        return in_frame if frame.f_code.co_filename.endswith(tuple(WRITING)) else None

    before = sys.gettrace()
    sys.settrace(in_call)
    try:
        call()
    except InjectedError:
        return seen, True
    finally:
        sys.settrace(before)
    return seen, False


def test_what_changes_models_stands_where_it_did():
    assert all((Path(mezzo.__file__).parents[1] / name).is_file() for name in WRITING)


def places(total, count=30):
    return sorted({1 + number * total // count for number in range(count)})


def build(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return model, make(model.parameters())


def everything(model, optimizer, bits):
    hooks = [len(held) for module in model.modules() for name, held in vars(module).items() if name.endswith("_hooks")]
    hooks += [len(held) for name, held in vars(optimizer).items() if name.endswith("_hooks")]
    params = list(model.parameters())
    return bits([
        params, [param.grad for param in params], [str(param.grad_dtype) for param in params], hooks,
        [id(param) for group in optimizer.param_groups for param in group["params"]],
        [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups],
        [sorted((name, value) for name, value in optimizer.state.get(param, {}).items()) for param in params],
        sorted(set(vars(optimizer)) & {"zero_grad", "add_param_group"}),
    ])  # fmt: skip


def train(amp, model, steps=2):
    for step in range(steps):
        with amp.autocast():
            loss = model(torch.linspace(-1, 1 + step, 6).reshape(2, 3)).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_a_session_that_is_interrupted_while_it_is_made_leaves_everything_as_it_was(case, bits):
    policy, make = CASES[case]
    MixedPrecision(*build(make), policy)  # what is asked once in a process is known from here on
    model, optimizer = build(make)
    total, _ = lines(lambda: MixedPrecision(model, optimizer, policy))
    model, optimizer = build(make)
    before = everything(model, optimizer, bits)
    for at in places(total):
        assert lines(lambda: MixedPrecision(model, optimizer, policy), at)[1]
        assert everything(model, optimizer, bits) == before, at
    train(MixedPrecision(model, optimizer, policy), model)
    other, same = build(make)
    train(MixedPrecision(other, same, policy), other)
    assert bits(list(model.parameters())) == bits(list(other.parameters()))


@pytest.mark.parametrize("case", CASES)
def test_preparing_that_is_interrupted_leaves_the_model_as_it_was(case, bits):
    policy, make = CASES[case]
    model, optimizer = build(make)
    before = everything(model, optimizer, bits)
    mezzo.prepare(build(make)[0], policy)
    other, _ = build(make)
    total, _ = lines(lambda: mezzo.prepare(other, policy))
    for at in places(total):
        assert lines(lambda: mezzo.prepare(model, policy), at)[1]
        assert everything(model, optimizer, bits) == before, at


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_that_is_interrupted_while_it_is_added_leaves_frozen_weights_as_they_were(case, bits):
    policy, make = CASES[case]

    def frozen(model):
        return bits([*model[0].parameters(), *model[1].parameters()])

    def begun():
        model, _ = build(make)
        model[0].requires_grad_(False)
        before = frozen(model)
        return before, model, MixedPrecision(model, make(model[2].parameters()), policy)

    def added():
        amp.add(make(model[0].requires_grad_(True).parameters()))

    before, model, amp = begun()
    total, _ = lines(added)
    for at in places(total):
        before, model, amp = begun()
        assert lines(added, at)[1]
        amp.close()
        assert frozen(model) == before, at


@pytest.mark.parametrize("case", CASES)
def test_closing_is_finished_by_closing_again(case, bits):
    """Parameters were FP32 already, and rounded, when their masters' values were still to come: those were lost."""
    policy, make = CASES[case]

    def trained():
        model, optimizer = build(make)
        amp = MixedPrecision(model, optimizer, policy)
        train(amp, model)
        return model, optimizer, amp

    model, optimizer, amp = trained()
    total, _ = lines(amp.close)
    closed = bits(list(model.parameters())), bits(optimizer.state_dict())
    for at in places(total, 25):
        model, optimizer, amp = trained()
        lines(amp.close, at)
        amp.close()
        assert (bits(list(model.parameters())), bits(optimizer.state_dict())) == closed, at
        assert not any(name in vars(optimizer) for name in ("zero_grad", "add_param_group"))
