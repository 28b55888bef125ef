"""What is bound in place of a method takes what is given, and hands on exactly that: whoever's method it is."""

import copy

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

import mezzo
from mezzo.script import Program, run

from .programs import CASES, net

pytestmark = [
    pytest.mark.usefixtures("emulating", "anew"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

POLICIES = [policy for policy, _ in CASES]
#: Arguments by position and by name, as some class of somebody's may have them.
ODD = [
    ((), {}),
    ((1,), {}),
    ((1, "a"), {"b": 2}),
    ((), {"amp": 1, "plain": 2, "log": 3, "scheduler": 4}),
    ((None,), {"self": 5}),
]

# Functions that go through a session ----------------------------------------------------------------------------------


def recorder(calls, result="result"):
    def method(*args, **kwargs):
        calls.append((args[1:], kwargs))
        return result

    return method


@pytest.mark.parametrize("owner, name, first", [
    (GradScaler, "step", 1), (GradScaler, "unscale_", 1), (LRScheduler, "step", 0),
    (torch.optim.lr_scheduler.ExponentialLR, "step", 0),
])  # fmt: skip
def test_functions_of_torch_get_what_they_are_given(monkeypatch, owner, name, first):
    calls, model = [], net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    made = GradScaler("cpu") if owner is GradScaler else torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    monkeypatch.setattr(owner, name, recorder(calls))
    amp = mezzo.attach(model, optimizer, "O0,loss_scale=64")
    expected = []
    for args, kwargs in ODD:
        given = ((other, *args) if first else args), {k: v for k, v in kwargs.items() if k != "self"}
        assert getattr(made, name)(*given[0], **given[1]) == "result"
        expected.append(given)
    if first:
        assert getattr(made, name)(optimizer=other, b=1) == "result"
        expected.append(((), {"optimizer": other, "b": 1}))
    amp.detach()
    assert calls == expected


def test_methods_of_an_accelerator_get_what_they_are_given(hf):
    calls = []

    class Own(hf.accelerate.Accelerator):
        log, free_memory = recorder(calls), recorder(calls)

    model, own = net(), {"mezzo/scale": 64.0, "mezzo/skipped": 0}
    for call, expected in (
        (lambda target: target.log({"a": 1}), (({**own, "a": 1},), {})),
        (lambda target: target.log({"a": 1}, 3, amp=1, log=2), (({**own, "a": 1}, 3), {"amp": 1, "log": 2})),
        (lambda target: target.log(step=3, values={"a": 1}), ((), {"step": 3, "values": {**own, "a": 1}})),
        (lambda target: target.free_memory(1, amp=2, free=3), ((1,), {"amp": 2, "free": 3})),
    ):
        hf.forget()
        accelerator = Own(cpu=True)
        amp = hf.attach(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,loss_scale=64")
        for options in ({}, {"autocast_handler": None}, {"autocast_handler": None, "cache_enabled": True}):
            with accelerator.autocast(**options):
                assert torch.is_autocast_enabled("cpu")
        with accelerator.autocast(hf.accelerate.utils.AutocastKwargs(enabled=False)):
            assert not torch.is_autocast_enabled("cpu")
        assert call(accelerator) == "result"
        assert calls.pop() == expected
        amp.close()
        assert not {"log", "free_memory", "autocast"} & vars(accelerator).keys()


def test_a_strategy_s_optimizers_are_set_up_with_what_it_is_given(monkeypatch):
    lightning = pytest.importorskip("mezzo.integrations.lightning", reason="needs lightning")
    calls, plugin = [], lightning.MezzoPrecision("O1,dtype=bfloat16")
    monkeypatch.setattr(lightning.Strategy, "setup_optimizer", recorder(calls))
    plugin.convert_module(net())
    strategy = lightning.Strategy.__new__(lightning.DataParallelStrategy)
    strategy._precision = None
    for given in ODD[:4]:
        assert strategy.setup_optimizer(*given[0], **given[1]) == "result"
    plugin.teardown()
    assert calls == ODD[:4]


SCRIPT = """
import torch
calls = []

class Own(torch.optim.SGD):
    def step(self, *args, **kwargs):
        calls.append((args, kwargs))

model = torch.nn.Linear(2, 1)
optimizer = Own(model.parameters(), lr=0.1)
optimizer.step(*GIVEN[0], **GIVEN[1])
assert calls == [GIVEN], calls
"""


@pytest.mark.parametrize("given", ODD[:4], ids=str)
def test_a_script_s_optimizer_gets_what_its_step_is_given(tmp_path, given):
    path = tmp_path / "script.py"
    path.write_text(f"GIVEN = {given}\n{SCRIPT}")
    assert run(Program(name=str(path)), "O1,dtype=bfloat16").error is None


# Methods of modules: metrics have their own ---------------------------------------------------------------------------


class Metric(nn.Module):
    """As torchmetrics has it: another second parameter."""

    def __init__(self):
        super().__init__()
        self.total, self.given, self.layer = torch.zeros(()), [], nn.Linear(2, 2)

    def _apply(self, fn, exclude_state=""):
        this = super()._apply(fn)
        self.given.append(exclude_state)
        self.total = fn(self.total)
        return this


class ByKeyword(Metric):
    def _apply(self, fn, *, recurse=True):
        self.given.append(recurse)
        return nn.Module._apply(self, fn, recurse)


class OfOld(Metric):
    """As before torch 2.1."""

    def _apply(self, fn):
        self.given.append(fn)
        return nn.Module._apply(self, fn)


def metrics():
    yield from (Metric(), ByKeyword(), OfOld())
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
    yield torchmetrics.MeanSquaredError()
    yield torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_with_metrics_moves_as_it_does_without_a_policy(policy):
    for metric in metrics():
        model = nn.Sequential(net())
        model.metric = metric
        handle = mezzo.prepare(model, policy)
        model.to("meta").to_empty(device="cpu")
        model.cpu()
        metric.to(torch.device("cpu"))
        assert isinstance(copy.deepcopy(model), nn.Sequential)
        handle.remove()


def test_what_a_class_s_own_method_takes_is_what_reaches_it():
    model = nn.Sequential(net(), Metric(), ByKeyword(), OfOld())
    handle = mezzo.prepare(model, "O2,dtype=bfloat16")
    change = torch.Tensor.contiguous
    for given in (("a",), ()):
        model[1]._apply(change, *given)
    model[1]._apply(fn=change, exclude_state="b")
    model[2]._apply(change, recurse=False)
    model[2]._apply(change)
    model[3]._apply(change)
    assert (model[1].given, model[2].given, model[3].given) == (["a", "", "b"], [False, True], [change])
    with pytest.raises(TypeError, match="exclude"):
        model[1]._apply(change, exclude="c")
    handle.remove()


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_are_asked_for_in_any_way(policy):
    class Own(nn.Sequential):
        def __deepcopy__(self, memo=None, *, name="plain"):
            made = Own(*(copy.deepcopy(part, memo) for part in self))
            made.name = name
            return made

    model, own = nn.Sequential(net()), Own(net())
    handles = [mezzo.prepare(net, policy) for net in (model, own)]
    for made in (model.__deepcopy__(), model.__deepcopy__({}), copy.deepcopy(model)):
        assert torch.equal(made[0][0].weight, model[0][0].weight)
    assert (own.__deepcopy__().name, own.__deepcopy__(name="mine").name, copy.deepcopy(own).name) == (
        "plain",
        "mine",
        "plain",
    )
    assert {type(param) for param in copy.deepcopy(own).parameters()} == {nn.Parameter}
    assert own.__reduce_ex__(4)[0] is not None
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_of_a_recurrent_class_are_flattened_in_any_way(policy):
    class Own(nn.LSTM):
        def flatten_parameters(self, *args, **kwargs):
            super().flatten_parameters()

    handle = mezzo.prepare(model := Own(2, 2), policy)
    for args, kwargs in ODD[:4]:
        model.flatten_parameters(*args, **kwargs)
    handle.remove()
