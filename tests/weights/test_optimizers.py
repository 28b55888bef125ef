"""Optimizers over halves, and what programs do around them: beside a twin whose parameters are plain FP32, bit for bit.

Everything runs outside of regions, where storage alone differs. In FP16 the twin's weights are rounded after each step
to what halves hold, computed another way: in float64.
"""

import copy
import io
import subprocess
import sys
import weakref
from itertools import count, product

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo
from mezzo.weights import Halves
from mezzo.weights.models import in_halves, store

from .values import BF16, FP16, LOW, on_grid

optim = torch.optim


class Net(nn.Module):
    """Weights of several shapes, two of them one tensor, a frozen one; its loss is of their elements alone."""

    def __init__(self):
        super().__init__()
        shapes = {"first": (5, 7), "second": (5, 7), "third": (3, 5), "frozen": (3, 3), "bias": (5,), "scale": ()}
        for number, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(on_grid(shape, number)))
        self.second = self.first
        self.frozen.requires_grad_(False)

    def forward(self, number):
        loss = torch.zeros(())
        for index, param in enumerate(self.parameters()):
            aim = torch.arange(param.numel()).reshape(param.shape).mul(0.37 + number + index).sin()
            loss = loss + (param - aim).square().sum() * 0.5
        return loss


def halved(model, dtype=BF16):
    names = {param: name for name, param in model.named_parameters() if param.ndim > 1}
    store(dict.fromkeys(names, dtype), names)
    return model


def kept(value):
    """What FP16 halves hold of values: below 2**-14 multiples of 2**-39, in float64's arithmetic."""
    coarse = (value.detach().double() * 2.0**39).round() * 2.0**-39
    return torch.where(value.abs() < 2.0**-14, coarse, value.detach().double()).float()


class Twins:
    """A model with plain parameters and one with halves, each with an optimizer, which the same is done to."""

    def __init__(self, make, dtype=BF16, *, stays=True):
        self.models, self.dtype, self.stays = (Net(), halved(Net(), dtype)), dtype, stays
        self.optimizers = tuple(make(model) for model in self.models)
        self.places = [(p.hi.data_ptr(), p.lo.data_ptr()) for p in self.models[1].parameters() if isinstance(p, Halves)]

    def step(self, number, do=None):
        """Let both do a step, and compare what they are then."""
        results = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.manual_seed(number)
            results.append((do or ordinary)(model, optimizer, number))
        self.compare()
        if isinstance(results[0], torch.Tensor):
            assert torch.equal(*results)

    def compare(self):
        plain, stored = self.models
        if self.dtype == FP16:
            with torch.no_grad():
                for one, two in zip(plain.parameters(), stored.parameters(), strict=True):
                    if isinstance(two, Halves):
                        one.copy_(kept(one))
        for (name, one), two in zip(plain.named_parameters(), stored.parameters(), strict=True):
            assert torch.equal(one, two), name
            if isinstance(two, Halves) and self.stays:
                assert in_halves(two) is not None, name
        places = [(p.hi.data_ptr(), p.lo.data_ptr()) for p in stored.parameters() if isinstance(p, Halves)]
        assert places == self.places
        assert_same_states(*(optimizer.state_dict()["state"] for optimizer in self.optimizers))


def ordinary(model, optimizer, number):
    optimizer.zero_grad()
    model(number).backward()
    optimizer.step()


def with_closure(model, optimizer, number):
    def closure():
        optimizer.zero_grad()
        loss = model(number)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def assert_same_states(one, two):
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


# All of torch.optim -------------------------------------------------------------------------------------------------


