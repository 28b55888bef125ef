"""Any torch optimizer sees FP32 while it steps: against masters kept by hand, bit for bit, over all of ``torch.optim``."""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mezzo
from mezzo import MixedPrecision, prepare
from mezzo.weights import views

from ..support.tables import pairwise
from .values import BF16, FP16, LOW, Net, kept, low_of, same

SCALE = 1024.0


def _variants():
    """Every class of torch.optim, as loop, foreach and fused where this machine has them, and with its options."""
    optim = torch.optim
    named = {
        "ASGD": (optim.ASGD, {"lr": 0.05}), "Adadelta": (optim.Adadelta, {"lr": 0.5}),
        "Adagrad": (optim.Adagrad, {"lr": 0.1}), "Adam": (optim.Adam, {"lr": 0.05}),
        "AdamW": (optim.AdamW, {"lr": 0.05}), "Adamax": (optim.Adamax, {"lr": 0.05}),
        "NAdam": (optim.NAdam, {"lr": 0.05}), "RAdam": (optim.RAdam, {"lr": 0.05}),
        "RMSprop": (optim.RMSprop, {"lr": 0.01}), "Rprop": (optim.Rprop, {"lr": 0.01}),
        "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    }  # fmt: skip
    made = {}
    for name, (kind, options) in named.items():
        made[name] = kind, options | {"foreach": False}
        made[f"{name}, foreach"] = kind, options | {"foreach": True}
    for name in ("Adagrad", "Adam", "AdamW", "SGD"):
        made[f"{name}, fused"] = named[name][0], named[name][1] | {"fused": True}
    return made | {
        "SGD, plain": (optim.SGD, {"lr": 0.05}),
        "SGD, fused and plain": (optim.SGD, {"lr": 0.05, "fused": True}),
        "SGD, nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        "Adam, amsgrad": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01}),
        "AdamW, maximize": (optim.AdamW, {"lr": 0.01, "maximize": True}),
        "AdamW, rate as tensor": (optim.AdamW, {"lr": torch.tensor(0.05), "foreach": False}),
        "RMSprop, centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
        "Adagrad, from 0.1": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        "Adafactor": (optim.Adafactor, {"lr": 0.05}),
        "Muon": (optim.Muon, {"lr": 0.05}),
        "mezzo.AdamW": (mezzo.optim.AdamW, {"lr": 0.05}),
        "mezzo.Adam": (mezzo.optim.Adam, {"lr": 0.05}),
        "mezzo.SGD": (mezzo.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        "mezzo.Lion": (mezzo.optim.Lion, {"lr": 0.01}),
    }


OPTIMIZERS = _variants()


def test_no_class_of_torch_is_left_out():
    kinds = {kind for kind, _ in OPTIMIZERS.values()}
    elsewhere = {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer}  # below
    assert {kind for kind in vars(torch.optim).values() if isinstance(kind, type)} <= kinds | elsewhere


def made(name, model):
    kind, options = OPTIMIZERS[name]
    params = [param for param in model.parameters() if kind is not torch.optim.Muon or param.ndim == 2]
    return kind(params, **options)


class ByHand:
    """FP32 masters, rounded into a model stored low, and an optimizer over them: the oracle."""

    def __init__(self, model, make, dtype, scale=1.0):
        self.model, self.dtype, self.scale = copy.deepcopy(model), dtype, scale
        self.masters = copy.deepcopy(model)
        self.pairs = list(zip(self.model.parameters(), self.masters.parameters(), strict=True))
        for param, master in self.pairs:
            master.data = kept(master, dtype)
            param.data = low_of(master, dtype)
            param.grad_dtype = dtype
        self.optimizer = make(self.masters)

    def step(self, number, skipped=False):
        (self.model(number) * self.scale).backward()
        for param, master in self.pairs:
            if param.grad is not None:
                master.grad = param.grad.float() / self.scale
                param.grad = None
        if not skipped:
            self.optimizer.step()
            self.store()

    def store(self):
        for param, master in self.pairs:
            master.data.copy_(kept(master, self.dtype))
            param.data.copy_(low_of(master, self.dtype))


class Ours:
    """The same with mezzo, in one of its styles."""

    def __init__(self, model, make, dtype, style, scale=SCALE):
        self.model, self.style = copy.deepcopy(model), style
        self.optimizer = make(self.model)
        policy = f"O2,dtype={'bfloat16' if dtype == BF16 else 'float16'},emulate=true"
        if style == "adopt":
            self.prepared = prepare(self.model, policy)
            self.prepared.adopt(self.optimizer)
            self.read = self.prepared.halves.read
            self.halves = self.prepared.halves
        else:
            start = MixedPrecision if style == "five lines" else mezzo.attach
            self.amp = start(self.model, self.optimizer, f"{policy},loss_scale={scale}")
            (self.halves,) = self.amp.weights.halves()
            self.read = self.halves.read

    def step(self, number, skipped=False):
        if self.style == "five lines":
            with self.amp.autocast():
                loss = self.model(number, skipped)
            self.amp.backward(loss)
            assert bool(self.amp.step().skipped) == skipped
            self.amp.zero_grad()
        elif self.style == "attach":
            self.model(number, skipped).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model(number).backward()
            if not skipped:
                self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self):
        if self.style == "attach":
            self.amp.detach()


@contextlib.contextmanager
def both(model, make, dtype, style="five lines"):
    ours = Ours(model, make, dtype, style)
    try:
        yield ours, ByHand(model, make, dtype, 1.0 if style == "adopt" else SCALE)
    finally:
        ours.end()


def assert_equal(ours, by_hand):
    """Weights and the optimizer's state, bit for bit."""
    for (name, param), (low, master) in zip(ours.model.named_parameters(), by_hand.pairs, strict=True):
        assert torch.equal(ours.read(param), master), name
        assert torch.equal(param, low), name
    assert_same_states(ours.optimizer, by_hand.optimizer)


def assert_same_states(one, two):
    one, two = one.state_dict()["state"], two.state_dict()["state"]
    assert one.keys() == two.keys()
    for key, state in one.items():
        assert state.keys() == two[key].keys()
        for name, value in state.items():
            wanted = two[key][name]
            assert type(value) is type(wanted), name
            if isinstance(value, torch.Tensor):
                assert value.dtype == wanted.dtype, name
                assert torch.equal(value, wanted), name
            elif not isinstance(value, list):
                assert value == wanted, name


# Every class of torch's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, style, part",
    pairwise([*OPTIMIZERS], LOW, ["five lines", "attach", "adopt"], ["whole", "parts"]),
    ids=str,
)
def test_weights_and_state_are_those_of_masters_kept_by_hand(name, dtype, style, part, monkeypatch):
    if part == "parts":
        monkeypatch.setitem(views._PART, "cpu", 20)
    with both(Net(), lambda model: made(name, model), dtype, style) as (ours, by_hand):
        places = [(p.data_ptr(), ours.halves.rest_of(p).data_ptr()) for p in ours.model.parameters()]
        for number in range(8):
            ours.step(number, skipped=number in (2, 5))
            by_hand.step(number, skipped=number in (2, 5))
            assert_equal(ours, by_hand)
        assert [(p.data_ptr(), ours.halves.rest_of(p).data_ptr()) for p in ours.model.parameters()] == places
