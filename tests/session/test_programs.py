"""A loss scale must leave no trace: programs of strangers under ``O0,loss_scale=1024`` are plain torch's bit for bit.

A power of two changes no bit of FP32, nor of BF16, so whatever differs is a gradient that was seen scaled, or unscaled
twice. A program is a function of a driver, small and deterministic, and plain PyTorch but for the calls that styles
differ in: it hands its models and optimizers to ``driver.begin``, and keeps what it looks at with ``driver.see``.
``not_for`` names the styles in which users cannot write it so.
"""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn, optim
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo

# Programs -------------------------------------------------------------------------------------------------------------

PROGRAMS = {}


def program(function=None, *, not_for=()):
    """Enter a program in the table."""
    if function is None:
        return functools.partial(program, not_for=not_for)
    PROGRAMS[function.__name__] = function
    function.not_for = not_for
    return function


def mlp(*widths, act=nn.Tanh):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def batches(count=3):
    for _ in range(count):
        yield torch.randn(8, 6), torch.randint(0, 3, (8,))


def fit(driver, models, optimizer, losses, edit=None, begins=True):
    """The usual loop over losses, each of which is computed once the step before was taken."""
    if begins:
        driver.begin(models, optimizer)
    for loss in losses:
        optimizer.zero_grad()
        driver.backward(loss)
        if edit is not None:
            driver.unscale_(optimizer)
            edit()
        driver.step(optimizer)


@program(not_for=("five lines",))  # which refuse the last step's gradients
def gan_whose_generator_adds_to_gradients_that_the_critic_has_used(driver):
    """And whose critic's weights are clipped, as Wasserstein's were."""
    generator, critic = mlp(4, 12, 6), mlp(6, 12, 1)
    for_generator, for_critic = (optim.Adam(net.parameters(), lr=1e-2) for net in (generator, critic))
    driver.begin([generator, critic], for_generator, for_critic)
    for real, _ in batches():
        fake = generator(torch.randn(8, 4))
        for_critic.zero_grad()
        driver.backward(critic(fake.detach()).mean() - critic(real).mean())
        driver.step(for_critic)
        for param in critic.parameters():
            param.data.clamp_(-0.05, 0.05)
        for_generator.zero_grad()
        driver.backward(-critic(fake).mean())
        driver.step(for_generator)


@program
def recurrent_language_model_with_clipping(driver):
    embed, lstm, head = nn.Embedding(12, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 12)
    model, words = nn.ModuleList([embed, lstm, head]), torch.randint(0, 12, (4, 19))

    def losses():
        hidden = None
        for start in range(0, 18, 6):
            x, y = words[:, start : start + 6], words[:, start + 1 : start + 7]
            out, hidden = lstm(embed(x), hidden and tuple(h.detach() for h in hidden))
            yield cross_entropy(head(out).flatten(0, 1), y.flatten())

    def clip():
        driver.see(nn.utils.clip_grad_norm_(model.parameters(), 0.25))

    fit(driver, model, optim.SGD(model.parameters(), lr=1.0), losses(), clip)


def classified(model, count=3):
    return (cross_entropy(model(x), y) for x, y in batches(count))


def clipped_adaptively(driver, param):
    bound = 0.01 * param.detach().norm().clamp(min=1e-3)
    param.grad.detach().mul_((bound / param.grad.detach().norm().clamp(min=1e-6)).clamp(max=1.0))


def biases_dropped_and_norms_logged(driver, param):
    driver.see(param.grad.norm())
    param.grad = None if param.dim() < 2 else param.grad


for edit in (clipped_adaptively, biases_dropped_and_norms_logged):

    def edited(driver, edit=edit):
        model = mlp(6, 16, 3)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fit(driver, model, optimizer, classified(model), lambda: [edit(driver, p) for p in model.parameters()])

    edited.__name__ = f"gradients_{edit.__name__}"
    program(edited)


