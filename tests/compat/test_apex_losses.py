"""Several models, optimizers and losses in apex's form, with overflows in one of them, against loops in float64.

The losses share one scale. apex's own ``test_multiple_models_optimizers_losses`` and ``test_add_param_group``, and what
they leave out.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat.apex import amp

from .apex import INF, initialized, perceptron, points, scales, values

pytestmark = [
    pytest.mark.usefixtures("emulating"),
    pytest.mark.filterwarnings("ignore:all losses share one loss scale"),
]

OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5)),
    "fused": (lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3, fused=True),
              lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3)),
    "mezzo": (lambda p: mezzo.optim.SGD(p, lr=0.2, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5)),
}  # fmt: skip
STEPS = 4
#: How far FP16 may be from float64 after these steps, in weights of about 0.3: a few units of its last place.
FAR = {"O0": 2e-6, "O1": 3e-3, "O2": 3e-3}


def loss_of(model, number):
    x, y = points(number)
    first = next(model.parameters())
    x = x.double() if first.dtype == torch.float64 else x
    return functional.cross_entropy(model(x), y)


def reference(model, make, plan, clip):
    """Train in float64, as a list of steps says: each a list of micro-batches, or None for one that is skipped."""
    model = copy.deepcopy(model).double()
    optimizer = make(model.parameters())
    for step in plan:
        optimizer.zero_grad()
        for number in step or ():
            loss_of(model, number).backward()
        if step is None:
            continue
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return values(model.parameters())


def cases():
    every = itertools.product(FAR, OPTIMIZERS, (1, 2), (1, 2), (None, 0, 1), (False, True), (False, True))
    return [case for case in every if not (case[0] == "O0" and case[4] is not None)]


def pairwise():
    """A part of all cases in which each pair of options meets; the product itself is slow."""
    return [case for place, case in enumerate(cases()) if place % 11 in (0, 4)]


def run(level, name, losses, micro_batches, bad, delay, clip):
    make, plain = OPTIMIZERS[name]
    start = perceptron()
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    plan = []
    with initialized(model, optimizer, opt_level=level, num_losses=losses):
        for step in range(STEPS):
            optimizer.zero_grad()
            numbers = [100 * step + number for number in range(micro_batches * losses)]
            skips = bad is not None and step == 1
            for place, number in enumerate(numbers):
                loss_id = place % losses
                is_last = place == len(numbers) - 1
                delays = delay and losses == 1 and not is_last
                with amp.scale_loss(loss_of(model, number), optimizer, loss_id=loss_id, delay_unscale=delays) as scaled:
                    scaled.backward()
                    if skips and place == min(bad, len(numbers) - 1):
                        next(iter(model.parameters())).grad.view(-1)[3] = INF
            plan.append(None if skips else numbers)
            if clip:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            optimizer.step()
        expected = [1.0 if level == "O0" else 2.0**16 if bad is None else 2.0**15]
        found, scale = values(amp.master_params(optimizer)), scales()
        if name == "mezzo":
            found = values(model.state_dict().values())
    assert scale == expected
    for mine, right in zip(found, reference(start, plain, plan, clip), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=FAR[level])


def test_losses_micro_batches_and_overflows_against_float64():
    for case in pairwise():
        try:
            run(*case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
def test_losses_micro_batches_and_overflows_against_float64_in_every_combination():
    for case in cases():
        try:
            run(*case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def joint(one, other, number):
    x, y = points(number)
    return functional.cross_entropy(one(x).float() + other(x).float(), y)


def two_of_each(level, bad_loss):
    """apex's own case: the first loss trains one model, the second both; what a bad loss has reached is skipped."""
    models = [perceptron(0), perceptron(1)]
    twins = [copy.deepcopy(model).double() for model in models]
    make = OPTIMIZERS["SGD"][0]
    optimizers, plain = ([make(each.parameters()) for each in group] for group in (models, twins))
    with initialized(models, optimizers, opt_level=level):
        for step in range(3):
            for optimizer in (*optimizers, *plain):
                optimizer.zero_grad()
            for number in (0, 1):
                named = optimizers[:1] if number == 0 else optimizers
                loss = loss_of(models[0], step) if number == 0 else joint(*models, 10 + step)
                with amp.scale_loss(loss, named) as scaled:
                    (scaled * INF if step == 1 and number == bad_loss else scaled).backward()
            for optimizer in optimizers:
                optimizer.step()
            x, y = points(10 + step)
            loss_of(twins[0], step).backward()
            functional.cross_entropy(twins[0](x.double()) + twins[1](x.double()), y).backward()
            if not (step == 1 and bad_loss is not None):
                plain[0].step()
            if not (step == 1 and bad_loss == 1):
                plain[1].step()
        assert scales() == [2.0**16 if bad_loss is None else 2.0**15], (level, bad_loss)
        for optimizer, twin in zip(optimizers, twins, strict=True):
            for mine, right in zip(amp.master_params(optimizer), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=0, atol=FAR[level])


