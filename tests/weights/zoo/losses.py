"""What programs do with what a model computes: losses, distributions, penalties; and the buffers that they write."""

import math

import torch
from torch import nn
from torch.distributions import Categorical, Gamma, Independent, Normal, kl_divergence
from torch.nn import functional

from .registry import data, indices, made, over, perceptron, registered, squared, weight

LOSSES = {}
program = registered(LOSSES)


# Losses and distributions -----------------------------------------------------------------------------------


@program
def zeros_are_normalised():
    """Rows of zeros, which FP16's own epsilon would divide by zero."""

    def forward(self, x):
        return functional.normalize(self.body(x), dim=-1) @ functional.normalize(self.classes, dim=-1).mT

    x = data(4, 8)
    x[1] = 0
    body = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU())
    return over(made(forward, body=body, classes=weight(5, 8)), x)


@program
def contrast():
    """CLIP: two towers, a scale that is learned, and products of what they find."""

    def forward(self, x, y):
        x, y = (out / out.norm(dim=-1, keepdim=True) for out in (self.one(x), self.two(y)))
        scores = self.scale.exp() * x @ y.t()
        return functional.cross_entropy(scores, torch.arange(4)) + functional.cross_entropy(scores.t(), torch.arange(4))

    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    model = made(forward, one=perceptron(8, 16, 6), two=nn.Linear(5, 6), scale=scale)
    return model, lambda: model(data(4, 8), data(4, 5))


@program
def angular_margin():
    """ArcFace: an angle between a feature and its class's weight."""

    def forward(self, x, labels):
        cosine = functional.linear(functional.normalize(self.body(x)), functional.normalize(self.classes))
        wider = torch.cos(cosine.clamp(-0.999, 0.999).acos() + 0.3)
        return functional.cross_entropy(16 * torch.where(functional.one_hot(labels, 5).bool(), wider, cosine), labels)

    model = made(forward, body=nn.Linear(8, 6), classes=weight(5, 6))
    return model, lambda: model(data(4, 8), indices(5, 4))


@program
def policy_gradient():
    def forward(self, x, actions):
        shares = self.actor(x).softmax(-1)
        policy = Categorical(probs=shares)
        value = self.critic(x).squeeze(-1)
        gain = (data(16) - value).detach()
        return -(policy.log_prob(actions) * gain).mean() - 0.01 * policy.entropy().mean() + value.square().mean()

    model = made(forward, actor=perceptron(6, 16, 4), critic=perceptron(6, 16, 1))
    return model, lambda: model(data(16, 6), indices(4, 16))


@program
def soft_actor():
    """A normal distribution that is squashed, with the logarithm of its density."""

    def forward(self, x):
        mean, log_std = self.body(x).chunk(2, dim=-1)
        policy = Normal(mean, log_std.clamp(-5, 2).exp())
        drawn = policy.rsample()
        density = policy.log_prob(drawn) - 2 * (math.log(2) - drawn - functional.softplus(-2 * drawn))
        return (0.2 * density.sum(-1) - self.critic(torch.cat([x, drawn.tanh()], dim=-1)).squeeze(-1)).mean()

    model = made(forward, body=perceptron(6, 16, 4), critic=perceptron(8, 16, 1))
    return model, lambda: model(data(16, 6))


@program
def gamma():
    def forward(self, x):
        distribution = Gamma(functional.softplus(self.shape(x)) + 0.5, self.rate.exp().mean(0))
        return distribution.rsample().log().mean() - distribution.log_prob(torch.ones(3)).mean()

    model = made(forward, shape=nn.Linear(6, 3), rate=weight(4, 3))
    return model, lambda: model(data(16, 6))


@program
def variational_autoencoder():
    def forward(self, x):
        mean, log_variance = self.down(x).chunk(2, dim=-1)
        encoded = Independent(Normal(mean, (0.5 * log_variance).exp()), 1)
        rest = kl_divergence(encoded, Independent(Normal(torch.zeros(3), torch.ones(3)), 1))
        entropy = functional.binary_cross_entropy_with_logits(self.up(encoded.rsample()), x.sigmoid(), reduction="sum")
        return entropy / len(x) + rest.mean()

    model = made(forward, down=perceptron(8, 16, 6), up=perceptron(3, 16, 8))
    return model, lambda: model(data(5, 8))


@program
def mixture_of_densities():
    def forward(self, x, aim):
        shares, means, log_stds = self.body(x).unflatten(-1, (3, 4)).unbind(1)
        log_probs = Normal(means, log_stds.exp()).log_prob(aim[:, None])
        return -torch.logsumexp(shares.log_softmax(-1) + log_probs, dim=-1).mean()

    model = made(forward, body=perceptron(6, 16, 12))
    return model, lambda: model(data(8, 6), data(8))


