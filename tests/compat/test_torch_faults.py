"""What torch's GradScaler gets wrong, and mezzo's does not: each beside torch's own behaviour."""

import itertools

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, PolicyError, StateError, UnsupportedError
from mezzo.compat.torch import GradScaler

from .beside_torch import OPTIMIZERS, SCALERS, batch, loss_of, network, weights


def one_weight(value=1.0):
    weight = torch.full((1,), value, requires_grad=True)
    return weight, torch.optim.SGD([weight], lr=1.0)


@pytest.mark.parametrize("name", SCALERS)
def test_a_scale_that_sinks_stops_above_zero(name):
    """torch's becomes 0 after 166 overflows, and the next finite step makes the weights NaN."""
    weight, optimizer = one_weight()
    scaler = SCALERS[name]("cpu")
    for number in range(200):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (torch.inf if number < 199 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    if name == "torch":
        assert scaler.get_scale() == 0.0
        assert weight.isnan().all()
    else:
        assert scaler.get_scale() == 2.0**-126
        assert weight == 0.0  # 1 - 1


@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("unscales", [False, True])
def test_an_infinity_that_unscaling_makes_is_found(name, unscales):
    weight, optimizer = one_weight()
    scaler = SCALERS[name]("cpu", init_scale=2.0**-100)
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(1e10)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.isfinite().all() == (name == "mezzo")
    assert scaler.get_scale() == (2.0**-101 if name == "mezzo" else 2.0**-100)


def lbfgs(scaler_of, *, overflows=False, keyword=False, unscales=False):
    model, x = network(), batch(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    scaler = scaler_of("cpu") if scaler_of is not None else None
    losses, evaluations, before = [], [], []
    for step in range(3):
        before.append(weights(model))

        def closure(step=step):
            optimizer.zero_grad()
            evaluations.append(step)
            fails = overflows and evaluations.count(1) == 3 and step == 1
            loss = model(x).square().mean() * (torch.inf if fails else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            return loss

        if scaler_of is SCALERS["torch"]:
            closure()  # or it has no scale, and no gradients to check
        if scaler is None:
            losses.append(optimizer.step(closure))
        else:
            losses.append(scaler.step(optimizer, closure=closure) if keyword else scaler.step(optimizer, closure))
            if overflows:
                assert bool(scaler.last_step.skipped) == (step == 1)
                is_same = all(map(torch.equal, before[-1], weights(model)))
                assert is_same == (step == 1)
            scaler.update()
    return model, losses, scaler, optimizer.state[next(model.parameters())]["prev_flat_grad"].norm()


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_closure_evaluates_with_unscaled_gradients(keyword, unscales):
    """torch refuses one by name, and takes one by position, with gradients that are 65536 times too large."""
    plain, wanted, _, size = lbfgs(None)
    model, losses, scaler, found = lbfgs(GradScaler, keyword=keyword, unscales=unscales)
    assert [float(loss.detach()) for loss in losses] == [float(loss.detach()) for loss in wanted]
    for one, other in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(one, other)
    assert scaler.get_scale() == 65536.0
    torch.testing.assert_close(found, size)
    if not keyword and not unscales:
        assert lbfgs(SCALERS["torch"])[-1] > 1000 * size
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        lbfgs(SCALERS["torch"], keyword=True)


def test_a_closure_that_overflows_puts_everything_back():
    model, losses, scaler, _ = lbfgs(GradScaler, overflows=True)
    assert losses[1] is None
    assert all(weight.isfinite().all() for weight in weights(model))
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_closures_of_optimizers_that_evaluate_once(optimizer):
    results = []
    for evaluates in (True, False):
        model = network()
        made, scaler = OPTIMIZERS[optimizer](model.parameters()), GradScaler("cpu")
        for number in range(3):

            def closure(number=number, model=model, made=made, scaler=scaler):
                made.zero_grad()
                loss = loss_of(model, number)
                scaler.scale(loss).backward()
                return loss

            if evaluates:
                assert scaler.step(made, closure) == loss_of(network(), 0) or number
            else:
                closure()
                assert scaler.step(made) is None
            scaler.update()
        results.append(weights(model))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Odd(torch.optim.SGD):
    """An optimizer whose step takes and returns something of its own."""

    def step(self, closure=None, *, factor=1.0, log=()):
        super().step(closure)
        log.append(factor)
        return "stepped"


def test_step_hands_on_what_it_is_given_and_returns_what_it_gets():
    weight = torch.ones(1, requires_grad=True)
    optimizer, log = Odd([weight], lr=1.0), []
    for scaler_of in SCALERS.values():
        scaler = scaler_of("cpu")
        for factor in (1.0, torch.inf):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            found = scaler.step(optimizer, None, factor=3.0, log=log)
            scaler.update()
            assert found == ("stepped" if factor == 1.0 else None)
    assert log == [3.0, 3.0]


def test_fp16_gradients_are_refused_with_parameter_cause_and_cure():
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = {}
    for (name, scaler_of), call in itertools.product(SCALERS.items(), ("unscale_", "step")):
        scaler = scaler_of("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(model(batch(0).half()).float().square().mean()).backward()
        before = [param.grad.clone() for param in model.parameters()]
        with pytest.raises((ValueError, UnsupportedError)) as raised:
            getattr(scaler, call)(optimizer)
        messages[name] = str(raised.value)
        if name == "mezzo":
            for param, gradient in zip(model.parameters(), before, strict=True):
                assert torch.equal(param.grad, gradient)
    assert messages["torch"] == "Attempting to unscale FP16 gradients."
    assert messages["mezzo"].splitlines() == [
        "fp16 gradients cannot be unscaled in fp16",
        "  where  group 0, parameter 0 (float16, 8×4) and 3 more, optimizer SGD",
        "  why    dividing them by the loss scale in float16 flushes small ones to zero",
        "  write  model.float(), and autocast(device_type, torch.float16) around its forward pass;",
        '         or mezzo.MixedPrecision(model, optimizer, "O2"), which keeps FP32 masters of a model given in FP32',
    ]


def test_where_kernels_unscale_fp16_gradients_in_fp32_they_may():
    for optimizer_of in (lambda p: torch.optim.Adagrad(p, fused=True), lambda p: mezzo.optim.SGD(p, lr=0.1)):
        model = network().half()
        if not getattr(optimizer_of(model.parameters()), "_step_supports_amp_scaling", False):
            continue  # torch's before 2.12 takes no scale
        optimizer, scaler = optimizer_of(model.parameters()), GradScaler("cpu", init_scale=8.0)
        before = weights(model)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(batch(0).half()).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not scaler.last_step.skipped
        assert not torch.equal(model[0].weight, before[0])


def test_the_last_step_says_whether_it_skipped_so_that_schedulers_can_wait():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert scaler.last_step is None
    rates = []
    for number in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, number, number in (0, 2))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not scaler.last_step.skipped:
            assert scaler.last_step.grad_norm.isfinite()
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.1, 0.05, 0.05, 0.025]


def test_gradients_are_unscaled_by_the_scale_that_they_were_made_with():
    """torch takes the scale of now, which update() has doubled meanwhile."""
    found = {}
    for name, scaler_of in SCALERS.items():
        (first, one), (second, two) = one_weight(), one_weight()
        scaler = scaler_of("cpu", init_scale=8.0, growth_interval=1)
        scaler.scale(first.sum() + second.sum()).backward()
        scaler.step(one)
        scaler.update()
        scaler.step(two)
        found[name] = second.item()
    assert found == {"torch": 0.5, "mezzo": 0.0}


def test_no_wait_for_the_device_with_kernels_that_skip_by_themselves():
    """Nothing asks a tensor for its value: as counted on torch's dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
            return function(*args, **(kwargs or {}))

    counts = {}
    kinds = {
        "fused": OPTIMIZERS["adamw fused"],
        "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
        "foreach": OPTIMIZERS["adamw foreach"],
    }
    for name, make in kinds.items():
        model = network()
        optimizer, scaler = make(model.parameters()), GradScaler("cpu")
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            with Reads() as reads:
                if number == 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        counts[name] = reads.count
    assert counts == {"fused": 0, "mezzo": 0, "foreach": counts["foreach"]}
    assert counts["foreach"] >= 3  # whether to call its step


# What is refused ----------------------------------------------------------------------------------------------


def ready():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    return model, optimizer, scaler


def twice_stepped(model, optimizer, scaler):
    scaler.step(optimizer)
    scaler.step(optimizer)


def twice_unscaled(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscaled_late(model, optimizer, scaler):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def never_scaled(call):
    def use(model, optimizer, scaler):
        getattr(GradScaler("cpu"), call)(*([] if call == "update" else [optimizer]))

    return use


def without_gradient(model, optimizer, scaler):
    optimizer.zero_grad()
    scaler.step(optimizer)


def unscaled_without_gradient(model, optimizer, scaler):
    optimizer.zero_grad()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


class Asks(torch.optim.SGD):
    """An optimizer of the older contract, which is handed the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        raise AssertionError


def held(model, optimizer, scaler):
    model.zero_grad()
    MixedPrecision(model, optimizer, "O1,emulate=true")
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    "use, error, says",
    [
        (twice_stepped, StateError, "step() was called already since the last update()\n  where  SGD"),
        (twice_unscaled, StateError, "unscale_() was called already since the last update()"),
        (unscaled_late, StateError, "unscale_() after step()"),
        (never_scaled("step"), StateError, "step() before scale()"),
        (never_scaled("unscale_"), StateError, "unscale_() before scale()"),
        (never_scaled("update"), StateError, "update() before scale()"),
        (lambda m, o, s: s.update(), StateError, "update() has nothing to go by"),
        (without_gradient, StateError, "no parameter of the optimizer has a gradient that was scaled\n  where  SGD"),
        (unscaled_without_gradient, StateError, "no parameter of the optimizer has a gradient that was scaled"),
        (lambda m, o, s: s.step(m), PolicyError, "an optimizer must be a torch.optim.Optimizer, not Sequential"),
        (lambda m, o, s: s.unscale_(m), PolicyError, "an optimizer must be a torch.optim.Optimizer, not Sequential"),
        (
            lambda m, o, s: s.step([o]),
            PolicyError,
            "not list\n  write  scaler.step(optimizer), for one after the other",
        ),
        (lambda m, o, s: s.step(Asks(m.parameters(), lr=1.0)), UnsupportedError, "whose step takes the scaler itself"),
        (lambda m, o, s: s.step(o, 3), PolicyError, "step() takes a closure after the optimizer, not int"),
        (lambda m, o, s: s.scale("loss"), PolicyError, "scale() takes tensors, not str"),
        (lambda m, o, s: s.scale([3.0]), PolicyError, "scale() takes tensors, not float"),
        (lambda m, o, s: s.update("2"), PolicyError, "new_scale is a str"),
        (lambda m, o, s: s.update(torch.ones(2)), PolicyError, "new_scale is a tensor of shape (2,)"),
        (lambda m, o, s: s.update(0.0), PolicyError, "0"),
        (lambda m, o, s: s.update(-1.0), PolicyError, "-1"),
        (lambda m, o, s: s.set_growth_factor(0.5), PolicyError, "growth_factor is 0.5"),
        (lambda m, o, s: s.set_backoff_factor(2.0), PolicyError, "backoff_factor is 2.0"),
        (lambda m, o, s: s.set_growth_interval(0), PolicyError, "growth_interval is 0"),
        (lambda m, o, s: s.load_state_dict({}), StateError, "  where  it is empty, as a disabled GradScaler's is"),
        (lambda m, o, s: s.load_state_dict({"scale": 1.0}), StateError, "it lacks growth_factor, backoff_factor"),
        (lambda m, o, s: s.load_state_dict([1]), StateError, "this is not the state of a GradScaler"),
        (lambda m, o, s: s.load_state_dict(s.state_dict() | {"scale": "x"}), StateError, "scale"),
        (
            lambda m, o, s: s.load_state_dict(s.state_dict() | {"growth_factor": 0.1}),
            PolicyError,
            "growth_factor is 0.1",
        ),
        (lambda m, o, s: s.unscale_(o) or s.__getstate__(), StateError, "copied in the middle of an iteration"),
        (
            lambda m, o, s: GradScaler("cpu", growth_factor=1.0),
            PolicyError,
            "growth_factor is 1.0\n  where  GradScaler",
        ),
        (lambda m, o, s: GradScaler("cpu", backoff_factor=1.5), PolicyError, "backoff_factor is 1.5"),
        (lambda m, o, s: GradScaler("cpu", init_scale=0.0), PolicyError, "init_scale is 0.0"),
        (lambda m, o, s: GradScaler(2.0**8), PolicyError, 'write  GradScaler("cuda", init_scale=…)'),
        (lambda m, o, s: GradScaler("gpu"), PolicyError, "the device is 'gpu'"),
        (held, StateError, "the optimizer belongs to a session or to MasterWeights already"),
    ],
)
def test_what_is_refused_leaves_a_scaler_that_goes_on(use, error, says):
    model, optimizer, scaler = ready()
    with pytest.raises(error) as raised:
        use(model, optimizer, scaler)
    assert says in str(raised.value)
    assert "amp." not in str(raised.value)
    if use is held:
        return
    before = scaler.state_dict()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    if use not in (twice_stepped, unscaled_late):
        if use not in (twice_unscaled, unscaled_without_gradient):
            scaler.step(optimizer) if "copied" in says else scaler.unscale_(optimizer)
        if "copied" not in says:
            scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == before | {"_growth_tracker": before["_growth_tracker"] + 1}
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 2)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped


