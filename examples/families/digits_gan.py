"""Train a generative adversarial network (DCGAN) to draw handwritten digits, with two optimizers.

Data: the 1797 images of 8×8 that come with scikit-learn, enlarged to 16×16. A fixed permutation holds out 597 of them.
Judged by: the Fréchet distance of 6000 drawn digits from the held-out ones, between normal distributions fitted to the
hidden units of a small classifier, trained beforehand on the other images; lower is better. The training images
themselves lie at the distance printed first, 1.5, and untrained drawings beyond 500. Digits are drawn by a moving
average of the generator's weights. `--gp` adds a penalty on the critic's gradient at real images (R1).
In the paper (Micikevicius et al. 2018, section 4.5): DCGAN on CelebA faces, judged by eye.

Margin: 2.0 units, since it is a fifth of the distance, and little more than half of what one missing digit costs:
without their ones the training images lie 3.6 units further away. Three FP32 seeds gave 9.71, 10.00 and 9.90.

    python examples/families/digits_gan.py --seed 1 --gp
    mezzo compare --seeds 3 --margin 2.0 examples/families/digits_gan.py
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HELD_OUT_IMAGES = 597  # a third
DRAWN_IMAGES = 6000
BATCH_SIZE = 64
NOISE = 32
PENALTY = 1.0
AVERAGE = 0.99  # over some 100 steps: the two models chase each other, and one step's drawings lie at 8 or at 14


class Generator(nn.Module):
    """Noise to images of 16×16, pixels in [-1, 1]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(),  # (batch, 64, 4, 4)
            nn.ConvTranspose2d(64, 32, 4, 2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):  # (batch, 32)
        return self.layers(noise[:, :, None, None])


class Critic(nn.Module):
    """Images to one score each: high for real ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, padding=1), nn.LeakyReLU(0.2),  # (batch, 32, 8, 8)
            nn.Conv2d(32, 64, 4, 2, padding=1), nn.LeakyReLU(0.2),  # (batch, 64, 4, 4)
            nn.Flatten(), nn.Linear(64 * 4 * 4, 1),
        )  # fmt: skip

    def forward(self, images):
        return self.layers(images)[:, 0]


def load():
    """Return training images (1200, 1, 16, 16) and labels, then held-out ones; pixels in [-1, 1]."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 8.0 - 1.0).float().unsqueeze(1)
    images = functional.interpolate(images, (16, 16), mode="bilinear")
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    held_out, train = order[:HELD_OUT_IMAGES], order[HELD_OUT_IMAGES:]
    return images[train], labels[train], images[held_out], labels[held_out]


def features(classifier, images):
    """Return the classifier's hidden units (batch, 64) as float64."""
    pixels = images.flatten(1).double().cpu().numpy()
    return np.maximum(pixels @ classifier.coefs_[0] + classifier.intercepts_[0], 0.0)


def frechet_distance(a, b):
    """Return the squared Fréchet distance of normal distributions fitted to rows of features."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # The trace of a matrix's root is the sum of the roots of its eigenvalues, which are no less than 0 here.
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(min=0.0))
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2.0 * roots.sum())


def gradient_penalty(critic, images):
    """Return half the mean squared norm of the critic's gradient at the images (R1)."""
    images = images.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(images).sum(), images, create_graph=True)
    return 0.5 * gradient.flatten(1).square().sum(1).mean()


def draw(generator, count, device):
    """Return images, from noise that is the same for every seed."""
    generator.eval()
    noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(1797))
    with torch.no_grad():
        return torch.cat([generator(part.to(device)).cpu() for part in noise.split(500)])


def main():
    parser = argparse.ArgumentParser(description="Train a DCGAN to draw handwritten digits.")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and noise")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gp", action="store_true", help="add a gradient penalty")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels, held_out, _ = load()
    classifier = MLPClassifier((64,), random_state=0).fit(images.flatten(1).numpy(), labels.numpy())
    wanted = features(classifier, held_out)
    print(f"training images: Fréchet distance {frechet_distance(features(classifier, images), wanted):.2f}")

    torch.manual_seed(args.seed)
    images = images.to(device)
    generator, critic = Generator().to(device), Critic().to(device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9)) for model in (generator, critic)]
    averaged = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE), use_buffers=True)
    for step in range(1, args.steps + 1):
        real = images[torch.randint(len(images), (BATCH_SIZE,)).to(device)]
        drawn = generator(torch.randn(BATCH_SIZE, NOISE).to(device))
        critic_loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(drawn.detach())).mean()
        if args.gp:
            critic_loss = critic_loss + PENALTY * gradient_penalty(critic, real)
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()

        generator_loss = functional.softplus(-critic(drawn)).mean()
        optimizers[0].zero_grad()
        generator_loss.backward()
        optimizers[0].step()
        averaged.update_parameters(generator)
        if step % 100 == 0:
            print(f"step {step}: critic's loss {critic_loss.item():.4f}, generator's {generator_loss.item():.4f}")

    distance = frechet_distance(features(classifier, draw(averaged, DRAWN_IMAGES, device)), wanted)
    print(f"Fréchet distance {distance:.2f}")


if __name__ == "__main__":
    main()