def test_two_models_two_optimizers_and_two_losses():
    for level in ("O1", "O2"):
        for bad_loss in (None, 0, 1):
            two_of_each(level, bad_loss)


def test_a_gan_in_the_form_of_apexs_example():
    """Three losses over two models; the generator's loss reaches the discriminator, which clears what it left there."""
    generator, critic = nn.Linear(4, 8), perceptron()
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (critic, generator))
    with initialized([critic, generator], [first, second], opt_level="O1", num_losses=3) as (models, optimizers):
        (critic, generator), (first, second) = models, optimizers
        for number in range(3):
            real, labels = points(number)
            fake = generator(torch.randn(16, 4))
            critic.zero_grad()
            with amp.scale_loss(functional.cross_entropy(critic(real), labels), first, loss_id=0) as scaled:
                scaled.backward()
            with amp.scale_loss(critic(fake.detach()).float().mean(), first, loss_id=1) as scaled:
                scaled.backward()
            first.step()
            before = values(generator.parameters())
            generator.zero_grad()
            with amp.scale_loss(-critic(fake).float().mean(), second, loss_id=2) as scaled:
                scaled.backward()
            second.step()
            assert all(param.grad.abs().max() < 100 for param in critic.parameters())  # none carries a scale
            assert not any(map(torch.equal, before, generator.parameters()))
        assert scales() == [2.0**16]


@pytest.mark.filterwarnings("ignore:(?s).*is not finite")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_loss_that_is_not_finite_skips_the_models_that_it_reaches(level, together):
    """As by torch.amp's ``GradScaler``, which looks at each optimizer's own gradients."""
    models = [perceptron(), perceptron()]
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with initialized(models, made, opt_level=level, loss_scale="dynamic") as (models, made):
        before = [values(model.parameters()) for model in models]
        losses = [loss_of(models[0], 0) + INF, loss_of(models[1], 1)]
        with amp.scale_loss(losses[0], made[0]) as first, amp.scale_loss(losses[1], made[1]) as second:
            for scaled in (first + second,) if together else (second, first):
                scaled.backward()
        for optimizer in made:
            optimizer.step()
        assert all(map(torch.equal, before[0], models[0].parameters()))
        assert not any(map(torch.equal, before[1], models[1].parameters()))


def test_gradients_are_unscaled_fp32_after_the_block():
    for level in ("O1", "O2"):
        model, twin = perceptron(), perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(twin, 0).backward()
        with initialized(model, optimizer, opt_level=level):
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
                scaled.backward()
            for param, master, right in zip(
                model.parameters(), amp.master_params(optimizer), twin.parameters(), strict=True
            ):
                assert param.grad.dtype == master.dtype == master.grad.dtype == torch.float32
                assert param.grad is master.grad
                torch.testing.assert_close(master.grad, right.grad, rtol=0, atol=1e-3)


def test_gradients_made_before_without_a_scale_are_added_to():
    for level in ("O1", "O2"):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with initialized(model, optimizer, opt_level=level, loss_scale=128.0):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            with amp.scale_loss(sum(p.float().sum() for p in model.parameters()), optimizer) as scaled:
                scaled.backward()
            assert all((master.grad == 2).all() for master in amp.master_params(optimizer))


def test_leaves_that_no_optimizer_has_get_unscaled_gradients():
    """An input's for an attack, a frozen-out head's for a report: a scale that stays in these is seen by nobody."""
    for level in ("O0", "O1", "O2"):
        model, twin, stray = perceptron(), perceptron(), nn.Parameter(torch.ones(3))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        (twin(inputs[0]) * 2).square().mean().backward()
        with initialized(model, optimizer, opt_level=level, loss_scale=1024.0):
            with amp.scale_loss((model(inputs[1]) * (stray + 1)).square().mean(), optimizer) as scaled:
                scaled.backward()
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=3e-3)
            assert stray.grad.abs().max() < 10
            optimizer.step()


