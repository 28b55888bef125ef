"""Training programs as people write them, without a line of mezzo: each is told by a driver how a loss and a step go.

A program is a function of a driver, small and deterministic. It hands its models and optimizers to ``driver.begin``;
``backward``, ``unscale_``, ``step`` and ``update`` are the calls that styles differ in; all else is plain PyTorch. What
it looks at on the way it keeps with ``driver.see``. ``not_for`` names the styles in which users cannot write it so.
"""

import copy
import functools
import itertools
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}
#: Styles in which gradients carry a scale until they are unscaled by a call.
SCALED_UNTIL_ASKED = ("five lines", "GradScaler", "SessionScaler")


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


def batches(count=4, rows=8, width=6, classes=3):
    for _ in range(count):
        yield torch.randn(rows, width), torch.randint(0, classes, (rows,))


# Supervised ----------------------------------------------------------------------------------------------------------


@program
def classifier(driver):
    model = mlp(6, 16, 3, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    driver.begin(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        driver.backward(loss)
        driver.step(optimizer)
        driver.update()
        driver.see(loss)


@program
def convolutions_with_batch_norm_and_a_step_schedule(driver):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    driver.begin(model, optimizer)
    for _ in range(5):
        driver.backward(functional.cross_entropy(model(torch.randn(8, 1, 6, 6)), torch.randint(0, 3, (8,))))
        driver.step(optimizer)
        driver.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
    driver.see(torch.tensor(scheduler.get_last_lr()))


@program
def one_cycle_with_decay_groups(driver):
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1, "lr": 1e-3}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=6)
    driver.begin(model, optimizer)
    for x, y in batches(6):
        driver.backward(functional.cross_entropy(model(x), y, label_smoothing=0.1))
        driver.step(optimizer)
        driver.update()
        scheduler.step()
        optimizer.zero_grad()


@program
def recurrent_language_model_with_clipping(driver):
    embed, lstm, head = nn.Embedding(12, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 12)
    model = nn.ModuleList([embed, lstm, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    driver.begin(model, optimizer)
    hidden, words = None, torch.randint(0, 12, (4, 25))
    for start in range(0, 24, 6):
        x, y = words[:, start : start + 6], words[:, start + 1 : start + 7]
        hidden = None if hidden is None else tuple(h.detach() for h in hidden)
        out, hidden = lstm(embed(x), hidden)
        optimizer.zero_grad()
        driver.backward(functional.cross_entropy(head(out).flatten(0, 1), y.flatten()))
        driver.unscale_(optimizer)
        driver.see(nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        driver.step(optimizer)
        driver.update()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


@program
def transformer_with_tied_weights_and_warmup(driver):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))
    driver.begin(model, optimizer)
    for _ in range(4):
        x = torch.randint(0, 12, (4, 7))
        driver.backward(functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
        driver.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        driver.step(optimizer)
        driver.update()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)


@program
def accumulation_with_a_short_last_window(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    driver.begin(model, optimizer)
    data = list(batches(7))
    for number, (x, y) in enumerate(data, 1):
        driver.backward(functional.cross_entropy(model(x), y) / 3)
        if number % 3 == 0 or number == len(data):
            driver.step(optimizer)
            driver.update()
            optimizer.zero_grad()


@program
def checkpointed_blocks(driver):
    for reentrant in (False, True):
        blocks = nn.ModuleList([mlp(6, 12, 6) for _ in range(2)])
        head = nn.Linear(6, 3)
        model = nn.ModuleList([blocks, head])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        driver.begin(model, optimizer)
        for x, y in batches(3):
            hidden = x.clone().requires_grad_()
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            optimizer.zero_grad()
            driver.backward(functional.cross_entropy(head(hidden), y))
            driver.step(optimizer)
            driver.update()


@program
def distillation_from_a_teacher(driver):
    teacher, student = mlp(6, 32, 3).eval(), mlp(6, 8, 3)
    optimizer = torch.optim.Adagrad(student.parameters(), lr=0.05)
    driver.begin(student, optimizer)
    for x, y in batches():
        with torch.no_grad():
            target = functional.softmax(teacher(x) / 2, -1)
        out = student(x)
        kl = functional.kl_div(functional.log_softmax(out / 2, -1), target, reduction="batchmean")
        optimizer.zero_grad()
        driver.backward(0.7 * kl * 4 + 0.3 * functional.cross_entropy(out, y))
        driver.step(optimizer)
        driver.update()


@program
def frozen_backbone_that_thaws_with_a_group_of_its_own(driver):
    backbone, head = mlp(6, 12, 12), nn.Linear(12, 3)
    model = nn.Sequential(backbone, head)
    backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    driver.begin(model, optimizer)
    for number, (x, y) in enumerate(batches(5)):
        if number == 2:
            backbone[-1].requires_grad_(True)
            optimizer.add_param_group({"params": backbone[-1].parameters(), "lr": 0.01})
        optimizer.zero_grad()
        driver.backward(functional.cross_entropy(model(x), y))
        driver.step(optimizer)
        driver.update()


@program
def sparse_embeddings(driver):
    table, head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)
    model = nn.ModuleList([table, head])
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.1)]
    driver.begin(model, *optimizers)
    for _ in range(4):
        words = torch.randint(0, 20, (6, 4))
        for optimizer in optimizers:
            optimizer.zero_grad()
        driver.backward(functional.cross_entropy(head(table(words).mean(1)), words[:, 0] % 3))
        for optimizer in optimizers:
            driver.step(optimizer)
        driver.update()


