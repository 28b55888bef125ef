"""digits-cnn: the data are what they were, and the split leaks nothing."""

import hashlib
import sys

import pytest
import torch
from torch import nn

from mezzo.errors import UnsupportedError
from mezzo.recipes.digits_cnn import BATCH_SIZE, DIGITS_CNN, HELD_OUT_IMAGES, DigitsNet

# scikit-learn's digits are the 1797 test images of UCI's optdigits; the bytes as scikit-learn 1.9 gives them.
IMAGES_SHA256 = "20def7f70a702f0af9732fbba4375e147a7d54fe70d8c45569b8e7c1c7010c10"
LABELS_SHA256 = "a3c91c262eddcf7ba8f0e37507c30284493c9b20412ffe4af30d536401f7ba21"
SPLIT_SHA256 = "9ada3279f58cdbad322deeae97b47529c2e0b430573cdfcc880e5f01ab360da9"


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    return load_digits()


def test_the_data_are_the_ones_results_were_measured_on(digits):
    assert hashlib.sha256(digits.images.tobytes()).hexdigest() == IMAGES_SHA256
    assert hashlib.sha256(digits.target.astype("int64").tobytes()).hexdigest() == LABELS_SHA256
    assert DIGITS_CNN.load().sha256() == SPLIT_SHA256


def test_the_split_is_a_partition_of_all_images(digits):
    split = DIGITS_CNN.load()
    (train, train_labels), (held_out, labels) = split.train, split.held_out
    assert held_out.shape == (597, 1, 8, 8)
    assert train.shape == (1200, 1, 8, 8)
    both = torch.cat([held_out, train])[:, 0] * 16.0
    # the permutation of 1797 with seed 1797, whose head was written down once
    assert torch.equal(both[:4], torch.from_numpy(digits.images[[1202, 348, 222, 1637]]).float())
    rows = sorted((tuple(image.flatten().tolist()), int(label)) for image, label in
                  zip(both, torch.cat([labels, train_labels]), strict=True))  # fmt: skip
    wanted = sorted((tuple(image.ravel().tolist()), int(label)) for image, label in
                    zip(digits.images, digits.target, strict=True))  # fmt: skip
    assert rows == wanted
    assert labels.bincount().min() >= 45  # every digit is well represented among 597


def test_no_held_out_image_is_also_trained_on():
    split = DIGITS_CNN.load()
    trained = {tuple(image.flatten().tolist()) for image in split.train[0]}
    assert not any(tuple(image.flatten().tolist()) in trained for image in split.held_out[0])


def test_an_epoch_shows_no_image_twice_and_the_next_has_another_order():
    split = DIGITS_CNN.load()
    images = torch.arange(1200.0).view(-1, 1, 1, 1)
    numbered = type(split)(train=(images, split.train[1]), held_out=split.held_out)
    stream = DIGITS_CNN.batches(numbered, 0)
    per_epoch = 1200 // BATCH_SIZE
    first = torch.cat([next(stream)[0].flatten() for _ in range(per_epoch)])
    second = torch.cat([next(stream)[0].flatten() for _ in range(per_epoch)])
    assert len(first) == len(first.unique()) == per_epoch * BATCH_SIZE
    assert len(second.unique()) == per_epoch * BATCH_SIZE
    assert not torch.equal(first, second)


def test_labels_travel_with_their_images():
    split = DIGITS_CNN.load()
    answers = {tuple(i.flatten().tolist()): int(label) for i, label in zip(*split.train, strict=True)}
    images, labels = next(DIGITS_CNN.batches(split, 3))
    assert [answers[tuple(image.flatten().tolist())] for image in images] == labels.tolist()


def test_channels_are_multiples_of_eight():
    channels = [
        size
        for module in DigitsNet().modules()
        if isinstance(module, nn.Conv2d)
        for size in (module.in_channels, module.out_channels)
    ]
    assert [size for size in channels if size % 8] == [1]  # the gray images themselves


class Fixed(nn.Module):
    """Answers from a table, whatever the images."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, images):
        return self.scores


def test_accuracy_counts_right_answers_and_takes_nan_for_none():
    split = DIGITS_CNN.load()
    labels = split.held_out[1]
    scores = nn.functional.one_hot(labels, 10).float()
    with torch.no_grad():
        assert DIGITS_CNN.evaluate(Fixed(scores), split) == pytest.approx(100.0)
        scores[:100] = scores[:100].roll(1, dims=1)
        assert DIGITS_CNN.evaluate(Fixed(scores), split) == pytest.approx(100.0 * 497 / HELD_OUT_IMAGES)
        assert DIGITS_CNN.evaluate(Fixed(torch.full_like(scores, torch.nan)), split) == 0.0


def test_the_reference_is_the_best_constant_answer():
    split = DIGITS_CNN.load()
    with torch.no_grad():
        constant = [
            DIGITS_CNN.evaluate(Fixed(nn.functional.one_hot(torch.full((597,), digit), 10).float()), split)
            for digit in range(10)
        ]
    assert DIGITS_CNN.references(split)["commonest digit"] == pytest.approx(max(constant))


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError) as error:
        DIGITS_CNN.load()
    text = str(error.value)
    assert text.startswith("the recipe digits-cnn needs scikit-learn\n  why    ")
    assert text.endswith('\n  write  pip install "num2words>=0.5.13" "scikit-learn>=1.4"')
