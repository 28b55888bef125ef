"""Captured train steps: bit for bit the eager loop, no trace of the capture itself, and a reason for each refusal."""

import contextlib
import copy
import dataclasses
import random
import re
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, PolicyError, ScaleCollapsed, StateError, UnsupportedError, optim
from mezzo.optim import optimizer as one_pass
from mezzo.session.capture.captured import Captured
from mezzo.session.capture.cuda import CudaGraph, _syncs_refused
from mezzo.step import gradients

from ..support.tables import thinned
from .host_graph import HostGraph, Predicated

POLICIES = [
    Policy.parse(f"{level},dtype={dtype},emulate=true") for level in ("O1", "O2") for dtype in ("float16", "bfloat16")
]
SCALE = LossScale.dynamic(init=2**10, interval=4, hysteresis=1)
OPTIMIZERS = {
    "adamw": lambda groups, **o: optim.AdamW(groups, lr=1e-2, **o),
    "sgd": lambda groups, **o: optim.SGD(groups, lr=5e-2, momentum=0.9, nesterov=True, **o),
    "lion": lambda groups, **o: optim.Lion(groups, lr=1e-3, weight_decay=0.1, **o),
    "torch": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True, capturable=True),
}


@pytest.fixture(autouse=True)
def _predicated(monkeypatch):
    for module in (one_pass, gradients):
        monkeypatch.setattr(module, "executor_for", lambda device: Predicated())


class Loop:
    """A model, its session, and a train step with all that it decides."""

    def __init__(self, policy="O2,dtype=bfloat16,emulate=true", make=OPTIMIZERS["adamw"], scale=SCALE, **options):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
        params = list(self.model.parameters())
        self.optimizer = make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}])
        policy = dataclasses.replace(Policy.of(policy), loss_scale=scale)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.amp = MixedPrecision(self.model, self.optimizer, policy, **{"max_grad_norm": 0.5, **options})

    def train_step(self, x, y, boost):
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(x).float(), y)
        self.amp.backward(loss * boost)
        step = self.amp.step()
        self.amp.zero_grad()
        return {"loss": loss, "step": (step.skipped, step.scale, step.next_scale, step.grad_norm)}

    def captured(self, step=None, example=None):
        self.graphs = []
        return Captured(step or self.train_step, example or batch(0), self.make_graph)

    def make_graph(self):
        self.graphs.append(HostGraph())
        return self.graphs[-1]

    def state(self):
        optimizer = self.optimizer.state_dict()
        return copy.deepcopy((self.model.state_dict(), optimizer, self.amp.state_dict()))