@program
def two_optimizers_of_one_network(driver):
    encoder, decoder = mlp(6, 8, 4), mlp(4, 8, 6)
    model = nn.Sequential(encoder, decoder)
    slow, fast = torch.optim.SGD(encoder.parameters(), lr=0.01), torch.optim.RMSprop(decoder.parameters(), lr=0.01)
    driver.begin(model, slow, fast)
    for number, (x, _) in enumerate(batches(6)):
        fast.zero_grad()
        driver.backward(functional.mse_loss(model(x), x))
        driver.step(fast)
        if number % 3 == 2:  # the encoder accumulates meanwhile
            driver.step(slow)
            slow.zero_grad()
        driver.update()


# Several losses and models -------------------------------------------------------------------------------------------


@program
def two_tasks_with_a_pass_each(driver):
    trunk, heads = mlp(6, 16, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 1)])
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    driver.begin(model, optimizer)
    for x, y in batches():
        hidden = trunk(x)
        first = functional.cross_entropy(heads[0](hidden), y)
        second = functional.mse_loss(heads[1](hidden).squeeze(1), x.sum(1))
        optimizer.zero_grad()
        driver.backward(first, retain_graph=True)
        driver.backward(0.1 * second)
        driver.step(optimizer)
        driver.update()


@program
def tasks_weighted_by_learnt_uncertainty(driver):
    net, weights = mlp(6, 16, 4), nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    optimizer = torch.optim.Adam([*net.parameters(), *weights], lr=1e-2)
    driver.begin([net, weights], optimizer)
    for x, y in batches():
        out = net(x)
        losses = functional.cross_entropy(out[:, :3], y), functional.mse_loss(out[:, 3], x.mean(1))
        optimizer.zero_grad()
        driver.backward(sum(torch.exp(-w) * loss + w for w, loss in zip(weights, losses, strict=True)))
        driver.step(optimizer)
        driver.update()


