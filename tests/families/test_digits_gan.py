"""digits_gan: the split, the Fréchet distance, the classifier behind it, and the gradient penalty."""

import numpy as np
import pytest
import scipy.linalg
import torch


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


def test_the_penalty_reaches_every_weight_of_the_critic_that_shapes_its_gradient(script):
    torch.manual_seed(0)
    critic = script.Critic().double()
    images = torch.randn(4, 1, 16, 16, dtype=torch.float64)
    weight = critic.layers[2].weight
    script.gradient_penalty(critic, images).backward()
    index, step = (5, 3, 1, 2), 1e-5
    nearby = []
    for moved in (step, -2 * step):
        with torch.no_grad():
            weight[index] += moved
        nearby.append(script.gradient_penalty(critic, images).item())
    slope = (nearby[0] - nearby[1]) / (2 * step)
    assert weight.grad[index].item() == pytest.approx(slope, rel=1e-3)