def batch(number, boost=1.0):
    """A batch; a boost of 1e38 makes gradients overflow under any scale, and the loss itself stays finite."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return x, y, torch.tensor(boost)


def batches(steps, bad=()):
    return [batch(number, 1e38 if number in bad else 1.0) for number in steps]


def detached(output):
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def run(loop, call, data, between=lambda loop, number: None):
    history = []
    for number, each in enumerate(data):
        history.append(copy.deepcopy(detached(call(*each))))
        between(loop, number)
    return history, loop.state(), loop.amp.stats()


def both(make, data, between=lambda loop, number: None):
    """The same steps, eager and captured, with what happens between them; both histories, and the captured loop."""
    eager, other = make(), make()
    captured = other.captured(example=data[0])
    return run(eager, eager.train_step, data, between), run(other, captured, data, between), other


@pytest.mark.parametrize("policy, make", thinned(POLICIES, OPTIMIZERS, every=3))
def test_fifty_captured_steps_are_fifty_eager_ones_bit_for_bit(policy, make, bits):
    def between(loop, number):
        loop.schedule.step()
        if number == 20 and make != "torch":
            loop.optimizer.param_groups[0]["weight_decay"] = 0.3

    data = batches(range(50), bad=(0, 7, 8, 23, 49))
    eager, captured, loop = both(lambda: Loop(policy, OPTIMIZERS[make]), data, between)
    assert bits(eager) == bits(captured)
    assert [graph.replays for graph in loop.graphs] == [50]
    stats = captured[2]
    assert (stats.steps, stats.skipped, stats.backoffs) == (50, 5, 5)
    assert stats.growths > 5


@pytest.mark.parametrize("master", ["split", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_split_and_full_masters_are_captured(master, dtype, bits):
    def make():
        return Loop(f"O2,dtype={dtype},emulate=true", lambda groups: optim.AdamW(groups, lr=1e-2, master=master))

    eager, captured, _ = both(make, batches(range(20), bad=(4,)))
    assert bits(eager) == bits(captured)


class MicroBatches(Loop):
    def train_step(self, x, y, boost):
        for part in range(4):
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x[part::4]).float(), y[part::4])
            self.amp.backward(loss / 4 * boost)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.skipped


class Penalty(Loop):
    def train_step(self, x, y, boost):
        x = x.clone().requires_grad_()
        with self.amp.autocast():
            out = self.model(x)
            loss = functional.cross_entropy(out.float(), y) * boost
        (slope,) = self.amp.grad(out.float().sum(), x, create_graph=True)
        with self.amp.autocast():
            loss = loss + slope.square().sum()
        self.amp.backward(loss)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.skipped, slope


class TwoLosses(Loop):
    def __init__(self):
        super().__init__(num_losses=2)

    def train_step(self, x, y, boost):
        for loss_id, factor in enumerate((1.0, boost)):
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x).float(), y)
            self.amp.backward(loss * factor, loss_id=loss_id)
        step = self.amp.step()
        self.amp.zero_grad()
        return loss, step.scale, step.next_scale


class TwoSteps(Loop):
    """Two steps in one train step, the first with a look at the gradients, and gradients cleared at the beginning."""

    def train_step(self, x, y, boost):
        norms = []
        for factor in (boost, 1.0):
            self.amp.zero_grad()
            with self.amp.autocast():
                loss = functional.cross_entropy(self.model(x).float(), y)
            self.amp.backward(loss * factor)
            if factor is boost:
                self.amp.unscale_()
                for param in self.amp.master_params():
                    param.grad.clamp_(-1e-3, 1e-3)
            norms.append(self.amp.step().grad_norm)
        return norms


class ClippedWeights(Loop):
    def __init__(self):
        super().__init__(make=OPTIMIZERS["torch"])

    def train_step(self, x, y, boost):
        out = super().train_step(x, y, boost)
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-0.05, 0.05)
        return out


class PutBack(Loop):
    def __init__(self):
        super().__init__(restore_buffers=True)


def skip_rate():
    return Loop(scale=LossScale.dynamic(init=2**10, interval=4, hysteresis=3, refill="clean", skip_rate_limit=0.3))


KINDS = {
    "micro-batches": MicroBatches,
    "a penalty": Penalty,
    "two losses": TwoLosses,
    "two steps": TwoSteps,
    "clipped weights": ClippedWeights,
    "buffers put back": PutBack,
    "skip rate": skip_rate,
    "constant scale": lambda: Loop(scale=LossScale.constant(128)),
    "no scale": lambda: Loop(scale=LossScale.none()),
    "no clipping": lambda: Loop(max_grad_norm=None),
    "rounded at random": lambda: Loop(
        "O3,dtype=bfloat16,emulate=true",
        lambda groups: optim.AdamW(groups, lr=1e-2, master=None, rounding="stochastic", state_dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_train_step_does_is_captured(kind, bits):
    data = batches(range(16), bad=(3, 4, 9))
    data[11] = (data[11][0] * float("inf"), *data[11][1:])  # the loss itself is not finite
    eager, captured, loop = both(KINDS[kind], data)
    assert bits(eager) == bits(captured)
    assert captured[2].skipped >= 3
    assert len(loop.graphs) == 1


def test_two_sessions_in_one_train_step(bits):
    def make():
        loop, other = Loop(), Loop(make=OPTIMIZERS["lion"])

        def train_step(x, y, boost):
            return loop.train_step(x, y, boost), other.train_step(x, y, boost * 0.5)

        return loop, other, train_step

    data = batches(range(10), bad=(2,))
    loop, other, train_step = make()
    eager = run(loop, train_step, data), other.state(), other.amp.stats()
    loop, other, train_step = make()
    captured = run(loop, loop.captured(train_step), data), other.state(), other.amp.stats()
    assert bits(eager) == bits(captured)


# What capturing leaves behind -------------------------------------------------------------------------------


def everything(loop):
    tensors = [*loop.model.parameters(), *loop.model.buffers(), *loop.amp.master_params()]
    values = [tensor.detach().clone() for tensor in tensors]
    random_states = torch.get_rng_state(), random.getstate()
    return (*loop.state(), loop.amp.stats(), values, random_states), [tensor.data_ptr() for tensor in tensors]


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


# What a captured step returns, and tells --------------------------------------------------------------------


def test_outputs_are_the_same_tensors_with_the_values_of_the_last_call():
    loop = Loop()
    captured = loop.captured(lambda *data: (loop.train_step(*data), loop.amp.loss_scale, "text", loop.amp.policy))
    first = captured(*batch(0))
    losses = [first[0]["loss"].item()]
    second = captured(*batch(1))
    losses.append(second[0]["loss"].item())
    assert first is second
    assert losses[0] != losses[1] == first[0]["loss"].item()
    assert not first[0]["loss"].requires_grad
    assert first[2:] == ("text", loop.amp.policy)
    for number in range(2, 5):
        captured(*batch(number))
    _, scale, next_scale, _ = first[0]["step"]
    assert (scale.item(), next_scale.item(), first[1].item()) == (2**11, 2**11, 2**11)


def test_a_step_that_is_returned_speaks_of_the_last_call():
    loop = Loop()

    def train_step(x, y, boost):
        with loop.amp.autocast():
            loss = functional.cross_entropy(loop.model(x).float(), y)
        loop.amp.backward(loss * boost)
        step = loop.amp.step()
        loop.amp.zero_grad()
        return step

    captured = loop.captured(train_step)
    told = []
    for data in batches(range(3), bad=(1,)):
        step = captured(*data)
        told.append((step.skipped.item(), step.scale.item(), step.next_scale.item()))
    assert told == [(False, 1024.0, 1024.0), (True, 1024.0, 512.0), (False, 512.0, 512.0)]
    assert step.overflow is None


def test_the_loss_scale_that_was_asked_for_is_not_overwritten():
    loop = Loop()
    captured = loop.captured()
    scales = [loop.amp.loss_scale]
    for data in batches(range(4), bad=(0, 2)):
        captured(*data)
        scales.append(loop.amp.loss_scale)
    assert [scale.item() for scale in scales] == [1024, 512, 512, 256, 256]


def test_an_eager_step_keeps_its_numbers():
    loop = Loop()
    captured = loop.captured()
    captured(*batch(0))
    *_, (_, scale, next_scale, _) = loop.train_step(*batch(1)).values()
    for data in batches(range(2, 5), bad=(2, 3, 4)):
        captured(*data)
    assert (scale.item(), next_scale.item(), loop.amp.loss_scale.item()) == (1024, 1024, 128)


def test_the_accounts_go_on(caplog):
    loop = Loop()
    captured = loop.captured()
    caplog.set_level("INFO", "mezzo")
    for data in batches(range(10), bad=(5,)):
        captured(*data)
    stats = loop.amp.stats()
    assert (stats.steps, stats.skipped, stats.growths, stats.backoffs, stats.scale) == (10, 1, 2, 1, 2048.0)
    assert "loss scale 2048 → 1024 after step 6, which overflowed" in caplog.text


def test_a_collapsed_scale_is_told_by_the_next_call():
    loop = Loop(scale=LossScale.dynamic(init=2.0, patience=2))
    captured = loop.captured()
    for _ in range(3):
        captured(*batch(0, 1e38))
    weights = [param.detach().clone() for param in loop.model.parameters()]
    with pytest.raises(ScaleCollapsed, match=r"2 overflows in a row at its floor, 1(?s:.*)8 of 6|of 6 gradients"):
        captured(*batch(1))
    assert all(torch.equal(p, w) for p, w in zip(loop.model.parameters(), weights, strict=True))


def test_evaluation_between_captured_steps_sees_the_new_weights():
    loop = Loop("O1,dtype=bfloat16,emulate=true")
    captured = loop.captured()
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


def test_learning_rates_that_are_tensors_are_followed(bits):
    def make():
        return Loop(make=lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2)))

    def between(loop, number):
        for group in loop.optimizer.param_groups:
            group["lr"].fill_(0.01 / (number + 1))

    eager, captured, _ = both(make, batches(range(6)), between)
    constant = both(make, batches(range(6)))[1]
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


REPLACED = {
    "a number": ([1e-3], [3, 3]),
    "another tensor": ([OnDevice.holding(1e-3)], [3, 3]),
    "host tensors, each step": ([torch.tensor(1e-3), torch.tensor(2e-3), torch.tensor(3e-3)], [3, 3]),
}


@pytest.mark.parametrize("name", ["lr", "betas"])
@pytest.mark.parametrize("kind", REPLACED)
def test_hyper_parameters_on_the_device_may_be_replaced(kind, name, bits):
    values, replays = REPLACED[kind]

    def put(loop, number, value):
        loop.optimizer.param_groups[1][name] = (0.9, value) if name == "betas" else value

    def make():
        loop = Loop(make=lambda groups: optim.AdamW(groups, lr=1e-2))
        put(loop, 0, OnDevice.holding(1e-2))
        return loop

    def between(loop, number):
        if number >= 2 and values[number - 2 :]:
            put(loop, number, values[number - 2])

    data = batches(range(6))
    eager, captured, loop = both(make, data, between)
    constant = both(make, data)[1]
    assert bits(eager[:1]) == bits(captured[:1]) != bits(constant[:1])
    assert [graph.replays for graph in loop.graphs] == replays


def test_a_hyper_parameter_on_the_device_that_is_written_needs_no_other_graph(bits):
    def make():
        loop = Loop(make=lambda groups: optim.AdamW(groups, lr=1e-2))
        loop.optimizer.param_groups[0]["lr"] = OnDevice.holding(1e-2)
        return loop

    def between(loop, number):
        loop.optimizer.param_groups[0]["lr"].fill_(0.01 / (number + 1))

    eager, captured, loop = both(make, batches(range(6)), between)
    assert bits(eager[:1]) == bits(captured[:1])
    assert [graph.replays for graph in loop.graphs] == [6]


def test_a_scheduler_made_after_the_capture_does_not_warn():
    loop = Loop()
    captured = loop.captured()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.optimizer._opt_called = False  # the loop's own schedule has seen the rehearsals
    captured(*batch(0))
    schedule.step()  # would warn that no optimizer has stepped


# What cannot be captured ------------------------------------------------------------------------------------


def refused(loop, error, match, step=None, **options):
    """Capture, be refused with a message, and find everything as it was; then train as if nothing had been."""
    before, addresses = everything(loop)
    with pytest.raises(error, match=match) as caught:
        loop.captured(step, **options)
    assert "write" in str(caught.value)
    after, addresses_after = everything(loop)
    before[1]["state"] = after[1]["state"] = {}
    assert str(before) == str(after)
    assert addresses == addresses_after
    if loop.amp.on_overflow == "skip":
        loop.train_step(*batch(1))
    return str(caught.value)


def eager_loss(loop):
    x, y, _ = batch(0)
    with loop.amp.autocast():
        loss = functional.cross_entropy(loop.model(x).float(), y)
    loop.amp.backward(loss)
    loop.amp.step()
    loop.amp.zero_grad()
    return loss


def marks(loop):
    edges = [torch.autograd.graph.get_gradient_edge(param) for param in loop.model.parameters()]
    return [edge.node.metadata for edge in edges if edge.node.metadata]


KEPT = (
    r"a graph of an earlier step is still alive(?s:.*)0\.weight, 0\.bias(?s:.*)DistributedData(?s:.*)loss\.detach\(\)"
)


@pytest.mark.parametrize("policy", POLICIES[::2], ids=str)
def test_a_loss_that_was_kept_is_refused(policy):
    loop = Loop(policy)
    loss = eager_loss(loop)
    assert loss.grad_fn is not None
    refused(loop, StateError, KEPT)
    assert marks(loop) == []
    del loss
    loop.captured()(*batch(1))


@pytest.mark.parametrize("policy", POLICIES[::2], ids=str)
def test_what_holds_no_graph_may_be_kept(policy):
    loop = Loop(policy)
    loss = eager_loss(loop).detach()
    with loop.amp.autocast():
        loop.model(batch(0)[0])  # under O1 the session keeps casts of weights, and their graph
    cycle = [eager_loss(loop)]
    cycle.append(cycle)
    del cycle
    loop.captured()(*batch(1))
    assert torch.isfinite(loss)
    assert marks(loop) == []


def test_a_train_step_may_begin_before_its_session_knows():
    loop = Loop()
    region = loop.amp.autocast()

    def train_step(x, y, boost):
        with region:
            loss = functional.cross_entropy(loop.model(x).float(), y)
        loop.amp.backward(loss * boost)
        loop.amp.step()
        loop.amp.zero_grad()
        return loss

    assert torch.isfinite(loop.captured(train_step)(*batch(1)))


def test_a_loss_kept_since_the_capture_is_refused_by_the_call_that_captures_anew():
    loop = Loop()
    captured = loop.captured()
    loss = eager_loss(loop)
    loop.amp.max_grad_norm = 0.1
    with pytest.raises(StateError, match=KEPT):
        captured(*batch(1))
    del loss
    captured(*batch(1))


def test_a_scheduler_inside_is_refused():
    loop = Loop()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)

    def handed_over(x, y, boost):
        with loop.amp.autocast():
            loss = loop.model(x).square().mean()
        loop.amp.backward(loss)
        loop.amp.step(scheduler=schedule)

    def stepped(x, y, boost):
        loop.train_step(x, y, boost)
        schedule.step()

    refused(
        loop, UnsupportedError, r"scheduler= cannot be captured(?s:.*)scheduler\.step\(\) after each call", handed_over
    )
    text = refused(loop, StateError, "the train step changes its optimizer's options", stepped)
    assert re.search(r"AdamW, group 0: lr 0\.01 → 0\.001\n +AdamW, group 1: lr", text)


def test_a_scheduler_of_a_tensor_inside_is_refused():
    loop = Loop(make=OPTIMIZERS["torch"])
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)

    def stepped(x, y, boost):
        loop.train_step(x, y, boost)
        schedule.step()

    refused(loop, StateError, "group 0: lr was written in place", stepped)
    assert loop.optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-2)


def test_a_closure_is_refused():
    loop = Loop()
    refused(
        loop,
        UnsupportedError,
        r"closure= cannot be captured(?s:.*)amp\.backward\(loss\), then amp\.step\(\)",
        lambda *data: (loop.amp.autocast(), loop.amp.step(closure=lambda: None)),
    )


@pytest.mark.parametrize("option", ["explain", "raise"])
def test_asking_the_host_about_overflows_is_refused(option):
    refused(Loop(on_overflow=option), UnsupportedError, f'on_overflow="{option}" cannot be captured(?s:.*)="skip"')


MAKES = {
    "cannot skip a step on the device": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    r"RMSprop cannot skip(?s:.*)mezzo\.optim\.AdamW": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    r"not made to be captured(?s:.*)capturable=True": lambda groups: torch.optim.AdamW(
        groups, lr=torch.tensor(1e-2), fused=True
    ),
    r"would be frozen(?s:.*)lr=0\.01, a Python number(?s:.*)lr=torch\.tensor\(0\.01": lambda groups: torch.optim.AdamW(
        groups, lr=1e-2, fused=True, capturable=True
    ),
    r"fused SGD has no momentum yet(?s:.*)mezzo\.optim\.SGD": lambda groups: torch.optim.SGD(
        groups, lr=torch.tensor(1e-2), momentum=0.9, fused=True
    ),
}


@pytest.mark.parametrize("match", MAKES)
def test_optimizers_that_need_the_host_are_refused(match):
    refused(Loop(make=MAKES[match]), UnsupportedError, match)


def test_torchs_fused_sgd_is_captured_once_it_has_momentum(bits):
    def make():
        loop = Loop(make=lambda groups: torch.optim.SGD(groups, lr=torch.tensor(1e-2), momentum=0.9, fused=True))
        loop.train_step(*batch(100))
        return loop

    eager, captured, _ = both(make, batches(range(8), bad=(3,)))
    assert bits(eager) == bits(captured)


def test_an_open_window_is_refused():
    loop = Loop()

    def begin():
        with loop.amp.autocast():
            loss = loop.model(batch(0)[0]).float().square().mean()
        loop.amp.backward(loss)

    refused(loop, StateError, "window is open at the end of the train step", lambda *data: begin())
    loop.amp.zero_grad()
    captured = loop.captured()
    begin()
    with pytest.raises(StateError, match="a captured step inside an accumulation window"):
        captured(*batch(0))
    with pytest.raises(StateError, match="cannot be captured inside an accumulation window"):
        loop.captured()
    loop.amp.step()
    loop.amp.zero_grad()
    captured(*batch(0))


def test_graphs_of_compiled_code_inside_are_explained():
    loop, theirs = Loop(), {"__name__": "torch._inductor.cudagraph_trees"}
    exec("def replay(): raise RuntimeError('Expected curr_block')", theirs)

    def train_step(x, y, boost):
        theirs["replay"]()
        return loop.train_step(x, y, boost)

    text = refused(loop, UnsupportedError, "the train step makes CUDA graphs of its own", train_step)
    assert 'where  torch.compile(…, mode="reduce-overhead")' in text
    assert "why    Expected curr_block" in text
    assert "max-autotune-no-cudagraphs" in text


@pytest.mark.parametrize("ask", [lambda loss: loss.item(), "{:.3f}".format, bool])
def test_asking_the_device_is_explained(ask):
    loop = Loop()

    def train_step(x, y, boost):
        out = loop.train_step(x, y, boost)
        ask(out["loss"])

    text = refused(loop, UnsupportedError, "a line of the train step cannot be part of a CUDA graph", train_step)
    assert re.search(r"where .*test_capture\.py:\d+", text)
    assert "operation not permitted when stream is capturing" in text


def test_other_errors_stay_as_they_are():
    loop = Loop()

    def train_step(x, y, boost):
        loop.train_step(x, y, boost)
        raise KeyError("mine")

    before, _ = everything(loop)
    with pytest.raises(KeyError, match="mine"):
        loop.captured(train_step)
    after, _ = everything(loop)
    before[1]["state"] = after[1]["state"] = {}
    assert str(before) == str(after)


def test_a_train_step_without_a_session_is_refused():
    model = nn.Linear(8, 3)
    with pytest.raises(StateError, match=r"uses no session(?s:.*)MixedPrecision\(model, optimizer, policy\)"):
        Captured(lambda x, y, boost: model(x), batch(0), HostGraph)


def test_an_optimizer_of_no_session_is_refused():
    loop, other = Loop(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = other.weight.detach().clone()

    def train_step(x, y, boost):
        loop.train_step(x, y, boost)
        other(x).sum().backward()
        optimizer.step()

    refused(loop, StateError, r"belongs to no session(?s:.*)SGD(?s:.*)amp\.step\(\)", train_step)
    assert torch.equal(other.weight, before)
    optimizer.step()  # elsewhere it is nobody's business


def test_a_frozen_option_that_changes_is_refused():
    loop = Loop(make=OPTIMIZERS["torch"])
    captured = loop.captured()
    captured(*batch(0))
    group = loop.optimizer.param_groups[0]
    group["weight_decay"] = 0.5
    with pytest.raises(
        StateError, match=r"weight_decay was changed(?s:.*)AdamW, group 0: 0\.01 → 0\.5(?s:.*)mezzo\.optim"
    ):
        captured(*batch(1))
    group["weight_decay"] = 0.01
    lr, group["lr"] = group["lr"], torch.tensor(0.5)
    with pytest.raises(StateError, match=r'lr was changed(?s:.*)group\["lr"\]\.fill_'):
        captured(*batch(1))
    group["lr"] = lr
    captured(*batch(1))


def test_a_closed_session_and_nesting_are_refused():
    loop, outer = Loop(), Loop()
    captured = loop.captured()
    refused(outer, StateError, "a captured step inside a train step", lambda *d: (outer.train_step(*d), captured(*d)))
    refused(outer, StateError, r"mezzo\.capture\(\) inside", lambda *d: (outer.train_step(*d), loop.captured()))
    loop.amp.close()
    with pytest.raises(StateError, match=r"a captured step after amp\.close\(\)"):
        captured(*batch(0))


# The batch --------------------------------------------------------------------------------------------------


def nested(loop):
    def train_step(batch, scale, *rest):
        return loop.train_step(batch["x"], batch["y"][0], torch.ones(()) * scale)

    x, y, _ = batch(0)
    return train_step, ({"x": x, "y": [y, "name"]}, 2.0, x)


WRONG = {
    r"batch\['x'\] is not like(?s:.*)float32 \[16, 8\] on cpu → float32 \[8, 8\](?s:.*)drop_last": lambda b, s, x: (
        {**b, "x": x[:8]},
        s,
        x,
    ),
    r"batch\['y'\]\[0\] is not like(?s:.*)int64 \[16\] on cpu → int32": lambda b, s, x: (
        {**b, "y": [b["y"][0].int(), "name"]},
        s,
        x,
    ),
    r"batch\['x'\] is not like(?s:.*)on cpu → float32 \[16, 8\] on meta": lambda b, s, x: (
        {**b, "x": x.to("meta")},
        s,
        x,
    ),
    r"batch\['x'\] is not like(?s:.*)→ None": lambda b, s, x: ({**b, "x": 3}, s, x),
    r"batch\['y'\]\[1\] is not what it was(?s:.*)'name' → 'other'": lambda b, s, x: (
        {**b, "y": [b["y"][0], "other"]},
        s,
        x,
    ),
    r"scale is not what it was in the example(?s:.*)2\.0 → 3\.0(?s:.*)torch\.tensor\(3\.0\)": lambda b, s, x: (
        b,
        3.0,
        x,
    ),
    r"scale is not what it was(?s:.*)2\.0 → 2$": lambda b, s, x: (b, 2, x),
    r"batch has another structure(?s:.*)→ \{'x'": lambda b, s, x: ({"x": x}, s, x),
    r"captured with 3 argument\(s\), and called with 2(?s:.*)batch, scale, rest\[0\]": lambda b, s, x: (b, s),
    r"rest\[0\] is not like the example(?s:.*), requires_grad": lambda b, s, x: (b, s, x.clone().requires_grad_()),
    r"2 problems(?s:.*)scale is not what(?s:.*)rest\[0\] is not": lambda b, s, x: (b, 5.0, x[:1]),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("match", WRONG)
def test_a_batch_unlike_the_example_is_refused(match, graph):
    loop = Loop()
    train_step, example = nested(loop)
    captured = loop.captured(train_step, example) if graph else mezzo.capture(train_step, *example)
    before, _ = everything(loop)
    with pytest.raises(PolicyError, match=match.replace("→ None", "→ 3").replace("→ 2$", "→ 2\n")):
        captured(*WRONG[match](*example))
    assert str(before) == str(everything(loop)[0])
    captured(*example)


def test_what_is_no_train_step_is_refused():
    with pytest.raises(
        PolicyError, match=r"a train step is a function, not Tensor(?s:.*)mezzo\.capture\(train_step, x, y\)"
    ):
        mezzo.capture(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        mezzo.capture(lambda x, y: None, torch.ones(1))


# A CUDA graph, as far as a machine without one goes ---------------------------------------------------------


def test_syncs_are_refused_where_warnings_are_errors(monkeypatch):
    modes = ["default"]

    def set_mode(mode):
        modes.append(mode)
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _syncs_refused():
            assert modes[-1] == "error"
    assert modes == ["default", "error", "default"]
    with pytest.raises(KeyError), _syncs_refused():
        raise KeyError
    assert modes[-1] == "default"


class Driver:
    """CUDA as ``CudaGraph`` calls it, written down."""

    def __init__(self, monkeypatch, failing):
        self.calls, self.failing = [], failing
        for name in ("set_stream", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, self.noting(name, {"graph_pool_handle": "pool"}.get(name, "around")))
        for name in ("device", "graph"):
            monkeypatch.setattr(torch.cuda, name, self.context(name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "throw-away")
        monkeypatch.setattr(torch, "zeros", self.noting("zeros", None))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, self.noting(name, None), raising=False)

    def noting(self, name, result):
        def call(*args, **kwargs):
            self.calls.append((name, *args))
            if name in self.failing:
                raise RuntimeError(name)
            return result

        return call

    def context(self, name):
        @contextlib.contextmanager
        def entered(*args, **kwargs):
            self.calls.append((name, *args))
            try:
                yield
            finally:
                self.calls.append((f"end of {name}", *args[:1]))
                if args[0] in self.failing:
                    raise RuntimeError("operation failed due to a previous error during capture")

        return entered

    def record(self, run):
        made = object.__new__(CudaGraph)
        made.device, made._graph, made._stream = "cuda:1", "graph", types.SimpleNamespace(device=torch.device("cuda:1"))
        return made.record(run)


def test_a_capture_puts_the_stream_back_on_its_own_device(monkeypatch):
    driver = Driver(monkeypatch, ())
    assert driver.record(lambda: 7) == 7
    names = [name for name, *_ in driver.calls]
    assert names == ["device", "current_stream", "graph_pool_handle", "graph", "end of graph", "set_stream", *names[6:]]
    assert names[6:] == ["end of device"]
    assert driver.calls[3][1:3] == ("graph", "pool")


@pytest.mark.parametrize("worse", [(), ("_cuda_endAllocateToPool",), ("_cuda_releasePool", "throw-away")])
def test_a_capture_that_failed_is_ended(monkeypatch, worse, caplog):
    caplog.set_level("DEBUG", "mezzo.session.capture.cuda")
    driver = Driver(monkeypatch, ("graph", *worse))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        driver.record(lambda: 7)
    after = driver.calls[driver.calls.index(("end of graph", "graph")) + 1 :]
    pool = [("_cuda_endAllocateToPool", 1, "pool"), ("_cuda_releasePool", 1, "pool")]
    assert after == [
        ("set_stream", "around"),
        *(pool[:1] if worse == ("_cuda_endAllocateToPool",) else pool),  # nothing is released twice
        ("graph", "throw-away"),
        ("zeros", 1),
        ("end of graph", "throw-away"),
        ("set_stream", "around"),
        ("end of device", "cuda:1"),
    ]
    assert len(caplog.records) == len(worse)


# Without a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_is_the_train_step_itself(bits):
    eager, other = Loop(), Loop()
    before, _ = everything(other)
    captured = mezzo.capture(other.train_step, *batch(0))
    assert bits(before) == bits(everything(other)[0])
    assert not captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step(x, y, boost), plain calls)"
    data = batches(range(6), bad=(2,))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))


def test_its_text_says_what_it_is():
    loop = Loop()
    captured = loop.captured()
    assert captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step(x, y, boost), graph)"


def test_on_a_machine_with_a_gpu_a_session_on_the_cpu_is_called_plainly(monkeypatch, bits):
    class Elsewhere(HostGraph):
        device = torch.device("meta")

    module = sys.modules["mezzo.session.capture.captured"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(module, "CudaGraph", lambda device: Elsewhere())
    loop = Loop(scale=LossScale.none())
    before, _ = everything(loop)
    called = []

    def train_step(x, y, boost):
        with loop.amp.autocast():
            called.append(x.device.type)
        return loop.train_step(x, y, boost)

    captured = mezzo.capture(train_step, *batch(0))
    assert not captured.is_graph
    assert not called  # the session's first call ended the attempt
    assert bits(before) == bits(everything(loop)[0])
    captured(*batch(0))
    assert called == ["cpu"]
