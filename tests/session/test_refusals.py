"""What sessions refuse: with which words, and that every bit stays as it was."""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import mezzo
from mezzo import MixedPrecision, NumericsError, PolicyError, StateError, UnsupportedError

from ..support.refusals import refused
from ..support.releases import torchscript
from .loops import (
    O3,
    Weights,
    backward,
    batch,
    bound_names,
    built,
    loss_of,
    network,
    over,
    session,
    train,
)  # fmt: skip

NAN = float("nan")
FP16, BF16 = "O1,emulate=true,loss_scale=1024", "O1,dtype=bfloat16,emulate=true"
O2 = "O2,emulate=true,loss_scale=dynamic(init=1024)"
pytestmark = [
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters"),
    torchscript,
]


# Sessions that cannot begin: models, optimizers, policy, options ------------------------------------------------------


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def of(change, optimizer=sgd):
    """A model that is not what it should be, with its optimizer."""
    model = network()
    model = change(model) or model
    return model, optimizer(model)


def trained(make, model=None):
    model = network() if model is None else model
    made = make(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    made.step()
    made.zero_grad()
    return model, made


def in_session():
    model, made, amp = session(BF16)
    model.amp = [amp]  # which lives as long
    return model, made


def lazy():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    return model, sgd(model[0])


def wrapped_late():
    wrapper = nn.parallel.DistributedDataParallel(network())
    return wrapper, sgd(wrapper)


def inside_of_a_wrapper():
    model, _ = wrapped_late()
    model.module.wrapper = [model]
    return model.module, sgd(model)


def prepared(change, policy=BF16):
    model = network()
    handle = mezzo.prepare(model, policy)
    model = change(model, handle) or model
    return model, sgd(network() if isinstance(model, str) else model)


def fused_stands_still():
    """This torch's fused SGD may leave low weights on a CPU as they are: seen by a step of its own."""
    model = nn.Linear(64, 1, bias=False).bfloat16()
    trained(partial(torch.optim.SGD, lr=1.0, fused=True), nn.Sequential(model))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
    return torch.equal(before, model.weight)


def huge(model):
    model[0].weight.data.fill_(1e5)


def with_gradients(model, handle):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


#: By name: model and optimizer, policy, options, the error, and words that it has.
BEGINNINGS = {
    "a level that there is not": (built, "O7", {}, PolicyError, "unknown level 'O7'"),
    "each in the other's place": (lambda: built()[::-1], "O1", {}, PolicyError, "a model must be an nn.Module, not SGD",
                                  "models first, then optimizers"),
    "a class for a model": (lambda: (nn.Linear, built()[1]), "O1", {}, PolicyError, "not the class Linear"),
    "no optimizer": (lambda: (network(), []), "O1", {}, PolicyError, "an optimizer must be", "there is none"),
    "an optimizer twice": (lambda: (built()[0], [built()[1]] * 2), "O1", {}, PolicyError, "listed twice"),
    "replicas in threads": (lambda: of(nn.DataParallel), "O1", {}, UnsupportedError, "wrapped by DataParallel",
                         "torch.nn.parallel.DistributedDataParallel under torchrun"),
    "TorchScript": (lambda: of(lambda m: torch.jit.trace(m, batch(0)[0])), "O1", {}, UnsupportedError,
                    "the module without torch.jit.script or torch.jit.trace"),
    "no parameter": (lambda: (network(), torch.optim.SGD([{"params": []}])), "O1", {}, PolicyError,
                     "the optimizer updates no parameter", "SGD(model.parameters(), …)"),
    "no values yet": (lambda: of(lambda m: m.to("meta")), "O1", {}, StateError, "meta device", "model.to_empty("),
    "lazy parameters": (lazy, "O2", {}, UnsupportedError, "lazy parameters have no values yet"),
    "an optimizer of another session's": (in_session, "O1", {}, StateError, "belongs to a session", "close()"),
    "parameters of others": (lambda: (network(), built()[1]), "O1", {}, PolicyError, "that are not the models'",
                             "SGD: "),
    "a kernel that moves nothing": (lambda: of(lambda m: None, partial(sgd, fused=True)), O3[1], {}, UnsupportedError,
                                    "leaves most torch.bfloat16 weights on CPUs as they are", "fused=False"),
    "low weights alone": (lambda: of(nn.Module.half), "O1", {}, UnsupportedError,
                                    "float16 weights would be trained without FP32 values", "model.float(); or",
                                    "Policy.O2("),
    "BF16 weights alone": (lambda: of(nn.Module.bfloat16), "O0", {}, UnsupportedError,
                                     "bfloat16 weights would be trained without FP32 values", "O2,dtype=bfloat16"),
    "FP32 state for low weights": (lambda: trained(torch.optim.AdamW), O3[1], {}, StateError, "holds FP32 state",
                                   "Policy.O2("),
    "an eps that FP16 has not": (lambda: built(torch.optim.AdamW), O3[0], {}, UnsupportedError,
                                 "eps=1e-08 is zero in float16", "eps=1e-4", "Policy.O2()"),
    "a norm that is none": (built, "O1", {"max_grad_norm": NAN}, PolicyError, "max_grad_norm is nan", "a norm to clip"),
    "a norm that is a switch": (built, "O1", {"max_grad_norm": True}, PolicyError, "a norm to clip to is positive"),
    "a reaction that there is not": (built, "O1", {"on_overflow": "rise"}, PolicyError, "on_overflow", "'raise'"),
    "a rule that hits nothing": (built, "O2,fp32_module=nowhere", {}, PolicyError, "matches no module"),
    "values beyond FP16": (lambda: of(huge), "O2", {}, UnsupportedError,
                           "values do not fit float16", "0.weight"),
    "double precision": (lambda: of(nn.Module.double), "O2", {}, UnsupportedError, "float64"),
    "a wrapper that reduces": (wrapped_late, "O2", {}, StateError, "DistributedDataParallel already wraps",
                               "prepare first, then DistributedDataParallel(model)"),
    "inside of a wrapper": (inside_of_a_wrapper, "O2", {}, StateError, "gradients are collected already"),
    "gradients of before": (lambda: of(lambda m: with_gradients(m, None)), "O2", {}, StateError, "hold gradients"),
    "prepared with another policy": (lambda: prepared(lambda *_: None), "O1", {}, PolicyError, "prepared with",
                                     "dtype: bfloat16 → float16"),
    "a part of what was prepared": (lambda: prepared(lambda m, _: m[0]), BF16, {}, StateError, "as part of a larger"),
    "prepared in part": (lambda: prepared(lambda m, _: nn.Sequential(m, nn.Linear(3, 3))), BF16, {}, StateError,
                         "prepared only in part"),
    "prepared, with gradients": (lambda: prepared(with_gradients, "O2,dtype=bfloat16"), "O2,dtype=bfloat16", {},
                                 StateError, "hold gradients", "zero_grad"),
}  # fmt: skip


@contextlib.contextmanager
def nothing_changes(error, *words, parts):
    """As :func:`refused`, of what stands under the names of torch's that sessions bind as well."""
    gc.collect()  # sessions of other tests, which give their names back
    before = bound_names()
    with refused(error, *words, parts=parts):
        yield
    assert bound_names() == before


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_session_that_is_refused_leaves_everything_as_it_was(name, request):
    build, policy, options, error, *words = BEGINNINGS[name]
    if "wrapper" in name:
        request.getfixturevalue("alone")
    if name == "a kernel that moves nothing" and not fused_stands_still():
        pytest.skip("this torch's fused SGD moves low weights")
    for begin in (MixedPrecision, mezzo.attach):
        models, optimizers = build()
        parts = [part for arg in (models, optimizers) for part in (arg if isinstance(arg, list) else [arg])]
        with nothing_changes(error, *words, parts=parts):
            begin(models, optimizers, policy, **options)


def test_all_that_is_wrong_is_said_at_once():
    with refused(PolicyError, "not the models'", "updates no parameter"):
        MixedPrecision(network(), [sgd(network()), torch.optim.SGD([{"params": []}])], "O1")


# Calls that a session refuses -----------------------------------------------------------------------------------------


def ready(policy=O2, optimizer="SGD"):
    return session(policy, optimizer)


def trained_once(policy=FP16, optimizer="SGD"):
    model, made, amp = session(policy, optimizer)
    train(amp, model, 0)
    return model, made, amp


def opened(policy=FP16, optimizer="SGD"):
    model, made, amp = session(policy, optimizer)
    backward(amp, model, 0)
    return model, made, amp


def plain(policy=FP16, optimizer="SGD"):
    """A program that is attached, with gradients."""
    model, made = built(optimizer)
    amp = mezzo.attach(model, made, policy)
    loss_of(model, 0).backward()
    return model, made, amp


def after(make, change):
    """What ``make`` returns, and what is done to it returns besides."""
    parts = make()
    more = change(*parts)
    return *parts, *(more if isinstance(more, tuple) else ())


def stale(*args):
    return after(partial(opened, *args), lambda model, made, amp: amp.step())


def ended():
    return after(ready, lambda model, made, amp: amp.close())


def with_later(make, *args):
    """A session, and an optimizer over its model that comes later."""
    return after(partial(make, *args), lambda model, made, amp: (torch.optim.AdamW(model.parameters()),))


def with_others(make, *args):
    return after(partial(make, *args), lambda model, made, amp: built())


def cleared_by_others():
    return after(opened, lambda model, made, amp: model.zero_grad())


def frozen():
    model = Weights(1, 1)
    model.vectors[0].requires_grad_(False)
    pair, amp = over(model, FP16, [model.vectors[0]], [model.vectors[1]])
    return model, pair[0], amp, pair[1]


def with_a_wrong_lr():
    return after(partial(opened, O2, "AdamW"), lambda model, made, amp: made.param_groups[0].update(lr=NAN))


class HalfWay(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["params"][0].add_(1.0)
        raise ZeroDivisionError


def half_way():
    def fail(model, made, amp):
        with pytest.raises(ZeroDivisionError):
            amp.step()

    return after(partial(opened, O2, lambda params: HalfWay(params, lr=0.1)), fail)


class Deaf(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


def of_two():
    model = network()
    pair = [sgd(model[0]), sgd(model[3])]
    return model, pair[0], MixedPrecision(model, pair, O2), pair[1]


def scaler_of(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    return scaler


def stops_inside(model, made, amp):
    inner = model[0](batch(0)[0])
    model[1:](inner).square().mean().backward(inputs=[model[0].weight, inner])


HALF = "an update was ended half-way", "HalfWay.step()", "load_state_dict(…) of model, optimizer and session"
INSIDE = "a backward pass under a loss scale begins, or stops, inside of its graph", "Policy.O1", "amp.grad("
WINDOW = "inside an accumulation window", "after 1 backward pass", "amp.step() first; or amp.zero_grad()"
#: By name: what there is, the call, the error, and words that it has.
CALLS = {
    # Losses
    "a loss of many numbers": (trained_once, lambda m, o, amp: amp.backward(m(batch(0)[0])), PolicyError,
                               "a loss is a floating scalar, not float32 of shape [16, 3]",
                               "amp.backward(loss.mean())"),
    "a loss of whole numbers": (trained_once, lambda m, o, amp: amp.backward(torch.tensor(3)), PolicyError,
                                "not int64 of shape []"),
    "a loss without a graph": (trained_once, lambda m, o, amp: amp.backward(loss_of(m, 0).detach()), StateError,
                               "the loss depends on no parameter", "outside torch.no_grad()"),
    "a loss for what is frozen": (frozen, lambda m, o, amp, _: amp.backward(m.loss(1.0, 1.0), optimizers=o), StateError,
                                  "update no parameter that requires a gradient", "requires_grad_(True)"),
    "gradients of the last step": (stale, lambda m, o, amp: backward(amp, m, 1), StateError,
                                   "the last step's gradients are still there", "0.weight", "amp.zero_grad() after"),
    # Steps
    "a step without a pass": (ready, lambda m, o, amp: amp.step(), StateError, "step() before backward()",
                              "amp.backward(loss), then amp.step()"),
    "unscaling without a pass": (ready, lambda m, o, amp: amp.unscale_(), StateError, "unscale_() before backward()"),
    "a step with gradients that others cleared": (cleared_by_others, lambda m, o, amp: amp.step(), StateError,
                                                  "no parameter has a gradient", "amp.zero_grad() only after"),
    "the optimizer's own step": (opened, lambda m, o, amp: o.step(), StateError,
                                 "optimizer.step() behind the session's back", "SGD", "amp.step()"),
    "a step of an unknown optimizer": (lambda: with_later(opened), lambda m, o, amp, later: amp.step(later),
                                       PolicyError,
                                       "the optimizer is not the session's", "AdamW"),
    "a pass for no optimizer": (ready, lambda m, o, amp: amp.backward(loss_of(m, 0), optimizers=[]), PolicyError,
                                "when omitted"),
    "gradients to be differentiated, of the five lines": (
        ready, lambda m, o, amp: amp.backward(loss_of(m, 1), create_graph=True), StateError,
        "would be differentiated again", "or amp.grad",
    ),
    "an unknown optimizer's own step": (lambda: with_later(opened), lambda m, o, amp, later: later.step(), StateError,
                                        "an optimizer that the session does not know", "AdamW.step()",
                                        "MixedPrecision(model, [optimizer, other], policy)"),
    "a learning rate of NaN": (with_a_wrong_lr, lambda m, o, amp: amp.step(), PolicyError,
                               "lr is nan", "AdamW, group 0"),
    "a step after half an update": (half_way, lambda m, o, amp: amp.step(), StateError, *HALF),
    "a pass after half an update": (half_way, lambda m, o, amp: backward(amp, m, 1), StateError, *HALF),
    # Closures
    "a closure for two optimizers": (of_two, lambda m, o, amp, _: amp.step(closure=lambda: None), PolicyError,
                                     "a closure is for one optimizer", "SGD, SGD", "amp.step(optimizers=optimizer, "),
    "a closure without a pass": (ready, lambda m, o, amp: amp.step(closure=lambda: 1.0), StateError,
                                 "the closure computed no gradient", "amp.backward(loss) in the closure"),
    "an optimizer that ignores closures": (lambda: ready(O2, lambda params: Deaf(params, lr=0.1)),
                                           lambda m, o, amp: amp.step(closure=lambda: 1.0), StateError,
                                           "Deaf.step() did not evaluate the closure", "without closure="),
    "a closure in the optimizers' place": (opened, lambda m, o, amp: amp.step(lambda: None), PolicyError,
                                           "a closure stands in the place of the optimizers", "amp.step(closure="),
    # What is set, copied, ended
    "a norm that is set to nonsense": (ready, lambda m, o, amp: setattr(amp, "max_grad_norm", -1.0), PolicyError,
                                       "max_grad_norm is -1.0", "None does not clip"),
    "a copy of a session": (ready, lambda m, o, amp: copy.deepcopy(amp), StateError,
                            "a session cannot be copied or pickled", "copy.deepcopy(model)"),
    # Attached
    "a second session": (lambda: with_others(plain), lambda m, o, amp, other, its: mezzo.attach(other, its, FP16),
                         StateError, "a session is attached already", "amp.add(optimizer)", "amp.detach() first"),
    "a word for a switch": (built, lambda m, o: mezzo.attach(m, o, FP16, hold_schedulers="no"), PolicyError,
                            "hold_schedulers", "True or False"),
    "an optimizer that was not added": (lambda: with_later(plain, BF16), lambda m, o, amp, later: later.step(),
                                        StateError,
                                        "an optimizer that the session does not know", "AdamW.step()",
                                        "amp.add(optimizer)",
                                        "amp.detach()"),
    "a GradScaler that unscales besides": (plain, lambda m, o, amp: scaler_of(o).unscale_(o), StateError,
                                           "a GradScaler scales the loss besides", "GradScaler(enabled=False)"),
    "a GradScaler that steps besides": (plain, lambda m, o, amp: scaler_of(o).step(o), StateError, "GradScaler, SGD"),
    "gradients to be differentiated": (plain, lambda m, o, amp: loss_of(m, 1).backward(create_graph=True), StateError,
                                       "would be differentiated again", "Policy.O1",
                                       "torch.autograd.grad(loss, params, create_graph=True)"),
    "a pass that begins at an edge": (plain, lambda m, o, amp: torch.autograd.backward(
        [get_gradient_edge(loss_of(m, 1))], [torch.ones(())]), StateError, *INSIDE),
    "a pass that stops inside": (plain, stops_inside, StateError, *INSIDE),
    "one that is added inside a window": (lambda: with_later(plain, BF16), lambda m, o, amp, later: amp.add(later),
                                          StateError, "added inside an accumulation window", "AdamW", "amp.step() or"),
    "one that is added twice": (plain, lambda m, o, amp: amp.add(o), StateError, "belongs to a session", "SGD"),
    "one of others that is added": (lambda: with_others(plain), lambda m, o, amp, other, its: amp.add(its), PolicyError,
                                    "parameters that are not the models'"),
    # States
    "saving in a window": (opened, lambda m, o, amp: amp.state_dict(), StateError, *WINDOW),
    "loading in a window": (lambda: after(ready, lambda m, o, amp: (setattr(amp, "saved", amp.state_dict()), backward(
        amp, m, 0))[:0]), lambda m, o, amp: amp.load_state_dict(amp.saved), StateError, *WINDOW),
    "saving all in a window": (opened, lambda m, o, amp: amp.stateful().state_dict(), StateError, *WINDOW),
    "loading what was not saved so": (ready, lambda m, o, amp: amp.stateful().load_state_dict(amp.state_dict()),
                                      StateError, "this is not the state of amp.stateful()", "dcp.load("),
    "weights that FP16 does not hold": (lambda: ready(O2, "mezzo"), lambda m, o, amp: m.load_state_dict(
        {"0.weight": torch.full((16, 8), 1e6)}, strict=False), NumericsError, "beyond the range of the model's halves",
        "0.weight"),
}  # fmt: skip


#: What nothing can be asked for after ``close()``.
AFTER = {
    "autocast": lambda m, o, amp: amp.autocast(),
    "backward": lambda m, o, amp: amp.backward(loss_of(m, 0)),
    "grad": lambda m, o, amp: amp.grad(loss_of(m, 0), m[0].weight),
    "unscale_": lambda m, o, amp: amp.unscale_(),
    "step": lambda m, o, amp: amp.step(),
    "zero_grad": lambda m, o, amp: amp.zero_grad(),
    "state_dict": lambda m, o, amp: amp.state_dict(),
    "load_state_dict": lambda m, o, amp: amp.load_state_dict({}),
}
CALLS |= {
    f"{name} after the end": (ended, call, StateError, f"{name}() after close()", "a new MixedPrecision(model, opt")
    for name, call in AFTER.items()
}


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused_leaves_everything_as_it_was(name):
    build, call, error, *words = CALLS[name]
    parts = build()
    with nothing_changes(error, *words, parts=parts):
        call(*parts)


# States that cannot be loaded -----------------------------------------------------------------------------------------


def changed(**values):
    """A state with another value in a place, which may be one inside of another; ``None`` takes it out."""

    def change(state):
        for path, value in values.items():
            folder, _, name = path.rpartition("__")
            parent = state[folder] if folder else state
            if value is None:
                del parent[name]
            else:
                parent[name] = value(parent.get(name)) if callable(value) else value
        return state

    return change


def all_of(value):
    return lambda old: dict.fromkeys(old, value)


ANOTHER, NONE = "the state is that of another model or optimizer", "this is not the state of a MixedPrecision session"
DAMAGED = "the state of the session is damaged"
SCALER = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
#: By name: what is done to a state, the policy of the session, and words of the refusal.
STATES = {
    "nothing": (lambda _: {}, O2, NONE),
    "a list": (lambda state: [state], O2, NONE),
    "no version": (changed(version=None), O2, NONE),
    "an earlier release": (changed(version=1), O2, "the state has version 1", "the release that has written it"),
    "a later release": (changed(version=10**6), O2, "the state has version 1000000"),
    "no policy": (changed(policy=None), O2, DAMAGED, "policy is missing"),
    "a policy that there is not": (changed(policy="O9"), O2, DAMAGED, "policy is 'O9', not the text of a policy"),
    "no scale": (changed(loss_scale=None), O2, DAMAGED, "loss_scale.scale is missing"),
    "a scale below zero": (changed(loss_scale__scale=-1.0), O2, DAMAGED, "loss_scale.scale is -1.0, not a positive"),
    "a count below zero": (changed(stats__steps=-1), O2, DAMAGED, "stats.steps is -1, not a count"),
    "other parameters": (changed(parameters={"else": "float32 [3]"}), O2, ANOTHER,
                         "parameter else: float32 [3] → missing", "parameter 0.weight: missing → float32 [16, 8]"),
    "other shapes": (changed(parameters=all_of("float32 [1, 2]")), O2, ANOTHER, "float32 [1, 2] → float32 [16, 8]"),
    "a GradScaler's scale below zero": (lambda _: {**SCALER, "scale": -8.0}, O2, "scale is -8.0, not"),
    "a GradScaler's word for a count": (lambda _: {**SCALER, "_growth_tracker": "no"}, O2, "clean_steps is 'no', not"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_refused_leaves_everything_as_it_was(name):
    change, policy, *words = STATES[name]
    model, made, amp = trained_once(policy)
    state = change(copy.deepcopy(amp.state_dict()))
    train(amp, model, 1)
    with nothing_changes(StateError, *words, parts=(model, made, amp)):
        amp.load_state_dict(state)
    train(amp, model, 2)