def _variants():
    """Every class of torch.optim, as loop, foreach and fused where this machine has them, and with its options."""
    named = {
        "ASGD": (optim.ASGD, {"lr": 0.05}), "Adadelta": (optim.Adadelta, {"lr": 0.5}),
        "Adagrad": (optim.Adagrad, {"lr": 0.1}), "Adam": (optim.Adam, {"lr": 0.05}),
        "AdamW": (optim.AdamW, {"lr": 0.05}), "Adamax": (optim.Adamax, {"lr": 0.05}),
        "NAdam": (optim.NAdam, {"lr": 0.05}), "RAdam": (optim.RAdam, {"lr": 0.05}),
        "RMSprop": (optim.RMSprop, {"lr": 0.01}), "Rprop": (optim.Rprop, {"lr": 0.01}),
        "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    }  # fmt: skip
    made = {}
    for name, (optimizer_class, options) in named.items():
        made[name] = optimizer_class, options | {"foreach": False}
        made[f"{name}, foreach"] = optimizer_class, options | {"foreach": True}
        made[f"{name}, as it comes"] = optimizer_class, options
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
        "mezzo.Muon": (mezzo.optim.Muon, {"lr": 0.05, "adamw": {"lr": 0.05}}),
    }


OPTIMIZERS = _variants()


def test_no_class_of_torch_is_left_out():
    kinds = {optimizer_class for optimizer_class, _ in OPTIMIZERS.values()}
    elsewhere = {optim.LBFGS, optim.SparseAdam, optim.Optimizer}  # below, and in test_models.py
    assert {
        optimizer_class for optimizer_class in vars(optim).values() if isinstance(optimizer_class, type)
    } <= kinds | elsewhere


def making(name):
    optimizer_class, options = OPTIMIZERS[name]
    return lambda model: optimizer_class(
        [p for p in model.parameters() if optimizer_class is not optim.Muon or p.ndim == 2], **options
    )


WAYS = list(product(LOW, [ordinary, with_closure]))