def test_clearing_in_each_of_torchs_ways_begins_anew():
    ways = {
        "optimizer": lambda model, optimizer: optimizer.zero_grad(),
        "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "model": lambda model, optimizer: model.zero_grad(),
        "model to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    }
    for level in ("O1", "O2"):
        for name, clear in ways.items():
            for steps in (False, True):
                model = perceptron()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                with initialized(model, optimizer, opt_level=level, loss_scale=128.0):
                    for _ in range(3):
                        clear(model, optimizer)
                        with amp.scale_loss(sum(p.float().sum() for p in model.parameters()), optimizer) as scaled:
                            scaled.backward()
                        for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
                            assert (param.grad == 1).all(), (level, name, steps)
                            assert (master.grad == 1).all(), (level, name, steps)
                        if steps:
                            optimizer.step()


def test_parameters_that_are_added_later():
    for level in ("O0", "O1", "O2"):
        model = nn.ModuleList([perceptron(0), perceptron(1)])
        twin = copy.deepcopy(model).double()
        optimizer, plain = (torch.optim.SGD(each[0].parameters(), lr=0.2, momentum=0.5) for each in (model, twin))
        with initialized(model, optimizer, opt_level=level):
            for step in range(3):
                if step == 1:
                    for each, pair in ((optimizer, model), (plain, twin)):
                        each.add_param_group({"params": list(pair[1].parameters()), "lr": 0.1})
                optimizer.zero_grad()
                plain.zero_grad()
                loss = loss_of(model[0], step) + loss_of(model[1], step)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                if step == 0:  # nothing takes these yet
                    model[1].zero_grad()
                (loss_of(twin[0], step) + (loss_of(twin[1], step) if step else 0)).backward()
                optimizer.step()
                plain.step()
            for mine, right in zip(amp.master_params(optimizer), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=0, atol=FAR[level] + 1e-3)


def test_closures():
    for level in ("O0", "O1"):
        model, twin = perceptron(), perceptron().double()
        optimizer, plain = (torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=3) for each in (model, twin))
        with initialized(model, optimizer, opt_level=level):

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                return loss

            def exact(model=twin, optimizer=plain):
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                loss.backward()
                return loss

            torch.testing.assert_close(optimizer.step(closure).double(), plain.step(exact), rtol=1e-3, atol=1e-3)
        for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-5 if level == "O0" else 2e-2)


def test_an_optimizers_own_products_are_not_cast():
    class Spectral(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                if param.ndim == 2:
                    product = param.grad @ param.grad.T
                    assert product.dtype == torch.float32
                    param.sub_(product @ param.grad)

    model = perceptron()
    optimizer = Spectral(model.parameters())
    with initialized(model, optimizer, opt_level="O1"):
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


class Fails(torch.autograd.Function):
    """A layer whose first backward pass raises."""

    calls = 0

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        Fails.calls += 1
        if Fails.calls == 1:
            raise RuntimeError("of the user's")
        return gradient


@pytest.mark.parametrize("cleared", [False, True])
def test_a_pass_that_fails_is_over_and_leaves_plain_gradients(cleared):
    model, twin = perceptron(), perceptron()
    made, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))

    def train(model, optimizer, backward):
        Fails.calls = 0
        for number in range(3):
            with contextlib.suppress(RuntimeError):
                backward(functional.cross_entropy(model[2](Fails.apply(model[1](model[0](points(number)[0])))),
                                                  points(number)[1]))  # fmt: skip
            if cleared:
                optimizer.zero_grad()
            backward(loss_of(model, number))
            optimizer.step()
            optimizer.zero_grad()

    def scaled(loss):
        with amp.scale_loss(loss, made) as times_scale:
            times_scale.backward()

    with initialized(model, made, opt_level="O0", loss_scale=1024.0):
        train(model, made, scaled)
        mine = values(model.parameters())
    train(twin, plain, torch.Tensor.backward)
    torch.testing.assert_close(mine, values(twin.parameters()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_that_would_be_differentiated_again_are_refused():
    model, twin = perceptron(), perceptron()
    made, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    with initialized(model, made, opt_level="O0", loss_scale=1024.0):
        with (
            amp.scale_loss(loss_of(model, 0), made) as scaled,
            pytest.raises(mezzo.StateError, match="would be differentiated again"),
        ):
            scaled.backward(create_graph=True)
        with amp.scale_loss(loss_of(model, 0), made) as scaled:
            scaled.backward()
        made.step()
    loss_of(twin, 0).backward()
    plain.step()
    torch.testing.assert_close(values(model.parameters()), values(twin.parameters()), rtol=0, atol=0)


def test_a_pass_that_is_told_to_end_inside_of_its_graph_is_refused():
    """What it leaves there would carry the scale: in ``.grad`` of a tensor that nobody knows of."""
    model = perceptron()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with initialized(model, made, opt_level="O0", loss_scale=1024.0):
        for others in ([], [model[2].weight]):
            inner = model[0](points(0)[0])
            with (
                amp.scale_loss(model[1:](inner).square().mean(), made) as scaled,
                pytest.raises(mezzo.StateError, match="begins, or stops, inside of its graph"),
            ):
                scaled.backward(inputs=[inner, *others])
            assert inner.grad is None
        x = points(0)[0].requires_grad_()
        with amp.scale_loss(model(x).square().mean(), made) as scaled:
            scaled.backward(inputs=[x, model[0].weight], retain_graph=True)
        (right,) = torch.autograd.grad(model(x).square().mean(), x)
        torch.testing.assert_close(x.grad, right)
        assert [param.grad is None for param in model.parameters()] == [False, True, True, True]


def test_a_loss_without_a_graph_has_none_when_it_is_scaled():
    model = perceptron()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        initialized(model, made, opt_level="O0", loss_scale=1024.0),
        amp.scale_loss(loss_of(model, 0).detach(), made) as scaled,
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        scaled.backward()