def test_a_session_takes_over_an_optimizer_that_a_scaler_had_and_another_scaler_too():
    model, optimizer, scaler = ready()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    other = GradScaler("cpu", init_scale=16.0)
    for each in (other, scaler, other):
        each.scale(loss_of(model, 1)).backward()
        each.step(optimizer)
        each.update()
        optimizer.zero_grad()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    amp.backward(loss_of(model, 2))
    assert not amp.step().skipped
    amp.zero_grad()
    amp.close()
    assert not optimizer._optimizer_step_pre_hooks
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped


def test_an_optimizer_that_raises_leaves_a_scaler_that_goes_on():
    class Raises(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise KeyError("of its own")
            super().step(closure)

    model, scaler = network(), GradScaler("cpu")
    optimizer = Raises(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(KeyError, match="of its own"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    optimizer.fails = False
    before = weights(model)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model[0].weight, before[0])


def test_an_interval_that_is_shorter_than_the_count_is_over():
    """torch compares for equality, and the scale would not grow again before the next overflow."""
    found = {}
    for name, scaler_of in SCALERS.items():
        weight, optimizer = one_weight()
        scaler = scaler_of("cpu", init_scale=8.0, growth_interval=10)
        for number in range(5):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == 2:
                scaler.set_growth_interval(2)
        found[name] = scaler.get_scale()
    assert found == {"torch": 8.0, "mezzo": 16.0}


class Interrupted(torch.optim.SGD):
    """An optimizer in whose step Ctrl-C comes once, after its first weight."""

    interrupts = False

    def step(self, closure=None):
        if self.interrupts:
            self.interrupts = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt
        super().step(closure)


@pytest.mark.parametrize("updates", [False, True])
def test_a_step_that_was_interrupted_half_way_is_known_until_a_checkpoint_is_loaded(updates):
    model, scaler = network(), GradScaler("cpu")
    optimizer = Interrupted(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    saved = [each.state_dict() for each in (model, optimizer, scaler)]
    optimizer.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    if updates:
        scaler.update()
    with pytest.raises(StateError) as raised:
        scaler.step(optimizer)
    assert "an update was interrupted half-way\n  where  Interrupted.step()" in str(raised.value)
    for each, state in zip((model, optimizer, scaler), saved, strict=True):
        each.load_state_dict(state)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped


def invalidated(scaler_of, value):
    """torch's test: gradients that become infinite after they were unscaled are not looked at again."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.mul_(value)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(weight.isfinite().all() for weight in weights(model))


def test_gradients_that_an_edit_makes_infinite_are_not_written():
    assert invalidated(SCALERS["torch"], torch.inf) == (65536.0, False)
    assert invalidated(GradScaler, torch.inf) == (65536.0, True)
    assert invalidated(GradScaler, 2.0) == invalidated(SCALERS["torch"], 2.0) == (65536.0, True)


def test_for_cuda_on_a_machine_without_the_scaler_is_disabled_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scaler = GradScaler()
    assert not scaler.is_enabled()
    assert "GradScaler is disabled: CUDA is not available" in caplog.text
