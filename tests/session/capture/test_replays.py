"""What a captured step returns and tells between its replays, and what a replay refuses."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, ScaleCollapsed, StateError, optim

from ...support.refusals import bits
from .loops import OPTIMIZERS, Loop, batch, batches, both

#: Calls that are real steps before one is recorded.
FIRST = 3


def recorded(loop, step=None):
    captured = loop.captured(step)
    for data in batches(range(FIRST + 1)):
        captured(*data)
    assert loop.graph.replays == 1
    return captured


# What is returned and told ---------------------------------------------------------------------------------


def test_outputs_are_the_same_tensors_with_the_values_of_the_last_call():
    """Those of the first calls, which are real steps, are their own; none has a graph."""
    loop = Loop(scale=LossScale.constant(1024))
    captured = loop.captured(lambda *data: (loop.train_step(*data), "text", loop.amp.policy))
    own = [captured(*data)[0]["loss"] for data in batches(range(FIRST))]
    assert len({loss.data_ptr() for loss in own}) == FIRST
    assert not any(loss.requires_grad for loss in own)
    first = captured(*batch(0))
    losses = [first[0]["loss"].item()]
    second = captured(*batch(1))
    losses.append(second[0]["loss"].item())
    assert first is second
    assert losses[0] != losses[1] == first[0]["loss"].item()
    assert not first[0]["loss"].requires_grad
    assert first[1:] == ("text", loop.amp.policy)


def test_the_accounts_go_on(caplog):
    loop = Loop()
    captured = loop.captured()
    caplog.set_level("INFO", "mezzo")
    for data in batches(range(10), bad=(5,)):
        captured(*data)
    stats = loop.amp.stats()
    assert (stats.steps, stats.skipped, stats.growths, stats.backoffs, stats.scale) == (10, 1, 2, 1, 2048.0)
    assert "loss scale 2048 → 1024 after step 6" in caplog.text


def test_a_collapsed_scale_is_told_by_the_next_call():
    loop = Loop(scale=LossScale.dynamic(init=2.0, floor=1.0, patience=2))
    captured = recorded(loop)
    for _ in range(3):
        captured(*batch(0, 1e38))
    weights = [param.detach().clone() for param in loop.model.parameters()]
    with pytest.raises(ScaleCollapsed, match=r"2 overflows in a row at its floor, 1"):
        captured(*batch(1))
    assert all(torch.equal(p, w) for p, w in zip(loop.model.parameters(), weights, strict=True))


def test_evaluation_between_captured_steps_sees_the_new_weights():
    loop = Loop("O1,dtype=bfloat16,emulate=true")
    captured = recorded(loop)
    x = batch(0)[0]

    @torch.no_grad()
    def evaluated():
        with loop.amp.autocast():
            return functional.linear(x, loop.model[0].weight).float()

    for number in range(3):
        before = evaluated()
        captured(*batch(number))
        exact = x.bfloat16().float() @ loop.model[0].weight.detach().bfloat16().float().T
        torch.testing.assert_close(evaluated(), exact.bfloat16().float(), rtol=2**-7, atol=1e-3)
        assert not torch.equal(evaluated(), before)


# What a replay follows ------------------------------------------------------------------------------------


def test_learning_rates_that_are_tensors_are_followed():
    def make():
        return Loop(make=lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2)))

    def between(loop, number):
        for group in loop.optimizer.param_groups:
            group["lr"].fill_(0.01 / (number + 1))

    eager, captured, _ = both(make, batches(range(8)), between)
    constant = both(make, batches(range(8)))[1]
    assert bits(eager) == bits(captured) != bits(constant)


class OnDevice(torch.Tensor):
    """A tensor that says it is in another memory than the host's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("meta")

    @classmethod
    def holding(cls, number):
        return torch.tensor(number).as_subclass(cls)

    def __deepcopy__(self, memo):
        return self.clone().as_subclass(OnDevice)