@program
def contrastive_towers(driver):
    towers = [mlp(6, 12, 4), mlp(5, 12, 4)]
    temperature = nn.ParameterList([nn.Parameter(torch.tensor(math.log(1 / 0.07)))])
    optimizer = torch.optim.AdamW([p for m in (*towers, temperature) for p in m.parameters()], lr=1e-2)
    driver.begin([*towers, temperature], optimizer)
    for _ in range(4):
        one, other = (functional.normalize(t(torch.randn(8, w)), dim=1) for t, w in zip(towers, (6, 5), strict=True))
        logits, target = temperature[0].exp() * one @ other.T, torch.arange(8)
        optimizer.zero_grad()
        driver.backward((functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2)
        driver.step(optimizer)
        driver.update()
        with torch.no_grad():
            temperature[0].clamp_(0, math.log(100))


@program
def variational_autoencoder(driver):
    encoder, decoder = mlp(6, 16, 8), mlp(4, 16, 6)
    optimizer = torch.optim.NAdam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    driver.begin([encoder, decoder], optimizer)
    for x, _ in batches():
        mean, log_variance = encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        optimizer.zero_grad()
        driver.backward(functional.mse_loss(decoder(code), x, reduction="sum") + kl)
        driver.step(optimizer)
        driver.update()


def adversaries(make, *, final=None):
    generator, critic = mlp(4, 12, 6), mlp(6, 12, 1)
    return generator, critic, make(generator.parameters()), make(critic.parameters())


@program
def gan(driver):
    generator, critic, for_generator, for_critic = adversaries(lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.5, 0.9)))
    driver.begin([generator, critic], for_generator, for_critic)
    bce = functional.binary_cross_entropy_with_logits
    for real, _ in batches():
        fake = generator(torch.randn(8, 4))
        critic.zero_grad()
        driver.backward(bce(critic(real), torch.ones(8, 1)))
        driver.backward(bce(critic(fake.detach()), torch.zeros(8, 1)))
        driver.step(for_critic)
        critic.zero_grad()
        generator.zero_grad()
        driver.backward(bce(critic(fake), torch.ones(8, 1)))
        driver.step(for_generator)
        driver.update()
        generator.zero_grad()
        critic.zero_grad()


@program(not_for=("five lines",))  # which refuse the last step's gradients
def gan_whose_generator_adds_to_gradients_that_the_critic_has_used(driver):
    generator, critic, for_generator, for_critic = adversaries(lambda p: torch.optim.Adam(p, lr=1e-2))
    driver.begin([generator, critic], for_generator, for_critic)
    bce = functional.binary_cross_entropy_with_logits
    for real, _ in batches():
        fake = generator(torch.randn(8, 4))
        for_critic.zero_grad()
        driver.backward(bce(critic(real), torch.ones(8, 1)) + bce(critic(fake.detach()), torch.zeros(8, 1)))
        driver.step(for_critic)
        for_generator.zero_grad()
        driver.backward(bce(critic(fake), torch.ones(8, 1)))
        driver.step(for_generator)
        driver.update()


@program
def gan_that_is_not_detached_but_toggled(driver):
    generator, critic, for_generator, for_critic = adversaries(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5))
    driver.begin([generator, critic], for_generator, for_critic)
    for real, _ in batches():
        for net, other, optimizer in ((critic, generator, for_critic), (generator, critic, for_generator)):
            net.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            fake = critic(generator(torch.randn(8, 4))).mean()
            driver.backward(fake - critic(real).mean() if net is critic else -fake)
            driver.step(optimizer)
            optimizer.zero_grad()
        driver.update()


@program
def wasserstein_gan_with_weight_clipping(driver):
    generator, critic, for_generator, for_critic = adversaries(lambda p: torch.optim.RMSprop(p, lr=5e-3))
    driver.begin([generator, critic], for_generator, for_critic)
    for number, (real, _) in enumerate(batches(6)):
        for_critic.zero_grad()
        driver.backward(critic(generator(torch.randn(8, 4)).detach()).mean() - critic(real).mean())
        driver.step(for_critic)
        for param in critic.parameters():
            param.data.clamp_(-0.05, 0.05)
        for_critic.zero_grad()
        if number % 2:
            for_generator.zero_grad()
            driver.backward(-critic(generator(torch.randn(8, 4))).mean())
            driver.step(for_generator)
            for_generator.zero_grad()
            for_critic.zero_grad()
        driver.update()