@program
def distances_to_centres():
    """A layer of k-means: by ``torch.cdist``, and by a product."""

    def forward(self, x):
        x = self.body(x)
        distances = torch.cdist(x, self.centres)
        square = x.square().sum(-1, keepdim=True) - 2 * x @ self.centres.mT + self.centres.square().sum(-1)
        return (distances * (-distances).softmax(-1)).sum(-1) + square.min(-1).values

    return over(made(forward, body=nn.Linear(6, 8), centres=weight(4, 8)), data(5, 6))


@program
def ctc():
    def forward(self, x, labels):
        states, _ = self.rnn(x)
        shares = self.head(states).log_softmax(-1)
        lengths = torch.full((3,), 12)
        return functional.ctc_loss(shares, labels, lengths, torch.tensor([4, 3, 2]), zero_infinity=True)

    model = made(forward, rnn=nn.GRU(6, 8, bidirectional=True), head=nn.Linear(16, 5))
    return model, lambda: model(data(12, 3, 6), indices(4, 3, 4) + 1)


@program
def penalty_on_slopes():
    """A gradient of a gradient."""
    model = made(lambda self, x: self.body(x), body=nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1)))
    x = data(4, 6).requires_grad_()

    def loss():
        out = model(x)
        (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        return out.float().mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return model, loss


@program
def hessian_of_weights():
    """AdaHessian's and HVP's pass: slopes of weights, times a vector, once more."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), data(4, 6)

    def loss():
        error = squared(model(x))
        slopes = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        return error + sum((slope * data(*slope.shape)).sum() for slope in slopes)

    return model, loss


@program
def gradients_reversed():
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, strength):
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.strength * gradient, None

    def forward(self, x):
        x = self.body(x)
        entropy = functional.cross_entropy(self.domain(Reversed.apply(x, 0.3)), torch.tensor([0, 1, 0, 1]))
        return functional.cross_entropy(self.labels(x), torch.tensor([0, 1, 2, 0])) + entropy

    model = made(forward, body=perceptron(6, 8, 8), labels=nn.Linear(8, 3), domain=nn.Linear(8, 2))
    return model, lambda: model(data(4, 6))


# Buffers ----------------------------------------------------------------------------------------------------


@program
def noise_schedule():
    """1 − ᾱ₀ is 1.0e-4, which is nothing where ᾱ is held in 16 bits."""

    def forward(self, x, noise, steps):
        kept = self.alphas[steps, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        predicted = self.body(torch.cat([noisy, steps[:, None] / 1000], dim=-1))
        return ((predicted - noise).square() / (1 - kept)).mean() * 1e-3

    alphas = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
    model = made(forward, body=perceptron(5, 16, 4), alphas=alphas)
    return model, lambda: model(data(6, 4), data(6, 4, seed=2), torch.tensor([0, 0, 1, 10, 500, 999]))


@program
def memory_bank():
    """Buffers that a forward pass writes: in rows, by scatter, by index, and as averages."""

    def forward(self, x, rows):
        x = self.body(x)
        with torch.no_grad():
            self.bank.index_put_((rows,), x.float(), accumulate=True)
            self.bank[rows[0]] = x[0]
            self.count.scatter_add_(0, rows, torch.ones(len(rows)))
            self.mean.lerp_(x.float().mean(0), 0.001)
        out = torch.zeros(7, 4).scatter(0, rows[:, None].expand(-1, 4), x.float())
        return (x @ self.bank.mT).logsumexp(-1).mean() + (x - self.mean).square().mean() + out.sum()

    model = made(forward, body=nn.Linear(6, 4), bank=data(7, 4), count=torch.zeros(7), mean=torch.zeros(4))
    return model, lambda: model(data(5, 6), torch.tensor([1, 3, 3, 0, 6]))


@program
def codebook():
    """VQ-VAE: the nearest row, straight through, and averages of what chose it."""

    def forward(self, x):
        x = self.down(x)
        chosen = torch.cdist(x.float(), self.codes).argmin(-1)
        codes = functional.embedding(chosen, self.codes)
        with torch.no_grad():
            hot = functional.one_hot(chosen, 6).float()
            self.codes.mul_(0.99).add_(hot.T @ x.float(), alpha=0.01)
        return self.up(x + (codes - x).detach()).square().mean() + 0.25 * (x - codes).square().mean()

    model = made(forward, down=nn.Linear(8, 4), up=nn.Linear(4, 8), codes=data(6, 4))
    return model, lambda: model(data(5, 8))


@program
def fourier_features():
    """Frequencies in a buffer, and SIREN's sines of what they give."""

    def forward(self, x):
        angles = 2 * math.pi * x @ self.frequencies.T
        hidden = torch.sin(30 * self.one(torch.cat([angles.sin(), angles.cos()], dim=-1)))
        return self.two(hidden)

    return over(made(forward, one=nn.Linear(12, 8), two=nn.Linear(8, 1), frequencies=10 * data(6, 2)), data(7, 2))