@pytest.mark.parametrize("make", ["adamw", "torch"])
def test_the_models_and_the_sessions_state_load_into_the_same_graph(make):
    saved = {}

    def between(loop, number):
        if number == 5:
            model, _, session = loop.state()
            saved[loop] = model, session
        elif number == 8:
            loop.model.load_state_dict(saved[loop][0])
            loop.amp.load_state_dict(saved[loop][1])
        elif number == 9:
            loop.train_step(*batch(29))  # without the graph
        elif number == 10:
            with torch.no_grad():
                loop.model[0].weight.clamp_(-0.1, 0.1)

    data = batches(range(14), bad=(2, 5, 9))
    eager, captured, loop = both(lambda: Loop(make=OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert loop.graph.replays == 14 - FIRST


def test_a_step_without_the_graph_leaves_its_memory_alone():
    """torch's optimizer writes FP32 values of halves, in memory that the graph knows."""

    def between(loop, number):
        if number in (4, 5):
            loop.train_step(*batch(20 + number))
            with torch.no_grad():
                loop.model[0].weight.mul_(1 - 1e-4)

    eager, captured, loop = both(lambda: Loop(make=OPTIMIZERS["torch"]), batches(range(9), bad=(6,)), between)
    assert bits(eager) == bits(captured)
    assert loop.graph.replays == 9 - FIRST


def test_an_overflow_outside_of_the_graph_that_waits_for_the_next_loss_lowers_the_scale_of_a_replay():
    """One of two optimizers has stepped then, while gradients of the other carry the scale."""

    def between(loop, number):
        if number == 4:
            x, y, boost = batch(20, 1e38)
            with loop.amp.autocast():
                loss = functional.cross_entropy(loop.model(x).float(), y)
            loop.amp.backward(loss * boost)
            assert loop.amp.step(loop.optimizer).skipped
            loop.amp.zero_grad()

    def make():
        return Loop(make=lambda groups: [optim.AdamW(groups[:1], lr=1e-2), optim.Lion(groups[1:], lr=1e-3)])

    eager, captured, loop = both(make, batches(range(7)), between)
    assert bits(eager) == bits(captured)
    assert loop.graph.replays == 7 - FIRST


# What it refuses ------------------------------------------------------------------------------------------


def load(loop):
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def move(loop):
    loop.model[0].weight.data = loop.model[0].weight.data.clone()


def swap(loop):
    loop.model[0].weight.data = loop.model[0].weight.data.clone()


def grow(loop):
    late = nn.Parameter(torch.ones(3))
    loop.model.register_parameter("late", late)
    loop.optimizer.add_param_group({"params": [late]})


def replace(loop):
    loop.optimizer.param_groups[0]["lr"] = OnDevice.holding(1e-3)


def freeze(loop):
    loop.model[0].weight.requires_grad_(False)


def unclip(loop):
    loop.amp.max_grad_norm = 0.1


def evaluate(loop):
    loop.model[1].eval()


def drop_momentum(loop):
    loop.optimizer.param_groups[0].update(momentum=0.0, nesterov=False)


def decay(loop):
    loop.optimizer.param_groups[0]["weight_decay"] = 0.5


def new_rate(loop):
    loop.optimizer.param_groups[1]["lr"] = torch.tensor(0.5)


CHANGES = {
    load: ("adamw", r"where  state of AdamW, optimizer 0\n"),
    move: ("adamw", r"where  parameters and buffers of Sequential, model 0\n(?s:.*)once more"),
    swap: ("torch", r"where  parameters and buffers of Sequential, model 0\n"),
    grow: ("adamw", r"where  parameters and buffers of Sequential, model 0\n(?s:.*)what optimizers update\n"),
    replace: ("adamw", r"where  hyper-parameters of AdamW, optimizer 0\n"),
    freeze: ("adamw", r"where  requires_grad of Sequential, model 0\n"),
    unclip: ("adamw", r"where  max_grad_norm 0\.5 → 0\.1\n"),
    evaluate: ("adamw", r"where  training of Sequential, model 0\n"),
    drop_momentum: ("sgd", r"where  rules of SGD, optimizer 0\n"),
    decay: ("torch", r"AdamW, group 0: weight_decay 0\.01 → 0\.5\n"),
    new_rate: ("torch", r"AdamW, group 1: lr\n(?s:.*)fill_"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_replay_would_not_follow_is_refused(change):
    make, match = CHANGES[change]
    loop = Loop(make=OPTIMIZERS[make])
    captured = recorded(loop)
    change(loop)
    steps = loop.amp.stats().steps
    with pytest.raises(StateError, match=rf"holds what the session has left(?s:.*){match}"):
        captured(*batch(0))
    assert (loop.graph.replays, loop.amp.stats().steps) == (1, steps)


def test_a_step_that_is_captured_once_more_goes_on():
    eager, other = Loop(), Loop()
    captured = recorded(other)
    for data in batches(range(FIRST + 1)):
        eager.train_step(*data)
    for loop in (eager, other):
        load(loop)
    captured = other.captured()
    for data in batches(range(8), bad=(2, 6)):
        captured(*data)
        eager.train_step(*data)
    assert bits(eager.state()) == bits(other.state())
    assert other.graph.replays == 8 - FIRST


@pytest.mark.parametrize("calls", [0, FIRST + 1])
def test_an_open_window_is_refused(calls):
    loop = Loop()
    captured = loop.captured()
    for data in batches(range(calls)):
        captured(*data)
    with loop.amp.autocast():
        loss = loop.model(batch(0)[0]).float().square().mean()
    loop.amp.backward(loss)
    with pytest.raises(StateError, match="a captured step begins or ends inside an accumulation window"):
        captured(*batch(0))
    loop.amp.step()
    loop.amp.zero_grad()
    captured(*batch(0))


# Batches --------------------------------------------------------------------------------------------------


def nested(loop):
    def train_step(batch, scale, *, boost):
        return loop.train_step(batch["x"], batch["y"][0], boost * scale)

    return train_step


def example(number):
    x, y, boost = batch(number)
    return {"x": x, "y": [y, "name"]}, 2.0, boost


UNLIKE = {
    r"float32 \[16, 8\] → float32 \[8, 8\](?s:.*)drop_last": lambda b, s, f: (
        {"x": b["x"][:8], "y": [b["y"][0][:8], "name"]}, s, f
    ),
    r"'name' → 'other'": lambda b, s, f: ({**b, "y": [b["y"][0], "other"]}, s, f),
    r"2\.0 → 3\.0(?s:.*)a tensor for a number": lambda b, s, f: (b, 3.0, f),
    r"2\.0 → 2$": lambda b, s, f: (b, 2, f),
    r"float32 \[\] → 1\.0": lambda b, s, f: (b, s, 1.0),
    r"float32 .*, requires_grad": lambda b, s, f: ({**b, "x": b["x"].clone().requires_grad_()}, s, f),
    r"the structure of its arguments": lambda b, s, f: ({**b, "z": 1}, s, f),
}  # fmt: skip


@pytest.mark.parametrize("match", UNLIKE)
def test_a_batch_of_another_kind_is_a_real_step_and_is_told_of_once(match, recwarn):
    eager, other = Loop(), Loop()
    captured = other.captured(nested(other))
    for number in range(10):
        data = example(number)
        if number in (1, 5, 7):
            data = UNLIKE[match](*data)
        *args, boost = data
        captured(*args, boost=boost)
        nested(eager)(*args, boost=boost)
    assert bits(eager.state()) == bits(other.state())
    assert (other.graph.runs, other.graph.replays) == (FIRST + 3, 4)
    (warning,) = recwarn
    assert warning.filename == __file__
    assert re.search(match.replace("$", "\n"), str(warning.message))