@pytest.mark.parametrize(
    "name, dtype, do",
    [
        (name, *WAYS[(number + turn) % len(WAYS)])
        for number, name in enumerate(OPTIMIZERS)
        for turn in ((0, 1) if "fused" in name or "mezzo" in name else (0,))
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_weights_and_state_are_those_of_plain_parameters(name, dtype, do):
    if do is with_closure and name.startswith("Muon"):
        do = ordinary
    twins = Twins(making(name), dtype)
    for number in range(4):
        twins.step(number, do)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_lbfgs(search, dtype):
    twins = Twins(lambda model: optim.LBFGS([p for p in model.parameters() if p.requires_grad],
                                            lr=0.5, max_iter=4, line_search_fn=search), dtype)  # fmt: skip
    for number in range(3):
        twins.step(number, with_closure)


@pytest.mark.parametrize("name", ["AdamW", "AdamW, foreach", "AdamW, fused", "SGD, fused"])
def test_steps_that_a_scaler_skips_write_nothing(name):
    scalers = weakref.WeakKeyDictionary()

    def do(model, optimizer, number):
        scaler = scalers.setdefault(model, torch.amp.GradScaler("cpu", init_scale=8.0))
        optimizer.zero_grad()
        loss = model(number)
        if number in (1, 3):
            loss = loss + (model.third * 0).sqrt().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return torch.tensor(scaler.get_scale())

    twins = Twins(making(name))
    for number in range(5):
        twins.step(number, do)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["AdamW", "AdamW, fused", "Rprop", "Adagrad", "SGD", "mezzo.AdamW", "mezzo.Muon"])
@pytest.mark.parametrize("goes_on", ["in halves", "plain"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, goes_on):
    twins = Twins(making(name))
    for number in range(3):
        twins.step(number)
    parts = twins.models[1], twins.optimizers[1]
    states = through_a_file([part.state_dict() for part in parts])
    model = halved(Net()) if goes_on == "in halves" else Net()
    with torch.no_grad():
        model.first.mul_(3)
    optimizer = making(name)(model)
    for part, state in zip((model, optimizer), states, strict=True):
        part.load_state_dict(state)
    for number in range(3, 6):
        twins.step(number)
        ordinary(model, optimizer, number)
    for one, two in zip(model.parameters(), twins.models[0].parameters(), strict=True):
        assert torch.equal(one, two)


# Optimizers of others -----------------------------------------------------------------------------------------------


class SAM(optim.Optimizer):
    """As its best known implementation has it: it climbs, asks the closure again, and returns before it steps."""

    def __init__(self, params, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        shared = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in shared]).norm()
        for p in shared:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in shared:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        return loss


class Ids(optim.SGD):
    """Knows its parameters by their identity."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.factors = {id(p): 1.0 / (1 + n) for n, p in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * self.factors.get(id(p), 0.0) * 0.1)


class Kfac(optim.SGD):
    """Writes the gradients of a model's parameters in its step, as preconditioners do."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        self.model = model

    def step(self, closure=None):
        for param in (self.model.first, self.model.third):
            param.grad.copy_(param.grad @ torch.eye(param.shape[1]) * 0.5)
            param.grad = param.grad + 2**-12 * param.data
        return super().step(closure)


class Keeps(optim.SGD):
    """Has parameters' memory, in some form, since its first step or since it was built, and writes that."""

    def __init__(self, params, early, keep):
        super().__init__(params, lr=0.1)
        self.keep, self.own = keep, None
        if early:
            self.look()

    def look(self):
        self.own = [(p, self.keep(p)) for p in self.param_groups[0]["params"] if p.requires_grad]

    @torch.no_grad()
    def step(self, closure=None):
        if self.own is None:
            self.look()
        for param, own in self.own:
            own.sub_(param.grad.view_as(own), alpha=0.01)


class Shadow(optim.SGD):
    """Trains copies of its own, and gives parameters the values of those through ``.data``."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.copies = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, own in zip(self.param_groups[0]["params"], self.copies, strict=True):
            if p.grad is not None:
                own.sub_(p.grad, alpha=0.01)
                p.data.copy_(own)


class Sphere(optim.SGD):
    """A manifold's: it steps, and puts rows back to length one."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    p.div_(p.norm(dim=1, keepdim=True))


class Replaces(optim.SGD):
    """Gives parameters other memory, in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = p.data - 0.01 * p.grad


class InMany(optim.Optimizer):
    """Steps by torch's lists of tensors, aliases among them."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(params, 0.99)
        torch._foreach_add_(params, [p.grad for p in params], alpha=-0.01)
        rows = [row for p in params if p.ndim > 1 for row in p]
        torch._foreach_clamp_max_(rows, 1.5)


STRANGERS = {
    "SAM": lambda model: SAM(list(model.parameters())), "ids": lambda model: Ids(model.parameters()), "K-FAC": Kfac,
    "shadow": lambda model: Shadow(model.parameters()), "sphere": lambda model: Sphere(model.parameters(), lr=0.1),
    "lists": lambda model: InMany(model.parameters()),
    "other memory": lambda model: Replaces(model.parameters(), lr=0.1),
} | {
    f"keeps {name}{', early' * early}": lambda model, early=early, keep=keep: Keeps(model.parameters(), early, keep)
    for name, keep in {"itself": lambda p: p, "data": lambda p: p.data, "detached": lambda p: p.detach(),
                       "a view": lambda p: p.data.view(-1), "a view of a view": lambda p: p.data.view(-1)[:]}.items()
    for early in (False, True)
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_optimizers_of_others(name, dtype):
    # What gets other memory through .data lies there, as plain parameters do.
    twins = Twins(STRANGERS[name], dtype, stays=name not in ("SAM", "other memory"))
    for number in range(4):
        twins.step(number, with_closure if name == "SAM" else ordinary)


class Breaks(optim.AdamW):
    """Raises when half of its parameters are written."""

    def step(self, closure=None):
        with torch.no_grad():
            for number, p in enumerate(self.param_groups[0]["params"]):
                if number == 2:
                    raise KeyError("in the middle")
                p.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("after", ["AdamW", "AdamW, fused", "mezzo.AdamW"])
def test_after_a_step_that_raises_values_are_right_and_train_on(after):
    models = Net(), halved(Net())
    broken = [Breaks(net.parameters()) for net in models]
    others = [making(after)(net) for net in models]
    seen = []
    for model, optimizer, other in zip(models, broken, others, strict=True):
        model(0).backward()
        with pytest.raises(KeyError):
            optimizer.step()
        states = [model.state_dict()]
        with torch.no_grad():
            model.third.mul_(1.5)
            model.first.t()[2:].add_(0.1)
        states += [model.state_dict(), copy.deepcopy(model).state_dict()]
        for stepping in (other, other, optim.SGD(model.parameters(), lr=0.1)):
            ordinary(model, stepping, 1)
            states.append(model.state_dict())
        seen.append(states)
    for one, two in zip(*seen, strict=True):
        for name, value in one.items():
            assert torch.equal(value, two[name]), name


# What programs do around steps --------------------------------------------------------------------------------------


class Program:
    """A loop with an optimizer, in which a program does something of its own after each step."""

    optimizer_class = optim.AdamW

    def __init__(self, model):
        self.model = model
        self.optimizer = self.optimizer_class(model.parameters(), lr=0.01)
        self.numbers = count()
        self.start()

    def start(self):
        pass

    def step(self):
        ordinary(self.model, self.optimizer, next(self.numbers))
        self.after()

    def after(self):
        pass

    def result(self):
        return []


class DecaysInHook(Program):
    def start(self):
        self.optimizer.register_step_post_hook(self.decay)
        self.optimizer.register_step_pre_hook(self.look)
        self.seen = []

    @torch.no_grad()
    def decay(self, optimizer, *_):
        for p in self.model.parameters():
            p.mul_(0.999)

    def look(self, optimizer, *_):
        self.seen.append(self.model.third.detach().clone())

    def result(self):
        return self.seen


class ScheduleFree(Program):
    """``eval()`` moves weights to their average, ``train()`` back: in place, one by one or in lists."""

    def start(self):
        self.z = [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def after(self):
        params = list(self.model.parameters())
        for _ in range(3):
            for p, z in zip(params, self.z, strict=True):
                p.lerp_(z, 1 - 1 / 0.9)
            torch._foreach_lerp_(params, self.z, weight=1 - 0.9)
        for p, z in zip(params, self.z, strict=True):
            z.add_(p.data, alpha=-0.01)


class TargetNetwork(Program):
    """BYOL's, and that of agents: a copy that follows slowly, written through ``.data``."""

    def start(self):
        self.target = copy.deepcopy(self.model)

    def after(self):
        for p, t in zip(self.model.parameters(), self.target.parameters(), strict=True):
            t.data = t.data * 0.99 + p.data * 0.01
            t.data.mul_(0.99).add_(p.data, alpha=0.01)

    def result(self):
        return [p.data for p in self.target.parameters()]


class TargetInHalves(TargetNetwork):
    """The target is stored in halves itself, and is written in three ways."""

    def start(self):
        self.target = Net()
        if isinstance(self.model.first, Halves):
            halved(self.target)

    def after(self):
        for p, t in zip(self.model.parameters(), self.target.parameters(), strict=True):
            t.data.copy_(0.99 * t.data + 0.01 * p.data)
            t.data = t.data * 0.99 + p.data * 0.01
            with torch.no_grad():
                t.lerp_(p, 0.01)


class AveragesByHand(Program):
    def start(self):
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def after(self):
        for name, p in self.model.named_parameters():
            self.average[name].mul_(0.99).add_(p, alpha=0.01)

    def result(self):
        return list(self.average.values())


class Averages(Program):
    def start(self):
        self.averaged = AveragedModel(self.model)

    def after(self):
        self.averaged.update_parameters(self.model)

    def result(self):
        return list(self.averaged.parameters())


class MovingAverages(Averages):
    def start(self):
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)


class ClipsAndSchedules(Program):
    def start(self):
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 5)
        self.norms = []

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.model(next(self.numbers)).backward()
        self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        self.scheduler.step()

    def result(self):
        return self.norms


class Thaws(Program):
    def after(self):
        number = next(self.numbers)
        self.model.frozen.requires_grad_(True)
        if number == 3:
            self.model.third.requires_grad_(False)
            self.model.third.grad = None
            self.model.joined = nn.Parameter(self.model.third.detach() * 2)
            self.optimizer.add_param_group({"params": [self.model.joined], "lr": 0.1})


class GansStep(Program):
    """Two optimizers over the same parameters, and one over a part of one."""

    def start(self):
        self.second = optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.rows = nn.Parameter(self.model.first.data[1:3])
        self.third = optim.SGD([self.rows, self.model.first], lr=0.01, foreach=True)

    def after(self):
        self.second.step()
        self.rows.grad = self.model.first.grad[1:3] * 2
        self.third.step()


class Noise(Program):
    @torch.no_grad()
    def after(self):
        torch.manual_seed(next(self.numbers))
        for p in self.model.parameters():
            p.add_(torch.randn_like(p), alpha=2**-14)
            p.grad = torch.randn_like(p)
        self.optimizer.step()


class Accumulates(Program):
    def step(self):
        for _ in range(3):
            (self.model(next(self.numbers)) / 3).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class StepsInBackward(Program):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""

    def start(self):
        own = {p: optim.SGD([p], lr=0.01, momentum=0.9) for p in self.model.parameters() if p.requires_grad}

        def hook(param):
            own[param].step()
            own[param].zero_grad()

        for p in own:
            p.register_post_accumulate_grad_hook(hook)

    def step(self):
        self.model(next(self.numbers)).backward()


class Differentiates(Program):
    optimizer_class = optim.Adagrad

    def step(self):
        penalty = self.model(next(self.numbers))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(penalty, trained, create_graph=True)
        loss = penalty + sum(gradient.square().sum() for gradient in gradients)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


PROGRAMS = [
    DecaysInHook, ScheduleFree, TargetNetwork, TargetInHalves, AveragesByHand, Averages, MovingAverages,
    ClipsAndSchedules, Thaws, GansStep, Noise, Accumulates, StepsInBackward, Differentiates,
]  # fmt: skip


@pytest.mark.parametrize(
    "optimizer_class", [None, optim.SGD, mezzo.optim.AdamW], ids=lambda value: value and value.__module__
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda value: value.__name__)
def test_programs(program, optimizer_class):
    if optimizer_class is not None:
        program = type(program.__name__, (program,), {"optimizer_class": optimizer_class})
    one, two = program(Net()), program(halved(Net()))
    for _ in range(6):
        one.step()
        two.step()
        for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(one.result(), two.result(), strict=True):
        assert torch.equal(a, b)
    assert isinstance(two.model.first, Halves)


#: Alone: in a test process others have built kernels before.
FIRST = """
import torch, mezzo
from mezzo.weights import codec
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
amp = mezzo.MixedPrecision(model, optimizer, "O2,bf16,emulate=true")
for number in range(4):
    if number == 2:  # as if the weights had come from a device that has had none
        codec._BUILT.clear()
        optimizer._mezzo_parts._plans.clear()
    with amp.autocast():
        loss = model(torch.ones(2, 8)).square().mean()
    amp.backward(loss)
    before = model.weight.clone()
    amp.step()
    amp.zero_grad()
    assert len(optimizer._mezzo_parts._plans) == (number != 2)
    assert not torch.equal(before, model.weight)
"""


def test_the_first_fused_step_of_a_process_has_kernels_for_small_halves():
    """They cannot be traced where torch's fused kernel is dispatched; a warning would say that there are none."""
    done = subprocess.run([sys.executable, "-c", FIRST], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