@program
def wasserstein_gan_with_a_gradient_penalty(driver):
    critic = mlp(6, 12, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    driver.begin(critic, optimizer)
    for real, _ in batches():
        fake = torch.randn(8, 6)
        mix = torch.lerp(real, fake, torch.rand(8, 1)).requires_grad_()
        out = critic(mix)
        (slope,) = torch.autograd.grad(out, mix, torch.ones_like(out), create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        optimizer.zero_grad()
        driver.backward(critic(fake).mean() - critic(real).mean() + 10 * penalty)
        driver.step(optimizer)
        driver.update()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


@program
def domain_adversary_with_reversed_gradients(driver):
    trunk, label, domain = mlp(6, 12, 12), nn.Linear(12, 3), nn.Linear(12, 2)
    model = nn.ModuleList([trunk, label, domain])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    driver.begin(model, optimizer)
    for x, y in batches():
        hidden = trunk(x)
        loss = functional.cross_entropy(label(hidden), y) + functional.cross_entropy(
            domain(Reversed.apply(hidden)), y % 2
        )
        optimizer.zero_grad()
        driver.backward(loss)
        driver.step(optimizer)
        driver.update()


# Gradients that the program reads or edits ---------------------------------------------------------------------------


def edited(edit, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
    """A classifier whose gradients are edited before the step, after ``unscale_`` where a style has it."""

    def run(driver):
        model = mlp(6, 16, 3)
        optimizer = make(model.parameters())
        driver.begin(model, optimizer)
        for x, y in batches():
            optimizer.zero_grad()
            driver.backward(functional.cross_entropy(model(x), y))
            driver.unscale_(optimizer)
            edit(driver, model)
            driver.step(optimizer)
            driver.update()

    return run


def values_clamped_by_hand(driver, model):
    for param in model.parameters():
        param.grad.data.clamp_(-0.01, 0.01)


def values_clipped(driver, model):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def noise_added(driver, model):
    for param in model.parameters():
        param.grad.add_(torch.randn_like(param.grad), alpha=0.01)


def clipped_adaptively(driver, model):
    for param in model.parameters():
        bound = 0.01 * param.detach().norm().clamp(min=1e-3)
        norm = param.grad.detach().norm().clamp(min=1e-6)
        param.grad.detach().mul_((bound / norm).clamp(max=1.0))


def centralized(driver, model):
    for param in model.parameters():
        if param.dim() > 1:
            param.grad.sub_(param.grad.mean(dim=1, keepdim=True))


def signs_assigned(driver, model):
    for param in model.parameters():
        param.grad = param.grad.sign() * 0.01


def one_dropped_and_norms_logged(driver, model):
    driver.see(torch.stack([param.grad.norm() for param in model.parameters()]))
    model[0].bias.grad = None


def clipped_by_a_loop_over_groups(driver, model):
    total = sum(float(param.grad.data.norm(2)) ** 2 for param in model.parameters()) ** 0.5
    driver.see(torch.tensor(total))
    for param in model.parameters():
        param.grad.data.mul_(min(1.0, 0.1 / (total + 1e-6)))


for edit in (values_clamped_by_hand, values_clipped, noise_added, clipped_adaptively, centralized, signs_assigned,
             one_dropped_and_norms_logged, clipped_by_a_loop_over_groups):  # fmt: skip
    run = edited(edit)
    run.__name__ = f"gradients_{edit.__name__}"
    program(run)


@program
def q_learning_with_a_target_network_and_clamped_gradients(driver):
    policy, target = mlp(4, 16, 2), mlp(4, 16, 2)
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-2)
    driver.begin(policy, optimizer)
    for number in range(6):
        state, after = torch.randn(8, 4), torch.randn(8, 4)
        action, reward = torch.randint(0, 2, (8, 1)), torch.randn(8)
        with torch.no_grad():
            expected = reward + 0.99 * target(after).max(1).values
        optimizer.zero_grad()
        driver.backward(functional.smooth_l1_loss(policy(state).gather(1, action).squeeze(1), expected))
        driver.unscale_(optimizer)
        for param in policy.parameters():
            param.grad.data.clamp_(-1e-2, 1e-2)
        driver.step(optimizer)
        driver.update()
        if number % 2:
            target.load_state_dict(policy.state_dict())


@program
def elastic_weights_with_a_fisher_matrix(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver.begin(model, optimizer)
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in batches(3):
        model.zero_grad()
        driver.backward(functional.cross_entropy(model(x), y))
        driver.unscale_(optimizer)
        for total, param in zip(fisher, model.parameters(), strict=True):
            total += param.grad.data**2 / 3
        driver.forget(optimizer)
    driver.see(*fisher)
    anchor = copy.deepcopy(list(model.parameters()))
    for x, y in batches(3):
        pull = sum(
            (f * (p - a.detach()).square()).sum() for f, p, a in zip(fisher, model.parameters(), anchor, strict=True)
        )
        optimizer.zero_grad()
        driver.backward(functional.cross_entropy(model(x), y) + 5 * pull)
        driver.step(optimizer)
        driver.update()


@program
def adversarial_examples_from_gradients_of_inputs(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver.begin(model, optimizer)
    for x, y in batches():
        x.requires_grad_()
        driver.backward(functional.cross_entropy(model(x), y))
        slope = driver.of_a_leaf(x)
        driver.see(slope)
        driver.forget(optimizer)
        worse = (x + 0.5 * slope / slope.norm(dim=1, keepdim=True)).detach()
        driver.backward(functional.cross_entropy(model(worse), y))
        driver.step(optimizer)
        driver.update()
        optimizer.zero_grad()


@program
def a_probe_that_is_in_no_optimizer(driver):
    """A scale and shift of the inputs are trained by hand beside the model."""
    model, shift = mlp(6, 16, 3), torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    driver.begin(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        shift.grad = None
        driver.backward(functional.cross_entropy(model(x + shift), y))
        with torch.no_grad():
            shift -= 0.1 * driver.of_a_leaf(shift)
        driver.step(optimizer)
        driver.update()
    driver.see(shift)


@program(not_for=SCALED_UNTIL_ASKED)  # these check and unscale what a backward pass has made
def gradient_surgery_that_assigns_what_it_has_projected(driver):
    model, heads = mlp(6, 16, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    shared = list(model.parameters())
    optimizer = torch.optim.SGD([*shared, *heads.parameters()], lr=0.1)
    driver.begin([model, heads], optimizer)
    for x, y in batches():
        hidden = model(x)
        tasks = [
            torch.autograd.grad(functional.cross_entropy(head(hidden), (y + n) % 3), shared, retain_graph=True)
            for n, head in enumerate(heads)
        ]
        dot = sum((a * b).sum() for a, b in zip(*tasks, strict=True))
        square = sum(b.square().sum() for b in tasks[1])
        for param, a, b in zip(shared, *tasks, strict=True):
            param.grad = a - torch.clamp(dot, max=0.0) / square * b + b
        driver.step(optimizer)
        driver.update()


@program(not_for=SCALED_UNTIL_ASKED)
def gradients_that_are_never_cleared(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    driver.begin(model, optimizer)
    for x, y in batches():
        driver.backward(functional.cross_entropy(model(x), y))
        driver.step(optimizer)


# Optimizers that ask again -------------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as davda54/sam has it."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        scale = self.param_groups[0]["rho"] / (self._grad_norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(grads), p=2)


@program(not_for=SCALED_UNTIL_ASKED)  # where ``base_optimizer.step()`` is behind the session's back
def sharpness_aware_by_two_calls(driver):
    model = mlp(6, 16, 3)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    driver.begin(model, optimizer)
    for x, y in batches():
        driver.backward(functional.cross_entropy(model(x), y))
        optimizer.first_step(zero_grad=True)
        driver.backward(functional.cross_entropy(model(x), y))
        optimizer.second_step(zero_grad=True)


@program(not_for=("GradScaler",))
def sharpness_aware_with_a_closure(driver):
    model = mlp(6, 16, 3)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    driver.begin(model, optimizer)
    for x, y in batches():

        def closure(x=x, y=y):
            loss = functional.cross_entropy(model(x), y)
            driver.backward(loss)
            return loss

        optimizer.zero_grad()
        closure()
        driver.step(optimizer, closure)
        driver.update()
        optimizer.zero_grad()


@program(not_for=("GradScaler",))  # torch's own cannot
def quasi_newton(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    driver.begin(model, optimizer)
    x, y = next(batches())
    for _ in range(2):

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            driver.backward(loss)
            return loss

        driver.step(optimizer, closure)
        driver.update()


@program
def style_transfer_that_trains_an_image(driver):
    net, image = mlp(6, 16, 3).requires_grad_(False), nn.ParameterList([nn.Parameter(torch.randn(4, 6))])
    optimizer = torch.optim.Adam(image, lr=0.05)
    driver.begin([net, image], optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        driver.backward(net(image[0]).square().mean() + 0.1 * (image[0][:, 1:] - image[0][:, :-1]).abs().mean())
        driver.step(optimizer)
        driver.update()
        image[0].data.clamp_(-1, 1)


@program
def second_order_meta_learning(driver):
    model = mlp(6, 12, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    driver.begin(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        outer = 0.0
        for (x, y), (u, v) in zip(batches(2), batches(2), strict=True):
            fast = dict(model.named_parameters())
            inner = functional.cross_entropy(functional_call(model, fast, (x,)), y)
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            outer = outer + functional.cross_entropy(functional_call(model, fast, (u,)), v)
        driver.backward(outer)
        driver.step(optimizer)
        driver.update()


# Averages ------------------------------------------------------------------------------------------------------------


@program
def averages_of_weights(driver):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    driver.begin(model, optimizer)
    swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in batches(5):
        optimizer.zero_grad()
        driver.backward(functional.cross_entropy(model(x), y))
        driver.step(optimizer)
        driver.update()
        swa.update_parameters(model)
        ema.update_parameters(model)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                shadow[name].mul_(0.99).add_(value, alpha=0.01)
    driver.see(*swa.parameters(), *ema.parameters(), *shadow.values())


@program
def lookahead_weights(driver):
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    driver.begin(model, optimizer)
    slow = [p.detach().clone() for p in model.parameters()]
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        driver.backward(functional.cross_entropy(model(x), y))
        driver.step(optimizer)
        driver.update()
        if number % 3 == 2:
            for before, param in zip(slow, model.parameters(), strict=True):
                before += 0.5 * (param.data - before)
                param.data.copy_(before)


@program
def momentum_encoder(driver):
    online, target = mlp(6, 12, 4), mlp(6, 12, 4)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    driver.begin([online, target], optimizer)
    for x, _ in batches():
        loss = 2 - 2 * functional.cosine_similarity(online(x), target(x + 0.1 * torch.randn_like(x)).detach()).mean()
        optimizer.zero_grad()
        driver.backward(loss)
        driver.step(optimizer)
        driver.update()
        for param, average in zip(online.parameters(), target.parameters(), strict=True):
            average.data = average.data * 0.9 + param.data * 0.1


# Reinforcement learning ----------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """As CleanRL has it: no ``forward`` at all."""

    def __init__(self):
        super().__init__()
        self.critic, self.actor = mlp(4, 16, 1), mlp(4, 16, 2)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        choice = torch.distributions.Categorical(logits=self.actor(x))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(x)


@program
def proximal_policies(driver):
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    driver.begin(agent, optimizer)
    for _ in range(2):
        seen = torch.randn(16, 4)
        with torch.no_grad():
            action, old, _, value = agent.get_action_and_value(seen)
            returns = torch.randn(16) + agent.get_value(seen).flatten()
        advantage = returns - value.flatten()
        for rows in torch.randperm(16).chunk(2):
            _, new, entropy, now = agent.get_action_and_value(seen[rows], action[rows])
            ratio = (new - old[rows]).exp()
            gain = torch.min(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows])
            optimizer.zero_grad()
            driver.backward(0.5 * (now.flatten() - returns[rows]).square().mean() - gain.mean() - 0.01 * entropy.mean())
            driver.unscale_(optimizer)
            driver.see(nn.utils.clip_grad_norm_(agent.parameters(), 0.5))
            driver.step(optimizer)
            driver.update()


@program
def actor_and_critic_with_an_optimizer_each(driver):
    actor, critic = mlp(4, 12, 2), mlp(6, 12, 1)
    for_actor, for_critic = (
        torch.optim.Adam(actor.parameters(), lr=1e-2),
        torch.optim.Adam(critic.parameters(), lr=1e-2),
    )
    driver.begin([actor, critic], for_actor, for_critic)
    for _ in range(4):
        state, action, value = torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 1)
        for_critic.zero_grad()
        driver.backward(functional.mse_loss(critic(torch.cat([state, action], 1)), value))
        driver.step(for_critic)
        for_critic.zero_grad()
        critic.requires_grad_(False)  # as deterministic policy gradients do
        driver.backward(-critic(torch.cat([state, actor(state).tanh()], 1)).mean())
        critic.requires_grad_(True)
        driver.step(for_actor)
        driver.update()
        for_actor.zero_grad()
