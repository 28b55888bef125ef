"""What capturing leaves behind: no trace of itself, and a session that goes on in either way."""

import random

import pytest
import torch
from torch import nn

from .loops import OPTIMIZERS, Loop, batch, batches, both, everything, run


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("warm", [0, 5])
def test_capturing_changes_nothing(make, warm, bits):
    loop = Loop("O2,dtype=float16,emulate=true", OPTIMIZERS[make])
    run(loop, loop.train_step, batches(range(max(warm, 1))))
    if not warm:
        loop = Loop("O2,dtype=float16,emulate=true", OPTIMIZERS[make])

    def train_step(x, y, boost):
        x = x + torch.randn_like(x) * random.random()
        return loop.train_step(x, y, boost)

    before, addresses = everything(loop)
    loop.captured(train_step)
    after, addresses_after = everything(loop)
    assert addresses == addresses_after
    assert all(param.grad is None for param in loop.model.parameters())
    if not warm:  # where there was no state of the optimizer there are the zeros that it begins with
        state = after[1]["state"]
        moments = {k: v for each in state.values() for k, v in each.items() if k not in ("remainder", "master")}
        assert all(not value.any() for value in moments.values())
        before[1]["state"] = after[1]["state"] = {}
    assert bits(before) == bits(after)
    assert loop.amp.stats().steps == warm


def test_gradients_are_left_alone():
    loop = Loop("O1,dtype=bfloat16,emulate=true")
    run(loop, loop.train_step, batches(range(2)))
    mine = [torch.ones_like(param) for param in loop.model.parameters()]
    for param, gradient in zip(loop.model.parameters(), mine, strict=True):
        param.grad = gradient

    def train_step(x, y, boost):
        loop.amp.zero_grad()
        return loop.train_step(x, y, boost)

    captured = loop.captured(train_step)
    captured(*batch(3))
    for param, gradient in zip(loop.model.parameters(), mine, strict=True):
        assert param.grad is gradient
        assert gradient.eq(1).all()


def test_gradients_that_were_there_are_no_part_of_the_graph(bits):
    def make():
        loop = Loop("O1,dtype=bfloat16,emulate=true")
        for param in loop.model.parameters():
            param.grad = torch.zeros_like(param)
        return loop

    data = batches(range(6), bad=(2,))
    eager, other = make(), make()
    mine = [param.grad for param in other.model.parameters()]
    captured = other.captured()
    for param, gradient in zip(other.model.parameters(), mine, strict=True):
        assert param.grad is gradient
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))
    for param, gradient in zip(other.model.parameters(), mine, strict=True):
        assert param.grad is gradient
        assert not gradient.any()


def test_gradients_of_the_batch_begin_anew_in_each_call(bits):
    class Slopes(Loop):
        def train_step(self, x, y, boost):
            out = super().train_step(x, y, boost)
            return out, x.grad

    def data():
        return [(x.requires_grad_(), *rest) for x, *rest in batches(range(6), bad=(2,))]

    eager, other = Slopes(), Slopes()
    captured = other.captured(example=data()[0])
    eager, captured = run(eager, eager.train_step, data()), run(other, captured, data())
    assert all(slope.any() for _, slope in captured[0])
    assert bits(eager) == bits(captured)


def test_captured_and_eager_steps_alternate(bits):
    eager, other = (Loop("O2,dtype=float16,emulate=true") for _ in range(2))
    captured, turn = other.captured(), []

    def alternating(*data):
        turn.append(len(turn) // 3 % 2)
        return (captured, other.train_step)[turn[-1]](*data)

    data = batches(range(24), bad=(2, 3, 5, 6, 11))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, alternating, data))
    assert [graph.replays for graph in other.graphs] == [12]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_states_load_between_captured_steps(make, bits, tmp_path):
    saved = {}

    def between(loop, number):
        if number == 3:
            torch.save(loop.state(), tmp_path / "state")
            saved[loop] = torch.load(tmp_path / "state", weights_only=True)
        elif number == 8:
            model, optimizer, session = saved[loop]
            loop.optimizer.load_state_dict(optimizer)
            loop.amp.load_state_dict(session)
            loop.model.load_state_dict(model)

    data = batches(range(14), bad=(2, 5, 9))
    eager, captured, loop = both(lambda: Loop(make=OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert [graph.replays for graph in loop.graphs] == [9, 5]  # the optimizer's state has moved


@pytest.mark.parametrize("make", ["adamw", "torch"])
def test_the_models_and_the_sessions_state_load_into_the_same_graph(make, bits):
    saved = {}

    def between(loop, number):
        if number == 3:
            model, _, session = loop.state()
            saved[loop] = model, session
        elif number == 8:
            loop.model.load_state_dict(saved[loop][0])
            loop.amp.load_state_dict(saved[loop][1])
        elif number == 10:
            with torch.no_grad():
                loop.model[0].weight.clamp_(-0.1, 0.1)

    data = batches(range(14), bad=(2, 5, 9))
    eager, captured, loop = both(lambda: Loop(make=OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert len(loop.graphs) == 1


def freeze(loop):
    loop.model[0].weight.requires_grad_(False)


def unclip(loop):
    loop.amp.max_grad_norm = 0.1


def evaluate(loop):
    loop.model.eval()


def drop_momentum(loop):
    loop.optimizer.param_groups[0].update(momentum=0.0, nesterov=False)


@pytest.mark.parametrize("change", [freeze, unclip, evaluate, drop_momentum])
def test_what_python_decides_is_captured_anew_when_it_changes(change, bits, caplog):
    def between(loop, number):
        if number == 4:
            change(loop)

    caplog.set_level("INFO", "mezzo.session.capture.captured")
    eager, captured, loop = both(lambda: Loop(make=OPTIMIZERS["sgd"]), batches(range(8)), between)
    assert bits(eager) == bits(captured)
    assert [graph.replays for graph in loop.graphs] == [5, 3]
    assert "captured anew" in caplog.text


def test_added_parameters_are_captured(bits):
    def between(loop, number):
        if number == 2:
            loop.optimizer.add_param_group({"params": [loop.late], "lr": 0.5})

    class Growing(Loop):
        def __init__(self):
            super().__init__("O1,dtype=bfloat16,emulate=true")
            self.late = nn.Parameter(torch.ones(3))
            self.model.register_parameter("late", self.late)
            self.model.register_forward_hook(lambda module, args, out: out + module.late)

    eager, captured, _ = both(Growing, batches(range(6)), between)
    assert bits(eager) == bits(captured)
