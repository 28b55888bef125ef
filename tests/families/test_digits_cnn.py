"""digits_cnn: the data are what results were measured on, and the split leaks nothing."""

import hashlib

import pytest
import torch

# scikit-learn's digits are the 1797 test images of UCI's optdigits; the bytes as scikit-learn 1.9 gives them.
IMAGES_SHA256 = "20def7f70a702f0af9732fbba4375e147a7d54fe70d8c45569b8e7c1c7010c10"
LABELS_SHA256 = "a3c91c262eddcf7ba8f0e37507c30284493c9b20412ffe4af30d536401f7ba21"


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("digits_cnn")


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    return load_digits()


def test_the_data_are_the_ones_results_were_measured_on(digits):
    assert hashlib.sha256(digits.images.tobytes()).hexdigest() == IMAGES_SHA256
    assert hashlib.sha256(digits.target.astype("int64").tobytes()).hexdigest() == LABELS_SHA256


def test_the_split_is_a_partition_of_all_images(script, digits):
    train, train_labels, held_out, labels = script.load()
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