@program
def elastic_weights_with_a_fisher_matrix(driver):
    model = mlp(6, 16, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    driver.begin(model, optimizer)
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for loss in classified(model):
        model.zero_grad()
        driver.backward(loss)
        driver.unscale_(optimizer)
        for total, param in zip(fisher, model.parameters(), strict=True):
            total += param.grad.data**2 / 3
        driver.forget(optimizer)
    driver.see(*fisher)
    anchor = copy.deepcopy(list(model.parameters()))
    pairs = list(zip(fisher, model.parameters(), anchor, strict=True))
    losses = (loss + 5 * sum((f * (p - a.detach()).square()).sum() for f, p, a in pairs) for loss in classified(model))
    fit(driver, model, optimizer, losses, begins=False)


@program
def adversarial_examples_from_gradients_of_inputs(driver):
    model = mlp(6, 16, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    driver.begin(model, optimizer)
    for x, y in batches():
        x.requires_grad_()
        driver.backward(cross_entropy(model(x), y))
        slope = x.grad
        driver.see(slope)
        driver.forget(optimizer)
        worse = (x + 0.5 * slope / slope.norm(dim=1, keepdim=True)).detach()
        driver.backward(cross_entropy(model(worse), y))
        driver.step(optimizer)
        optimizer.zero_grad()


@program(not_for=("five lines",))  # which check and unscale what a backward pass has made
def gradient_surgery_that_assigns_what_it_has_projected(driver):
    model, heads = mlp(6, 16, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    shared = list(model.parameters())
    optimizer = optim.SGD([*shared, *heads.parameters()], lr=0.1)
    driver.begin([model, heads], optimizer)
    for x, y in batches():
        hidden = model(x)
        losses = [cross_entropy(head(hidden), (y + n) % 3) for n, head in enumerate(heads)]
        tasks = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        dot = sum((a * b).sum() for a, b in zip(*tasks, strict=True))
        square = sum(b.square().sum() for b in tasks[1])
        for param, a, b in zip(shared, *tasks, strict=True):
            param.grad = a - torch.clamp(dot, max=0.0) / square * b + b
        driver.step(optimizer)


@program
def style_transfer_that_trains_an_image(driver):
    net, image = mlp(6, 16, 3).requires_grad_(False), nn.ParameterList([torch.randn(4, 6)])

    def losses():
        for _ in range(3):
            yield net(image[0]).square().mean() + 0.1 * (image[0][:, 1:] - image[0][:, :-1]).abs().mean()
            image[0].data.clamp_(-1, 1)

    fit(driver, [net, image], optim.Adam(image, lr=0.05), losses())


@program
def second_order_meta_learning(driver):
    model = mlp(6, 12, 3)

    def losses():
        for _ in range(3):
            outer = 0.0
            for (x, y), (u, v) in zip(batches(2), batches(2), strict=True):
                fast = dict(model.named_parameters())
                inner = cross_entropy(functional_call(model, fast, (x,)), y)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
                outer = outer + cross_entropy(functional_call(model, fast, (u,)), v)
            yield outer

    fit(driver, model, optim.Adam(model.parameters(), lr=1e-2), losses())


@program
def averages_of_weights(driver):
    """Two of torch's, one of state dicts, and Lookahead's slow weights, which are written back."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    driver.begin(model, optimizer)
    means = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    slow = [p.detach().clone() for p in model.parameters()]
    for number, loss in enumerate(classified(model, 4)):
        fit(driver, model, optimizer, [loss], begins=False)
        for mean in means:
            mean.update_parameters(model)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                shadow[name].mul_(0.99).add_(value, alpha=0.01)
        if number == 1:
            for before, param in zip(slow, model.parameters(), strict=True):
                before += 0.5 * (param.data - before)
                param.data.copy_(before)
    driver.see(*means[0].parameters(), *means[1].parameters(), *shadow.values())


# Styles ---------------------------------------------------------------------------------------------------------------

POLICY = "O0,loss_scale=1024"


class Plain:
    """torch's own calls; what a program has trained, and what it has looked at."""

    def __init__(self, policy=POLICY):
        self.policy, self.models, self.seen = policy, [], []

    def begin(self, models, *optimizers):
        self.end()
        self.models += models if isinstance(models, list) else [models]

    def end(self):
        """Leave nothing bound."""

    def see(self, *tensors):
        self.seen += [tensor.detach().clone() for tensor in tensors]

    def backward(self, loss, **options):
        loss.backward(**options)

    def unscale_(self, optimizer):
        """Make gradients true where they are not yet."""

    def forget(self, optimizer):
        """Clear gradients with which no step is taken."""
        optimizer.zero_grad()

    def step(self, optimizer):
        optimizer.step()

    def trained(self):
        return [value.clone() for model in self.models for value in model.state_dict().values()] + self.seen


class Attached(Plain):
    amp = None

    def begin(self, models, *optimizers):
        super().begin(models, *optimizers)
        self.amp = mezzo.attach(models, list(optimizers), self.policy)

    def end(self):
        if self.amp is not None:
            self.amp.detach()


class FiveLines(Attached):
    def begin(self, models, *optimizers):
        Plain.begin(self, models, *optimizers)
        self.amp = mezzo.MixedPrecision(models, list(optimizers), self.policy)

    def end(self):
        if self.amp is not None:
            self.amp.close()

    def backward(self, loss, **options):
        self.amp.backward(loss, **options)

    def unscale_(self, optimizer):
        self.amp.unscale_(optimizer)

    def forget(self, optimizer):
        self.amp.zero_grad()

    def step(self, optimizer):
        assert not self.amp.step(optimizer).skipped


DRIVERS = {"attach": Attached, "five lines": FiveLines}
LOW = ("O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true")


def ran(name, driver):
    """What a program comes to; whatever it has bound is put back."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            PROGRAMS[name](driver)
            return driver.trained()
        finally:
            driver.end()


def assert_same(actual, expected):
    assert len(actual) == len(expected) > 0
    for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {number}: {(mine - theirs).abs().max():g}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scale_leaves_no_trace(name):
    """Nor does it in bfloat16."""
    expected = ran(name, Plain())
    for style, policy in zip(DRIVERS, LOW, strict=True):
        if style in PROGRAMS[name].not_for:
            continue
        assert_same(ran(name, DRIVERS[style]()), expected)
        one, other = (ran(name, DRIVERS[style](policy + scale)) for scale in ("", ",loss_scale=1024"))
        assert_same(one, other)
