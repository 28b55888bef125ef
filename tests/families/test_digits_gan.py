"""digits_gan: the split, the Fréchet distance, the classifier behind it, and the gradient penalty."""

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("digits_gan")


@pytest.fixture(scope="module")
def data(script):
    return script.load()


def test_frechet_distance_agrees_with_scipys_matrix_root(script):
    rng = np.random.default_rng(0)
    for size_b in (300, 40):
        a = rng.normal(size=(200, 12)) @ rng.normal(size=(12, 12))
        b = rng.normal(size=(size_b, 12)) @ rng.normal(size=(12, 12)) + rng.normal(size=12)
        cov_a, cov_b = np.cov(a.T), np.cov(b.T)
        root = scipy.linalg.sqrtm(cov_a @ cov_b).real
        wanted = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a + cov_b - 2 * root)
        assert script.frechet_distance(a, b) == pytest.approx(wanted, rel=1e-9)


def test_features_are_the_hidden_units_that_the_classifier_decides_by(script, data, classifier):
    hidden = script.features(classifier, data[2])
    assert hidden.dtype == np.float64
    assert hidden.shape == (597, 64)
    scores = hidden @ classifier.coefs_[1] + classifier.intercepts_[1]
    assert np.array_equal(scores.argmax(1), classifier.predict(data[2].flatten(1).numpy()))
    assert (scores.argmax(1) == data[3].numpy()).mean() > 0.95


def test_the_distance_tells_real_digits_from_worse_ones(script, data, classifier):
    images, labels, held_out, _ = data
    wanted = script.features(classifier, held_out)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    floor, no_ones, noisy, only_threes = (
        script.frechet_distance(script.features(classifier, drawn), wanted)
        for drawn in (images, images[labels != 1], images + 0.5 * noise, images[labels == 3])
    )
    assert 0.0 < floor < 2.0
    assert 2.0 + floor < no_ones < noisy < only_threes / 10  # one digit never drawn costs more than the margin


class Sums(nn.Module):
    """A critic with a gradient known by hand: 2·weight·pixel at each pixel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, images):
        return self.weight * images.square().flatten(1).sum(1)


def test_the_penalty_is_half_the_mean_squared_norm_of_the_gradient(script):
    critic = Sums()
    images = torch.tensor([[1.0, 2.0], [0.0, 3.0]]).view(2, 1, 1, 2)
    penalty = script.gradient_penalty(critic, images)
    squared_norms = (36 * (1 + 4), 36 * 9)  # (2·3·pixel)², summed over the pixels of each image
    assert penalty.item() == pytest.approx(sum(squared_norms) / 2 / 2)
    penalty.backward()
    assert critic.weight.grad.item() == pytest.approx(2 * penalty.item() / 3)  # it grows as weight²
    assert images.grad is None


def test_the_penalty_reaches_every_weight_of_the_critic_that_shapes_its_gradient(script):
    torch.manual_seed(0)
    critic = script.Critic().double()
    images = torch.randn(4, 1, 16, 16, dtype=torch.float64)
    weight = critic.layers[2].weight
    script.gradient_penalty(critic, images).backward()
    place, step = (5, 3, 1, 2), 1e-5
    nearby = []
    for moved in (step, -2 * step):
        with torch.no_grad():
            weight[place] += moved
        nearby.append(script.gradient_penalty(critic, images).item())
    slope = (nearby[0] - nearby[1]) / (2 * step)
    assert weight.grad[place].item() == pytest.approx(slope, rel=1e-3)
