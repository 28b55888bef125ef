"""A step that raises: where nothing that stood before was written, training goes on as if it had never begun.

The oracle is the same run without the failure, bit for bit: weights, and the optimizer's state. Where a step has
written what stood, every later call says so.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler
from mezzo.errors import StateError

from .loops import LOW, batch, network

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
POLICIES = ("O0", *LOW[1:3])


# Optimizers, which raise what is put under ``error`` ------------------------------------------------------------------


class Before(torch.optim.AdamW):
    """Raises before all else, and counts its calls."""

    error, calls = None, 0

    def step(self, closure=None):
        self.calls += 1
        if self.error:
            raise self.error
        return super().step(closure)


class Between(torch.optim.SGD):
    """Makes state and writes parameter by parameter, as most optimizers outside of torch do, and raises at one of them.

    ``past`` writes through ``param.data``, which torch does not count.
    """

    error, past, index = None, False, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for index, param in enumerate(group["params"]):
                if not (state := self.state[param]):
                    state.update(step=0, mean=torch.zeros_like(param))
                state["step"] += 1
                if self.error and index == self.index:
                    raise self.error
                state["mean"].lerp_(param.grad, 1 / (state["step"] + group["k"]))
                (param.data if self.past else param).sub_(state["mean"], alpha=group["lr"])


def between(params, **options):
    made = Between(params, lr=0.1)
    vars(made).update(options)
    return made


adam = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
moments = functools.partial(torch.optim.Adam, lr=0.01, foreach=True)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
own = functools.partial(mezzo.optim.AdamW, lr=0.01, eps=1e-4)


# How they come to raise -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(optimizer, error):
    optimizer.error = error
    yield
    optimizer.error = None


@contextlib.contextmanager
def hooked(optimizer, error, writes=False):
    def hook(stepping, *_):
        if writes:
            with torch.no_grad():
                stepping.param_groups[0]["params"][-1].add_(1.0)
        raise error

    handle = optimizer.register_step_pre_hook(hook)
    yield
    handle.remove()


@contextlib.contextmanager
def scarce(optimizer, error, owner, name, left=0):
    """A function of torch's, or mezzo's, that has room for so many calls more."""
    plain, count = getattr(owner, name), iter(range(1000))

    def function(*args, **kwargs):
        if next(count) >= left:
            raise error
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        yield


def zeros(left):
    return functools.partial(scarce, owner=torch, name="zeros_like", left=left)


def foreach(name, left=0):
    return functools.partial(scarce, owner=torch, name=f"_foreach_{name}", left=left)


#: By name: how an optimizer is made, how it comes to raise, and whether the first step and a later one go on.
FAILURES = {
    "before all else": (functools.partial(Before, lr=0.01, eps=1e-4), failing, True, True),
    "making the first state": (adam, zeros(0), True, None),
    "making the third state": (adam, zeros(4), True, None),
    "making the third state of fused kernels": (functools.partial(adam, fused=True), zeros(4), True, None),
    "before the first write": (functools.partial(sgd, foreach=True), foreach("add"), True, True),
    "with moments and counts written": (moments, foreach("sqrt"), True, False),
    "in the second group": (lambda params: adam([{"params": [param]} for param in params], foreach=True),
                            foreach("sqrt", 1), False, False),
    "in a hook before": (adam, hooked, True, True),
    "in a hook before fused kernels": (functools.partial(adam, fused=True), hooked, True, True),
    "in a hook before that has written": (sgd, functools.partial(hooked, writes=True), False, False),
    "at the first parameter": (between, failing, True, True),
    "at the first parameter, past torch's counts": (functools.partial(between, past=True), failing, True, True),
    "at the second parameter": (functools.partial(between, index=1), failing, False, False),
    "at the second parameter, past torch's counts": (functools.partial(between, past=True, index=1), failing, False,
                                                     False),
    "in a hook before mezzo's": (own, hooked, True, True),
    "making mezzo's state": (own, functools.partial(scarce, owner=mezzo.optim.optimizer, name="zeros", left=3), True,
                             None),
}  # fmt: skip


class FiveLines:
    def __init__(self, model, optimizers, policy):
        self.amp, self.optimizers = mezzo.MixedPrecision(model, optimizers, policy), optimizers
        self.end = self.amp.close

    def backward(self, model, number):
        with self.amp.autocast():
            loss = loss_of(model, number)
        self.amp.backward(loss)

    def step(self):
        self.amp.step()

    def clear(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Attached(FiveLines):
    def __init__(self, model, optimizers, policy):
        self.amp, self.optimizers = mezzo.attach(model, optimizers, policy), optimizers
        self.end = self.amp.detach

    def backward(self, model, number):
        loss = loss_of(model, number)
        loss.backward()
        return loss

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class Scaler(FiveLines):
    def __init__(self, model, optimizers, policy):
        self.prepared = mezzo.prepare(model, policy)
        self.amp, self.optimizers, self.end = GradScaler("cpu"), optimizers, self.prepared.remove

    def backward(self, model, number):
        with self.prepared.autocast():
            loss = loss_of(model, number)
        self.amp.scale(loss).backward()

    def step(self):
        try:
            for optimizer in self.optimizers:
                self.amp.step(optimizer)
        finally:
            self.amp.update()


STYLES = {"five lines": FiveLines, "attach": Attached, "scaler": Scaler}


def loss_of(model, number):
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x).float(), y)


def run(style, policy, make, raises, at, error=FULL):
    """Take four steps, one of which raises, and is taken again; return weights and state, and what was said."""
    model = network()
    optimizer = make(model.parameters())
    driver, refusal = STYLES[style](model, [optimizer], policy), ""
    try:
        for number in range(4):
            for attempt in range(2):
                fails = number == at and not attempt
                driver.clear()
                driver.backward(model, number)
                with raises(optimizer, error) if fails else contextlib.nullcontext():
                    if not fails:
                        driver.step()
                        break
                    with pytest.raises(type(error)) as caught:
                        driver.step()
                    assert caught.value is error
        driver.clear()
    except StateError as refused:
        refusal = str(refused)
    driver.end()
    return [*model.state_dict().values(), *states(optimizer)], refusal


def states(optimizer):
    entries = [*optimizer.state.values(), *({**group, "params": 0} for group in optimizer.param_groups)]
    return [
        torch.as_tensor(value) for kept in entries for value in kept.values() if isinstance(value, torch.Tensor | int)
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", FAILURES)
def test_a_step_that_raises_is_taken_again_or_said_to_be_half_way(name, style):
    make, raises, *expectations = FAILURES[name]
    for policy, (at, goes_on) in itertools.product(POLICIES, zip((0, 2), expectations, strict=True)):
        if goes_on is None:  # a later step makes none
            continue
        expected, _ = run(style, policy, make, raises, None)
        actual, refusal = run(style, policy, make, raises, at)
        if goes_on:
            assert (refusal, len(actual)) == ("", len(expected))
            assert all(map(torch.equal, actual, expected))
        else:
            assert refusal.startswith("an update was ended half-way"), (at, refusal)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("mine")], ids=repr)
def test_it_is_no_matter_what_is_raised(error):
    for name in ("before all else", "making the third state", "in a hook before"):
        make, raises, *_ = FAILURES[name]
        expected, _ = run("attach", LOW[2], make, raises, None)
        actual, refusal = run("attach", LOW[2], make, raises, 0, error)
        assert refusal == ""
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("policy", POLICIES)
def test_of_two_optimizers_the_first_to_raise_leaves_all_as_it_was_and_the_second_does_not(policy):
    def trained(fails):
        model = network()
        pair = [Before(model[index].parameters(), lr=0.01) for index in (0, 3)]
        driver = FiveLines(model, pair, policy)
        driver.backward(model, 0)
        if fails is not None:
            with failing(pair[fails], FULL), pytest.raises(torch.OutOfMemoryError):
                driver.step()
        driver.step()  # with the gradients that are there still
        return [*model.state_dict().values(), *states(pair[0]), *states(pair[1])]

    assert all(map(torch.equal, trained(None), trained(0)))
    with pytest.raises(StateError, match=r"(?s)half-way.*Before\.step\(\)"):
        trained(1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make", [adam, own, functools.partial(torch.optim.LBFGS, max_iter=3)], ids=["Adam", "own", "LBFGS"]
)
def test_a_closure_that_runs_out_of_memory_leaves_all_as_it_was(policy, make):
    model = network()
    optimizer = make(model.parameters())
    driver, left = Attached(model, [optimizer], policy), [100]

    def closure():
        optimizer.zero_grad()
        loss = driver.backward(model, 0)
        if not left[0]:
            raise FULL
        left[0] -= 1
        return loss

    optimizer.step(closure)
    left[0] = len(optimizer.state) == 1  # LBFGS evaluates it again
    before = copy.deepcopy([*model.state_dict().values(), *states(optimizer)])
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(closure)
    assert all(map(torch.equal, before, [*model.state_dict().values(), *states(optimizer)]))
    left[0] = 100
    optimizer.step(closure)
    assert not torch.equal(before[0], model[0].weight)
    driver.end()


def test_state_that_was_loaded_stood_before(tmp_path):
    """So a first step in which it is written cannot be taken again."""
    make, raises = FAILURES["with moments and counts written"][:2]
    model = network()
    optimizer = make(model.parameters())
    driver = FiveLines(model, [optimizer], LOW[1])
    driver.backward(model, 0)
    driver.step()
    again = make(model.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    driver.end()
    driver = FiveLines(model, [again], LOW[1])
    driver.backward(model, 1)
    with raises(again, FULL), pytest.raises(torch.OutOfMemoryError):
        driver.step()
    with pytest.raises(StateError, match="half-way"):
        driver.step()
    driver.end()
